//! Which adapters there are, which one is best, and what planning needs to know of it.

use crate::kernels::{Configuration, KERNELS, Kernel, Tier};
use crate::{Error, Result};
use std::fmt;
use std::time::Duration;

/// How [`Gpu::open`](crate::Gpu::open) chooses.
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// Part of the adapter's name, in any case. `None`: `WGPU_ADAPTER_NAME`, or any.
    pub adapter_name: Option<String>,
    /// The backends to look at. `None`: `WGPU_BACKEND`, or all.
    pub backends: Option<wgpu::Backends>,
    /// The limits to ask for.
    pub limits: LimitProfile,
    /// Whether to ask for what wgpu calls experimental: cooperative matrices ([`Tier::Matrices`]). Nothing of the kind is used
    /// before [`Gpu::qualify`](crate::Gpu::qualify) has found it right, but a driver that is at fault may do worse than be wrong.
    pub experimental: bool,
}

impl GpuOptions {
    /// Options that ask for an adapter by (part of) its name.
    pub fn named(name: impl Into<String>) -> Self {
        GpuOptions {
            adapter_name: Some(name.into()),
            ..Default::default()
        }
    }
}

/// Which limits a device is opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LimitProfile {
    /// The largest that the adapter has, of those that matter here.
    #[default]
    Adapter,
    /// What every WebGPU implementation has (and not more than the adapter): shows what runs everywhere.
    WebGpuDefaults,
}

impl LimitProfile {
    pub(super) fn of(self, adapter: &wgpu::Limits) -> wgpu::Limits {
        // An OpenGL adapter may have less than WebGPU asks for in things that are not used here.
        let base = wgpu::Limits::default().or_worse_values_from(adapter);
        match self {
            LimitProfile::WebGpuDefaults => base,
            LimitProfile::Adapter => wgpu::Limits {
                max_buffer_size: adapter.max_buffer_size,
                max_storage_buffer_binding_size: adapter.max_storage_buffer_binding_size,
                max_storage_buffers_per_shader_stage: adapter.max_storage_buffers_per_shader_stage,
                max_compute_workgroup_storage_size: adapter.max_compute_workgroup_storage_size,
                max_compute_invocations_per_workgroup: adapter
                    .max_compute_invocations_per_workgroup,
                max_compute_workgroup_size_x: adapter.max_compute_workgroup_size_x,
                max_compute_workgroup_size_y: adapter.max_compute_workgroup_size_y,
                max_compute_workgroup_size_z: adapter.max_compute_workgroup_size_z,
                max_compute_workgroups_per_dimension: adapter.max_compute_workgroups_per_dimension,
                min_storage_buffer_offset_alignment: adapter.min_storage_buffer_offset_alignment,
                ..base
            },
        }
    }
}

/// What this crate asks a device for, of what the adapter has. Nothing here is needed to compute.
pub(super) fn wanted_features(adapter: wgpu::Features, experimental: bool) -> wgpu::Features {
    let mut wanted = wgpu::Features::TIMESTAMP_QUERY
        | wgpu::Features::SUBGROUP
        | wgpu::Features::SHADER_F16
        | wgpu::Features::SHADER_INT64;
    if experimental {
        wanted |= wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    }
    adapter & wanted
}

/// The token that wgpu wants to see where experimental features are asked for.
#[allow(unsafe_code)]
pub(super) fn experimental_features(features: wgpu::Features) -> wgpu::ExperimentalFeatures {
    if !features.intersects(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return wgpu::ExperimentalFeatures::disabled();
    }
    // SAFETY: the token says that its holder knows that such features may have bugs that break the promises of WebGPU. They are asked
    // for only where the caller has said so (`GpuOptions::experimental`); the one shader that uses them keeps matrices
    // inside of workgroup memory by constants, reads and writes buffers as other kernels do, is uniform where the extension wants it to be, and is
    // not compiled on adapters that do not list its size and types.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// Whether matrix units multiply as the kernels have it: 16 x 16 by 16 x 16 of f16, with sums in f32.
fn multiplies_matrices(properties: &[wgpu::CooperativeMatrixProperties]) -> bool {
    properties.iter().any(|one| {
        (one.m_size, one.n_size, one.k_size) == (16, 16, 16)
            && one.ab_type == wgpu::CooperativeScalarType::F16
            && one.cr_type == wgpu::CooperativeScalarType::F32
    })
}

/// What planning needs to know of a device. Plain data: a plan can be made for a device that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Hardware or software.
    pub device_type: wgpu::DeviceType,
    /// Bytes of one binding at most.
    pub max_binding_bytes: u64,
    /// Bytes of one buffer at most.
    pub max_buffer_bytes: u64,
    /// Workgroup memory in bytes.
    pub max_workgroup_bytes: u64,
    /// Invocations of a workgroup at most.
    pub max_invocations: u32,
    /// Workgroups along one axis of a dispatch at most.
    pub max_groups_per_axis: u32,
    /// Storage buffers of one kernel at most.
    pub max_storage_buffers: u32,
    /// What the offset of a storage binding is a multiple of, in bytes.
    pub storage_alignment: u64,
    /// Smallest and largest subgroup of the adapter, in invocations.
    pub subgroup_sizes: (u32, u32),
    /// Whether kernels may use subgroup operations.
    pub subgroups: bool,
    /// Whether kernels may use integers of 64 bits (`SHADER_INT64`), as which kernels on adapters that are a CPU read two channels at once, or four
    /// of 16 bits: projections x and the weight, attention keys and values.
    pub int64: bool,
    /// Iterations that all loops of one invocation may make together. Mesa's llvmpipe and lavapipe end every loop
    /// after 65535 (`LP_MAX_TGSI_LOOP_ITERATIONS`), without a word: what is computed by then is taken for the result.
    pub max_loop_iterations: u64,
    /// Whether passes can be timed on the GPU.
    pub timestamps: bool,
    /// The faster tiers of arithmetic that the device has, right or wrong.
    pub offered_tiers: Vec<Tier>,
    /// Those of them that were found right, and that the planner may choose: none before [`Gpu::qualify`](crate::Gpu::qualify).
    pub qualified_tiers: Vec<Tier>,
    /// Floating-point operations a second that kernels get out of the device: a cautious guess by its type, or half of what
    /// [`Gpu::measure_rate`](crate::Gpu::measure_rate) found. Plans cut dispatches by it.
    pub flops_per_second: u64,
    /// How long one dispatch may take, 200 ms unless said otherwise: systems stop a GPU that gives no sign of life for a second or
    /// two, and a desktop stands still until a dispatch ends.
    pub longest_dispatch: Duration,
}

/// The bound of a dispatch, unless a caller says another.
const LONGEST_DISPATCH: Duration = Duration::from_millis(200);

/// Workgroup memory that every WebGPU device has.
const WORKGROUP_BYTES_EVERYWHERE: u64 = 16 << 10;

/// What devices of a type compute, in floating-point operations a second: slow ones of their kind.
/// (Too low a guess cuts a dispatch that would not need it, which costs microseconds.)
fn cautious_rate(device_type: wgpu::DeviceType) -> u64 {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => 200_000_000_000,
        wgpu::DeviceType::IntegratedGpu => 50_000_000_000,
        wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 20_000_000_000,
        wgpu::DeviceType::Cpu => 3_000_000_000,
    }
}

impl Capabilities {
    /// From what a device or an adapter says of itself. Cooperative matrices are not offered, since neither tells their sizes:
    /// see [`with_matrices`](Self::with_matrices).
    pub fn new(info: &wgpu::AdapterInfo, limits: &wgpu::Limits, features: wgpu::Features) -> Self {
        Capabilities {
            device_type: info.device_type,
            max_binding_bytes: limits.max_storage_buffer_binding_size,
            max_buffer_bytes: limits.max_buffer_size,
            max_workgroup_bytes: u64::from(limits.max_compute_workgroup_storage_size),
            max_invocations: limits.max_compute_invocations_per_workgroup,
            max_groups_per_axis: limits.max_compute_workgroups_per_dimension,
            max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
            // Whatever a device says: kernels read up to 32 bytes at once, which must begin on as many where a binding does.
            storage_alignment: u64::from(limits.min_storage_buffer_offset_alignment.max(32)),
            subgroup_sizes: (info.subgroup_min_size, info.subgroup_max_size),
            subgroups: features.contains(wgpu::Features::SUBGROUP),
            int64: features.contains(wgpu::Features::SHADER_INT64),
            max_loop_iterations: if info.name.contains("llvmpipe") {
                65_535
            } else {
                u64::MAX
            },
            timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
            offered_tiers: match features.contains(Tier::Half.features()) {
                true => vec![Tier::Half],
                false => Vec::new(),
            },
            qualified_tiers: Vec::new(),
            flops_per_second: cautious_rate(info.device_type),
            longest_dispatch: LONGEST_DISPATCH,
        }
    }

    /// With cooperative matrices among the offered tiers, if the device has their features and the adapter lists the size that
    /// kernels are written for.
    #[must_use]
    pub fn with_matrices(
        mut self,
        features: wgpu::Features,
        properties: &[wgpu::CooperativeMatrixProperties],
    ) -> Self {
        let offered =
            features.contains(Tier::Matrices.features()) && multiplies_matrices(properties);
        if offered && !self.offered_tiers.contains(&Tier::Matrices) {
            self.offered_tiers.push(Tier::Matrices);
        }
        self
    }

    /// Whether the device has a tier of arithmetic, right or wrong.
    pub fn offers(&self, tier: Tier) -> bool {
        tier == Tier::Plain || self.offered_tiers.contains(&tier)
    }

    /// Whether the planner may choose a tier of arithmetic.
    pub fn has_qualified(&self, tier: Tier) -> bool {
        tier == Tier::Plain || self.offers(tier) && self.qualified_tiers.contains(&tier)
    }

    /// What every WebGPU implementation has, on a device of this type.
    pub fn webgpu_defaults(device_type: wgpu::DeviceType) -> Self {
        let limits = wgpu::Limits::default();
        Capabilities {
            device_type,
            max_binding_bytes: limits.max_storage_buffer_binding_size,
            max_buffer_bytes: limits.max_buffer_size,
            max_workgroup_bytes: u64::from(limits.max_compute_workgroup_storage_size),
            max_invocations: limits.max_compute_invocations_per_workgroup,
            max_groups_per_axis: limits.max_compute_workgroups_per_dimension,
            max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
            storage_alignment: u64::from(limits.min_storage_buffer_offset_alignment),
            subgroup_sizes: (4, 128),
            subgroups: false,
            int64: false,
            max_loop_iterations: u64::MAX,
            timestamps: false,
            offered_tiers: Vec::new(),
            qualified_tiers: Vec::new(),
            flops_per_second: cautious_rate(device_type),
            longest_dispatch: LONGEST_DISPATCH,
        }
    }

    /// Whether the device has what a configuration is written for: subgroups of that size, and integers of 64 bits. (Faster tiers
    /// of arithmetic: [`offers`](Self::offers).)
    pub fn suits(&self, configuration: &Configuration) -> bool {
        let size = configuration.subgroup_size();
        size.is_none_or(|size| self.known_subgroup() == Some(size))
            && (self.int64 || !configuration.takes_int64())
    }

    /// Invocations of every subgroup, where that is known in advance and kernels may use subgroup operations.
    pub fn known_subgroup(&self) -> Option<u32> {
        let (smallest, largest) = self.subgroup_sizes;
        (self.subgroups && smallest == largest).then_some(largest)
    }

    /// Whether the device can bind all that a configuration of a kernel binds.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] naming the limit.
    pub fn can_bind(&self, kernel: &Kernel, configuration: &Configuration) -> Result<()> {
        let needed = kernel.storage_buffers(configuration);
        if needed <= self.max_storage_buffers {
            return Ok(());
        }
        Err(Error::LimitExceeded {
            what: format!("kernel {} [{configuration}]", kernel.name),
            limit: "max_storage_buffers_per_shader_stage".into(),
            needed: u64::from(needed),
            available: u64::from(self.max_storage_buffers),
            unit: "storage buffers",
        })
    }

    /// Whether all loops of a kernel over that many elements and channels end by themselves.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] naming the limit.
    pub(crate) fn can_loop(
        &self,
        kernel: &Kernel,
        configuration: &Configuration,
        length: u64,
        channels: u64,
    ) -> Result<()> {
        let needed = (kernel.loop_iterations)(configuration, length, channels);
        if needed <= self.max_loop_iterations {
            return Ok(());
        }
        Err(Error::LimitExceeded {
            what: format!(
                "kernel {} over {length} elements of {channels} channels",
                kernel.name
            ),
            limit: "the loop limit of llvmpipe".into(),
            needed,
            available: self.max_loop_iterations,
            unit: "iterations",
        })
    }

    /// Whether the device can run a kernel in every configuration that its tiers of arithmetic allow; if not, which limit is in the way.
    ///
    /// # Errors
    ///
    /// [`Error::LimitExceeded`] naming the limit; [`Error::Unsupported`] where all of them need a tier that the device does not offer.
    pub fn can_run(&self, kernel: &Kernel) -> Result<()> {
        let tier = kernel.least_tier();
        if !self.offers(tier) {
            return Err(Error::Unsupported {
                what: format!("kernel {}", kernel.name),
                reason: format!(
                    "the device does not offer {tier} ({})",
                    tier.feature_names()
                ),
            });
        }
        let exceeded = |limit: &str, needed: u64, available: u64, unit| {
            if needed <= available {
                return Ok(());
            }
            Err(Error::LimitExceeded {
                what: format!("kernel {}", kernel.name),
                limit: limit.into(),
                needed,
                available,
                unit,
            })
        };
        // Rules that take buffers of their own are held against the limit when one is planned.
        if let Some(plainest) = (kernel.configurations)().first() {
            self.can_bind(kernel, plainest)?;
        }
        for configuration in (kernel.configurations)() {
            // Planning takes such a one where it fits, and a smaller one elsewhere.
            if (kernel.workgroup_bytes)(&configuration) > WORKGROUP_BYTES_EVERYWHERE {
                continue;
            }
            exceeded(
                "max_compute_workgroup_storage_size",
                (kernel.workgroup_bytes)(&configuration),
                self.max_workgroup_bytes,
                "bytes",
            )?;
            exceeded(
                "max_compute_invocations_per_workgroup",
                u64::from((kernel.invocations)(&configuration)),
                u64::from(self.max_invocations),
                "invocations",
            )?;
        }
        Ok(())
    }

    /// Whether at least one form of each operation runs.
    pub(super) fn suffice(&self) -> Result<()> {
        use crate::kernels::Operation;
        for operation in [Operation::Linear, Operation::Attention] {
            let mut refusal = Ok(());
            let mut any = false;
            for kernel in KERNELS.iter().filter(|kernel| {
                kernel.operation == operation && kernel.least_tier() == Tier::Plain
            }) {
                match self.can_run(kernel) {
                    Ok(()) => any = true,
                    Err(error) => refusal = Err(error),
                }
            }
            if !any {
                return refusal;
            }
        }
        Ok(())
    }
}

/// What an adapter is and has, without opening it.
#[derive(Clone, Debug)]
pub struct AdapterReport {
    /// Name, driver, backend, type.
    pub info: wgpu::AdapterInfo,
    /// The features that it has.
    pub features: wgpu::Features,
    /// What planning would know of it.
    pub capabilities: Capabilities,
}

impl fmt::Display for AdapterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe(&self.info))
    }
}

/// Name, backend and type in one phrase.
pub(super) fn describe(info: &wgpu::AdapterInfo) -> String {
    format!(
        "{} ({}, {})",
        info.name,
        backend_name(info.backend),
        device_type_name(info.device_type)
    )
}

/// The backend as people write it, and as `WGPU_BACKEND` takes it.
pub(crate) fn backend_name(backend: wgpu::Backend) -> &'static str {
    backend.to_str()
}

/// The type of an adapter in one word.
pub(crate) fn device_type_name(device_type: wgpu::DeviceType) -> &'static str {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "CPU",
        wgpu::DeviceType::Other => "other",
    }
}

impl AdapterReport {
    fn new(adapter: &wgpu::Adapter) -> Self {
        let (info, features) = (adapter.get_info(), adapter.features());
        let limits = LimitProfile::Adapter.of(&adapter.limits());
        let matrices = adapter.cooperative_matrix_properties();
        AdapterReport {
            capabilities: Capabilities::new(&info, &limits, features)
                .with_matrices(features, &matrices),
            info,
            features,
        }
    }

    /// The backend's name.
    pub fn backend(&self) -> &'static str {
        backend_name(self.info.backend)
    }

    /// The type in words.
    pub fn device_type(&self) -> &'static str {
        device_type_name(self.info.device_type)
    }
}

/// Every adapter that `options` and the environment let through, best first. Empty if there is none.
///
/// # Errors
///
/// [`Error::AdapterNotFound`] if `WGPU_BACKEND` names no backend.
pub async fn adapters(options: &GpuOptions) -> Result<Vec<AdapterReport>> {
    let mut found = enumerate(options).await?;
    if let Some(wanted) = wanted_name(options) {
        found.retain(|adapter| matching(&adapter.get_info().name, &wanted));
    }
    Ok(found.iter().map(AdapterReport::new).collect())
}

/// [`adapters`], waiting on this thread.
///
/// # Errors
///
/// As [`adapters`].
#[cfg(not(target_family = "wasm"))]
pub fn adapters_blocking(options: &GpuOptions) -> Result<Vec<AdapterReport>> {
    pollster::block_on(adapters(options))
}

/// What to do where there is no adapter.
pub fn install_hint() -> &'static str {
    if cfg!(target_os = "linux") {
        "Install the GPU vendor's Vulkan driver, or Mesa's (Debian, Ubuntu: apt-get install \
         mesa-vulkan-drivers, which also brings lavapipe, a Vulkan driver that needs no GPU; or \
         libegl1 libegl-mesa0 libgl1-mesa-dri for OpenGL)"
    } else {
        "Install the GPU vendor's driver"
    }
}

/// Whether an adapter of this name is meant by `wanted`: part of the name, in any case.
fn matching(name: &str, wanted: &str) -> bool {
    name.to_lowercase().contains(&wanted.to_lowercase())
}

/// The backends asked for, if any were.
fn wanted_backends(options: &GpuOptions) -> Option<wgpu::Backends> {
    let set = std::env::var("WGPU_BACKEND").is_ok_and(|value| !value.trim().is_empty());
    let from_env = || wgpu::Backends::from_env().filter(|_| set);
    options.backends.or_else(from_env)
}

/// The name asked for, if one was.
fn wanted_name(options: &GpuOptions) -> Option<String> {
    let from_env = || std::env::var("WGPU_ADAPTER_NAME").ok();
    let name = options.adapter_name.clone().or_else(from_env);
    name.filter(|name| !name.is_empty())
}

/// Adapters of the backends asked for, best first, before any name is looked at.
async fn enumerate(options: &GpuOptions) -> Result<Vec<wgpu::Adapter>> {
    let backends = wanted_backends(options).unwrap_or(wgpu::Backends::all());
    if backends.is_empty() {
        return Err(Error::AdapterNotFound {
            wanted: match options.backends {
                Some(_) => "of no backend at all (GpuOptions::backends)".into(),
                None => format!(
                    "of WGPU_BACKEND={:?}",
                    std::env::var("WGPU_BACKEND").unwrap_or_default()
                ),
            },
            available: "vulkan, metal, dx12 or gl, or several of them with commas between".into(),
        });
    }
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.backends = backends;
    let mut found = wgpu::Instance::new(descriptor)
        .enumerate_adapters(backends)
        .await;
    found.sort_by_cached_key(|adapter| {
        let info = adapter.get_info();
        (rank(&info), info.name)
    });
    Ok(found)
}

/// Smaller is better: hardware before software, discrete before integrated, OpenGL last of its kind.
fn rank(info: &wgpu::AdapterInfo) -> (u32, u32) {
    let device = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    let backend = match info.backend {
        wgpu::Backend::Gl => 1,
        wgpu::Backend::Noop => 2,
        _ => 0,
    };
    (device, backend)
}

/// The adapters to try to open, best first: at least one.
pub(super) async fn candidates(options: &GpuOptions) -> Result<Vec<wgpu::Adapter>> {
    let found = enumerate(options).await?;
    let (name, backends) = (wanted_name(options), wanted_backends(options));
    let describe_all = |adapters: &[wgpu::Adapter]| -> Vec<String> {
        let infos = adapters.iter().map(wgpu::Adapter::get_info);
        infos.map(|info| describe(&info)).collect()
    };
    let mut names = describe_all(&found);
    if names.is_empty() && backends.is_some() {
        // What there would be on other backends.
        let all = GpuOptions {
            backends: Some(wgpu::Backends::all()),
            ..Default::default()
        };
        names = describe_all(&enumerate(&all).await?);
    }
    let chosen: Vec<wgpu::Adapter> = match &name {
        None => found,
        Some(wanted) => found
            .into_iter()
            .filter(|adapter| matching(&adapter.get_info().name, wanted))
            .collect(),
    };
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let named = name.map(|name| format!("named {name:?}"));
    let of_backend = backends.map(|backends| {
        let backends: Vec<String> = backends
            .iter_names()
            .map(|(name, _)| name.to_lowercase())
            .collect();
        format!("of backend {}", backends.join(" or "))
    });
    let wanted: Vec<String> = named.into_iter().chain(of_backend).collect();
    if wanted.is_empty() {
        return Err(Error::NoAdapter {
            remedy: install_hint().into(),
        });
    }
    Err(Error::AdapterNotFound {
        wanted: wanted.join(" "),
        available: if names.is_empty() {
            format!("none at all. {}", install_hint())
        } else {
            names.join(", ")
        },
    })
}
