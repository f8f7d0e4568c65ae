//! Result files beside each other: which case became slower or faster, and what is only noise.
//!
//! Other programs make samples longer and never shorter, and a machine has slow minutes. So what is compared is the fastest
//! tenth of the samples, not the median, and a change counts only if it is larger than all of these together:
//!
//! - [`FLOOR`], which nothing that runs once more stays within for certain;
//! - how far the fastest tenth of either run moves when one of its rounds is left out (rounds lie apart in time; the jackknife,
//!   Quenouille 1949, Tukey 1958);
//! - on the same adapter, how far the adapter itself was from what it was: the middle of what the peak that binds the case came to
//!   before, between and after the rounds of either run.

use super::file::{CaseResult, Clock, LabelledRun, MeasuredCase, Outcome, Times};
use crate::bench::Spread;
use crate::{Error, Result};
use std::collections::HashMap;

/// The least change that counts, as a share of the time.
pub const FLOOR: f64 = 0.05;

/// Runs, case by case. The first run is what the others are held against.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison<'a> {
    /// The runs, in the order in which they were given.
    pub runs: Vec<LabelledRun<'a>>,
    /// Cases that were measured in two or more runs, or in the first and broke in another; in the order of the first that has them.
    pub cases: Vec<ComparedCase<'a>>,
    /// Cases of one run alone, or not measured in it: how many there are.
    pub unmatched: usize,
}

/// A case in each run.
#[derive(Clone, Debug, PartialEq)]
pub struct ComparedCase<'a> {
    /// [`CaseResult::id`].
    pub id: String,
    /// In each run what became of it there; `None` where it is not in it.
    pub found: Vec<Option<&'a CaseResult>>,
    /// In each run but the first what changed; `None` where either was not measured.
    pub changes: Vec<Option<Change>>,
}

/// A time beside another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Whose times: the GPU's if all runs that measured the case have them, else the wall's.
    pub clock: Clock,
    /// Seconds of the fastest tenth in the first run.
    pub first_s: f64,
    /// Seconds of the fastest tenth in the other.
    pub other_s: f64,
    /// The other's by the first's: above 1 is slower.
    pub ratio: f64,
    /// Changes up to this share are noise.
    pub noise: f64,
    /// What it comes to.
    pub verdict: Verdict,
}

/// What a change comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The other is faster.
    Faster,
    /// Nothing that can be told from noise.
    Noise,
    /// The other is slower.
    Slower,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Verdict::Faster => "faster",
            Verdict::Noise => "noise",
            Verdict::Slower => "slower",
        })
    }
}

impl<'a> Comparison<'a> {
    /// Matches the cases of two or more runs by their ids.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for fewer than two runs, or where no two of them measured the same case.
    pub fn of(runs: &[LabelledRun<'a>]) -> Result<Self> {
        if runs.len() < 2 {
            return Err(Error::shape(
                "result files",
                "two runs at least",
                runs.len(),
            ));
        }
        let mut order: Vec<String> = Vec::new();
        let mut found: HashMap<String, Vec<Option<&'a CaseResult>>> = HashMap::new();
        for (number, labelled) in runs.iter().enumerate() {
            for case in &labelled.run.cases {
                let id = case.id();
                let all = found.entry(id.clone()).or_insert_with(|| {
                    order.push(id);
                    vec![None; runs.len()]
                });
                all[number] = Some(case);
            }
        }
        let total = order.len();
        let mut cases = Vec::new();
        for id in order {
            let found = found.remove(&id).unwrap_or_default();
            let measured = |case: &Option<&'a CaseResult>| case.and_then(CaseResult::measured);
            // One that broke since is worth a line as well.
            let broken = measured(&found[0]).is_some() && found.iter().flatten().count() > 1;
            if found.iter().filter_map(measured).count() < 2 && !broken {
                continue;
            }
            // By one clock in all runs, so that times stand beside each other: the GPU's if all have it.
            let by_gpu = |case: &MeasuredCase| case.gpu.is_some() && case.clock == Clock::Gpu;
            let clock = match found.iter().filter_map(measured).all(by_gpu) {
                true => Clock::Gpu,
                false => Clock::Wall,
            };
            let times = |case: &Option<&'a CaseResult>| {
                let measured = measured(case)?;
                match clock {
                    Clock::Gpu => measured.gpu.as_ref(),
                    Clock::Wall => Some(&measured.wall),
                }
            };
            let changes = (1..runs.len()).map(|other| {
                let bound = measured(&found[0])?.bound.as_deref().unwrap_or("f32");
                let drift = drift(&runs[0], &runs[other], bound);
                let (first, other) = (times(&found[0])?, times(&found[other])?);
                Some(change_of(first, other, clock, drift))
            });
            cases.push(ComparedCase {
                id,
                changes: changes.collect(),
                found,
            });
        }
        if cases.is_empty() {
            let expected = "a case that two of the files measured";
            let labels = runs.iter().map(|run| run.label.as_str());
            let labels: Vec<&str> = labels.collect();
            let got = format!("none in common between {}", labels.join(" and "));
            return Err(Error::shape("result files", expected, got));
        }
        Ok(Comparison {
            runs: runs.to_vec(),
            unmatched: total - cases.len(),
            cases,
        })
    }

    /// The cases that are slower than in the first run, beyond noise and by more than this ratio, or that are no longer measured
    /// (wrong, failed or refused) though they were; each with the number of the run.
    pub fn slower_than(&self, ratio: f64) -> Vec<(&ComparedCase<'a>, usize)> {
        let mut all = Vec::new();
        for case in &self.cases {
            for number in 1..self.runs.len() {
                let slower = case.against_first(number).is_some_and(|change| {
                    change.verdict == Verdict::Slower && change.ratio > ratio
                });
                let was = case.found[0].is_some_and(|first| first.measured().is_some());
                let now = case.found[number];
                let broken =
                    now.is_some_and(|now| !matches!(now.outcome, Outcome::Measured(_))) && was;
                if slower || broken {
                    all.push((case, number));
                }
            }
        }
        all
    }
}

impl ComparedCase<'_> {
    /// What changed from the first run to that one.
    pub fn against_first(&self, number: usize) -> Option<&Change> {
        self.changes.get(number.checked_sub(1)?)?.as_ref()
    }
}

/// How far apart the adapter was from itself by that peak, as a share; 0 for two adapters, which are to differ.
fn drift(first: &LabelledRun<'_>, other: &LabelledRun<'_>, bound: &str) -> f64 {
    let (a, b) = (&first.run.adapter, &other.run.adapter);
    if (&a.name, &a.backend) != (&b.name, &b.backend) {
        return 0.0;
    }
    // Not the best: an adapter that was slow while all cases ran was fast once, before it became warm.
    let middle = |run: &LabelledRun<'_>| {
        let peaks = &run.run.peaks;
        let after = peaks.after.iter().filter(|form| form.bound == bound);
        let after = after.map(|form| form.rate_per_second);
        let rates = peaks.rate(bound).into_iter().chain(after).collect();
        Spread::of(rates).map(|spread| spread.median)
    };
    match (middle(first), middle(other)) {
        (Some(first), Some(other)) => (first / other).max(other / first) - 1.0,
        _ => 0.0,
    }
}

/// What changed between two times by that clock, on an adapter that differed from itself by that share.
pub fn change_of(first: &Times, other: &Times, clock: Clock, drift: f64) -> Change {
    let ratio = other.p10_s / first.p10_s;
    let noise = FLOOR + wobble(first) + wobble(other) + drift;
    let medians = other.median_s / first.median_s;
    // The medians must at least not say the opposite.
    let verdict = match () {
        () if ratio > 1.0 + noise && medians > 1.0 => Verdict::Slower,
        () if 1.0 / ratio > 1.0 + noise && medians < 1.0 => Verdict::Faster,
        () => Verdict::Noise,
    };
    Change {
        clock,
        first_s: first.p10_s,
        other_s: other.p10_s,
        ratio,
        noise,
        verdict,
    }
}

/// How far the fastest tenth moves, as a share of it, when one round is left out. Of a single round: how far its own fastest
/// tenth is from its middle; of fewer than three samples all of it.
fn wobble(times: &Times) -> f64 {
    // One or two samples say nothing.
    if times.rounds_s.iter().map(Vec::len).sum::<usize>() < 3 {
        return 1.0;
    }
    if times.rounds_s.len() < 2 {
        return times.median_s / times.p10_s - 1.0;
    }
    let without = |left_out: usize| {
        let rounds = times.rounds_s.iter().enumerate();
        let others = rounds.filter(|(number, _)| *number != left_out);
        let samples = others
            .flat_map(|(_, round)| round.iter().copied())
            .collect();
        Spread::of(samples).map(|spread| spread.p10)
    };
    let moved = (0..times.rounds_s.len()).filter_map(without);
    moved
        .map(|p10| (p10 / times.p10_s).max(times.p10_s / p10) - 1.0)
        .fold(0.0, f64::max)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Rounds of 10 samples each, of these seconds and up to a hundredth more.
    fn times(rounds: &[f64]) -> Times {
        let round = |base: &f64| {
            (0..10)
                .map(|i| base * (1.0 + 0.001 * f64::from(i)))
                .collect()
        };
        Times::of(rounds.iter().map(round).collect()).unwrap()
    }

    fn verdict(first: &[f64], other: &[f64], drift: f64) -> Verdict {
        change_of(&times(first), &times(other), Clock::Wall, drift).verdict
    }

    #[test]
    fn a_change_beyond_noise_is_told_and_nothing_else() {
        let steady = [1.0, 1.0, 1.0];
        assert_eq!(verdict(&steady, &steady, 0.0), Verdict::Noise);
        assert_eq!(verdict(&steady, &[1.04; 3], 0.0), Verdict::Noise);
        assert_eq!(verdict(&steady, &[1.2; 3], 0.0), Verdict::Slower);
        assert_eq!(verdict(&[1.2; 3], &steady, 0.0), Verdict::Faster);
        // One slow round of three changes nothing; one fast round alone makes the whole run doubtful.
        assert_eq!(verdict(&steady, &[1.4, 1.0, 1.0], 0.0), Verdict::Noise);
        assert_eq!(verdict(&steady, &[1.5, 2.1, 1.5], 0.0), Verdict::Slower);
        assert_eq!(verdict(&[1.4, 1.4, 1.0], &[1.4; 3], 0.0), Verdict::Noise);
        // The adapter itself was slower.
        assert_eq!(verdict(&steady, &[1.3; 3], 0.3), Verdict::Noise);
        assert_eq!(verdict(&steady, &[1.5; 3], 0.3), Verdict::Slower);
        // A single round says for itself how far it can be trusted.
        assert_eq!(verdict(&[1.0], &[1.02], 0.0), Verdict::Noise);
        assert_eq!(verdict(&[1.0], &[1.5], 0.0), Verdict::Slower);
    }
}
