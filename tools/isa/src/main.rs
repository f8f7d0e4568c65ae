//! What AMD's open compiler makes of each kernel, on a machine without a GPU.
//!
//! Mesa's driver for AMD's GPUs, RADV, compiles for any of them without having one, and tells registers, spills and the
//! assembly. This tool gives it the crate's kernels as wgpu would and prints a table. Nothing runs: it says how good the
//! code is, not how fast the memory is.
//!
//! Exit status: 0 well, 1 where `--check` finds something, 2 where it could not be done.

mod assembly;
mod driver;
mod known;
mod report;
mod spirv;

use clap::Parser;
use driver::Driver;
use known::{KNOWN, Known};
use report::{Figures, Report, Row};
use spirv::Checks;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use wgpu_attention::kernels::{Configuration, Form, KERNELS, Kernel};

/// Compiles kernels with Mesa's RADV for a GPU that need not be there, and prints what came out.
#[derive(Parser)]
#[command(name = "isa", version)]
struct Arguments {
    /// GPU to compile for: navi21 (RDNA 2), navi31 (RDNA 3), or any other name of Mesa's.
    #[arg(long, value_name = "NAME", default_value = "navi21")]
    gpu: String,
    /// Description of the driver (radeon_icd*.json) [default: the system's].
    #[arg(long, value_name = "FILE")]
    icd: Option<PathBuf>,
    /// This kernel alone; may be given several times.
    #[arg(long, value_name = "NAME", conflicts_with = "file")]
    kernel: Vec<String>,
    /// Configurations with these constants alone.
    #[arg(
        long,
        value_name = "NAME=VALUE,...",
        value_delimiter = ',',
        conflicts_with = "file"
    )]
    config: Vec<String>,
    /// Sets of rules with these among them, by the names of shaders/rules, not just each kernel's first set.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', conflicts_with_all = ["file", "all"])]
    rules: Vec<String>,
    /// Every set of rules and element type, not just each kernel's first set, f32 and f16.
    #[arg(long, conflicts_with = "file")]
    all: bool,
    /// Only kernels that use cooperative matrices. Else they are left out where the driver has none, with a note.
    #[arg(long, conflicts_with = "file")]
    matrices: bool,
    /// Compile with the runtime checks that wgpu has by default: indices of arrays, ends of loops, divisors.
    #[arg(long)]
    checked: bool,
    /// Compile this WGSL file instead of the crate's kernels: whole text, constants and all.
    #[arg(long, value_name = "KERNEL.wgsl", requires = "entry")]
    file: Option<PathBuf>,
    /// Its entry point.
    #[arg(long, value_name = "NAME", requires = "file")]
    entry: Option<String>,
    /// Print JSON.
    #[arg(long, conflicts_with = "asm")]
    json: bool,
    /// Print the assembly of the one configuration that is chosen.
    #[arg(long)]
    asm: bool,
    /// Print no table; fail where a kernel for GPUs spills or needs scratch: each kernel's first and last set of rules, or all with --all.
    #[arg(long, conflicts_with_all = ["json", "asm", "file"])]
    check: bool,
    /// Only find out whether the driver knows the GPU. (It ends the process where it does not.)
    #[arg(long, hide = true)]
    probe: bool,
}

/// GPUs by the name used here, what they are, and what versions of Mesa call them, newest first.
const GPUS: [(&str, &str, &[&str]); 2] = [
    ("navi21", "RDNA 2", &["navi21"]),
    ("navi31", "RDNA 3", &["navi31", "gfx1100"]),
];

fn main() -> ExitCode {
    // Before anything may start a thread: the environment is changed.
    match run(&Arguments::parse()) {
        Ok(status) => status,
        Err(message) => {
            eprintln!("isa: {message}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let icd = arguments.icd.clone().or_else(driver::find_icd).ok_or(
        "no RADV driver (radeon_icd*.json): install mesa-vulkan-drivers (Debian, Ubuntu), vulkan-radeon (Arch) or your system's package of Mesa's Vulkan drivers for AMD",
    )?;
    if arguments.probe {
        // SAFETY: this process has one thread.
        unsafe { Driver::open(&icd, &arguments.gpu) }?;
        return Ok(ExitCode::SUCCESS);
    }
    let (gpu, title, names): (&str, String, &[&str]) = match GPUS
        .iter()
        .find(|(name, _, names)| *name == arguments.gpu || names.contains(&arguments.gpu.as_str()))
    {
        Some((name, kind, names)) => (name, format!("{kind} ({name})"), names),
        None => (&arguments.gpu, arguments.gpu.clone(), &[&arguments.gpu]),
    };
    let family = family(&icd, names)?;
    // SAFETY: this process has one thread; the processes that `family` started have ended.
    let driver = unsafe { Driver::open(&icd, family) }?;

    let chosen = match (&arguments.file, &arguments.entry) {
        (Some(file), Some(entry)) => vec![from_file(file, entry)?],
        _ => from_table(arguments, gpu)?,
    };
    let checks = if arguments.checked {
        Checks::On
    } else {
        Checks::Off
    };
    let mut rows = Vec::new();
    let mut left_out: Vec<&str> = Vec::new();
    if arguments.asm && chosen.len() != 1 {
        return Err(format!(
            "--asm prints one configuration, and {} are chosen: narrow it with --kernel, --config and --rules",
            chosen.len()
        ));
    }
    for one in &chosen {
        let at = || match (one.configuration.as_str(), one.rules.as_str()) {
            ("", "") => one.name.clone(),
            (configuration, rules) => format!("{} [{configuration}; {rules}]", one.name),
        };
        let shader = spirv::translate(&one.source, &one.name, checks, one.clears_memory)
            .map_err(|error| format!("{}: {error}", at()))?;
        if arguments.matrices && !shader.uses_matrices {
            continue;
        }
        if shader.uses_matrices
            && !driver.has_matrices
            && arguments.file.is_none()
            && !arguments.matrices
        {
            if left_out.last() != Some(&one.name.as_str()) {
                left_out.push(&one.name);
            }
            continue;
        }
        let compiled = driver
            .compile(&shader, &one.name)
            .map_err(|error| format!("{}: {error}", at()))?;
        if arguments.asm {
            return show(&format!("{}\n", compiled.assembly.trim_end()));
        }
        let figures = Figures::of(&compiled).map_err(|error| format!("{}: {error}", at()))?;
        if figures.lds < shader.workgroup_bytes {
            return Err(format!(
                "{}: the driver sets aside {} bytes of workgroup memory for {}",
                at(),
                figures.lds,
                shader.workgroup_bytes
            ));
        }
        rows.push(Row {
            kernel: one.name.clone(),
            remark: one.remark,
            rules: one.rules.clone(),
            configuration: one.configuration.clone(),
            known: one.known,
            figures,
        });
    }
    if arguments.check && rows.is_empty() && !arguments.matrices {
        return Err("nothing that could be compiled was chosen, so nothing is checked".into());
    }
    if arguments.check {
        return Ok(check(gpu, &rows, &left_out));
    }
    let mut made_by = format!(
        "{}, naga {}, {}.",
        driver.version,
        naga_version()?,
        if arguments.checked {
            "with the runtime checks that wgpu has by default"
        } else {
            "without runtime checks"
        },
    );
    if !left_out.is_empty() {
        made_by += &format!(
            " Left out, since this Mesa has no cooperative matrices: {}.",
            left_out.join(", ")
        );
    }
    if rows.is_empty() {
        made_by += if arguments.matrices {
            " No kernel uses cooperative matrices."
        } else {
            " Nothing was compiled."
        };
    }
    let report = Report {
        gpu: title,
        made_by,
        rows,
    };
    if arguments.json {
        show(&format!("{:#}\n", report.json()))
    } else {
        show(&report.markdown())
    }
}

/// Prints. A reader that has seen enough (`head`) is no failure.
fn show(text: &str) -> Result<ExitCode, String> {
    use std::io::{ErrorKind, Write};
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(format!("standard output: {error}"))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// What this Mesa calls the GPU. It ends the process where it does not know a name, so another process asks.
fn family<'a>(icd: &std::path::Path, names: &[&'a str]) -> Result<&'a str, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("this program's own file: {error}"))?;
    for name in names {
        let probe = Command::new(&program)
            .args(["--probe", "--gpu", name, "--icd"])
            .arg(icd)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        if probe.status.success() {
            return Ok(name);
        }
        let said = String::from_utf8_lossy(&probe.stderr);
        if let Some(message) = said.lines().find_map(|line| line.strip_prefix("isa: ")) {
            return Err(message.to_owned());
        }
    }
    Err(format!(
        "{} knows no GPU named {}",
        icd.display(),
        names.join(" or ")
    ))
}

/// A text to compile, and what it is called.
struct Chosen {
    name: String,
    remark: &'static str,
    rules: String,
    configuration: String,
    source: String,
    clears_memory: bool,
    known: Option<&'static Known>,
}

fn from_file(file: &std::path::Path, entry: &str) -> Result<Chosen, String> {
    Ok(Chosen {
        name: entry.to_owned(),
        remark: "",
        rules: String::new(),
        configuration: String::new(),
        source: std::fs::read_to_string(file)
            .map_err(|error| format!("{}: {error}", file.display()))?,
        // As WGSL promises; a kernel of the crate says whether it can do without.
        clears_memory: true,
        known: None,
    })
}

/// The configurations of the table that the arguments choose.
fn from_table(arguments: &Arguments, gpu: &str) -> Result<Vec<Chosen>, String> {
    for name in &arguments.kernel {
        if wgpu_attention::kernels::find(name).is_none() {
            let names: Vec<_> = KERNELS.iter().map(|kernel| kernel.name).collect();
            return Err(format!(
                "no kernel {name:?}; there are: {}",
                names.join(", ")
            ));
        }
    }
    let wanted = arguments
        .config
        .iter()
        .map(|word| constant(word))
        .collect::<Result<Vec<_>, _>>()?;
    let mut chosen = Vec::new();
    for kernel in KERNELS {
        if !arguments.kernel.is_empty() && !arguments.kernel.iter().any(|name| name == kernel.name)
        {
            continue;
        }
        let all = (kernel.configurations)();
        let (first, last) = (all.first().map(rules), all.last().map(rules));
        for configuration in &all {
            let own = Some(rules(configuration));
            let has = |(name, value): &(&str, u32)| {
                configuration
                    .consts
                    .iter()
                    .any(|(own, number)| own == name && number == value)
            };
            let is_bf16 = |(name, value): &(&str, u32)| name.ends_with("_TYPE") && *value == 2;
            let names_type = wanted.iter().any(|(name, _)| name.ends_with("_TYPE"));
            let shown = arguments.all
                || arguments.check
                || names_type
                || !configuration.consts.iter().any(is_bf16);
            let has_rules = arguments
                .rules
                .iter()
                .all(|rule| rules(configuration).contains(&rule.as_str()));
            let ruled = if !arguments.rules.is_empty() {
                has_rules
            } else {
                arguments.all || own == first || (arguments.check && own == last)
            };
            if arguments.check && !for_gpus(kernel, configuration) {
                continue; // it may spill here
            }
            // Unasked, neither kernels for CPU adapters nor what reads operands that begin anywhere.
            let anywhere = configuration
                .rules
                .iter()
                .any(|rule| rule.name.ends_with("_any"));
            let unasked = arguments.kernel.is_empty() && !arguments.check && !arguments.all;
            if unasked && (anywhere || !for_gpus(kernel, configuration)) {
                continue;
            }
            if shown && ruled && wanted.iter().all(has) {
                chosen.push(choose(gpu, kernel, configuration)?);
            }
        }
    }
    if chosen.is_empty() {
        let wanted = [&arguments.config[..], &arguments.rules[..]]
            .concat()
            .join(", ");
        return Err(format!("no configuration has {wanted}"));
    }
    Ok(chosen)
}

/// `NAME=VALUE`.
fn constant(word: &str) -> Result<(&str, u32), String> {
    let wrong = || format!("--config {word:?}: expected NAME=VALUE, a whole number");
    let (name, value) = word.split_once('=').ok_or_else(wrong)?;
    Ok((name.trim(), value.trim().parse().map_err(|_| wrong())?))
}

/// The rules that a configuration links in. (Other fragments come with its constants.)
fn rules(configuration: &Configuration) -> Vec<&str> {
    configuration
        .rules
        .iter()
        .filter_map(|rule| rule.name.strip_prefix("rules/"))
        .collect()
}

/// Whether a configuration is for GPUs. Fewer invocations than the smallest wave has lanes are for CPU adapters.
fn for_gpus(kernel: &Kernel, configuration: &Configuration) -> bool {
    kernel.form == Form::Tiled && (kernel.invocations)(configuration) >= 32
}

fn choose(gpu: &str, kernel: &Kernel, configuration: &Configuration) -> Result<Chosen, String> {
    let source = kernel
        .assemble(configuration)
        .map_err(|error| format!("{} [{configuration}]: {error}", kernel.name))?;
    let mut constants = configuration.clone();
    constants
        .rules
        .retain(|rule| !rule.name.starts_with("rules/"));
    Ok(Chosen {
        name: kernel.name.to_owned(),
        remark: if kernel.form == Form::Lanes {
            " (for CPU adapters)"
        } else {
            ""
        },
        rules: rules(configuration).join(", "),
        configuration: constants.to_string(),
        source,
        clears_memory: kernel.needs_cleared_memory,
        known: KNOWN
            .iter()
            .find(|known| known.covers(gpu, kernel.name, configuration)),
    })
}

/// Prints what spills and should not, and what should and does not.
fn check(gpu: &str, rows: &[Row], left_out: &[&str]) -> ExitCode {
    let mut wrong = 0;
    let mut known_ones = 0;
    for row in rows {
        let name = format!(
            "{gpu}: {} [{}; {}]",
            row.kernel, row.configuration, row.rules
        );
        match (row.known, row.figures.fits()) {
            (None, true) => {}
            (Some(_), false) if row.figures.spills_sgprs_only() => known_ones += 1,
            (_, false) => {
                wrong += 1;
                println!("{name} SPILLS {}", row.figures.spills());
            }
            (Some(_), true) => {
                wrong += 1;
                println!("{name} DOES NOT SPILL, and tools/isa/src/known.rs says that it does");
            }
        }
    }
    for known in KNOWN {
        let spilling = rows
            .iter()
            .filter(|row| row.known.is_some_and(|own| std::ptr::eq(own, known)));
        let spilling = spilling.count();
        if spilling > 0 {
            let constants: Vec<String> = known
                .constants
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            println!(
                "{gpu}: {} [{}]: {spilling} known to spill: {}",
                known.kernel,
                constants.join(" "),
                known.reason
            );
        }
    }
    for kernel in left_out {
        println!("{gpu}: {kernel} NOT CHECKED: this Mesa has no cooperative matrices");
    }
    println!(
        "{gpu}: {} configurations, {wrong} wrong, {known_ones} known to spill",
        rows.len()
    );
    if wrong > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// The version of naga that this workspace is built with.
fn naga_version() -> Result<String, String> {
    include_str!("../../../Cargo.lock")
        .split("[[package]]")
        .find(|package| package.contains("\nname = \"naga\"\n"))
        .and_then(|package| {
            package
                .lines()
                .find_map(|line| line.strip_prefix("version = "))
        })
        .map(|version| version.trim_matches('"').to_owned())
        .ok_or_else(|| "Cargo.lock does not name naga".into())
}
