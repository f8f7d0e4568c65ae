//! A report: one HTML page of one or more runs, with its charts inside and nothing outside.
//!
//! - `data.rs`: what of the runs goes into which chart.
//! - `charts.rs`: charts as SVG, in a wide and a narrow form; `axis.rs`: where their marks are.
//! - `words.rs`: figures, and other people's names made harmless.
//! - `chart.css`: the colours, light and dark, of page and charts; `page.css`: the page.

mod axis;
mod charts;
mod data;
#[cfg(test)]
mod samples;
mod words;

pub use words::visible;

use crate::results::{CaseResult, Clock, LabelledRun, MeasuredCase, Outcome, Run};
use charts::{MOST_BARS, Picture, Roof, SeriesWords, Svg};
use data::{KINDS, kind_number};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::collections::BTreeSet;
use words::{count, milliseconds, number, percent, plain};

const CHART_CSS: &str = include_str!("chart.css");
const PAGE_CSS: &str = include_str!("page.css");

/// Charts of one section at most: what a file with thousands of families would make is no help to anybody.
const MOST_CHARTS: usize = 12;
/// Names in a sentence at most.
const MOST_NAMES: usize = 40;
/// From so many runs on rooflines are shown small, side by side.
const SIDE_BY_SIDE: usize = 4;

/// One HTML page of these runs: tables, and charts as SVG inside. It needs no network and runs no script; names of adapters, drivers and
/// cases are escaped, and follow the reader's light or dark scheme as the rest does.
///
/// ```
/// use wgpu_attention::results::report;
///
/// let page = report(&[]);
/// assert!(page.starts_with("<!DOCTYPE html>") && page.contains("no run"));
/// ```
pub fn report(runs: &[LabelledRun]) -> String {
    let charts = Charts::of(runs);
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                // Whatever is in the names: nothing is loaded and nothing runs.
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'";
                title { "wgpu-attention: benchmark report" }
                style { (PreEscaped(CHART_CSS)) (PreEscaped(PAGE_CSS)) }
            }
            body {
                main {
                    (header(runs))
                    @if !runs.is_empty() {
                        (adapters(runs))
                        (rooflines(runs, &charts))
                        (attention(&charts))
                        (decode(&charts))
                        (comparison(runs, &charts))
                        (cases(runs))
                    }
                    (how(runs))
                }
            }
        }
    };
    page.into_string()
}

/// The report's charts as SVG files of their own, each with its name (without `.svg`), in the wide form.
pub fn report_charts(runs: &[LabelledRun]) -> Vec<(String, String)> {
    let charts = Charts::of(runs);
    let pictures = charts
        .rooflines
        .iter()
        .chain(&charts.attention.pictures)
        .chain(&charts.decode.pictures)
        .chain(charts.bars.iter().map(|bars| &bars.picture));
    pictures
        .map(|picture| {
            let Svg {
                width,
                height,
                inner,
            } = &picture.wide;
            let view = format!("0 0 {width} {height}");
            let svg = html! {
                svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label=(picture.description) width=(width) height=(height)
                    viewBox=(view) {
                    style { (PreEscaped(CHART_CSS)) }
                    (PreEscaped(inner))
                }
            };
            (picture.name.clone(), svg.into_string())
        })
        .collect()
}

// ---------------------------------------------------------------- the charts

/// Charts of series over a size, and what is in none.
struct Sized {
    pictures: Vec<Picture>,
    /// As many as there would be.
    of: usize,
    /// Measured cases that have no other size beside them.
    left_out: Vec<String>,
}

/// A chart of bars, and of how many cases.
struct Bars {
    picture: Picture,
    kind: &'static str,
    cases: usize,
}

struct Charts {
    rooflines: Vec<Picture>,
    attention: Sized,
    decode: Sized,
    bars: Vec<Bars>,
    /// With one run: measured cases that have no share.
    without_share: Vec<String>,
}

/// A kind's name, as charts have it.
fn kind_name(number: usize) -> &'static str {
    KINDS.get(number).copied().unwrap_or("other")
}

impl Charts {
    fn of(runs: &[LabelledRun]) -> Self {
        let labels: Vec<String> = runs.iter().map(|run| plain(&run.label)).collect();
        let own: Vec<Roof> = runs.iter().map(|run| Roof::of(run.run)).collect();
        let common = Roof::common(&own);
        let rooflines = runs.iter().zip(&own).zip(&labels).enumerate();
        let rooflines = rooflines.map(|(at, ((run, own), label))| {
            charts::roofline(at + 1, label, run.run, common.unwrap_or(*own))
        });
        let sized = |picked: data::Picked, words: &dyn Fn(String) -> SeriesWords<'static>, log| {
            let of = picked.panels.len();
            let panels = picked.panels.iter().take(MOST_CHARTS).enumerate();
            let pictures = panels.map(|(at, panel)| {
                charts::series(&words((at + 1).to_string()), panel, &labels, log)
            });
            Sized {
                pictures: pictures.collect(),
                of,
                left_out: picked.left_out,
            }
        };
        let attention = |at| SeriesWords {
            name: format!("attention-{at}"),
            title: "Attention",
            x_title: "T, queries and keys (log scale)",
            y_title: "GFLOP/s",
            kind: "attention",
        };
        let decode = |at| SeriesWords {
            name: format!("decode-{at}"),
            title: "Decoding: one query",
            x_title: "Tk, keys (log scale)",
            y_title: "time of a call, ms",
            kind: "decode",
        };
        let mut bars = Vec::new();
        let mut without_share = Vec::new();
        let mut add = |number: usize, cases: usize, picture: &dyn Fn(&str) -> Picture| {
            if cases > 0 {
                bars.push(Bars {
                    picture: picture(kind_name(number)),
                    kind: kind_name(number),
                    cases,
                });
            }
        };
        if let [run] = runs {
            let (shares, without) = data::shares(run.run);
            without_share = without;
            for number in 0..=KINDS.len() {
                let of_kind = shares.iter().filter(|own| kind_number(own.kind) == number);
                let of_kind: Vec<_> = of_kind.collect();
                add(number, of_kind.len(), &|kind| {
                    charts::shares(kind, &of_kind)
                });
            }
        } else {
            let common = data::common(runs);
            for number in 0..=KINDS.len() {
                let of_kind = common.iter().filter(|own| kind_number(own.kind) == number);
                let of_kind: Vec<_> = of_kind.collect();
                add(number, of_kind.len(), &|kind| {
                    charts::speeds(kind, &of_kind, &labels)
                });
            }
        }
        Charts {
            rooflines: rooflines.collect(),
            attention: sized(data::attention(runs), &attention, false),
            decode: sized(data::decode(runs), &decode, true),
            bars,
            without_share,
        }
    }
}

/// Both forms of a chart, of which the style sheet shows one.
fn figure(picture: &Picture, caption: Markup) -> Markup {
    let svg = |class: &str, svg: &Svg| {
        let view = format!("0 0 {} {}", svg.width, svg.height);
        html! {
            svg class=(class) role="img" aria-label=(picture.description) viewBox=(view) width=(svg.width) height=(svg.height) {
                (PreEscaped(&svg.inner))
            }
        }
    };
    html! {
        figure {
            (svg("wide", &picture.wide))
            (svg("narrow", &picture.narrow))
            figcaption { (caption) }
        }
    }
}

// ---------------------------------------------------------------- sections

/// Different ones, in the order in which they come.
fn distinct<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut known = BTreeSet::new();
    let new = words.filter(|words| known.insert(*words));
    new.map(plain).collect()
}

fn header(runs: &[LabelledRun]) -> Markup {
    let of = |words: fn(&LabelledRun<'_>) -> String| {
        let words: Vec<String> = runs.iter().map(words).collect();
        distinct(words.iter().map(String::as_str))
    };
    let adapters = of(|run| {
        let adapter = &run.run.adapter;
        format!("{} {}", adapter.describe(), adapter.describe_driver())
    });
    let dates = of(|run| run.file.date.chars().take(10).collect());
    let versions = of(|run| run.file.version.clone());
    let kernels = of(|run| run.file.kernels.clone());
    let measured: usize = runs.iter().map(|run| data::measured(run.run).count()).sum();
    let unfinished = runs.iter().filter(|run| !run.file.complete).count();
    let dates = match dates.as_slice() {
        [] => String::new(),
        [date] => date.clone(),
        several => {
            let first = several.iter().min().cloned().unwrap_or_default();
            let last = several.iter().max().cloned().unwrap_or_default();
            format!("{first} to {last}")
        }
    };
    html! {
        header {
            h1 { "wgpu-attention: benchmark report" }
            @if runs.is_empty() {
                p { "There is no run in these files: nothing has been measured yet." }
            } @else {
                p class="lead" {
                    (count(adapters.len(), "adapter", "adapters")) ", "
                    (count(runs.len(), "run", "runs")) ", "
                    (count(measured, "measured case", "measured cases")) " · "
                    (dates) " · wgpu-attention "
                    bdi { (versions.join(", ")) }
                }
            }
            @if unfinished > 0 {
                p class="note" {
                    strong { "Unfinished: " }
                    (count(unfinished, "run was", "runs were"))
                    " interrupted. What had been measured by then is shown."
                }
            }
            @if kernels.len() > 1 {
                p class="note" {
                    strong { "Different kernels: " }
                    "these runs are of " (kernels.len()) " states of the kernels, so that times differ for that reason too."
                }
            }
        }
    }
}

/// A run's number in its colour, as charts have it.
fn badge(at: usize) -> Markup {
    html! { span class={ "badge c" (at % 8 + 1) } { (at + 1) } }
}

/// A table that scrolls by itself.
fn scrolling(label: &str, table: Markup) -> Markup {
    html! { div class="scroll" role="region" aria-label=(label) tabindex="0" { (table) } }
}

fn adapters(runs: &[LabelledRun]) -> Markup {
    let gflops = |rate: Option<f64>| rate.map_or("–".into(), |rate| number(rate / 1e9));
    let microseconds = |seconds: f64| number((seconds * 1e6).min(f64::MAX));
    html! {
        section {
            h2 { "Adapters" }
            p {
                "Peaks are what small kernels that do nothing else reached on the adapter in the same run, not what a data sheet says. "
                "The numbers in front stand for the runs in all charts."
            }
            (scrolling("Adapters", html! {
                table {
                    thead {
                        tr {
                            th { "run" } th { "adapter" } th { "driver" }
                            th class="right" { "f32" br; "GFLOP/s" } th class="right" { "f16" br; "GFLOP/s" }
                            th class="right" { "matrices" br; "GFLOP/s" } th class="right" { "memory" br; "GB/s" }
                            th class="right" { "a dispatch" br; "µs" } th class="right" { "a submission" br; "µs" }
                            th { "peaks after the cases" br; "against before" }
                            th { "complete" } th { "type" } th { "system" } th { "date (UTC)" } th { "version" } th { "kernels" }
                        }
                    }
                    tbody {
                        @for (at, run) in runs.iter().enumerate() {
                            @let adapter = &run.run.adapter;
                            @let peaks = &run.run.peaks;
                            tr {
                                td { (badge(at)) }
                                th class="name" scope="row" {
                                    bdi { (plain(&adapter.name)) }
                                    span class="small" { bdi { (plain(&adapter.backend)) } }
                                    @if plain(&run.label) != plain(&adapter.describe()) {
                                        span class="small" { "as " bdi { (plain(&run.label)) } }
                                    }
                                }
                                td class="name" { bdi { (plain(&adapter.describe_driver())) } }
                                td class="right" { (gflops(Some(peaks.f32_flops_per_second))) }
                                td class="right" { (gflops(peaks.f16_flops_per_second)) }
                                td class="right" { (gflops(peaks.matrix_flops_per_second)) }
                                td class="right" { (gflops(Some(peaks.bytes_per_second))) }
                                td class="right" { (microseconds(peaks.dispatch_s)) }
                                td class="right" { (microseconds(peaks.submission_s)) }
                                td class="name" { (after(run.run)) }
                                td { @if run.file.complete { "yes" } @else { strong class="bad" { "no" } } }
                                td {
                                    bdi { (plain(&adapter.device_type)) }
                                    @if adapter.is_software() { span class="small" { "a CPU underneath" } }
                                }
                                td { bdi { (plain(&run.file.system.os)) " " (plain(&run.file.system.architecture)) } }
                                td { bdi { (plain(&run.file.date)) } }
                                td { bdi { (plain(&run.file.version)) } }
                                td class="code" { bdi { (plain(&run.file.kernels)) } }
                            }
                        }
                    }
                }
            }))
        }
    }
}

/// By how much the peaks had changed when the cases were done.
fn after(run: &Run) -> String {
    // (There is one of each after each round: the last.)
    let forms = &run.peaks.after;
    let last = forms.iter().enumerate().filter(|(at, form)| {
        let later = &forms[at + 1..];
        !later.iter().any(|other| other.bound == form.bound)
    });
    let changes = last.filter_map(|(_, after)| {
        let before = run.peaks.rate(&after.bound)?;
        let change = (after.rate_per_second / before - 1.0) * 100.0;
        let change = match change.abs() < 1e4 {
            true => format!("{change:+.1} %"),
            false => format!("× {}", number(after.rate_per_second / before)),
        };
        Some(format!("{} {change}", plain(&after.bound)))
    });
    let changes: Vec<String> = changes.collect();
    match changes.is_empty() {
        true => "–".into(),
        false => changes.join(", "),
    }
}

fn rooflines(runs: &[LabelledRun], charts: &Charts) -> Markup {
    let small = runs.len() >= SIDE_BY_SIDE;
    html! {
        section {
            h2 { "Roofline" }
            p {
                "How many operations a case asks for each byte that it has to move at least, and how many it does a second. The slanted line is what "
                "the memory allows, the level ones what the arithmetic of a kind allows. A mark near a line is near what the adapter can do; "
                "one above it lies in a cache, or uses faster arithmetic."
                @if runs.len() > 1 { " Equal axes in all charts, unless the runs are too far apart." }
            }
            div class=(if small { "small-charts" } else { "charts" }) {
                @for (run, picture) in runs.iter().zip(&charts.rooflines) {
                    @let without = data::measured(run.run).count() == 0;
                    (figure(picture, html! {
                        @if without { "No case was measured: these are the peaks alone." }
                        @else { "One mark for each measured case." }
                    }))
                }
            }
        }
    }
}

/// A list of names, not too long.
fn names(names: &[String]) -> Markup {
    let shown = &names[..names.len().min(MOST_NAMES)];
    html! {
        @for (at, name) in shown.iter().enumerate() {
            @if at > 0 { ", " }
            code { bdi { (plain(name)) } }
        }
        @if names.len() > shown.len() { " and " (names.len() - shown.len()) " more" }
    }
}

/// What a section of series shows not.
fn not_shown(sized: &Sized, size: &str) -> Markup {
    html! {
        @if sized.of > sized.pictures.len() {
            p { "The first " (sized.pictures.len()) " of " (sized.of) " charts are drawn; the table has every case." }
        }
        @if !sized.left_out.is_empty() {
            details {
                summary {
                    (count(sized.left_out.len(), "case is", "cases are"))
                    " left out here, since no other " (size) " was measured beside " (if sized.left_out.len() == 1 { "it" } else { "them" })
                }
                p { (names(&sized.left_out)) }
            }
        }
    }
}

fn attention(charts: &Charts) -> Markup {
    let sized = &charts.attention;
    html! {
        section {
            h2 { "Attention by length" }
            @if sized.pictures.is_empty() {
                p { "No kind of attention was measured at two lengths or more, so that there is no line to draw." }
            } @else {
                p {
                    "A line for each run, shape of heads and kernel that was asked for. Behind its name are the kernels that ran: the planner may take "
                    "another one at another length."
                }
            }
            div class="charts" {
                @for picture in &sized.pictures {
                    (figure(picture, html! { "Useful operations a second; higher is better. Pairs that a causal mask hides are not counted." }))
                }
            }
            (not_shown(sized, "length"))
        }
    }
}

fn decode(charts: &Charts) -> Markup {
    let sized = &charts.decode;
    html! {
        section {
            h2 { "Decoding by keys" }
            @if sized.pictures.is_empty() {
                p { "Decoding was not measured with two numbers of keys or more." }
            }
            div class="charts" {
                @for picture in &sized.pictures {
                    (figure(picture, html! { "Time of one call, one new query against all keys so far; lower is better." }))
                }
            }
            (not_shown(sized, "number of keys"))
        }
    }
}

fn comparison(runs: &[LabelledRun], charts: &Charts) -> Markup {
    let single = runs.len() == 1;
    html! {
        section {
            h2 { @if single { "Share of the peak by case" } @else { "Across runs" } }
            @if charts.bars.is_empty() {
                p {
                    @if single { "No case has a share of a peak." }
                    @else { "No case was measured in two runs or more, so that there is nothing to compare." }
                }
            } @else {
                p {
                    @if single {
                        "Of the time that a case took, how much the peak that binds it would have needed."
                    } @else {
                        "The cases that two runs or more have. The longest bar of a case is its fastest run; the times stand behind the bars: "
                        "the GPU's where all of these runs have them, else the wall's."
                    }
                }
            }
            div class="charts" {
                @for bars in &charts.bars {
                    (figure(&bars.picture, html! {
                        (count(bars.cases.min(MOST_BARS), "case", "cases")) " of kind " (bars.kind)
                        @if bars.cases > MOST_BARS { ", the first of " (bars.cases) "; the table has all" }
                        "."
                    }))
                }
            }
            @if !charts.without_share.is_empty() {
                p { "Without a share: " (names(&charts.without_share)) "." }
            }
        }
    }
}

fn cases(runs: &[LabelledRun]) -> Markup {
    html! {
        section {
            h2 { "All cases" }
            @for (at, run) in runs.iter().enumerate() {
                @let label = plain(&run.label);
                details open[runs.len() == 1] {
                    summary {
                        (badge(at)) " " bdi { (label) } ": " (outcomes(run.run))
                    }
                    @if !run.file.complete {
                        p class="note" { "Its file is not complete (interrupted, or an adapter was given up): cases or rounds may be missing." }
                    }
                    @if run.run.cases.is_empty() {
                        p { "No case." }
                    } @else {
                        (scrolling(&format!("Cases of {label}"), html! {
                            table {
                                thead {
                                    tr {
                                        th { "case" } th class="right" { "time" } th class="right" { "spread" } th class="right" { "rate" }
                                        th class="right" { "share" } th { "of" } th { "kernels" } th { "clock" }
                                        th class="right" { "largest" br; "error" }
                                    }
                                }
                                tbody { @for case in &run.run.cases { (row(case)) } }
                            }
                        }))
                    }
                    @if !run.run.left_out.is_empty() {
                        p { "Left out, since they are for GPUs alone: " (names(&run.run.left_out)) "." }
                    }
                    (clocks(run.run))
                }
            }
        }
    }
}

/// How many cases ended how.
fn outcomes(run: &Run) -> String {
    let mut counts = [0; 4];
    for case in &run.cases {
        counts[match case.outcome {
            Outcome::Measured(_) => 0,
            Outcome::Wrong { .. } => 1,
            Outcome::Failed { .. } => 2,
            Outcome::Refused { .. } => 3,
        }] += 1;
    }
    let words = ["measured", "wrong", "failed", "do not fit"];
    let said = counts
        .iter()
        .zip(words)
        .filter(|(count, words)| **count > 0 || *words == "measured");
    let said: Vec<String> = said
        .map(|(count, words)| format!("{count} {words}"))
        .collect();
    said.join(", ")
}

/// Why wall time was taken where it was.
fn clocks(run: &Run) -> Markup {
    let reasons = data::measured(run).filter(|(_, measured)| measured.clock == Clock::Wall);
    let reasons =
        reasons.map(|(_, measured)| measured.no_gpu_time.as_deref().unwrap_or("not said"));
    let reasons = distinct(reasons);
    html! {
        @if !reasons.is_empty() {
            p {
                "Wall time where there is no GPU time: "
                @for (at, reason) in reasons.iter().take(5).enumerate() { @if at > 0 { "; " } bdi { (reason) } }
                "."
            }
        }
    }
}

fn row(case: &CaseResult) -> Markup {
    let name = html! { th class="code" scope="row" { bdi { (plain(&case.id())) } } };
    let unmeasured = |word: &str, reason: &str| {
        html! {
            tr class="unmeasured" {
                (name)
                td colspan="8" { strong class="bad" { (word) } ": " bdi { (plain(reason)) } }
            }
        }
    };
    match &case.outcome {
        Outcome::Measured(measured) => html! { tr { (name) (figures(measured)) } },
        Outcome::Wrong { kernels, reason } => {
            let by = if kernels.is_empty() {
                String::new()
            } else {
                format!(" ({})", kernels.join(" + "))
            };
            unmeasured("WRONG, not timed", &format!("{reason}{by}"))
        }
        Outcome::Failed { reason } => unmeasured("failed", reason),
        Outcome::Refused { reason } => unmeasured("does not fit this adapter", reason),
    }
}

fn figures(measured: &MeasuredCase) -> Markup {
    let times = measured.best();
    let rate = match measured.bound.as_deref() {
        Some("memory") => format!("{} GB/s", number(measured.bytes_per_second / 1e9)),
        _ => format!("{} GFLOP/s", number(measured.flops_per_second / 1e9)),
    };
    let tier = match measured.tier.as_str() {
        "plain" | "" => String::new(),
        tier => format!(" ({})", plain(tier)),
    };
    html! {
        td class="right" { (milliseconds(times.median_s)) }
        td class="right" { (percent(times.relative_spread())) }
        td class="right" { (rate) }
        td class="right" { (measured.share_of_peak.map_or("–".into(), percent)) }
        td { bdi { (plain(measured.bound.as_deref().unwrap_or("–"))) } }
        td class="code" { bdi { (plain(&measured.kernels.join(" + "))) (tier) } }
        td { (match measured.clock { Clock::Gpu => "GPU", Clock::Wall => "wall" }) }
        td class="right" { (format!("{:.1e}", measured.max_error)) }
    }
}

fn how(runs: &[LabelledRun]) -> Markup {
    let settings = |words: fn(&LabelledRun<'_>) -> String| {
        let words: Vec<String> = runs.iter().map(words).collect();
        distinct(words.iter().map(String::as_str)).join(", ")
    };
    let rounds = settings(|run| run.file.settings.rounds.to_string());
    let samples = settings(|run| run.file.settings.samples.to_string());
    html! {
        section {
            h2 { "How it was measured" }
            ul {
                li {
                    strong { "Right first. " }
                    "A case runs on an output full of NaN and is held against an f64 reference: all of a small result, rows of a large one. One that is "
                    "wrong is not timed."
                }
                li {
                    strong { "Clocks. " }
                    "GPU time is the sum of a call's passes by the adapter's own clock; wall time is encoding, submitting and waiting, divided by the calls "
                    "of a submission. GPU time counts where it can be believed, else wall time; the table says which."
                }
                li {
                    strong { "Warm-up and rounds. " }
                    "Warm-up ends when two samples agree, or after a time. Then each clock's samples are taken in turn"
                    @if !runs.is_empty() { ", at most " (samples) " a case and round, in " (rounds) " rounds over all cases" }
                    ". The time is the median of all samples. The spread is from the fastest tenth to the slowest, as a share of the median: differences "
                    "below it are noise."
                }
                li {
                    strong { "Work. " }
                    "A multiply-add is two operations; pairs that a causal mask hides are none, so that causal work is counted once. Bytes are every operand "
                    "read once and the result written once. Operands of decoding are taken in turn, so that a cache does not flatter."
                }
                li {
                    strong { "Peaks and shares. " }
                    "Peaks are measured in the same run, by kernels that only multiply and add, or only copy; the best form counts. The share is that of the "
                    "peak that allows a case the least, and no better than the peaks' own change over the run."
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::samples::{labels, of_runs};
    use super::*;
    use crate::results::ResultFile;

    fn page(files: &[(String, ResultFile)]) -> String {
        report(&labels(files))
    }

    /// The measured case at this place of the first run.
    fn measured(file: &mut ResultFile, at: usize) -> &mut MeasuredCase {
        match &mut file.runs[0].cases[at].outcome {
            Outcome::Measured(measured) => measured,
            other => panic!("not measured: {other:?}"),
        }
    }

    #[test]
    fn a_page_has_what_the_runs_have() {
        let files = of_runs(3);
        let page = page(&files);
        for word in [
            "Adapter 0",
            "Adapter 2 (vulkan)",
            "3 adapters, 3 runs, 21 measured cases",
            "WRONG, not timed",
            "row 3 is off by 1.5 &lt;b&gt;",
            "does not fit this adapter",
            "needs more memory",
            "attention-causal-t16384-h12-d64-f32",
            "1 case is left out here",
            "Across runs",
        ] {
            assert!(page.contains(word), "{word}");
        }
        assert!(!page.contains("Unfinished"));
        // One chart a run, one of lengths, one of keys, and one for each of three kinds: in two widths.
        assert_eq!(page.matches("<svg").count(), 2 * (3 + 1 + 1 + 3));
        let names: Vec<String> = report_charts(&labels(&files))
            .into_iter()
            .map(|c| c.0)
            .collect();
        assert_eq!(
            names,
            [
                "roofline-1",
                "roofline-2",
                "roofline-3",
                "attention-1",
                "decode-1",
                "speed-attention",
                "speed-decode",
                "speed-linear"
            ]
        );
    }

    #[test]
    fn empty_runs_give_a_page() {
        let nothing = of_runs(0);
        assert!(page(&nothing).contains("no run"));
        for number in [1, 2] {
            let mut files = of_runs(number);
            for (_, file) in &mut files {
                file.complete = false;
                file.runs[0].cases.clear();
                file.runs[0].left_out.clear();
            }
            let page = page(&files);
            assert!(page.contains("Unfinished"));
            assert!(page.contains("No case was measured"));
        }
        // Several runs of one file.
        let mut files = of_runs(1);
        let run = files[0].1.runs[0].clone();
        files[0].1.runs.push(run);
        assert!(page(&files).contains("2 runs"));
    }

    #[test]
    fn hostile_names_are_words() {
        let mut files = of_runs(2);
        let hostile =
            "</text></svg><script>alert(1)</script>\" onload='x' &amp; \u{202e}\u{0}\u{1b}";
        for (_, file) in &mut files {
            file.version = hostile.into();
            file.kernels = hostile.into();
            let run = &mut file.runs[0];
            run.adapter.name = hostile.repeat(30);
            run.adapter.driver = hostile.into();
            run.left_out.push(hostile.into());
            for case in &mut run.cases {
                case.name = format!("{hostile}{}", case.name);
                case.kind = format!(
                    "{}{}",
                    case.kind,
                    if case.kind == "linear" { hostile } else { "" }
                );
            }
        }
        measured(&mut files[0].1, 0).kernels = vec![hostile.into()];
        measured(&mut files[0].1, 1).bound = Some(hostile.repeat(20));
        let labelled = labels(&files);
        let charts = report_charts(&labelled);
        for text in charts
            .iter()
            .map(|chart| &chart.1)
            .chain([&report(&labelled), &report(&labelled[..1])])
        {
            assert!(!text.contains("<script"));
            assert!(!text.contains(['\u{202e}', '\0', '\u{1b}']));
        }
        assert!(
            charts
                .iter()
                .all(|(name, _)| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'))
        );
    }

    #[test]
    fn no_value_is_too_strange() {
        let strange = [1e-300, 1e-9, 1.0, 1e300, f64::MAX, f64::MIN_POSITIVE];
        for (at, value) in strange.into_iter().enumerate() {
            for other in strange {
                let mut files = of_runs(2);
                let file = &mut files[0].1;
                let case = measured(file, at);
                let times = crate::results::Times::of(vec![vec![value, other]]).unwrap();
                case.wall = times.clone();
                case.gpu = Some(times);
                case.flops_per_second = value;
                case.bytes_per_second = other;
                case.share_of_peak = Some(value);
                case.max_error = -other;
                file.runs[0].cases[at].flops = if at == 1 { 0 } else { u64::MAX };
                file.runs[0].cases[at].bytes = 1;
                for size in file.runs[0].cases[at].sizes.values_mut() {
                    *size = if at == 2 { 0 } else { u64::MAX };
                }
                let peaks = &mut file.runs[0].peaks;
                peaks.f32_flops_per_second = value;
                peaks.matrix_flops_per_second = Some(other);
                peaks.bytes_per_second = other;
                peaks.dispatch_s = -value;
                for runs in [&files[..], &files[..1]] {
                    let page = page(runs).replace("output full of NaN", "");
                    assert!(
                        !page.contains("NaN") && !page.contains(">inf"),
                        "{value} {other}"
                    );
                }
            }
        }
    }

    #[test]
    fn thousands_of_cases_make_a_page() {
        let mut files = of_runs(2);
        for (_, file) in &mut files {
            let run = &mut file.runs[0];
            let template = run.cases[0].clone();
            for number in 0..2000u64 {
                let mut case = template.clone();
                case.name = format!(
                    "attention-causal-t{}-h{}-d64-f32",
                    number % 7 + 2,
                    number / 7
                );
                case.sizes.insert("q_len".into(), number % 7 + 2);
                run.cases.push(case);
            }
        }
        let page = page(&files);
        assert!(
            page.contains("the first of 2004; the table has all"),
            "bars"
        );
        assert!(page.contains("The first 12 of "), "series");
    }
}
