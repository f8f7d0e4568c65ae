//! The table of cases: names, operations, and that what is measured computes what the reference does; clocks and peaks on the
//! adapter under test.
#![allow(clippy::unwrap_used, clippy::panic)] // A test may end so.

mod support;

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use support::gpu;
use wgpu_attention::bench::{
    Bound, CASES, Layout, MeasureOptions, Peaks, PrepareOptions, Prepared, Work, expect_writable,
    measure, save, select,
};
use wgpu_attention::{ElementType, Error, Form, wgpu};

/// GPU tests of this file take turns: they measure time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn names_are_unique_and_stay() {
    let names: Vec<String> = CASES.iter().map(|case| case.work.name()).collect();
    let unique: HashSet<&String> = names.iter().collect();
    assert_eq!(unique.len(), names.len(), "{names:?}");
    for name in [
        "attention-causal-t1024-h12-d64-f32",
        "attention-full-t1024-h12-d64-f32",
        "attention-causal-t1024-h12-d64-f32-fused",
        "attention-causal-t512-h32kv8-d128-f32",
        "decode-k16384-h12-d64-f32",
        "linear-r1024-768x2304-f32",
        "layer-causal-b5-t6-3x18-h2-f32",
        "layer-causal-b1-t1024-768x768-h12-f32",
    ] {
        assert!(names.iter().any(|own| own == name), "{name}");
    }
}

/// A name says everything: it can be given where a shape is asked for.
#[test]
fn a_name_is_read_back_and_nothing_else_is() {
    for case in CASES {
        assert_eq!(case.work.name().parse::<Work>().unwrap(), case.work);
    }
    for name in [
        "attention-full-t7-h6kv3-d5-bf16-fused",
        "decode-k1-h1-d256-f16",
        "linear-r1-2x3-f32",
        "layer-causal-b2-t3-4x6-h3-f32",
    ] {
        assert_eq!(name.parse::<Work>().unwrap().name(), name);
    }
    for name in [
        "",
        "attention",
        "attention-causal-t0-h1-d1-f32",
        "attention-causal-t-1-h1-d1-f32",
        "attention-causal-t01-h1-d1-f32",
        "attention-causal-t+1-h1-d1-f32",
        "attention-causal-t1-h2kv2-d1-f32",
        "attention-causal-t1-h1-d1-f64",
        "attention-causal-t1-h1-d1-f32-fused-",
        "attention-causal-t99999999999999999999-h1-d1-f32",
        "decode-k1-h1-d1",
        "linear-r1-2x3-f16",
        "linear-r1-2x3x4-f32",
        "layer-full-b1-t1-1x1-h1-f32",
        "Attention-causal-t1-h1-d1-f32",
        " decode-k1-h1-d1-f32",
    ] {
        let error = name.parse::<Work>().unwrap_err();
        assert!(matches!(error, Error::Parameter { .. }), "{name}: {error}");
    }
}

fn attention(causal: bool, tokens: usize, heads: usize, kv_heads: usize) -> Work {
    Work::Attention {
        causal,
        tokens,
        heads,
        kv_heads,
        head_dim: 64,
        element: ElementType::F32,
        layout: Layout::HeadMajor,
    }
}

/// modular/modular#5557: causal work counted as full. Numbers by hand.
#[test]
fn operations_and_bytes_are_counted_once() {
    assert_eq!(attention(false, 1024, 8, 8).flops(), 2_147_483_648);
    assert_eq!(attention(true, 1024, 8, 8).flops(), 1_074_790_400);
    assert_eq!(attention(true, 1, 1, 1).flops(), 256);
    assert_eq!(attention(true, 2, 1, 1).flops(), 768);
    assert_eq!(attention(true, 3, 1, 1).flops(), 1536);
    // q and out of 8 heads, k and v of 2.
    assert_eq!(attention(true, 10, 8, 2).bytes(), 4 * 64 * 10 * (16 + 4));
    let decode = Work::Decode {
        keys: 100,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        element: ElementType::F16,
    };
    assert_eq!(decode.flops(), 4 * 8 * 64 * 100);
    assert_eq!(decode.bytes(), 2 * 64 * (16 + 4 * 100));
    let linear = Work::Linear {
        rows: 10,
        d_in: 20,
        d_out: 30,
    };
    assert_eq!((linear.flops(), linear.bytes()), (12_000, 4 * 1100));
    let layer = Work::Layer {
        batch: 2,
        tokens: 3,
        d_in: 5,
        d_out: 8,
        heads: 2,
    };
    // Projections of 6 rows, and 6 pairs for each head and item.
    assert_eq!(layer.flops(), 2 * 6 * (5 * 24 + 8 * 8) + 2 * 4 * 2 * 4 * 6);
    assert_eq!(layer.bytes(), 4 * (6 * (5 + 8) + 5 * 24 + 64));
    // A caller's sizes may be anything.
    let huge = attention(true, usize::MAX, usize::MAX, 0);
    assert_eq!(huge.flops(), u64::MAX);
    assert_eq!(huge.bytes(), u64::MAX);
    assert!(huge.reduced().name().contains("t97-"));
}

#[test]
fn cases_are_chosen_by_parts_of_names_and_by_what_an_adapter_can() {
    let words =
        |list: &[&str]| -> Vec<String> { list.iter().map(|word| word.to_string()).collect() };
    let (all, none) = select(&[], false, false);
    assert_eq!((all.len(), none.len()), (CASES.len(), 0));
    let (here, left_out) = select(&[], false, true);
    assert_eq!(here.len() + left_out.len(), CASES.len());
    assert!(here.iter().all(|case| case.software) && left_out.iter().all(|case| !case.software));
    let (quick, _) = select(&[], true, false);
    assert!(quick.iter().all(|case| case.quick) && quick.len() < CASES.len());
    let (some, _) = select(&words(&["linear-", "decode-k1024"]), false, false);
    assert!(some.iter().all(|case| {
        let name = case.work.name();
        name.contains("linear-") || name.contains("decode-k1024")
    }));
    assert!(some.len() > 3);
    // A whole name takes what is too long for a CPU.
    let long = "attention-causal-t16384-h12-d64-f32";
    let (taken, left_out) = select(&words(&[long]), true, true);
    assert_eq!((taken.len(), left_out.len()), (1, 0));
    let (taken, left_out) = select(&words(&["t16384-"]), false, true);
    assert_eq!((taken.len(), left_out.len()), (0, 1));
}

/// Every case at a reduced size, all of its result, by the same code that the measured one goes through; and what the plan
/// counts is what the table counts.
#[test]
fn every_case_computes_what_the_reference_does() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let mut checked = 0;
    for case in CASES {
        let work = case.work.reduced();
        let options = PrepareOptions::default();
        let prepared = Prepared::new(&gpu, &work, &options).unwrap();
        let comparison = prepared.check().unwrap();
        assert!(comparison.passed(), "{}: {comparison}", work.name());
        let outputs = match work {
            Work::Attention {
                tokens,
                heads,
                head_dim,
                ..
            } => tokens * heads * head_dim,
            Work::Decode {
                heads, head_dim, ..
            } => heads * head_dim,
            Work::Linear { rows, d_out, .. } => rows * d_out,
            Work::Layer {
                batch,
                tokens,
                d_out,
                ..
            } => batch * tokens * d_out,
        };
        assert_eq!(comparison.compared, outputs, "{}", work.name());
        let planned: u64 = prepared.plans().iter().map(|plan| plan.flops).sum();
        assert_eq!(planned, work.flops(), "{}", work.name());
        assert!(!prepared.kernels().is_empty());
        checked += 1;
    }
    assert_eq!(checked, CASES.len());
}

/// Where the whole result is too much for the reference, rows of it are checked, the last one among them.
#[test]
fn a_large_case_is_checked_on_rows() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    for work in [
        attention(true, 700, 4, 2),
        Work::Linear {
            rows: 300,
            d_in: 512,
            d_out: 400,
        },
        Work::Layer {
            batch: 1,
            tokens: 200,
            d_in: 256,
            d_out: 256,
            heads: 4,
        },
    ] {
        let prepared = Prepared::new(&gpu, &work, &Default::default()).unwrap();
        let comparison = prepared.check().unwrap();
        assert!(comparison.passed(), "{}: {comparison}", work.name());
        assert!(comparison.compared > 300, "{}", work.name());
    }
}

/// A result that is not the reference's is not taken for it: a check that cannot fail is a defect.
#[test]
fn a_wrong_result_is_told() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let mut seen = HashSet::new();
    for case in CASES {
        let work = case.work.reduced();
        // One of each kind and type is enough.
        if !seen.insert((work.kind(), work.element())) {
            continue;
        }
        let prepared = Prepared::new(&gpu, &work, &Default::default()).unwrap();
        let right = prepared.run().unwrap();
        assert!(
            prepared.compare(&right).unwrap().passed(),
            "{}",
            work.name()
        );
        let last = right.len() - 1;
        for at in [0, last / 2, last] {
            for wrong in [right[at] * 1.02 + 1e-3, f32::NAN, -right[at] - 1e-3] {
                let mut got = right.clone();
                got[at] = wrong;
                let comparison = prepared.compare(&got).unwrap();
                assert_eq!(comparison.failing, 1, "{}: {comparison}", work.name());
            }
        }
        // Rows that belong to others, and a result that is too short.
        let mut turned = right.clone();
        turned.rotate_left(1);
        assert!(!prepared.compare(&turned).unwrap().passed());
        let short = prepared.compare(&right[..last]);
        assert!(matches!(short, Err(Error::Shape { .. })));
    }
    assert!(seen.len() >= 6, "{seen:?}");
}

/// Successive calls of a case that moves memory have operands of their own.
#[test]
fn working_sets_are_as_large_as_asked_for() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let work = Work::Decode {
        keys: 300,
        heads: 2,
        kv_heads: 2,
        head_dim: 32,
        element: ElementType::F32,
    };
    let mut options = PrepareOptions::default();
    let prepared = Prepared::new(&gpu, &work, &options).unwrap();
    assert_eq!(prepared.sets(), 1);
    options.working_set = 5 * work.bytes() - 1;
    let prepared = Prepared::new(&gpu, &work, &options).unwrap();
    assert_eq!(prepared.sets(), 5);
    assert!(prepared.check().unwrap().passed());
}

#[test]
fn what_is_asked_for_by_form_is_measured_in_that_form() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    for (form, ending) in [(Form::Tiled, "tiled"), (Form::Lanes, "lanes")] {
        let mut options = PrepareOptions::default();
        options.form = Some(form);
        let work = attention(true, 40, 2, 2);
        let prepared = Prepared::new(&gpu, &work, &options).unwrap();
        assert!(prepared.kernels()[0].ends_with(ending), "{form:?}");
        assert!(prepared.check().unwrap().passed());
    }
}

fn short() -> MeasureOptions {
    MeasureOptions {
        samples: 4,
        budget: Duration::from_millis(50),
        warm_up: Duration::from_millis(10),
        sample: Duration::from_millis(2),
    }
}

#[test]
fn a_measurement_has_samples_of_wall_time_and_gpu_time_or_a_reason() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let work = attention(true, 128, 2, 2);
    let prepared = Prepared::new(&gpu, &work, &Default::default()).unwrap();
    let measured = measure(&gpu, &short(), &mut prepared.recorder()).unwrap();
    let samples = measured.wall.samples.len();
    assert!((3..=4).contains(&samples), "{samples}");
    assert!(measured.wall.samples.iter().all(|seconds| *seconds > 0.0));
    let own = measured.best();
    assert!(own.p10 <= own.median && own.median <= own.p90);
    match &measured.gpu {
        Ok(gpu) => assert_eq!(gpu.samples.len(), samples),
        Err(reason) => assert!(!reason.to_string().is_empty()),
    }
}

/// A call that takes longer is measured as longer.
#[test]
fn a_measurement_tells_much_work_from_little() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let seconds = |tokens| {
        let prepared = Prepared::new(&gpu, &attention(true, tokens, 2, 2), &Default::default());
        let prepared = prepared.unwrap();
        let measured = measure(&gpu, &short(), &mut prepared.recorder()).unwrap();
        measured.best().median
    };
    // 64 times the pairs.
    let (little, much) = (seconds(64), seconds(512));
    assert!(much > 2.0 * little, "{little} {much}");
}

#[test]
fn peaks_are_measured_in_every_form() {
    let _turn = turn();
    let Some(gpu) = gpu() else { return };
    let peaks = Peaks::measure(&gpu).unwrap();
    let (compute, memory) = (
        peaks.best(Bound::F32).unwrap(),
        peaks.best(Bound::Memory).unwrap(),
    );
    // Anything that computes does more than that, and nothing more than a petaflop a second.
    assert!((1e8..1e15).contains(&compute.rate), "{}", compute.rate);
    assert!((1e8..1e14).contains(&memory.rate), "{}", memory.rate);
    assert!(peaks.forms.iter().all(|peak| peak.rate > 0.0));
    // Four kinds of chains, of f16 too where there is f16, and five of memory.
    let has_f16 = gpu.capabilities().offers(wgpu_attention::Tier::Half);
    assert_eq!(peaks.forms.len(), if has_f16 { 13 } else { 9 });
    assert_eq!(peaks.best(Bound::F16).is_some(), has_f16);
    assert!(peaks.dispatch_seconds > 0.0 && peaks.submission_seconds > 0.0);
    assert!(peaks.copied_bytes >= 1 << 20);
    let again = peaks.again(&gpu).unwrap();
    let forms: Vec<&str> = again.iter().map(|peak| peak.form.as_str()).collect();
    let half = peaks.best(Bound::F16).map(|half| half.form.as_str());
    let expected = [
        Some(compute.form.as_str()),
        half,
        Some(memory.form.as_str()),
    ];
    assert_eq!(forms, expected.into_iter().flatten().collect::<Vec<_>>());
    assert!(
        gpu.adapter_info().device_type != wgpu::DeviceType::Cpu || peaks.copied_bytes <= 128 << 20
    );
}

#[test]
fn a_report_is_not_written_over_another_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    expect_writable(&path, false).unwrap();
    save(&path, "first", false).unwrap();
    assert!(matches!(
        expect_writable(&path, false),
        Err(Error::Io { .. })
    ));
    expect_writable(&path, true).unwrap();
    assert!(matches!(
        save(&path, "second", false),
        Err(Error::Io { .. })
    ));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "first");
    save(&path, "second", true).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "second");
    let nowhere = folder.path().join("none").join("report.json");
    assert!(matches!(
        save(&nowhere, "text", true),
        Err(Error::Io { .. })
    ));
    // Nothing else is left behind.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
