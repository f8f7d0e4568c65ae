//! WGSL to SPIR-V, with the options that wgpu gives naga on this driver.

use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module};

/// Which runtime checks naga writes into the shader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checks {
    /// None: for kernels that were validated and tested.
    Off,
    /// Those that wgpu asks for unless it is told not to: indices of arrays are kept inside them, loops end, divisions by
    /// zero have a result. (Buffers are left to the driver, which checks them by itself.)
    On,
}

/// A shader, ready for a pipeline.
pub(crate) struct Shader {
    /// The SPIR-V.
    pub(crate) words: Vec<u32>,
    /// What it binds: group, number, and whether it is a uniform buffer.
    pub(crate) bindings: Vec<(u32, u32, bool)>,
    /// Bytes of workgroup memory that the text declares.
    pub(crate) workgroup_bytes: u64,
    /// Whether it needs the cooperative matrix extension.
    pub(crate) uses_matrices: bool,
}

/// Translates one entry point. Workgroup memory is cleared first if `clears_memory`.
///
/// # Errors
///
/// naga's message with the source line, ready to be printed.
pub(crate) fn translate(
    source: &str,
    entry: &str,
    checks: Checks,
    clears_memory: bool,
) -> Result<Shader, String> {
    let module =
        naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .map_err(|error| error.emit_to_string(source))?;
    if !module.entry_points.iter().any(|other| other.name == entry) {
        let names: Vec<_> = module
            .entry_points
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        return Err(format!(
            "no entry point {entry:?}; there are: {}",
            names.join(", ")
        ));
    }
    let words = write(&module, &info, entry, checks, clears_memory)?;
    let mut layouter = naga::proc::Layouter::default();
    layouter
        .update(module.to_ctx())
        .map_err(|error| error.to_string())?;
    let globals = || module.global_variables.iter().map(|(_, variable)| variable);
    Ok(Shader {
        words,
        bindings: globals()
            .filter_map(|variable| {
                let uniform = variable.space == AddressSpace::Uniform;
                variable.binding.map(|at| (at.group, at.binding, uniform))
            })
            .collect(),
        workgroup_bytes: globals()
            .filter(|variable| variable.space == AddressSpace::WorkGroup)
            .map(|variable| u64::from(layouter[variable.ty].size))
            .sum(),
        uses_matrices: module
            .types
            .iter()
            .any(|(_, ty)| matches!(ty.inner, naga::TypeInner::CooperativeMatrix { .. })),
    })
}

fn write(
    module: &Module,
    info: &ModuleInfo,
    entry: &str,
    checks: Checks,
    clears_memory: bool,
) -> Result<Vec<u32>, String> {
    let checked = checks == Checks::On;
    let unchecked = BoundsCheckPolicy::Unchecked;
    let options = spv::Options {
        lang_version: (1, 6),
        flags: spv::WriterFlags::LABEL_VARYINGS | spv::WriterFlags::FORCE_POINT_SIZE,
        // Bindings keep their numbers; without this naga wants a table that says so.
        fake_missing_bindings: true,
        bounds_check_policies: BoundsCheckPolicies {
            index: if checked {
                BoundsCheckPolicy::Restrict
            } else {
                unchecked
            },
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: if clears_memory {
            spv::ZeroInitializeWorkgroupMemoryMode::Native
        } else {
            spv::ZeroInitializeWorkgroupMemoryMode::None
        },
        force_loop_bounding: checked,
        emit_int_div_checks: checked,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: entry.to_owned(),
    };
    spv::write_vec(module, info, &options, Some(&pipeline)).map_err(|error| error.to_string())
}
