//! The program `wgpu-attention`: runs the layer, lists adapters, checks case files, measures.
//!
//! One file a subcommand; each is thin over the library. Exit status: 0 all is well, 1 a result is wrong,
//! 2 the request or its files are unsound (one line on standard error says what), 130 interrupted.

mod bench;
mod compare;
mod info;
mod interrupt;
mod qualify;
mod report;
mod run;
mod table;
mod tune;
mod verify;

use clap::{Parser, Subcommand, ValueEnum};
use std::fmt::Display;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use wgpu_attention::kernels::Form;
use wgpu_attention::results::visible;
use wgpu_attention::wgpu::Backends;
use wgpu_attention::{Error, Gpu, GpuOptions, Result};

/// Multi-head attention as WGSL compute kernels on any vendor's GPU, checked against a CPU reference.
#[derive(Parser)]
#[command(
    version,
    about,
    after_help = "\
Environment: WGPU_BACKEND (vulkan, metal, dx12, gl) and WGPU_ADAPTER_NAME (part of a name) choose the adapter; \
RUST_LOG=wgpu_attention=debug shows every plan.
Exit status: 0 all is well, 1 a result is wrong, 2 the request or its files are unsound, 130 interrupted."
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Run a layer on real input, time it and check it (what the bare command does)
    Run(run::Options),
    /// List the adapters: backend, driver, type, limits, features, and the kernels each can run
    Info(info::Options),
    /// Try the faster tiers of arithmetic that the adapter has, and say which are right on it
    Qualify(qualify::Options),
    /// Measure the plans that could compute a shape on this adapter, and keep the fastest in a file
    Tune(tune::Options),
    /// Run golden case files and compare with their stored results
    Verify(verify::Options),
    /// Measure the kernels on one or more adapters, beside the adapters' own peaks
    Bench(bench::Options),
    /// Compare result files of `bench`: ratios, and what is only noise
    Compare(compare::Options),
    /// Draw saved results of one or more adapters as one HTML page
    Report(report::Options),
}

/// The form of the kernels, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum FormOption {
    /// What suits the adapter
    Auto,
    /// Tiles in workgroup memory, for GPUs
    Tiled,
    /// SIMD lanes, for adapters that are a CPU
    Lanes,
}

impl FormOption {
    fn form(self) -> Option<Form> {
        match self {
            FormOption::Auto => None,
            FormOption::Tiled => Some(Form::Tiled),
            FormOption::Lanes => Some(Form::Lanes),
        }
    }
}

/// The backend, as the command line and `WGPU_BACKEND` name it.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum BackendOption {
    Vulkan,
    Metal,
    Dx12,
    Gl,
}

impl BackendOption {
    fn backends(self) -> Backends {
        match self {
            BackendOption::Vulkan => Backends::VULKAN,
            BackendOption::Metal => Backends::METAL,
            BackendOption::Dx12 => Backends::DX12,
            BackendOption::Gl => Backends::GL,
        }
    }
}

/// How a command ended that could be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Wrong,
    /// Nothing was shown.
    Unsound,
    /// Somebody pressed Ctrl-C: what was done until then was kept.
    Interrupted,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off")).init();
    let result = match Cli::parse().command {
        None => run::run(&run::Options::default()),
        Some(Command::Run(options)) => run::run(&options),
        Some(Command::Info(options)) => info::run(&options),
        Some(Command::Qualify(options)) => qualify::run(&options),
        Some(Command::Tune(options)) => tune::run(&options),
        Some(Command::Verify(options)) => verify::run(&options),
        Some(Command::Bench(options)) => bench::run(&options),
        Some(Command::Compare(options)) => compare::run(&options),
        Some(Command::Report(options)) => report::run(&options),
    };
    let result = result.and_then(|verdict| match UNSAID.get() {
        None => Ok(verdict),
        Some(reason) => Err(Error::Io {
            path: "standard output".into(),
            source: std::io::Error::other(reason.clone()),
        }),
    });
    match result {
        Ok(Verdict::Right) => ExitCode::SUCCESS,
        Ok(Verdict::Wrong) => ExitCode::from(1),
        Ok(Verdict::Unsound) => ExitCode::from(2),
        Ok(Verdict::Interrupted) => ExitCode::from(interrupt::STATUS),
        Err(error) => {
            complain(error);
            ExitCode::from(2)
        }
    }
}

/// Why standard output could not be written, if it could not (a full disk).
static UNSAID: OnceLock<String> = OnceLock::new();

/// A line on standard output. A reader who has gone away (`| head`) is no reason to panic, and no error.
fn say(line: impl Display) {
    say_all(format_args!("{line}\n"));
}

/// Text on standard output that ends its own lines.
fn say_all(text: impl Display) {
    let mut out = std::io::stdout();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            let _ = UNSAID.set(error.to_string());
        }
        _ => {}
    }
}

/// A line on standard error that is no complaint.
fn tell(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{}", visible(&line.to_string()));
}

/// One line on standard error, however many lines the words have.
fn complain(words: impl Display) {
    let words = words.to_string();
    let lines: Vec<&str> = words.lines().map(str::trim).collect();
    let _ = writeln!(std::io::stderr(), "error: {}", visible(&lines.join(" ")));
}

/// The adapter of that name and backend, or the best one.
fn open(adapter: &Option<String>, backend: Option<BackendOption>) -> Result<Gpu> {
    Gpu::open_blocking(&GpuOptions {
        adapter_name: adapter.clone(),
        backends: backend.map(BackendOption::backends),
        ..Default::default()
    })
}

/// What a tuning file holds of this adapter. A name that is none is an error: the user has asked for it.
fn load_tuning(gpu: &Gpu, file: &Path) -> Result<usize> {
    std::fs::metadata(file).map_err(|source| Error::Io {
        path: file.display().to_string(),
        source,
    })?;
    gpu.check_tuning(file)?;
    let known = gpu.load_tuning(file)?;
    if known == 0 {
        complain(format_args!(
            "{}: it holds nothing of this adapter with this driver and these kernels; plans are those of the planner",
            file.display()
        ));
    }
    Ok(known)
}
