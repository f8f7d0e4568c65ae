//! How kernels are dispatched: whole or cut into pieces, with wgpu's runtime checks or without. None of it shows in a result.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::time::Duration;
use support::Random;
use support::check::*;
use wgpu_attention::kernels::{Form, Kernel};
use wgpu_attention::{
    Alignment, Attention, AttentionProblem, AttentionRules, AttentionWeights, ElementType, Error,
    Gpu, GpuOptions, KvCache, LayerConfig, LayerWeights, Linear, LinearProblem, MatrixLayout,
    MultiHeadAttention, Plan, Projection, QkvWeights, Rotary, RotaryConfig, Rule, Tensor,
    TensorCopy, Timestamps, WeightsArguments, WeightsStage,
};

/// One piece of work: its bits, and the dispatches that its largest pass is cut into.
type Work = Box<dyn Fn(&Gpu) -> (Vec<u32>, u32)>;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn attention(form: Form, q_len: usize, kv_heads: usize, rules: AttentionRules) -> Work {
    let problem = AttentionProblem {
        kv_heads,
        kv_len: 200,
        value_dim: 18,
        form: Some(form),
        rules,
        ..AttentionProblem::new(2, 4, q_len, 20)
    };
    Box::new(move |gpu| {
        let data = random_operands(problem.clone(), &mut Random::new(3));
        let attention = Attention::new(gpu, problem.clone()).unwrap();
        let outputs = data.run_with(gpu, &attention).unwrap();
        let values = [outputs.out, outputs.lse].concat();
        (bits(&values), attention.plan().slices)
    })
}

fn weights() -> Work {
    let problem = AttentionProblem {
        rules: AttentionRules::causal(Alignment::TopLeft),
        ..AttentionProblem::new(1, 3, 20, 8)
    };
    Box::new(move |gpu| {
        let data = random_operands(problem.clone(), &mut Random::new(4));
        let uploaded = data.upload(gpu);
        let work = AttentionWeights::new(gpu, problem.clone(), WeightsStage::Weights).unwrap();
        let out = Tensor::empty(gpu, &[1, 3, 20, 20], ElementType::F32).unwrap();
        support::run(gpu, |encoder| {
            let arguments = WeightsArguments {
                q: &uploaded.q,
                k: &uploaded.k,
                weights: &out.view(),
                rules: uploaded.rules(),
            };
            work.encode(encoder, arguments).unwrap();
        });
        (bits(&out.read_blocking().unwrap()), work.plan().slices)
    })
}

fn linear(form: Form, tokens: usize) -> Work {
    let problem = LinearProblem {
        batch: 1,
        tokens,
        d_in: 33,
        d_out: 200,
        form: Some(form),
        few: None,
    };
    Box::new(move |gpu| {
        let mut random = Random::new(5);
        let mut tensor = |shape: &[usize]| {
            let values = random.normals(shape.iter().product());
            Tensor::from_slice(gpu, shape, &values).unwrap()
        };
        let (x, weight, bias) = (tensor(&[1, tokens, 33]), tensor(&[200, 33]), tensor(&[200]));
        let linear = Linear::new(gpu, problem).unwrap();
        let y = linear.forward(&x, &weight, Some(&bias)).unwrap();
        (bits(&y.read_blocking().unwrap()), linear.plan().slices)
    })
}

/// A layer with rotary embedding on a cache in pages: append, projections, attention.
fn cached_layer() -> Work {
    Box::new(|gpu| {
        let mut random = Random::new(6);
        let mut values = |count| random.normals(count);
        let (qkv, output, x) = (values(16 * 48), values(16 * 16), values(2 * 40 * 16));
        let matrix = |weight| Projection {
            weight,
            bias: None,
            layout: MatrixLayout::OutIn,
        };
        let rotary = Rotary::new(gpu, RotaryConfig::new(8, 64)).unwrap();
        let config = LayerConfig::new(16, 16, 2).causal(true);
        let weights = LayerWeights {
            qkv: QkvWeights::Fused(matrix(&qkv)),
            output: Some(matrix(&output)),
        };
        let layer = MultiHeadAttention::new(gpu, config, &weights).unwrap();
        let layer = layer.with_rotary(&rotary).unwrap();
        let mut cache = KvCache::new(gpu, layer.cache_config(2, 64).paged(5, 30)).unwrap();
        let x = Tensor::from_slice(gpu, &[2, 40, 16], &x).unwrap();
        let y = layer.step(&x, &mut cache).unwrap();
        (bits(&y.read_blocking().unwrap()), u32::MAX)
    })
}

fn copy() -> Work {
    Box::new(|gpu| {
        let from = Random::new(8).normals(6000);
        let from = Tensor::from_slice(gpu, &[60, 100], &from).unwrap();
        let to = Tensor::empty(gpu, &[100, 60], ElementType::F16).unwrap();
        let copy = TensorCopy::new(gpu).unwrap();
        support::run(gpu, |encoder| {
            let turned = from.view().permute(&[1, 0]).unwrap();
            copy.encode(encoder, &turned, &to.view()).unwrap();
        });
        let halves: Vec<half::f16> = to.read_blocking().unwrap();
        (
            halves
                .iter()
                .map(|half| u32::from(half.to_bits()))
                .collect(),
            u32::MAX,
        )
    })
}

fn works() -> Vec<(String, Work)> {
    let causal = || AttentionRules::causal(Alignment::BottomRight);
    let capped = || AttentionRules {
        softcap: Some(5.0),
        ..causal()
    };
    let mut works = vec![
        ("weights".to_string(), weights()),
        ("a layer on a cache".into(), cached_layer()),
        ("copy".into(), copy()),
    ];
    for form in [Form::Tiled, Form::Lanes] {
        works.push((
            format!("{form:?} attention"),
            attention(form, 70, 2, causal()),
        ));
        works.push((
            format!("{form:?} attention, softcap"),
            attention(form, 70, 4, capped()),
        ));
        works.push((
            format!("{form:?} few queries"),
            attention(form, 2, 2, causal()),
        ));
        works.push((
            format!("{form:?} single queries"),
            attention(form, 1, 4, causal()),
        ));
        works.push((format!("{form:?} linear"), linear(form, 90)));
        works.push((format!("{form:?} linear, few rows"), linear(form, 3)));
    }
    works
}

/// However short a dispatch may be, the bits are the same.
#[test]
fn results_do_not_depend_on_how_dispatches_are_cut() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for (name, work) in works() {
        let (whole, uncut) = work(&gpu);
        assert!(uncut == 1 || uncut == u32::MAX, "{name}: {uncut}");
        // As many dispatches as workgroups; and a few, whose number does not divide theirs.
        for longest in [Duration::from_nanos(1), Duration::from_micros(20)] {
            let (cut, slices) = work(&gpu.with_longest_dispatch(longest));
            if longest.as_nanos() == 1 {
                assert!(slices > 1, "{name} was not cut");
            }
            let same = if cut == whole {
                Ok(())
            } else {
                Err("other bits".to_string())
            };
            failures.note(format!("{name}, at most {longest:?}"), same);
        }
    }
    failures.report(2 * 15);
}

/// The work is cut by the rate that is known, into pieces of about the same size, and not where it is short.
#[test]
fn plans_are_cut_by_rate_and_bound() {
    let Some(gpu) = gpu() else { return };
    let problem = AttentionProblem::new(1, 12, 4096, 64);
    let plan_of = |flops_per_second, longest_dispatch| -> Plan {
        let capabilities = wgpu_attention::Capabilities {
            flops_per_second,
            longest_dispatch,
            ..gpu.capabilities().clone()
        };
        problem.plan(&capabilities).unwrap()
    };
    // 51.5 GFLOP.
    let second = Duration::from_secs(1);
    assert_eq!(plan_of(100_000_000_000, second).slices, 1);
    assert_eq!(plan_of(10_000_000_000, second).slices, 6);
    assert_eq!(plan_of(10_000_000_000, second / 2).slices, 11);
    let plan = plan_of(1, Duration::ZERO);
    assert_eq!(plan.slices, 256);
    assert!(
        plan_of(10_000_000_000, second)
            .to_string()
            .contains("in 6 dispatches")
    );
    assert_eq!(plan_of(u64::MAX, Duration::MAX).slices, 1);
}

/// A pass that is cut is timed as one.
#[test]
fn a_cut_pass_has_one_span() {
    let Some(gpu) = gpu() else { return };
    if !gpu.capabilities().timestamps {
        assert!(matches!(
            Timestamps::new(&gpu, 1),
            Err(Error::MissingFeature { .. })
        ));
        return;
    }
    let gpu = gpu.with_longest_dispatch(Duration::from_nanos(1));
    let problem = AttentionProblem::new(1, 2, 64, 8);
    let data = random_operands(problem.clone(), &mut Random::new(1));
    let uploaded = data.upload(&gpu);
    let attention = Attention::new(&gpu, problem).unwrap();
    let (_guard, out) = data.output(&gpu);
    let mut timestamps = Timestamps::new(&gpu, 4).unwrap();
    support::run(&gpu, |encoder| {
        attention
            .encode_timed(
                encoder,
                uploaded.arguments(&out),
                "cut",
                Some(&mut timestamps),
            )
            .unwrap();
        timestamps.resolve(encoder);
    });
    assert!(attention.plan().slices > 1 && attention.plan().passes() == 1);
    assert_eq!(timestamps.read_blocking().unwrap().len(), 1);
}

/// Kernels of this crate give the same bits with runtime checks and without, by pipelines of their own.
#[test]
fn results_do_not_depend_on_runtime_checks() {
    // A device of its own, since pipelines are counted.
    let Some(gpu) = support::open(&GpuOptions::default()) else {
        return;
    };
    let checked = gpu.with_runtime_checks(true);
    assert!(checked.runtime_checks() && !gpu.runtime_checks() && checked.same_as(&gpu));
    let mut failures = Failures::default();
    for (name, work) in works() {
        let (without, _) = work(&gpu);
        let before = gpu.pipeline_count();
        let (with, _) = work(&checked);
        assert!(gpu.pipeline_count() > before, "{name}: the same pipelines");
        let same = if with == without {
            Ok(())
        } else {
            Err("other bits".to_string())
        };
        failures.note(name, same);
    }
    failures.report(15);
}

/// A caller's kernel, rule or changed plan is checked whatever the handle says: the handle's choice makes no other pipeline of it.
#[test]
fn what_is_a_callers_is_always_checked() {
    // A device of its own, since pipelines are counted.
    let Some(gpu) = support::open(&GpuOptions::default()) else {
        return;
    };
    let problem = AttentionProblem::new(1, 3, 21, 12);
    let plan = problem.plan(gpu.capabilities()).unwrap();
    let own: &'static Kernel = plan.kernel;
    let copied: &'static Kernel = Box::leak(Box::new(own.clone()));
    let rule = Rule::new(
        "fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool { return key < 9u; }",
    )
    .unwrap();
    let ruled = AttentionProblem {
        rules: AttentionRules {
            rule: Some(rule),
            ..Default::default()
        },
        ..problem.clone()
    };
    let made = |gpu: &Gpu, problem: &AttentionProblem, change: &dyn Fn(&mut Plan)| {
        let mut plan = problem.plan(gpu.capabilities()).unwrap();
        change(&mut plan);
        let before = gpu.pipeline_count();
        Attention::from_plan(gpu, problem.clone(), plan).unwrap();
        gpu.pipeline_count() - before
    };
    let checked = gpu.with_runtime_checks(true);
    // Each is compiled once with checks, and there it is for a handle without.
    type Change<'a> = (&'a str, &'a AttentionProblem, &'a dyn Fn(&mut Plan));
    let changes: [Change<'_>; 4] = [
        ("a rule", &ruled, &|_| {}),
        ("a kernel of a caller's", &problem, &|plan| {
            plan.kernel = copied;
            plan.configuration.consts.push(("COPIED", 1));
        }),
        ("another constant", &problem, &|plan| {
            plan.configuration.consts.push(("UNUSED", 1))
        }),
        ("rules in another order", &problem, &|plan| {
            plan.configuration.rules.swap(0, 1)
        }),
    ];
    for (what, problem, change) in changes {
        assert_eq!(made(&checked, problem, change), 1, "{what}, checked");
        assert_eq!(
            made(&gpu, problem, change),
            0,
            "{what}, on a handle without checks"
        );
    }
    // More workgroups than there is work for would read and write past the operands: alone they make a plan a caller's.
    made(&checked, &problem, &|_| {});
    assert_eq!(made(&gpu, &problem, &|plan| plan.groups += 1), 0);
    made(&gpu, &problem, &|_| {});
    // Fewer are this crate's still.
    assert_eq!(made(&gpu, &problem, &|plan| plan.groups -= 1), 0);
}

/// Problems whose workgroups 32 bits do not count are refused by whatever plan they come with: kernels divide by them.
#[test]
fn plans_of_other_problems_do_not_wrap_around() {
    let Some(gpu) = gpu() else { return };
    let packed = |q_len, heads, kv_heads, decode| AttentionProblem {
        packed: true,
        kv_heads,
        decode,
        rules: AttentionRules::causal(Alignment::TopLeft),
        ..AttentionProblem::new(1, heads, q_len, 64)
    };
    for (small, large) in [
        (
            packed(1000, 256, 256, Some(false)),
            packed(1 << 29, 256, 256, Some(false)),
        ),
        (
            packed(1000, 256, 1, Some(true)),
            packed(1 << 29, 256, 1, Some(true)),
        ),
    ] {
        let plan = small.plan(gpu.capabilities()).unwrap();
        let refused = Attention::from_plan(&gpu, large, plan).unwrap_err();
        assert!(matches!(refused, Error::LimitExceeded { .. }), "{refused}");
    }
    // Weights of no keys have no rows to compute, however many there would be.
    let weights = |batch, heads, q_len, kv_len| AttentionProblem {
        kv_heads: 1,
        kv_len,
        ..AttentionProblem::new(batch, heads, q_len, 64)
    };
    let plan = weights(1, 4, 250, 8)
        .plan_weights(gpu.capabilities())
        .unwrap();
    assert_eq!(plan.groups, 1000);
    let empty = weights(32, 1 << 30, 1 << 28, 0);
    assert_eq!(empty.plan_weights(gpu.capabilities()).unwrap().groups, 0);
    let problem = AttentionProblem::new(1, 1, 64, 8);
    let plan = problem.plan(gpu.capabilities()).unwrap();
    for (parts, splits) in [(1 << 26, 1), (1, 1 << 26)] {
        let plan = Plan {
            parts,
            splits,
            ..plan.clone()
        };
        let refused = Attention::from_plan(&gpu, problem.clone(), plan).unwrap_err();
        assert!(matches!(refused, Error::Parameter { .. }), "{refused}");
    }
}
