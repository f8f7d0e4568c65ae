//! The tuner: measures, on this device, the plans that could compute a problem, and keeps the fastest.
//!
//! Planning ([`AttentionProblem::plan`](crate::AttentionProblem::plan)) is a pure function that knows the kind of a device and
//! not the device. [`AttentionProblem::tune`](crate::AttentionProblem::tune), [`LinearProblem::tune`](crate::LinearProblem::tune) and
//! [`MultiHeadAttention::tune`](crate::MultiHeadAttention::tune) time its choice and the others; from then on whatever is
//! made for that problem on that [`Gpu`](crate::Gpu) (or a clone of it) takes the winner. Nothing is tuned unasked.

#[cfg(feature = "tuning-file")]
mod file;
mod operands;

use crate::gpu::{Capabilities, Gpu, Winner};
use crate::kernels::{Configuration, hash};
use crate::plan::Plan;
use crate::tensor::Tensor;
use crate::{
    Attention, AttentionProblem, ElementType, LayerShape, Linear, LinearArguments, LinearProblem,
    MultiHeadAttention, Result,
};
use std::fmt;
use std::time::{Duration, Instant};

/// How long tuning may take.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TuneOptions {
    /// Time for one problem, compilation included: 2 s unless said otherwise. The planner's own choice is always
    /// measured; what there was no time for is counted in [`Tuned::left_out`].
    pub budget: Duration,
}

impl Default for TuneOptions {
    fn default() -> Self {
        TuneOptions {
            budget: Duration::from_secs(2),
        }
    }
}

impl TuneOptions {
    /// With that much time for one problem.
    pub fn within(budget: Duration) -> Self {
        TuneOptions { budget }
    }
}

/// What tuning of one problem found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Tuned {
    /// The problem, as it is kept.
    pub problem: String,
    /// What was measured, fastest first.
    pub measured: Vec<Measured>,
    /// Candidates that there was no time for, or that did not compile.
    pub left_out: usize,
}

/// One candidate, measured.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Measured {
    /// The plan.
    pub plan: Plan,
    /// Seconds a call, by the wall clock over many calls in one submission; the median.
    pub seconds: f64,
    /// Whether it is what planning chooses.
    pub planned: bool,
    /// Whether it is taken from now on: the fastest, or the planned one where nothing is faster by more than the noise.
    pub taken: bool,
}

impl Tuned {
    /// What is taken from now on; `None` where the problem has nothing to compute.
    pub fn winner(&self) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.taken)
    }
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.problem)?;
        for Measured {
            plan,
            seconds,
            planned,
            taken,
        } in &self.measured
        {
            let kernel = plan.kernel.name;
            let mark = if *taken { "*" } else { " " };
            write!(f, "\n{mark} {:>10.4} ms  {kernel}", seconds * 1e3)?;
            for (name, value) in &plan.configuration.consts {
                write!(f, " {name}={value}")?;
            }
            let tier = plan.kernel.tier(&plan.configuration);
            if tier != crate::Tier::Plain {
                write!(f, ", {tier}")?;
            }
            if plan.splits > 1 {
                write!(f, ", keys in {} parts", plan.splits)?;
            }
            if *planned {
                write!(f, "  (planned)")?;
            }
        }
        match self.left_out {
            _ if self.measured.is_empty() => write!(f, "\n  nothing to compute"),
            0 => Ok(()),
            count => write!(f, "\n  {count} more not measured"),
        }
    }
}

/// A candidate takes the place of the planner's choice if it is faster by more than this share: what lies nearer is noise.
const WORTH_IT: f64 = 0.03;

/// A submission that is timed takes at least that long, so that what it costs to submit does not count.
const LEAST_SAMPLE: Duration = Duration::from_millis(8);

/// Samples of a candidate at most.
const MOST_SAMPLES: usize = 9;

impl AttentionProblem {
    /// Measures every plan that could compute this on the device ([`candidates`](Self::candidates)), on operands of its own, and keeps the fastest: what is
    /// made for an equal problem on this `Gpu` from now on takes it. Results stay within the same bounds, but may differ in their
    /// last digits from those of another plan.
    ///
    /// # Errors
    ///
    /// As [`Attention::new`], [`Error::DeviceLost`](crate::Error::DeviceLost). What was known before is known still.
    pub async fn tune(&self, gpu: &Gpu, options: &TuneOptions) -> Result<Tuned> {
        let operands = operands::of_attention(gpu, self)?;
        let make = |plan: &Plan| {
            let attention = Attention::from_plan(gpu, self.clone(), plan.clone())?;
            let operands = &operands;
            Ok(Box::new(move |encoder: &mut wgpu::CommandEncoder| {
                attention.encode(encoder, operands.arguments())
            }) as Recorder<'_>)
        };
        let candidates = self.candidates(gpu.capabilities())?;
        tune(gpu, options, self.key(), candidates, operands.out(), &make).await
    }

    /// [`tune`](Self::tune), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`tune`](Self::tune).
    #[cfg(not(target_family = "wasm"))]
    pub fn tune_blocking(&self, gpu: &Gpu, options: &TuneOptions) -> Result<Tuned> {
        pollster::block_on(self.tune(gpu, options))
    }

    /// The plan that is taken on a device: the winner, where this was tuned, or [`plan`](Self::plan)'s.
    pub(crate) fn plan_on(&self, gpu: &Gpu) -> Result<Plan> {
        let planned = self.plan(gpu.capabilities())?;
        Ok(chosen(gpu, &self.key(), planned, |capabilities| {
            self.candidates(capabilities)
        }))
    }

    /// The problem as tuning keeps it: everything that candidates and their times depend on.
    fn key(&self) -> String {
        let AttentionProblem {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            packed,
            page_size,
            ref rules,
            ref keys,
            q_type,
            kv_type,
            out_type,
            form,
            tier,
            decode,
        } = *self;
        let mut key = format!(
            "attention B {batch}, H {heads}/{kv_heads}, Tq {q_len}, Tk {kv_len}, D {head_dim}/{value_dim}, {q_type}/{kv_type}/{out_type}"
        );
        let mut say = |there: bool, words: String| {
            if there {
                key.push_str(", ");
                key.push_str(&words);
            }
        };
        say(packed, "packed".into());
        let pages = page_size.map_or(String::new(), |size| format!("pages of {size}"));
        say(page_size.is_some(), pages);
        say(rules.causal, "causal".into());
        for (name, window) in [("left", rules.window_left), ("right", rules.window_right)] {
            let window = window.map(|keys| keys.to_string());
            say(
                window.is_some(),
                format!("{name} {}", window.unwrap_or_default()),
            );
        }
        // Where the own key of a query lies counts only where a rule counts from it and there is more than one place.
        let lengths_vary = q_len != kv_len || packed || rules.q_lens || rules.kv_lens;
        let counts = rules.is_positional() && lengths_vary;
        let alignment = rules
            .alignment
            .filter(|_| counts)
            .map(|alignment| format!("{alignment:?}"));
        say(alignment.is_some(), alignment.unwrap_or_default());
        for (there, name) in [
            (rules.softcap.is_some(), "softcap"),
            (rules.mask, "mask"),
            (rules.bias, "bias"),
            (rules.kv_lens, "kv_lens"),
            (rules.q_lens, "q_lens"),
            (rules.alibi, "alibi"),
            (rules.sinks, "sinks"),
        ] {
            say(there, name.into());
        }
        let rule = rules.rule.as_ref();
        let text = rule.map(|rule| format!("rule {:016x}", hash(&rule.fragment().source)));
        say(text.is_some(), text.unwrap_or_default());
        say(keys.is_some(), format!("keys {:?}", self.key_range()));
        let form = form.map(|form| format!("{form:?}"));
        say(form.is_some(), form.unwrap_or_default());
        say(
            tier.is_some(),
            tier.map_or(String::new(), |tier| tier.to_string()),
        );
        let decode = decode.map(|decode| format!("decode {decode}"));
        say(decode.is_some(), decode.unwrap_or_default());
        key
    }
}

impl LinearProblem {
    /// Measures every plan that could compute this on the device ([`candidates`](Self::candidates)), on operands of its own, and keeps the fastest: what is
    /// made for an equal problem on this `Gpu` from now on takes it, projections into a cache too.
    ///
    /// # Errors
    ///
    /// As [`Linear::new`], [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::DeviceLost`](crate::Error::DeviceLost). What was known before is known still.
    pub async fn tune(&self, gpu: &Gpu, options: &TuneOptions) -> Result<Tuned> {
        let LinearProblem {
            batch,
            tokens,
            d_in,
            d_out,
            ..
        } = *self;
        let candidates = self.candidates(gpu.capabilities())?;
        let x = operands::noise(gpu, &[batch, tokens, d_in], ElementType::F32)?.view();
        let weight = operands::noise(gpu, &[d_out, d_in], ElementType::F32)?.view();
        let y = Tensor::empty(gpu, &[batch, tokens, d_out], ElementType::F32)?;
        let y_view = y.view();
        let make = |plan: &Plan| {
            let linear = Linear::from_plan(gpu, *self, plan.clone())?;
            let (x, weight, y) = (&x, &weight, &y_view);
            Ok(Box::new(move |encoder: &mut wgpu::CommandEncoder| {
                let bias = None;
                linear.encode(encoder, LinearArguments { x, weight, bias, y })
            }) as Recorder<'_>)
        };
        tune(gpu, options, self.key(), candidates, &y, &make).await
    }

    /// [`tune`](Self::tune), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`tune`](Self::tune).
    #[cfg(not(target_family = "wasm"))]
    pub fn tune_blocking(&self, gpu: &Gpu, options: &TuneOptions) -> Result<Tuned> {
        pollster::block_on(self.tune(gpu, options))
    }

    /// The plan that is taken on a device instead of that one: the winner, where this was tuned.
    pub(crate) fn chosen_on(
        &self,
        gpu: &Gpu,
        planned: Plan,
        candidates: impl FnOnce(&Capabilities) -> Result<Vec<Plan>>,
    ) -> Plan {
        chosen(gpu, &self.key(), planned, candidates)
    }

    /// The problem as tuning keeps it.
    fn key(&self) -> String {
        let LinearProblem {
            batch,
            tokens,
            d_in,
            d_out,
            form,
            few,
        } = self;
        let mut key = format!(
            "linear {} rows, {d_in} to {d_out}",
            batch.saturating_mul(*tokens)
        );
        if let Some(form) = form {
            key.push_str(&format!(", {form:?}"));
        }
        if let Some(few) = few {
            key.push_str(&format!(", few {few}"));
        }
        key
    }
}

impl MultiHeadAttention {
    /// Tunes the projections and the attention of calls of that shape, one after the other. Plans that were made before
    /// stay as they are; the next [`plan`](Self::plan) takes the winners.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan) and [`AttentionProblem::tune`]. What was found before the error is kept.
    pub async fn tune(&self, shape: LayerShape, options: &TuneOptions) -> Result<Vec<Tuned>> {
        let plan = self.plan(shape)?;
        let gpu = self.gpu();
        let mut tuned = Vec::new();
        let mut projections: Vec<LinearProblem> = plan.linear_problems();
        projections.dedup();
        for problem in projections {
            tuned.push(problem.tune(gpu, options).await?);
        }
        tuned.push(plan.attention_problem().tune(gpu, options).await?);
        Ok(tuned)
    }

    /// [`tune`](Self::tune), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`tune`](Self::tune).
    #[cfg(not(target_family = "wasm"))]
    pub fn tune_blocking(&self, shape: LayerShape, options: &TuneOptions) -> Result<Vec<Tuned>> {
        pollster::block_on(self.tune(shape, options))
    }
}

impl Gpu {
    /// The same device with the rate of its attention kernel measured instead of guessed
    /// ([`Capabilities::flops_per_second`]): what is planned by the handle that comes back is cut into dispatches by it.
    /// Takes some milliseconds on a GPU, and the time to compile one kernel.
    ///
    /// # Errors
    ///
    /// As [`AttentionProblem::tune`].
    pub async fn measure_rate(&self) -> Result<Gpu> {
        let problem = AttentionProblem::new(1, 8, 256, 64);
        let operands = operands::of_attention(self, &problem)?;
        let attention = Attention::new(self, problem)?;
        let mut record =
            |encoder: &mut wgpu::CommandEncoder| attention.encode(encoder, operands.arguments());
        let mut clock = Clock::new(self, operands.out());
        // The first one compiles whatever a driver puts off, and the second finds out how many make a sample.
        clock.start(&mut record).await?;
        let mut seconds = Vec::new();
        for _ in 0..3 {
            seconds.push(clock.sample(&mut record).await?);
        }
        let rate = attention.plan().flops as f64 / median(&mut seconds);
        // Rules, odd sizes and other kernels are slower; a device that is busy elsewhere too.
        Ok(self.with_rate((rate / 2.0) as u64))
    }

    /// [`measure_rate`](Self::measure_rate), waiting on this thread.
    ///
    /// # Errors
    ///
    /// As [`measure_rate`](Self::measure_rate).
    #[cfg(not(target_family = "wasm"))]
    pub fn measure_rate_blocking(&self) -> Result<Gpu> {
        pollster::block_on(self.measure_rate())
    }
}

/// Records one call.
type Recorder<'a> = Box<dyn FnMut(&mut wgpu::CommandEncoder) -> Result<()> + 'a>;

/// Times calls on the wall clock: many in one submission, up to the read-back of a word of their output.
struct Clock<'a> {
    gpu: &'a Gpu,
    out: &'a Tensor,
    /// Calls of a sample.
    calls: u32,
}

impl<'a> Clock<'a> {
    fn new(gpu: &'a Gpu, out: &'a Tensor) -> Self {
        Clock { gpu, out, calls: 1 }
    }

    /// One call that does not count, and then as many as make a sample long enough. Returns the seconds of the last try, a call.
    async fn start(
        &mut self,
        record: &mut dyn FnMut(&mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<f64> {
        self.calls = 1;
        self.sample(record).await?;
        loop {
            let seconds = self.sample(record).await?;
            let wanted = LEAST_SAMPLE.as_secs_f64() / seconds.max(1e-9);
            if wanted <= f64::from(self.calls) || self.calls >= MOST_CALLS {
                return Ok(seconds);
            }
            self.calls = (wanted.ceil() as u32).max(self.calls * 2).min(MOST_CALLS);
        }
    }

    /// Seconds a call, of one sample.
    async fn sample(
        &self,
        record: &mut dyn FnMut(&mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<f64> {
        let calls = self.calls;
        let begin = Instant::now();
        self.gpu.record_and_submit(|encoder| {
            for _ in 0..calls {
                record(encoder)?;
            }
            Ok(())
        })?;
        self.gpu.read(self.out.buffer(), 0, 4).await?;
        Ok(begin.elapsed().as_secs_f64() / f64::from(calls))
    }
}

/// Calls of one submission at most.
const MOST_CALLS: u32 = 256;

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds
        .get(seconds.len() / 2)
        .copied()
        .unwrap_or(f64::INFINITY)
}

/// Measures candidates, the first of which is the planner's, turn and turn about until the time is up, and keeps the winner.
async fn tune<'a>(
    gpu: &Gpu,
    options: &TuneOptions,
    key: String,
    candidates: Vec<Plan>,
    out: &Tensor,
    make: &dyn Fn(&Plan) -> Result<Recorder<'a>>,
) -> Result<Tuned> {
    let begin = Instant::now();
    let mut left_out = 0;
    let mut racing = Vec::new();
    let mut fastest = f64::INFINITY;
    for (number, plan) in candidates.into_iter().enumerate() {
        let first = number == 0;
        // Half of the time is for the race itself.
        if plan.grid.is_none() || (!first && begin.elapsed() > options.budget / 2) {
            left_out += 1;
            continue;
        }
        let started = match make(&plan) {
            Ok(mut record) => {
                let mut clock = Clock::new(gpu, out);
                let seconds = clock.start(&mut record).await;
                seconds.map(|seconds| (seconds, record, clock))
            }
            Err(error) => Err(error),
        };
        match started {
            Ok((seconds, record, clock)) => {
                fastest = fastest.min(seconds);
                racing.push((plan, record, clock, vec![seconds]));
            }
            Err(error) if first => return Err(error),
            Err(error) => {
                gpu.alive()?;
                log::warn!("tuning {key}: {plan} is left out: {error}");
                left_out += 1;
            }
        }
    }
    // What is far behind after one sample does not come back.
    for _ in 1..MOST_SAMPLES {
        for (_, record, clock, seconds) in &mut racing {
            let late = begin.elapsed() > options.budget;
            if !late && seconds[0] < 1.5 * fastest {
                seconds.push(clock.sample(record).await?);
            }
        }
    }
    let mut measured: Vec<Measured> = racing
        .into_iter()
        .enumerate()
        .map(|(number, (plan, _, _, mut seconds))| Measured {
            plan,
            seconds: median(&mut seconds),
            planned: number == 0,
            taken: false,
        })
        .collect();
    let planned_seconds = measured.first().map_or(0.0, |planned| planned.seconds);
    measured.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let worth_it = |best: &&mut Measured| best.seconds < planned_seconds * (1.0 - WORTH_IT);
    let faster = measured.first_mut().filter(worth_it).is_some();
    let taken = measured.iter_mut().find(|one| faster || one.planned);
    if let Some(taken) = taken {
        taken.taken = true;
        let kept = Winner {
            kernel: taken.plan.kernel.name.to_string(),
            tier: tier_of(&taken.plan),
            constants: constants(&taken.plan.configuration),
            splits: taken.plan.splits,
            seconds: taken.seconds,
            planned_seconds,
        };
        gpu.tuning().insert(key.clone(), kept);
    }
    let tuned = Tuned {
        problem: key,
        measured,
        left_out,
    };
    log::info!("tuned {tuned}");
    Ok(tuned)
}

/// The arithmetic of a plan, as it is kept.
fn tier_of(plan: &Plan) -> String {
    format!("{:?}", plan.kernel.tier(&plan.configuration))
}

/// Constants of a configuration as they are kept. Rules follow from the problem, but for the arithmetic.
fn constants(configuration: &Configuration) -> Vec<(String, u32)> {
    let own = configuration.consts.iter();
    own.map(|(name, value)| (name.to_string(), *value))
        .collect()
}

/// The winner in the planner's place.
fn chosen(
    gpu: &Gpu,
    key: &str,
    planned: Plan,
    candidates: impl FnOnce(&Capabilities) -> Result<Vec<Plan>>,
) -> Plan {
    let Some(winner) = gpu.tuning().get(key).cloned() else {
        return planned;
    };
    let is_it = |plan: &Plan| {
        plan.kernel.name == winner.kernel
            && tier_of(plan) == winner.tier
            && plan.splits == winner.splits
            && constants(&plan.configuration) == winner.constants
    };
    let (seconds, planned_seconds) = (winner.seconds * 1e3, winner.planned_seconds * 1e3);
    if is_it(&planned) {
        return Plan {
            reason: format!("{}; tuned: nothing else was faster", planned.reason),
            ..planned
        };
    }
    let found = candidates(gpu.capabilities()).map(|all| all.into_iter().find(is_it));
    match found {
        Ok(Some(plan)) => Plan {
            reason: format!(
                "tuned: {seconds:.4} ms, {planned_seconds:.4} ms as planned ({})",
                plan.reason
            ),
            ..plan
        },
        _ => {
            log::warn!("{key}: what tuning found is no candidate here and is ignored");
            planned
        }
    }
}
