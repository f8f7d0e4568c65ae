//! The kernels: one table, and the one way a kernel becomes WGSL.
//!
//! A kernel is a file `shaders/<stem>.wgsl` whose entry point is its stem, and a [`Kernel`] of the same
//! stem in this folder that says what the file cannot: which fragments are put in front of it, what is
//! bound, and which configurations exist. [`KERNELS`] lists them all; planner, tests, benches and the
//! command line go through that table.
//!
//! A [`Configuration`] is the only thing that specialises a kernel: `const` lines and a choice of
//! fragments. [`Kernel::assemble`] joins them as text; the whole text is the key of the pipeline cache,
//! so nothing that is baked into a shader can be left out of it.

mod assemble;
mod attention_lanes;
mod attention_tiled;
mod linear_lanes;
mod linear_tiled;
pub(crate) mod params;
pub mod reflect;

pub use assemble::AssembleError;
pub(crate) use params::{AttentionParams, LinearParams};

use std::fmt;

/// Every kernel of this crate.
pub static KERNELS: &[&Kernel] = &[
    &attention_tiled::KERNEL,
    &attention_lanes::KERNEL,
    &linear_tiled::KERNEL,
    &linear_lanes::KERNEL,
];

/// The kernel of that name.
pub fn find(name: &str) -> Option<&'static Kernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name == name)
}

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `y = x Wᵀ + b`.
    Linear,
    /// Scores, mask, softmax and values in one pass.
    Attention,
}

/// The kind of adapter that a kernel is written for. Both kinds run on every adapter; this is about speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Tiles in workgroup memory, shared by the invocations of a workgroup: for GPUs.
    Tiled,
    /// Everything in private memory, no barrier: for adapters that are a CPU underneath.
    Lanes,
}

/// A piece of WGSL that is put in front of a kernel.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// The file under `shaders/`, without its ending.
    pub name: &'static str,
    /// Its text.
    pub source: &'static str,
}

macro_rules! fragment {
    ($name:literal) => {
        Fragment {
            name: $name,
            source: include_str!(concat!("../../shaders/", $name, ".wgsl")),
        }
    };
}

/// Folding of grids past 65535 workgroups an axis.
pub static GRID: Fragment = fragment!("shared/grid");
/// `AttentionParams`.
pub static ATTENTION_PARAMS: Fragment = fragment!("shared/attention_params");
/// Keys hidden by position: causal.
pub static KEY_RANGE: Fragment = fragment!("shared/key_range");
/// Scores that weigh nothing.
pub static SCORES: Fragment = fragment!("shared/scores");
/// `LinearParams` and where a row of a view begins.
pub static LINEAR_PARAMS: Fragment = fragment!("shared/linear_params");
/// Rule: no key is hidden but by its position.
pub static ATTEND_ALL: Fragment = fragment!("rules/attend_all");
/// Rule: a padding mask (B, Tk).
pub static KEY_MASK: Fragment = fragment!("rules/key_mask");

/// What a binding is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// A storage buffer that the kernel only reads.
    Read,
    /// A storage buffer that the kernel writes.
    Write,
    /// The parameters, in a uniform buffer.
    Params,
}

/// One binding of group 0; its number is its place in [`Kernel::bindings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// The variable's name in WGSL.
    pub name: &'static str,
    /// What it is used for.
    pub access: Access,
}

const fn read(name: &'static str) -> Binding {
    Binding {
        name,
        access: Access::Read,
    }
}

const fn write(name: &'static str) -> Binding {
    Binding {
        name,
        access: Access::Write,
    }
}

const PARAMS: Binding = Binding {
    name: "params",
    access: Access::Params,
};

/// A field of a parameter struct, as Rust lays it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name, in Rust and in WGSL.
    pub name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// `u32`, `i32` or `f32`.
    pub ty: &'static str,
}

/// A parameter struct, as Rust lays it out. Reflection holds it against its WGSL twin.
#[derive(Clone, Copy, Debug)]
pub struct ParamsLayout {
    /// The struct's name, in Rust and in WGSL.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Its fields in order.
    pub fields: &'static [Field],
}

/// A kernel: everything about it that its WGSL file does not say itself.
#[derive(Clone)]
pub struct Kernel {
    /// The stem of its file and its entry point.
    pub name: &'static str,
    /// What it computes.
    pub operation: Operation,
    /// Which kind of adapter it is written for.
    pub form: Form,
    /// One line for people.
    pub summary: &'static str,
    /// The text of `shaders/<name>.wgsl`.
    pub source: &'static str,
    /// What always goes in front of it.
    pub fragments: &'static [&'static Fragment],
    /// Group 0, in order.
    pub bindings: &'static [Binding],
    /// The parameters' layout in Rust.
    pub params: ParamsLayout,
    /// Every configuration that the planner may choose.
    pub configurations: fn() -> Vec<Configuration>,
    /// Workgroup memory of a configuration, in bytes. (Reflection holds it against the shader.)
    pub workgroup_bytes: fn(&Configuration) -> u64,
    /// Invocations of a workgroup of a configuration. (Reflection holds it against the shader.)
    pub invocations: fn(&Configuration) -> u32,
    /// Whether the driver must clear workgroup memory first, as WGSL promises. Kernels that write before they
    /// read do without.
    pub needs_cleared_memory: bool,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("name", &self.name).finish()
    }
}

/// What specialises a kernel: constants and rule fragments, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Configuration {
    /// `const NAME: u32 = value;` lines, in order.
    pub consts: Vec<(&'static str, u32)>,
    /// The rule fragments that are linked in.
    pub rules: Vec<&'static Fragment>,
}

impl Configuration {
    /// The constant of that name; 0 if the configuration has none.
    pub fn get(&self, name: &str) -> u32 {
        self.consts
            .iter()
            .find(|(key, _)| *key == name)
            .map_or(0, |(_, value)| *value)
    }
}

impl fmt::Display for Configuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words: Vec<String> = self
            .consts
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        words.extend(self.rules.iter().map(|rule| rule.name.to_string()));
        f.write_str(&words.join(" "))
    }
}

impl Kernel {
    /// The whole WGSL text of a configuration: constants, fragments, rules, the kernel's file, with every
    /// loop marked `// @unroll` written out.
    ///
    /// # Errors
    ///
    /// [`AssembleError`] if a marked loop cannot be written out: its line and the reason.
    pub fn assemble(&self, configuration: &Configuration) -> Result<String, AssembleError> {
        let mut parts: Vec<&str> = Vec::new();
        parts.extend(self.fragments.iter().map(|fragment| fragment.source));
        parts.extend(configuration.rules.iter().map(|rule| rule.source));
        parts.push(self.source);
        assemble::assemble(&configuration.consts, &parts)
    }

    /// Storage buffers that the kernel binds.
    pub fn storage_buffers(&self) -> u32 {
        let storage = self
            .bindings
            .iter()
            .filter(|binding| binding.access != Access::Params);
        storage.count() as u32
    }
}

/// Head sizes that attention kernels are compiled for: `head_dim` is rounded up to the next one.
pub const HEAD_DIMS: [u32; 8] = [8, 16, 32, 64, 96, 128, 192, 256];

/// The smallest compiled head size that holds `head_dim`; `None` above the largest.
pub fn compiled_head_dim(head_dim: u32) -> Option<u32> {
    HEAD_DIMS.into_iter().find(|size| *size >= head_dim)
}

/// The attention configurations: every compiled head size by every rule, each from the smallest block of queries
/// to the largest.
fn attention_configurations(
    make: fn(u32, &'static Fragment) -> Vec<Configuration>,
) -> Vec<Configuration> {
    let rules = [&ATTEND_ALL, &KEY_MASK];
    HEAD_DIMS
        .into_iter()
        .flat_map(|size| rules.into_iter().flat_map(move |rule| make(size, rule)))
        .collect()
}
