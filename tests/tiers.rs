//! Tiers of arithmetic that not every device has: whether they are right where they are, refused where they are not, and found out where
//! they are wrong.
//!
//! No test is skipped on an adapter that lacks a tier: it holds there that asking for it is refused.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::Random;
use support::check::*;
use wgpu_attention::Alignment::{BottomRight, TopLeft};
use wgpu_attention::kernels::{Form, Kernel, Operation, TILES_HALF, find};
use wgpu_attention::{
    AttentionProblem, AttentionRules, Capabilities, ElementType, Error, Gpu, GpuOptions, Plan,
    Qualification, Tier, Verdict, wgpu,
};

/// The adapter under test as it is opened, and with what it has qualified.
fn qualified() -> Option<(Turn, Gpu, Vec<Qualification>)> {
    static FOUND: std::sync::OnceLock<(Gpu, Vec<Qualification>)> = std::sync::OnceLock::new();
    let turn = gpu()?;
    let (gpu, found) = FOUND.get_or_init(|| turn.qualify_blocking().unwrap());
    Some((turn, gpu.clone(), found.clone()))
}

fn halves(heads: usize, q_len: usize, kv_len: usize, head_dim: usize) -> AttentionProblem {
    AttentionProblem {
        kv_len,
        tier: Some(Tier::Half),
        ..AttentionProblem::new(1, heads, q_len, head_dim).stored_as(ElementType::F16)
    }
}

/// Runs `check` with half-precision tiles; where the adapter has none, asking for them must be refused.
fn with_half(least: usize, check: impl Fn(&Gpu, &Subject, &mut Failures)) {
    let Some((_turn, gpu, found)) = qualified() else {
        return;
    };
    if !gpu.capabilities().offers(Tier::Half) {
        let refused = halves(1, 32, 32, 64).plan(gpu.capabilities());
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{refused:?}"
        );
        eprintln!("{} has no f16: refused as it must be", gpu.describe());
        return;
    }
    assert!(gpu.capabilities().has_qualified(Tier::Half), "{found:?}");
    let subject = kernels(Operation::Attention)
        .into_iter()
        .find(|subject| subject.kernel.form == Form::Tiled)
        .unwrap();
    let mut failures = Failures::default();
    check(&gpu, &subject, &mut failures);
    failures.report(least);
}

#[test]
fn a_tier_is_off_until_the_device_has_qualified_it() {
    let Some((turn, gpu, found)) = qualified() else {
        return;
    };
    let f16 = gpu.device().features().contains(wgpu::Features::SHADER_F16);
    assert_eq!(gpu.capabilities().offers(Tier::Half), f16);
    assert_eq!(found.iter().any(|one| one.tier == Tier::Half), f16);
    assert!(turn.capabilities().qualified_tiers.is_empty());
    for one in &found {
        eprintln!("{one}");
        assert!(one.passed(), "{one}");
        assert!(gpu.capabilities().has_qualified(one.tier));
        let Verdict::Right { problems, worst } = one.verdict else {
            panic!("{one}");
        };
        assert!(problems >= 6 && worst > 0.0 && worst <= 1.0, "{one}");
    }
    assert!(turn.same_as(&gpu), "one device");
    for tier in Tier::FASTER {
        let problem = AttentionProblem {
            tier: Some(tier),
            ..halves(1, 32, 32, 64)
        };
        // Before: refused, with what to do.
        let Err(Error::Unsupported { what, reason }) = problem.plan(turn.capabilities()) else {
            panic!("{tier} was planned before it was qualified");
        };
        assert_eq!(what, tier.to_string());
        let word = match turn.capabilities().offers(tier) {
            true => "Gpu::qualify",
            false => "SHADER_F16",
        };
        assert!(reason.contains(word), "{reason}");
        // After: planned exactly where it was found right.
        let planned = problem.plan(gpu.capabilities());
        assert_eq!(
            planned.is_ok(),
            gpu.capabilities().has_qualified(tier),
            "{planned:?}"
        );
        // A plan of somebody else's is refused by name where the device lacks the feature.
        let mut able = gpu.capabilities().clone();
        able.offered_tiers = Tier::FASTER.to_vec();
        able.qualified_tiers = Tier::FASTER.to_vec();
        let plan = problem.plan(&able).unwrap();
        let made = wgpu_attention::Attention::from_plan(&gpu, problem, plan);
        if gpu.capabilities().offers(tier) {
            assert!(made.is_ok(), "{made:?}");
        } else {
            assert!(
                matches!(made, Err(Error::MissingFeature { .. })),
                "{made:?}"
            );
        }
    }
}

/// Cooperative matrices are asked for by name, and a wrapped device offers them only where the adapter's sizes are told.
#[test]
fn experimental_features_are_asked_for_by_name() {
    let Some((turn, ..)) = qualified() else {
        return;
    };
    let matrices = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
    assert!(!turn.device().features().intersects(matrices));
    assert!(!turn.capabilities().offers(Tier::Matrices));
    let options = GpuOptions {
        experimental: true,
        ..Default::default()
    };
    let gpu = support::open(&options).unwrap();
    let has = gpu.device().features().contains(Tier::Matrices.features());
    assert!(has || !gpu.capabilities().offers(Tier::Matrices));
    let sixteen = wgpu::CooperativeMatrixProperties {
        m_size: 16,
        n_size: 16,
        k_size: 16,
        ab_type: wgpu::CooperativeScalarType::F16,
        cr_type: wgpu::CooperativeScalarType::F32,
        saturating_accumulation: false,
    };
    let features = Tier::Matrices.features();
    let defaults = Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu);
    let offers = |features, properties: &[_]| {
        let capabilities = defaults.clone().with_matrices(features, properties);
        capabilities.offers(Tier::Matrices)
    };
    assert!(offers(features, &[sixteen]));
    assert!(!offers(features, &[]));
    assert!(!offers(Tier::Half.features(), &[sixteen]));
    for other in [
        wgpu::CooperativeMatrixProperties {
            k_size: 8,
            ..sixteen
        },
        wgpu::CooperativeMatrixProperties {
            cr_type: wgpu::CooperativeScalarType::F16,
            ..sixteen
        },
    ] {
        assert!(!offers(features, &[other]));
    }
    // Said of a device that was opened without them it changes nothing.
    assert!(
        !turn
            .with_matrices(&[sixteen])
            .capabilities()
            .offers(Tier::Matrices)
    );
}

/// Planning is pure: a device that is not there may have qualified a tier.
#[test]
fn the_planner_takes_what_is_qualified_and_suits() {
    let mut capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu);
    capabilities.offered_tiers = vec![Tier::Half];
    let free = AttentionProblem {
        tier: None,
        ..halves(12, 256, 256, 64)
    };
    let half = |problem: &AttentionProblem, capabilities: &Capabilities| {
        let plan = problem.plan(capabilities).unwrap();
        let half = plan.configuration.rules.contains(&TILES_HALF);
        assert_eq!(half, plan.kernel.tier(&plan.configuration) == Tier::Half);
        assert_eq!(half, plan.reason.contains("half-precision"), "{plan}");
        half
    };
    assert!(!half(&free, &capabilities), "offered, not qualified");
    capabilities.qualified_tiers = vec![Tier::Half];
    assert!(half(&free, &capabilities));
    for other in [
        AttentionProblem {
            q_type: ElementType::F32,
            ..free.clone()
        },
        AttentionProblem {
            kv_type: ElementType::F32,
            ..free.clone()
        },
        free.clone().stored_as(ElementType::BF16),
        AttentionProblem {
            tier: Some(Tier::Plain),
            ..free.clone()
        },
        AttentionProblem {
            form: Some(Form::Lanes),
            ..free.clone()
        },
        AttentionProblem {
            q_len: 1,
            ..free.clone()
        },
    ] {
        assert!(!half(&other, &capabilities), "{other:?}");
    }
    let asked = |problem: AttentionProblem| AttentionProblem {
        tier: Some(Tier::Half),
        ..problem
    };
    assert!(half(
        &asked(AttentionProblem {
            q_len: 1,
            ..free.clone()
        }),
        &capabilities
    ));
    for refused in [
        free.clone().stored_as(ElementType::F32),
        AttentionProblem {
            form: Some(Form::Lanes),
            ..free.clone()
        },
        AttentionProblem {
            decode: Some(true),
            q_len: 1,
            ..free.clone()
        },
    ] {
        let refused = asked(refused).plan(&capabilities);
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{refused:?}"
        );
    }
    // On a CPU the lanes form suits; there it is taken where it is asked for.
    capabilities.device_type = wgpu::DeviceType::Cpu;
    assert!(!half(&free, &capabilities));
    assert!(half(&asked(free), &capabilities));
}

#[test]
fn half_precision_tiles_match_the_reference_around_every_edge() {
    with_half(60, |gpu, subject, failures| {
        let mut random = Random::new(7);
        let sizes = [
            (1, 1),
            (4, 4),
            (8, 32),
            (31, 33),
            (37, 27),
            (64, 64),
            (65, 96),
            (128, 97),
            (80, 128),
            (200, 192),
            (256, 256),
        ];
        for (number, (head_dim, value_dim)) in sizes.into_iter().cycle().take(66).enumerate() {
            let q_len = [1, 31, 32, 33, 63, 65, 130][number % 7];
            let kv_len = [1, 63, 64, 65, 127, 129][number / 2 % 6];
            let problem = AttentionProblem {
                batch: 1 + number % 2,
                kv_heads: 1 + number % 2,
                value_dim,
                out_type: [ElementType::F32, ElementType::F16, ElementType::BF16][number % 3],
                page_size: (number % 5 == 4).then_some(7),
                rules: AttentionRules {
                    causal: number % 4 == 1,
                    window_left: (number % 4 == 2).then_some(20),
                    alignment: Some([TopLeft, BottomRight][number % 2]),
                    ..Default::default()
                },
                ..halves(2, q_len, kv_len, head_dim)
            };
            let mut data = AttentionData {
                layout: LAYOUTS[number % LAYOUTS.len()],
                ..random_operands(problem, &mut random)
            };
            let [batch, _, _] = [data.problem.batch, q_len, kv_len];
            match number % 6 {
                1 => {
                    data = data.with_mask(
                        [batch, 1, q_len, kv_len],
                        random.bools(batch * q_len * kv_len),
                    )
                }
                3 => {
                    data =
                        data.with_bias([1, 2, q_len, kv_len], random.normals(2 * q_len * kv_len));
                    data.problem.rules.softcap = Some(2.0);
                }
                5 => data = data.with_sinks(random.normals(2)),
                _ => {}
            }
            let what = format!("{:?} {:?}", data.layout, data.problem);
            failures.note(what, data.prepare().check(gpu, subject));
        }
    });
}

#[test]
fn every_configuration_of_half_precision_tiles_matches_the_reference() {
    with_half(16, |gpu, subject, failures| {
        for (number, configuration) in (subject.kernel.configurations)().into_iter().enumerate() {
            if subject.kernel.tier(&configuration) != Tier::Half {
                continue;
            }
            let has = |name: &str| configuration.rules.iter().any(|rule| rule.name == name);
            let size = configuration.get("VALUE_DIM") as usize;
            let plain = has("rules/attend_all") && has("shared/fours_f16");
            if !plain && size != 32 {
                continue;
            }
            let mut random = Random::new(number as u64);
            let problem = AttentionProblem {
                kv_len: 70 + number % 7,
                value_dim: size - number % 2 * 4,
                page_size: has("rules/pages").then_some(5),
                out_type: ElementType::F32,
                rules: AttentionRules {
                    causal: number % 3 > 0,
                    alignment: Some([TopLeft, BottomRight][number % 2]),
                    ..Default::default()
                },
                ..halves(2, 65 + number % 5, 70, 40)
            };
            let mut data = AttentionData {
                layout: if has("shared/fours_f16_any") {
                    Layout::Offset
                } else {
                    Layout::Contiguous
                },
                ..random_operands(problem, &mut random)
            };
            let [q, k] = [data.problem.q_len, data.problem.kv_len];
            if has("rules/mask") {
                data = data.with_mask([1, 1, q, k], random.bools(q * k));
            }
            if has("rules/scores") {
                data = data.with_bias([1, 2, q, k], random.normals(2 * q * k));
                data.problem.rules.softcap = Some(2.0);
            }
            let subject = Subject {
                configuration: Some(configuration),
                ..subject.clone()
            };
            failures.note(&subject, data.prepare().check(gpu, &subject));
        }
    });
}

/// Whatever lies in what a row may not see: NaN behind a causal mask reaches no row, and rows before a key keep their bits when it changes.
#[test]
fn half_precision_rows_see_nothing_that_is_hidden_from_them() {
    with_half(2, |gpu, subject, failures| {
        let problem = AttentionProblem {
            rules: AttentionRules::causal(TopLeft),
            ..halves(1, 90, 90, 64)
        };
        let mut random = Random::new(3);
        let before = random_operands(problem, &mut random);
        let mut after = AttentionData::of(
            before.problem.clone(),
            before.q.clone(),
            before.k.clone(),
            before.v.clone(),
        );
        after.k[50 * 64..].fill(f32::NAN);
        after.v[50 * 64..].fill(f32::INFINITY);
        let [first, again, second] =
            [&before, &before, &after].map(|data| data.run(gpu, subject).unwrap());
        failures.note("repeated", same_bits(&first, &again));
        failures.note(
            "rows before",
            same_bits(&second[..50 * 64], &first[..50 * 64]),
        );
    });
}

/// A kernel with its text changed.
fn changed(kernel: &Kernel, from: &str, to: &str) -> &'static Kernel {
    assert!(
        kernel.source.contains(from),
        "{} has no {from}",
        kernel.name
    );
    Box::leak(Box::new(Kernel {
        source: Box::leak(kernel.source.replace(from, to).into_boxed_str()),
        ..kernel.clone()
    }))
}

/// Kernels that are wrong as a driver might make them: qualification finds out, and the tier stays off.
#[test]
fn a_tier_that_is_wrong_stays_off() {
    let Some((turn, ..)) = qualified() else {
        return;
    };
    let gpu: &Gpu = &turn;
    let tiled = find("attention_tiled").unwrap();
    for (what, from, to) in [
        (
            "products in half precision",
            "= score[s] * params.scale",
            "= vec4<f32>(vec4<f16>(score[s])) * params.scale",
        ),
        (
            "weights in half precision",
            "select(exp(own - score_of(top[r])), 0.0, weighs_nothing(own))",
            "select(f32(f16(exp(own - score_of(top[r])))), 0.0, weighs_nothing(own))",
        ),
        (
            "hidden values multiplied by 0",
            "if (!(four[r] < 0.0)) {",
            "if (true) {",
        ),
        (
            "a dropped tail of keys",
            "first_key < seen_to; first_key += BLOCK_K",
            "first_key + BLOCK_K <= seen_to; first_key += BLOCK_K",
        ),
        (
            "sums that are not shrunk",
            "sum[r * COLUMN_FOURS + c] * shrink",
            "sum[r * COLUMN_FOURS + c]",
        ),
    ] {
        let broken = changed(tiled, from, to);
        let change = |plan| Plan {
            kernel: broken,
            ..plan
        };
        for one in refused(gpu, what, change) {
            assert!(
                matches!(one.verdict, Verdict::Wrong { .. }),
                "{what}: {one}"
            );
        }
    }
    // What no compiler takes is found out like what is wrong.
    let broken = changed(tiled, "fn block_at(", "fn block_at((");
    let found = refused(gpu, "no WGSL", |plan| Plan {
        kernel: broken,
        ..plan
    });
    for one in found {
        assert!(matches!(one.verdict, Verdict::Failed { .. }), "{one}");
        assert!(one.to_string().contains("attention_tiled"), "{one}");
    }
}

/// Everything the device offers is refused with such plans. (Where it offers nothing, nothing is found.)
fn refused(gpu: &Gpu, what: &str, change: impl Fn(Plan) -> Plan) -> Vec<Qualification> {
    let (trial, found) = pollster::block_on(gpu.qualify_changed(change)).unwrap();
    assert_eq!(found.len(), gpu.capabilities().offered_tiers.len());
    for one in &found {
        assert!(!one.passed(), "{what}: {one}");
        eprintln!("{what}: {one}");
        assert!(!trial.capabilities().has_qualified(one.tier));
        let asked = AttentionProblem {
            tier: Some(one.tier),
            ..halves(1, 32, 32, 64)
        };
        assert!(asked.plan(trial.capabilities()).is_err());
        let free = AttentionProblem {
            tier: None,
            ..asked
        };
        let plan = free.plan(trial.capabilities()).unwrap();
        assert_eq!(plan.kernel.tier(&plan.configuration), Tier::Plain);
    }
    found
}
