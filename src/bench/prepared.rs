//! A case on a GPU: operands, the call that is measured, and whether its result is right.

use super::cases::{Layout, Work};
use super::measure::Recorder;
use crate::compare::{Comparison, Tolerance, compare};
use crate::gpu::{Gpu, Timestamps};
use crate::kernels::{Form, Tier};
use crate::plan::Plan;
use crate::tensor::{Tensor, TensorView};
use crate::{
    Alignment, Attention, AttentionArguments, AttentionProblem, ElementType, Error, LayerArguments,
    LayerConfig, LayerPlan, LayerShape, LayerWeights, Linear, LinearArguments, LinearProblem,
    MultiHeadAttention, Projection, QkvWeights, Result, reference,
};
use half::{bf16, f16};

/// How a case is prepared.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PrepareOptions {
    /// The form of the kernels; `None` leaves it to the planner.
    pub form: Option<Form>,
    /// The kernel, by its name; `None` leaves it to the planner. Of its configurations the planner's is taken, else the first.
    pub kernel: Option<String>,
    /// The arithmetic; `None` leaves it to the planner.
    pub tier: Option<Tier>,
    /// Where moving bytes is most of the work, successive calls get operands of their own until these are that many
    /// bytes, so that a cache which outlives a call does not flatter. 0: one set of operands.
    pub working_set: u64,
}

impl PrepareOptions {
    /// What is fair on this adapter: more than the last-level cache of what is on the market.
    pub fn suited(gpu: &Gpu, form: Option<Form>) -> Self {
        let working_set = match gpu.adapter_info().device_type {
            wgpu::DeviceType::Cpu => 128 << 20,
            _ => 512 << 20,
        };
        PrepareOptions {
            form,
            working_set,
            ..Default::default()
        }
    }
}

/// Sets of operands at most.
const MOST_SETS: u64 = 64;

/// Multiply-adds up to which the reference computes all of a result rather than some of its rows.
const CHECKED_WHOLE: u64 = 50_000_000;

/// A case that is ready to be measured.
#[derive(Debug)]
pub struct Prepared {
    work: Work,
    made: Made,
}

#[derive(Debug)]
enum Made {
    Attention(Box<AttentionCase>),
    Linear(Box<LinearCase>),
    Layer(Box<LayerCase>),
}

impl Prepared {
    /// Plans, compiles, and makes operands.
    ///
    /// # Errors
    ///
    /// As [`Attention::new`], [`Linear::new`] and [`MultiHeadAttention::new`]; [`Error::OutOfMemory`].
    pub fn new(gpu: &Gpu, work: &Work, options: &PrepareOptions) -> Result<Self> {
        let sets = match work.moves_memory() {
            true => options.working_set.div_ceil(work.bytes().max(1)),
            false => 1,
        };
        let sets = sets.clamp(1, MOST_SETS) as usize;
        let made = if let Some(mut problem) = work.attention_problem() {
            problem.form = options.form;
            problem.tier = options.tier;
            let attention = match &options.kernel {
                None => Attention::new(gpu, problem)?,
                Some(kernel) => {
                    let plans = problem.candidates(gpu.capabilities())?;
                    let plan = plan_by(kernel, plans, work)?;
                    Attention::from_plan(gpu, problem, plan)?
                }
            };
            Made::Attention(Box::new(AttentionCase::new(gpu, work, attention, sets)?))
        } else if let Some(mut problem) = work.linear_problem() {
            expect_plain(work, options.tier)?;
            problem.form = options.form;
            let linear = match &options.kernel {
                None => Linear::new(gpu, problem)?,
                Some(kernel) => {
                    let plan = plan_by(kernel, problem.candidates(gpu.capabilities())?, work)?;
                    Linear::from_plan(gpu, problem, plan)?
                }
            };
            Made::Linear(Box::new(LinearCase::new(gpu, linear)?))
        } else {
            expect_plain(work, options.tier)?;
            Made::Layer(Box::new(LayerCase::new(gpu, work, options.form)?))
        };
        let prepared = Prepared { work: *work, made };
        match &options.kernel {
            // (Of a layer the planner alone chooses.)
            Some(kernel) if !prepared.kernels().contains(&kernel.as_str()) => {
                Err(no_such_plan(kernel, work, &prepared.kernels()))
            }
            _ => Ok(prepared),
        }
    }

    /// The kernels that could compute such work on this device, each with the arithmetic of its first configuration; the planner's choice is
    /// the first. None for a layer, of which the planner alone chooses.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn kernels_for(
        gpu: &Gpu,
        work: &Work,
        options: &PrepareOptions,
    ) -> Result<Vec<(&'static str, Tier)>> {
        let capabilities = gpu.capabilities();
        let plans = if let Some(mut problem) = work.attention_problem() {
            problem.form = options.form;
            problem.tier = options.tier;
            problem.candidates(capabilities)?
        } else if let Some(mut problem) = work.linear_problem() {
            problem.form = options.form;
            problem.candidates(capabilities)?
        } else {
            return Ok(Vec::new());
        };
        let mut kernels: Vec<(&str, Tier)> = Vec::new();
        for plan in plans {
            let (name, tier) = (plan.kernel.name, plan.kernel.tier(&plan.configuration));
            if !kernels.iter().any(|(known, _)| *known == name) {
                kernels.push((name, tier));
            }
        }
        Ok(kernels)
    }

    /// The arithmetic of a call: the fastest that any of its dispatches has.
    pub fn tier(&self) -> Tier {
        let tiers = self.plans().into_iter();
        let mut tiers: Vec<Tier> = tiers
            .map(|plan| plan.kernel.tier(&plan.configuration))
            .collect();
        tiers.sort_by_key(|tier| Tier::FASTER.iter().position(|faster| faster == tier));
        tiers.last().copied().unwrap_or(Tier::Plain)
    }

    /// What is computed.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// The plan of each dispatch of a call.
    pub fn plans(&self) -> Vec<&Plan> {
        match &self.made {
            Made::Attention(case) => vec![case.attention.plan()],
            Made::Linear(case) => vec![case.linear.plan()],
            Made::Layer(case) => {
                let steps = case.plan.steps();
                steps.into_iter().map(|(_, plan)| plan).collect()
            }
        }
    }

    /// The kernels of a call, each once.
    pub fn kernels(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = Vec::new();
        for plan in self.plans() {
            let merged = (plan.parts.max(plan.splits) > 1).then_some("merge");
            for name in std::iter::once(plan.kernel.name).chain(merged) {
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        names
    }

    /// Sets of operands, which successive calls take in turn.
    pub fn sets(&self) -> usize {
        match &self.made {
            Made::Attention(case) => case.sets.len(),
            Made::Linear(_) | Made::Layer(_) => 1,
        }
    }

    /// What records a call: each time with the next set of operands.
    pub fn recorder(&self) -> Box<Recorder<'_>> {
        let mut call = 0;
        Box::new(move |encoder, timestamps| {
            self.record(encoder, call, timestamps)?;
            call = (call + 1) % self.sets();
            Ok(())
        })
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        set: usize,
        timestamps: Option<&mut Timestamps>,
    ) -> Result<()> {
        match &self.made {
            Made::Attention(case) => {
                let Set { q, k, v, out } = &case.sets[set];
                let out = out.view();
                let arguments = AttentionArguments::new(q, k, v, &out);
                let name = case.attention.plan().kernel.name;
                case.attention
                    .encode_timed(encoder, arguments, name, timestamps)
            }
            Made::Linear(case) => {
                let arguments = LinearArguments {
                    x: &case.x,
                    weight: &case.weight,
                    bias: None,
                    y: &case.y.view(),
                };
                let name = case.linear.plan().kernel.name;
                case.linear
                    .encode_timed(encoder, arguments, name, timestamps)
            }
            Made::Layer(case) => {
                let (x, y) = (&case.x, case.y.view());
                let arguments = LayerArguments::new(x, &y);
                case.layer
                    .encode_timed(encoder, &case.plan, arguments, timestamps)
            }
        }
    }

    /// Runs a call on an output full of NaN, and holds it against the f64 reference: all of it where that is small, else rows
    /// from the first to the last. 16-bit outputs may differ by their rounding as well.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn check(&self) -> Result<Comparison> {
        self.compare(&self.run()?)
    }

    /// What a call leaves in an output that was full of NaN, token-major.
    ///
    /// # Errors
    ///
    /// What recording gives; [`Error::DeviceLost`].
    pub fn run(&self) -> Result<Vec<f32>> {
        let out = self.output();
        poison(out)?;
        let gpu = out.view().gpu().clone();
        let submission = gpu.record_and_submit(|encoder| self.record(encoder, 0, None))?;
        gpu.wait_for(submission)?;
        read(out)
    }

    /// Holds a result, token-major, against the reference as [`check`](Self::check) does.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if it has not as many elements as the output.
    pub fn compare(&self, got: &[f32]) -> Result<Comparison> {
        let wanted = self.output().view().elements();
        if got.len() as u64 != wanted {
            return Err(Error::shape(
                "result",
                format!("{wanted} elements"),
                got.len(),
            ));
        }
        let rows = match &self.made {
            Made::Attention(case) => case.expected(&self.work)?,
            Made::Linear(case) => case.expected()?,
            Made::Layer(case) => case.expected()?,
        };
        let (mut picked, mut expected) = (Vec::new(), Vec::new());
        for (at, row) in rows {
            picked.extend_from_slice(&got[at..at + row.len()]);
            expected.extend(row);
        }
        let shape = [expected.len()];
        // Half a unit in the last place of what is stored.
        let rounding = match self.work.element() {
            ElementType::F16 => (-11f64).exp2(),
            ElementType::BF16 => (-8f64).exp2(),
            _ => 0.0,
        };
        let Tolerance { absolute, relative } = Tolerance::F32;
        let tolerance = Tolerance::new(absolute, relative + rounding);
        Ok(compare(&picked, &shape, &expected, &shape, tolerance))
    }

    fn output(&self) -> &Tensor {
        match &self.made {
            Made::Attention(case) => &case.sets[0].out,
            Made::Linear(case) => &case.y,
            Made::Layer(case) => &case.y,
        }
    }
}

/// The first of these plans by that kernel.
fn plan_by(kernel: &str, plans: Vec<Plan>, work: &Work) -> Result<Plan> {
    let mut names: Vec<&str> = Vec::new();
    for plan in &plans {
        if !names.contains(&plan.kernel.name) {
            names.push(plan.kernel.name);
        }
    }
    let error = no_such_plan(kernel, work, &names);
    let mut plans = plans.into_iter();
    plans.find(|plan| plan.kernel.name == kernel).ok_or(error)
}

fn no_such_plan(kernel: &str, work: &Work, names: &[&str]) -> Error {
    Error::Unsupported {
        what: format!("{} by {kernel}", work.name()),
        reason: format!("this device computes it by {}", names.join(", ")),
    }
}

/// Projections and layers have f32 arithmetic alone.
fn expect_plain(work: &Work, tier: Option<Tier>) -> Result<()> {
    match tier {
        None | Some(Tier::Plain) => Ok(()),
        Some(tier) => Err(Error::Unsupported {
            what: format!("{} with {tier}", work.name()),
            reason: "only attention has faster tiers".into(),
        }),
    }
}

/// Rows of the result: where each begins in the output, and what it should be.
type Rows = Vec<(usize, Vec<f64>)>;

/// Some of `count` rows: the first and the last, and others around the edges of tiles; all of them if so wanted.
fn sampled(count: usize, all: bool) -> Vec<usize> {
    if all {
        return (0..count).collect();
    }
    let mut rows = vec![0, 1, 63, 64, count / 2 + 1, count.saturating_sub(1)];
    rows.retain(|row| *row < count);
    rows.sort_unstable();
    rows.dedup();
    rows
}

// ---------------------------------------------------------------- attention, of many queries or of one

#[derive(Debug)]
struct AttentionCase {
    attention: Attention,
    /// What every set holds, in memory's order: q, k and v, or all of them in the first.
    host: [Vec<f32>; 3],
    sets: Vec<Set>,
}

/// Operands of a call, `(1, T, H, D)`.
#[derive(Debug)]
struct Set {
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: Tensor,
}

impl AttentionCase {
    fn new(gpu: &Gpu, work: &Work, attention: Attention, sets: usize) -> Result<Self> {
        let AttentionProblem {
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            q_type,
            ..
        } = *attention.problem();
        let fused = layout_of(work) == Layout::Fused;
        let values = |count: usize, seed| {
            expect_room(gpu, "operands", count, q_type)?;
            Ok(rounded(noise(count, 1.0, seed)?, q_type))
        };
        let host = match fused {
            true => {
                let width = head_dim.saturating_mul(heads.saturating_add(2 * kv_heads));
                [values(q_len.saturating_mul(width), 1)?, vec![], vec![]]
            }
            false => {
                let of = |heads: usize, tokens: usize| {
                    heads.saturating_mul(tokens).saturating_mul(head_dim)
                };
                let keys = of(kv_heads, kv_len);
                [
                    values(of(heads, q_len), 1)?,
                    values(keys, 2)?,
                    values(keys, 3)?,
                ]
            }
        };
        let sets = (0..sets).map(|_| {
            let [q, k, v] = if fused {
                let shape = [1, q_len, heads + 2 * kv_heads, head_dim];
                let all = upload(gpu, &shape, &host[0], q_type)?.view();
                [
                    all.slice(2, 0..heads)?,
                    all.slice(2, heads..heads + kv_heads)?,
                    all.slice(2, heads + kv_heads..heads + 2 * kv_heads)?,
                ]
            } else {
                let part = |heads: usize, tokens: usize, values: &[f32]| {
                    let shape = [1, heads, tokens, head_dim];
                    let tensor = upload(gpu, &shape, values, q_type)?;
                    tensor.view().permute(&[0, 2, 1, 3])
                };
                [
                    part(heads, q_len, &host[0])?,
                    part(kv_heads, kv_len, &host[1])?,
                    part(kv_heads, kv_len, &host[2])?,
                ]
            };
            let out = Tensor::empty(gpu, &[1, q_len, heads, head_dim], q_type)?;
            Ok(Set { q, k, v, out })
        });
        Ok(AttentionCase {
            sets: sets.collect::<Result<_>>()?,
            attention,
            host,
        })
    }

    /// The rows of one head of q (0), k (1) or v (2), one behind the other.
    fn head(&self, part: usize, head: usize, layout: Layout) -> Vec<f64> {
        let AttentionProblem {
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = *self.attention.problem();
        let tokens = if part == 0 { q_len } else { kv_len };
        match layout {
            Layout::HeadMajor => {
                let size = tokens * head_dim;
                reference::widen(&self.host[part][head * size..][..size])
            }
            Layout::Fused => {
                let width = heads + 2 * kv_heads;
                let first = [0, heads, heads + kv_heads][part] + head;
                let row = |token: usize| {
                    let at = (token * width + first) * head_dim;
                    self.host[0][at..at + head_dim].iter().copied()
                };
                (0..tokens).flat_map(row).map(f64::from).collect()
            }
        }
    }

    fn expected(&self, work: &Work) -> Result<Rows> {
        let problem = self.attention.problem();
        let AttentionProblem {
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = *problem;
        let layout = layout_of(work);
        let whole = problem.pairs().saturating_mul(2 * head_dim as u64) <= CHECKED_WHOLE;
        let group = (heads / kv_heads.max(1)).max(1);
        let mut rows = Rows::new();
        let checked: Vec<usize> = match whole {
            true => (0..heads).collect(),
            false => {
                let mut some = vec![0, heads / 2, heads.saturating_sub(1)];
                some.dedup();
                some
            }
        };
        for head in checked {
            let [q, k, v] = [(0, head), (1, head / group), (2, head / group)]
                .map(|(p, h)| self.head(p, h, layout));
            let inputs = reference::AttentionInputs {
                batch: 1,
                heads: 1,
                q_len,
                kv_len,
                head_dim,
                q: &q,
                k: &k,
                v: &v,
                rules: reference::Rules {
                    causal: problem.rules.causal,
                    alignment: problem.rules.alignment.map(|alignment| match alignment {
                        Alignment::TopLeft => reference::Alignment::TopLeft,
                        Alignment::BottomRight => reference::Alignment::BottomRight,
                    }),
                    ..Default::default()
                },
                ..Default::default()
            };
            for query in sampled(q_len, whole) {
                let row = reference::attention_row(&inputs, 0, 0, query)?;
                rows.push(((query * heads + head) * head_dim, row.out));
            }
        }
        Ok(rows)
    }
}

fn layout_of(work: &Work) -> Layout {
    match work {
        Work::Attention { layout, .. } => *layout,
        _ => Layout::HeadMajor,
    }
}

// ---------------------------------------------------------------- a projection

#[derive(Debug)]
struct LinearCase {
    linear: Linear,
    x_host: Vec<f32>,
    weight_host: Vec<f32>,
    x: TensorView,
    weight: TensorView,
    y: Tensor,
}

impl LinearCase {
    fn new(gpu: &Gpu, linear: Linear) -> Result<Self> {
        let LinearProblem {
            tokens,
            d_in,
            d_out,
            ..
        } = *linear.problem();
        let (x, weight) = (tokens.saturating_mul(d_in), d_out.saturating_mul(d_in));
        for (what, count) in [("x", x), ("weight", weight)] {
            expect_room(gpu, what, count, ElementType::F32)?;
        }
        let x_host = noise(x, 1.0, 1)?;
        let weight_host = noise(weight, spread(d_in), 2)?;
        Ok(LinearCase {
            linear,
            x: Tensor::from_slice(gpu, &[1, tokens, d_in], &x_host)?.view(),
            weight: Tensor::from_slice(gpu, &[d_out, d_in], &weight_host)?.view(),
            y: Tensor::empty(gpu, &[1, tokens, d_out], ElementType::F32)?,
            x_host,
            weight_host,
        })
    }

    fn expected(&self) -> Result<Rows> {
        let LinearProblem {
            tokens,
            d_in,
            d_out,
            ..
        } = *self.linear.problem();
        let whole = self.linear.plan().flops / 2 <= CHECKED_WHOLE;
        let weight = reference::widen(&self.weight_host);
        let row = |row: usize| {
            let x = reference::widen(&self.x_host[row * d_in..][..d_in]);
            let y = reference::linear(&x, 1, d_in, &weight, None, d_out)?;
            Ok((row * d_out, y))
        };
        sampled(tokens, whole).into_iter().map(row).collect()
    }
}

// ---------------------------------------------------------------- the layer

#[derive(Debug)]
struct LayerCase {
    layer: MultiHeadAttention,
    plan: LayerPlan,
    x_host: Vec<f32>,
    qkv: Vec<f32>,
    output: Vec<f32>,
    x: TensorView,
    y: Tensor,
}

impl LayerCase {
    fn new(gpu: &Gpu, work: &Work, form: Option<Form>) -> Result<Self> {
        let Work::Layer {
            batch,
            tokens,
            d_in,
            d_out,
            heads,
        } = *work
        else {
            return Err(Error::Unsupported {
                what: work.name(),
                reason: "it is no layer".into(),
            });
        };
        let qkv = d_out.saturating_mul(d_in).saturating_mul(3);
        let output = d_out.saturating_mul(d_out);
        let x = batch.saturating_mul(tokens).saturating_mul(d_in);
        for (what, count) in [
            ("the weights of q, k, v", qkv),
            ("the output weight", output),
            ("x", x),
        ] {
            expect_room(gpu, what, count, ElementType::F32)?;
        }
        let qkv = noise(qkv, spread(d_in), 1)?;
        let output = noise(output, spread(d_out), 2)?;
        let x_host = noise(x, 1.0, 3)?;
        let config = LayerConfig {
            form,
            ..LayerConfig::new(d_in, d_out, heads).causal(true)
        };
        let weights = LayerWeights {
            qkv: QkvWeights::Fused(Projection::new(&qkv)),
            output: Some(Projection::new(&output)),
        };
        let layer = MultiHeadAttention::new(gpu, config, &weights)?;
        Ok(LayerCase {
            plan: layer.plan(LayerShape::new(batch, tokens))?,
            layer,
            x: Tensor::from_slice(gpu, &[batch, tokens, d_in], &x_host)?.view(),
            y: Tensor::empty(gpu, &[batch, tokens, d_out], ElementType::F32)?,
            x_host,
            qkv,
            output,
        })
    }

    /// Keys and values of all tokens, and the rest for some of them.
    fn expected(&self) -> Result<Rows> {
        let LayerShape { batch, tokens, .. } = *self.plan.shape();
        let LayerConfig {
            d_in, d_out, heads, ..
        } = *self.layer.config();
        let head_dim = d_out / heads;
        let [x, qkv, output] =
            [&self.x_host, &self.qkv, &self.output].map(|all| reference::widen(all));
        let (q_weight, kv_weight) = qkv.split_at(d_out * d_in);
        let whole = self.plan.flops() / 2 <= CHECKED_WHOLE;
        let mut rows = Rows::new();
        for item in 0..batch {
            let x = &x[item * tokens * d_in..][..tokens * d_in];
            let kv = reference::linear(x, tokens, d_in, kv_weight, None, 2 * d_out)?;
            let (k, v): (Vec<f64>, Vec<f64>) = {
                let half = |first: usize| {
                    let rows = kv.chunks_exact(2 * d_out);
                    rows.flat_map(|row| row[first..first + d_out].iter().copied())
                        .collect()
                };
                (half(0), half(d_out))
            };
            for token in sampled(tokens, whole) {
                let own = &x[token * d_in..][..d_in];
                let q = reference::linear(own, 1, d_in, q_weight, None, d_out)?;
                // What a token sees are the keys up to its own.
                let seen = token + 1;
                let context = reference::attention_without_weights(&reference::AttentionInputs {
                    batch: 1,
                    heads,
                    q_len: 1,
                    kv_len: seen,
                    head_dim,
                    q: &q,
                    k: &k[..seen * d_out],
                    v: &v[..seen * d_out],
                    ..Default::default()
                })?;
                let y = reference::linear(&context.out, 1, d_out, &output, None, d_out)?;
                rows.push(((item * tokens + token) * d_out, y));
            }
        }
        Ok(rows)
    }
}

// ---------------------------------------------------------------- values

/// An error before this machine's memory is filled with what the device has no room for.
fn expect_room(gpu: &Gpu, what: &str, count: usize, element: ElementType) -> Result<()> {
    let needed = (count as u64).saturating_mul(element.size());
    let available = gpu.capabilities().max_buffer_bytes;
    match needed <= available {
        true => Ok(()),
        false => Err(Error::limit_bytes(
            what,
            "max_buffer_size",
            needed,
            available,
        )),
    }
}

/// How far weights spread so that a row of values of deviation 1 gives values of deviation 1 or so.
fn spread(d_in: usize) -> f32 {
    (3.0 / d_in.max(1) as f32).sqrt()
}

/// Numbers in `-spread..spread` that look random and are the same every time, by a linear congruential generator.
///
/// # Errors
///
/// [`Error::OutOfMemory`] where this machine has no room for so many.
pub fn noise(count: usize, spread: f32, seed: u64) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    values
        .try_reserve_exact(count)
        .map_err(|_| Error::OutOfMemory {
            what: "operands on the host".into(),
            bytes: (count as u64).saturating_mul(4),
        })?;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * spread
    };
    values.extend(std::iter::repeat_with(next).take(count));
    Ok(values)
}

/// The values as that type holds them.
fn rounded(mut values: Vec<f32>, element: ElementType) -> Vec<f32> {
    for value in &mut values {
        *value = match element {
            ElementType::F16 => f16::from_f32(*value).to_f32(),
            ElementType::BF16 => bf16::from_f32(*value).to_f32(),
            _ => *value,
        };
    }
    values
}

/// A tensor of that type.
fn upload(gpu: &Gpu, shape: &[usize], values: &[f32], element: ElementType) -> Result<Tensor> {
    match element {
        ElementType::F16 => {
            let values: Vec<f16> = values.iter().copied().map(f16::from_f32).collect();
            Tensor::from_slice(gpu, shape, &values)
        }
        ElementType::BF16 => {
            let values: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
            Tensor::from_slice(gpu, shape, &values)
        }
        _ => Tensor::from_slice(gpu, shape, values),
    }
}

/// Fills a tensor with NaN, so that what a call leaves out is seen.
fn poison(tensor: &Tensor) -> Result<()> {
    let count = tensor.view().elements() as usize;
    match tensor.element_type() {
        ElementType::F16 => tensor.write(&vec![f16::NAN; count]),
        ElementType::BF16 => tensor.write(&vec![bf16::NAN; count]),
        _ => tensor.write(&vec![f32::NAN; count]),
    }
}

/// All of a tensor as f32.
fn read(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(match tensor.element_type() {
        ElementType::F16 => {
            let values: Vec<f16> = tensor.read_blocking()?;
            values.into_iter().map(f16::to_f32).collect()
        }
        ElementType::BF16 => {
            let values: Vec<bf16> = tensor.read_blocking()?;
            values.into_iter().map(bf16::to_f32).collect()
        }
        _ => tensor.read_blocking()?,
    })
}
