//! `verify`: golden case files against what this machine computes.

use crate::{BackendOption, FormOption, Verdict, complain, open, say};
use clap::Args;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use wgpu_attention::case::check::{CaseReport, Engine, Selection, Status, check, checks_reference};
use wgpu_attention::case::{Case, Tolerances, find_cases};
use wgpu_attention::{Error, Result};

#[derive(Args)]
pub(crate) struct Options {
    /// Case files, or folders that are searched for them
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Which results to compare: names with commas between, `forward` (all but gradients), or `all`
    #[arg(long, default_value = "all", value_name = "NAMES")]
    outputs: String,
    /// Part of the adapter's name
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
    /// The form of the kernels
    #[arg(long, value_enum, default_value = "auto")]
    form: FormOption,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
    /// Run every case on the CPU reference instead of the kernels
    #[arg(long, conflicts_with_all = ["adapter", "backend", "form"])]
    reference: bool,
    /// What is unsupported is a failure
    #[arg(long)]
    strict: bool,
}

/// The kind of what is no case.
const UNREADABLE: &str = "unreadable";

/// What became of a file.
struct Entry {
    file: PathBuf,
    name: String,
    kind: String,
    /// `Err`: it could not be read or run.
    report: Result<CaseReport, Error>,
}

impl Entry {
    fn status(&self) -> Status {
        self.report
            .as_ref()
            .map_or(Status::Failed, |report| report.status)
    }

    fn reason(&self) -> Option<String> {
        match &self.report {
            Ok(report) => report.reason(),
            Err(error) => Some(error.to_string()),
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let selection = Selection::parse(&options.outputs)?;
    let files = find_cases(&options.paths)?;
    if files.is_empty() {
        return Err(Error::Parameter {
            parameter: "paths",
            value: format!("{:?}", options.paths),
            rule: "there must be at least one .safetensors file in it".into(),
        });
    }
    let mut tolerances = Tolerances::new();
    let mut engine = options.reference.then_some(Engine::Reference);
    let mut entries = Vec::new();
    let mut names = BTreeSet::new();
    for file in files {
        let case = match Case::load(&file) {
            Ok(case) => case,
            Err(error) => {
                let name = file
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned();
                entries.push(Entry {
                    file,
                    name,
                    kind: UNREADABLE.into(),
                    report: Err(error),
                });
                continue;
            }
        };
        names.extend(case.outputs.iter().map(|output| output.name.clone()));
        // Opened by the first case that needs it: files for the reference need no adapter.
        if engine.is_none() && !checks_reference(&case).unwrap_or(true) {
            engine = Some(Engine::Kernels {
                gpu: open(&options.adapter, options.backend)?,
                form: options.form.form(),
            });
        }
        let report = check(&case, &selection, &mut tolerances, engine.as_ref());
        entries.push(Entry {
            file,
            name: case.name,
            kind: case.kind,
            report,
        });
    }
    // A name that no case has is most likely mistyped.
    let mut unknown = false;
    if let Selection::Names(wanted) = &selection {
        for name in wanted.iter().filter(|name| !names.contains(*name)) {
            complain(format_args!("no case has a result named {name:?}"));
            unknown = true;
        }
    }

    let count = |status| {
        entries
            .iter()
            .filter(|entry| entry.status() == status)
            .count()
    };
    let adapter = match &engine {
        Some(Engine::Kernels { gpu, .. }) => Some(gpu.describe()),
        Some(Engine::Reference) | None => None,
    };
    if options.json {
        say(format_args!("{:#}", as_json(&entries, adapter)));
    } else {
        print(&entries, adapter, options.strict);
    }

    // A file that cannot be read is a fault of the request, a case that cannot run or is wrong is a failure.
    let unreadable: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.kind == UNREADABLE)
        .collect();
    for entry in &unreadable {
        complain(entry.reason().unwrap_or_default());
    }
    let wrong = count(Status::Failed) > unreadable.len()
        || options.strict && count(Status::Unsupported) > 0;
    let compared = entries.iter().any(|entry| {
        let outputs = entry.report.as_ref().map(|report| &report.outputs);
        outputs.is_ok_and(|outputs| outputs.iter().any(|output| output.comparison.is_some()))
    });
    if wrong {
        return Ok(Verdict::Wrong);
    }
    if !unreadable.is_empty() || unknown && options.strict {
        return Ok(Verdict::Unsound);
    }
    if !compared {
        complain("nothing was compared");
        return Ok(Verdict::Unsound);
    }
    Ok(Verdict::Right)
}

fn print(entries: &[Entry], adapter: Option<String>, strict: bool) {
    match adapter {
        Some(name) => say(format_args!("adapter: {name}")),
        None => say("adapter: none (these cases check the reference)"),
    }
    // Every case that failed; what is unsupported for the same reason together.
    let mut unsupported: BTreeMap<&str, (BTreeSet<&str>, BTreeSet<&PathBuf>)> = BTreeMap::new();
    for entry in entries {
        match entry.status() {
            Status::Failed => {
                say(format_args!(
                    "FAILED {} {} ({})",
                    entry.kind,
                    entry.name,
                    entry.file.display()
                ));
                let outputs = entry
                    .report
                    .as_ref()
                    .map(|report| &report.outputs[..])
                    .unwrap_or_default();
                for output in outputs
                    .iter()
                    .filter(|output| output.status == Status::Failed)
                {
                    if let Some((comparison, origin)) = &output.comparison {
                        say(format_args!(
                            "       {}: {comparison} ({origin} tolerance)",
                            output.name
                        ));
                    }
                }
                if let Err(error) = &entry.report {
                    say(format_args!("       {error}"));
                }
            }
            Status::Unsupported => {
                let outputs = entry
                    .report
                    .as_ref()
                    .map(|report| &report.outputs[..])
                    .unwrap_or_default();
                for output in outputs {
                    if let Some(reason) = &output.reason {
                        let (names, files) = unsupported.entry(reason).or_default();
                        names.insert(&output.name);
                        files.insert(&entry.file);
                    }
                }
            }
            Status::Passed | Status::NotChosen => {}
        }
    }
    for (reason, (names, files)) in &unsupported {
        let names: Vec<&str> = names.iter().copied().collect();
        say(format_args!(
            "unsupported: {reason} ({}; {} cases)",
            names.join(", "),
            files.len()
        ));
    }

    let kinds: BTreeSet<&str> = entries.iter().map(|entry| entry.kind.as_str()).collect();
    say(format_args!(
        "{:<16} {:>7} {:>7} {:>12} {:>11}  {:>11} {:>13}",
        "kind", "passed", "failed", "unsupported", "not chosen", "max error", "of tolerance"
    ));
    let total = entries.iter().collect::<Vec<_>>();
    let row = |name: &str, entries: &[&Entry]| {
        let count = |status| {
            entries
                .iter()
                .filter(|entry| entry.status() == status)
                .count()
        };
        let worst = |pick: fn(&CaseReport) -> Option<f64>| {
            let values = entries
                .iter()
                .filter_map(|entry| pick(entry.report.as_ref().ok()?));
            values.reduce(f64::max)
        };
        say(format_args!(
            "{name:<16} {:>7} {:>7} {:>12} {:>11}  {:>11} {:>13}",
            count(Status::Passed),
            count(Status::Failed),
            count(Status::Unsupported),
            count(Status::NotChosen),
            worst(CaseReport::max_error).map_or("-".into(), |error| format!("{error:.1e}")),
            worst(CaseReport::worst_ratio)
                .map_or("-".into(), |ratio| format!("{:.1} %", 100.0 * ratio)),
        ));
    };
    for kind in kinds {
        let of_kind: Vec<&Entry> = entries.iter().filter(|entry| entry.kind == kind).collect();
        row(kind, &of_kind);
    }
    row("all", &total);
    if strict && !unsupported.is_empty() {
        say("--strict: what is unsupported counts as a failure");
    }
}

fn as_json(entries: &[Entry], adapter: Option<String>) -> Value {
    let count = |status| {
        entries
            .iter()
            .filter(|entry| entry.status() == status)
            .count()
    };
    let cases: Vec<Value> = entries
        .iter()
        .map(|entry| {
            let report = entry.report.as_ref().ok();
            let outputs: BTreeMap<&str, &str> = report
                .map(|report| &report.outputs[..])
                .unwrap_or_default()
                .iter()
                .map(|output| (output.name.as_str(), output.status.name()))
                .collect();
            json!({
                "name": entry.name,
                "kind": entry.kind,
                "file": entry.file.display().to_string(),
                "status": entry.status().name(),
                "outputs": outputs,
                "kernel": report.map(|report| report.kernel.as_str()),
                // An infinite error has no number in JSON.
                "max_abs_err": report.and_then(CaseReport::max_error),
                "worst_ratio": report.and_then(CaseReport::worst_ratio),
                "reason": entry.reason(),
            })
        })
        .collect();
    json!({
        "adapter": adapter,
        "passed": count(Status::Passed),
        "failed": count(Status::Failed),
        "unsupported": count(Status::Unsupported),
        "not_chosen": count(Status::NotChosen),
        "cases": cases,
    })
}
