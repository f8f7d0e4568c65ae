//! `compare`: result files of `bench` beside each other.

use crate::table::{Format, Table};
use crate::{Verdict, complain, say, say_all, tell};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;
use wgpu_attention::Result;
use wgpu_attention::results::{
    Change, Comparison, LabelledRun, Outcome, ResultFile, Verdict as Told, labelled, visible,
};

#[derive(Args)]
#[command(after_help = "\
Every run is held against the first one. Times are those of the fastest tenth of the samples, which other programs disturb \
least; by the GPU's clock where all runs have it. What is within the noise of the two runs is called so: it takes a twentieth, \
and what the runs' own rounds and the adapter's own peaks differ by, to be a change. docs/benchmarking.md says more.")]
pub(crate) struct Options {
    /// Files that `bench --save` wrote; one of several adapters compares them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// What to print
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Exit with status 1 if a case is slower than in the first run, beyond noise and more than this many times, or is no longer right
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    fail_above: Option<f64>,
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio: f64 = text.parse().map_err(|_| "not a number".to_string())?;
    match ratio.is_finite() && ratio >= 1.0 {
        true => Ok(ratio),
        false => Err("expected a number from 1 on: 1.1 is a tenth slower".into()),
    }
}

/// Files with their names.
pub(crate) fn load(paths: &[PathBuf]) -> Result<Vec<(String, ResultFile)>> {
    let load = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or(path.as_os_str());
        Ok((name.to_string_lossy().into_owned(), ResultFile::load(path)?))
    };
    paths.iter().map(load).collect()
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let files = load(&options.files)?;
    let runs = labelled(&files);
    let unfinished = runs.iter().find(|run| !run.file.complete);
    if let (Some(_), Some(run)) = (options.fail_above, unfinished) {
        complain(format_args!(
            "--fail-above: {} is not complete, and what is missing in it may be what is slower; measure again",
            run.label
        ));
        return Ok(Verdict::Unsound);
    }
    let comparison = Comparison::of(&runs)?;
    match options.format {
        Format::Table => {
            for (number, run) in runs.iter().enumerate() {
                say(format_args!("{}  {}", letter(number), visible(&about(run))));
            }
            say("");
            say_all(table(&comparison).terminal());
            say("");
            for line in summary(&comparison) {
                say(visible(&line));
            }
        }
        Format::Markdown => {
            for (number, run) in runs.iter().enumerate() {
                let about = crate::table::escaped_markdown(&about(run));
                say(format_args!("- **{}** {about}", letter(number)));
            }
            say("");
            say_all(table(&comparison).markdown());
            say("");
            for line in summary(&comparison) {
                say(crate::table::escaped_markdown(&line));
            }
        }
        Format::Csv => say_all(flat(&comparison).csv()),
        Format::Json => say(format_args!("{:#}", as_json(&comparison))),
    }
    let Some(ratio) = options.fail_above else {
        return Ok(Verdict::Right);
    };
    let slower = comparison.slower_than(ratio);
    for (case, number) in &slower {
        tell(format_args!(
            "{}: {} {}",
            letter(*number),
            case.id,
            match case.against_first(*number) {
                Some(change) => format!("takes {:.2} times as long", change.ratio),
                None => "is no longer measured".into(),
            }
        ));
    }
    if slower.is_empty() {
        return Ok(Verdict::Right);
    }
    complain(format_args!(
        "--fail-above {ratio}: {} slower or no longer measured",
        slower.len()
    ));
    Ok(Verdict::Wrong)
}

/// A, B, ... Z, A1, B1, ...
fn letter(number: usize) -> String {
    let letter = char::from(b'A' + (number % 26) as u8);
    match number / 26 {
        0 => letter.to_string(),
        more => format!("{letter}{more}"),
    }
}

fn about(run: &LabelledRun<'_>) -> String {
    let adapter = &run.run.adapter;
    let own = adapter.describe();
    let name = match run.label.contains(&own) {
        true => run.label.clone(),
        false => format!("{}: {own}", run.label),
    };
    format!(
        "{name}, driver {}, {}, version {}{}",
        adapter.describe_driver(),
        run.file.date,
        run.file.version,
        if run.file.complete {
            ""
        } else {
            ", not complete"
        }
    )
}

/// A cell for a change; the word stands where it can be seen.
fn told(change: &Change) -> String {
    format!("{:.3} {}", change.ratio, change.verdict)
}

fn broken(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Measured(_) => "",
        Outcome::Wrong { .. } => "WRONG",
        Outcome::Failed { .. } => "FAILED",
        Outcome::Refused { .. } => "does not fit",
    }
}

/// For people: a line a case, two columns a run.
fn table(comparison: &Comparison<'_>) -> Table {
    let count = comparison.runs.len();
    let mut headers: Vec<String> = vec!["case".into(), "A ms".into()];
    for number in 1..count {
        headers.push(format!("{} ms", letter(number)));
        headers.push(format!("{}/A", letter(number)));
        headers.push("noise".into());
    }
    let mut table = Table::named(headers, &[0]);
    for case in &comparison.cases {
        let ms = |number: usize, of: fn(&Change) -> f64| {
            // The first run's time by the clock of the first comparison, the others' by their own.
            let changes = case.changes.iter().flatten();
            let change = match number {
                0 => changes.into_iter().next(),
                _ => case.against_first(number),
            };
            match (change, case.found[number]) {
                (Some(change), _) => format!("{:.4}", of(change) * 1e3),
                (None, Some(found)) => match found.measured() {
                    Some(own) => format!("{:.4}", own.best().p10_s * 1e3),
                    None => broken(&found.outcome).into(),
                },
                (None, None) => "-".into(),
            }
        };
        let mut cells = vec![case.id.clone(), ms(0, |change| change.first_s)];
        for number in 1..count {
            cells.push(ms(number, |change| change.other_s));
            let change = case.against_first(number);
            cells.push(change.map_or("-".into(), told));
            let noise = change.map(|change| format!("{:.0}%", 100.0 * change.noise));
            cells.push(noise.unwrap_or("-".into()));
        }
        table.row(cells);
    }
    table
}

/// How many of what, for each run but the first.
fn summary(comparison: &Comparison<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    for number in 1..comparison.runs.len() {
        let changes = comparison.cases.iter();
        let changes: Vec<&Change> = changes.filter_map(|c| c.against_first(number)).collect();
        let count = |verdict| changes.iter().filter(|c| c.verdict == verdict).count();
        let logs: f64 = changes.iter().map(|change| change.ratio.ln()).sum();
        if changes.is_empty() {
            lines.push(format!(
                "{} against A: nothing was measured in both",
                letter(number)
            ));
            continue;
        }
        let mean = (logs / changes.len() as f64).exp();
        lines.push(format!(
            "{} against A: {} faster, {} slower, {} within noise; geometric mean of the ratios {mean:.3}",
            letter(number),
            count(Told::Faster),
            count(Told::Slower),
            count(Told::Noise),
        ));
    }
    if comparison.unmatched > 0 {
        lines.push(format!(
            "{} more are in one file alone or were not measured twice",
            comparison.unmatched
        ));
    }
    lines
}

/// A line for each case and run but the first.
fn flat(comparison: &Comparison<'_>) -> Table {
    let headers = [
        "case", "first", "other", "clock", "first_s", "other_s", "ratio", "noise", "verdict",
    ];
    let headers = headers.map(str::to_string).to_vec();
    let mut table = Table::named(headers, &[]);
    for case in &comparison.cases {
        for (number, run) in comparison.runs.iter().enumerate().skip(1) {
            let mut cells = vec![
                case.id.clone(),
                comparison.runs[0].label.clone(),
                run.label.clone(),
            ];
            match (case.against_first(number), case.found[number]) {
                (Some(change), _) => cells.extend([
                    format!("{:?}", change.clock).to_lowercase(),
                    change.first_s.to_string(),
                    change.other_s.to_string(),
                    change.ratio.to_string(),
                    change.noise.to_string(),
                    change.verdict.to_string(),
                ]),
                (None, found) => {
                    cells.extend(vec![String::new(); 5]);
                    cells.push(
                        match found.map(|own| broken(&own.outcome)) {
                            None => "missing",
                            Some("") => "not in the first",
                            Some(broken) => broken,
                        }
                        .into(),
                    );
                }
            }
            table.row(cells);
        }
    }
    table
}

fn as_json(comparison: &Comparison<'_>) -> Value {
    let runs = comparison.runs.iter().map(|run| {
        json!({
            "label": run.label,
            "adapter": run.run.adapter.describe(),
            "driver": run.run.adapter.describe_driver(),
            "date": run.file.date,
            "version": run.file.version,
            "complete": run.file.complete,
        })
    });
    let cases = comparison.cases.iter().map(|case| {
        let changes = case.changes.iter().map(|change| {
            change.map(|change| {
                json!({
                    "clock": format!("{:?}", change.clock).to_lowercase(),
                    "first_s": change.first_s,
                    "other_s": change.other_s,
                    "ratio": change.ratio,
                    "noise": change.noise,
                    "verdict": change.verdict.to_string(),
                })
            })
        });
        let found = case
            .found
            .iter()
            .map(|found| match found.map(|own| &own.outcome) {
                None => "missing",
                Some(Outcome::Measured(_)) => "measured",
                Some(Outcome::Wrong { .. }) => "wrong",
                Some(Outcome::Failed { .. }) => "failed",
                Some(Outcome::Refused { .. }) => "refused",
            });
        json!({
            "id": case.id,
            "found": found.collect::<Vec<_>>(),
            "changes": changes.collect::<Vec<_>>(),
        })
    });
    json!({
        "what": "wgpu-attention compare",
        "runs": runs.collect::<Vec<_>>(),
        "cases": cases.collect::<Vec<_>>(),
        "unmatched": comparison.unmatched,
    })
}
