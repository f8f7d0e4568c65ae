//! The device layer: opening or wrapping a GPU, and what is made once for all work on it.
//!
//! Objects by lifetime. *Made once*: [`Gpu`], with its pipelines and its parameter buffers. *Per tensor*:
//! buffers ([`Tensor`](crate::Tensor)). *Per call* with operands that were not seen before: bind groups, nothing else.

mod adapter;
mod pipeline;
mod timing;
mod transfer;

#[cfg(not(target_family = "wasm"))]
pub use adapter::adapters_blocking;
pub use adapter::{AdapterReport, Capabilities, GpuOptions, LimitProfile, adapters, install_hint};
pub(crate) use pipeline::{Argument, Bound, Call, Origin, Others, Pipeline, fold};
pub use timing::{Span, Timestamps};

use crate::{Error, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// A GPU that this crate can compute on: a `wgpu` device and queue, and the pipelines made for them.
///
/// Cheap to clone, `Send + Sync`; clones share everything.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
    /// What plans are made by; handles of one device may differ in what may be chosen.
    capabilities: Arc<Capabilities>,
    /// Whether this crate's own kernels run with runtime checks too.
    runtime_checks: bool,
}

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: wgpu::AdapterInfo,
    pipelines: pipeline::PipelineCache,
    params: pipeline::ParamsCache,
    bind_groups: pipeline::BindGroupCache,
    made: MadeCounters,
    /// Bound where a kernel has a binding that a call does not use, for reading and for writing: no binding may be
    /// empty, and no buffer read and written by one dispatch.
    unused: [wgpu::Buffer; 2],
    #[cfg(not(target_family = "wasm"))]
    poller: transfer::Poller,
    in_flight: transfer::InFlight,
    lost: Arc<OnceLock<String>>,
    /// On OpenGL, held around every use of the device: wgpu panics where a thread waits for the one OpenGL
    /// context longer than 6 s, as it may while another compiles.
    gl_turn: transfer::Turn,
    /// What tuning found, by the problem.
    tuning: Mutex<HashMap<String, Winner>>,
    /// Whether the device was opened here, so that nobody else's callbacks hang on it.
    owned: bool,
    allocated: AtomicU64,
    peak_allocated: AtomicU64,
}

/// What tuning found for a problem: which of the candidates, and how much faster it was.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Winner {
    pub(crate) kernel: String,
    /// Its arithmetic, by the name in Rust.
    pub(crate) tier: String,
    pub(crate) constants: Vec<(String, u32)>,
    pub(crate) splits: u32,
    /// Of a call of the winner, and of what planning chooses.
    pub(crate) seconds: f64,
    pub(crate) planned_seconds: f64,
}

/// Objects that a [`Gpu`] has made since it was opened, those that are gone by now included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectsMade {
    /// Buffers: of tensors, of parameters, and for reading back. (Not those of `Timestamps`.)
    pub buffers: u64,
    /// Bind groups.
    pub bind_groups: u64,
    /// Pipelines.
    pub pipelines: u64,
}

#[derive(Default)]
struct MadeCounters {
    buffers: AtomicU64,
    bind_groups: AtomicU64,
}

impl MadeCounters {
    fn count_buffer(&self) {
        self.buffers.fetch_add(1, Ordering::Relaxed);
    }

    fn count_bind_group(&self) {
        self.bind_groups.fetch_add(1, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu")
            .field("adapter", &self.inner.info.name)
            .field("backend", &self.inner.info.backend)
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the best adapter that `options` and the environment allow: hardware before software, discrete
    /// before integrated, Vulkan, Metal and DirectX 12 before OpenGL.
    ///
    /// `WGPU_BACKEND` (a comma-separated list such as `vulkan,gl`) and `WGPU_ADAPTER_NAME` (part of a name,
    /// in any case) are obeyed where `options` does not say otherwise.
    ///
    /// # Errors
    ///
    /// [`Error::NoAdapter`] if there is none, with what to install; [`Error::AdapterNotFound`] if none is the one
    /// asked for, with what there is; [`Error::DeviceRefused`] if every one that matches refuses to open.
    pub async fn open(options: &GpuOptions) -> Result<Self> {
        let candidates = adapter::candidates(options).await?;
        let mut refusal = None;
        for candidate in candidates {
            match Self::open_adapter(&candidate, options).await {
                Ok(gpu) => return Ok(gpu),
                Err(error) => {
                    log::warn!("{error}; trying the next adapter");
                    refusal.get_or_insert(error);
                }
            }
        }
        Err(refusal.unwrap_or_else(|| Error::NoAdapter {
            remedy: install_hint().into(),
        }))
    }

    /// [`open`](Self::open), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    #[cfg(not(target_family = "wasm"))]
    pub fn open_blocking(options: &GpuOptions) -> Result<Self> {
        pollster::block_on(Self::open(options))
    }

    /// Opens every adapter that `options` and the environment let through, best first: for each the device or why not. One that
    /// several backends offer is there several times.
    ///
    /// # Errors
    ///
    /// [`Error::NoAdapter`], [`Error::AdapterNotFound`] as [`open`](Self::open).
    pub async fn open_all(options: &GpuOptions) -> Result<Vec<Result<Self>>> {
        let mut opened = Vec::new();
        for candidate in adapter::candidates(options).await? {
            opened.push(Self::open_adapter(&candidate, options).await);
        }
        Ok(opened)
    }

    /// [`open_all`](Self::open_all), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`open_all`](Self::open_all).
    #[cfg(not(target_family = "wasm"))]
    pub fn open_all_blocking(options: &GpuOptions) -> Result<Vec<Result<Self>>> {
        pollster::block_on(Self::open_all(options))
    }

    async fn open_adapter(candidate: &wgpu::Adapter, options: &GpuOptions) -> Result<Self> {
        let info = candidate.get_info();
        let features = adapter::wanted_features(candidate.features(), options.experimental);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("wgpu-attention"),
            required_features: features,
            required_limits: options.limits.of(&candidate.limits()),
            experimental_features: adapter::experimental_features(features),
            ..Default::default()
        };
        let (device, queue) = candidate
            .request_device(&descriptor)
            .await
            .map_err(|error| Error::DeviceRefused {
                adapter: info.name.clone(),
                message: error.to_string(),
            })?;
        let lost = Arc::new(OnceLock::new());
        let told = lost.clone();
        device.set_device_lost_callback(move |_, message| {
            let _ = told.set(message);
        });
        // What escapes every error scope is reported to whoever is listening instead of ending the program.
        device.on_uncaptured_error(Arc::new(|error: wgpu::Error| log::error!("wgpu: {error}")));
        log::info!("opened {} ({:?})", info.name, info.backend);
        let gpu = Self::build(device, queue, lost, true)?;
        Ok(gpu.with_matrices(&candidate.cooperative_matrix_properties()))
    }

    /// Wraps a device that the application already has. Nothing about it is changed: no callback is
    /// replaced, and it may be used elsewhere at the same time.
    ///
    /// Every feature and limit is taken from the device, so request the limits you need when opening it
    /// (wgpu's default limits bind at most 128 MiB in one piece). No feature is needed; of those that the adapter has,
    /// `TIMESTAMP_QUERY` lets passes be timed, `SHADER_F16` has tiles of f16, and on an adapter that is a CPU underneath `SUBGROUP` and
    /// `SHADER_INT64` make the kernels faster, the first of them several times.
    ///
    /// wgpu tells of a lost device in one callback a device, which is the application's own: let it call
    /// [`report_lost`](Self::report_lost), so that errors say so. Read-backs poll the device from a thread of
    /// this `Gpu`, and wgpu then runs there whatever callbacks of that device are due, the application's included.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] if the device's limits are too low for every kernel of this crate.
    pub fn from_device(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::build(device, queue, Arc::new(OnceLock::new()), false)
    }

    /// The same device with cooperative matrices among what it offers, where it has their features and these are the sizes of its
    /// adapter ([`wgpu::Adapter::cooperative_matrix_properties`]): a wrapped device does not tell them. They are off until
    /// [`qualify`](Self::qualify) has found them right.
    #[must_use]
    pub fn with_matrices(&self, properties: &[wgpu::CooperativeMatrixProperties]) -> Self {
        let capabilities = Capabilities::clone(&self.capabilities);
        self.with_capabilities(capabilities.with_matrices(self.device().features(), properties))
    }

    /// A handle of the same device that plans by these. For tests, which claim what a device has not.
    #[doc(hidden)]
    #[must_use]
    pub fn with_capabilities(&self, capabilities: Capabilities) -> Self {
        Gpu {
            capabilities: Arc::new(capabilities),
            ..self.clone()
        }
    }

    /// Tells this `Gpu` that its device is gone, from the application's own device-lost callback: from now on
    /// every call gives [`Error::DeviceLost`].
    pub fn report_lost(&self, reason: &str) {
        let _ = self.inner.lost.set(reason.to_string());
    }

    fn build(
        device: wgpu::Device,
        queue: wgpu::Queue,
        lost: Arc<OnceLock<String>>,
        owned: bool,
    ) -> Result<Self> {
        let info = device.adapter_info();
        let capabilities = Capabilities::new(&info, &device.limits(), device.features());
        capabilities.suffice()?;
        let gl_turn = transfer::Turn::new(info.backend == wgpu::Backend::Gl);
        let unused = ["unused input", "unused output"].map(|name| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(&format!("wgpu-attention: {name}")),
                size: 256,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        });
        let inner = Inner {
            owned,
            #[cfg(not(target_family = "wasm"))]
            poller: transfer::Poller::new(device.clone(), gl_turn.clone()),
            gl_turn,
            device,
            queue,
            info,
            pipelines: Default::default(),
            params: Default::default(),
            bind_groups: Default::default(),
            made: Default::default(),
            unused,
            in_flight: Default::default(),
            tuning: Default::default(),
            lost,
            allocated: AtomicU64::new(0),
            peak_allocated: AtomicU64::new(0),
        };
        Ok(Gpu {
            inner: Arc::new(inner),
            capabilities: Arc::new(capabilities),
            runtime_checks: false,
        })
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// The adapter's name, driver, backend and type.
    pub fn adapter_info(&self) -> &wgpu::AdapterInfo {
        &self.inner.info
    }

    /// The adapter's name, backend and type in one phrase.
    pub fn describe(&self) -> String {
        adapter::describe(&self.inner.info)
    }

    /// What planning needs to know of this device.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The same device for dispatches of at most `longest` (by the rate in [`capabilities`](Self::capabilities); one
    /// workgroup is not cut): what is planned by the handle that comes back keeps to it.
    #[must_use]
    pub fn with_longest_dispatch(&self, longest: Duration) -> Self {
        let mut gpu = self.clone();
        Arc::make_mut(&mut gpu.capabilities).longest_dispatch = longest;
        gpu
    }

    /// The same device with wgpu's runtime checks of indices and loops in this crate's own kernels, or (as a handle is at
    /// first) without. A caller's kernels and rules are always checked. Results are the same; what checks cost is in
    /// docs/performance.md, why own kernels need none in ARCHITECTURE.md. It goes for what is compiled with the handle that comes back.
    #[must_use]
    pub fn with_runtime_checks(&self, runtime_checks: bool) -> Self {
        Gpu {
            runtime_checks,
            ..self.clone()
        }
    }

    /// The same device, planned for by that rate.
    pub(crate) fn with_rate(&self, flops_per_second: u64) -> Self {
        let mut gpu = self.clone();
        Arc::make_mut(&mut gpu.capabilities).flops_per_second = flops_per_second.max(1);
        gpu
    }

    /// What tuning found on this device, by the problem.
    pub(crate) fn tuning(&self) -> MutexGuard<'_, HashMap<String, Winner>> {
        transfer::lock(&self.inner.tuning)
    }

    /// Whether this crate's own kernels are compiled with runtime checks through this handle.
    pub fn runtime_checks(&self) -> bool {
        self.runtime_checks
    }

    /// Bytes of GPU memory that tensors made through this `Gpu` hold now.
    pub fn allocated_bytes(&self) -> u64 {
        self.inner.allocated.load(Ordering::Relaxed)
    }

    /// The most bytes that tensors made through this `Gpu` ever held at once.
    pub fn peak_allocated_bytes(&self) -> u64 {
        self.inner.peak_allocated.load(Ordering::Relaxed)
    }

    /// What was made on the device so far, for the sake of a caller who wants to see that a call makes nothing.
    pub fn objects_made(&self) -> ObjectsMade {
        let made = &self.inner.made;
        ObjectsMade {
            buffers: made.buffers.load(Ordering::Relaxed),
            bind_groups: made.bind_groups.load(Ordering::Relaxed),
            pipelines: self.pipeline_count() as u64,
        }
    }

    /// Pipelines made so far.
    pub fn pipeline_count(&self) -> usize {
        self.inner.pipelines.len()
    }

    /// Whether two handles are clones of one `Gpu`. (Wrap a device once and clone the handle: whether two devices
    /// are the same one wgpu cannot tell across instances.)
    pub fn same_as(&self, other: &Gpu) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// [`Error::DeviceLost`] if the driver has said so.
    pub(crate) fn alive(&self) -> Result<()> {
        match self.inner.lost.get() {
            Some(reason) => Err(Error::DeviceLost {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn note_allocated(&self, bytes: u64) {
        let now = self.inner.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.inner.peak_allocated.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn note_freed(&self, bytes: u64) {
        self.inner.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Runs `make` in error scopes of its own, so that wgpu's errors come back as `Err`.
    ///
    /// Off the web a scope knows its error at once. On the web it would know later, and there are no scopes:
    /// an error reaches the device's own handler.
    #[cfg(target_family = "wasm")]
    pub(crate) fn checked<T>(
        &self,
        _what: &str,
        _bytes: u64,
        make: impl FnOnce(&wgpu::Device) -> T,
    ) -> Result<T> {
        self.alive()?;
        Ok(make(&self.inner.device))
    }

    /// Runs `make` in error scopes of its own, so that wgpu's errors come back as `Err`.
    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn checked<T>(
        &self,
        what: &str,
        bytes: u64,
        make: impl FnOnce(&wgpu::Device) -> T,
    ) -> Result<T> {
        self.alive()?;
        let _turn = self.inner.gl_turn.take();
        let device = &self.inner.device;
        let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let made = make(device);
        let errors = [
            now(memory.pop()),
            now(validation.pop()),
            now(internal.pop()),
        ];
        match errors.into_iter().flatten().next() {
            None => Ok(made),
            Some(wgpu::Error::OutOfMemory { .. }) => Err(Error::OutOfMemory {
                what: what.to_string(),
                bytes,
            }),
            Some(error) => {
                self.alive()?;
                Err(Error::Validation {
                    what: what.to_string(),
                    message: error.to_string(),
                })
            }
        }
    }
}

/// The value of a future that is ready now; `None` if it is not.
#[cfg(not(target_family = "wasm"))]
fn now<T>(future: impl Future<Output = Option<T>>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => None,
    }
}
