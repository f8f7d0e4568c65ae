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
use wgpu_attention::compare::Tolerance;
use wgpu_attention::kernels::{Form, Fragment, Kernel, MATRICES, Operation, TILES_HALF, find};
use wgpu_attention::{
    Attention, AttentionProblem, AttentionRules, Capabilities, ElementType, Error, Gpu, GpuOptions,
    Plan, Qualification, Tier, Verdict, wgpu,
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
    with_half(32, |gpu, subject, failures| {
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
        for (number, (head_dim, value_dim)) in sizes.into_iter().cycle().take(33).enumerate() {
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
            let data = decorated(number, problem, &mut random);
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

/// What matrix units do, in plain arithmetic: takes the place of `shared/matrices` on adapters that have none, so that all else of
/// attention_matrices runs there. One invocation makes one pair at a time.
const STAND_IN: &str = "
fn tile_product(subgroup: u32, subgroups: u32, lane: u32, lanes: u32, of_values: bool) {
    for (var tile = subgroup; tile < TILES; tile += subgroups) {
        for (var at = lane; at < 256u; at += lanes) {
            let row = tile / TILES_ACROSS * 16u + at / 16u;
            let column = tile % TILES_ACROSS * 16u + at % 16u;
            var sum = 0.0;
            if (of_values) {
                for (var j = 0u; j < BLOCK_K; j++) {
                    let value = f32(staged[V_START + column * WEIGHT_STRIDE + j]);
                    sum += f32(staged[row * WEIGHT_STRIDE + j]) * value;
                    sum += f32(staged[LOW_START + row * WEIGHT_STRIDE + j]) * value;
                }
            } else {
                for (var c = 0u; c < CHUNK; c++) {
                    sum += f32(staged[row * TILE_STRIDE + c]) * f32(staged[K_START + column * TILE_STRIDE + c]);
                }
            }
            products[row * PRODUCT_STRIDE + column] = sum;
        }
    }
}
fn multiply_queries_and_keys(subgroup: u32, subgroups: u32) {
    tile_product(subgroup, subgroups, lane_in_subgroup, lanes_of_subgroup, false);
}
fn multiply_weights_and_values(subgroup: u32, subgroups: u32) {
    tile_product(subgroup, subgroups, lane_in_subgroup, lanes_of_subgroup, true);
}
var<private> lane_in_subgroup: u32 = 0u;
var<private> lanes_of_subgroup: u32 = 1u;
";

/// A plan of matrix units with the stand-in, and a kernel that tells it about its lanes.
fn without_matrix_units(plan: Plan, edits: &[(&str, &str)]) -> Plan {
    if plan.kernel.name != "attention_matrices" {
        return plan;
    }
    let mut kernel = changed(
        plan.kernel,
        "    @builtin(num_subgroups) subgroups: u32,\n) {",
        "    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) own_lane: u32,
    @builtin(subgroup_size) own_lanes: u32,
) {
    lane_in_subgroup = own_lane;
    lanes_of_subgroup = own_lanes;",
    );
    let mut configuration = plan.configuration.clone();
    let matrices = configuration
        .rules
        .iter()
        .position(|rule| *rule == MATRICES);
    configuration.rules[matrices.unwrap()] = Fragment {
        name: "stand-in".into(),
        source: STAND_IN.into(),
    };
    for (from, to) in edits {
        kernel = changed(kernel, from, to);
    }
    Plan {
        kernel,
        configuration,
        ..plan
    }
}

/// A handle that claims matrix units, where the adapter has what the stand-in takes.
fn claiming_matrices(gpu: &Gpu) -> Option<Gpu> {
    let capabilities = gpu.capabilities();
    if !capabilities.offers(Tier::Half) || !capabilities.subgroups {
        let asked = AttentionProblem {
            tier: Some(Tier::Matrices),
            ..halves(1, 32, 32, 64)
        };
        let refused = asked.plan(capabilities);
        assert!(
            matches!(refused, Err(Error::Unsupported { .. })),
            "{refused:?}"
        );
        eprintln!(
            "{} lacks f16 or subgroups: refused as it must be",
            gpu.describe()
        );
        return None;
    }
    let mut capabilities = capabilities.clone();
    capabilities.offered_tiers = Tier::FASTER.to_vec();
    Some(gpu.with_capabilities(capabilities))
}

/// The kernel for matrix units qualifies with the stand-in, and is planned then; broken on purpose it is found out.
#[test]
fn matrices_qualify_where_they_are_right_and_stay_off_where_they_are_wrong() {
    let Some((turn, ..)) = qualified() else {
        return;
    };
    let Some(gpu) = claiming_matrices(&turn) else {
        return;
    };
    let of_matrices = |found: &[Qualification]| {
        let mut found = found.iter().filter(|one| one.tier == Tier::Matrices);
        found.next().unwrap().clone()
    };
    let qualify = |edits: &[(&str, &str)]| {
        let change = |plan| without_matrix_units(plan, edits);
        pollster::block_on(gpu.qualify_changed(change)).unwrap()
    };
    let (right, found) = qualify(&[]);
    let one = of_matrices(&found);
    eprintln!("{one}");
    assert!(one.passed(), "{one}");
    assert!(right.capabilities().has_qualified(Tier::Matrices));
    // On a CPU the lanes form suits better; where tiles do, matrix units are taken first.
    let free = AttentionProblem {
        tier: None,
        form: Some(Form::Tiled),
        ..halves(2, 64, 64, 64)
    };
    let plan = free.plan(right.capabilities()).unwrap();
    assert_eq!(plan.kernel.name, "attention_matrices");
    assert!(plan.reason.contains("cooperative matrices"), "{plan}");
    let wide = AttentionProblem {
        value_dim: 192,
        ..free.clone()
    };
    let plan = wide.plan(right.capabilities()).unwrap();
    assert_eq!(plan.kernel.tier(&plan.configuration), Tier::Half, "{plan}");
    let asked = AttentionProblem {
        tier: Some(Tier::Matrices),
        ..wide
    };
    assert!(matches!(
        asked.plan(right.capabilities()),
        Err(Error::Unsupported { .. })
    ));

    // As it is, this device cannot have them, and the kernel is refused by name.
    let real = pollster::block_on(gpu.qualify()).unwrap();
    if !turn.capabilities().offers(Tier::Matrices) {
        let one = of_matrices(&real.1);
        assert!(matches!(one.verdict, Verdict::Failed { .. }), "{one}");
        assert!(!real.0.capabilities().has_qualified(Tier::Matrices));
    }

    // Without any one of its barriers. (Subgroups of 8 run one after the other here, up to the next barrier.)
    let kernel = find("attention_matrices").unwrap();
    let barriers = kernel.source.matches(BARRIER).count();
    assert_eq!(barriers, 7);
    for number in 0..barriers {
        let (at, _) = kernel.source.match_indices(BARRIER).nth(number).unwrap();
        // With the line before it, which says why and makes it one of its kind.
        let own_line = kernel.source[..at].rfind('\n').unwrap();
        let from = kernel.source[..own_line].rfind('\n').unwrap() + 1;
        let from = &kernel.source[from..at + BARRIER.len()];
        assert_eq!(kernel.source.matches(from).count(), 1, "{from}");
        if from.contains("The invocations of a row") {
            continue; // Four neighbours: here they are of one subgroup, and need none.
        }
        let (_, found) = qualify(&[(from, "")]);
        let one = of_matrices(&found);
        eprintln!("without barrier {number}: {one}");
        assert!(
            matches!(one.verdict, Verdict::Wrong { .. }),
            "without barrier {number}: {one}"
        );
    }
    for (what, from, to) in MATRIX_MUTANTS {
        let (trial, found) = qualify(&[(from, to)]);
        let one = of_matrices(&found);
        eprintln!("{what}: {one}");
        assert!(
            matches!(one.verdict, Verdict::Wrong { .. }),
            "{what}: {one}"
        );
        assert!(!trial.capabilities().has_qualified(Tier::Matrices));
    }
}

const BARRIER: &str = "workgroupBarrier();";

/// Ways in which attention_matrices could be wrong.
const MATRIX_MUTANTS: [(&str, &str, &str); 8] = [
    (
        "remainders of weights left out",
        "f16(weight * WEIGHT_FACTOR - f32(high))",
        "f16(0.0)",
    ),
    (
        "values that are no numbers multiplied",
        "values[m] = select(vec4<f16>(), values[m], finite);",
        "",
    ),
    (
        "hidden keys weighed",
        "seen & !weighs_nothing(score[c])",
        "!weighs_nothing(score[c])",
    ),
    ("sums that are not shrunk", "sum[c] = sum[c] * shrink;", ""),
    (
        "a dropped tail of keys",
        "first_key < seen_to; first_key += BLOCK_K",
        "first_key + BLOCK_K <= seen_to; first_key += BLOCK_K",
    ),
    (
        "products scaled in half precision",
        "score[c] = score[c] * params.scale;",
        "score[c] = f32(f16(score[c])) * params.scale;",
    ),
    (
        "channels past the head not 0",
        "return select(vec4<f16>(), four, there);",
        "return four;",
    ),
    (
        "totals of one invocation alone",
        "row_total += bitcast<f32>(exchange[own * 4u + i]);",
        "row_total = bitcast<f32>(exchange[own * 4u + i]);",
    ),
];

/// With the stand-in the kernel for matrix units takes every rule and layout, around every edge.
#[test]
fn the_kernel_for_matrices_matches_the_reference_but_for_its_units() {
    let Some((turn, ..)) = qualified() else {
        return;
    };
    let Some(gpu) = claiming_matrices(&turn) else {
        return;
    };
    let mut capabilities = gpu.capabilities().clone();
    capabilities.qualified_tiers = Tier::FASTER.to_vec();
    let gpu = gpu.with_capabilities(capabilities);
    let mut failures = Failures::default();
    let mut random = Random::new(11);
    let sizes = [
        (1, 1),
        (16, 32),
        (31, 33),
        (64, 64),
        (65, 96),
        (128, 97),
        (80, 128),
    ];
    for (number, (head_dim, value_dim)) in sizes.into_iter().cycle().take(28).enumerate() {
        let q_len = [1, 31, 32, 33, 63, 65, 100][number / 3 % 7];
        let kv_len = [1, 31, 32, 33, 64, 129][number / 2 % 6];
        let problem = AttentionProblem {
            batch: 1 + number % 2,
            kv_heads: 1 + number % 2,
            value_dim,
            out_type: [ElementType::F32, ElementType::F16][number % 2],
            page_size: (number % 5 == 4).then_some(7),
            rules: AttentionRules {
                causal: number % 4 == 1,
                window_left: (number % 4 == 2).then_some(20),
                alignment: Some([TopLeft, BottomRight][number % 2]),
                ..Default::default()
            },
            tier: Some(Tier::Matrices),
            ..halves(2, q_len, kv_len, head_dim)
        };
        let data = decorated(number, problem, &mut random);
        let what = format!("{:?} {:?}", data.layout, data.problem);
        let result = data
            .problem
            .plan(gpu.capabilities())
            .and_then(|plan| {
                let mut plan = without_matrix_units(plan, &[]);
                if number % 3 == 2 && plan.grid.is_some() {
                    // Keys in parts side by side, as a GPU that few queries leave idle has them.
                    plan.splits = 2 + number as u32 % 3;
                    plan.groups *= plan.splits;
                    plan.grid = Some([plan.groups, 1, 1]);
                }
                Attention::from_plan(&gpu, data.problem.clone(), plan)
            })
            .map_err(|error| error.to_string())
            .and_then(|attention| {
                let prepared = data.prepare();
                let got = prepared.data.run_with(&gpu, &attention)?;
                let shape = prepared.data.out_shape();
                compared(
                    &got.out,
                    &prepared.expected,
                    &shape,
                    prepared.data.tolerance(),
                )?;
                let lse = [got.lse.len()];
                compared(&got.lse, &prepared.expected_lse, &lse, Tolerance::F32)
            });
        failures.note(what, result);
    }
    failures.report(28);
}

/// Operands for a problem, with one of several rules.
fn decorated(number: usize, problem: AttentionProblem, random: &mut Random) -> AttentionData {
    let [batch, q_len, kv_len] = [problem.batch, problem.q_len, problem.kv_len];
    let data = AttentionData {
        layout: LAYOUTS[number % LAYOUTS.len()],
        ..random_operands(problem, random)
    };
    match number % 6 {
        1 => {
            let pairs = random.bools(batch * q_len * kv_len);
            data.with_mask([batch, 1, q_len, kv_len], pairs)
        }
        3 => {
            let biases = random.normals(2 * q_len * kv_len);
            let mut data = data.with_bias([1, 2, q_len, kv_len], biases);
            data.problem.rules.softcap = Some(2.0);
            data
        }
        5 => data.with_sinks(random.normals(2)),
        _ => data,
    }
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
