//! The kernels: one table, and the one way a kernel becomes WGSL.
//!
//! A kernel is a file `shaders/<stem>.wgsl` whose entry point is its stem, and a [`Kernel`] of the same
//! stem in this folder that says what the file cannot: which fragments are put in front of it, what is
//! bound, and which configurations exist. [`KERNELS`] lists them all; planner, tests, benches and the
//! command line go through that table.
//!
//! What an attention kernel lets a pair score, and whether it lets it be seen, is linked in too: one fragment of
//! `rules/` for masks, one for scores, and one for a caller's own [`Rule`](crate::Rule). Those that bind a buffer
//! bring its declaration with them.
//!
//! A [`Configuration`] is the only thing that specialises a kernel: `const` lines and a choice of
//! fragments. [`Kernel::assemble`] joins them as text; the whole text is the key of the pipeline cache,
//! so nothing that is baked into a shader can be left out of it.

mod append;
mod assemble;
mod attention_blocks;
mod attention_lanes;
mod attention_matrices;
mod attention_tiled;
mod attention_weights;
mod copy;
mod decode_lanes;
mod decode_rows;
mod decode_tiled;
mod linear_few;
mod linear_lanes;
mod linear_tiled;
mod merge;
pub(crate) mod params;
pub mod reflect;

pub use assemble::AssembleError;
pub(crate) use attention_blocks::KERNEL as ATTENTION_BLOCKS;
pub(crate) use attention_lanes::{LANES as ATTENTION_LANES, rows_at_once};
pub(crate) use attention_matrices::{KERNEL as ATTENTION_MATRICES, chunks as matrix_chunks};
pub(crate) use decode_rows::KERNEL as DECODE_ROWS;
pub(crate) use linear_few::LANES as FEW_LANES;
pub(crate) use linear_lanes::{LANES as LINEAR_LANES, READS};
pub(crate) use params::{
    AppendParams, AttentionParams, CopyParams, LinearParams, MergeParams, PeakParams,
};

use std::borrow::Cow;
use std::fmt;

/// Every kernel of this crate.
pub static KERNELS: &[&Kernel] = &[
    &attention_tiled::KERNEL,
    &attention_matrices::KERNEL,
    &attention_lanes::KERNEL,
    &attention_blocks::KERNEL,
    &decode_tiled::KERNEL,
    &decode_lanes::KERNEL,
    &decode_rows::KERNEL,
    &attention_weights::KERNEL,
    &merge::KERNEL,
    &linear_tiled::KERNEL,
    &linear_lanes::KERNEL,
    &linear_few::KERNEL,
    &copy::KERNEL,
    &append::KERNEL,
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
    /// The same for few rows.
    LinearFew,
    /// Scores, mask, softmax and values in one pass.
    Attention,
    /// The same of few queries over many keys, which it splits in parts.
    Decode,
    /// The probabilities themselves.
    Weights,
    /// Attention over all keys from attention over parts of them.
    Merge,
    /// A strided copy that may change the element type.
    Copy,
    /// New keys and values into a cache, and rotary embedding.
    Append,
    /// Nothing of use: what an adapter reaches at best is measured by it ([`PEAK_KERNELS`](crate::bench::PEAK_KERNELS)).
    Peak,
}

/// The kind of adapter that a kernel is written for. Both kinds run on every adapter; this is about speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Tiles in workgroup memory, shared by the invocations of a workgroup: for GPUs.
    Tiled,
    /// Everything in private memory, no barrier: for adapters that are a CPU underneath.
    Lanes,
}

/// Arithmetic that a kernel computes with. Every device has [`Plain`](Tier::Plain); a faster tier is one that an adapter may have.
///
/// Faster tiers are chosen only where they have shown on this very device that they are right: see [`Gpu::qualify`](crate::Gpu::qualify).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// f32 throughout, whatever the operands are stored as. No feature is needed.
    Plain,
    /// Operands of f16 stay f16 until they are multiplied; products and sums are f32. Needs `SHADER_F16`.
    Half,
    /// Products of tiles by matrix units, of f16 with sums in f32. Needs `SHADER_F16`, `SUBGROUP` and
    /// `EXPERIMENTAL_COOPERATIVE_MATRIX`, and an adapter that multiplies 16 x 16 by 16 x 16.
    Matrices,
}

impl Tier {
    /// The tiers that not every device has.
    pub const FASTER: [Tier; 2] = [Tier::Half, Tier::Matrices];

    /// The features that a device must have been opened with.
    pub fn features(self) -> wgpu::Features {
        let half = wgpu::Features::SHADER_F16;
        match self {
            Tier::Plain => wgpu::Features::empty(),
            Tier::Half => half,
            Tier::Matrices => {
                half | wgpu::Features::SUBGROUP | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
            }
        }
    }
}

impl Tier {
    /// In one word: `plain`, `half` or `matrices`.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Plain => "plain",
            Tier::Half => "half",
            Tier::Matrices => "matrices",
        }
    }

    /// Their names, as wgpu has them.
    pub(crate) fn feature_names(self) -> String {
        let names = self.features().iter_names();
        names.map(|(name, _)| name).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Plain => "plain f32 arithmetic",
            Tier::Half => "half-precision tiles",
            Tier::Matrices => "cooperative matrices",
        })
    }
}

/// A piece of WGSL that is put in front of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// The file under `shaders/`, without its ending.
    pub name: Cow<'static, str>,
    /// Its text.
    pub source: Cow<'static, str>,
}

impl Fragment {
    /// Whether it says what a kernel computes (one of `rules/`, or a caller's own), and not how.
    pub fn is_rule(&self) -> bool {
        !self.name.starts_with("shared/")
    }
}

macro_rules! fragment {
    ($name:literal) => {
        Fragment {
            name: Cow::Borrowed($name),
            source: Cow::Borrowed(include_str!(concat!("../../shaders/", $name, ".wgsl"))),
        }
    };
}

/// Folding of grids past 65535 workgroups an axis.
pub static GRID: Fragment = fragment!("shared/grid");
/// `AttentionParams`.
pub static ATTENTION_PARAMS: Fragment = fragment!("shared/attention_params");
/// What a batch item has of its own, and the keys that its queries may see by position.
pub static ITEM: Fragment = fragment!("shared/item");
/// Elements of 16 bits.
pub static ELEMENTS: Fragment = fragment!("shared/elements");
/// Writing an output of any float type.
pub static STORE: Fragment = fragment!("shared/store");
/// Writing a row's log-sum-exp.
pub static STORE_LSE: Fragment = fragment!("shared/store_lse");
/// What the rules make of a pair.
pub static PAIR: Fragment = fragment!("shared/pair");
/// Scores that weigh nothing.
pub static SCORES: Fragment = fragment!("shared/scores");
/// `LinearParams` and where a row of a view begins.
pub static LINEAR_PARAMS: Fragment = fragment!("shared/linear_params");
/// The bias of two columns of a projection.
pub static BIAS_PAIR: Fragment = fragment!("shared/bias_pair");
/// `MergeParams`.
pub static MERGE_PARAMS: Fragment = fragment!("shared/merge_params");
/// `AppendParams`.
pub static APPEND_PARAMS: Fragment = fragment!("shared/append_params");
/// `CopyParams`.
pub static COPY_PARAMS: Fragment = fragment!("shared/copy_params");
/// `PeakParams`.
pub static PEAK_PARAMS: Fragment = fragment!("shared/peak_params");
/// Peaks of f32.
pub static NUMBER_F32: Fragment = fragment!("shared/number_f32");
/// Peaks of f16.
pub static NUMBER_F16: Fragment = fragment!("shared/number_f16");
/// How decode kernels share out work.
pub static SHARE: Fragment = fragment!("shared/share");
/// Four channels of k or v in one load, f32.
pub static FOURS_F32: Fragment = fragment!("shared/fours_f32");
/// Four channels of k or v in one load, 16 bits each.
pub static FOURS_HALF: Fragment = fragment!("shared/fours_half");
/// Eight channels of k or v in one load, f32, as integers of 64 bits.
pub static EIGHTS_F32: Fragment = fragment!("shared/eights_f32");
/// Eight channels of k or v in one load, 16 bits each, as integers of 64 bits.
pub static EIGHTS_HALF: Fragment = fragment!("shared/eights_half");
/// Four channels of k or v in one load, as f16.
pub static FOURS_F16: Fragment = fragment!("shared/fours_f16");
/// Four channels of k or v in four loads, as f16, wherever they begin.
pub static FOURS_F16_ANY: Fragment = fragment!("shared/fours_f16_any");
/// Products of tiles by matrix units.
pub static MATRICES: Fragment = fragment!("shared/matrices");
/// Tiles of f32, and q of any type.
pub static TILES_F32: Fragment = fragment!("shared/tiles_f32");
/// Tiles of f16, and q of f16.
pub static TILES_HALF: Fragment = fragment!("shared/tiles_half");
/// Four channels of k or v in four loads, of any type, wherever they begin.
pub static FOURS_ANY: Fragment = fragment!("shared/fours_any");
/// Fours of a row of k or v for all lanes, loaded by all of them.
pub static SPREAD_UNIFORM: Fragment = fragment!("shared/spread_uniform");
/// Fours of a row of k or v for all lanes, loaded by one each and broadcast.
pub static SPREAD_SUBGROUP: Fragment = fragment!("shared/spread_subgroup");
/// Fours of a row of k or v for all lanes, loaded by one each, two at once, and broadcast.
pub static SPREAD_EIGHTS: Fragment = fragment!("shared/spread_eights");
/// Four channels of q and of the output at once, f32.
pub static Q_OUT_F32: Fragment = fragment!("shared/q_out_f32");
/// Four channels of q and of the output at once, of any type, wherever they begin. Takes [`STORE`].
pub static Q_OUT_ANY: Fragment = fragment!("shared/q_out_any");
/// Rows of a block into its lanes, by broadcasts.
pub static ROWS_IN_SUBGROUP: Fragment = fragment!("shared/rows_in_subgroup");
/// Rows of a block into its lanes, by way of the workgroup memory of [`ROWS_OUT_STAGED`].
pub static ROWS_IN_STAGED: Fragment = fragment!("shared/rows_in_staged");
/// Rows out of the lanes of a block, by shuffles.
pub static ROWS_OUT_SUBGROUP: Fragment = fragment!("shared/rows_out_subgroup");
/// Rows out of the lanes of a block, by way of workgroup memory.
pub static ROWS_OUT_STAGED: Fragment = fragment!("shared/rows_out_staged");
/// Weights of some columns for all lanes, loaded by all of them.
pub static WEIGHTS_UNIFORM: Fragment = fragment!("shared/weights_uniform");
/// Weights of some columns for all lanes, loaded by one each and broadcast.
pub static WEIGHTS_SUBGROUP: Fragment = fragment!("shared/weights_subgroup");
/// Four channels of x in one load, of a weight in four, wherever they lie.
pub static LINEAR_X_FOURS: Fragment = fragment!("shared/linear_x_fours");
/// Eight channels of x or of a weight in one load, as integers of 64 bits.
pub static LINEAR_EIGHTS: Fragment = fragment!("shared/linear_eights");
/// As many channels of x or of a weight as there are lanes, by fours.
pub static LINEAR_STEPS: Fragment = fragment!("shared/linear_steps");
/// What one more key does to a row.
pub static ONLINE: Fragment = fragment!("shared/online");
/// Four channels of x or of a weight in one load.
pub static LINEAR_FOURS: Fragment = fragment!("shared/linear_fours");
/// Four channels of x or of a weight in four loads, wherever they lie.
pub static LINEAR_FOURS_ANY: Fragment = fragment!("shared/linear_fours_any");
/// Where a new token goes in a cache.
pub static CACHE_ROW: Fragment = fragment!("shared/cache_row");
/// Store of a projection: keys and values into a cache.
pub static STORE_CACHE: Fragment = fragment!("rules/cache");
/// Store of a projection: into y.
pub static STORE_ROWS: Fragment = fragment!("rules/rows");
/// Rule: no mask.
pub static ATTEND_ALL: Fragment = fragment!("rules/attend_all");
/// Rule: a mask of pairs.
pub static MASK: Fragment = fragment!("rules/mask");
/// Rule: the score is the scaled product.
pub static PLAIN_SCORES: Fragment = fragment!("rules/plain_scores");
/// Rule: softcap, ALiBi and what a bias adds.
pub static SCORE_RULES: Fragment = fragment!("rules/scores");
/// Rule: an additive bias of pairs.
pub static BIAS: Fragment = fragment!("rules/bias");
/// Rule: no bias.
pub static NO_BIAS: Fragment = fragment!("rules/no_bias");
/// Where keys lie: one behind the other.
pub static IN_ORDER: Fragment = fragment!("rules/in_order");
/// Where keys lie: in pages.
pub static PAGES: Fragment = fragment!("rules/pages");
/// No rule of the caller's own.
pub static NO_RULE: Fragment = fragment!("rules/no_rule");
/// The buffer of a caller's own rule.
pub static RULE_DATA: Fragment = fragment!("rules/rule_data");

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

/// One binding of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Its number.
    pub number: u32,
    /// The variable's name in WGSL.
    pub name: &'static str,
    /// What it is used for.
    pub access: Access,
    /// The fragment that brings it; `None`: the kernel's own file.
    pub fragment: Option<&'static str>,
}

const fn binding(number: u32, name: &'static str, access: Access) -> Binding {
    Binding {
        number,
        name,
        access,
        fragment: None,
    }
}

pub(crate) const fn read(number: u32, name: &'static str) -> Binding {
    binding(number, name, Access::Read)
}

pub(crate) const fn write(number: u32, name: &'static str) -> Binding {
    binding(number, name, Access::Write)
}

pub(crate) const fn params(number: u32) -> Binding {
    binding(number, "params", Access::Params)
}

/// What a projection binds where its keys and values go into a cache.
const CACHE_BINDINGS: [Binding; 3] = [
    Binding {
        access: Access::Write,
        ..ruled(5, "k_cache", "rules/cache")
    },
    Binding {
        access: Access::Write,
        ..ruled(6, "v_cache", "rules/cache")
    },
    ruled(7, "tables", "rules/cache"),
];

/// Brought by a rule's fragment.
const fn ruled(number: u32, name: &'static str, fragment: &'static str) -> Binding {
    Binding {
        fragment: Some(fragment),
        ..read(number, name)
    }
}

/// What the rules of attention bind, wherever their fragments are linked in.
const RULE_BINDINGS: [Binding; 3] = [
    ruled(7, "mask", "rules/mask"),
    ruled(8, "bias", "rules/bias"),
    ruled(9, "rule_values", "rules/rule_data"),
];

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

impl ParamsLayout {
    /// Bytes from its beginning to a field; `None` where it has none of that name.
    pub fn offset_of(&self, name: &str) -> Option<usize> {
        let field = self.fields.iter().find(|field| field.name == name);
        field.map(|field| field.offset)
    }
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
    /// Group 0, in order; see [`Kernel::bound`].
    pub bindings: &'static [Binding],
    /// The parameters' layout in Rust.
    pub params: ParamsLayout,
    /// Every configuration that the planner may choose.
    pub configurations: fn() -> Vec<Configuration>,
    /// Workgroup memory of a configuration, in bytes. (Reflection holds it against the shader.)
    pub workgroup_bytes: fn(&Configuration) -> u64,
    /// Invocations of a workgroup of a configuration. (Reflection holds it against the shader.)
    pub invocations: fn(&Configuration) -> u32,
    /// Iterations of all loops of one invocation together, at most (each exit counts as one): of a configuration, the
    /// length that it walks over (keys; channels of x; parts), and channels.
    pub loop_iterations: fn(&Configuration, u64, u64) -> u64,
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
    pub rules: Vec<Fragment>,
}

impl Configuration {
    /// The constant of that name; 0 if the configuration has none.
    pub fn get(&self, name: &str) -> u32 {
        self.consts
            .iter()
            .find(|(key, _)| *key == name)
            .map_or(0, |(_, value)| *value)
    }

    /// The size of the adapter's subgroups that it is written for; `None`: any, and adapters without subgroup operations too.
    pub fn subgroup_size(&self) -> Option<u32> {
        let broadcasts = [
            &SPREAD_SUBGROUP,
            &SPREAD_EIGHTS,
            &WEIGHTS_SUBGROUP,
            &ROWS_IN_SUBGROUP,
            &ROWS_OUT_SUBGROUP,
        ];
        let needed = broadcasts.into_iter().any(|fragment| self.links(fragment));
        needed.then(|| self.get("LANES"))
    }

    /// Whether it takes integers of 64 bits.
    pub fn takes_int64(&self) -> bool {
        [&LINEAR_EIGHTS, &EIGHTS_F32, &EIGHTS_HALF]
            .into_iter()
            .any(|eights| self.links(eights))
    }

    /// Whether a fragment of that name is linked in, by whatever text.
    pub(crate) fn links(&self, fragment: &Fragment) -> bool {
        self.rules.iter().any(|rule| rule.name == fragment.name)
    }

    /// It with one of its fragments exchanged for others; `None` where it has not got that one.
    pub(crate) fn exchanged(&self, one: &Fragment, others: &[&Fragment]) -> Option<Configuration> {
        let at = self.rules.iter().position(|rule| rule.name == one.name)?;
        let mut changed = self.clone();
        changed
            .rules
            .splice(at..=at, others.iter().map(|other| (*other).clone()));
        Some(changed)
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
        parts.extend(self.fragments.iter().map(|fragment| &*fragment.source));
        parts.extend(configuration.rules.iter().map(|rule| &*rule.source));
        parts.push(self.source);
        assemble::assemble(&configuration.consts, &parts)
    }

    /// What a configuration binds: a rule's buffer is there if its fragment is.
    pub fn bound<'a>(
        &'a self,
        configuration: &'a Configuration,
    ) -> impl Iterator<Item = &'a Binding> {
        let linked = |name: &str| configuration.rules.iter().any(|rule| rule.name == name);
        self.bindings
            .iter()
            .filter(move |binding| binding.fragment.is_none_or(linked))
    }

    /// The arithmetic that a configuration needs, as the WGSL that it is made of says by its `enable` lines.
    pub fn tier(&self, configuration: &Configuration) -> Tier {
        let fragments = self.fragments.iter().copied().chain(&configuration.rules);
        let texts = fragments.map(|fragment| &*fragment.source);
        let mut enabled: Vec<&str> = texts
            .chain([self.source])
            .flat_map(assemble::enabled)
            .collect();
        enabled.sort_unstable();
        match enabled.last() {
            Some(&"wgpu_cooperative_matrix") => Tier::Matrices,
            Some(&"f16") => Tier::Half,
            _ => Tier::Plain,
        }
    }

    /// The least arithmetic that any configuration of it needs.
    pub fn least_tier(&self) -> Tier {
        (self.configurations)()
            .first()
            .map_or(Tier::Plain, |plainest| self.tier(plainest))
    }

    /// Storage buffers that a configuration binds.
    pub fn storage_buffers(&self, configuration: &Configuration) -> u32 {
        let storage = self
            .bound(configuration)
            .filter(|binding| binding.access != Access::Params);
        storage.count() as u32
    }
}

/// The words (names and numbers) and other characters of WGSL, in order; joined again they are the text.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    assemble::tokens(text)
}

/// The smallest of the compiled sizes that holds `size`; `None` above the largest.
pub(crate) fn compiled(sizes: &[u32], size: u32) -> Option<u32> {
    sizes.iter().copied().find(|compiled| *compiled >= size)
}

/// Storage types of k and v, as kernels number them: f32, f16, bf16.
const TYPES: [u32; 3] = [0, 1, 2];

/// Where a projection stores: all of it to y; or keys and values into a cache.
fn stores() -> [Vec<Fragment>; 2] {
    [vec![&STORE_ROWS], vec![&ELEMENTS, &CACHE_ROW, &STORE_CACHE]]
        .map(|set| set.into_iter().cloned().collect())
}

/// How kernels of the lanes form read q and write the output, by how they read k and v: four channels at a time where all of them are f32.
fn q_out(fours: &Fragment) -> Vec<&'static Fragment> {
    match [&FOURS_F32, &EIGHTS_F32].contains(&fours) {
        true => vec![&Q_OUT_F32],
        false => vec![&STORE, &Q_OUT_ANY],
    }
}

/// The combinations of rule fragments that attention kernels are compiled for: what is left out costs nothing, what
/// is linked in and not used costs a little.
fn rule_sets() -> [Vec<Fragment>; 4] {
    [
        vec![&ATTEND_ALL, &PLAIN_SCORES, &IN_ORDER, &NO_RULE],
        vec![&MASK, &PLAIN_SCORES, &IN_ORDER, &NO_RULE],
        vec![&MASK, &SCORE_RULES, &BIAS, &IN_ORDER, &NO_RULE],
        // Pages go with each of them: one of the three stands for all.
        vec![&MASK, &SCORE_RULES, &BIAS, &PAGES, &NO_RULE],
    ]
    .map(|set| set.into_iter().cloned().collect())
}

/// Of the text of all kernels: a changed one makes old times worth nothing.
#[cfg(any(feature = "tuning-file", feature = "results"))]
pub(crate) fn hash_of_all() -> String {
    let texts = KERNELS.iter().map(|kernel| {
        let fragments = kernel.fragments.iter().map(|fragment| &*fragment.source);
        let fragments: String = fragments.collect();
        let configurations = (kernel.configurations)().into_iter();
        let configurations = configurations.map(|configuration| {
            let rules: String = configuration
                .rules
                .iter()
                .map(|rule| &*rule.source)
                .collect();
            format!("{configuration}{:016x}", hash(&rules))
        });
        format!(
            "{fragments}{}{}",
            kernel.source,
            configurations.collect::<String>()
        )
    });
    format!("{:016x}", hash(&texts.collect::<String>()))
}

/// A hash that is the same on every machine and for every compiler (FNV-1a of 64 bits,
/// <http://www.isthe.com/chongo/tech/comp/fnv/>).
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
