//! `bench`: what the kernels reach on this adapter, beside what the adapter itself reaches.

use crate::{BackendOption, FormOption, Verdict, complain, load_tuning, open, say};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};
use wgpu_attention::bench::{
    Bound, CASES, Case, MeasureOptions, Measured, Peak, Peaks, PrepareOptions, Prepared, Share,
    Spread, expect_writable, measure, save, select, utc,
};
use wgpu_attention::compare::Comparison;
use wgpu_attention::{Error, Gpu, Result, wgpu};

/// The version of the file that `--json` writes: another one where a field means something else or is gone.
const SCHEMA: u32 = 1;

#[derive(Args)]
#[command(after_help = "\
Each case is first held against the f64 reference; one that is wrong is not timed. GFLOP/s count a multiply-add as two and \
causal work once; GB/s count operands and result once. The share is that of the peak that allows the least, operations or \
bytes, as this adapter's own peaks were measured in this run. docs/benchmarking.md says more.")]
pub(crate) struct Options {
    /// The quick set: under half a minute on a GPU
    #[arg(long)]
    quick: bool,
    /// Cases whose names hold one of these words; a whole name also takes a case that is left out otherwise
    #[arg(long = "case", value_name = "NAME_PART", num_args = 1..)]
    cases: Vec<String>,
    /// List the cases and measure nothing
    #[arg(long)]
    list: bool,
    /// Part of the adapter's name
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
    /// The form of the kernels
    #[arg(long, value_enum, default_value = "auto")]
    form: FormOption,
    /// Take the plans that `tune` kept in this file for this adapter
    #[arg(long, value_name = "TUNING.json")]
    tuning: Option<PathBuf>,
    /// Samples of a case at most
    #[arg(long, default_value_t = 30, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
    /// Write everything, every sample included, to this file; it is written anew after each case
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long, requires = "json")]
    force: bool,
}

/// What became of a case.
enum Outcome {
    Measured(Box<Row>),
    /// The result is not the reference's.
    Wrong(Box<Comparison>, Vec<&'static str>),
    /// Something broke.
    Failed(Error),
    /// It does not fit this adapter.
    Refused(Error),
}

struct Row {
    kernels: Vec<&'static str>,
    sets: usize,
    /// Seconds of planning, compiling, making operands, and a first call with its check.
    first: f64,
    check: Comparison,
    measured: Measured,
    share: Option<Share>,
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    if options.list {
        for case in CASES {
            let quick = if case.quick { "  quick" } else { "" };
            let gpus = if case.software { "" } else { "  GPUs only" };
            say(format_args!("{:<44}{quick}{gpus}", case.work.name()));
        }
        return Ok(Verdict::Right);
    }
    if let Some(path) = &options.json {
        expect_writable(path, options.force)?;
        if options.tuning.as_ref() == Some(path) {
            complain("--json names the file of --tuning; give it another name");
            return Ok(Verdict::Unsound);
        }
    }
    let gpu = open(&options.adapter, options.backend)?;
    let info = gpu.adapter_info();
    let software = info.device_type == wgpu::DeviceType::Cpu;
    let (cases, left_out) = select(&options.cases, options.quick, software);
    if cases.is_empty() {
        complain(match left_out.is_empty() {
            true => format!(
                "--case: no case has a name with one of {:?}; --list shows them",
                options.cases
            ),
            false => "--case: these are for GPUs alone; a whole name runs one all the same".into(),
        });
        return Ok(Verdict::Unsound);
    }
    let driver = format!("{} {}", info.driver, info.driver_info);
    say(format_args!(
        "adapter     {}, driver {}",
        gpu.describe(),
        driver.trim()
    ));
    if software {
        say(format_args!(
            "            a CPU underneath: {} cases of GPU size are left out",
            left_out.len()
        ));
    }
    let mut tuned = None;
    if let Some(file) = &options.tuning {
        let known = load_tuning(&gpu, file)?;
        say(format_args!(
            "tuning      {}, {known} problems of this adapter",
            file.display()
        ));
        tuned = Some(known);
    }
    let begin = Instant::now();
    let peaks = Peaks::measure(&gpu)?;
    print_peaks(&peaks);

    let mut report = Report {
        options,
        gpu: &gpu,
        peaks: &peaks,
        left_out: left_out.iter().map(|case| case.work.name()).collect(),
        date: utc(SystemTime::now()),
        tuned,
        after: Vec::new(),
        rows: Vec::new(),
    };
    report.save(false)?;
    say("");
    say(format_args!(
        "{:<44} {:>10} {:>10} {:>7} {:>9} {:>14} {:>8}  kernels",
        "case", "GPU ms", "wall ms", "spread", "rate", "share", "error"
    ));
    for case in &cases {
        let outcome = match bench(&gpu, case, options, &peaks) {
            Ok(outcome) => outcome,
            Err(error @ Error::DeviceLost { .. }) => return Err(error),
            Err(error) => refused_or_failed(error),
        };
        print_case(case, &outcome);
        report.rows.push((case, outcome));
        report.save(false)?;
    }
    report.after = peaks.again(&gpu)?;
    say("");
    print_again(&peaks, &report.after);
    report.save(true)?;
    conclude(&report.rows, begin.elapsed(), options)
}

/// What an error of a case means: an adapter that is too small is not at fault.
fn refused_or_failed(error: Error) -> Outcome {
    match error {
        Error::LimitExceeded { .. }
        | Error::OutOfMemory { .. }
        | Error::Unsupported { .. }
        | Error::MissingFeature { .. } => Outcome::Refused(error),
        error => Outcome::Failed(error),
    }
}

fn bench(gpu: &Gpu, case: &Case, options: &Options, peaks: &Peaks) -> Result<Outcome> {
    let begin = Instant::now();
    let prepare = PrepareOptions::suited(gpu, options.form.form());
    let prepared = Prepared::new(gpu, &case.work, &prepare)?;
    let check = prepared.check()?;
    let first = begin.elapsed().as_secs_f64();
    if !check.passed() {
        return Ok(Outcome::Wrong(Box::new(check), prepared.kernels()));
    }
    let measure_options = MeasureOptions {
        samples: options.samples as usize,
        budget: Duration::from_millis(if options.quick { 500 } else { 2000 }),
        ..Default::default()
    };
    let measured = measure(gpu, &measure_options, &mut prepared.recorder())?;
    let seconds = measured.best().median;
    let share = peaks.share(case.work.flops(), case.work.bytes(), seconds);
    Ok(Outcome::Measured(Box::new(Row {
        kernels: prepared.kernels(),
        sets: prepared.sets(),
        first,
        check,
        measured,
        share,
    })))
}

fn print_peaks(peaks: &Peaks) {
    for (number, (bound, unit)) in [(Bound::F32, "GFLOP/s"), (Bound::Memory, "GB/s")]
        .into_iter()
        .enumerate()
    {
        if let Some(peak) = peaks.best(bound) {
            say(format_args!(
                "{:<11} {bound} {:.1} {unit} by {}",
                if number == 0 { "peaks" } else { "" },
                peak.rate / 1e9,
                peak.form
            ));
        }
    }
    say(format_args!(
        "            a dispatch that does nothing {:.1} microseconds, a submission {:.1}",
        peaks.dispatch_seconds * 1e6,
        peaks.submission_seconds * 1e6
    ));
}

/// Peaks that have changed since the cases began make shares worth less.
fn print_again(peaks: &Peaks, after: &[Peak]) {
    let changes: Vec<String> = after
        .iter()
        .filter_map(|peak| {
            let before = peaks.best(peak.bound)?.rate;
            let change = 100.0 * (peak.rate / before - 1.0);
            Some(format!("{} {change:+.0} %", peak.bound))
        })
        .collect();
    say(format_args!(
        "peaks after the cases against before: {}",
        changes.join(", ")
    ));
}

/// Operations or bytes a second, whichever binds it, in words.
fn rate(case: &Case, row: &Row) -> String {
    let seconds = row.measured.best().median;
    match row.share.map(|share| share.bound) {
        Some(Bound::Memory) => format!("{:.1} GB/s", case.work.bytes() as f64 / seconds / 1e9),
        _ => format!("{:.1} GF/s", case.work.flops() as f64 / seconds / 1e9),
    }
}

fn print_case(case: &Case, outcome: &Outcome) {
    let name = case.work.name();
    match outcome {
        Outcome::Measured(row) => {
            let ms = |spread: &Spread| format!("{:.4}", spread.median * 1e3);
            say(format_args!(
                "{name:<44} {:>10} {:>10} {:>7} {:>9} {:>14} {:>8}  {}",
                row.measured.gpu.as_ref().map_or("-".into(), ms),
                ms(&row.measured.wall),
                format!("{:.1}%", 100.0 * row.measured.best().relative()),
                rate(case, row),
                row.share.map_or("-".into(), |share| format!(
                    "{:.0}% {}",
                    100.0 * share.share,
                    share.bound
                )),
                format!("{:.1e}", row.check.max_error),
                row.kernels.join(" + ")
            ));
        }
        Outcome::Wrong(comparison, kernels) => {
            say(format_args!(
                "{name:<44} WRONG, not timed ({}): {comparison}",
                kernels.join(" + ")
            ));
        }
        Outcome::Failed(error) => say(format_args!("{name:<44} FAILED: {error}")),
        Outcome::Refused(error) => say(format_args!("{name:<44} does not fit: {error}")),
    }
}

/// Why wall time was taken, how long it all took, and the verdict.
fn conclude(rows: &[(&Case, Outcome)], took: Duration, options: &Options) -> Result<Verdict> {
    let mut measured = 0;
    let mut wrong = 0;
    let mut reasons: Vec<String> = Vec::new();
    for (_, outcome) in rows {
        match outcome {
            Outcome::Measured(row) => {
                measured += 1;
                if let Err(reason) = &row.measured.gpu {
                    let reason = reason.to_string();
                    if !reasons.contains(&reason) {
                        reasons.push(reason);
                    }
                }
            }
            Outcome::Wrong(..) | Outcome::Failed(_) => wrong += 1,
            Outcome::Refused(_) => {}
        }
    }
    for reason in reasons {
        say(format_args!(
            "wall time where there is no GPU time: {reason}"
        ));
    }
    say(format_args!(
        "{measured} cases measured, {wrong} wrong or failed, {:.0} s in all",
        took.as_secs_f64()
    ));
    if let Some(path) = &options.json {
        say(format_args!("written     {}", path.display()));
    }
    if wrong > 0 {
        return Ok(Verdict::Wrong);
    }
    if measured == 0 {
        complain("nothing was measured: no case fits this adapter");
        return Ok(Verdict::Unsound);
    }
    Ok(Verdict::Right)
}

/// Everything that is known so far.
struct Report<'a> {
    options: &'a Options,
    gpu: &'a Gpu,
    peaks: &'a Peaks,
    left_out: Vec<String>,
    date: String,
    /// Problems that were tuned, where a file was given.
    tuned: Option<usize>,
    /// The best peaks once more, after the cases.
    after: Vec<Peak>,
    rows: Vec<(&'static Case, Outcome)>,
}

impl Report<'_> {
    /// Writes the file, if there is to be one: again after each case, so that an interrupted run leaves what it has.
    fn save(&self, complete: bool) -> Result<()> {
        let Some(path) = &self.options.json else {
            return Ok(());
        };
        let started = !self.rows.is_empty() || complete;
        let text = format!("{:#}\n", self.json(complete));
        save(path, &text, self.options.force || started)
    }

    fn json(&self, complete: bool) -> Value {
        let info = self.gpu.adapter_info();
        let limits = self.gpu.capabilities();
        json!({
            "schema": SCHEMA,
            "what": "wgpu-attention bench",
            "complete": complete,
            "date": self.date,
            "version": env!("CARGO_PKG_VERSION"),
            "system": { "os": std::env::consts::OS, "architecture": std::env::consts::ARCH },
            "adapter": {
                "name": info.name,
                "backend": info.backend.to_str(),
                "type": format!("{:?}", info.device_type),
                "driver": info.driver,
                "driver_info": info.driver_info,
                "vendor": info.vendor,
                "device": info.device,
                "limits": {
                    "max_storage_buffer_binding_size": limits.max_binding_bytes,
                    "max_buffer_size": limits.max_buffer_bytes,
                    "max_compute_workgroup_storage_size": limits.max_workgroup_bytes,
                    "max_compute_invocations_per_workgroup": limits.max_invocations,
                    "max_compute_workgroups_per_dimension": limits.max_groups_per_axis,
                    "max_storage_buffers_per_shader_stage": limits.max_storage_buffers,
                    "min_subgroup_size": limits.subgroup_sizes.0,
                    "max_subgroup_size": limits.subgroup_sizes.1,
                },
            },
            "settings": {
                "quick": self.options.quick,
                "cases": self.options.cases,
                "form": format!("{:?}", self.options.form).to_lowercase(),
                "samples": self.options.samples,
                "tuned_problems": self.tuned,
            },
            "peaks": {
                "flops_per_second": self.peaks.best(Bound::F32).map(|peak| peak.rate),
                "bytes_per_second": self.peaks.best(Bound::Memory).map(|peak| peak.rate),
                "dispatch_s": self.peaks.dispatch_seconds,
                "submission_s": self.peaks.submission_seconds,
                "buffer_bytes": self.peaks.copied_bytes,
                "forms": self.peaks.forms.iter().map(peak_json).collect::<Vec<_>>(),
                "after": self.after.iter().map(peak_json).collect::<Vec<_>>(),
            },
            "left_out": self.left_out,
            "cases": self.rows.iter().map(|(case, outcome)| case_json(case, outcome)).collect::<Vec<_>>(),
        })
    }
}

fn peak_json(peak: &Peak) -> Value {
    json!({
        "bound": peak.bound.to_string(),
        "form": peak.form,
        "rate_per_second": peak.rate,
        "wall": times(&peak.measured.wall),
        "gpu": peak.measured.gpu.as_ref().ok().map(times),
    })
}

/// Seconds.
fn times(spread: &Spread) -> Value {
    json!({
        "median_s": spread.median,
        "p10_s": spread.p10,
        "p90_s": spread.p90,
        "samples_s": spread.samples,
    })
}

fn case_json(case: &Case, outcome: &Outcome) -> Value {
    let mut value = json!({
        "name": case.work.name(),
        "kind": case.work.kind(),
        "sizes": sizes(case),
        "type": case.work.element().to_string(),
        "flops": case.work.flops(),
        "bytes": case.work.bytes(),
    });
    let more = match outcome {
        Outcome::Measured(row) => {
            let seconds = row.measured.best().median;
            json!({
                "status": "measured",
                "kernels": row.kernels,
                "operand_sets": row.sets,
                "first_s": row.first,
                "checked": row.check.compared,
                "max_error": row.check.max_error,
                "calls_per_sample": row.measured.calls,
                "clock": if row.measured.gpu.is_ok() { "gpu" } else { "wall" },
                "no_gpu_time": row.measured.gpu.as_ref().err().map(|reason| reason.to_string()),
                "wall": times(&row.measured.wall),
                "gpu": row.measured.gpu.as_ref().ok().map(times),
                "flops_per_second": case.work.flops() as f64 / seconds,
                "bytes_per_second": case.work.bytes() as f64 / seconds,
                "bound": row.share.map(|share| share.bound.to_string()),
                "share_of_peak": row.share.map(|share| share.share),
            })
        }
        Outcome::Wrong(comparison, kernels) => json!({
            "status": "wrong",
            "kernels": kernels,
            "reason": comparison.to_string(),
        }),
        Outcome::Failed(error) => json!({ "status": "failed", "reason": error.to_string() }),
        Outcome::Refused(error) => json!({ "status": "refused", "reason": error.to_string() }),
    };
    if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
        value.extend(more);
    }
    value
}

/// The sizes of a case by their names.
fn sizes(case: &Case) -> Value {
    use wgpu_attention::bench::{Layout, Work};
    match case.work {
        Work::Attention {
            causal,
            tokens,
            heads,
            kv_heads,
            head_dim,
            layout,
            ..
        } => json!({
            "batch": 1, "heads": heads, "kv_heads": kv_heads, "q_len": tokens, "kv_len": tokens, "head_dim": head_dim,
            "causal": causal,
            "layout": match layout {
                Layout::HeadMajor => "head-major",
                Layout::Fused => "fused",
            },
        }),
        Work::Decode {
            keys,
            heads,
            kv_heads,
            head_dim,
            ..
        } => json!({
            "batch": 1, "heads": heads, "kv_heads": kv_heads, "q_len": 1, "kv_len": keys, "head_dim": head_dim,
            "causal": true, "layout": "head-major",
        }),
        Work::Linear { rows, d_in, d_out } => json!({ "rows": rows, "d_in": d_in, "d_out": d_out }),
        Work::Layer {
            batch,
            tokens,
            d_in,
            d_out,
            heads,
        } => json!({
            "batch": batch, "tokens": tokens, "d_in": d_in, "d_out": d_out, "heads": heads, "causal": true,
        }),
    }
}
