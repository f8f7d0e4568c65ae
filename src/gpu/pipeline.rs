//! Pipelines and parameter buffers, made once and kept; and the one way a kernel is dispatched.

use super::Capabilities;
use super::transfer::lock;
use super::{Gpu, Timestamps};
use crate::kernels::{Access, Binding, Configuration, Kernel};
use crate::{Error, Result};
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, Weak};

/// A compiled configuration of a kernel.
pub(crate) struct Pipeline {
    bindings: Vec<Binding>,
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    /// Where `groups` and `first_group` stand in the parameters.
    range_at: Option<[usize; 2]>,
}

/// Pipelines by all that is baked into them. They are kept as long as the [`Gpu`].
#[derive(Default)]
pub(super) struct PipelineCache(Mutex<HashMap<PipelineKey, Arc<Pipeline>>>);

/// Everything that makes a pipeline what it is: the whole text of the shader, and what the descriptor adds to it.
#[derive(PartialEq, Eq, Hash)]
struct PipelineKey {
    source: String,
    entry_point: &'static str,
    bindings: Vec<Binding>,
    params_size: usize,
    /// Where `groups` and `first_group` stand in the parameters, if a dispatch can be cut.
    range_at: Option<[usize; 2]>,
    needs_cleared_memory: bool,
    runtime_checks: bool,
}

/// Whose work a pipeline does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Text of this crate's own shaders alone, in a configuration and for a grid that this crate's planner makes: it
    /// runs without runtime checks, unless the caller wants them.
    Own,
    /// A caller's kernel or rule, or a plan that a caller has changed: it is always checked.
    Callers,
}

impl PipelineCache {
    pub(super) fn len(&self) -> usize {
        lock(&self.0).len()
    }
}

/// Parameter buffers by their content. A buffer is never written after it was made, so calls that were
/// encoded before one submit cannot see each other's parameters; and a call whose parameters were seen
/// before allocates nothing.
#[derive(Default)]
pub(super) struct ParamsCache(Mutex<ParamsBuffers>);

#[derive(Default)]
struct ParamsBuffers {
    by_content: HashMap<Vec<u8>, wgpu::Buffer>,
    oldest_first: VecDeque<Vec<u8>>,
}

/// Parameter buffers that are kept (of 100 to 300 bytes each). Those that fall out live on in the
/// bind groups that use them.
const MOST_PARAMS: usize = 1024;

/// Bind groups by what they bind, so that a call with the same operands makes none. Each is forgotten with the first of
/// its tensors that goes, so that the cache keeps no memory alive.
#[derive(Default)]
pub(super) struct BindGroupCache(Mutex<BindGroups>);

#[derive(Default)]
struct BindGroups {
    by_operands: HashMap<Arc<Operands>, wgpu::BindGroup>,
    /// Those that bind a tensor's buffer.
    by_buffer: HashMap<wgpu::Buffer, Vec<Arc<Operands>>>,
    /// Forgotten ones among them.
    oldest_first: VecDeque<Weak<Operands>>,
}

/// Everything that makes a bind group what it is.
#[derive(PartialEq, Eq, Hash)]
struct Operands {
    /// Its address: pipelines are kept as long as the cache.
    pipeline: usize,
    /// What each binding has, in the pipeline's order.
    bound: Vec<Operand>,
}

#[derive(PartialEq, Eq, Hash)]
struct Operand {
    buffer: wgpu::Buffer,
    offset: u64,
    size: Option<NonZeroU64>,
    /// Whether the buffer is a tensor's, and not this crate's own for all time.
    of_tensor: bool,
}

/// Bind groups that are kept at most.
const MOST_BIND_GROUPS: usize = 4096;

impl BindGroups {
    /// Keeps one; gives back what had to go for it.
    fn insert(&mut self, operands: Operands, bind_group: wgpu::BindGroup) -> Vec<wgpu::BindGroup> {
        let operands = Arc::new(operands);
        let twin = self.by_operands.insert(operands.clone(), bind_group);
        if twin.is_some() {
            return twin.into_iter().collect(); // two threads made the same one
        }
        for operand in operands.bound.iter().filter(|operand| operand.of_tensor) {
            let of_buffer = self.by_buffer.entry(operand.buffer.clone()).or_default();
            if of_buffer.last() != Some(&operands) {
                of_buffer.push(operands.clone());
            }
        }
        self.oldest_first.push_back(Arc::downgrade(&operands));
        let mut gone = Vec::new();
        while self.by_operands.len() > MOST_BIND_GROUPS {
            let Some(oldest) = self.oldest_first.pop_front() else {
                break;
            };
            gone.extend(oldest.upgrade().and_then(|oldest| self.remove(&oldest)));
        }
        if self.oldest_first.len() > 2 * MOST_BIND_GROUPS {
            self.oldest_first.retain(|own| own.strong_count() > 0);
        }
        gone
    }

    fn remove(&mut self, operands: &Arc<Operands>) -> Option<wgpu::BindGroup> {
        for operand in operands.bound.iter().filter(|operand| operand.of_tensor) {
            if let Some(of_buffer) = self.by_buffer.get_mut(&operand.buffer) {
                of_buffer.retain(|other| !Arc::ptr_eq(other, operands));
                if of_buffer.is_empty() {
                    self.by_buffer.remove(&operand.buffer);
                }
            }
        }
        self.by_operands.remove(operands)
    }
}

/// Part of a buffer, as a kernel binds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bound {
    /// Bytes from the start of the buffer, as the device wants them aligned.
    pub(crate) offset: u64,
    /// Bytes, a multiple of 4, at least 4.
    pub(crate) size: u64,
    /// Elements from there to the first one of the operand.
    pub(crate) first: u32,
}

/// What is bound to one storage binding.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// Part of a tensor's buffer.
    Tensor(&'a wgpu::Buffer, Bound),
    /// The kernel has the binding, this call does not use it.
    Unused,
}

/// One dispatch to be encoded.
pub(crate) struct Call<'a> {
    pub(crate) label: &'a str,
    /// What is bound to each storage binding, by its name. One that is not here is not used by this call; one that
    /// the kernel's configuration does not bind is left out.
    pub(crate) arguments: &'a [(&'static str, Argument<'a>)],
    /// The parameter struct.
    pub(crate) params: &'a [u8],
    pub(crate) grid: [u32; 3],
    /// Dispatches into which the workgroups are cut, one after another in the same pass.
    pub(crate) slices: u32,
    /// Where the pass is timed, under the call's label.
    pub(crate) timestamps: Option<&'a mut Timestamps>,
}

/// The pipelines that calls of one operation took besides that of its plan, since their operands lie otherwise: found again without
/// a text to be put together. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Others(Arc<Mutex<Vec<Other>>>);

type Other = (Configuration, Arc<Pipeline>);

impl Others {
    /// The pipeline of another configuration of the operation's kernel.
    pub(crate) fn get(
        &self,
        gpu: &Gpu,
        kernel: &'static Kernel,
        configuration: Configuration,
        origin: Origin,
    ) -> Result<Arc<Pipeline>> {
        let found = |others: &[Other]| {
            let same = others.iter().find(|(known, _)| *known == configuration);
            same.map(|(_, pipeline)| pipeline.clone())
        };
        if let Some(pipeline) = found(&lock(&self.0)) {
            return Ok(pipeline);
        }
        let pipeline = gpu.pipeline(kernel, &configuration, origin)?;
        lock(&self.0).push((configuration, pipeline.clone()));
        Ok(pipeline)
    }
}

/// The parameters and the grid of one of the dispatches into which a call is cut.
type Slice<'a> = (Cow<'a, [u8]>, [u32; 3]);

impl Gpu {
    /// The pipeline of a kernel's configuration: from the cache, or compiled now.
    pub(crate) fn pipeline(
        &self,
        kernel: &'static Kernel,
        configuration: &Configuration,
        origin: Origin,
    ) -> Result<Arc<Pipeline>> {
        if configuration.takes_int64() && !self.capabilities().int64 {
            return Err(Error::MissingFeature {
                what: format!("{} [{configuration}]", kernel.name),
                feature: "SHADER_INT64".into(),
                adapter: self.inner.info.name.clone(),
            });
        }
        if !self.capabilities().suits(configuration) {
            let size = configuration.subgroup_size().unwrap_or(0);
            return Err(Error::Unsupported {
                what: format!("{} [{configuration}]", kernel.name),
                reason: format!(
                    "it is written for subgroups of {size}, and this device does not promise them; leave the configuration to the planner"
                ),
            });
        }
        let tier = kernel.tier(configuration);
        if !self.capabilities().offers(tier) {
            return Err(Error::MissingFeature {
                what: format!("{} with {tier}", kernel.name),
                feature: tier.feature_names(),
                adapter: self.inner.info.name.clone(),
            });
        }
        let source = kernel
            .assemble(configuration)
            .map_err(|error| Error::Shader {
                kernel: kernel.name.into(),
                message: error.to_string(),
            })?;
        let key = PipelineKey {
            source,
            entry_point: kernel.name,
            bindings: kernel.bound(configuration).copied().collect(),
            params_size: kernel.params.size,
            range_at: ["groups", "first_group"]
                .map(|name| {
                    let at = kernel.params.offset_of(name)?;
                    (at + 4 <= kernel.params.size).then_some(at)
                })
                .into_iter()
                .collect::<Option<Vec<_>>>()
                .and_then(|both| both.try_into().ok()),
            needs_cleared_memory: kernel.needs_cleared_memory,
            runtime_checks: self.runtime_checks || origin == Origin::Callers,
        };
        if let Some(pipeline) = lock(&self.inner.pipelines.0).get(&key) {
            return Ok(pipeline.clone());
        }
        // Compiled outside the lock, since it may take a second; should two threads compile the same text at
        // once, the first one's is kept.
        log::debug!("compiling {} ({configuration})", kernel.name);
        let pipeline = Arc::new(self.compile(kernel, &key)?);
        let mut cache = lock(&self.inner.pipelines.0);
        Ok(cache.entry(key).or_insert(pipeline).clone())
    }

    fn compile(&self, kernel: &'static Kernel, key: &PipelineKey) -> Result<Pipeline> {
        self.alive()?;
        // naga's writers give up with a panic at some sound shaders: a caller's
        // text must not take the caller down.
        let made = self.checked(kernel.name, 0, |device| {
            let make = || self.make_pipeline(device, kernel, key);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).map_err(|_| Error::Shader {
                kernel: kernel.name.into(),
                message: "naga, which translates it for the driver, gave up with a panic: write it in another way".into(),
            })
        });
        let made = made.and_then(|made| made);
        made.map_err(|error| match error {
            Error::Validation { what, message } => Error::Shader {
                kernel: what,
                message,
            },
            other => other,
        })
    }

    fn make_pipeline(
        &self,
        device: &wgpu::Device,
        kernel: &'static Kernel,
        key: &PipelineKey,
    ) -> Pipeline {
        let module = shader_module(device, kernel.name, &key.source, key.runtime_checks);
        let entries: Vec<wgpu::BindGroupLayoutEntry> = key
            .bindings
            .iter()
            .map(|binding| wgpu::BindGroupLayoutEntry {
                binding: binding.number,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match binding.access {
                        Access::Read => wgpu::BufferBindingType::Storage { read_only: true },
                        Access::Write => wgpu::BufferBindingType::Storage { read_only: false },
                        Access::Params => wgpu::BufferBindingType::Uniform,
                    },
                    has_dynamic_offset: false,
                    min_binding_size: match binding.access {
                        Access::Params => NonZeroU64::new(kernel.params.size as u64),
                        _ => None,
                    },
                },
                count: None,
            })
            .collect();
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(kernel.name),
            entries: &entries,
        });
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(kernel.name),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: kernel.needs_cleared_memory,
                ..Default::default()
            },
            cache: None,
        });
        Pipeline {
            bindings: key.bindings.clone(),
            pipeline,
            layout,
            range_at: key.range_at,
        }
    }

    /// The uniform buffer that holds `content`.
    fn params_buffer(&self, content: &[u8]) -> Result<wgpu::Buffer> {
        let mut cache = lock(&self.inner.params.0);
        if let Some(buffer) = cache.by_content.get(content) {
            return Ok(buffer.clone());
        }
        let size = content.len().next_multiple_of(16) as u64;
        self.inner.made.count_buffer();
        let buffer = self.checked("parameters", size, |device| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("wgpu-attention: parameters"),
                size,
                usage: wgpu::BufferUsages::UNIFORM,
                mapped_at_creation: true,
            })
        })?;
        let _turn = self.inner.gl_turn.take();
        buffer
            .get_mapped_range_mut(..)
            .map_err(|error| self.lost(error.to_string()))?
            .slice(..content.len())
            .copy_from_slice(content);
        buffer.unmap();
        if cache.oldest_first.len() >= MOST_PARAMS
            && let Some(oldest) = cache.oldest_first.pop_front()
        {
            cache.by_content.remove(&oldest);
        }
        cache.oldest_first.push_back(content.to_vec());
        cache.by_content.insert(content.to_vec(), buffer.clone());
        Ok(buffer)
    }

    /// Records a copy of whole words from one buffer to another.
    pub(crate) fn record_copy(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: &wgpu::Buffer,
        from_offset: u64,
        to: &wgpu::Buffer,
        to_offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.checked("copy", 0, |_| {
            encoder.copy_buffer_to_buffer(from, from_offset, to, to_offset, bytes);
        })
    }

    /// The bind group of these operands: from the cache, or made now.
    fn bind_group(
        &self,
        pipeline: &Pipeline,
        operands: Operands,
        label: &str,
    ) -> Result<wgpu::BindGroup> {
        if let Some(bind_group) = lock(&self.inner.bind_groups.0).by_operands.get(&operands) {
            return Ok(bind_group.clone());
        }
        let entries: Vec<wgpu::BindGroupEntry> = pipeline
            .bindings
            .iter()
            .zip(&operands.bound)
            .map(|(binding, operand)| wgpu::BindGroupEntry {
                binding: binding.number,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &operand.buffer,
                    offset: operand.offset,
                    size: operand.size,
                }),
            })
            .collect();
        self.inner.made.count_bind_group();
        // Before the pass begins: a pass with an unsound bind group would spoil the caller's encoder.
        let bind_group = self.checked(label, 0, |device| {
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(label),
                layout: &pipeline.layout,
                entries: &entries,
            })
        })?;
        let gone = lock(&self.inner.bind_groups.0).insert(operands, bind_group.clone());
        // What they held is freed outside the lock.
        drop(gone);
        Ok(bind_group)
    }

    /// Lets go of the bind groups that bind this buffer: a tensor in it is gone.
    pub(crate) fn forget(&self, buffer: &wgpu::Buffer) {
        let mut cache = lock(&self.inner.bind_groups.0);
        let Some(of_buffer) = cache.by_buffer.remove(buffer) else {
            return;
        };
        let gone: Vec<_> = of_buffer
            .iter()
            .map(|operands| cache.remove(operands))
            .collect();
        // What they held is freed outside the lock.
        drop(cache);
        drop(gone);
    }

    /// Records one dispatch, in a compute pass of its own, into the caller's encoder. wgpu orders passes
    /// that touch the same buffer: what this one writes the next one sees.
    pub(crate) fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        pipeline: &Pipeline,
        call: Call<'_>,
    ) -> Result<()> {
        let dispatches = self
            .slices(pipeline, &call)?
            .into_iter()
            .map(|(params, grid)| Ok((self.bound(pipeline, &call, &params)?, grid)))
            .collect::<Result<Vec<_>>>()?;
        let timestamps = call
            .timestamps
            .map(|timestamps| timestamps.writes(call.label));
        let timestamps = timestamps.transpose()?;
        self.checked(call.label, 0, |_| {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some(call.label),
                timestamp_writes: timestamps,
            });
            pass.set_pipeline(&pipeline.pipeline);
            for (bind_group, [x, y, z]) in &dispatches {
                pass.set_bind_group(0, bind_group, &[]);
                pass.dispatch_workgroups(*x, *y, *z);
            }
        })
    }

    /// Parameters and grid of each dispatch of a call.
    fn slices<'a>(&self, pipeline: &Pipeline, call: &Call<'a>) -> Result<Vec<Slice<'a>>> {
        let whole = vec![(Cow::Borrowed(call.params), call.grid)];
        let Some(range_at) = pipeline.range_at.filter(|_| call.slices > 1) else {
            return Ok(whole);
        };
        let mut groups = [0; 4];
        groups.copy_from_slice(&call.params[range_at[0]..][..4]);
        let groups = u32::from_ne_bytes(groups);
        // A grid of a caller's own is dispatched as it is.
        if fold(u64::from(groups), self.capabilities(), call.label)? != Some(call.grid) {
            return Ok(whole);
        }
        let each = groups.div_ceil(call.slices).max(1);
        let mut dispatches = Vec::new();
        for first in (0..groups).step_by(each as usize) {
            let end = groups.min(first.saturating_add(each));
            let mut params = call.params.to_vec();
            for (at, value) in range_at.into_iter().zip([end, first]) {
                params[at..][..4].copy_from_slice(&value.to_ne_bytes());
            }
            if let Some(grid) = fold(u64::from(end - first), self.capabilities(), call.label)? {
                dispatches.push((Cow::Owned(params), grid));
            }
        }
        Ok(dispatches)
    }

    /// The bind group of a call's operands with these parameters.
    fn bound(
        &self,
        pipeline: &Pipeline,
        call: &Call<'_>,
        params: &[u8],
    ) -> Result<wgpu::BindGroup> {
        let params = self.params_buffer(params)?;
        let of = |name: &str| {
            let mut named = call.arguments.iter().filter(|(key, _)| *key == name);
            named
                .next()
                .map_or(Argument::Unused, |(_, argument)| *argument)
        };
        let bound = pipeline.bindings.iter().map(|binding| {
            let whole = |buffer: &wgpu::Buffer| Operand {
                buffer: buffer.clone(),
                offset: 0,
                size: None,
                of_tensor: false,
            };
            match binding.access {
                Access::Params => whole(&params),
                _ => match of(binding.name) {
                    Argument::Tensor(buffer, bound) => Operand {
                        buffer: buffer.clone(),
                        offset: bound.offset,
                        size: NonZeroU64::new(bound.size),
                        of_tensor: true,
                    },
                    Argument::Unused => {
                        whole(&self.inner.unused[usize::from(binding.access == Access::Write)])
                    }
                },
            }
        });
        let operands = Operands {
            pipeline: std::ptr::from_ref(pipeline) as usize,
            bound: bound.collect(),
        };
        self.bind_group(pipeline, operands, call.label)
    }
}

/// A shader module of a kernel's text, with wgpu's runtime checks or without those of indices and of the ends of loops. (Divisors
/// stay checked: that costs next to nothing.)
#[allow(unsafe_code)]
fn shader_module(
    device: &wgpu::Device,
    name: &str,
    source: &str,
    runtime_checks: bool,
) -> wgpu::ShaderModule {
    let descriptor = wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    };
    if runtime_checks {
        return device.create_shader_module(descriptor);
    }
    let mut checks = wgpu::ShaderRuntimeChecks::checked();
    checks.bounds_checks = false;
    checks.force_loop_bounding = false;
    // SAFETY: `Origin::Own` says that the text is this crate's own and that its numbers are those that this crate's planner
    // and encoders make. Such a kernel touches nothing outside of its operands, and all its loops end; ARCHITECTURE.md, Runtime checks,
    // says why; tests/dispatch.rs holds results against those of checked shaders, and all tests of kernels and hostile data run without.
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}

/// A grid of at least `groups` workgroups with no axis over the device's limit.
///
/// # Errors
///
/// [`Error::LimitExceeded`] if there are more than three axes, or 32 bits, can count.
pub(crate) fn fold(
    groups: u64,
    capabilities: &Capabilities,
    what: &str,
) -> Result<Option<[u32; 3]>> {
    if groups == 0 {
        return Ok(None);
    }
    let axis = u64::from(capabilities.max_groups_per_axis.max(1));
    let most = axis
        .saturating_mul(axis)
        .saturating_mul(axis)
        .min(u64::from(u32::MAX));
    if groups > most {
        return Err(Error::LimitExceeded {
            what: what.into(),
            limit: "max_compute_workgroups_per_dimension".into(),
            needed: groups,
            available: most,
            unit: "workgroups",
        });
    }
    let x = groups.min(axis);
    let y = groups.div_ceil(x).min(axis);
    let z = groups.div_ceil(x * y);
    // Kernels number their workgroups in u32, the idle ones of a folded grid included.
    if x * y * z > u64::from(u32::MAX) {
        return Err(Error::LimitExceeded {
            what: what.into(),
            limit: "32-bit workgroup numbers".into(),
            needed: x * y * z,
            available: u64::from(u32::MAX),
            unit: "workgroups",
        });
    }
    Ok(Some([x as u32, y as u32, z as u32]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_folded_grid_holds_every_group_within_every_axis() {
        let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::Cpu);
        for groups in [
            1,
            2,
            65_534,
            65_535,
            65_536,
            65_537,
            131_071,
            4_294_000_000u64,
        ] {
            let [x, y, z] = fold(groups, &capabilities, "test").unwrap().unwrap();
            assert!(
                u64::from(x) * u64::from(y) * u64::from(z) >= groups,
                "{groups}"
            );
            assert!(
                [x, y, z].iter().all(|axis| (1..=65_535).contains(axis)),
                "{groups}"
            );
        }
        assert_eq!(fold(0, &capabilities, "test").unwrap(), None);
        assert!(matches!(
            fold(1 << 40, &capabilities, "test"),
            Err(Error::LimitExceeded {
                needed: 1_099_511_627_776,
                ..
            })
        ));
    }
}
