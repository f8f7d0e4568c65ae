//! What naga reads in an assembled shader: held against the descriptors in tests, and by anyone who writes a kernel.

use super::{Access, Binding};
use naga::{AddressSpace, StorageAccess, TypeInner};

/// What a compute shader's text says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reflection {
    /// The entry points' names.
    pub entry_points: Vec<String>,
    /// Invocations a workgroup of the first entry point, by axis.
    pub workgroup_size: [u32; 3],
    /// Bytes of all `var<workgroup>` together.
    pub workgroup_bytes: u64,
    /// Bindings of group 0 in order of their number: number, name, access.
    pub bindings: Vec<(u32, String, Access)>,
    /// The uniform struct.
    pub params: Option<ParamsStruct>,
}

/// A uniform struct as the shader lays it out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamsStruct {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size: u32,
    /// Each member's name, offset in bytes, and type.
    pub members: Vec<(String, u32, String)>,
}

impl Reflection {
    /// Whether group 0 is exactly `bindings`, in the order of their numbers.
    pub fn binds<'a>(&self, bindings: impl IntoIterator<Item = &'a Binding>) -> bool {
        let expected = bindings.into_iter();
        self.bindings
            .iter()
            .map(|(number, name, access)| (*number, name.as_str(), *access))
            .eq(expected.map(|binding| (binding.number, binding.name, binding.access)))
    }
}

/// Parses and validates WGSL without a GPU.
///
/// # Errors
///
/// naga's message with the source line, ready to be printed.
pub fn validate(source: &str) -> Result<(naga::Module, naga::valid::ModuleInfo), String> {
    let module =
        naga::front::wgsl::parse_str(source).map_err(|error| error.emit_to_string(source))?;
    let info = naga::valid::Validator::new(
        naga::valid::ValidationFlags::all(),
        // Who needs subgroups says so: Configuration::subgroup_size. What needs the others must enable them: Kernel::tier.
        naga::valid::Capabilities::SUBGROUP
            | naga::valid::Capabilities::SHADER_FLOAT16
            | naga::valid::Capabilities::SHADER_INT64
            | naga::valid::Capabilities::COOPERATIVE_MATRIX,
    )
    .validate(&module)
    .map_err(|error| error.emit_to_string(source))?;
    Ok((module, info))
}

/// Reads entry points, workgroup size and memory, bindings and parameters back from WGSL.
///
/// # Errors
///
/// As [`validate`].
pub fn reflect(source: &str) -> Result<Reflection, String> {
    let (module, _) = validate(source)?;
    let mut layouter = naga::proc::Layouter::default();
    layouter
        .update(module.to_ctx())
        .map_err(|error| error.to_string())?;

    let mut workgroup_bytes = 0u64;
    let mut bindings = Vec::new();
    let mut params = None;
    for (_, variable) in module.global_variables.iter() {
        let access = match variable.space {
            AddressSpace::WorkGroup => {
                workgroup_bytes += u64::from(layouter[variable.ty].size);
                continue;
            }
            AddressSpace::Uniform => {
                if let TypeInner::Struct { members, span } = &module.types[variable.ty].inner {
                    let name = module.types[variable.ty].name.clone().unwrap_or_default();
                    let members = members
                        .iter()
                        .map(|member| {
                            let ty = match module.types[member.ty].inner {
                                TypeInner::Scalar(scalar) => scalar_name(scalar),
                                _ => "not a scalar".to_string(),
                            };
                            (member.name.clone().unwrap_or_default(), member.offset, ty)
                        })
                        .collect();
                    params = Some(ParamsStruct {
                        name,
                        size: *span,
                        members,
                    });
                }
                Access::Params
            }
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => {
                Access::Write
            }
            AddressSpace::Storage { .. } => Access::Read,
            _ => continue,
        };
        let binding = variable
            .binding
            .ok_or_else(|| format!("{:?} has no @binding", variable.name))?;
        if binding.group != 0 {
            return Err(format!(
                "{:?} is in group {}, not 0",
                variable.name, binding.group
            ));
        }
        bindings.push((
            binding.binding,
            variable.name.clone().unwrap_or_default(),
            access,
        ));
    }
    bindings.sort_by_key(|(number, ..)| *number);
    Ok(Reflection {
        entry_points: module
            .entry_points
            .iter()
            .map(|entry| entry.name.clone())
            .collect(),
        workgroup_size: module
            .entry_points
            .first()
            .map_or([0; 3], |entry| entry.workgroup_size),
        workgroup_bytes,
        bindings,
        params,
    })
}

fn scalar_name(scalar: naga::Scalar) -> String {
    let kind = match scalar.kind {
        naga::ScalarKind::Sint => "i",
        naga::ScalarKind::Uint => "u",
        naga::ScalarKind::Float => "f",
        _ => "other",
    };
    format!("{kind}{}", 8 * u32::from(scalar.width))
}
