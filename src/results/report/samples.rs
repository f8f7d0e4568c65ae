//! Runs for tests, made up.

use crate::results::{
    Adapter, CaseResult, Clock, LabelledRun, Limits, MeasuredCase, MeasuredPeaks, Outcome,
    ResultFile, Run, Settings, Times, labelled,
};
use std::collections::BTreeMap;

/// A run on an adapter of that number: attention of three lengths and one of another type, decoding, projections, what is wrong, and what
/// does not fit.
pub(super) fn file(number: usize) -> ResultFile {
    let settings = Settings {
        quick: false,
        cases: Vec::new(),
        shapes: Vec::new(),
        kernel: None,
        form: "auto".into(),
        tiers: "auto".into(),
        samples: 30,
        rounds: 2,
    };
    let mut file = ResultFile::new("2026-11-30T12:00:00Z".into(), settings);
    file.complete = true;
    let speed = 1.0 + number as f64;
    let mut cases = Vec::new();
    for length in [128, 1024, 4096] {
        let name = format!("attention-causal-t{length}-h12-d64-f32");
        cases.push(case(&name, "attention", "q_len", length, speed));
    }
    let other = "attention-causal-t1024-h12-d64-f16";
    cases.push(case(other, "attention", "q_len", 1024, speed));
    for length in [1024, 4096] {
        let name = format!("decode-k{length}-h12-d64-f32");
        cases.push(case(&name, "decode", "kv_len", length, speed));
    }
    cases.push(case(
        "linear-r128-768x2304-f32",
        "linear",
        "rows",
        128,
        speed,
    ));
    let mut wrong = case(
        "layer-causal-b1-t128-768x768-h12-f32",
        "layer",
        "tokens",
        128,
        speed,
    );
    wrong.outcome = Outcome::Wrong {
        kernels: vec!["linear_tiled".into()],
        reason: "row 3 is off by 1.5 <b>".into(),
    };
    cases.push(wrong);
    let mut refused = case("linear-r4096-4096x4096-f32", "linear", "rows", 4096, speed);
    refused.outcome = Outcome::Refused {
        reason: "needs more memory".into(),
    };
    cases.push(refused);
    file.runs.push(Run {
        adapter: Adapter {
            name: format!("Adapter {number}"),
            backend: "vulkan".into(),
            device_type: "DiscreteGpu".into(),
            driver: "driver".into(),
            driver_info: "1.2.3".into(),
            vendor: 1,
            device: 2,
            tiers: vec!["half".into()],
            limits: Limits {
                max_storage_buffer_binding_size: 1 << 30,
                max_buffer_size: 1 << 30,
                max_compute_workgroup_storage_size: 32768,
                max_compute_invocations_per_workgroup: 1024,
                max_compute_workgroups_per_dimension: 65535,
                max_storage_buffers_per_shader_stage: 8,
                min_subgroup_size: 32,
                max_subgroup_size: 32,
            },
        },
        peaks: MeasuredPeaks {
            f32_flops_per_second: 20e12 * speed,
            f16_flops_per_second: Some(38e12 * speed),
            matrix_flops_per_second: None,
            bytes_per_second: 8e11 * speed,
            dispatch_s: 2e-6,
            submission_s: 2e-5,
            buffer_bytes: 512 << 20,
            forms: Vec::new(),
            after: Vec::new(),
        },
        tuned_problems: None,
        left_out: vec!["attention-causal-t16384-h12-d64-f32".into()],
        cases,
    });
    file
}

fn case(name: &str, kind: &str, size: &str, length: u64, speed: f64) -> CaseResult {
    let (flops, bytes) = match kind {
        "decode" => (length * 3072, length * 6144),
        _ => (length * length * 1536, length * 12288),
    };
    let seconds = (5e-6 + flops as f64 / 8e12 + bytes as f64 / 5e11) / speed;
    let times = Times::of(vec![vec![seconds; 3]; 2]);
    CaseResult {
        name: name.into(),
        variant: None,
        kind: kind.into(),
        element: "f32".into(),
        sizes: BTreeMap::from([(size.to_string(), length)]),
        causal: Some(true),
        flops,
        bytes,
        outcome: match times {
            None => Outcome::Failed {
                reason: "no times".into(),
            },
            Some(times) => Outcome::Measured(Box::new(MeasuredCase {
                kernels: vec![format!("{kind}_tiled")],
                tier: "plain".into(),
                operand_sets: 1,
                first_s: 0.1,
                checked: 100,
                max_error: 1e-6,
                calls_per_sample: 10,
                clock: Clock::Gpu,
                no_gpu_time: None,
                wall: times.clone(),
                gpu: Some(times),
                flops_per_second: flops as f64 / seconds,
                bytes_per_second: bytes as f64 / seconds,
                bound: Some("f32".into()),
                share_of_peak: Some(flops as f64 / seconds / (20e12 * speed)),
            })),
        },
    }
}

/// As many files of a run each.
pub(super) fn of_runs(number: usize) -> Vec<(String, ResultFile)> {
    let files = (0..number).map(|at| (format!("{at}.json"), file(at)));
    files.collect()
}

pub(super) fn labels(files: &[(String, ResultFile)]) -> Vec<LabelledRun<'_>> {
    labelled(files)
}
