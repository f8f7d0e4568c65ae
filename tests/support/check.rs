//! The check that every kernel must pass and every broken kernel must fail: a case, its data, the reference's answer,
//! a run into a guarded output, and the comparison.

use super::{Guarded, Random, SENTINEL, leave_dirt, run};
use std::sync::{Mutex, MutexGuard, PoisonError};
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::kernels::{
    Configuration, FOURS_F32, FOURS_HALF, Form, Fragment, KERNELS, Kernel, Operation, Tier,
};
use wgpu_attention::reference::{self, AttentionInputs, Broadcast, Rules, widen};
use wgpu_attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules, Element,
    ElementType, Gpu, Linear, LinearArguments, LinearProblem, Plan, Rule, RuleArguments, Tensor,
    TensorView, wgpu,
};

/// The adapter under test, for one test after another where it must be.
pub struct Turn {
    gpu: Gpu,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl std::ops::Deref for Turn {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// [`super::gpu`]. wgpu gives up with a panic when another thread holds the OpenGL context for more than 6 seconds,
/// as a software adapter may for one pipeline: there the tests take turns.
pub fn gpu() -> Option<Turn> {
    static TURNS: Mutex<()> = Mutex::new(());
    let gpu = super::gpu()?;
    let alone = gpu.adapter_info().backend == wgpu::Backend::Gl;
    let turn = alone.then(|| TURNS.lock().unwrap_or_else(PoisonError::into_inner));
    Some(Turn { gpu, _turn: turn })
}

/// What is under test: a kernel of the table or a changed one, in the planner's configuration or a given one.
#[derive(Clone, Debug)]
pub struct Subject {
    pub kernel: &'static Kernel,
    pub configuration: Option<Configuration>,
    /// Workgroups along x and y where the grid is folded as one of more than 65535 would be.
    pub fold: Option<[u32; 2]>,
    /// Linked in for the rule fragments of the same names.
    pub rules: Vec<Fragment>,
    /// Parts in which a decode kernel splits the keys, whatever the planner would choose.
    pub splits: Option<u32>,
}

/// Every kernel that computes attention: those for few queries take any number of them.
///
/// With `WGPU_ATTENTION_DECODE_KERNELS=decode` those are left to tests/decode.rs: for adapters that
/// take long to compile, once the fastest has run all checks on all of them.
pub fn attention_kernels() -> Vec<Subject> {
    let apart = std::env::var("WGPU_ATTENTION_DECODE_KERNELS").is_ok_and(|own| own == "decode");
    if apart {
        return kernels(Operation::Attention);
    }
    all_attention_kernels()
}

/// [`attention_kernels`], whatever the environment says.
pub fn all_attention_kernels() -> Vec<Subject> {
    [Operation::Attention, Operation::Decode]
        .into_iter()
        .flat_map(kernels)
        .collect()
}

/// Every kernel for an operation (and for few rows of it), in the planner's configuration. Those of faster arithmetic than every device
/// has are in tests/tiers.rs.
pub fn kernels(operation: Operation) -> Vec<Subject> {
    let of = |kernel: &Kernel| match kernel.operation {
        Operation::LinearFew => Operation::Linear,
        other => other,
    };
    let found: Vec<Subject> = KERNELS
        .iter()
        .filter(|kernel| of(kernel) == operation && kernel.least_tier() == Tier::Plain)
        .map(|kernel| Subject {
            kernel,
            configuration: None,
            fold: None,
            rules: Vec::new(),
            splits: None,
        })
        // Where there are no broadcasts there is no attention_blocks.
        .filter(|subject| {
            let gpu = super::gpu();
            subject.kernel.name != "attention_blocks"
                || gpu.is_none_or(|gpu| subject.largest_head(&gpu) > 0)
        })
        .collect();
    assert!(found.len() >= 2, "a kernel of each form");
    found
}

/// `WGPU_ATTENTION_CONFIGURATIONS=few`: where tests compile every configuration, those that differ from another in nothing but sizes,
/// or combine what each was compiled with already, are left out. For adapters that take long to compile, once the fastest has run all.
pub fn few_configurations() -> bool {
    std::env::var("WGPU_ATTENTION_CONFIGURATIONS").is_ok_and(|value| value == "few")
}

/// Every kernel for an operation in each of its configurations that the device runs and `wanted` picks.
pub fn configurations(
    gpu: &Gpu,
    operation: Operation,
    wanted: impl Fn(&Configuration) -> bool,
) -> Vec<Subject> {
    let mut found = Vec::new();
    for subject in kernels(operation) {
        for configuration in (subject.kernel.configurations)() {
            let plain = subject.kernel.tier(&configuration) == Tier::Plain;
            let bytes = (subject.kernel.workgroup_bytes)(&configuration);
            let runs = plain
                && gpu.capabilities().suits(&configuration)
                && bytes <= gpu.capabilities().max_workgroup_bytes;
            if runs && wanted(&configuration) {
                found.push(Subject {
                    configuration: Some(configuration),
                    ..subject.clone()
                });
            }
        }
    }
    found
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.configuration {
            Some(configuration) => write!(f, "{} [{configuration}]", self.kernel.name),
            None => f.write_str(self.kernel.name),
        }
    }
}

impl Subject {
    /// Compiled for a problem.
    pub fn attention(&self, gpu: &Gpu, problem: &AttentionProblem) -> Result<Attention, String> {
        // Its twin takes larger heads, or more devices, so that the planner would not refuse them.
        if ["decode_rows", "attention_blocks"].contains(&self.kernel.name)
            && !self.takes(gpu, problem)
        {
            let (name, largest) = (self.kernel.name, self.largest_head(gpu));
            return Err(format!("the largest head of {name} allows {largest}"));
        }
        let problem = AttentionProblem {
            form: Some(self.kernel.form),
            decode: Some(self.kernel.operation == Operation::Decode),
            ..problem.clone()
        };
        let mut plan = problem
            .plan(gpu.capabilities())
            .map_err(|error| error.to_string())?;
        let other = plan.kernel.name != self.kernel.name;
        let twins = self.kernel.form == Form::Lanes
            && (plan.kernel.operation, plan.kernel.form)
                == (self.kernel.operation, self.kernel.form);
        if other && !twins {
            return Err(format!("the planner chose {}", plan.kernel.name));
        }
        if other {
            // Two kernels of one form, of which the planner takes one by the number of rows, or by the size of heads: each can do
            // what the other does.
            plan.configuration = self.twin(gpu, &problem, &plan.configuration)?;
        }
        plan.kernel = self.kernel;
        let forced = self.configuration.is_some() || self.splits.is_some() || other;
        if self.kernel.operation == Operation::Decode && forced {
            let configuration = self.configuration.as_ref().unwrap_or(&plan.configuration);
            let rows = problem.q_len * (problem.heads / problem.kv_heads);
            let tiles = rows.div_ceil(configuration.get("ROWS") as usize);
            // Packed sequences are never split.
            let splits = self.splits.filter(|_| !problem.packed);
            plan.splits = splits.unwrap_or(plan.splits);
            plan.configuration = configuration.clone();
            let groups = tiles * problem.kv_heads * problem.batch * plan.splits as usize;
            (plan.groups, plan.grid) = grid_of(groups)?;
        } else if forced {
            let configuration = self.configuration.as_ref().unwrap_or(&plan.configuration);
            let block = match self.kernel.form {
                Form::Tiled => 4 * configuration.get("DOWN"),
                Form::Lanes => configuration.get("LANES") * configuration.get("ROWS"),
            };
            let block = block as usize;
            let groups = problem.q_len.div_ceil(block) * problem.heads * problem.batch;
            plan.configuration = configuration.clone();
            plan.splits = 1;
            (plan.groups, plan.grid) = grid_of(groups)?;
        }
        if let Some(splits) = self.splits
            && self.kernel.operation == Operation::Attention
            && !problem.packed
        {
            let groups = plan.groups / plan.splits * splits;
            plan.splits = splits;
            (plan.groups, plan.grid) = grid_of(groups as usize)?;
        }
        self.fold_grid(&mut plan);
        self.link_rules(&mut plan);
        Attention::from_plan(gpu, problem, plan).map_err(|error| error.to_string())
    }

    /// The configuration of this kernel in place of one of another kernel for the same: of the same types, reading k and v alike, and of the
    /// smallest size that is enough, with the fewest rows that hold those of the problem, or the most that there are.
    fn twin(
        &self,
        gpu: &Gpu,
        problem: &AttentionProblem,
        planned: &Configuration,
    ) -> Result<Configuration, String> {
        let same = |name: &str, c: &Configuration| c.get(name) == planned.get(name);
        let mut fitting = (self.kernel.configurations)();
        let head_dim = problem.head_dim.max(problem.value_dim) as u32;
        fitting.retain(|c| same("KV_TYPE", c) && c.get("HEAD_DIM") >= head_dim);
        if self.kernel.operation == Operation::Attention {
            fitting.retain(|c| c.subgroup_size() == planned.subgroup_size());
        }
        // (By eights read some kernels alone.)
        let reading = planned
            .rules
            .iter()
            .find_map(|fragment| match &*fragment.name {
                name if fitting.iter().any(|c| c.rules.contains(fragment)) => {
                    (name.starts_with("shared/fours") || name.starts_with("shared/eights"))
                        .then_some(fragment)
                }
                "shared/eights_f32" => Some(&FOURS_F32),
                "shared/eights_half" => Some(&FOURS_HALF),
                _ => None,
            });
        if let Some(reading) = reading
            && fitting.iter().any(|c| c.rules.contains(reading))
        {
            fitting.retain(|c| c.rules.contains(reading));
        }
        // With the rules of the problem, some have no room.
        let rules = planned.rules.iter().filter(|fragment| fragment.is_rule());
        for configuration in &mut fitting {
            configuration.rules.retain(|fragment| !fragment.is_rule());
            configuration.rules.splice(0..0, rules.clone().cloned());
        }
        let bytes = gpu.capabilities().max_workgroup_bytes;
        fitting.retain(|c| (self.kernel.workgroup_bytes)(c) <= bytes);
        let smallest = fitting.iter().map(|c| c.get("HEAD_DIM")).min();
        fitting.retain(|c| Some(c.get("HEAD_DIM")) == smallest);
        fitting.sort_by_key(|c| c.get("ROWS"));
        let rows = problem.q_len * (problem.heads / problem.kv_heads);
        let holds = fitting.iter().find(|c| c.get("ROWS") as usize >= rows);
        let found = holds.or(fitting.last()).cloned();
        found.ok_or_else(|| format!("{} has no such size", self.kernel.name))
    }

    /// Compiled for a problem.
    pub fn linear(&self, gpu: &Gpu, problem: &LinearProblem) -> Result<Linear, String> {
        let problem = LinearProblem {
            form: Some(self.kernel.form),
            few: Some(self.kernel.operation == Operation::LinearFew),
            ..*problem
        };
        let mut plan = problem
            .plan(gpu.capabilities())
            .map_err(|error| error.to_string())?;
        if plan.kernel.name != self.kernel.name {
            return Err(format!("the planner chose {}", plan.kernel.name));
        }
        plan.kernel = self.kernel;
        if let Some(configuration) = &self.configuration {
            let (rows, columns) = (
                configuration.get("ROWS") as usize,
                configuration.get("COLUMNS") as usize,
            );
            let (m, n) = match (self.kernel.operation, self.kernel.form) {
                (Operation::LinearFew, _) => (rows, columns),
                (_, Form::Tiled) => (
                    configuration.get("DOWN") as usize * rows,
                    configuration.get("ACROSS") as usize * columns,
                ),
                (_, Form::Lanes) => (configuration.get("LANES") as usize * rows, columns),
            };
            let groups = (problem.batch * problem.tokens).div_ceil(m) * problem.d_out.div_ceil(n);
            plan.configuration = configuration.clone();
            (plan.groups, plan.grid) = grid_of(groups)?;
        }
        self.fold_grid(&mut plan);
        self.link_rules(&mut plan);
        Linear::from_plan(gpu, problem, plan).map_err(|error| error.to_string())
    }
}

impl Subject {
    /// Whether the form is compiled for such a problem: the lanes form goes up to a size (decode_lanes 128 channels).
    pub fn takes(&self, gpu: &Gpu, problem: &AttentionProblem) -> bool {
        self.kernel.form == Form::Tiled
            || problem.head_dim.max(problem.value_dim) <= self.largest_head(gpu)
    }

    /// The channels that a kernel of the lanes form goes up to: attention_lanes further where it can broadcast, attention_blocks only there.
    pub fn largest_head(&self, gpu: &Gpu) -> usize {
        let capabilities = gpu.capabilities();
        let size = capabilities
            .known_subgroup()
            .filter(|size| [4, 8].contains(size));
        let mut all = (self.kernel.configurations)();
        all.retain(|c| self.kernel.operation != Operation::Attention || c.subgroup_size() == size);
        let largest = all.iter().map(|c| c.get("HEAD_DIM")).max();
        largest.unwrap_or(0) as usize
    }

    /// Whether it is the kernel that the planner chooses on this adapter.
    pub fn is_planned(&self, gpu: &Gpu) -> bool {
        let software = gpu.adapter_info().device_type == wgpu::DeviceType::Cpu;
        self.kernel.operation == Operation::LinearFew
            || (self.kernel.form == Form::Lanes) == software
    }

    fn link_rules(&self, plan: &mut Plan) {
        for rule in &mut plan.configuration.rules {
            if let Some(other) = self.rules.iter().find(|other| other.name == rule.name) {
                *rule = other.clone();
            }
        }
    }

    fn fold_grid(&self, plan: &mut Plan) {
        if let (Some([x, y]), Some(grid)) = (self.fold, &mut plan.grid) {
            *grid = [x, y, plan.groups.div_ceil(x * y)];
        }
    }
}

/// The grid of that many workgroups, folded past 65535.
fn grid_of(groups: usize) -> Result<(u32, Option<[u32; 3]>), String> {
    let count = u32::try_from(groups).map_err(|error| error.to_string())?;
    Ok((
        count,
        match count {
            0 => None,
            1..=65_535 => Some([count, 1, 1]),
            _ => Some([65_535, count.div_ceil(65_535), 1]),
        },
    ))
}

/// How an operand lies in its buffer. Whatever lies beside it is NaN (for a mask: true).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each operand a tensor of its own.
    Contiguous,
    /// q, k and v side by side in one tensor where Tq = Tk, else k and v.
    Fused,
    /// `(B, H, T, D)`, the output too.
    HeadMajor,
    /// One element into a buffer.
    Offset,
    /// The middle of a tensor that is larger on every axis, the output too.
    Padded,
}

pub const LAYOUTS: [Layout; 5] = [
    Layout::Contiguous,
    Layout::Fused,
    Layout::HeadMajor,
    Layout::Offset,
    Layout::Padded,
];

/// Which keys a mask hides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hide {
    /// There is no mask.
    NoMask,
    /// About half of them.
    Random,
    /// The first so many of every batch item.
    First(usize),
    /// All of batch item 0, about half of the others.
    Item,
    /// None: the mask is all true.
    Nothing,
}

/// An attention problem with random operands.
#[derive(Clone, Copy, Debug)]
pub struct AttentionCase {
    pub batch: usize,
    pub heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub head_dim: usize,
    pub scale: Option<f32>,
    pub causal: Option<Alignment>,
    pub hide: Hide,
    pub layout: Layout,
    /// NaN and infinity in the keys and values that no row may see.
    pub poison: bool,
    pub seed: u64,
}

impl AttentionCase {
    pub fn new(batch: usize, heads: usize, q_len: usize, kv_len: usize, head_dim: usize) -> Self {
        AttentionCase {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            scale: None,
            causal: None,
            hide: Hide::NoMask,
            layout: Layout::Contiguous,
            poison: true,
            seed: 1,
        }
    }

    pub fn problem(&self) -> AttentionProblem {
        AttentionProblem {
            kv_len: self.kv_len,
            rules: AttentionRules {
                scale: self.scale,
                causal: self.causal.is_some(),
                alignment: self.causal,
                mask: self.hide != Hide::NoMask,
                ..Default::default()
            },
            ..AttentionProblem::new(self.batch, self.heads, self.q_len, self.head_dim)
        }
    }

    /// The operands.
    pub fn data(&self) -> AttentionData {
        let AttentionCase {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = *self;
        let mut random = Random::new(self.seed);
        let mask = match self.hide {
            Hide::NoMask => None,
            Hide::Random => Some(random.bools(batch * kv_len)),
            Hide::First(count) => {
                Some((0..batch * kv_len).map(|at| at % kv_len >= count).collect())
            }
            Hide::Item => {
                let mut mask = random.bools(batch * kv_len);
                mask[..kv_len].fill(false);
                Some(mask)
            }
            Hide::Nothing => Some(vec![true; batch * kv_len]),
        };
        let width = heads * head_dim;
        let q = random.normals(batch * q_len * width);
        let mut k = random.normals(batch * kv_len * width);
        let mut v = random.normals(batch * kv_len * width);
        let last_limit = match self.causal {
            Some(Alignment::TopLeft) => q_len,
            _ => kv_len,
        };
        if self.poison {
            for token in 0..batch * kv_len {
                let hidden = mask.as_ref().is_some_and(|mask| !mask[token]);
                if hidden || token % kv_len >= last_limit {
                    let poison = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][token % 3];
                    k[token * width..][..width].fill(poison);
                    v[token * width..][..width].fill(poison);
                }
            }
        }
        AttentionData {
            layout: self.layout,
            mask: mask.map(|values| Pairs {
                values,
                shape: [batch, 1, 1, kv_len],
            }),
            ..AttentionData::of(self.problem(), q, k, v)
        }
    }
}

/// q, k and v that look random, exact in the types of the problem.
pub fn random_operands(problem: AttentionProblem, random: &mut Random) -> AttentionData {
    let p = &problem;
    let rounded = |values: Vec<f32>, element_type| -> Vec<f32> {
        values
            .into_iter()
            .map(|v| rounded_to(v, element_type))
            .collect()
    };
    let q = random.normals(p.batch * p.q_len * p.heads * p.head_dim);
    let k = random.normals(p.batch * p.kv_len * p.kv_heads * p.head_dim);
    let v = random.normals(p.batch * p.kv_len * p.kv_heads * p.value_dim);
    let (q, k, v) = (
        rounded(q, p.q_type),
        rounded(k, p.kv_type),
        rounded(v, p.kv_type),
    );
    AttentionData::of(problem, q, k, v)
}

/// The nearest value of that type.
pub fn rounded_to(value: f32, element_type: ElementType) -> f32 {
    match element_type {
        ElementType::F16 => half::f16::from_f32(value).to_f32(),
        ElementType::BF16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// One value for each pair, any axis broadcast: `(B, H, Tq, Tk)`, each full or 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairs<T> {
    pub values: Vec<T>,
    pub shape: [usize; 4],
}

/// A rule in WGSL and the same on the host. The last argument is the rule's data.
#[derive(Clone, Copy, Debug)]
pub struct OwnRule {
    pub wgsl: &'static str,
    pub may_attend: fn([usize; 4], &[f32]) -> bool,
    pub score: fn(f64, [usize; 4], &[f32]) -> f64,
}

/// A problem and its operands, each contiguous: `(B, T, H, D)`, packed ones `(T, H, D)`.
#[derive(Clone, Debug)]
pub struct AttentionData {
    pub problem: AttentionProblem,
    pub layout: Layout,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub mask: Option<Pairs<bool>>,
    pub bias: Option<Pairs<f32>>,
    pub kv_lens: Option<Vec<u32>>,
    pub q_lens: Option<Vec<u32>>,
    /// `(H)` or `(B, H)`.
    pub slopes: Option<Vec<f32>>,
    pub sinks: Option<Vec<f32>>,
    pub cu_seqlens: Option<[Vec<u32>; 2]>,
    pub own_rule: Option<OwnRule>,
    pub rule_data: Vec<f32>,
    /// The small operands lie in one buffer instead of several.
    pub one_table: bool,
}

/// What a run gives.
#[derive(Clone, Debug)]
pub struct Outputs {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

/// Operands on the GPU.
pub struct Uploaded {
    pub q: TensorView,
    pub k: TensorView,
    pub v: TensorView,
    pub mask: Option<TensorView>,
    pub bias: Option<TensorView>,
    pub kv_lens: Option<TensorView>,
    pub q_lens: Option<TensorView>,
    pub slopes: Option<TensorView>,
    pub sinks: Option<TensorView>,
    pub cu_seqlens_q: Option<TensorView>,
    pub cu_seqlens_k: Option<TensorView>,
    pub rule_data: Option<TensorView>,
    pub block_table: Option<TensorView>,
}

impl Uploaded {
    pub fn rules(&self) -> RuleArguments<'_> {
        RuleArguments {
            mask: self.mask.as_ref(),
            bias: self.bias.as_ref(),
            kv_lens: self.kv_lens.as_ref(),
            q_lens: self.q_lens.as_ref(),
            slopes: self.slopes.as_ref(),
            sinks: self.sinks.as_ref(),
            rule_data: self.rule_data.as_ref(),
            cu_seqlens_q: self.cu_seqlens_q.as_ref(),
            cu_seqlens_k: self.cu_seqlens_k.as_ref(),
            block_table: self.block_table.as_ref(),
        }
    }

    pub fn arguments<'a>(&'a self, out: &'a TensorView) -> AttentionArguments<'a> {
        AttentionArguments {
            rules: self.rules(),
            ..AttentionArguments::new(&self.q, &self.k, &self.v, out)
        }
    }
}

impl AttentionData {
    /// Without any operand of a rule.
    pub fn of(problem: AttentionProblem, q: Vec<f32>, k: Vec<f32>, v: Vec<f32>) -> Self {
        AttentionData {
            problem,
            layout: Layout::Contiguous,
            q,
            k,
            v,
            mask: None,
            bias: None,
            kv_lens: None,
            q_lens: None,
            slopes: None,
            sinks: None,
            cu_seqlens: None,
            own_rule: None,
            rule_data: Vec::new(),
            one_table: false,
        }
    }

    /// Operands that the three functions give, by batch item, token, head and channel.
    pub fn new(
        problem: AttentionProblem,
        q: impl Fn(usize, usize, usize, usize) -> f32,
        k: impl Fn(usize, usize, usize, usize) -> f32,
        v: impl Fn(usize, usize, usize, usize) -> f32,
    ) -> Self {
        let all = |[batch, tokens, heads, channels]: [usize; 4],
                   value: &dyn Fn(usize, usize, usize, usize) -> f32| {
            let mut values = Vec::with_capacity(batch * tokens * heads * channels);
            for b in 0..batch {
                for t in 0..tokens {
                    for h in 0..heads {
                        values.extend((0..channels).map(|d| value(b, t, h, d)));
                    }
                }
            }
            values
        };
        let p = &problem;
        let q = all([p.batch, p.q_len, p.heads, p.head_dim], &q);
        let k = all([p.batch, p.kv_len, p.kv_heads, p.head_dim], &k);
        let v = all([p.batch, p.kv_len, p.kv_heads, p.value_dim], &v);
        Self::of(problem, q, k, v)
    }

    /// With a padding mask.
    pub fn masked(self, visible: impl Fn(usize, usize) -> bool) -> Self {
        let (batch, kv_len) = (self.problem.batch, self.problem.kv_len);
        let mask = (0..batch * kv_len).map(|at| visible(at / kv_len, at % kv_len));
        self.with_mask([batch, 1, 1, kv_len], mask.collect())
    }

    pub fn with_mask(mut self, shape: [usize; 4], values: Vec<bool>) -> Self {
        self.mask = Some(Pairs { values, shape });
        self.problem.rules.mask = true;
        self
    }

    pub fn with_bias(mut self, shape: [usize; 4], values: Vec<f32>) -> Self {
        self.bias = Some(Pairs { values, shape });
        self.problem.rules.bias = true;
        self
    }

    pub fn with_kv_lens(mut self, lens: &[u32]) -> Self {
        self.kv_lens = Some(lens.to_vec());
        self.problem.rules.kv_lens = true;
        self
    }

    pub fn with_q_lens(mut self, lens: &[u32]) -> Self {
        self.q_lens = Some(lens.to_vec());
        self.problem.rules.q_lens = true;
        self
    }

    pub fn with_slopes(mut self, slopes: Vec<f32>) -> Self {
        self.slopes = Some(slopes);
        self.problem.rules.alibi = true;
        self
    }

    pub fn with_sinks(mut self, sinks: Vec<f32>) -> Self {
        self.sinks = Some(sinks);
        self.problem.rules.sinks = true;
        self
    }

    pub fn with_rule(mut self, rule: OwnRule, data: Vec<f32>) -> Self {
        self.problem.rules.rule = Some(Rule::new(rule.wgsl).expect("a sound rule"));
        self.own_rule = Some(rule);
        self.rule_data = data;
        self
    }

    /// Tokens of q and of k: those of packed sequences together.
    fn tokens(&self) -> [usize; 2] {
        let p = &self.problem;
        match &self.cu_seqlens {
            Some(starts) => [0, 1].map(|side| *starts[side].last().expect("an end") as usize),
            None => [p.q_len, p.kv_len],
        }
    }

    /// `(B, Tq, H, Dv)`; of packed sequences `(1, T, H, Dv)`.
    pub fn out_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        let batch = if p.packed { 1 } else { p.batch };
        [batch, self.tokens()[0], p.heads, p.value_dim]
    }

    /// The reference's answer.
    pub fn expected(&self) -> Vec<f64> {
        self.expected_all().out
    }

    /// The reference's answer with log-sum-exp and weights.
    pub fn expected_all(&self) -> reference::AttentionOutputs {
        let starts = self.cu_seqlens.as_ref();
        self.with_inputs(|inputs| match starts {
            Some([q, k]) => {
                let wide =
                    |starts: &[u32]| starts.iter().map(|at| *at as usize).collect::<Vec<_>>();
                reference::attention_packed(inputs, &wide(q), &wide(k)).expect("a sound problem")
            }
            None => reference::attention(inputs).expect("a sound problem"),
        })
    }

    /// What the reference takes.
    pub fn with_inputs<R>(&self, use_them: impl FnOnce(&AttentionInputs) -> R) -> R {
        let p = &self.problem;
        let rules = &p.rules;
        let (q, k, v) = (widen(&self.q), widen(&self.k), widen(&self.v));
        let lens = |lens: &Option<Vec<u32>>| -> Option<Vec<usize>> {
            Some(lens.as_ref()?.iter().map(|len| *len as usize).collect())
        };
        let wide = |values: &Option<Vec<f32>>| values.as_deref().map(widen);
        let bias = self.bias.as_ref().map(|bias| widen(&bias.values));
        let (kv_lens, q_lens) = (lens(&self.kv_lens), lens(&self.q_lens));
        let (slopes, sinks) = (wide(&self.slopes), wide(&self.sinks));
        let data = &self.rule_data;
        let may_attend = self
            .own_rule
            .map(|own| move |b, h, i, j| (own.may_attend)([b, h, i, j], data));
        let score = self
            .own_rule
            .map(|own| move |score, b, h, i, j| (own.score)(score, [b, h, i, j], data));
        use_them(&AttentionInputs {
            batch: p.batch,
            heads: p.heads,
            kv_heads: Some(p.kv_heads),
            q_len: p.q_len,
            kv_len: p.kv_len,
            head_dim: p.head_dim,
            value_dim: Some(p.value_dim),
            q: &q,
            k: &k,
            v: &v,
            rules: Rules {
                // The scale of a call is an f32 too.
                scale: rules.scale.map(f64::from),
                softcap: rules.softcap.map(f64::from),
                causal: rules.causal,
                alignment: rules.alignment.map(|alignment| match alignment {
                    Alignment::TopLeft => reference::Alignment::TopLeft,
                    Alignment::BottomRight => reference::Alignment::BottomRight,
                }),
                window_left: rules.window_left,
                window_right: rules.window_right,
                mask: self.mask.as_ref().map(|mask| Broadcast {
                    values: &mask.values,
                    shape: mask.shape,
                }),
                bias: self
                    .bias
                    .as_ref()
                    .zip(bias.as_deref())
                    .map(|(bias, values)| Broadcast {
                        values,
                        shape: bias.shape,
                    }),
                kv_lens: kv_lens.as_deref(),
                q_lens: q_lens.as_deref(),
                keys: p.keys.as_ref().map(|keys| (keys.start, keys.end)),
                slopes: slopes.as_deref(),
                sinks: sinks.as_deref(),
                may_attend: may_attend
                    .as_ref()
                    .map(|f| f as &dyn Fn(_, _, _, _) -> bool),
                score: score.as_ref().map(|f| f as &dyn Fn(f64, _, _, _, _) -> f64),
            },
        })
    }

    /// What the subject gives, once it wrote all of the output and nothing else.
    pub fn run(&self, gpu: &Gpu, subject: &Subject) -> Result<Vec<f32>, String> {
        Ok(self.run_all(gpu, subject)?.out)
    }

    /// The same with the log-sum-exp.
    pub fn run_all(&self, gpu: &Gpu, subject: &Subject) -> Result<Outputs, String> {
        self.run_with(gpu, &subject.attention(gpu, &self.problem)?)
    }

    /// The same of an attention that is compiled already.
    pub fn run_with(&self, gpu: &Gpu, attention: &Attention) -> Result<Outputs, String> {
        let operands = self.upload(gpu);
        let (guarded, out) = self.output(gpu);
        let [_, tokens, heads, _] = self.out_shape();
        let lse_shape = match self.problem.packed {
            true => vec![tokens, heads],
            false => vec![self.problem.batch, heads, tokens],
        };
        let lse = Guarded::new(gpu, &lse_shape);
        let lse_view = lse.tensor.view();
        let mut recorded = Ok(());
        run(gpu, |encoder| {
            let arguments = AttentionArguments {
                lse: Some(&lse_view),
                ..operands.arguments(&out)
            };
            recorded = attention.encode(encoder, arguments);
        });
        recorded.map_err(|error| error.to_string())?;
        if attention.plan().grid.is_none() {
            // Nothing is computed, so nothing may be written.
            return Ok(Outputs {
                out: Vec::new(),
                lse: Vec::new(),
            });
        }
        Ok(Outputs {
            out: read_output(&guarded, &out)?,
            lse: lse.read().map_err(|error| format!("lse: {error}"))?,
        })
    }

    /// The operands as the layout has them.
    pub fn upload(&self, gpu: &Gpu) -> Uploaded {
        let p = &self.problem;
        let [q_tokens, k_tokens] = self.tokens();
        let batch = if p.packed { 1 } else { p.batch };
        let typed = |shape: &[usize],
                     values: &[f32],
                     element_type,
                     window: &dyn Fn(TensorView) -> TensorView| {
            match element_type {
                ElementType::F32 => place(gpu, shape, values, window),
                ElementType::F16 => {
                    let values: Vec<half::f16> =
                        values.iter().map(|v| half::f16::from_f32(*v)).collect();
                    place(gpu, shape, &values, window)
                }
                _ => {
                    let values: Vec<half::bf16> =
                        values.iter().map(|v| half::bf16::from_f32(*v)).collect();
                    place(gpu, shape, &values, window)
                }
            }
        };
        let separate = |tokens, heads, channels, values: &[f32], element_type| {
            let view = match self.layout {
                Layout::Contiguous | Layout::Fused => typed(
                    &[batch, tokens, heads, channels],
                    values,
                    element_type,
                    &|view| view,
                ),
                Layout::HeadMajor => typed(
                    &[batch, heads, tokens, channels],
                    values,
                    element_type,
                    &|view| permuted(&view, &[0, 2, 1, 3]),
                ),
                Layout::Offset => {
                    let count = values.len();
                    typed(&[count + 2], values, element_type, &|view| {
                        let inner = sliced(&view, 0, 1..count + 1);
                        split(&inner, 0, &[batch, tokens, heads, channels])
                    })
                }
                Layout::Padded => typed(
                    &[batch + 1, tokens + 2, heads + 1, channels + 3],
                    values,
                    element_type,
                    &|view| {
                        let view = sliced(&view, 0, 1..batch + 1);
                        let view = sliced(&view, 1, 1..tokens + 1);
                        sliced(&sliced(&view, 2, 0..heads), 3, 2..channels + 2)
                    },
                ),
            };
            self.unbatched(view)
        };
        let mut q = separate(q_tokens, p.heads, p.head_dim, &self.q, p.q_type);
        let mut k = separate(k_tokens, p.kv_heads, p.head_dim, &self.k, p.kv_type);
        let mut v = separate(k_tokens, p.kv_heads, p.value_dim, &self.v, p.kv_type);
        if self.layout == Layout::Fused {
            let [q_width, k_width, v_width] = [
                p.heads * p.head_dim,
                p.kv_heads * p.head_dim,
                p.kv_heads * p.value_dim,
            ];
            let with_q = q_tokens == k_tokens && p.q_type == p.kv_type;
            let parts: Vec<(&[f32], usize)> = [
                (&self.q[..], q_width),
                (&self.k, k_width),
                (&self.v, v_width),
            ]
            .into_iter()
            .skip(usize::from(!with_q))
            .collect();
            let mut fused = Vec::new();
            for token in 0..batch * k_tokens {
                for (values, width) in &parts {
                    fused.extend_from_slice(&values[token * width..][..*width]);
                }
            }
            let width: usize = parts.iter().map(|(_, width)| width).sum();
            let whole = typed(&[batch, k_tokens, width], &fused, p.kv_type, &|view| view);
            let part = |start, width, heads| {
                let one = sliced(&whole, 2, start..start + width);
                self.unbatched(split(&one, 2, &[heads, width / heads]))
            };
            let start = if with_q { q_width } else { 0 };
            if with_q {
                q = part(0, q_width, p.heads);
            }
            k = part(start, k_width, p.kv_heads);
            v = part(start + k_width, v_width, p.kv_heads);
        }
        let pages = p.page_size.map(|size| self.pages(size));
        if let Some(pages) = &pages {
            let paged = |heads, channels, values: &[f32]| {
                let values = pages.placed(values, heads * channels, p.kv_len);
                let shape = [pages.count, pages.size, heads, channels];
                match self.layout {
                    Layout::HeadMajor | Layout::Padded => {
                        // Heads before pages.
                        typed(
                            &[heads, pages.count, pages.size, channels],
                            &values,
                            p.kv_type,
                            &|view| permuted(&view, &[1, 2, 0, 3]),
                        )
                    }
                    Layout::Offset => typed(&[values.len() + 2], &values, p.kv_type, &|view| {
                        split(&sliced(&view, 0, 1..values.len() + 1), 0, &shape)
                    }),
                    _ => typed(&shape, &values, p.kv_type, &|view| view),
                }
            };
            k = paged(p.kv_heads, p.head_dim, &self.k);
            v = paged(p.kv_heads, p.value_dim, &self.v);
        }
        let table = pages.as_ref().map(|pages| &pages.table);
        let table_shape = |len: usize| vec![p.batch, len / p.batch.max(1)];
        let block_table;
        let (kv_lens, q_lens, slopes, sinks, cu_seqlens_q, cu_seqlens_k);
        if self.one_table {
            // All in one buffer, behind something else.
            let mut words: Vec<u32> = vec![u32::MAX; 3];
            let mut spans = Vec::new();
            let bits = |values: &Option<Vec<f32>>| -> Option<Vec<u32>> {
                Some(values.as_ref()?.iter().map(|v| v.to_bits()).collect())
            };
            let starts = |side: usize| self.cu_seqlens.as_ref().map(|starts| starts[side].clone());
            for values in [
                self.q_lens.clone(),
                bits(&self.sinks),
                self.kv_lens.clone(),
                starts(0),
                starts(1),
                bits(&self.slopes),
                table.cloned(),
            ] {
                spans.push(values.map(|values| {
                    let at = words.len();
                    words.extend(&values);
                    (at, values.len())
                }));
            }
            let whole = Tensor::from_slice(gpu, &[words.len()], &words).expect("tables");
            let view = |number: usize, element_type, shape: &dyn Fn(usize) -> Vec<usize>| {
                spans[number].map(|(at, len)| {
                    let buffer = whole.buffer().clone();
                    Tensor::from_buffer(gpu, buffer, 4 * at as u64, &shape(len), element_type)
                        .expect("a table")
                        .view()
                })
            };
            let flat = |len| vec![len];
            q_lens = view(0, ElementType::U32, &flat);
            sinks = view(1, ElementType::F32, &flat);
            kv_lens = view(2, ElementType::U32, &flat);
            cu_seqlens_q = view(3, ElementType::U32, &flat);
            cu_seqlens_k = view(4, ElementType::U32, &flat);
            slopes = view(5, ElementType::F32, &|len| self.slopes_shape(len));
            block_table = view(6, ElementType::U32, &table_shape);
        } else {
            let numbers = |values: Option<&Vec<u32>>| {
                values.map(|values| place(gpu, &[values.len()], values, |view| view))
            };
            q_lens = numbers(self.q_lens.as_ref());
            kv_lens = numbers(self.kv_lens.as_ref());
            cu_seqlens_q = numbers(self.cu_seqlens.as_ref().map(|starts| &starts[0]));
            cu_seqlens_k = numbers(self.cu_seqlens.as_ref().map(|starts| &starts[1]));
            sinks = self
                .sinks
                .as_ref()
                .map(|values| place(gpu, &[values.len()], values, |view| view));
            slopes = self
                .slopes
                .as_ref()
                .map(|values| place(gpu, &self.slopes_shape(values.len()), values, |view| view));
            block_table =
                table.map(|values| place(gpu, &table_shape(values.len()), values, |view| view));
        }
        let reads_data = p.rules.rule.as_ref().is_some_and(Rule::reads_data);
        Uploaded {
            q,
            k,
            v,
            mask: self.mask.as_ref().map(|mask| self.pairs(gpu, mask)),
            bias: self.bias.as_ref().map(|bias| self.pairs(gpu, bias)),
            kv_lens,
            q_lens,
            slopes,
            sinks,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            rule_data: reads_data.then(|| {
                // One element into its buffer.
                let count = self.rule_data.len();
                place(gpu, &[count + 1], &self.rule_data, |view| {
                    sliced(&view, 0, 1..count + 1)
                })
            }),
        }
    }

    /// Pages in an order of their own, more of them than are needed.
    fn pages(&self, size: usize) -> Pages {
        let p = &self.problem;
        let each = p.kv_len.div_ceil(size);
        let count = p.batch * each + 2;
        let mut order: Vec<u32> = (0..count as u32).collect();
        let mut random = Random::new((p.kv_len * 131 + size) as u64);
        for at in (1..count).rev() {
            order.swap(at, random.below(at + 1));
        }
        let mut table = order[..p.batch * each].to_vec();
        for (item, lens) in self.kv_lens.iter().flatten().enumerate() {
            // What lies past an item's keys is never looked up for a result: any number will do.
            for page in (*lens as usize).div_ceil(size)..each {
                table[item * each + page] = [u32::MAX, count as u32, 0x8000_0000][page % 3];
            }
        }
        Pages {
            size,
            count,
            each,
            table,
            order,
        }
    }

    fn slopes_shape(&self, len: usize) -> Vec<usize> {
        let heads = self.problem.heads;
        match len == heads {
            true => vec![heads],
            false => vec![len / heads, heads],
        }
    }

    /// Values of pairs as the layout has them.
    fn pairs<T: Beside>(&self, gpu: &Gpu, pairs: &Pairs<T>) -> TensorView {
        let [b, h, q, k] = pairs.shape;
        match self.layout {
            Layout::Offset => place(gpu, &[pairs.values.len() + 2], &pairs.values, |view| {
                split(
                    &sliced(&view, 0, 1..pairs.values.len() + 1),
                    0,
                    &pairs.shape,
                )
            }),
            Layout::Padded => place(gpu, &[b + 1, h, q + 1, k + 4], &pairs.values, |view| {
                let view = sliced(&sliced(&view, 0, 1..b + 1), 2, 0..q);
                sliced(&view, 3, 3..k + 3)
            }),
            Layout::HeadMajor => place(gpu, &[h, k, b, q], &pairs.values, |view| {
                permuted(&view, &[2, 0, 3, 1])
            }),
            _ => place(gpu, &pairs.shape, &pairs.values, |view| view),
        }
    }

    /// A view with a batch axis as the problem takes it.
    fn unbatched(&self, view: TensorView) -> TensorView {
        match self.problem.packed {
            true => view.merge_axes(0..2).expect("a batch of 1"),
            false => view,
        }
    }

    /// A guarded output as the layout has it.
    pub fn output(&self, gpu: &Gpu) -> (Guarded, TensorView) {
        let [batch, tokens, heads, channels] = self.out_shape();
        let element_type = self.problem.out_type;
        // Rows of 16-bit outputs begin on whole words.
        let even = |size: usize| match element_type {
            ElementType::F32 => size,
            _ => size.next_multiple_of(2),
        };
        let guarded = |shape: &[usize]| Guarded::typed(gpu, shape, element_type);
        let (guarded, view) = match self.layout {
            Layout::HeadMajor => {
                let guarded = guarded(&[batch, heads, tokens, even(channels)]);
                let view = permuted(&guarded.tensor.view(), &[0, 2, 1, 3]);
                (guarded, sliced(&view, 3, 0..channels))
            }
            Layout::Padded => {
                let guarded = guarded(&[batch + 1, tokens + 2, heads + 1, even(channels + 3)]);
                let view = sliced(&guarded.tensor.view(), 0, 1..batch + 1);
                let view = sliced(&view, 1, 1..tokens + 1);
                let first = if element_type == ElementType::F32 {
                    1
                } else {
                    2
                };
                let view = sliced(&sliced(&view, 2, 0..heads), 3, first..channels + first);
                (guarded, view)
            }
            _ => {
                let guarded = guarded(&[batch, tokens, heads, even(channels)]);
                let view = sliced(&guarded.tensor.view(), 3, 0..channels);
                (guarded, view)
            }
        };
        (guarded, self.unbatched(view))
    }
}

/// Where the keys of a cache in pages lie.
struct Pages {
    size: usize,
    count: usize,
    /// Pages of a batch item.
    each: usize,
    table: Vec<u32>,
    /// The same without what was spoilt past the items' keys.
    order: Vec<u32>,
}

impl Pages {
    /// Rows `(B, T, width)` as pages `(P, size, width)`, with NaN wherever no key lies.
    fn placed(&self, rows: &[f32], width: usize, tokens: usize) -> Vec<f32> {
        let mut placed = vec![f32::NAN; self.count * self.size * width];
        for (row, values) in rows.chunks_exact(width.max(1)).enumerate() {
            let (item, token) = (row / tokens, row % tokens);
            let page = self.order[item * self.each + token / self.size] as usize;
            placed[(page * self.size + token % self.size) * width..][..width]
                .copy_from_slice(values);
        }
        placed
    }
}

/// A problem with the reference's answer, to be held against any number of subjects.
pub struct PreparedAttention {
    pub data: AttentionData,
    pub expected: Vec<f64>,
    pub expected_lse: Vec<f64>,
}

impl AttentionCase {
    pub fn prepare(&self) -> PreparedAttention {
        self.data().prepare()
    }
}

impl AttentionData {
    /// With the reference's answer.
    pub fn prepare(self) -> PreparedAttention {
        let expected = self.expected_all();
        PreparedAttention {
            expected: expected.out,
            expected_lse: expected.lse,
            data: self,
        }
    }
}

impl PreparedAttention {
    /// Whether the subject gives what the reference gives.
    pub fn check(&self, gpu: &Gpu, subject: &Subject) -> Result<(), String> {
        leave_dirt(gpu, self.expected.len());
        let got = self.data.run_all(gpu, subject)?;
        let tolerance = self.data.tolerance();
        let shape = self.data.out_shape();
        compared(&got.out, &self.expected, &shape, tolerance)?;
        // Log-sum-exp is f32 whatever the output is; smaller operands are exact.
        compared(
            &got.lse,
            &self.expected_lse,
            &[got.lse.len()],
            Tolerance::F32,
        )
        .map_err(|error| format!("lse: {error}"))
    }
}

impl AttentionData {
    /// How far a result may be off: as much as f32 may, and what rounding it to the output's type adds.
    pub fn tolerance(&self) -> Tolerance {
        let Tolerance { absolute, relative } = Tolerance::F32;
        match self.problem.out_type {
            ElementType::F32 => Tolerance::F32,
            ElementType::F16 => Tolerance::new(absolute, relative + 0.5f64.powi(11)),
            _ => Tolerance::new(absolute, relative + 0.5f64.powi(8)),
        }
    }
}

/// Whether every value is within [`Tolerance::F32`] of what it should be.
pub fn matches(got: &[f32], expected: &[f64], shape: &[usize]) -> Result<(), String> {
    compared(got, expected, shape, Tolerance::F32)
}

/// Whether every value is within a tolerance of what it should be.
pub fn compared(
    got: &[f32],
    expected: &[f64],
    shape: &[usize],
    tolerance: Tolerance,
) -> Result<(), String> {
    if got.is_empty() && expected.is_empty() {
        return Ok(());
    }
    let comparison = compare(got, shape, expected, shape, tolerance);
    if comparison.passed() {
        return Ok(());
    }
    Err(comparison.to_string())
}

/// Whether every value is exactly that one.
pub fn all_equal(got: &[f32], expected: f32) -> Result<(), String> {
    if got.is_empty() {
        return Err("nothing compared".into());
    }
    match got.iter().position(|value| *value != expected) {
        None => Ok(()),
        Some(at) => Err(format!(
            "element {at} of {} is {}, expected exactly {expected}",
            got.len(),
            got[at]
        )),
    }
}

/// Whether two results have the same bits.
pub fn same_bits(got: &[f32], expected: &[f32]) -> Result<(), String> {
    if got.is_empty() || got.len() != expected.len() {
        return Err(format!("{} and {} elements", got.len(), expected.len()));
    }
    let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    match got.iter().zip(expected).position(differ) {
        None => Ok(()),
        Some(at) => Err(format!(
            "element {at} of {} is {:e}, expected the bits of {:e}",
            got.len(),
            got[at],
            expected[at]
        )),
    }
}

/// How x, weight and y of a projection lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearLayout {
    /// x `(B, T, d_in)`, weight `(d_out, d_in)`, y `(B, T, d_out)`.
    Contiguous,
    /// x `(B, d_in, T)` and y `(B, d_out, T)`: channels of an image first; weight `(d_in, d_out)`.
    ChannelsFirst,
    /// One element into buffers.
    Offset,
    /// The middle of tensors that are larger on every axis.
    Padded,
    /// x and y `(T, B, C)`, with one batch item more in the tensor.
    SequenceFirst,
    /// Weight `(d_in, d_out)`, all else contiguous.
    WeightTransposed,
    /// Four channels more in each row of x.
    XByFours,
    /// Four elements in front of the weight.
    WeightByFours,
}

pub const LINEAR_LAYOUTS: [LinearLayout; 8] = [
    LinearLayout::SequenceFirst,
    LinearLayout::Contiguous,
    LinearLayout::ChannelsFirst,
    LinearLayout::Offset,
    LinearLayout::Padded,
    LinearLayout::WeightTransposed,
    LinearLayout::XByFours,
    LinearLayout::WeightByFours,
];

/// A projection with random operands.
#[derive(Clone, Copy, Debug)]
pub struct LinearCase {
    pub batch: usize,
    pub tokens: usize,
    pub d_in: usize,
    pub d_out: usize,
    pub bias: bool,
    pub layout: LinearLayout,
    pub seed: u64,
}

impl LinearCase {
    pub fn new(batch: usize, tokens: usize, d_in: usize, d_out: usize) -> Self {
        LinearCase {
            batch,
            tokens,
            d_in,
            d_out,
            bias: true,
            layout: LinearLayout::Contiguous,
            seed: 1,
        }
    }

    /// The operands. Weights are as large as trained ones, about `1/sqrt(d_in)`.
    pub fn data(&self) -> LinearData {
        let mut random = Random::new(self.seed);
        let x = random.normals(self.batch * self.tokens * self.d_in);
        let size = 1.0 / (self.d_in.max(1) as f32).sqrt();
        let weight = random.normals(self.d_out * self.d_in);
        let weight = weight.into_iter().map(|w| w * size).collect();
        LinearData {
            problem: LinearProblem {
                batch: self.batch,
                tokens: self.tokens,
                d_in: self.d_in,
                d_out: self.d_out,
                form: None,
                few: None,
            },
            layout: self.layout,
            x,
            weight,
            bias: self.bias.then(|| random.normals(self.d_out)),
        }
    }

    pub fn prepare(&self) -> PreparedLinear {
        let data = self.data();
        let expected = data.expected();
        PreparedLinear { data, expected }
    }
}

/// A projection and its operands, each contiguous: x `(B, T, d_in)`, weight `(d_out, d_in)`, bias `(d_out)`.
#[derive(Clone)]
pub struct LinearData {
    pub problem: LinearProblem,
    pub layout: LinearLayout,
    pub x: Vec<f32>,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
}

impl LinearData {
    pub fn out_shape(&self) -> [usize; 3] {
        let p = &self.problem;
        [p.batch, p.tokens, p.d_out]
    }

    /// The reference's answer.
    pub fn expected(&self) -> Vec<f64> {
        let p = &self.problem;
        reference::linear(
            &widen(&self.x),
            p.batch * p.tokens,
            p.d_in,
            &widen(&self.weight),
            self.bias.as_deref().map(widen).as_deref(),
            p.d_out,
        )
        .expect("a sound problem")
    }

    /// What the subject gives, once it wrote all of the output and nothing else.
    pub fn run(&self, gpu: &Gpu, subject: &Subject) -> Result<Vec<f32>, String> {
        let linear = subject.linear(gpu, &self.problem)?;
        let LinearProblem {
            batch,
            tokens,
            d_in,
            d_out,
            ..
        } = self.problem;
        let identity = |view| view;
        let within = |axes: &'static [usize]| {
            move |view: TensorView| {
                axes.iter().fold(view, |view, axis| {
                    let end = view.shape()[*axis] - 2;
                    sliced(&view, *axis, 1..end + 1)
                })
            }
        };
        let into = |shape: Vec<usize>| {
            move |view: TensorView| {
                let end = view.shape()[0] - 1;
                split(&sliced(&view, 0, 1..end), 0, &shape)
            }
        };
        let guarded;
        let (x, weight, y) = match self.layout {
            LinearLayout::Contiguous => {
                guarded = Guarded::new(gpu, &self.out_shape());
                (
                    place(gpu, &[batch, tokens, d_in], &self.x, identity),
                    place(gpu, &[d_out, d_in], &self.weight, identity),
                    guarded.tensor.view(),
                )
            }
            LinearLayout::WeightTransposed => {
                guarded = Guarded::new(gpu, &self.out_shape());
                (
                    place(gpu, &[batch, tokens, d_in], &self.x, identity),
                    place(gpu, &[d_in, d_out], &self.weight, |view| {
                        permuted(&view, &[1, 0])
                    }),
                    guarded.tensor.view(),
                )
            }
            LinearLayout::XByFours => {
                guarded = Guarded::new(gpu, &self.out_shape());
                (
                    place(gpu, &[batch, tokens, d_in + 4], &self.x, |view| {
                        sliced(&view, 2, 0..d_in)
                    }),
                    place(gpu, &[d_out, d_in], &self.weight, identity),
                    guarded.tensor.view(),
                )
            }
            LinearLayout::WeightByFours => {
                guarded = Guarded::new(gpu, &self.out_shape());
                let count = self.weight.len();
                (
                    place(gpu, &[batch, tokens, d_in], &self.x, identity),
                    place(gpu, &[count + 4], &self.weight, |view| {
                        split(&sliced(&view, 0, 4..count + 4), 0, &[d_out, d_in])
                    }),
                    guarded.tensor.view(),
                )
            }
            LinearLayout::ChannelsFirst => {
                guarded = Guarded::new(gpu, &[batch, d_out, tokens]);
                (
                    place(gpu, &[batch, d_in, tokens], &self.x, |view| {
                        permuted(&view, &[0, 2, 1])
                    }),
                    place(gpu, &[d_in, d_out], &self.weight, |view| {
                        permuted(&view, &[1, 0])
                    }),
                    permuted(&guarded.tensor.view(), &[0, 2, 1]),
                )
            }
            LinearLayout::Offset => {
                guarded = Guarded::new(gpu, &self.out_shape());
                (
                    place(
                        gpu,
                        &[self.x.len() + 2],
                        &self.x,
                        into(vec![batch, tokens, d_in]),
                    ),
                    place(
                        gpu,
                        &[self.weight.len() + 2],
                        &self.weight,
                        into(vec![d_out, d_in]),
                    ),
                    guarded.tensor.view(),
                )
            }
            LinearLayout::SequenceFirst => {
                let swapped = |view: TensorView| permuted(&sliced(&view, 1, 0..batch), &[1, 0, 2]);
                guarded = Guarded::new(gpu, &[tokens, batch + 1, d_out]);
                (
                    place(gpu, &[tokens, batch + 1, d_in], &self.x, swapped),
                    place(gpu, &[d_out, d_in], &self.weight, identity),
                    swapped(guarded.tensor.view()),
                )
            }
            LinearLayout::Padded => {
                let larger = [batch + 2, tokens + 2, d_out + 2];
                guarded = Guarded::new(gpu, &larger);
                (
                    place(
                        gpu,
                        &[batch + 2, tokens + 2, d_in + 2],
                        &self.x,
                        within(&[0, 1, 2]),
                    ),
                    place(gpu, &[d_out + 2, d_in + 2], &self.weight, within(&[0, 1])),
                    within(&[0, 1, 2])(guarded.tensor.view()),
                )
            }
        };
        let bias = self.bias.as_ref().map(|bias| match self.layout {
            LinearLayout::Contiguous | LinearLayout::ChannelsFirst => {
                place(gpu, &[d_out], bias, identity)
            }
            _ => place(gpu, &[d_out + 2], bias, within(&[0])),
        });
        let mut recorded = Ok(());
        run(gpu, |encoder| {
            let arguments = LinearArguments {
                x: &x,
                weight: &weight,
                bias: bias.as_ref(),
                y: &y,
            };
            recorded = linear.encode(encoder, arguments);
        });
        recorded.map_err(|error| error.to_string())?;
        read_output(&guarded, &y)
    }
}

/// A projection with the reference's answer, to be held against any number of subjects.
pub struct PreparedLinear {
    pub data: LinearData,
    pub expected: Vec<f64>,
}

impl PreparedLinear {
    /// Whether the subject gives what the reference gives.
    pub fn check(&self, gpu: &Gpu, subject: &Subject) -> Result<(), String> {
        leave_dirt(gpu, self.expected.len());
        let got = self.data.run(gpu, subject)?;
        matches(&got, &self.expected, &self.data.out_shape())
    }
}

/// What a buffer holds beside an operand.
pub trait Beside: Element {
    const BESIDE: Self;
}

impl Beside for f32 {
    const BESIDE: f32 = f32::NAN;
}

impl Beside for bool {
    const BESIDE: bool = true;
}

impl Beside for u32 {
    const BESIDE: u32 = u32::MAX;
}

impl Beside for half::f16 {
    const BESIDE: half::f16 = half::f16::NAN;
}

impl Beside for half::bf16 {
    const BESIDE: half::bf16 = half::bf16::NAN;
}

/// Values, in row-major order of the view that `window` makes of a new tensor of that shape.
pub fn place<T: Beside>(
    gpu: &Gpu,
    shape: &[usize],
    values: &[T],
    window: impl FnOnce(TensorView) -> TensorView,
) -> TensorView {
    let tensor = Tensor::empty(gpu, shape, T::TYPE).expect("a tensor");
    let view = window(tensor.view());
    let mut host = vec![T::BESIDE; shape.iter().product()];
    let mut next = values.iter();
    for_each_position(&view, |at| {
        host[at] = *next.next().expect("as many values as the view has");
    });
    assert!(next.next().is_none(), "the view holds all values");
    tensor.write(&host).expect("an upload");
    view
}

/// Where in the buffer each element lies, in row-major order.
fn for_each_position(view: &TensorView, mut visit: impl FnMut(usize)) {
    fn walk(shape: &[usize], strides: &[usize], at: usize, visit: &mut dyn FnMut(usize)) {
        match (shape.split_first(), strides.split_first()) {
            (Some((size, shape)), Some((stride, strides))) => {
                for index in 0..*size {
                    walk(shape, strides, at + index * stride, visit);
                }
            }
            _ => visit(at),
        }
    }
    walk(view.shape(), view.strides(), view.offset(), &mut visit);
}

/// The elements of a view of a guarded output, once all of them and nothing else was written.
pub fn read_output(guarded: &Guarded, view: &TensorView) -> Result<Vec<f32>, String> {
    let words: Vec<f32> = guarded
        .whole
        .read_blocking()
        .map_err(|error| error.to_string())?;
    let element_type = view.element_type();
    let in_word = 4 / element_type.size() as usize;
    // The bits of every element, and those of one that nobody wrote.
    let bits = |at: usize| {
        let word = words[at / in_word].to_bits();
        match in_word {
            1 => word,
            _ => (word >> (16 * (at % 2))) & 0xffff,
        }
    };
    let untouched = |at: usize| bits(at) == SENTINEL >> (32 - 32 / in_word);
    let value = |at: usize| match element_type {
        ElementType::F16 => half::f16::from_bits(bits(at) as u16).to_f32(),
        ElementType::BF16 => half::bf16::from_bits(bits(at) as u16).to_f32(),
        _ => f32::from_bits(bits(at)),
    };
    let mut inside = vec![false; in_word * words.len()];
    let mut values = Vec::new();
    let mut unwritten = 0;
    for_each_position(view, |at| {
        inside[at] = true;
        unwritten += usize::from(untouched(at));
        values.push(value(at));
    });
    let strays = (0..inside.len())
        .filter(|at| !inside[*at] && !untouched(*at))
        .count();
    if strays > 0 {
        return Err(format!("{strays} elements beside the output were written"));
    }
    if unwritten > 0 {
        return Err(format!(
            "{unwritten} of {} elements were not written",
            values.len()
        ));
    }
    Ok(values)
}

pub fn sliced(view: &TensorView, axis: usize, range: std::ops::Range<usize>) -> TensorView {
    view.slice(axis, range).expect("a range of the axis")
}

pub fn permuted(view: &TensorView, order: &[usize]) -> TensorView {
    view.permute(order).expect("each axis once")
}

pub fn split(view: &TensorView, axis: usize, sizes: &[usize]) -> TensorView {
    view.split_axis(axis, sizes).expect("sizes of the axis")
}

/// Collects what fails, so that one run shows all of it.
#[derive(Default)]
pub struct Failures {
    checked: usize,
    failed: Vec<String>,
}

impl Failures {
    pub fn note(&mut self, what: impl std::fmt::Display, result: Result<(), String>) {
        self.checked += 1;
        if let Err(error) = result {
            self.failed.push(format!("{what}: {error}"));
        }
    }

    /// Panics with every failure, and where not even `least` things were checked.
    pub fn report(self, least: usize) {
        let shown = self.failed.iter().take(40).cloned().collect::<Vec<_>>();
        assert!(
            self.failed.is_empty(),
            "{} of {} failed:\n{}",
            self.failed.len(),
            self.checked,
            shown.join("\n")
        );
        assert!(self.checked >= least, "only {} were checked", self.checked);
    }
}
