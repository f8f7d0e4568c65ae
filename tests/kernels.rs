//! Every kernel against the f64 reference, at sizes below, on and above every tile edge; and what must hold of every
//! kernel whatever the numbers.
//!
//! Outputs are poisoned with NaN and guarded; buffers are recycled dirty; hidden keys and values hold NaN and infinity.
//! The tolerance is `Tolerance::F32` throughout. Comments name public fault reports of other libraries that a test
//! rules out here.
//!
//! All of it runs on adapters with subgroups of 8, of 4 and without (ggml-org/llama.cpp#10809), on OpenGL
//! (gfx-rs/naga#1434), and with workgroup memory that no driver cleared (gfx-rs/wgpu#4591, #4592).
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::check::*;
use support::{Random, run};
use wgpu_attention::Alignment::{BottomRight, TopLeft};
use wgpu_attention::kernels::{
    EIGHTS_F32, EIGHTS_HALF, FOURS_ANY, FOURS_F32, Form, LINEAR_FOURS, Operation, STORE_ROWS,
};
use wgpu_attention::{
    Alignment, AttentionArguments, AttentionProblem, AttentionRules, Capabilities, ElementType,
    Gpu, LinearArguments, LinearProblem, Tensor, TensorView, reference, wgpu,
};

/// Sizes below, on and above the edges of every tile in use (8, 16, 32, 64, 128).
const EDGES: [usize; 16] = [1, 2, 3, 7, 8, 9, 15, 17, 31, 32, 33, 63, 64, 65, 127, 129];

const CAUSAL: [Option<Alignment>; 3] = [None, Some(TopLeft), Some(BottomRight)];

/// Runs `check` for every attention kernel, in the planner's configuration, and reports all that fail.
fn for_each_attention(least: usize, check: impl Fn(&Gpu, &Subject, &mut Failures)) {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for subject in attention_kernels() {
        check(&gpu, &subject, &mut failures);
    }
    failures.report(least);
}

/// The same for the projections.
fn for_each_linear(least: usize, check: impl Fn(&Gpu, &Subject, &mut Failures)) {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for subject in kernels(Operation::Linear) {
        check(&gpu, &subject, &mut failures);
    }
    failures.report(least);
}

/// Holds a table of cases against every kernel.
fn check_cases(cases: impl IntoIterator<Item = AttentionCase>, least: usize) {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for case in cases {
        let prepared = case.prepare();
        for subject in attention_kernels() {
            let result = prepared.check(&gpu, &subject);
            let result = if subject.takes(&gpu, &prepared.data.problem) {
                result
            } else {
                // Refused by name and limit, and never computed wrong.
                let refusal = result.err().unwrap_or_default();
                let (name, largest) = (subject.kernel.name, subject.largest_head(&gpu));
                let words = format!("the largest head of {name} allows {largest}");
                if refusal.contains(&words) {
                    Ok(())
                } else {
                    Err(format!("not refused: {refusal}"))
                }
            };
            failures.note(format!("{subject} {case:?}"), result);
        }
    }
    failures.report(least);
}

/// Attention with D = 1 whose scores and values are these, the same for every query.
fn scored(q_len: usize, scores: &[f32], values: &[f32]) -> AttentionData {
    let problem = AttentionProblem {
        kv_len: scores.len(),
        rules: scaled(Some(1.0)),
        ..AttentionProblem::new(1, 1, q_len, 1)
    };
    AttentionData::new(
        problem,
        |_, _, _, _| 1.0,
        |_, t, _, _| scores[t],
        |_, t, _, _| values[t],
    )
}

/// With that scale and no other rule.
fn scaled(scale: Option<f32>) -> AttentionRules {
    AttentionRules {
        scale,
        ..Default::default()
    }
}

/// Attention over zeros with V\[j\] = j: each row is the mean of the keys that it sees.
fn means(problem: AttentionProblem) -> AttentionData {
    AttentionData::new(
        problem,
        |_, _, _, _| 0.0,
        |_, _, _, _| 1.0,
        |_, t, _, _| t as f32,
    )
}

// ---------------------------------------------------------------- attention against the reference

/// Layouts in which rows begin where four channels can be read at once.
const ALIGNED: [Layout; 3] = [Layout::Contiguous, Layout::HeadMajor, Layout::Fused];

/// Compiles and runs every configuration of a form for f32; of the smaller types those of one size. (The random
/// problems draw from the others.) With [`few_configurations`], some of them. One test for each set of rules, since they compile side by side.
fn every_configuration(form: Form, rules: [&str; 2]) {
    let Some(gpu) = gpu() else { return };
    let few = few_configurations();
    let mut failures = Failures::default();
    let wanted = configurations(&gpu, Operation::Attention, |configuration| {
        let names: Vec<&str> = configuration.rules.iter().map(|rule| &*rule.name).collect();
        names[..2] == rules
    });
    let wanted = wanted.iter().filter(|subject| subject.kernel.form == form);
    for (number, subject) in wanted.enumerate() {
        let Some(configuration) = &subject.configuration else {
            continue;
        };
        let size = configuration
            .get("HEAD_DIM")
            .max(configuration.get("VALUE_DIM")) as usize;
        let element_type = |name: &str| {
            [ElementType::F32, ElementType::F16, ElementType::BF16]
                [configuration.get(name) as usize]
        };
        let kv_type = element_type("KV_TYPE");
        // Any type of q goes with any of k and v.
        let q_type = match number % 2 {
            0 => kv_type,
            _ => ElementType::F32,
        };
        let paged = configuration.rules.iter().any(|r| r.name == "rules/pages");
        let any = configuration.rules.contains(&FOURS_ANY);
        let least = match (form, subject.kernel.name) {
            (_, "attention_blocks") => 96,
            (Form::Lanes, _) => 16,
            (Form::Tiled, _) => 32,
        };
        // Not planned where subgroups have a known size.
        let uniform = form == Form::Lanes
            && configuration.subgroup_size().is_none()
            && gpu.capabilities().known_subgroup() == Some(8);
        if (kv_type != ElementType::F32 || paged || any || uniform) && size != least {
            continue;
        }
        // Where compiling takes long, some stand for all. What rules do depends neither on sizes nor on how keys are stored and read;
        // nor does the text of attention_blocks on the size, which reserves more memory for a larger one. The planner's choice for each
        // size is among the head sizes below.
        let sizes: &[usize] = match subject.kernel.name {
            "attention_blocks" => &[96, 256],
            "attention_lanes" => &[least, 64, 256],
            _ => &[least, 64],
        };
        let plainest = kv_type == ElementType::F32 && !any;
        if few && (!sizes.contains(&size) || rules != PLAIN && (size != least || !plainest)) {
            continue;
        }
        // The size itself, and the smallest that is rounded up to it; where four or eight channels are read at once, a
        // multiple of as many.
        let smallest = match (form, size) {
            (Form::Tiled, 32) | (_, 8) => 1,
            (_, 96) => 65,
            (_, 128) => 97,
            (_, 192) => 129,
            (_, 256) => 193,
            _ => size / 2 + 1,
        };
        let fours = !any;
        let eights = [&EIGHTS_F32, &EIGHTS_HALF]
            .into_iter()
            .any(|reads| configuration.rules.contains(reads));
        let smallest = match (eights, fours) {
            (true, _) => smallest.next_multiple_of(8),
            (_, true) => smallest + 3,
            _ => smallest,
        };
        let layouts = if fours { &ALIGNED } else { &LAYOUTS[..] };
        for value_dim in [size, smallest] {
            let mut random = Random::new(number as u64);
            let problem = AttentionProblem {
                kv_heads: 1,
                kv_len: 33 + number % 7,
                // As large as fits the lanes form; the tiled one takes any.
                head_dim: [size, smallest][number / 2 % 2].min(80),
                value_dim,
                page_size: paged.then_some(5),
                q_type,
                kv_type,
                rules: AttentionRules {
                    causal: number % 3 > 0,
                    alignment: [TopLeft, BottomRight][number % 2].into(),
                    ..Default::default()
                },
                // Not a multiple of any tile, and more than one of the largest.
                ..AttentionProblem::new(2, 2, 65 + number % 5, 1)
            };
            let mut data = AttentionData {
                layout: layouts[number % layouts.len()],
                ..random_operands(problem, &mut random)
            };
            let [b, h, q, k] = [2, 2, data.problem.q_len, data.problem.kv_len];
            if rules[0] == "rules/mask" {
                data = data.with_mask([b, 1, q, k], random.bools(b * q * k));
            }
            if rules[1] == "rules/scores" {
                data = data.with_bias([1, h, q, k], random.normals(h * q * k));
                data.problem.rules.softcap = Some(2.0);
            }
            let what = format!("{subject} {:?}", data.problem);
            failures.note(what, data.prepare().check(&gpu, subject));
        }
    }
    failures.report(if few { 4 } else { 14 });
}

/// A GPU that a few queries of few heads would leave idle gets the keys in parts side by side: in every number of parts,
/// more than there are blocks of keys among them, rules of position, sinks and the log-sum-exp come out the same.
#[test]
fn keys_in_parts_side_by_side_match_the_reference() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    let tiled = kernels(Operation::Attention)
        .into_iter()
        .find(|subject| subject.kernel.form == Form::Tiled)
        .unwrap();
    let mut number = 0;
    for splits in [1, 2, 3, 7, 64] {
        for (q_len, kv_len) in [(70, 200), (33, 64), (5, 129), (130, 65)] {
            number += 1;
            let rules = match number % 4 {
                0 => AttentionRules::default(),
                1 => AttentionRules::causal(TopLeft),
                2 => AttentionRules::causal(BottomRight),
                _ => AttentionRules {
                    window_left: Some(40),
                    window_right: Some(30),
                    alignment: Some(BottomRight),
                    ..Default::default()
                },
            };
            let problem = AttentionProblem {
                kv_len,
                kv_heads: 1,
                rules,
                ..AttentionProblem::new(1 + number % 2, 2, q_len, 20)
            };
            let mut random = Random::new(number as u64);
            let mut data = random_operands(problem, &mut random);
            if number % 3 == 0 {
                data = data.with_sinks(random.normals(2));
            }
            let subject = Subject {
                splits: Some(splits),
                ..tiled.clone()
            };
            let what = format!("{splits} parts: {:?}", data.problem);
            failures.note(what, data.prepare().check(&gpu, &subject));
        }
    }
    failures.report(20);
}

/// What little work is there is shared out on a GPU; on a CPU it is not, nor where there is enough of it.
#[test]
fn keys_are_split_where_a_gpu_would_idle() {
    let splits = |device_type, heads, tokens| {
        let capabilities = Capabilities::webgpu_defaults(device_type);
        let problem = AttentionProblem {
            form: Some(Form::Tiled),
            ..AttentionProblem::new(1, heads, tokens, 64)
        };
        let plan = problem.plan(&capabilities).unwrap();
        let tiles = tokens.div_ceil(4 * plan.configuration.get("DOWN") as usize) as u32;
        assert_eq!(plan.groups, tiles * heads as u32 * plan.splits);
        plan.splits
    };
    use wgpu::DeviceType::{Cpu, DiscreteGpu};
    assert_eq!(splits(DiscreteGpu, 1, 1024), 4);
    assert_eq!(splits(DiscreteGpu, 1, 4096), 2);
    assert_eq!(splits(DiscreteGpu, 12, 1024), 1);
    assert_eq!(splits(DiscreteGpu, 1, 300), 1);
    assert_eq!(splits(Cpu, 1, 1024), 1);
}

const PLAIN: [&str; 2] = ["rules/attend_all", "rules/plain_scores"];
const MASKED: [&str; 2] = ["rules/mask", "rules/plain_scores"];
const SCORED: [&str; 2] = ["rules/mask", "rules/scores"];

#[test]
fn every_configuration_of_the_tiled_attention_matches_the_reference() {
    every_configuration(Form::Tiled, PLAIN);
}

#[test]
fn every_configuration_of_the_tiled_attention_with_a_mask_matches_the_reference() {
    every_configuration(Form::Tiled, MASKED);
}

#[test]
fn every_configuration_of_the_tiled_attention_with_score_rules_matches_the_reference() {
    every_configuration(Form::Tiled, SCORED);
}

#[test]
fn every_configuration_of_the_lanes_attention_matches_the_reference() {
    every_configuration(Form::Lanes, PLAIN);
}

#[test]
fn every_configuration_of_the_lanes_attention_with_a_mask_matches_the_reference() {
    every_configuration(Form::Lanes, MASKED);
}

#[test]
fn every_configuration_of_the_lanes_attention_with_score_rules_matches_the_reference() {
    every_configuration(Form::Lanes, SCORED);
}

/// jax-ml/jax#27224, pytorch/pytorch#159247: right only where lengths divide the block.
#[test]
fn lengths_around_every_tile_edge_match_the_reference() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    let mut number = 0;
    for q_len in EDGES {
        for kv_len in EDGES {
            number += 1;
            // Coprime periods: every combination of the rest turns up somewhere.
            let hides = [
                Hide::NoMask,
                Hide::Random,
                Hide::NoMask,
                Hide::Item,
                Hide::First(kv_len / 2),
            ];
            let case = AttentionCase {
                causal: CAUSAL[number % 3],
                hide: hides[number % 5],
                layout: LAYOUTS[number % 7 % 5],
                seed: number as u64,
                ..AttentionCase::new(
                    [1, 2, 3][number % 4 % 3],
                    [1, 3][number % 2],
                    q_len,
                    kv_len,
                    [8, 3, 5, 1, 7, 2][number % 11 % 6],
                )
            };
            let prepared = case.prepare();
            let masked = case.hide != Hide::NoMask;
            // Every block of queries, whatever the planner would choose.
            for subject in configurations(&gpu, Operation::Attention, |configuration| {
                let rules = if masked { MASKED } else { PLAIN };
                let f32 = configuration.get("KV_TYPE") == 0;
                let size = configuration.get("HEAD_DIM") + configuration.get("VALUE_DIM");
                // Four or eight channels are read at once of heads that are multiples of as many.
                let fits =
                    [(&FOURS_F32, 4), (&EIGHTS_F32, 8)]
                        .into_iter()
                        .all(|(reads, channels)| {
                            !configuration.rules.contains(reads)
                                || case.head_dim.is_multiple_of(channels)
                        });
                f32 && fits
                    && [8, 32, 96].contains(&size)
                    && configuration
                        .rules
                        .iter()
                        .map(|rule| &*rule.name)
                        .take(2)
                        .eq(rules)
            }) {
                let result = prepared.check(&gpu, &subject);
                failures.note(format!("{subject} {case:?}"), result);
            }
        }
    }
    failures.report(600);
}

/// huggingface/candle#3887: head sizes such as 48 unsupported.
#[test]
fn every_kind_of_head_size_matches_the_reference() {
    let sizes = [
        1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 56, 63, 64, 65, 72, 80, 88,
        96, 97, 112, 128, 129, 160, 192, 193, 255, 256,
    ];
    let cases = sizes.into_iter().enumerate().flat_map(|(at, head_dim)| {
        [1, 33].map(|q_len| AttentionCase {
            layout: LAYOUTS[at % 5],
            causal: CAUSAL[at % 3],
            seed: at as u64,
            ..AttentionCase::new(1, 1 + at % 2 * 2, q_len, 33, head_dim)
        })
    });
    check_cases(cases, 100);
}

/// ggml-org/llama.cpp#16316, #29220: a mask row that is not padded to a multiple of the tile.
#[test]
fn masks_of_odd_lengths_match_the_reference() {
    let cases = (1..=17).flat_map(|q_len| {
        (1..=17)
            .filter(move |kv_len| (q_len + kv_len) % 2 == 0)
            .map(move |kv_len| AttentionCase {
                hide: Hide::Random,
                layout: LAYOUTS[(q_len + kv_len / 2) % 5],
                poison: kv_len % 3 != 0,
                seed: (q_len * 31 + kv_len) as u64,
                ..AttentionCase::new(1 + kv_len % 3, 1, q_len, kv_len, 4)
            })
    });
    check_cases(cases, 200);
}

/// SKaiNET-developers/SKaiNET#860: a scale of 0 means 0, a negative one is used as given.
#[test]
fn scales_are_used_as_given() {
    let cases = [None, Some(0.0), Some(-0.25), Some(1.0), Some(3.5)].map(|scale| AttentionCase {
        scale,
        ..AttentionCase::new(1, 2, 19, 21, 16)
    });
    check_cases(cases, 10);
    // 16 equal products: q.k0 = 16, q.k1 = 0.
    let right = [
        (None, 0.982_013_8),
        (Some(1.0), 0.999_999_9),
        (Some(0.0), 0.5),
        (Some(-0.25), 0.017_986_21),
    ];
    for_each_attention(8, |gpu, subject, failures| {
        for (scale, expected) in right {
            let problem = AttentionProblem {
                kv_len: 2,
                rules: scaled(scale),
                ..AttentionProblem::new(1, 1, 1, 16)
            };
            let first = |_, t, _, _| if t == 0 { 1.0 } else { 0.0 };
            let data = AttentionData::new(problem, |_, _, _, _| 1.0, first, first);
            let result = data.run(gpu, subject);
            failures.note(
                format!("{subject} scale {scale:?}"),
                result.and_then(|got| matches(&got, &[expected; 16], &[16])),
            );
        }
    });
}

/// ggml-org/llama.cpp#23040, ml-explore/mlx#4022: garbage at some lengths of the cache when decoding.
#[test]
fn decoding_matches_the_reference_at_many_lengths() {
    let lengths = (1..2049)
        .step_by(37)
        .chain([510, 511, 512, 513, 514, 1022, 1023, 1024, 1025, 1026]);
    let cases = lengths.map(|kv_len| AttentionCase {
        causal: Some(BottomRight),
        seed: kv_len as u64,
        ..AttentionCase::new(1, 2, 1, kv_len, 16)
    });
    check_cases(cases, 100);
}

/// pytorch/executorch#20583: a dispatch per score passes 65535 groups at modest lengths.
#[test]
fn many_heads_by_hundreds_of_tokens_match_the_reference() {
    for_each_attention(3, |gpu, subject, failures| {
        for tokens in [361, 363] {
            let case = AttentionCase {
                causal: Some(TopLeft),
                ..AttentionCase::new(1, 32, tokens, tokens, 8)
            };
            let data = case.data();
            let result = data.run(gpu, subject).and_then(|got| {
                for (head, query) in [
                    (0, 0),
                    (0, tokens - 1),
                    (31, 0),
                    (31, tokens - 1),
                    (17, 200),
                ] {
                    let row = data.with_inputs(|inputs| {
                        reference::attention_row(inputs, 0, head, query).unwrap()
                    });
                    let at = (query * 32 + head) * 8;
                    matches(&got[at..at + 8], &row.out, &[8])?;
                }
                Ok(())
            });
            failures.note(format!("{subject} {case:?}"), result);
        }
    });
}

// ---------------------------------------------------------------- layouts

/// pytorch/pytorch#163597, huggingface/candle#3703: a strided view read as if it were contiguous.
#[test]
fn every_layout_gives_the_bits_of_the_contiguous_copy() {
    for_each_attention(100, |gpu, subject, failures| {
        for q_len in 1..=9 {
            for kv_len in [q_len, 11] {
                let case = AttentionCase {
                    hide: Hide::Random,
                    seed: q_len as u64,
                    ..AttentionCase::new(3, 2, q_len, kv_len, 9)
                };
                let data = case.data();
                let contiguous = data.run(gpu, subject).unwrap();
                for layout in LAYOUTS {
                    let strided = AttentionData {
                        layout,
                        ..data.clone()
                    };
                    let result = strided.run(gpu, subject);
                    failures.note(
                        format!("{subject} {layout:?} {case:?}"),
                        result.and_then(|got| same_bits(&got, &contiguous)),
                    );
                }
            }
        }
    });
}

/// gfx-rs/wgpu#8470: one buffer bound as q, k and v.
#[test]
fn one_view_may_be_q_k_and_v() {
    for_each_attention(2, |gpu, subject, failures| {
        let mut data = AttentionCase::new(2, 3, 20, 20, 8).data();
        (data.k, data.v) = (data.q.clone(), data.q.clone());
        let expected = data.expected();
        let attention = subject.attention(gpu, &data.problem).unwrap();
        let q = data.upload(gpu).q;
        let (guarded, out) = data.output(gpu);
        run(gpu, |encoder| {
            let arguments = AttentionArguments::new(&q, &q, &q, &out);
            attention.encode(encoder, arguments).unwrap();
        });
        let got = read_output(&guarded, &out);
        failures.note(
            subject,
            got.and_then(|got| matches(&got, &expected, &data.out_shape())),
        );
    });
}

/// microsoft/onnxruntime#27853: views of single batch items begin where no binding may begin.
#[test]
fn views_of_single_batch_items_may_begin_anywhere() {
    for_each_attention(6, |gpu, subject, failures| {
        let problem = AttentionProblem {
            kv_len: 2,
            ..AttentionProblem::new(3, 1, 1, 4)
        };
        let data = AttentionData::new(
            problem,
            |_, _, _, _| 0.0,
            |_, _, _, _| 0.0,
            |b, t, _, d| (b * 100 + t * 10 + d) as f32,
        );
        let one = AttentionProblem {
            batch: 1,
            ..data.problem.clone()
        };
        let attention = subject.attention(gpu, &one).unwrap();
        let Uploaded { q, k, v, .. } = data.upload(gpu);
        for item in 0..3 {
            let only = |view: &TensorView| sliced(view, 0, item..item + 1);
            let data = AttentionData {
                problem: one.clone(),
                ..data.clone()
            };
            let (guarded, out) = data.output(gpu);
            run(gpu, |encoder| {
                let (q, k, v) = (only(&q), only(&k), only(&v));
                let arguments = AttentionArguments::new(&q, &k, &v, &out);
                attention.encode(encoder, arguments).unwrap();
            });
            let base = item as f64 * 100.0 + 5.0;
            let got = read_output(&guarded, &out);
            failures.note(
                format!("{subject} item {item}"),
                got.and_then(|got| {
                    matches(&got, &[base, base + 1.0, base + 2.0, base + 3.0], &[4])
                }),
            );
        }
    });
}

/// Whichever operand alone begins where four channels cannot be read at once, or eight, the others are read as they were.
#[test]
fn each_operand_may_begin_elsewhere_alone() {
    for_each_attention(20, |gpu, subject, failures| {
        let problem = AttentionProblem::new(2, 2, 9, 8);
        let prepared = random_operands(problem.clone(), &mut Random::new(5)).prepare();
        let data = &prepared.data;
        let attention = subject.attention(gpu, &problem).unwrap();
        let shape = [2, 9, 2, 8];
        let count = data.q.len();
        for (elsewhere, by) in (0..5).flat_map(|operand| [(operand, 1), (operand, 4)]) {
            let begins = |operand: usize| by * usize::from(operand == elsewhere);
            let view = |operand: usize, values: &[f32]| {
                place(gpu, &[count + by], values, |view| {
                    let first = begins(operand);
                    split(&sliced(&view, 0, first..first + count), 0, &shape)
                })
            };
            let (q, k, v) = (view(0, &data.q), view(1, &data.k), view(2, &data.v));
            let out = Tensor::from_slice(gpu, &[count + 8], &vec![f32::NAN; count + 8]).unwrap();
            let first = begins(3);
            let inside = sliced(&out.view(), 0, first..first + count);
            let inside = split(&inside, 0, &shape);
            run(gpu, |encoder| {
                let arguments = AttentionArguments::new(&q, &k, &v, &inside);
                attention.encode(encoder, arguments).unwrap();
            });
            let got = out.read_blocking::<f32>().unwrap();
            let (before, rest) = got.split_at(first);
            let (got, behind) = rest.split_at(count);
            let what = format!("{subject}, operand {elsewhere} begins {by} further");
            let untouched = before.iter().chain(behind).all(|value| value.is_nan());
            assert!(untouched, "{what}: written beside the output");
            failures.note(what, matches(got, &prepared.expected, &shape));
        }
    });
}

/// chelsea0x3b/dfdx#158: head outputs merged without swapping head and token axes.
#[test]
fn head_outputs_lie_side_by_side() {
    for_each_attention(2, |gpu, subject, failures| {
        let problem = AttentionProblem {
            rules: AttentionRules::causal(TopLeft),
            ..AttentionProblem::new(1, 2, 2, 2)
        };
        let data = AttentionData::new(
            problem,
            |_, _, _, _| 0.0,
            |_, _, _, _| 0.0,
            |_, t, h, d| (1 + h * 4 + t * 2 + d) as f32,
        );
        let right = [1.0, 2.0, 5.0, 6.0, 2.0, 3.0, 6.0, 7.0];
        let got = data.run(gpu, subject);
        failures.note(subject, got.and_then(|got| matches(&got, &right, &[8])));
    });
}

// ---------------------------------------------------------------- masks and causality

/// pytorch/pytorch#103082, microsoft/onnxruntime#29020: the causal mask anchored at the wrong corner.
/// tracel-ai/burn#4694: a mask and causality empty a row. jax-ml/jax#19237: the switch changes nothing.
#[test]
fn causal_rows_are_means_of_the_keys_they_see() {
    struct Case {
        q_len: usize,
        kv_len: usize,
        causal: Option<Alignment>,
        hidden: Option<usize>,
        right: &'static [f64],
    }
    let case = |q_len, kv_len, causal, hidden, right| Case {
        q_len,
        kv_len,
        causal,
        hidden,
        right,
    };
    let cases = [
        case(1, 16, Some(BottomRight), None, &[7.5]),
        case(1, 16, Some(TopLeft), None, &[0.0]),
        case(2, 3, Some(BottomRight), None, &[0.5, 1.0]),
        case(2, 3, Some(TopLeft), None, &[0.0, 0.5]),
        case(3, 8, Some(BottomRight), None, &[2.5, 3.0, 3.5]),
        case(5, 2, Some(BottomRight), None, &[0.0, 0.0, 0.0, 0.0, 0.5]),
        case(5, 2, Some(TopLeft), None, &[0.0, 0.5, 0.5, 0.5, 0.5]),
        case(4, 4, Some(TopLeft), Some(0), &[0.0, 1.0, 1.5, 2.0]),
        case(4, 4, Some(BottomRight), Some(0), &[0.0, 1.0, 1.5, 2.0]),
        case(8, 8, None, None, &[3.5; 8]),
        case(
            8,
            8,
            Some(TopLeft),
            None,
            &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
        ),
    ];
    for_each_attention(22, |gpu, subject, failures| {
        for case in &cases {
            let Case {
                q_len,
                kv_len,
                causal,
                hidden,
                right,
            } = *case;
            let problem = AttentionProblem {
                kv_len,
                rules: AttentionRules {
                    causal: causal.is_some(),
                    alignment: causal,
                    ..Default::default()
                },
                ..AttentionProblem::new(1, 1, q_len, 1)
            };
            let mut data = means(problem);
            if let Some(hidden) = hidden {
                data = data.masked(|_, key| key != hidden);
            }
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {:?}", data.problem),
                got.and_then(|got| matches(&got, right, &[q_len])),
            );
        }
    });
}

/// ggml-org/llama.cpp#12776: blocks of keys that are hidden as a whole, before the first that is seen.
#[test]
fn blocks_of_keys_hidden_as_a_whole_leave_no_trace() {
    for_each_attention(20, |gpu, subject, failures| {
        for hidden in [1, 31, 32, 33, 63, 64, 65, 127, 128, 130] {
            let data = means(AttentionProblem::new(1, 1, 192, 1)).masked(|_, key| key >= hidden);
            let mean = (hidden + 191) as f64 / 2.0;
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {hidden} hidden"),
                got.and_then(|got| matches(&got, &[mean; 192], &[192])),
            );
            // The last keys of the row, too.
            let data = means(AttentionProblem::new(1, 1, 192, 1)).masked(|_, key| key < hidden);
            let mean = (hidden - 1) as f64 / 2.0;
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {hidden} seen"),
                got.and_then(|got| matches(&got, &[mean; 192], &[192])),
            );
        }
    });
}

/// pytorch/pytorch#86120: polarity. pytorch/pytorch#101967: NaN at a masked key reaches the output.
#[test]
fn true_means_may_attend_and_hidden_nan_is_not_seen() {
    for_each_attention(8, |gpu, subject, failures| {
        for (poison, name) in [
            (2.0, "2"),
            (f32::NAN, "NaN"),
            (f32::INFINITY, "inf"),
            (-f32::INFINITY, "-inf"),
        ] {
            let at = |other: f32| move |_, t, _, _| if t == 0 { other } else { poison };
            let data = AttentionData::new(
                AttentionProblem::new(1, 1, 2, 1),
                |_, _, _, _| 1.0,
                at(0.5),
                at(1.0),
            );
            let data = data.masked(|_, key| key == 0);
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {name}"),
                got.and_then(|got| all_equal(&got, 1.0)),
            );
        }
    });
}

/// pytorch/pytorch#103749, Dao-AILab/flash-attention#443, pytorch/pytorch#141218.
#[test]
fn rows_that_see_no_key_give_exactly_0() {
    for_each_attention(20, |gpu, subject, failures| {
        for (q_len, kv_len) in [
            (2, 1),
            (9, 8),
            (33, 1),
            (65, 32),
            (146, 1),
            (129, 64),
            (70, 0),
            (3, 0),
        ] {
            let case = AttentionCase {
                causal: Some(BottomRight),
                ..AttentionCase::new(2, 2, q_len, kv_len, 5)
            };
            let result = case.data().run(gpu, subject).and_then(|got| {
                for item in got.chunks(q_len * 10) {
                    all_equal(&item[..(q_len - kv_len) * 10], 0.0)?;
                    if item[(q_len - kv_len) * 10..]
                        .iter()
                        .any(|value| *value == 0.0 || value.is_nan())
                    {
                        return Err("a row that sees keys is empty".into());
                    }
                }
                Ok(())
            });
            failures.note(format!("{subject} {case:?}"), result);
        }
        for (causal, q_len, kv_len) in [
            (None, 33, 65),
            (Some(TopLeft), 5, 5),
            (None, 1, 1),
            (None, 70, 0),
        ] {
            let case = AttentionCase {
                causal,
                hide: Hide::First(kv_len),
                ..AttentionCase::new(2, 2, q_len, kv_len, 5)
            };
            let got = case.data().run(gpu, subject);
            failures.note(
                format!("{subject} {case:?}"),
                got.and_then(|got| all_equal(&got, 0.0)),
            );
        }
    });
}

/// Also where what follows is NaN or infinite.
#[test]
fn later_keys_do_not_change_earlier_rows() {
    for_each_attention(60, |gpu, subject, failures| {
        let tokens = 70;
        let case = AttentionCase {
            causal: Some(TopLeft),
            ..AttentionCase::new(2, 2, tokens, tokens, 6)
        };
        let data = case.data();
        let before = data.run(gpu, subject).unwrap();
        let width = 12;
        for position in [1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 69] {
            for replacement in [5.0, f32::NAN, f32::INFINITY] {
                let mut changed = data.clone();
                for item in 0..2 {
                    let start = (item * tokens + position) * width;
                    changed.k[start..start + width].fill(replacement);
                    changed.v[start..start + width].fill(replacement);
                }
                let result = changed.run(gpu, subject).and_then(|after| {
                    for (before, after) in before
                        .chunks(tokens * width)
                        .zip(after.chunks(tokens * width))
                    {
                        same_bits(&after[..position * width], &before[..position * width])?;
                        if same_bits(&after[position * width..], &before[position * width..])
                            .is_ok()
                        {
                            return Err("the change was not seen at all".into());
                        }
                    }
                    Ok(())
                });
                failures.note(format!("{subject} key {position} = {replacement}"), result);
            }
        }
    });
}

// ---------------------------------------------------------------- numbers

/// pytorch/executorch#18407, tensorflow/tfjs#7588, triton-lang/triton#5660: the range of the softmax.
#[test]
fn softmax_is_exact_in_range() {
    let cases: [(&[f32], &[f32], f64); 10] = [
        (&[200.0, 0.0, -200.0], &[10.0, 20.0, 30.0], 10.0),
        (&[-200.0, 0.0, 200.0], &[10.0, 20.0, 30.0], 30.0),
        (&[151.29, 0.0], &[10.0, 20.0], 10.0),
        (&[-400.0, -400.0], &[0.0, 1.0], 0.5),
        (&[-1e30, -1e30], &[0.0, 1.0], 0.5),
        (&[1e30, 1e30], &[0.0, 1.0], 0.5),
        (&[1e5, -1e5], &[3.0, 4.0], 3.0),
        (&[-1e5, 1e5 - 1.0, 1e5 - 1.0], &[3.0, 4.0, 6.0], 5.0),
        (&[-1e30, 0.0], &[0.0, 1.0], 1.0),
        (&[1.0, 0.0], &[2.0, 0.0], 1.462_117_157),
    ];
    for_each_attention(20, |gpu, subject, failures| {
        for (scores, values, right) in &cases {
            let got = scored(3, scores, values).run(gpu, subject);
            failures.note(
                format!("{subject} {scores:?}"),
                got.and_then(|got| matches(&got, &[*right; 3], &[3])),
            );
        }
        // The same across blocks of keys: one high score among many low ones.
        for spike in [0, 1, 31, 32, 63, 64, 99] {
            let mut scores = [0.0; 100];
            scores[spike] = 100.0;
            let values: Vec<f32> = (0..100).map(|j| j as f32).collect();
            let got = scored(2, &scores, &values).run(gpu, subject);
            failures.note(
                format!("{subject} spike at {spike}"),
                got.and_then(|got| matches(&got, &[spike as f64; 2], &[2])),
            );
        }
    });
}

/// jax-ml/jax#27224: padding scored 0 outweighs scores of -100.
#[test]
fn padding_has_no_weight() {
    let lengths = [
        1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193,
    ];
    for_each_attention(80, |gpu, subject, failures| {
        for kv_len in lengths {
            for q_len in [1, 65] {
                let data = scored(q_len, &vec![-100.0; kv_len], &vec![1.0; kv_len]);
                let got = data.run(gpu, subject);
                failures.note(
                    format!("{subject} {q_len} by {kv_len}"),
                    got.and_then(|got| all_equal(&got, 1.0)),
                );
            }
        }
    });
}

/// A mean of ones is 1: exactly where all scores are equal, to a few roundings of 1 else.
#[test]
fn values_of_1_give_1() {
    for_each_attention(12, |gpu, subject, failures| {
        for (q_len, kv_len) in [(1, 1), (3, 2), (65, 33), (64, 200), (9, 129), (33, 1000)] {
            let problem = AttentionProblem {
                kv_len,
                ..AttentionProblem::new(1, 2, q_len, 5)
            };
            let ones = AttentionData::new(
                problem,
                |_, _, _, _| 0.3,
                |_, _, _, _| -0.7,
                |_, _, _, _| 1.0,
            );
            let got = ones.run(gpu, subject);
            failures.note(
                format!("{subject} equal scores, {:?}", ones.problem),
                got.and_then(|got| all_equal(&got, 1.0)),
            );
            let mut random = AttentionCase::new(1, 2, q_len, kv_len, 5).data();
            random.v.fill(1.0);
            let result = random.run(gpu, subject).and_then(|got| {
                let worst = got.iter().map(|v| (v - 1.0).abs()).fold(0.0, f32::max);
                let sound = got.iter().all(|v| v.is_finite()) && worst <= 2e-6;
                if sound {
                    Ok(())
                } else {
                    Err(format!("off by {worst:e}"))
                }
            });
            failures.note(
                format!("{subject} random scores, {:?}", random.problem),
                result,
            );
        }
    });
}

/// ohdearquant/lattice#790: max() drops NaN, and a guard of the sum hides the bad row.
#[test]
fn a_query_of_nan_poisons_its_own_row_alone() {
    for_each_attention(14, |gpu, subject, failures| {
        for row in [0, 3, 7, 8, 31, 32, 69] {
            let data = AttentionCase::new(1, 1, 70, 40, 8).data();
            let before = data.run(gpu, subject).unwrap();
            let mut poisoned = data.clone();
            poisoned.q[row * 8 + 5] = f32::NAN;
            let result = poisoned.run(gpu, subject).and_then(|after| {
                for (at, (after, before)) in after.chunks(8).zip(before.chunks(8)).enumerate() {
                    if at != row {
                        same_bits(after, before)?;
                    } else if !after.iter().all(|value| value.is_nan()) {
                        return Err(format!("row {row} is {after:?}"));
                    }
                }
                Ok(())
            });
            failures.note(format!("{subject} row {row}"), result);
        }
    });
}

/// As in the reference: a key that is seen and scores NaN or +infinity makes a NaN of the row.
#[test]
fn a_seen_key_of_nan_or_infinity_makes_nan() {
    for_each_attention(12, |gpu, subject, failures| {
        for score in [f32::NAN, f32::INFINITY] {
            for at in [0, 1, 33] {
                let mut scores = [0.5; 40];
                scores[at] = score;
                let result = scored(3, &scores, &[1.0; 40])
                    .run(gpu, subject)
                    .and_then(|got| {
                        let all = got.iter().all(|value| value.is_nan());
                        if all { Ok(()) } else { Err(format!("{got:?}")) }
                    });
                failures.note(format!("{subject} score {at} = {score}"), result);
            }
        }
    });
}

/// A key whose score is -infinity weighs nothing wherever it stands, and a row that has no other is as an empty one.
#[test]
fn a_score_of_minus_infinity_weighs_nothing() {
    for_each_attention(20, |gpu, subject, failures| {
        for (tokens, low) in [
            (2, 0..1),
            (2, 1..2),
            (9, 0..8),
            (40, 0..31),
            (40, 0..32),
            (40, 0..33),
            (70, 30..65),
            (33, 32..33),
            (5, 0..5),
            (64, 0..64),
        ] {
            let (mut scores, mut values) = (Vec::new(), Vec::new());
            for at in 0..tokens {
                let high = (at % 3) as f32;
                scores.push(if low.contains(&at) {
                    -f32::INFINITY
                } else {
                    high
                });
                values.push(at as f32);
            }
            let data = scored(3, &scores, &values);
            let result = data
                .run(gpu, subject)
                .and_then(|got| matches(&got, &data.expected(), &data.out_shape()));
            failures.note(format!("{subject} {tokens} keys, {low:?} low"), result);
        }
    });
}

#[test]
fn repeating_a_call_gives_the_same_bits() {
    for_each_attention(10, |gpu, subject, failures| {
        let case = AttentionCase {
            hide: Hide::Random,
            causal: Some(TopLeft),
            ..AttentionCase::new(2, 3, 97, 97, 16)
        };
        let data = case.data();
        let first = data.run(gpu, subject).unwrap();
        for _ in 0..5 {
            let again = data.run(gpu, subject);
            failures.note(subject, again.and_then(|again| same_bits(&again, &first)));
        }
    });
}

#[test]
fn equal_batch_items_and_heads_give_equal_bits() {
    for_each_attention(4, |gpu, subject, failures| {
        for causal in [None, Some(TopLeft)] {
            let one = AttentionCase {
                causal,
                ..AttentionCase::new(1, 1, 70, 70, 8)
            }
            .data();
            let problem = AttentionProblem {
                batch: 3,
                heads: 3,
                kv_heads: 3,
                ..one.problem.clone()
            };
            let from = |values: Vec<f32>| move |_, t: usize, _, d: usize| values[t * 8 + d];
            let many = AttentionData::new(
                problem,
                from(one.q.clone()),
                from(one.k.clone()),
                from(one.v.clone()),
            );
            let single = one.run(gpu, subject).unwrap();
            let result = many.run(gpu, subject).and_then(|got| {
                for (at, row) in got.chunks(8).enumerate() {
                    let token = at / 3 % 70;
                    same_bits(row, &single[token * 8..token * 8 + 8])?;
                }
                Ok(())
            });
            failures.note(subject, result);
        }
    });
}

// ---------------------------------------------------------------- empty and huge

/// gfx-rs/wgpu#6467, gfx-rs/wgpu#1173, pytorch/pytorch#133780: nothing to do is nothing dispatched.
#[test]
fn nothing_to_compute_touches_nothing() {
    for_each_attention(6, |gpu, subject, failures| {
        for (batch, q_len, kv_len) in [(0, 5, 5), (1, 0, 5), (1, 0, 0)] {
            let case = AttentionCase::new(batch, 2, q_len, kv_len, 8);
            let plan = subject
                .attention(gpu, &case.problem())
                .unwrap()
                .plan()
                .clone();
            let result = case.data().run(gpu, subject).and_then(|got| {
                let right = got.is_empty() && plan.grid.is_none();
                if right {
                    Ok(())
                } else {
                    Err(format!("{plan}"))
                }
            });
            failures.note(format!("{subject} {case:?}"), result);
        }
    });
    for_each_linear(6, |gpu, subject, failures| {
        for (batch, tokens, d_out) in [(0, 5, 5), (1, 0, 5), (1, 5, 0)] {
            let case = LinearCase::new(batch, tokens, 4, d_out);
            let result = case.data().run(gpu, subject).and_then(|got| {
                if got.is_empty() {
                    Ok(())
                } else {
                    Err(format!("{} elements", got.len()))
                }
            });
            failures.note(format!("{subject} {case:?}"), result);
        }
    });
}

/// pytorch/executorch#22326: shapes that leave most of a workgroup idle.
#[test]
fn the_smallest_problem_gives_its_only_value() {
    for_each_attention(32, |gpu, subject, failures| {
        for batch in 1..=16 {
            let problem = AttentionProblem::new(batch, 1, 1, 1);
            let data = AttentionData::new(
                problem,
                |_, _, _, _| 2.0,
                |_, _, _, _| 3.0,
                |_, _, _, _| 7.0,
            );
            failures.note(
                format!("{subject} {batch}"),
                data.run(gpu, subject).and_then(|got| all_equal(&got, 7.0)),
            );
        }
    });
}

/// Grids past 65535 workgroups are folded on two or three axes, with idle workgroups at the end: the same, small.
#[test]
fn folded_grids_reach_every_row() {
    let folds = [[1, 1], [1, 5], [2, 3], [3, 1], [3, 7], [5, 2]];
    for_each_attention(12, |gpu, subject, failures| {
        let case = AttentionCase {
            causal: Some(TopLeft),
            ..AttentionCase::new(3, 3, 70, 70, 8)
        };
        let prepared = case.prepare();
        for fold in folds {
            let folded = Subject {
                fold: Some(fold),
                ..subject.clone()
            };
            failures.note(format!("{subject} {fold:?}"), prepared.check(gpu, &folded));
        }
    });
    for_each_linear(12, |gpu, subject, failures| {
        let prepared = LinearCase::new(3, 50, 20, 200).prepare();
        for fold in folds {
            let folded = Subject {
                fold: Some(fold),
                ..subject.clone()
            };
            failures.note(format!("{subject} {fold:?}"), prepared.check(gpu, &folded));
        }
    });
}

/// pytorch/pytorch#142228: the batch mapped to one axis of the grid. (Of the planner's kernel alone: a software
/// adapter takes half a minute for the other.)
#[test]
fn a_batch_of_70000_is_right_in_every_item() {
    for_each_attention(1, |gpu, subject, failures| {
        if !subject.is_planned(gpu) {
            return;
        }
        let problem = AttentionProblem::new(70_000, 1, 2, 4);
        let data = AttentionData::new(
            problem,
            |_, _, _, _| 0.0,
            |_, _, _, _| 0.0,
            |b, _, _, _| b as f32,
        );
        let result = data.run(gpu, subject).and_then(|got| {
            let expected: Vec<f32> = (0..got.len()).map(|at| (at / 8) as f32).collect();
            same_bits(&got, &expected)
        });
        failures.note(subject, result);
    });
}

/// microsoft/onnxruntime#21687: wrong from 65536 rows on.
#[test]
fn rows_past_65535_are_softmaxed_too() {
    for_each_attention(6, |gpu, subject, failures| {
        for (batch, heads, q_len) in [(1, 1, 65_535), (2, 1, 32_768), (1, 3, 43_691)] {
            let problem = AttentionProblem {
                kv_len: 3,
                rules: scaled(Some(1.0)),
                ..AttentionProblem::new(batch, heads, q_len, 3)
            };
            let data = AttentionData::new(
                problem,
                |_, _, _, d| if d == 0 { 1.0 } else { 0.0 },
                |_, t, _, d| if d == 0 { ((t + 1) as f32).ln() } else { 0.0 },
                |_, t, _, d| if t == d { 1.0 } else { 0.0 },
            );
            let rows = batch * heads * q_len;
            let expected = [1.0 / 6.0, 1.0 / 3.0, 0.5].repeat(rows);
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {rows} rows"),
                got.and_then(|got| matches(&got, &expected, &[rows, 3])),
            );
        }
    });
}

// ---------------------------------------------------------------- projections

#[test]
fn projections_around_every_tile_edge_match_the_reference() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    // (Those that store into a cache have a test file of their own.)
    let subjects = configurations(&gpu, Operation::Linear, |configuration| {
        configuration.rules.contains(&STORE_ROWS)
    });
    let mut number = 0;
    for rows in EDGES {
        for d_out in EDGES {
            number += 1;
            let (batch, tokens) = match number % 3 {
                0 if rows % 3 == 0 => (3, rows / 3),
                1 => (rows, 1),
                _ => (1, rows),
            };
            let case = LinearCase {
                bias: number % 2 == 0,
                layout: LINEAR_LAYOUTS[(number + number / 16) % 8],
                seed: number as u64,
                ..LinearCase::new(batch, tokens, EDGES[number * 7 % 16], d_out)
            };
            let prepared = case.prepare();
            for subject in &subjects {
                let configuration = subject.configuration.as_ref().unwrap();
                let fours = configuration.rules.contains(&LINEAR_FOURS);
                if fours && !case.d_in.is_multiple_of(4) {
                    continue;
                }
                let result = prepared.check(&gpu, subject);
                failures.note(format!("{subject} {case:?}"), result);
            }
        }
    }
    failures.report(1000);
}

/// The planner takes the kernel for few rows in a tile that holds them, and others for more.
#[test]
fn few_rows_are_planned_for_and_match_the_reference() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for rows in 1..=9 {
        for form in [None, Some(Form::Lanes), Some(Form::Tiled)] {
            let problem = LinearProblem {
                form,
                ..LinearCase::new(1, rows, 65, 33).data().problem
            };
            let plan = problem.plan(gpu.capabilities()).unwrap();
            let few = plan.kernel.operation == Operation::LinearFew;
            assert_eq!(few, rows <= 8, "{plan}");
            if few {
                let tile = rows.next_power_of_two() as u32;
                assert_eq!(plan.configuration.get("ROWS"), tile, "{plan}");
                assert!(plan.reason.contains("few rows"), "{plan}");
            }
            for forced in [true, false] {
                let few = Some(forced);
                let plan = LinearProblem { few, ..problem }.plan(gpu.capabilities());
                let operation = plan.unwrap().kernel.operation;
                assert_eq!(operation == Operation::LinearFew, forced);
            }
        }
        for d_in in [7, 8, 9, 63, 64, 65, 129] {
            for layout in [LinearLayout::Contiguous, LinearLayout::ChannelsFirst] {
                let case = LinearCase {
                    layout,
                    seed: (rows * d_in) as u64,
                    ..LinearCase::new(rows, 1, d_in, 31 + d_in % 3)
                };
                let prepared = case.prepare();
                for subject in kernels(Operation::Linear) {
                    let result = prepared.check(&gpu, &subject);
                    failures.note(format!("{subject} {case:?}"), result);
                }
            }
        }
    }
    failures.report(300);
}

/// webonnx/wonnx#95: right only for sizes divisible by 4.
#[test]
fn projections_of_sizes_not_divisible_by_4_match_the_reference() {
    for_each_linear(20, |gpu, subject, failures| {
        let data = LinearData {
            problem: LinearProblem {
                batch: 1,
                tokens: 4,
                d_in: 4,
                d_out: 2,
                form: None,
                few: None,
            },
            layout: LinearLayout::Contiguous,
            x: (0..16).map(|i| i as f32).collect(),
            weight: vec![1.0; 8],
            bias: None,
        };
        let got = data.run(gpu, subject);
        let right = [6.0, 6.0, 22.0, 22.0, 38.0, 38.0, 54.0, 54.0];
        failures.note(subject, got.and_then(|got| same_bits(&got, &right)));
        for width in [1, 2, 3, 5, 6, 7, 9, 10, 11, 13] {
            let case = LinearCase::new(2, 3, width, 3 * width);
            let result = case.prepare().check(gpu, subject);
            failures.note(format!("{subject} {case:?}"), result);
        }
    });
}

/// tracel-ai/burn#4966: trailing rows near 0 once there are more than about 500.
#[test]
fn projections_of_ones_give_the_width_in_every_row() {
    for_each_linear(16, |gpu, subject, failures| {
        for rows in [35, 64, 499, 500, 512, 535, 1000, 1024] {
            let data = LinearData {
                problem: LinearProblem {
                    batch: 1,
                    tokens: rows,
                    d_in: 1024,
                    d_out: 33,
                    form: None,
                    few: None,
                },
                layout: LinearLayout::Contiguous,
                x: vec![1.0; rows * 1024],
                weight: vec![1.0; 33 * 1024],
                bias: None,
            };
            let got = data.run(gpu, subject);
            failures.note(
                format!("{subject} {rows} rows"),
                got.and_then(|got| all_equal(&got, 1024.0)),
            );
        }
    });
}

#[test]
fn projections_give_the_bias_where_there_is_no_input_channel() {
    for_each_linear(2, |gpu, subject, failures| {
        let case = LinearCase::new(2, 3, 0, 5);
        failures.note(
            format!("{subject} {case:?}"),
            case.prepare().check(gpu, subject),
        );
    });
}

#[test]
fn projections_past_65535_workgroups_reach_every_row() {
    for_each_linear(1, |gpu, subject, failures| {
        if !subject.is_planned(gpu) {
            return;
        }
        let tile = match (subject.kernel.operation, subject.kernel.form) {
            (Operation::LinearFew, _) => 8,
            (_, Form::Tiled) => 32,
            (_, Form::Lanes) => 16,
        };
        let (rows, d_out) = (2, 65_536 * tile + 5);
        let data = LinearData {
            problem: LinearProblem {
                batch: 1,
                tokens: rows,
                d_in: 1,
                d_out,
                form: None,
                few: None,
            },
            layout: LinearLayout::Contiguous,
            x: vec![1.0, 2.0],
            weight: (0..d_out).map(|column| column as f32).collect(),
            bias: None,
        };
        let groups = subject.linear(gpu, &data.problem).unwrap().plan().groups;
        assert!(groups > 65_535, "{groups} groups");
        let result = data.run(gpu, subject).and_then(|got| {
            let right = |at: usize| ((at / d_out + 1) * (at % d_out)) as f32;
            let wrong = (0..got.len()).find(|at| got[*at] != right(*at));
            wrong.map_or(Ok(()), |at| Err(format!("element {at} is {}", got[at])))
        });
        failures.note(subject, result);
    });
}

#[test]
fn every_layout_of_a_projection_gives_the_bits_of_the_contiguous_copy() {
    for_each_linear(40, |gpu, subject, failures| {
        for tokens in [1, 2, 5, 33, 70] {
            let case = LinearCase {
                seed: tokens as u64,
                ..LinearCase::new(3, tokens, 19, 37)
            };
            let data = case.data();
            let contiguous = data.run(gpu, subject).unwrap();
            for layout in LINEAR_LAYOUTS {
                let strided = LinearData {
                    layout,
                    ..data.clone()
                };
                let result = strided.run(gpu, subject);
                failures.note(
                    format!("{subject} {layout:?} {case:?}"),
                    result.and_then(|got| same_bits(&got, &contiguous)),
                );
            }
        }
    });
}

/// Whatever its place in a tile, a row is the same chain of multiply-adds.
#[test]
fn equal_rows_of_a_projection_give_equal_bits() {
    for_each_linear(4, |gpu, subject, failures| {
        for rows in [70, 150] {
            let mut data = LinearCase::new(1, rows, 45, 70).data();
            data.x = data.x[..45].repeat(rows);
            let result = data.run(gpu, subject).and_then(|got| {
                got.chunks(70)
                    .try_for_each(|row| same_bits(row, &got[..70]))?;
                let again = data.run(gpu, subject)?;
                same_bits(&again, &got)
            });
            failures.note(format!("{subject} {rows} rows"), result);
        }
    });
}

#[test]
fn a_row_of_nan_poisons_its_own_row_of_a_projection_alone() {
    for_each_linear(6, |gpu, subject, failures| {
        for row in [0, 17, 69] {
            let data = LinearCase::new(1, 70, 20, 18).data();
            let before = data.run(gpu, subject).unwrap();
            let mut poisoned = data.clone();
            poisoned.x[row * 20 + 3] = f32::NAN;
            let result = poisoned.run(gpu, subject).and_then(|after| {
                for (at, (after, before)) in after.chunks(18).zip(before.chunks(18)).enumerate() {
                    if at != row {
                        same_bits(after, before)?;
                    } else if !after.iter().all(|value| value.is_nan()) {
                        return Err(format!("row {row} is {after:?}"));
                    }
                }
                Ok(())
            });
            failures.note(format!("{subject} row {row}"), result);
        }
    });
}

/// One weight may serve as x and as weight.
#[test]
fn one_view_may_be_x_and_weight() {
    for_each_linear(2, |gpu, subject, failures| {
        let values = Random::new(3).normals(12 * 5);
        let matrix = place(gpu, &[12, 5], &values, |view| view);
        let x = split(&matrix, 0, &[1, 12]);
        let problem = LinearProblem {
            batch: 1,
            tokens: 12,
            d_in: 5,
            d_out: 12,
            form: None,
            few: None,
        };
        let linear = subject.linear(gpu, &problem).unwrap();
        let guarded = support::Guarded::new(gpu, &[1, 12, 12]);
        let y = guarded.tensor.view();
        run(gpu, |encoder| {
            let arguments = LinearArguments {
                x: &x,
                weight: &matrix,
                bias: None,
                y: &y,
            };
            linear.encode(encoder, arguments).unwrap();
        });
        let wide = reference::widen(&values);
        let expected = reference::linear(&wide, 12, 5, &wide, None, 12).unwrap();
        let got = read_output(&guarded, &y);
        failures.note(
            subject,
            got.and_then(|got| matches(&got, &expected, &[12, 12])),
        );
    });
}
