//! One run of the model: what is planned and allocated for a number of tokens, and the recording of a call.

use crate::Result;
use crate::model::{Model, Norm};
use wgpu_attention::wgpu::util::DeviceExt;
use wgpu_attention::{
    ElementType, Gpu, KvCache, KvCacheConfig, LayerArguments, LayerPlan, LayerShape, Linear,
    LinearProblem, Tensor, TensorView, wgpu,
};

/// The model planned for a number of tokens at once, and the memory between the dispatches. Everything that a call needs
/// is made here: recording one makes nothing.
pub(crate) struct Pass {
    pub(crate) tokens: usize,
    /// Of the last so many tokens there are logits.
    pub(crate) rows: usize,
    /// The first position, then the tokens.
    pub(crate) input: Tensor,
    pub(crate) logits: Tensor,
    pub(crate) next: Tensor,
    pub(crate) normed: TensorView,
    pub(crate) y: TensorView,
    pub(crate) hidden: TensorView,
    pub(crate) last: TensorView,
    pub(crate) attention: LayerPlan,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) head: Linear,
    pub(crate) embed: wgpu::BindGroup,
    pub(crate) norms: Vec<[wgpu::BindGroup; 2]>,
    pub(crate) final_norm: wgpu::BindGroup,
    pub(crate) gelu: wgpu::BindGroup,
    pub(crate) add: wgpu::BindGroup,
    pub(crate) argmax: wgpu::BindGroup,
}

impl Pass {
    pub(crate) fn new(
        model: &Model,
        tokens: usize,
        rows: usize,
        cache: Option<&KvCacheConfig>,
    ) -> Result<Self> {
        let (gpu, kernels, width) = (&model.gpu, &model.kernels, model.width);
        let (inner, size) = (model.blocks[0].up.d_out(), model.vocabulary.size());
        let tensor = |tokens, width| Tensor::empty(gpu, &[1, tokens, width], ElementType::F32);
        let linear = |tokens, d_in, d_out| {
            let problem = LinearProblem {
                batch: 1,
                tokens,
                d_in,
                d_out,
                few: None,
                form: None,
            };
            Linear::new(gpu, problem)
        };
        let shape = match cache {
            Some(cache) => LayerShape::cached(cache, tokens),
            None => LayerShape::new(1, tokens),
        };
        let (x, y) = (tensor(tokens, width)?, tensor(tokens, width)?);
        let (normed, hidden) = (tensor(tokens, width)?, tensor(tokens, inner)?);
        let (last, logits) = (tensor(rows, width)?, tensor(rows, size)?);
        let input = Tensor::empty(gpu, &[1 + tokens], ElementType::U32)?;
        let next = Tensor::empty(gpu, &[1], ElementType::U32)?;

        let norm = |norm: &Norm, first_row: usize, to: &Tensor| {
            let buffers = [
                norm.weight.buffer(),
                norm.bias.buffer(),
                x.buffer(),
                to.buffer(),
            ];
            kernels
                .layer_norm
                .bind(gpu, [width as u32, first_row as u32, 0], &buffers)
        };
        let blocks = model.blocks.iter();
        let positions = model.positions.as_ref();
        let embeddings = [&model.embeddings, positions.unwrap_or(&model.embeddings)];
        let [wte, wpe] = embeddings.map(TensorView::buffer);
        let option = u32::from(positions.is_some());
        Ok(Pass {
            // One plan serves all layers: they differ in their weights only.
            attention: model.blocks[0].attention.plan(shape)?,
            up: linear(tokens, width, inner)?,
            down: linear(tokens, inner, width)?,
            head: linear(rows, width, size)?,
            norms: blocks
                .map(|block| [&block.ln_1, &block.ln_2].map(|own| norm(own, 0, &normed)))
                .collect(),
            final_norm: norm(&model.ln_f, tokens - rows, &last),
            embed: kernels.embed.bind(
                gpu,
                [width as u32, 0, option],
                &[input.buffer(), wte, wpe, x.buffer()],
            ),
            gelu: kernels.gelu.bind(
                gpu,
                [inner as u32, 0, u32::from(model.gelu_tanh)],
                &[hidden.buffer()],
            ),
            add: kernels
                .add
                .bind(gpu, [width as u32, 0, 0], &[y.buffer(), x.buffer()]),
            argmax: kernels.argmax.bind(
                gpu,
                [size as u32, 0, 0],
                &[logits.buffer(), next.buffer()],
            ),
            tokens,
            rows,
            input,
            logits,
            next,
            normed: normed.view(),
            y: y.view(),
            hidden: hidden.view(),
            last: last.view(),
        })
    }

    /// What the next submission reads.
    pub(crate) fn write_input(&self, position: usize, tokens: &[u32]) -> Result<()> {
        Ok(self.input.write(&[&[position as u32], tokens].concat())?)
    }

    pub(crate) fn encode(
        &self,
        model: &Model,
        mut caches: Option<&mut [KvCache]>,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<()> {
        let kernels = &model.kernels;
        let (tokens, width) = (self.tokens, model.width);
        kernels.embed.encode(encoder, &self.embed, width, tokens);
        for (number, (block, [ln_1, ln_2])) in model.blocks.iter().zip(&self.norms).enumerate() {
            // Attention, of the crate.
            kernels.layer_norm.encode(encoder, ln_1, 1, tokens);
            let (layer, call) = (&block.attention, LayerArguments::new(&self.normed, &self.y));
            match caches.as_deref_mut() {
                Some(caches) => {
                    layer.encode_cached(
                        encoder,
                        &self.attention,
                        &mut caches[number],
                        None,
                        call,
                    )?;
                }
                None => layer.encode(encoder, &self.attention, call)?,
            }
            kernels.add.encode(encoder, &self.add, width, tokens);
            // Two projections of the crate, and what the application has between them.
            kernels.layer_norm.encode(encoder, ln_2, 1, tokens);
            block
                .up
                .encode(encoder, &self.up, &self.normed, &self.hidden)?;
            kernels
                .gelu
                .encode(encoder, &self.gelu, block.up.d_out(), tokens);
            block
                .down
                .encode(encoder, &self.down, &self.hidden, &self.y)?;
            kernels.add.encode(encoder, &self.add, width, tokens);
        }
        kernels
            .layer_norm
            .encode(encoder, &self.final_norm, 1, self.rows);
        model
            .head
            .encode(encoder, &self.head, &self.last, &self.logits.view())?;
        if self.rows == 1 {
            kernels.argmax.encode(encoder, &self.argmax, 1, 1);
        }
        Ok(())
    }
}

/// Invocations of a workgroup of `kernels.wgsl`.
const LANES: usize = 64;

pub(crate) struct Kernels {
    pub(crate) embed: Kernel,
    pub(crate) layer_norm: Kernel,
    pub(crate) gelu: Kernel,
    pub(crate) add: Kernel,
    pub(crate) argmax: Kernel,
}

pub(crate) struct Kernel(wgpu::ComputePipeline);

impl Kernels {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        let module = device.create_shader_module(wgpu::include_wgsl!("kernels.wgsl"));
        let kernel = |entry_point| {
            Kernel(
                device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                    label: Some(entry_point),
                    layout: None,
                    module: &module,
                    entry_point: Some(entry_point),
                    compilation_options: Default::default(),
                    cache: None,
                }),
            )
        };
        Kernels {
            embed: kernel("embed"),
            layer_norm: kernel("layer_norm"),
            gelu: kernel("gelu"),
            add: kernel("add"),
            argmax: kernel("argmax"),
        }
    }
}

impl Kernel {
    /// `[width, first_row, option]`, and the buffers of bindings 1, 2, ...
    pub(crate) fn bind(
        &self,
        gpu: &Gpu,
        params: [u32; 3],
        buffers: &[&wgpu::Buffer],
    ) -> wgpu::BindGroup {
        let [width, first_row, option] = params;
        let params = gpu
            .device()
            .create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: Some("parameters"),
                contents: bytemuck::cast_slice(&[width, first_row, option, 0]),
                usage: wgpu::BufferUsages::UNIFORM,
            });
        let entries: Vec<_> = [&params]
            .iter()
            .chain(buffers)
            .zip(0..)
            .map(|(buffer, binding)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            })
            .collect();
        gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.0.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    /// Workgroups for that many channels, a row of them for each row.
    pub(crate) fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        bind_group: &wgpu::BindGroup,
        channels: usize,
        rows: usize,
    ) {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&self.0);
        pass.set_bind_group(0, bind_group, &[]);
        pass.dispatch_workgroups(channels.div_ceil(LANES) as u32, rows as u32, 1);
    }
}
