//! `--check-noise`: one case against itself, to learn what difference this machine can resolve.

use super::suite::times;
use super::{Options, chosen};
use crate::{Verdict, complain, interrupt, say};
use std::time::Duration;
use wgpu_attention::bench::{MeasureOptions, PrepareOptions, Prepared, Work, measure};
use wgpu_attention::results::{Change, Clock, Times, Verdict as Told, change_of};
use wgpu_attention::{Gpu, Result};

/// How often the case is measured as if it were a run of its own.
const RUNS: usize = 6;

pub(super) fn run(options: &Options, gpus: &[Gpu]) -> Result<Verdict> {
    for gpu in gpus {
        let (works, _) = chosen(options, gpu);
        let usual = |work: &&Work| work.name() == "attention-causal-t1024-h12-d64-f32";
        let Some(work) = works.iter().find(usual).or(works.first()) else {
            complain("--check-noise: the cases that were asked for are for GPUs alone");
            return Ok(Verdict::Unsound);
        };
        if !check(options, gpu, work)? {
            return Ok(Verdict::Wrong);
        }
        if interrupt::requested() {
            return Ok(Verdict::Interrupted);
        }
    }
    Ok(Verdict::Right)
}

/// Measures, and says what came out; whether the case was right.
fn check(options: &Options, gpu: &Gpu, work: &Work) -> Result<bool> {
    say(format_args!(
        "{}: {}, {RUNS} runs of {} rounds, nothing changed between them",
        gpu.describe(),
        work.name(),
        options.rounds
    ));
    let prepared = Prepared::new(gpu, work, &PrepareOptions::suited(gpu, options.form.form()))?;
    let comparison = prepared.check()?;
    if !comparison.passed() {
        say(format_args!("WRONG, not timed: {comparison}"));
        return Ok(false);
    }
    let measure_options = MeasureOptions {
        samples: options.samples as usize,
        budget: Duration::from_millis(1500) / options.rounds,
        ..Default::default()
    };
    let mut runs: Vec<(Clock, Times)> = Vec::new();
    for _ in 0..RUNS {
        if interrupt::requested() {
            break;
        }
        let rounds = (0..options.rounds)
            .map(|_| measure(gpu, &measure_options, &mut prepared.recorder()))
            .collect::<Result<Vec<_>>>()?;
        if let Some((wall, gpu)) = times(&rounds) {
            let clock = if gpu.is_some() {
                Clock::Gpu
            } else {
                Clock::Wall
            };
            let times = gpu.unwrap_or(wall);
            say(format_args!(
                "  run {}: {:.4} ms in the middle, {:.4} ms in the fastest tenth, spread {:.1} %",
                runs.len() + 1,
                times.median_s * 1e3,
                times.p10_s * 1e3,
                100.0 * times.relative_spread()
            ));
            runs.push((clock, times));
        }
    }
    let changes = pairs(&runs);
    if changes.is_empty() {
        say("  fewer than two runs: nothing can be said");
        return Ok(true);
    }
    let apart = |change: &Change| change.ratio.max(1.0 / change.ratio) - 1.0;
    let mut apart: Vec<f64> = changes.iter().map(apart).collect();
    apart.sort_by(f64::total_cmp);
    let mut noise: Vec<f64> = changes.iter().map(|change| change.noise).collect();
    noise.sort_by(f64::total_cmp);
    let told = changes
        .iter()
        .filter(|change| change.verdict != Told::Noise);
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    say(format_args!(
        "  two runs differ by {} in the middle and {} at most",
        percent(apart[apart.len() / 2]),
        percent(apart[apart.len() - 1])
    ));
    say(format_args!(
        "  compare would take up to {} for noise here, and calls {} of {} pairs a change that was none",
        percent(noise[noise.len() / 2]),
        told.count(),
        changes.len()
    ));
    Ok(true)
}

/// Every run against every later one, by the clock that all of them have.
fn pairs(runs: &[(Clock, Times)]) -> Vec<Change> {
    let mut changes = Vec::new();
    for (number, (clock, first)) in runs.iter().enumerate() {
        for (other_clock, other) in &runs[number + 1..] {
            if clock == other_clock {
                changes.push(change_of(first, other, *clock, 0.0));
            }
        }
    }
    changes
}
