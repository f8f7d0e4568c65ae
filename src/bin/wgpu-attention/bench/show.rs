//! What was found as text: for the terminal, in markdown, as CSV.

use crate::table::{Table, escaped_markdown};
use std::fmt::Write;
use wgpu_attention::results::{
    CaseResult, MeasuredCase, MeasuredPeaks, Outcome, ResultFile, Run, visible,
};

/// A run for the terminal: the adapter, its peaks, its cases.
pub(super) fn run(file: &ResultFile, number: usize) -> String {
    let Some(run) = file.runs.get(number) else {
        return String::new();
    };
    let mut text = String::new();
    for line in about(run) {
        let _ = writeln!(text, "{}", visible(&line));
    }
    let _ = writeln!(text, "\n{}", table(run).terminal());
    for line in remarks(run) {
        let _ = writeln!(text, "{}", visible(&line));
    }
    text
}

/// The whole file in markdown.
pub(super) fn markdown(file: &ResultFile) -> String {
    let mut text = String::new();
    for run in &file.runs {
        let _ = writeln!(text, "## {}\n", escaped_markdown(&run.adapter.describe()));
        for line in about(run).iter().chain(&remarks(run)) {
            let _ = writeln!(text, "- {}", escaped_markdown(&words(line)));
        }
        let _ = writeln!(text, "\n{}", table(run).markdown());
    }
    let _ = writeln!(
        text,
        "wgpu-attention {}, {}, {} {}{}",
        escaped_markdown(&file.version),
        escaped_markdown(&file.date),
        file.system.os,
        escaped_markdown(&file.system.architecture),
        if file.complete { "" } else { ", not complete" }
    );
    text
}

/// With one space between words.
fn words(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The adapter and its peaks.
fn about(run: &Run) -> Vec<String> {
    let mut lines = vec![format!(
        "adapter     {}, driver {}",
        run.adapter.describe(),
        run.adapter.describe_driver()
    )];
    if run.adapter.is_software() && !run.left_out.is_empty() {
        lines.push(format!(
            "            a CPU underneath: {} of GPU size left out",
            cases_in_words(run.left_out.len())
        ));
    }
    if !run.adapter.tiers.is_empty() {
        lines.push(format!("tiers       {}", run.adapter.tiers.join(", ")));
    }
    if let Some(known) = run.tuned_problems {
        lines.push(format!("tuning      {known} problems of this adapter"));
    }
    let peaks = &run.peaks;
    let mut before = "peaks       ";
    for (bound, unit) in PEAKS {
        if let Some(rate) = peaks.rate(bound) {
            let form = best_form(peaks, bound).unwrap_or_default();
            lines.push(format!(
                "{before}{bound} {:.1} {unit} by {form}",
                rate / 1e9
            ));
            before = "            ";
        }
    }
    lines.push(format!(
        "            a dispatch that does nothing {:.1} microseconds, a submission {:.1}",
        peaks.dispatch_s * 1e6,
        peaks.submission_s * 1e6
    ));
    lines
}

/// The peaks and their units.
const PEAKS: [(&str, &str); 4] = [
    ("f32", "GFLOP/s"),
    ("f16", "GFLOP/s"),
    ("matrices", "GFLOP/s"),
    ("memory", "GB/s"),
];

fn best_form<'a>(peaks: &'a MeasuredPeaks, bound: &str) -> Option<&'a str> {
    let forms = peaks.forms.iter().filter(|form| form.bound == bound);
    let best = forms.max_by(|a, b| a.rate_per_second.total_cmp(&b.rate_per_second));
    best.map(|form| form.form.as_str())
}

/// What a reader should know of the figures.
fn remarks(run: &Run) -> Vec<String> {
    let mut lines = Vec::new();
    let mut changes = Vec::new();
    for (bound, _) in PEAKS {
        let before = run.peaks.rate(bound);
        let after = run.peaks.after.iter().rfind(|form| form.bound == bound);
        if let (Some(before), Some(after)) = (before, after) {
            let change = 100.0 * (after.rate_per_second / before - 1.0);
            changes.push(format!("{bound} {change:+.0} %"));
        }
    }
    if !changes.is_empty() {
        let changes = changes.join(", ");
        lines.push(format!("peaks after the cases against before: {changes}"));
    }
    let mut reasons: Vec<&str> = Vec::new();
    for measured in run.cases.iter().filter_map(CaseResult::measured) {
        if let Some(reason) = &measured.no_gpu_time
            && !reasons.contains(&reason.as_str())
        {
            reasons.push(reason);
        }
    }
    for reason in reasons {
        lines.push(format!("wall time where there is no GPU time: {reason}"));
    }
    lines
}

fn cases_in_words(count: usize) -> String {
    format!("{count} case{}", if count == 1 { "" } else { "s" })
}

/// The cases of a run in units for people.
fn table(run: &Run) -> Table {
    let headers = [
        "case", "GPU ms", "wall ms", "spread", "rate", "share", "error", "kernels",
    ];
    let mut table = Table::new(&headers, &[0, 7]);
    for case in &run.cases {
        let mut cells = vec![case.id()];
        match (&case.outcome, case.measured()) {
            (_, Some(measured)) => {
                let ms = |seconds: f64| format!("{:.4}", seconds * 1e3);
                let gpu = measured.gpu.as_ref().map(|gpu| ms(gpu.median_s));
                let best = measured.best();
                let samples: usize = best.rounds_s.iter().map(Vec::len).sum();
                let spread = match samples {
                    1 => "-".into(),
                    _ => format!("{:.1}%", 100.0 * best.relative_spread()),
                };
                let rate = match measured.bound.as_deref() {
                    Some("memory") => format!("{:.1} GB/s", measured.bytes_per_second / 1e9),
                    _ => format!("{:.1} GFLOP/s", measured.flops_per_second / 1e9),
                };
                let share = match (&measured.bound, measured.share_of_peak) {
                    (Some(bound), Some(share)) => format!("{:.0}% {bound}", 100.0 * share),
                    _ => "-".into(),
                };
                cells.extend([
                    gpu.unwrap_or("-".into()),
                    ms(measured.wall.median_s),
                    spread,
                    rate,
                    share,
                    format!("{:.1e}", measured.max_error),
                    measured.kernels.join(" + "),
                ]);
            }
            (Outcome::Wrong { kernels, reason }, _) => {
                cells.extend(vec![String::new(); 6]);
                cells.push(format!(
                    "WRONG, not timed ({}): {reason}",
                    kernels.join(" + ")
                ));
            }
            (Outcome::Refused { reason }, _) => {
                cells.extend(vec![String::new(); 6]);
                cells.push(format!("does not fit: {reason}"));
            }
            (Outcome::Failed { reason }, _) => {
                cells.extend(vec![String::new(); 6]);
                cells.push(format!("FAILED: {reason}"));
            }
            (Outcome::Measured(_), None) => {}
        }
        table.row(cells);
    }
    table
}

/// The cases of all runs in seconds and units without a prefix: CSV.
pub(super) fn cases(file: &ResultFile) -> Table {
    let headers = [
        "date",
        "version",
        "adapter",
        "backend",
        "driver",
        "driver_info",
        "name",
        "variant",
        "kind",
        "type",
        "status",
        "reason",
        "kernels",
        "tier",
        "clock",
        "median_s",
        "p10_s",
        "p90_s",
        "wall_median_s",
        "gpu_median_s",
        "samples",
        "flops",
        "bytes",
        "flops_per_second",
        "bytes_per_second",
        "bound",
        "share_of_peak",
        "max_error",
    ];
    let mut table = Table::new(&headers, &[]);
    for run in &file.runs {
        for case in &run.cases {
            let (status, reason) = match &case.outcome {
                Outcome::Measured(_) => ("measured", String::new()),
                Outcome::Wrong { reason, .. } => ("wrong", reason.clone()),
                Outcome::Failed { reason } => ("failed", reason.clone()),
                Outcome::Refused { reason } => ("refused", reason.clone()),
            };
            let adapter = &run.adapter;
            let mut cells = vec![
                file.date.clone(),
                file.version.clone(),
                adapter.name.clone(),
                adapter.backend.clone(),
                adapter.driver.clone(),
                adapter.driver_info.clone(),
                case.name.clone(),
                case.variant.clone().unwrap_or_default(),
                case.kind.clone(),
                case.element.clone(),
                status.into(),
                reason,
            ];
            let measured = case.measured();
            let text = |of: &dyn Fn(&MeasuredCase) -> String| measured.map(of).unwrap_or_default();
            let number = |value: f64| value.to_string();
            cells.extend([
                text(&|own| own.kernels.join("+")),
                text(&|own| own.tier.clone()),
                text(&|own| format!("{:?}", own.clock).to_lowercase()),
                text(&|own| number(own.best().median_s)),
                text(&|own| number(own.best().p10_s)),
                text(&|own| number(own.best().p90_s)),
                text(&|own| number(own.wall.median_s)),
                text(&|own| {
                    own.gpu
                        .as_ref()
                        .map(|gpu| number(gpu.median_s))
                        .unwrap_or_default()
                }),
                text(&|own| own.best().rounds_s.concat().len().to_string()),
                case.flops.to_string(),
                case.bytes.to_string(),
                text(&|own| number(own.flops_per_second)),
                text(&|own| number(own.bytes_per_second)),
                text(&|own| own.bound.clone().unwrap_or_default()),
                text(&|own| own.share_of_peak.map(number).unwrap_or_default()),
                text(&|own| number(own.max_error)),
            ]);
            table.row(cells);
        }
    }
    table
}
