//! The cases of one adapter: each is checked once and measured in every round.

use crate::{interrupt, load_tuning, tell};
use indicatif::ProgressBar;
use std::path::Path;
use std::time::{Duration, Instant};
use wgpu_attention::bench::{
    MeasureOptions, Measured, Peak, Peaks, PrepareOptions, Prepared, Spread, Work, measure,
};
use wgpu_attention::results::{
    Adapter, CaseResult, Clock, MeasuredCase, MeasuredPeaks, Outcome, Run, Times,
};
use wgpu_attention::{ElementType, Error, Form, Gpu, Result, Tier};

/// What is measured on an adapter.
pub(super) struct Suite<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) works: Vec<Work>,
    pub(super) left_out: Vec<String>,
    pub(super) variants: Variants<'a>,
    /// Samples of a case and round at most.
    pub(super) samples: usize,
    pub(super) rounds: u32,
    /// For the samples of a case in all rounds.
    pub(super) budget: Duration,
    pub(super) tuning: Option<&'a Path>,
}

/// In which ways a case is measured.
pub(super) struct Variants<'a> {
    /// By this kernel, by each of them (`all`), or by the planner's choice.
    pub(super) kernel: Option<&'a str>,
    pub(super) form: Option<Form>,
    /// With every tier that has qualified itself, beside the planner's choice.
    pub(super) tiers: bool,
}

/// A case in one way, and what is known of it so far.
struct Slot {
    work: Work,
    variant: Option<String>,
    options: PrepareOptions,
    state: State,
}

enum State {
    /// Not begun.
    Waiting,
    Measuring(Box<Measuring>),
    /// It will not be measured.
    Over(Outcome),
}

/// A case that was right, and its rounds so far.
struct Measuring {
    kernels: Vec<String>,
    tier: Tier,
    sets: usize,
    first_s: f64,
    checked: u64,
    max_error: f64,
    rounds: Vec<Measured>,
}

impl Suite<'_> {
    /// Goes through all rounds, and calls `keep` with what is there after each case and at the end. Ends early when somebody wants the program to end. Whether all was measured.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`], what measuring peaks and reading the tuning file give, and what `keep` gives.
    pub(super) fn measure(
        &self,
        bar: &ProgressBar,
        keep: &mut dyn FnMut(Run) -> Result<()>,
    ) -> Result<bool> {
        let tuned_problems = match self.tuning {
            Some(file) => Some(load_tuning(self.gpu, file)?),
            None => None,
        };
        bar.set_message(format!("{}: peaks", self.gpu.adapter_info().name));
        let mut slots: Vec<Slot> = Vec::new();
        for work in &self.works {
            slots.extend(self.slots(work));
        }
        let steps = u64::from(self.rounds) * slots.len() as u64;
        bar.inc_length(steps);
        bar.tick();
        let peaks = Peaks::measure(self.gpu)?;
        if interrupt::requested() {
            return Ok(false);
        }
        let mut finished = true;
        let mut after: Vec<Peak> = Vec::new();
        let now = |slots: &[Slot], after: &[Peak]| Run {
            adapter: Adapter::from(self.gpu),
            peaks: MeasuredPeaks::new(&peaks, after),
            tuned_problems,
            left_out: self.left_out.clone(),
            cases: slots
                .iter()
                .filter_map(|slot| slot.result(&peaks))
                .collect(),
        };
        'rounds: for round in 0..self.rounds {
            for number in 0..slots.len() {
                if interrupt::requested() {
                    finished = false;
                    break 'rounds;
                }
                let slot = &mut slots[number];
                bar.set_message(slot.work.name());
                match self.step(slot, round) {
                    Ok(()) => {}
                    Err(error @ Error::DeviceLost { .. }) => return Err(error),
                    // What was measured in earlier rounds stays.
                    Err(error) if slot.has_rounds() => {
                        bar.suspend(|| tell(format_args!("{}: {error}", slot.work.name())));
                    }
                    Err(error) => slot.state = State::Over(refused_or_failed(&error)),
                }
                bar.inc(1);
                keep(now(&slots, &after))?;
            }
            if interrupt::requested() {
                finished = round + 1 == self.rounds;
                break;
            }
            after.extend(peaks.again(self.gpu)?);
        }
        keep(now(&slots, &after))?;
        Ok(finished)
    }

    /// The ways in which a case is measured.
    fn slots(&self, work: &Work) -> Vec<Slot> {
        let options = PrepareOptions::suited(self.gpu, self.variants.form);
        let slot = |variant: Option<&str>, options: PrepareOptions| Slot {
            work: *work,
            variant: variant.map(str::to_string),
            options,
            state: State::Waiting,
        };
        let by = |kernel: &str| {
            let mut options = options.clone();
            options.kernel = Some(kernel.into());
            slot(Some(kernel), options)
        };
        match self.variants.kernel {
            Some("all") => match Prepared::kernels_for(self.gpu, work, &options) {
                Ok(kernels) if !kernels.is_empty() => {
                    kernels.into_iter().map(|(kernel, _)| by(kernel)).collect()
                }
                // (What is wrong with it will be seen again.)
                _ => vec![slot(None, options)],
            },
            Some(kernel) => vec![by(kernel)],
            None => {
                let mut all = vec![slot(None, options.clone())];
                for tier in self.other_tiers(work) {
                    let mut options = options.clone();
                    options.tier = Some(tier);
                    all.push(slot(Some(tier.name()), options));
                }
                all
            }
        }
    }

    /// The tiers that the planner would not take.
    fn other_tiers(&self, work: &Work) -> Vec<Tier> {
        let many = matches!(work, Work::Attention { .. });
        if !self.variants.tiers || !many || work.element() != ElementType::F16 {
            return Vec::new();
        }
        let mut tiers = vec![Tier::Plain];
        tiers.extend(&self.gpu.capabilities().qualified_tiers);
        let options = PrepareOptions::suited(self.gpu, self.variants.form);
        let planned = Prepared::kernels_for(self.gpu, work, &options);
        if let Some((_, own)) = planned.ok().and_then(|kernels| kernels.first().copied()) {
            tiers.retain(|tier| *tier != own);
        }
        tiers
    }

    /// One round of one case.
    fn step(&self, slot: &mut Slot, round: u32) -> Result<()> {
        if matches!(slot.state, State::Over(_)) {
            return Ok(());
        }
        let begin = Instant::now();
        let prepared = Prepared::new(self.gpu, &slot.work, &slot.options)?;
        if let State::Waiting = slot.state {
            let check = prepared.check()?;
            let kernels = prepared.kernels().into_iter();
            let kernels: Vec<String> = kernels.map(str::to_string).collect();
            if !check.passed() {
                slot.state = State::Over(Outcome::Wrong {
                    kernels,
                    reason: check.to_string(),
                });
                return Ok(());
            }
            slot.state = State::Measuring(Box::new(Measuring {
                kernels,
                tier: prepared.tier(),
                sets: prepared.sets(),
                first_s: begin.elapsed().as_secs_f64(),
                checked: check.compared as u64,
                max_error: check.max_error,
                rounds: Vec::new(),
            }));
        }
        let State::Measuring(measuring) = &mut slot.state else {
            return Ok(());
        };
        let options = MeasureOptions {
            samples: self.samples,
            budget: self.budget / self.rounds,
            // (What is compiled stays so: later rounds only wake the clocks up.)
            warm_up: Duration::from_millis(if round == 0 { 300 } else { 100 }),
            ..Default::default()
        };
        let measured = measure(self.gpu, &options, &mut prepared.recorder())?;
        measuring.rounds.push(measured);
        Ok(())
    }
}

/// What an error of a case means: an adapter that is too small is not at fault.
fn refused_or_failed(error: &Error) -> Outcome {
    let reason = error.to_string();
    match error {
        Error::LimitExceeded { .. }
        | Error::OutOfMemory { .. }
        | Error::Unsupported { .. }
        | Error::Parameter { .. }
        | Error::Layout { .. }
        | Error::MissingFeature { .. } => Outcome::Refused { reason },
        _ => Outcome::Failed { reason },
    }
}

impl Slot {
    fn has_rounds(&self) -> bool {
        matches!(&self.state, State::Measuring(measuring) if !measuring.rounds.is_empty())
    }

    /// What is known of it; `None` before it was begun.
    fn result(&self, peaks: &Peaks) -> Option<CaseResult> {
        let outcome = match &self.state {
            State::Waiting => return None,
            State::Over(outcome) => outcome.clone(),
            State::Measuring(measuring) => match measuring.case(&self.work, peaks) {
                Some(measured) => Outcome::Measured(Box::new(measured)),
                None if measuring.rounds.is_empty() => return None,
                None => Outcome::Failed {
                    reason: "the clock of this machine gives no positive times".into(),
                },
            },
        };
        let work = &self.work;
        let sizes = work.sizes().into_iter();
        Some(CaseResult {
            name: work.name(),
            variant: self.variant.clone(),
            kind: work.kind().into(),
            element: work.element().to_string(),
            sizes: sizes
                .map(|(name, size)| (name.to_string(), size as u64))
                .collect(),
            causal: work.causal(),
            flops: work.flops(),
            bytes: work.bytes(),
            outcome,
        })
    }
}

impl Measuring {
    /// All rounds together; `None` before the first, or where times are no times.
    fn case(&self, work: &Work, peaks: &Peaks) -> Option<MeasuredCase> {
        let last = self.rounds.last()?;
        let (wall, gpu) = times(&self.rounds)?;
        let no_gpu_time = self.rounds.iter().find_map(|own| own.gpu.as_ref().err());
        let seconds = gpu.as_ref().unwrap_or(&wall).median_s;
        let share = peaks.share(self.tier, work.flops(), work.bytes(), seconds);
        Some(MeasuredCase {
            kernels: self.kernels.clone(),
            tier: self.tier.name().into(),
            operand_sets: self.sets,
            first_s: self.first_s,
            checked: self.checked,
            max_error: self.max_error,
            calls_per_sample: last.calls,
            clock: if gpu.is_some() {
                Clock::Gpu
            } else {
                Clock::Wall
            },
            no_gpu_time: no_gpu_time.map(|reason| reason.to_string()),
            wall,
            gpu,
            flops_per_second: work.flops() as f64 / seconds,
            bytes_per_second: work.bytes() as f64 / seconds,
            bound: share.map(|share| share.bound.to_string()),
            share_of_peak: share.map(|share| share.share),
        })
    }
}

/// Wall time of all rounds, and GPU time if every round has it.
pub(super) fn times(rounds: &[Measured]) -> Option<(Times, Option<Times>)> {
    let samples = |spread: &Spread| spread.samples.clone();
    let wall = Times::of(rounds.iter().map(|own| samples(&own.wall)).collect())?;
    let gpu: Result<Vec<_>, _> = rounds
        .iter()
        .map(|own| own.gpu.as_ref().map(samples))
        .collect();
    Some((wall, gpu.ok().and_then(Times::of)))
}
