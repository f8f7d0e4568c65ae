//! The schema of a file of results, and what is checked of one that is read.
//!
//! All times are seconds, all rates per second. docs/benchmarking.md describes every field.

use crate::bench::{Bound, Measured, Peak, Peaks, Spread, save};
use crate::replace_file::io_error;
use crate::{Error, Gpu, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The version of the file: another one where a field means something else or is gone. Fields may be added.
pub const SCHEMA: u32 = 2;

/// What the file says it is.
const WHAT: &str = "wgpu-attention bench";

/// The longest file that is read, in bytes. A run with every sample takes about 100 kB.
const MOST_BYTES: u64 = 64 << 20;

/// Runs of a file, and forms of a peak in it, at most: more than any machine has adapters, and any run has rounds.
const MOST_RUNS: usize = 256;
const MOST_FORMS: usize = 2048;

/// What one call of `bench` found: a run for each adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResultFile {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `wgpu-attention bench`.
    pub what: String,
    /// Whether everything that was to be measured is in it. An interrupted run is not.
    pub complete: bool,
    /// When it began, in UTC, ISO 8601.
    pub date: String,
    /// Of the crate.
    pub version: String,
    /// A number that changes with the text of any kernel.
    pub kernels: String,
    /// Where it ran.
    pub system: System,
    /// What was asked for.
    pub settings: Settings,
    /// One for each adapter.
    pub runs: Vec<Run>,
}

/// Operating system and processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct System {
    /// `linux`, `windows`, `macos`, and so on.
    pub os: String,
    /// `x86_64`, `aarch64`, and so on.
    pub architecture: String,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The quick set alone.
    pub quick: bool,
    /// Parts of names that chose the cases; all of them where there is none.
    pub cases: Vec<String>,
    /// Shapes beside the table.
    pub shapes: Vec<String>,
    /// The kernel that was asked for, or `all`.
    pub kernel: Option<String>,
    /// The form of the kernels that was asked for: `auto`, `tiled` or `lanes`.
    pub form: String,
    /// The tiers that were asked for: `auto`, `on` or `off`.
    pub tiers: String,
    /// Samples of a case and round at most.
    pub samples: u32,
    /// How often all cases were gone through.
    pub rounds: u32,
}

/// What was found on one adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// What it ran on.
    pub adapter: Adapter,
    /// What the adapter reaches at best.
    pub peaks: MeasuredPeaks,
    /// Problems whose plans a tuning file gave; none without one.
    pub tuned_problems: Option<usize>,
    /// Names of cases that were not measured because they are for GPUs alone.
    pub left_out: Vec<String>,
    /// The cases, in the order of the table.
    pub cases: Vec<CaseResult>,
}

/// An adapter, in its driver's own words.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adapter {
    /// Its name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub backend: String,
    /// `DiscreteGpu`, `IntegratedGpu`, `VirtualGpu`, `Cpu` or `Other`.
    #[serde(rename = "type")]
    pub device_type: String,
    /// The driver.
    pub driver: String,
    /// Its version, usually.
    pub driver_info: String,
    /// PCI vendor.
    pub vendor: u32,
    /// PCI device.
    pub device: u32,
    /// Faster tiers of arithmetic that qualified themselves: `half`, `matrices`.
    pub tiers: Vec<String>,
    /// What the device was opened with.
    pub limits: Limits,
}

/// Limits under WebGPU's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of a storage binding.
    pub max_storage_buffer_binding_size: u64,
    /// Bytes of a buffer.
    pub max_buffer_size: u64,
    /// Bytes of workgroup memory.
    pub max_compute_workgroup_storage_size: u64,
    /// Invocations of a workgroup.
    pub max_compute_invocations_per_workgroup: u64,
    /// Workgroups of an axis.
    pub max_compute_workgroups_per_dimension: u64,
    /// Storage buffers of a stage.
    pub max_storage_buffers_per_shader_stage: u64,
    /// Lanes of a subgroup at least; 0 without subgroups.
    pub min_subgroup_size: u32,
    /// Lanes of a subgroup at most; 0 without subgroups.
    pub max_subgroup_size: u32,
}

/// What the adapter reaches at best: the best form of each peak, and every form that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredPeaks {
    /// f32 multiply-adds, two operations each.
    pub f32_flops_per_second: f64,
    /// f16 multiply-adds, where the adapter has them.
    pub f16_flops_per_second: Option<f64>,
    /// Multiply-adds of f16 by matrix units with sums in f32, where the adapter has them.
    pub matrix_flops_per_second: Option<f64>,
    /// Bytes read and written.
    pub bytes_per_second: f64,
    /// A dispatch that does nothing.
    pub dispatch_s: f64,
    /// A submission with one such dispatch.
    pub submission_s: f64,
    /// Of each of the two buffers that copies were measured on.
    pub buffer_bytes: u64,
    /// Every form.
    pub forms: Vec<PeakForm>,
    /// The best forms once more, after the cases.
    pub after: Vec<PeakForm>,
}

/// One form of one peak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeakForm {
    /// `f32`, `f16`, `matrices` or `memory`.
    pub bound: String,
    /// The kernel and its constants, or what else.
    pub form: String,
    /// Operations or bytes, of the fastest tenth of the samples.
    pub rate_per_second: f64,
    /// By the wall's clock.
    pub wall: Times,
    /// By the GPU's clock, where it can be believed.
    pub gpu: Option<Times>,
}

/// A case and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseResult {
    /// Its name, which says its sizes: `attention-causal-t1024-h12-d64-f32`.
    pub name: String,
    /// The kernel or the tier that was asked for, where it was not left to the planner.
    pub variant: Option<String>,
    /// `attention`, `decode`, `linear` or `layer`.
    pub kind: String,
    /// What operands are stored as: `f32`, `f16` or `bf16`.
    #[serde(rename = "type")]
    pub element: String,
    /// `q_len`, `kv_len`, `heads`, `kv_heads`, `head_dim`, `batch`, `rows`, `d_in`, `d_out`: those that it has.
    pub sizes: BTreeMap<String, u64>,
    /// Whether a query sees only keys up to its own, where there are queries.
    pub causal: Option<bool>,
    /// Useful floating-point operations of a call, causal work counted once.
    pub flops: u64,
    /// Bytes that a call has to move at least.
    pub bytes: u64,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum Outcome {
    /// It was right, and this is what it took.
    Measured(Box<MeasuredCase>),
    /// The result is not the reference's: it was not timed.
    Wrong {
        /// The kernels of a call.
        kernels: Vec<String>,
        /// How far it is off.
        reason: String,
    },
    /// Something broke.
    Failed {
        /// What.
        reason: String,
    },
    /// It does not fit this adapter.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Whose time a case's figures are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// The GPU's own.
    Gpu,
    /// The wall's: encoding, submitting, waiting.
    Wall,
}

/// What a right case took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredCase {
    /// The kernels of a call, each once.
    pub kernels: Vec<String>,
    /// The arithmetic: `plain`, `half` or `matrices`.
    pub tier: String,
    /// Sets of operands, which successive calls take in turn.
    pub operand_sets: usize,
    /// Planning, compiling, making operands, and a first call with its check.
    pub first_s: f64,
    /// Elements that were held against the reference.
    pub checked: u64,
    /// The largest difference.
    pub max_error: f64,
    /// Calls of a sample by the wall's clock.
    pub calls_per_sample: u32,
    /// Whose time the rates and the share are made of.
    pub clock: Clock,
    /// Why there is no GPU time, where there is none.
    pub no_gpu_time: Option<String>,
    /// By the wall's clock.
    pub wall: Times,
    /// By the GPU's.
    pub gpu: Option<Times>,
    /// Useful operations by the median.
    pub flops_per_second: f64,
    /// Least bytes by the median.
    pub bytes_per_second: f64,
    /// The peak that allows the least: `f32`, `matrices` or `memory`.
    pub bound: Option<String>,
    /// The time that it allows, as a share of the time that was taken.
    pub share_of_peak: Option<f64>,
}

/// Samples of a time, and what they come to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The middle sample of all rounds.
    pub median_s: f64,
    /// A tenth of the samples lies below.
    pub p10_s: f64,
    /// A tenth of the samples lies above.
    pub p90_s: f64,
    /// The samples of each round, in the order in which they were taken.
    pub rounds_s: Vec<Vec<f64>>,
}

impl Times {
    /// Of the samples of each round; `None` where there is none, or one is no positive number.
    pub fn of(rounds_s: Vec<Vec<f64>>) -> Option<Self> {
        let all = rounds_s.concat();
        if all.iter().any(|seconds| *seconds <= 0.0) {
            return None;
        }
        let spread = Spread::of(all)?;
        Some(Times {
            median_s: spread.median,
            p10_s: spread.p10,
            p90_s: spread.p90,
            rounds_s,
        })
    }

    /// From a tenth to nine tenths of the samples, as a share of the median.
    pub fn relative_spread(&self) -> f64 {
        (self.p90_s - self.p10_s) / self.median_s.max(f64::MIN_POSITIVE)
    }

    /// What is wrong with times that were read.
    fn problem(&self) -> Option<String> {
        let own = Times::of(self.rounds_s.clone());
        let Some(own) = own.filter(|_| self.rounds_s.iter().all(|round| !round.is_empty())) else {
            return Some("rounds_s: expected positive numbers, one at least in each round".into());
        };
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs();
        let stated = [
            ("median_s", own.median_s, self.median_s),
            ("p10_s", own.p10_s, self.p10_s),
            ("p90_s", own.p90_s, self.p90_s),
        ];
        stated
            .iter()
            .find(|(_, own, stated)| !near(*own, *stated))
            .map(|(name, own, stated)| {
                format!("{name}: expected {own:e}, as rounds_s have it, got {stated:e}")
            })
    }
}

impl From<&Spread> for Times {
    fn from(spread: &Spread) -> Self {
        Times {
            median_s: spread.median,
            p10_s: spread.p10,
            p90_s: spread.p90,
            rounds_s: vec![spread.samples.clone()],
        }
    }
}

impl CaseResult {
    /// What it is matched by: its name, and behind an `@` the variant that was asked for.
    pub fn id(&self) -> String {
        match &self.variant {
            Some(variant) => format!("{}@{variant}", self.name),
            None => self.name.clone(),
        }
    }

    /// What was measured, if it was.
    pub fn measured(&self) -> Option<&MeasuredCase> {
        match &self.outcome {
            Outcome::Measured(measured) => Some(measured),
            _ => None,
        }
    }
}

impl MeasuredCase {
    /// GPU time where there is one, else wall time.
    pub fn best(&self) -> &Times {
        match (&self.gpu, self.clock) {
            (Some(gpu), Clock::Gpu) => gpu,
            _ => &self.wall,
        }
    }
}

impl Adapter {
    /// Name, backend and, for one that is a CPU underneath, that it is.
    pub fn describe(&self) -> String {
        let cpu = if self.is_software() { ", CPU" } else { "" };
        format!("{} ({}{cpu})", self.name, self.backend)
    }

    /// Driver and its version.
    pub fn describe_driver(&self) -> String {
        format!("{} {}", self.driver, self.driver_info)
            .trim()
            .into()
    }

    /// Whether it is a CPU underneath.
    pub fn is_software(&self) -> bool {
        self.device_type == "Cpu"
    }
}

impl From<&Gpu> for Adapter {
    fn from(gpu: &Gpu) -> Self {
        let info = gpu.adapter_info();
        let limits = gpu.capabilities();
        Adapter {
            name: info.name.clone(),
            backend: info.backend.to_str().into(),
            device_type: format!("{:?}", info.device_type),
            driver: info.driver.clone(),
            driver_info: info.driver_info.clone(),
            vendor: info.vendor,
            device: info.device,
            tiers: limits
                .qualified_tiers
                .iter()
                .map(|tier| tier.name().to_string())
                .collect(),
            limits: Limits {
                max_storage_buffer_binding_size: limits.max_binding_bytes,
                max_buffer_size: limits.max_buffer_bytes,
                max_compute_workgroup_storage_size: limits.max_workgroup_bytes,
                max_compute_invocations_per_workgroup: limits.max_invocations.into(),
                max_compute_workgroups_per_dimension: limits.max_groups_per_axis.into(),
                max_storage_buffers_per_shader_stage: limits.max_storage_buffers.into(),
                min_subgroup_size: limits.subgroup_sizes.0,
                max_subgroup_size: limits.subgroup_sizes.1,
            },
        }
    }
}

impl From<&Peak> for PeakForm {
    fn from(peak: &Peak) -> Self {
        let Measured { wall, gpu, .. } = &peak.measured;
        PeakForm {
            bound: peak.bound.to_string(),
            form: peak.form.clone(),
            rate_per_second: peak.rate,
            wall: wall.into(),
            gpu: gpu.as_ref().ok().map(Times::from),
        }
    }
}

impl MeasuredPeaks {
    /// What was measured before the cases, and what after them.
    pub fn new(peaks: &Peaks, after: &[Peak]) -> Self {
        let best = |bound| peaks.best(bound).map(|peak| peak.rate);
        MeasuredPeaks {
            f32_flops_per_second: best(Bound::F32).unwrap_or_default(),
            f16_flops_per_second: best(Bound::F16),
            matrix_flops_per_second: best(Bound::Matrices),
            bytes_per_second: best(Bound::Memory).unwrap_or_default(),
            dispatch_s: peaks.dispatch_seconds,
            submission_s: peaks.submission_seconds,
            buffer_bytes: peaks.copied_bytes,
            forms: peaks.forms.iter().map(PeakForm::from).collect(),
            after: after.iter().map(PeakForm::from).collect(),
        }
    }

    /// The rate of a peak by its name.
    pub fn rate(&self, bound: &str) -> Option<f64> {
        match bound {
            "f32" => Some(self.f32_flops_per_second),
            "f16" => self.f16_flops_per_second,
            "matrices" => self.matrix_flops_per_second,
            "memory" => Some(self.bytes_per_second),
            _ => None,
        }
    }
}

impl ResultFile {
    /// With no run yet.
    pub fn new(date: String, settings: Settings) -> Self {
        ResultFile {
            schema: SCHEMA,
            what: WHAT.into(),
            complete: false,
            date,
            version: env!("CARGO_PKG_VERSION").into(),
            kernels: crate::kernels::hash_of_all(),
            system: System {
                os: std::env::consts::OS.into(),
                architecture: std::env::consts::ARCH.into(),
            },
            settings,
            runs: Vec::new(),
        }
    }

    /// Reads a file, and believes nothing of it that was not checked.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be read; [`Error::Format`] if it is no such file, of another schema, too long, or holds times that
    /// are none.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let format = |problem: String| Error::Format {
            path: path.display().to_string(),
            problem,
        };
        let file = File::open(path).map_err(|error| io_error(path, error))?;
        let mut text = Vec::new();
        let read = file.take(MOST_BYTES + 1).read_to_end(&mut text);
        read.map_err(|error| io_error(path, error))?;
        if text.len() as u64 > MOST_BYTES {
            return Err(format(format!(
                "expected at most {MOST_BYTES} bytes, and it is longer; no run of bench is"
            )));
        }
        Self::parse(&text).map_err(format)
    }

    /// What a text holds, or what is wrong with it.
    fn parse(text: &[u8]) -> Result<Self, String> {
        /// What every version has.
        #[derive(Deserialize)]
        struct Begin {
            schema: Option<u64>,
            what: Option<String>,
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            return Err("it is empty: expected what `wgpu-attention bench --save` writes".into());
        }
        let no_json = |error: serde_json::Error| match error.classify() {
            serde_json::error::Category::Eof => format!("it ends too early: {error}"),
            serde_json::error::Category::Data => {
                format!("expected the fields of a result file: {error}")
            }
            _ => format!("it is no JSON: {error}"),
        };
        let begin: Begin = serde_json::from_slice(text).map_err(no_json)?;
        if begin.what.as_deref() != Some(WHAT) {
            return Err(format!(
                "expected a file of `wgpu-attention bench --save`, with \"what\": \"{WHAT}\""
            ));
        }
        if begin.schema != Some(SCHEMA.into()) {
            let got = begin
                .schema
                .map_or("none".into(), |schema| schema.to_string());
            return Err(format!(
                "expected schema {SCHEMA}, got {got}: measure again, or use the version of the program that wrote it"
            ));
        }
        let file: ResultFile = serde_json::from_slice(text).map_err(no_json)?;
        match file.problem() {
            Some(problem) => Err(problem),
            None => Ok(file),
        }
    }

    /// What is wrong with a file that has all fields.
    fn problem(&self) -> Option<String> {
        if self.runs.len() > MOST_RUNS {
            return Some(format!("runs: expected at most {MOST_RUNS}"));
        }
        for (number, run) in self.runs.iter().enumerate() {
            let at =
                |place: String, problem: String| Some(format!("runs[{number}].{place}.{problem}"));
            let positive = |value: f64| value.is_finite() && value > 0.0;
            let peaks = &run.peaks;
            for bound in ["f32", "f16", "matrices", "memory"] {
                if let Some(rate) = peaks.rate(bound).filter(|rate| !positive(*rate)) {
                    return at(
                        "peaks".into(),
                        format!("{bound}: expected a positive rate, got {rate}"),
                    );
                }
            }
            let costs = [peaks.dispatch_s, peaks.submission_s];
            if costs.iter().any(|cost| !cost.is_finite() || *cost < 0.0) {
                return at(
                    "peaks".into(),
                    "dispatch_s, submission_s: expected seconds".into(),
                );
            }
            for (place, forms) in [("forms", &peaks.forms), ("after", &peaks.after)] {
                if forms.len() > MOST_FORMS {
                    return at(
                        "peaks".into(),
                        format!("{place}: expected at most {MOST_FORMS}"),
                    );
                }
                for (form, own) in forms.iter().enumerate() {
                    if !positive(own.rate_per_second) {
                        let problem = "rate_per_second: expected a positive rate".into();
                        return at(format!("peaks.{place}[{form}]"), problem);
                    }
                    let times = std::iter::once(&own.wall).chain(&own.gpu);
                    if let Some(problem) = times.filter_map(Times::problem).next() {
                        return at(format!("peaks.{place}[{form}]"), problem);
                    }
                }
            }
            let mut ids = HashSet::new();
            for (case, own) in run.cases.iter().enumerate() {
                let place = format!("cases[{case}]");
                if !ids.insert(own.id()) {
                    return at(place, format!("name: {} is there twice", own.id()));
                }
                let Some(measured) = own.measured() else {
                    continue;
                };
                let times = std::iter::once(&measured.wall).chain(&measured.gpu);
                if let Some(problem) = times.filter_map(Times::problem).next() {
                    return at(place, problem);
                }
                if measured.clock == Clock::Gpu && measured.gpu.is_none() {
                    return at(
                        place,
                        "clock: expected \"wall\", since there is no GPU time".into(),
                    );
                }
                let more = [measured.first_s, measured.max_error];
                if more
                    .iter()
                    .any(|number| !number.is_finite() || *number < 0.0)
                {
                    return at(
                        place,
                        "first_s, max_error: expected numbers from 0 on".into(),
                    );
                }
                let rates = [measured.flops_per_second, measured.bytes_per_second];
                let share = measured.share_of_peak.unwrap_or(1.0);
                if !rates.iter().all(|rate| positive(*rate)) || !positive(share) {
                    let problem = "flops_per_second, bytes_per_second, share_of_peak: expected positive numbers";
                    return at(place, problem.into());
                }
            }
        }
        None
    }

    /// As text: what [`load`](Self::load) reads.
    pub fn to_json(&self) -> String {
        // (A structure of numbers, strings and lists always is JSON.)
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        format!("{text}\n")
    }

    /// Writes it as a whole or not at all.
    ///
    /// # Errors
    ///
    /// As [`bench::save`](save).
    pub fn save(&self, path: impl AsRef<Path>, replace: bool) -> Result<()> {
        save(path.as_ref(), &self.to_json(), replace)
    }
}

/// A run of a file, and what to call it beside the others.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelledRun<'a> {
    /// The adapter where that tells them apart, else the file's name, else both; no two have the same.
    pub label: String,
    /// The file that it is of.
    pub file: &'a ResultFile,
    /// The run.
    pub run: &'a Run,
}

/// The runs of files, each file with its name, under labels that tell them apart.
pub fn labelled(files: &[(String, ResultFile)]) -> Vec<LabelledRun<'_>> {
    let runs: Vec<(&str, &ResultFile, &Run)> = files
        .iter()
        .flat_map(|(name, file)| file.runs.iter().map(move |run| (name.as_str(), file, run)))
        .collect();
    let label = |(name, _, run): &(&str, &ResultFile, &Run), form: usize| match form {
        0 => run.adapter.describe(),
        1 => name.to_string(),
        _ => format!("{name}: {}", run.adapter.describe()),
    };
    let distinct = |form: usize| {
        let labels: HashSet<String> = runs.iter().map(|run| label(run, form)).collect();
        labels.len() == runs.len()
    };
    let form = (0..2).find(|form| distinct(*form)).unwrap_or(2);
    let mut taken = HashSet::new();
    // How far the numbers of a label have come.
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut labelled = Vec::new();
    for (at, (_, file, run)) in runs.iter().enumerate() {
        let own = label(&runs[at], form);
        let count = counts.entry(own.clone()).or_insert(0);
        let label = loop {
            *count += 1;
            let label = match *count {
                1 => own.clone(),
                number => format!("{own} ({number})"),
            };
            if taken.insert(label.clone()) {
                break label;
            }
        };
        labelled.push(LabelledRun { label, file, run });
    }
    labelled
}
