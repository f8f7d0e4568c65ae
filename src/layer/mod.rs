//! The multi-head attention layer: fused QKV projection, attention, output projection.
//!
//! ```text
//! x (B, T, d_in) --linear--> (B, T, q|k|v) --attention--> (B, T, H*D) --linear--> y (B, T, d_out)
//! ```
//!
//! Three dispatches. q, k and v are strided views of what the first one wrote, and the heads lie side by side
//! in what the second one wrote: nothing is transposed or copied between them.
//!
//! Objects by lifetime: [`MultiHeadAttention`] once, [`LayerPlan`] per shape, and per call
//! [`MultiHeadAttention::encode`].

mod plan;
mod weights;

pub use plan::{LayerPlan, Step};
pub use weights::{HeadProjections, LayerWeights, MatrixLayout, Projection, QkvWeights};

use crate::attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules, RuleArguments,
};
use crate::element::ElementType;
use crate::gpu::{Gpu, Timestamps};
use crate::kernels::Form;
use crate::linear::{Linear, LinearArguments, LinearProblem};
use crate::operands::{check_operands, expect_contiguous_last};
use crate::tensor::{Tensor, TensorView, elements, shape_text};
use crate::{Error, Result};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerConfig {
    /// Channels of x.
    pub d_in: usize,
    /// Channels of y, and of all heads together.
    pub d_out: usize,
    /// Heads; they divide `d_out`.
    pub heads: usize,
    /// Whether a token sees only itself and the tokens before it.
    pub causal: bool,
    /// What the products q.k are multiplied with; `None` is `1/sqrt(d_out / heads)`.
    pub scale: Option<f32>,
    /// The form of the kernels; `None` leaves it to the planner.
    pub form: Option<Form>,
}

impl LayerConfig {
    /// A layer that is not causal, with the default scale.
    pub fn new(d_in: usize, d_out: usize, heads: usize) -> Self {
        LayerConfig {
            d_in,
            d_out,
            heads,
            causal: false,
            scale: None,
            form: None,
        }
    }

    /// Causal or not.
    pub fn causal(self, causal: bool) -> Self {
        LayerConfig { causal, ..self }
    }

    /// Channels of a head.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if a size is 0, or the heads do not divide `d_out`, or the scale is not finite.
    pub fn head_dim(&self) -> Result<usize> {
        for (name, value) in [
            ("d_in", self.d_in),
            ("d_out", self.d_out),
            ("heads", self.heads),
        ] {
            if value == 0 {
                return Err(Error::parameter(name, 0, "must be at least 1"));
            }
        }
        if !self.d_out.is_multiple_of(self.heads) {
            return Err(Error::parameter(
                "d_out",
                self.d_out,
                format!("must be a multiple of heads = {}", self.heads),
            ));
        }
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(Error::parameter("scale", scale, "must be finite"));
        }
        Ok(self.d_out / self.heads)
    }
}

/// A dense matrix on the GPU.
#[derive(Clone)]
struct DenseTensor {
    weight: TensorView,
    bias: Option<TensorView>,
}

/// A multi-head attention layer whose weights are on a GPU. Cheap to clone, `Send + Sync`.
#[derive(Clone)]
pub struct MultiHeadAttention {
    gpu: Gpu,
    config: LayerConfig,
    head_dim: usize,
    qkv: DenseTensor,
    output: Option<DenseTensor>,
    /// The plan of the shape that [`forward`](Self::forward) saw last.
    last: Arc<Mutex<Option<LayerPlan>>>,
}

impl fmt::Debug for MultiHeadAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiHeadAttention")
            .field("gpu", &self.gpu)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// The operands of a layer's call.
#[derive(Clone, Copy, Debug)]
pub struct LayerArguments<'a> {
    /// `(B, T, d_in)`, f32, any strides.
    pub x: &'a TensorView,
    /// `(B, T)`, bool: false hides the token from every query (it is still computed itself). Given exactly if the plan says so.
    pub key_mask: Option<&'a TensorView>,
    /// `(B, T, d_out)`, f32, overwritten. May share a buffer with x, which was read before. Without an output
    /// projection its last axis is contiguous, and it may not share a buffer with the mask.
    pub y: &'a TensorView,
}

impl MultiHeadAttention {
    /// Uploads the weights, in whatever form they come.
    ///
    /// ```
    /// # use wgpu_attention::*;
    /// # fn layer(gpu: &Gpu, c_attn: &[f32], c_attn_b: &[f32], c_proj: &[f32], c_proj_b: &[f32]) -> Result<()> {
    /// // A layer of GPT-2 small, as its checkpoint keeps it.
    /// let layer = MultiHeadAttention::new(
    ///     gpu,
    ///     LayerConfig::new(768, 768, 12).causal(true),
    ///     &LayerWeights {
    ///         qkv: QkvWeights::Fused(Projection::conv1d(c_attn).with_bias(c_attn_b)),
    ///         output: Some(Projection::conv1d(c_proj).with_bias(c_proj_b)),
    ///     },
    /// )?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] as [`LayerConfig::head_dim`]; [`Error::Shape`] naming the weight whose size is
    /// not what the configuration calls for; [`Error::LimitExceeded`] if a head or a weight is too large for
    /// this device; [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, config: LayerConfig, weights: &LayerWeights) -> Result<Self> {
        Self::check(gpu, &config)?;
        let upload = |dense: weights::Dense, out: usize, d_in: usize| -> Result<DenseTensor> {
            let weight = Tensor::from_slice(gpu, &[out, d_in], &dense.weight)?;
            let bias = dense
                .bias
                .map(|bias| Tensor::from_slice(gpu, &[out], &bias));
            Ok(DenseTensor {
                weight: weight.view(),
                bias: bias.transpose()?.map(|bias| bias.view()),
            })
        };
        let LayerConfig {
            d_in, d_out, heads, ..
        } = config;
        let qkv = upload(weights.fuse_qkv(d_in, d_out, heads)?, 3 * d_out, d_in)?;
        let output = weights.dense_output(d_out)?;
        let output = output
            .map(|dense| upload(dense, d_out, d_out))
            .transpose()?;
        Self::build(gpu, config, qkv, output)
    }

    /// A layer over weights that are on the GPU already. Nothing is copied.
    ///
    /// `qkv` is `(3 * d_out, d_in)` with a bias `(3 * d_out)` or none, `output` is `(d_out, d_out)` with a
    /// bias `(d_out)` or none; all f32. A `(d_in, out)` matrix is passed as its permuted view.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Type`], [`Error::OtherDevice`].
    pub fn from_tensors(
        gpu: &Gpu,
        config: LayerConfig,
        qkv: (TensorView, Option<TensorView>),
        output: Option<(TensorView, Option<TensorView>)>,
    ) -> Result<Self> {
        Self::check(gpu, &config)?;
        let check = |name: &str, dense: (TensorView, Option<TensorView>), out, d_in| {
            let (weight, bias) = dense;
            let named = |part: &str| format!("{name} {part}");
            weight.expect_shape(&named("weight"), &[out, d_in])?;
            weight.expect_type(&named("weight"), ElementType::F32)?;
            weight.expect_gpu(&named("weight"), gpu)?;
            if let Some(bias) = &bias {
                bias.expect_shape(&named("bias"), &[out])?;
                expect_contiguous_last(&named("bias"), bias)?;
                bias.expect_type(&named("bias"), ElementType::F32)?;
                bias.expect_gpu(&named("bias"), gpu)?;
            }
            Ok(DenseTensor { weight, bias })
        };
        let LayerConfig { d_in, d_out, .. } = config;
        let qkv = check("qkv", qkv, 3 * d_out, d_in)?;
        let output = output
            .map(|dense| check("output", dense, d_out, d_out))
            .transpose()?;
        Self::build(gpu, config, qkv, output)
    }

    /// What must hold before anything is allocated.
    fn check(gpu: &Gpu, config: &LayerConfig) -> Result<()> {
        let head_dim = config.head_dim()?;
        if config.d_out.checked_mul(3).is_none() {
            return Err(Error::parameter(
                "d_out",
                config.d_out,
                "3 * d_out must fit a machine word",
            ));
        }
        // A head that no kernel takes, or a weight that cannot be bound, is refused now, not at the first call.
        let capabilities = gpu.capabilities();
        let attention = AttentionProblem {
            form: config.form,
            ..AttentionProblem::new(1, config.heads, 1, head_dim)
        };
        attention.plan(capabilities)?;
        let available = capabilities.max_binding_bytes;
        for (name, shape) in [
            ("the qkv weight", [3 * config.d_out, config.d_in]),
            ("the output weight", [config.d_out, config.d_out]),
        ] {
            let needed = elements(name, &shape)? * ElementType::F32.size();
            if needed > available {
                let limit = "max_storage_buffer_binding_size";
                return Err(Error::limit_bytes(name, limit, needed, available));
            }
        }
        Ok(())
    }

    fn build(
        gpu: &Gpu,
        config: LayerConfig,
        qkv: DenseTensor,
        output: Option<DenseTensor>,
    ) -> Result<Self> {
        Ok(MultiHeadAttention {
            gpu: gpu.clone(),
            config,
            head_dim: config.head_dim()?,
            qkv,
            output,
            last: Default::default(),
        })
    }

    /// What the layer is.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// The GPU it is on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Plans and compiles the layer for `batch` items of `tokens` tokens, and allocates what lies between its
    /// dispatches: `(3 + 1) * B * T * d_out` f32 at most, nothing of size T x T.
    ///
    /// `masked` says whether calls will come with a key mask.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] for what does not fit the device, before anything is allocated;
    /// [`Error::OutOfMemory`], [`Error::Shader`], [`Error::DeviceLost`].
    pub fn plan(&self, batch: usize, tokens: usize, masked: bool) -> Result<LayerPlan> {
        let LayerConfig {
            d_in,
            d_out,
            heads,
            form,
            ..
        } = self.config;
        let linear = |d_in, d_out| {
            Linear::new(
                &self.gpu,
                LinearProblem {
                    batch,
                    tokens,
                    d_in,
                    d_out,
                    form,
                },
            )
        };
        let attention = AttentionProblem {
            rules: AttentionRules {
                scale: self.config.scale,
                causal: self.config.causal,
                alignment: Some(Alignment::TopLeft),
                mask: masked,
                ..Default::default()
            },
            form,
            ..AttentionProblem::new(batch, heads, tokens, self.head_dim)
        };
        self.check_bindings(batch, tokens)?;
        let qkv_projection = linear(d_in, 3 * d_out)?;
        let attention = Attention::new(&self.gpu, attention)?;
        let output_projection = self
            .output
            .as_ref()
            .map(|_| linear(d_out, d_out))
            .transpose()?;
        // Everything fits: now memory.
        let tensor =
            |channels| Tensor::empty(&self.gpu, &[batch, tokens, channels], ElementType::F32);
        Ok(LayerPlan {
            config: self.config,
            batch,
            tokens,
            masked,
            qkv_projection,
            attention,
            output_projection,
            qkv: tensor(3 * d_out)?,
            context: self.output.as_ref().map(|_| tensor(d_out)).transpose()?,
        })
    }

    /// The largest thing a call binds is q, k and v of all tokens together.
    fn check_bindings(&self, batch: usize, tokens: usize) -> Result<()> {
        let widest = self.config.d_in.max(3 * self.config.d_out);
        let needed =
            crate::tensor::elements("batch * tokens * channels", &[batch, tokens, widest])? * 4;
        let available = self.gpu.capabilities().max_binding_bytes;
        if needed > available {
            return Err(Error::limit_bytes(
                format!("q, k and v of a batch of {batch} x {tokens} tokens, {widest} channels"),
                "max_storage_buffer_binding_size",
                needed,
                available,
            ));
        }
        Ok(())
    }

    /// Records a call into the caller's encoder: submits nothing, waits for nothing, allocates nothing on the
    /// GPU unless views are laid out as never before (then parameter buffers of about 100 bytes).
    ///
    /// Any number of calls, of this layer and others, may be recorded before one submit.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`] for operands that do not
    /// fit the plan.
    pub fn encode(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        arguments: LayerArguments<'_>,
    ) -> Result<()> {
        self.encode_timed(encoder, plan, arguments, None)
    }

    /// [`encode`](Self::encode), with timestamps around each dispatch, under the name of its [`Step`]. Where there
    /// is nothing to compute there is no dispatch and no span.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode), and [`Error::LimitExceeded`] where the timestamps have no room left.
    pub fn encode_timed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        arguments: LayerArguments<'_>,
        mut timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        self.check_arguments(plan, &arguments)?;
        if let Some(timestamps) = &timestamps {
            let steps = plan.steps();
            timestamps.expect_room(steps.iter().filter(|(_, step)| step.grid.is_some()).count())?;
        }
        for (step, _) in plan.steps() {
            self.encode_step(encoder, plan, step, arguments, timestamps.as_deref_mut())?;
        }
        Ok(())
    }

    /// Records one dispatch of a call. All steps of [`LayerPlan::steps`] in order are the call.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode); [`Error::Parameter`] for an output projection that the layer does not have.
    pub fn encode_step(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        plan: &LayerPlan,
        step: Step,
        arguments: LayerArguments<'_>,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        self.check_arguments(plan, &arguments)?;
        let LayerArguments { x, key_mask, y } = arguments;
        let LayerConfig { d_out, heads, .. } = self.config;
        let label = &step.to_string();
        match step {
            Step::QkvProjection => plan.qkv_projection.encode_timed(
                encoder,
                LinearArguments {
                    x,
                    weight: &self.qkv.weight,
                    bias: self.qkv.bias.as_ref(),
                    y: &plan.qkv.view(),
                },
                label,
                timestamps,
            ),
            Step::Attention => {
                let part = |number: usize| {
                    let columns = number * d_out..(number + 1) * d_out;
                    plan.qkv
                        .view()
                        .slice(2, columns)?
                        .split_axis(2, &[heads, self.head_dim])
                };
                let mask = key_mask
                    .map(|mask| mask.split_axis(0, &[plan.batch, 1, 1]))
                    .transpose()?;
                let context = plan.context.as_ref().map(Tensor::view);
                let out = context.as_ref().unwrap_or(y);
                plan.attention.encode_timed(
                    encoder,
                    AttentionArguments {
                        rules: RuleArguments {
                            mask: mask.as_ref(),
                            ..Default::default()
                        },
                        ..AttentionArguments::new(
                            &part(0)?,
                            &part(1)?,
                            &part(2)?,
                            &out.split_axis(2, &[heads, self.head_dim])?,
                        )
                    },
                    label,
                    timestamps,
                )
            }
            Step::OutputProjection => {
                let (Some(projection), Some(output), Some(context)) =
                    (&plan.output_projection, &self.output, &plan.context)
                else {
                    return Err(Error::parameter(
                        "step",
                        step,
                        "this layer has no output projection",
                    ));
                };
                projection.encode_timed(
                    encoder,
                    LinearArguments {
                        x: &context.view(),
                        weight: &output.weight,
                        bias: output.bias.as_ref(),
                        y,
                    },
                    label,
                    timestamps,
                )
            }
        }
    }

    /// Everything about a call that could be wrong, before its first dispatch is recorded.
    fn check_arguments(&self, plan: &LayerPlan, arguments: &LayerArguments<'_>) -> Result<()> {
        let LayerArguments { x, key_mask, y } = arguments;
        let LayerPlan { batch, tokens, .. } = *plan;
        let LayerConfig { d_in, d_out, .. } = self.config;
        plan.qkv.view().expect_gpu("plan", &self.gpu)?;
        // Another layer's plan does as well, if that layer differs in nothing but its weights.
        let with = |output| if output { "with" } else { "without" };
        let (planned, present) = (plan.output_projection.is_some(), self.output.is_some());
        if plan.config != self.config || planned != present {
            return Err(Error::parameter(
                "plan",
                format!("{:?} {} output projection", plan.config, with(planned)),
                format!(
                    "must be made for this layer, {:?} {} output projection",
                    self.config,
                    with(present)
                ),
            ));
        }
        x.expect_shape("x", &[batch, tokens, d_in])?;
        x.expect_type("x", ElementType::F32)?;
        x.expect_gpu("x", &self.gpu)?;
        y.expect_shape("y", &[batch, tokens, d_out])?;
        y.expect_type("y", ElementType::F32)?;
        y.expect_gpu("y", &self.gpu)?;
        match (plan.masked, key_mask) {
            (true, Some(mask)) => {
                mask.expect_shape("key_mask", &[batch, tokens])?;
                mask.expect_type("key_mask", ElementType::Bool)?;
                mask.expect_gpu("key_mask", &self.gpu)?;
            }
            (false, None) => {}
            (planned, _) => {
                let word = |there| if there { "a key mask" } else { "no key mask" };
                return Err(Error::shape(
                    "key_mask",
                    format!("{} as planned", word(planned)),
                    word(!planned),
                ));
            }
        }
        // What the dispatch that writes y reads besides what lies in the plan. (x was read two dispatches before.)
        let weight = self.output.as_ref().map(|output| &output.weight);
        let bias = self.output.as_ref().and_then(|output| output.bias.as_ref());
        let inputs = match weight {
            Some(_) => [
                ("output weight", weight),
                ("output bias", bias),
                ("mask", None),
            ],
            None => [("mask", *key_mask), ("", None), ("", None)],
        };
        check_operands(&self.gpu, &inputs, &[("y", y)])?;
        if let Some(mask) = key_mask {
            expect_contiguous_last("key_mask", mask)?;
        }
        if weight.is_none() {
            expect_contiguous_last("y", y)?;
        }
        Ok(())
    }

    /// Computes y `(B, T, d_out)` from x `(B, T, d_in)` into a new tensor and submits; does not wait for the
    /// result. Plans on the first call of a shape and keeps that plan until the shape changes.
    ///
    /// Off the web, a caller who never reads a result is held back once 32 submissions are unfinished.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan) and [`encode`](Self::encode).
    pub fn forward(&self, x: &Tensor, key_mask: Option<&Tensor>) -> Result<Tensor> {
        let &[batch, tokens, d_in] = x.shape() else {
            return Err(Error::shape(
                "x",
                format!("(B, T, {})", self.config.d_in),
                shape_text(x.shape()),
            ));
        };
        if d_in != self.config.d_in {
            return Err(Error::shape(
                "x",
                format!("(B, T, {})", self.config.d_in),
                shape_text(x.shape()),
            ));
        }
        let plan = self.plan_for(batch, tokens, key_mask.is_some())?;
        let y = Tensor::empty(
            &self.gpu,
            &[batch, tokens, self.config.d_out],
            ElementType::F32,
        )?;
        let mask = key_mask.map(Tensor::view);
        let arguments = LayerArguments {
            x: &x.view(),
            key_mask: mask.as_ref(),
            y: &y.view(),
        };
        self.gpu
            .record_and_submit(|encoder| self.encode(encoder, &plan, arguments))?;
        Ok(y)
    }

    /// The kept plan if it is for this shape, or a new one, which is then kept.
    fn plan_for(&self, batch: usize, tokens: usize, masked: bool) -> Result<LayerPlan> {
        let kept = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let fits =
            |plan: &LayerPlan| (plan.batch, plan.tokens, plan.masked) == (batch, tokens, masked);
        {
            let mut last = kept();
            if let Some(plan) = last.as_ref().filter(|plan| fits(plan)) {
                return Ok(plan.clone());
            }
            // The old workspace goes before the new one comes.
            *last = None;
        }
        // Planned outside the lock: compiling may take a second, and others may come with the shape they had.
        let plan = self.plan(batch, tokens, masked)?;
        *kept() = Some(plan.clone());
        Ok(plan)
    }

    /// Uploads x `(B, T, d_in)` in row-major order, computes, and reads y `(B, T, d_out)` back.
    ///
    /// `key_mask` is `(B, T)`: false hides the token from every query.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if a slice has not as many values as `batch` and `tokens` call for, and as
    /// [`forward`](Self::forward).
    pub async fn forward_host(
        &self,
        x: &[f32],
        batch: usize,
        tokens: usize,
        key_mask: Option<&[bool]>,
    ) -> Result<Vec<f32>> {
        let named = |error, name: &str| match error {
            Error::Shape {
                argument,
                expected,
                got,
            } if argument == "values" => Error::Shape {
                argument: name.into(),
                expected,
                got,
            },
            other => other,
        };
        let x = Tensor::from_slice(&self.gpu, &[batch, tokens, self.config.d_in], x)
            .map_err(|error| named(error, "x"))?;
        let key_mask = key_mask
            .map(|mask| Tensor::from_slice(&self.gpu, &[batch, tokens], mask))
            .transpose()
            .map_err(|error| named(error, "key_mask"))?;
        self.forward(&x, key_mask.as_ref())?.read().await
    }

    /// [`forward_host`](Self::forward_host), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`forward_host`](Self::forward_host).
    #[cfg(not(target_family = "wasm"))]
    pub fn forward_host_blocking(
        &self,
        x: &[f32],
        batch: usize,
        tokens: usize,
        key_mask: Option<&[bool]>,
    ) -> Result<Vec<f32>> {
        pollster::block_on(self.forward_host(x, batch, tokens, key_mask))
    }
}
