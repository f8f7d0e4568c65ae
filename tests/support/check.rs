//! The check that every kernel must pass and every broken kernel must fail: a case, its data, the reference's answer,
//! a run into a guarded output, and the comparison.

use super::{Guarded, Random, SENTINEL, leave_dirt, run};
use std::sync::{Mutex, MutexGuard, PoisonError};
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::kernels::{Configuration, Form, Fragment, KERNELS, Kernel, Operation};
use wgpu_attention::reference::{self, Alignment, AttentionInputs, Broadcast, Rules, widen};
use wgpu_attention::{
    Attention, AttentionArguments, AttentionProblem, CausalAlignment, Element, Gpu, Linear,
    LinearArguments, LinearProblem, Plan, Tensor, TensorView, wgpu,
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
    /// Linked in for the rule fragment of the same name.
    pub rule: Option<&'static Fragment>,
}

/// Every kernel for an operation, in the planner's configuration.
pub fn kernels(operation: Operation) -> Vec<Subject> {
    let found: Vec<Subject> = KERNELS
        .iter()
        .filter(|kernel| kernel.operation == operation)
        .map(|kernel| Subject {
            kernel,
            configuration: None,
            fold: None,
            rule: None,
        })
        .collect();
    assert!(found.len() >= 2, "a kernel of each form");
    found
}

/// Every kernel for an operation in each of its configurations that `wanted` picks.
pub fn configurations(
    operation: Operation,
    wanted: impl Fn(&Configuration) -> bool,
) -> Vec<Subject> {
    let mut found = Vec::new();
    for subject in kernels(operation) {
        for configuration in (subject.kernel.configurations)() {
            if wanted(&configuration) {
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
        let problem = AttentionProblem {
            form: Some(self.kernel.form),
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
            let lanes = match self.kernel.form {
                Form::Tiled => 8,
                Form::Lanes => configuration.get("LANES") as usize,
            };
            let block = lanes * configuration.get("ROWS") as usize;
            let groups = problem.q_len.div_ceil(block) * problem.heads * problem.batch;
            plan.configuration = configuration.clone();
            (plan.groups, plan.grid) = unfolded(groups)?;
        }
        self.fold_grid(&mut plan);
        for rule in &mut plan.configuration.rules {
            if let Some(other) = self.rule
                && other.name == rule.name
            {
                *rule = other;
            }
        }
        Attention::from_plan(gpu, problem, plan).map_err(|error| error.to_string())
    }

    /// Compiled for a problem.
    pub fn linear(&self, gpu: &Gpu, problem: &LinearProblem) -> Result<Linear, String> {
        let problem = LinearProblem {
            form: Some(self.kernel.form),
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
            let (m, n) = match self.kernel.form {
                Form::Tiled => (16 * rows, 16 * columns),
                Form::Lanes => (configuration.get("LANES") as usize * rows, columns),
            };
            let groups = (problem.batch * problem.tokens).div_ceil(m) * problem.d_out.div_ceil(n);
            plan.configuration = configuration.clone();
            (plan.groups, plan.grid) = unfolded(groups)?;
        }
        self.fold_grid(&mut plan);
        Linear::from_plan(gpu, problem, plan).map_err(|error| error.to_string())
    }
}

impl Subject {
    /// Whether the form has heads of this size: the lanes form goes up to 64 channels.
    pub fn takes(&self, problem: &AttentionProblem) -> bool {
        self.kernel.form == Form::Tiled || problem.head_dim <= 64
    }

    /// Whether it is the kernel that the planner chooses on this adapter.
    pub fn is_planned(&self, gpu: &Gpu) -> bool {
        let software = gpu.adapter_info().device_type == wgpu::DeviceType::Cpu;
        (self.kernel.form == Form::Lanes) == software
    }

    fn fold_grid(&self, plan: &mut Plan) {
        if let (Some([x, y]), Some(grid)) = (self.fold, &mut plan.grid) {
            *grid = [x, y, plan.groups.div_ceil(x * y)];
        }
    }
}

fn unfolded(groups: usize) -> Result<(u32, Option<[u32; 3]>), String> {
    match groups {
        0 => Ok((0, None)),
        1..=65_535 => Ok((groups as u32, Some([groups as u32, 1, 1]))),
        _ => Err(format!("{groups} workgroups for a forced configuration")),
    }
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
    pub causal: Option<CausalAlignment>,
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
            scale: self.scale,
            causal: self.causal,
            key_mask: self.hide != Hide::NoMask,
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
            Some(CausalAlignment::TopLeft) => q_len,
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
            problem: self.problem(),
            layout: self.layout,
            q,
            k,
            v,
            mask,
        }
    }
}

/// A problem and its operands, each contiguous: `(B, T, H, D)`, the mask `(B, Tk)`.
#[derive(Clone)]
pub struct AttentionData {
    pub problem: AttentionProblem,
    pub layout: Layout,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub mask: Option<Vec<bool>>,
}

impl AttentionData {
    /// Operands that the three functions give, by batch item, token, head and channel.
    pub fn new(
        problem: AttentionProblem,
        q: impl Fn(usize, usize, usize, usize) -> f32,
        k: impl Fn(usize, usize, usize, usize) -> f32,
        v: impl Fn(usize, usize, usize, usize) -> f32,
    ) -> Self {
        let AttentionProblem {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = problem;
        let all = |tokens: usize, value: &dyn Fn(usize, usize, usize, usize) -> f32| {
            let mut values = Vec::with_capacity(batch * tokens * heads * head_dim);
            for b in 0..batch {
                for t in 0..tokens {
                    for h in 0..heads {
                        values.extend((0..head_dim).map(|d| value(b, t, h, d)));
                    }
                }
            }
            values
        };
        AttentionData {
            problem,
            layout: Layout::Contiguous,
            q: all(q_len, &q),
            k: all(kv_len, &k),
            v: all(kv_len, &v),
            mask: None,
        }
    }

    pub fn masked(self, visible: impl Fn(usize, usize) -> bool) -> Self {
        let AttentionProblem { batch, kv_len, .. } = self.problem;
        let mask = (0..batch * kv_len).map(|at| visible(at / kv_len, at % kv_len));
        AttentionData {
            mask: Some(mask.collect()),
            problem: AttentionProblem {
                key_mask: true,
                ..self.problem
            },
            ..self
        }
    }

    pub fn out_shape(&self) -> [usize; 4] {
        let p = &self.problem;
        [p.batch, p.q_len, p.heads, p.head_dim]
    }

    /// The reference's answer.
    pub fn expected(&self) -> Vec<f64> {
        let (q, k, v) = (widen(&self.q), widen(&self.k), widen(&self.v));
        reference::attention_without_weights(&self.inputs(&q, &k, &v))
            .expect("a sound problem")
            .out
    }

    pub fn inputs<'a>(&'a self, q: &'a [f64], k: &'a [f64], v: &'a [f64]) -> AttentionInputs<'a> {
        let p = &self.problem;
        AttentionInputs {
            batch: p.batch,
            heads: p.heads,
            q_len: p.q_len,
            kv_len: p.kv_len,
            head_dim: p.head_dim,
            q,
            k,
            v,
            rules: Rules {
                scale: p.scale.map(f64::from),
                causal: p.causal.is_some(),
                alignment: p.causal.map(|alignment| match alignment {
                    CausalAlignment::TopLeft => Alignment::TopLeft,
                    CausalAlignment::BottomRight => Alignment::BottomRight,
                }),
                mask: self.mask.as_deref().map(|values| Broadcast {
                    values,
                    shape: [p.batch, 1, 1, p.kv_len],
                }),
                ..Default::default()
            },
            ..Default::default()
        }
    }

    /// What the subject gives, once it wrote all of the output and nothing else.
    pub fn run(&self, gpu: &Gpu, subject: &Subject) -> Result<Vec<f32>, String> {
        let attention = subject.attention(gpu, &self.problem)?;
        let (operands, mask) = self.upload(gpu);
        let [q, k, v] = &operands;
        let (guarded, out) = self.output(gpu);
        let mut recorded = Ok(());
        run(gpu, |encoder| {
            let arguments = AttentionArguments {
                q,
                k,
                v,
                mask: mask.as_ref(),
                out: &out,
            };
            recorded = attention.encode(encoder, arguments);
        });
        recorded.map_err(|error| error.to_string())?;
        read_output(&guarded, &out)
    }

    /// q, k, v and the mask as the layout has them.
    pub fn upload(&self, gpu: &Gpu) -> ([TensorView; 3], Option<TensorView>) {
        let AttentionProblem {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = self.problem;
        let separate = |tokens, values: &[f32]| match self.layout {
            Layout::Contiguous | Layout::Fused => {
                place(gpu, &[batch, tokens, heads, head_dim], values, |view| view)
            }
            Layout::HeadMajor => place(gpu, &[batch, heads, tokens, head_dim], values, |view| {
                permuted(&view, &[0, 2, 1, 3])
            }),
            Layout::Offset => {
                let count = values.len();
                place(gpu, &[count + 2], values, |view| {
                    let inner = sliced(&view, 0, 1..count + 1);
                    split(&inner, 0, &[batch, tokens, heads, head_dim])
                })
            }
            Layout::Padded => place(
                gpu,
                &[batch + 1, tokens + 2, heads + 1, head_dim + 3],
                values,
                |view| {
                    let view = sliced(&view, 0, 1..batch + 1);
                    let view = sliced(&view, 1, 1..tokens + 1);
                    sliced(&sliced(&view, 2, 0..heads), 3, 2..head_dim + 2)
                },
            ),
        };
        let operands = if self.layout == Layout::Fused {
            let side_by_side = |parts: &[&[f32]]| {
                let width = heads * head_dim;
                let mut fused = Vec::new();
                for token in 0..batch * kv_len {
                    for part in parts {
                        fused.extend_from_slice(&part[token * width..][..width]);
                    }
                }
                let shape = [batch, kv_len, parts.len() * width];
                let whole = place(gpu, &shape, &fused, |view| view);
                move |part| {
                    let one = sliced(&whole, 2, part * width..(part + 1) * width);
                    split(&one, 2, &[heads, head_dim])
                }
            };
            if q_len == kv_len {
                let part = side_by_side(&[&self.q, &self.k, &self.v]);
                [part(0), part(1), part(2)]
            } else {
                let part = side_by_side(&[&self.k, &self.v]);
                [separate(q_len, &self.q), part(0), part(1)]
            }
        } else {
            [
                separate(q_len, &self.q),
                separate(kv_len, &self.k),
                separate(kv_len, &self.v),
            ]
        };
        let mask = self.mask.as_ref().map(|mask| match self.layout {
            Layout::Offset => place(gpu, &[mask.len() + 2], mask, |view| {
                split(&sliced(&view, 0, 1..mask.len() + 1), 0, &[batch, kv_len])
            }),
            Layout::Padded => place(gpu, &[batch + 1, kv_len + 4], mask, |view| {
                sliced(&sliced(&view, 0, 1..batch + 1), 1, 3..kv_len + 3)
            }),
            _ => place(gpu, &[batch, kv_len], mask, |view| view),
        });
        (operands, mask)
    }

    /// A guarded output as the layout has it.
    pub fn output(&self, gpu: &Gpu) -> (Guarded, TensorView) {
        let [batch, tokens, heads, head_dim] = self.out_shape();
        match self.layout {
            Layout::HeadMajor => {
                let guarded = Guarded::new(gpu, &[batch, heads, tokens, head_dim]);
                let view = permuted(&guarded.tensor.view(), &[0, 2, 1, 3]);
                (guarded, view)
            }
            Layout::Padded => {
                let guarded = Guarded::new(gpu, &[batch + 1, tokens + 2, heads + 1, head_dim + 3]);
                let view = sliced(&guarded.tensor.view(), 0, 1..batch + 1);
                let view = sliced(&view, 1, 1..tokens + 1);
                let view = sliced(&sliced(&view, 2, 0..heads), 3, 1..head_dim + 1);
                (guarded, view)
            }
            _ => {
                let guarded = Guarded::new(gpu, &self.out_shape());
                let view = guarded.tensor.view();
                (guarded, view)
            }
        }
    }
}

/// A problem with the reference's answer, to be held against any number of subjects.
pub struct PreparedAttention {
    pub data: AttentionData,
    pub expected: Vec<f64>,
}

impl AttentionCase {
    pub fn prepare(&self) -> PreparedAttention {
        let data = self.data();
        let expected = data.expected();
        PreparedAttention { data, expected }
    }
}

impl PreparedAttention {
    /// Whether the subject gives what the reference gives.
    pub fn check(&self, gpu: &Gpu, subject: &Subject) -> Result<(), String> {
        leave_dirt(gpu, self.expected.len());
        let got = self.data.run(gpu, subject)?;
        matches(&got, &self.expected, &self.data.out_shape())
    }
}

/// Whether every value is within [`Tolerance::F32`] of what it should be.
pub fn matches(got: &[f32], expected: &[f64], shape: &[usize]) -> Result<(), String> {
    let comparison = compare(got, shape, expected, shape, Tolerance::F32);
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
}

pub const LINEAR_LAYOUTS: [LinearLayout; 5] = [
    LinearLayout::SequenceFirst,
    LinearLayout::Contiguous,
    LinearLayout::ChannelsFirst,
    LinearLayout::Offset,
    LinearLayout::Padded,
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
    let all: Vec<f32> = guarded
        .whole
        .read_blocking()
        .map_err(|error| error.to_string())?;
    let mut inside = vec![false; all.len()];
    let mut values = Vec::new();
    let mut unwritten = 0;
    for_each_position(view, |at| {
        inside[at] = true;
        unwritten += usize::from(all[at].to_bits() == SENTINEL);
        values.push(all[at]);
    });
    let strays = all
        .iter()
        .zip(&inside)
        .filter(|(value, inside)| !**inside && value.to_bits() != SENTINEL)
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
