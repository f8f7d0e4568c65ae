//! `bench`: what the kernels reach on one or more adapters, beside what the adapters themselves reach.
//!
//! - `mod.rs`: what can be asked for, and the way through it.
//! - `suite.rs`: the cases of one adapter, round by round.
//! - `show.rs`: what was found as tables.
//! - `noise.rs`: `--check-noise`.

mod noise;
mod show;
mod suite;

use crate::table::Format;
use crate::{BackendOption, FormOption, Verdict, complain, interrupt, say, say_all, tell};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use suite::{Suite, Variants};
use wgpu_attention::bench::{Work, expect_writable, save, select, utc};
use wgpu_attention::kernels::KERNELS;
use wgpu_attention::results::{Outcome, ResultFile, Settings};
use wgpu_attention::{Error, Gpu, GpuOptions, Result, wgpu};

#[derive(Args)]
#[command(after_help = "\
Each case is first held against the f64 reference; one that is wrong is not timed. GFLOP/s count a multiply-add as two and \
causal work once; GB/s count operands and result once. The share is that of the peak that allows the least, as this adapter's \
own peaks were measured in this run. All cases are gone through several times, so that a slow minute of the machine does not \
fall on one of them alone. Ctrl-C keeps what is done (exit status 130). docs/benchmarking.md says more.

Shapes: attention-causal-t1024-h12-d64-f32 (or -full-; grouped heads: h32kv8; f16, bf16; -fused: q, k, v side by side), \
decode-k4096-h32kv8-d128-f16, linear-r128-768x2304-f32, layer-causal-b1-t128-768x768-h12-f32.")]
pub(crate) struct Options {
    /// The quick set: under half a minute on a GPU
    #[arg(long)]
    quick: bool,
    /// Cases whose names hold one of these words; a whole name also takes a case that is left out otherwise
    #[arg(long = "case", value_name = "NAME_PART", num_args = 1..)]
    cases: Vec<String>,
    /// These shapes: names as --list shows them, with any sizes (beside what --case chooses, if it is given)
    #[arg(long = "shape", value_name = "SHAPE", num_args = 1..)]
    shapes: Vec<Work>,
    /// By this kernel instead of the planner's choice; `all`: by each that can compute the case
    #[arg(long, value_name = "KERNEL", value_parser = kernel)]
    kernel: Option<String>,
    /// Faster tiers of arithmetic, once they have shown on the adapter that they are right
    #[arg(long, value_enum, default_value = "auto")]
    tiers: TiersOption,
    /// List the cases and measure nothing
    #[arg(long, conflicts_with_all = ["save", "check_noise", "shapes", "adapters", "format", "kernel", "tuning"])]
    list: bool,
    /// Part of an adapter's name, several times for several; `all`: every adapter of every backend
    #[arg(long = "adapter", value_name = "NAME", num_args = 1..)]
    adapters: Vec<String>,
    /// The backend
    #[arg(long, value_enum)]
    backend: Option<BackendOption>,
    /// The form of the kernels
    #[arg(long, value_enum, default_value = "auto")]
    form: FormOption,
    /// Take the plans that `tune` kept in this file for the adapter
    #[arg(long, value_name = "TUNING.json")]
    tuning: Option<PathBuf>,
    /// Samples of a case and round at most
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
    /// How often to go through all cases
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// What to print
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Keep everything, every sample included, in this file (JSON; CSV without the samples if its name ends in .csv); it is written anew
    /// after each case
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long, requires = "save")]
    force: bool,
    /// Measure one case again and again, and say what difference this machine can resolve
    #[arg(long, conflicts_with_all = ["save", "kernel", "format", "tuning"])]
    check_noise: bool,
}

/// Which tiers of arithmetic are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TiersOption {
    /// Those that a GPU has; none on an adapter that is a CPU
    Auto,
    /// Those that the adapter has
    On,
    /// None
    Off,
}

/// The name of a kernel that cases can be computed with, or `all`.
fn kernel(name: &str) -> Result<String, String> {
    use wgpu_attention::kernels::Operation;
    let measured = KERNELS.iter().filter(|kernel| {
        matches!(
            kernel.operation,
            Operation::Attention | Operation::Decode | Operation::Linear | Operation::LinearFew
        )
    });
    let names: Vec<&str> = measured.map(|kernel| kernel.name).collect();
    match name == "all" || names.contains(&name) {
        true => Ok(name.into()),
        false => Err(format!("the kernels are {} (or all)", names.join(", "))),
    }
}

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    if let Some(path) = &options.save {
        expect_writable(path, options.force)?;
        let same = |tuning: &PathBuf| match (tuning.canonicalize(), path.canonicalize()) {
            (Ok(tuning), Ok(path)) => tuning == path,
            _ => tuning == path,
        };
        if options.tuning.as_ref().is_some_and(same) {
            complain("--save names the file of --tuning; give it another name");
            return Ok(Verdict::Unsound);
        }
    }
    if let Some(problem) = nothing_chosen(options) {
        complain(problem);
        return Ok(Verdict::Unsound);
    }
    if options.list {
        list(options);
        return Ok(Verdict::Right);
    }
    interrupt::listen();
    // Adapters that were given up, here or later.
    let mut lost = 0;
    let gpus = open(options, &mut lost)?;
    if options.check_noise {
        return noise::run(options, &gpus);
    }
    let begin = Instant::now();
    let settings = Settings {
        quick: options.quick,
        cases: options.cases.clone(),
        shapes: options.shapes.iter().map(Work::name).collect(),
        kernel: options.kernel.clone(),
        form: format!("{:?}", options.form).to_lowercase(),
        tiers: format!("{:?}", options.tiers).to_lowercase(),
        samples: options.samples,
        rounds: options.rounds,
    };
    let mut file = ResultFile::new(utc(SystemTime::now()), settings);
    let mut keeper = Keeper {
        options,
        started: false,
    };
    let bar = progress();
    let mut finished = true;
    for gpu in &gpus {
        let (works, left_out) = chosen(options, gpu);
        if works.is_empty() {
            tell(format_args!(
                "{}: a CPU underneath, and the cases that were asked for are for GPUs alone; a whole name runs one all the same",
                gpu.describe()
            ));
            continue;
        }
        let variants = Variants {
            kernel: options.kernel.as_deref(),
            form: options.form.form(),
            tiers: !gpu.capabilities().qualified_tiers.is_empty(),
        };
        let suite = Suite {
            gpu,
            works,
            left_out,
            variants,
            samples: options.samples as usize,
            rounds: options.rounds,
            // Of all rounds together.
            budget: Duration::from_millis(if options.quick { 500 } else { 1500 }),
            tuning: options.tuning.as_deref(),
        };
        let before = file.runs.len();
        let measured = suite.measure(&bar, &mut |run| {
            file.runs.truncate(before);
            file.runs.push(run);
            keeper.keep(&file)
        });
        bar.set_message("");
        match measured {
            Ok(all) => finished &= all,
            // What cannot be written, or is asked for in vain, is so with the next adapter, too. (What is known is at least shown.)
            Err(error @ (Error::Io { .. } | Error::Format { .. })) => {
                bar.finish_and_clear();
                if options.format == Format::Table && file.runs.len() > before {
                    say_all(show::run(&file, before));
                }
                return Err(error);
            }
            Err(error) => {
                lost += 1;
                tell(format_args!("{}: given up: {error}", gpu.describe()));
                if file.runs.len() == before {
                    continue;
                }
            }
        }
        if file.runs.len() == before {
            break;
        }
        if options.format == Format::Table {
            bar.suspend(|| say_all(show::run(&file, file.runs.len() - 1)));
        }
        if interrupt::requested() {
            finished &= file.runs.len() == gpus.len();
            break;
        }
    }
    bar.finish_and_clear();
    // (Where nothing was begun, what is there stays.)
    if !file.runs.is_empty() {
        file.complete = finished && lost == 0;
        keeper.keep(&file)?;
    }
    match options.format {
        Format::Table => {}
        Format::Markdown => say_all(show::markdown(&file)),
        Format::Json => say_all(file.to_json()),
        Format::Csv => say_all(show::cases(&file).csv()),
    }
    conclude(&file, lost, begin.elapsed(), options)
}

/// The file that is kept: as it is so far, again and again.
struct Keeper<'a> {
    options: &'a Options,
    started: bool,
}

impl Keeper<'_> {
    fn keep(&mut self, file: &ResultFile) -> Result<()> {
        let Some(path) = &self.options.save else {
            return Ok(());
        };
        let replace = self.options.force || self.started;
        match is_csv(path) {
            true => save(path, &show::cases(file).csv(), replace)?,
            false => file.save(path, replace)?,
        }
        self.started = true;
        Ok(())
    }
}

fn is_csv(path: &Path) -> bool {
    let ending = path.extension().unwrap_or_default();
    ending.eq_ignore_ascii_case("csv")
}

fn list(options: &Options) {
    let (cases, _) = select(&options.cases, options.quick, false);
    for case in cases {
        let quick = if case.quick { "  quick" } else { "" };
        let gpus = if case.software { "" } else { "  GPUs only" };
        say(format_args!("{:<44}{quick}{gpus}", case.work.name()));
    }
}

/// Why nothing would be measured on any adapter, if so.
fn nothing_chosen(options: &Options) -> Option<String> {
    let (cases, _) = select(&options.cases, options.quick, false);
    if !cases.is_empty() || !options.shapes.is_empty() {
        return None;
    }
    let (all, _) = select(&options.cases, false, false);
    Some(match all.is_empty() {
        true => format!(
            "--case: no case has a name with one of {:?}; --list shows them",
            options.cases
        ),
        false => format!(
            "--case: none of {:?} is in the quick set; leave out --quick, or give a whole name",
            options.cases
        ),
    })
}

/// The adapters that were asked for, with the tiers that are right on them.
fn open(options: &Options, lost: &mut usize) -> Result<Vec<Gpu>> {
    let one = |name: Option<String>| GpuOptions {
        adapter_name: name,
        backends: options.backend.map(BackendOption::backends),
        experimental: options.tiers != TiersOption::Off,
        ..Default::default()
    };
    let mut gpus: Vec<Gpu> = Vec::new();
    if options.adapters.iter().any(|name| name == "all") {
        // (No name at all, whatever the environment says.)
        for opened in Gpu::open_all_blocking(&one(Some(String::new())))? {
            match opened {
                Ok(gpu) => gpus.push(gpu),
                Err(error) => tell(format_args!("left out: {error}")),
            }
        }
        if gpus.is_empty() {
            return Err(Error::NoAdapter {
                remedy: "Every one that there is refused to open".into(),
            });
        }
    } else if options.adapters.is_empty() {
        gpus.push(Gpu::open_blocking(&one(None))?);
    } else {
        for name in &options.adapters {
            let gpu = Gpu::open_blocking(&one(Some(name.clone())))?;
            let known = |other: &Gpu| {
                let (a, b) = (gpu.adapter_info(), other.adapter_info());
                (&a.name, a.backend) == (&b.name, b.backend)
            };
            if !gpus.iter().any(known) {
                gpus.push(gpu);
            }
        }
    }
    let mut kept = Vec::new();
    for gpu in gpus {
        match qualified(&gpu, options.tiers) {
            Ok(gpu) => kept.push(gpu),
            Err(error) => {
                *lost += 1;
                tell(format_args!("{}: given up: {error}", gpu.describe()));
            }
        }
    }
    Ok(kept)
}

/// The same adapter with the tiers that are right on it.
fn qualified(gpu: &Gpu, tiers: TiersOption) -> Result<Gpu> {
    let software = gpu.adapter_info().device_type == wgpu::DeviceType::Cpu;
    if tiers == TiersOption::Off || tiers == TiersOption::Auto && software {
        return Ok(gpu.clone());
    }
    let (qualified, found) = gpu.qualify_blocking()?;
    for one in found.iter().filter(|one| !one.passed()) {
        tell(format_args!("{}: left out: {one}", gpu.describe()));
    }
    Ok(qualified)
}

/// What is measured on an adapter, and the names of what is left out there.
fn chosen(options: &Options, gpu: &Gpu) -> (Vec<Work>, Vec<String>) {
    let software = gpu.adapter_info().device_type == wgpu::DeviceType::Cpu;
    // (Shapes alone, if they are all that is named.)
    let table = options.shapes.is_empty() || !options.cases.is_empty();
    let (cases, left_out) = match table {
        true => select(&options.cases, options.quick, software),
        false => Default::default(),
    };
    let mut works: Vec<Work> = cases.iter().map(|case| case.work).collect();
    for shape in &options.shapes {
        if !works.contains(shape) {
            works.push(*shape);
        }
    }
    let left_out = left_out.iter().map(|case| case.work.name());
    (works, left_out.collect())
}

/// Drawn on standard error if that is a terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}, {eta} left  {msg}");
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}

/// How it ended, in words and as a verdict.
fn conclude(file: &ResultFile, lost: usize, took: Duration, options: &Options) -> Result<Verdict> {
    let (mut measured, mut wrong, mut reason) = (0, 0, None);
    for case in file.runs.iter().flat_map(|run| &run.cases) {
        match &case.outcome {
            Outcome::Measured(_) => measured += 1,
            Outcome::Wrong { .. } | Outcome::Failed { .. } => wrong += 1,
            Outcome::Refused { reason: why } => reason = Some(why),
        }
    }
    let cases = |count: usize| format!("{count} case{}", if count == 1 { "" } else { "s" });
    let summary = format!(
        "{} measured, {wrong} wrong or failed, {:.0} s in all",
        cases(measured),
        took.as_secs_f64()
    );
    match options.format {
        Format::Table => say(summary),
        _ => tell(summary),
    }
    if let Some(path) = &options.save {
        tell(format_args!("written     {}", path.display()));
    }
    Ok(match () {
        () if wrong > 0 || lost > 0 => Verdict::Wrong,
        () if interrupt::requested() => Verdict::Interrupted,
        () if measured == 0 => {
            complain(match reason {
                Some(why) => format!("nothing was measured: {why}"),
                None => "nothing was measured: no case is for this adapter".into(),
            });
            Verdict::Unsound
        }
        () => Verdict::Right,
    })
}
