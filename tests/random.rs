//! Random problems over all that attention takes: shapes, strides, rules, types. Every kernel that takes a problem is
//! held against the f64 reference, the log-sum-exp too, and now and then the weights and the parts of a split.
//!
//! The numbers are the same every time. `WGPU_ATTENTION_CASES=n` draws another number of problems,
//! `WGPU_ATTENTION_SEED=n` others. Each problem has a seed of its own, which a failure names:
//! `WGPU_ATTENTION_PROBLEM=seed` replays that one alone.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::check::*;
use support::{Guarded, Random, leave_dirt, run};
use wgpu_attention::compare::Tolerance;
use wgpu_attention::kernels::Operation;
use wgpu_attention::{
    Alignment, Attention, AttentionArguments, AttentionProblem, AttentionRules, AttentionWeights,
    Capabilities, ElementType, Gpu, Merge, MergeArguments, MergeProblem, WeightsArguments,
    WeightsStage,
};

/// A problem and its operands from a seed.
fn draw(seed: u64) -> AttentionData {
    let mut random = Random::new(seed);
    let random = &mut random;
    let one_in = |random: &mut Random, n| random.below(n) == 0;

    let kv_heads = 1 + random.below(3);
    let group = [1, 1, 1, 2, 3, 4][random.below(6)];
    // Most are small; some pass the largest tiles.
    let length = |random: &mut Random| match random.below(8) {
        0 => 1,
        1..=3 => 1 + random.below(12),
        4..=6 => 1 + random.below(40),
        _ => 1 + random.below(140),
    };
    let (q_len, kv_len) = match random.below(3) {
        0 => {
            let tokens = length(random);
            (tokens, tokens)
        }
        _ => (length(random), length(random)),
    };
    // Sizes of several compiled ones, most of them small.
    let size = |random: &mut Random| match random.below(20) {
        0..=11 => 1 + random.below(16),
        12..=16 => 1 + random.below(32),
        17 => 33 + random.below(32),
        18 => 65 + random.below(64),
        _ => 129 + random.below(128),
    };
    let mut head_dim = size(random);
    let mut value_dim = if one_in(random, 3) {
        size(random)
    } else {
        head_dim
    };
    let packed = one_in(random, 6);
    let batch = 1 + random.below(3);
    let own_rule = one_in(random, 12);

    let types = [ElementType::F32, ElementType::F16, ElementType::BF16];
    let stored = |random: &mut Random| types[random.below(3)];
    let (q_type, kv_type, out_type) = match random.below(10) {
        0..=5 => (ElementType::F32, ElementType::F32, ElementType::F32),
        6 | 7 => {
            let one = stored(random);
            (one, one, one)
        }
        8 => (ElementType::F32, stored(random), stored(random)),
        _ => (stored(random), stored(random), stored(random)),
    };
    // What is compiled for these alone stays with few sizes: every pipeline takes a second.
    let small_types = q_type != ElementType::F32 || kv_type != ElementType::F32;
    let (mut q_len, mut kv_len) = (q_len, kv_len);
    if small_types || own_rule {
        let wide = small_types && one_in(random, 6);
        let (least, most) = match (own_rule, wide) {
            (true, _) => (1, 8),
            (false, true) => (65, 96),
            (false, false) => (1, 16),
        };
        head_dim = head_dim.clamp(least, most);
        value_dim = value_dim.clamp(least, most);
        (q_len, kv_len) = (q_len.min(63), kv_len.min(90));
    }

    let window = |random: &mut Random| one_in(random, 4).then(|| random.below(kv_len + 3));
    let rules = AttentionRules {
        scale: match random.below(5) {
            // Scores of a size whose rounding does not show.
            0 => Some((-1.5 + random.below(300) as f32 / 100.0) / (head_dim as f32).sqrt()),
            1 => Some(0.0),
            _ => None,
        },
        softcap: one_in(random, 5).then(|| 0.5 + random.below(100) as f32 / 10.0),
        causal: one_in(random, 2),
        alignment: Some([Alignment::TopLeft, Alignment::BottomRight][random.below(2)]),
        window_left: window(random),
        window_right: window(random),
        ..Default::default()
    };
    let problem = AttentionProblem {
        batch,
        heads: kv_heads * group,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
        packed,
        // Every pipeline takes a second: pages go with small heads in f32.
        page_size: (!packed
            && !own_rule
            && !small_types
            && head_dim.max(value_dim) <= 16
            && one_in(random, 5))
        .then(|| 1 + random.below(20)),
        keys: one_in(random, 8).then(|| {
            let start = random.below(kv_len + 1);
            start..start + random.below(kv_len + 1 - start)
        }),
        q_type,
        kv_type,
        out_type,
        rules,
        ..AttentionProblem::new(1, 1, 1, 1)
    };

    let mut data = AttentionData {
        layout: LAYOUTS[random.below(LAYOUTS.len())],
        one_table: one_in(random, 3),
        ..random_operands(problem, random)
    };
    let p = data.problem.clone();
    if packed {
        // Sequences of any lengths up to the longest, none among them.
        let starts = |random: &mut Random, longest: usize| {
            let mut at = 0;
            let mut starts = vec![0];
            for _ in 0..batch {
                at += random.below(longest + 1) as u32;
                starts.push(at);
            }
            starts
        };
        let (q, k) = (starts(random, q_len), starts(random, kv_len));
        let tokens = [&q, &k].map(|starts| starts[batch] as usize);
        let fresh = random_operands(
            AttentionProblem {
                batch: 1,
                q_len: tokens[0],
                kv_len: tokens[1],
                keys: None,
                ..p.clone()
            },
            random,
        );
        (data.q, data.k, data.v) = (fresh.q, fresh.k, fresh.v);
        data.cu_seqlens = Some([q, k]);
    }
    let pairs = |random: &mut Random| {
        [p.batch, p.heads, q_len, kv_len].map(|size| if one_in(random, 2) { 1 } else { size })
    };
    if one_in(random, 4) {
        let shape = pairs(random);
        let mask = random.bools(shape.iter().product());
        data = data.with_mask(shape, mask);
    }
    if one_in(random, 4) {
        let shape = pairs(random);
        let mut bias = random.normals(shape.iter().product());
        for value in &mut bias {
            *value = match random.below(12) {
                0 => f32::NEG_INFINITY,
                // Not -infinity, but a number.
                1 => f32::MIN,
                _ => *value,
            };
        }
        data = data.with_bias(shape, bias);
    }
    let lens = |random: &mut Random, most: usize| -> Vec<u32> {
        (0..batch).map(|_| random.below(most + 1) as u32).collect()
    };
    if one_in(random, 5) {
        let lens = lens(random, kv_len);
        data = data.with_kv_lens(&lens);
    }
    if one_in(random, 8) {
        let lens = lens(random, q_len);
        data = data.with_q_lens(&lens);
    }
    if one_in(random, 6) {
        let count = if one_in(random, 2) {
            p.heads
        } else {
            batch * p.heads
        };
        data = data.with_slopes(
            (0..count)
                .map(|_| random.below(100) as f32 / 200.0)
                .collect(),
        );
    }
    if one_in(random, 6) {
        let sinks = random.normals(p.heads);
        data = data.with_sinks(sinks);
    }
    if own_rule {
        let mut values = random.normals(p.heads + 1);
        // A factor above 1 would make a lowest f32 overflow, which is -infinity and hides.
        values[0] = values[0].clamp(-1.0, 1.0);
        data = data.with_rule(RULE, values);
    }
    poison(&mut data, random);
    data
}

/// One rule for all problems, so that it is compiled once for each kernel.
const RULE: OwnRule = OwnRule {
    wgsl: "
// Keys of the same parity, and the first ones; a bias by head that grows with the key.
fn may_attend(batch: u32, head: u32, query: u32, key: u32) -> bool {
    return ((query ^ key) & 1u) == 0u || key < 3u;
}
fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    return score * rule_data(0u) + rule_data(1u + head) * f32(key % 7u) * 0.1;
}
",
    may_attend: |[_, _, query, key], _| (query ^ key) & 1 == 0 || key < 3,
    score: |score, [_, head, _, key], data| {
        score * f64::from(data[0])
            + f64::from(data[1 + head]) * (key % 7) as f64 * f64::from(0.1f32)
    },
};

/// NaN and infinity in the keys and values that no row sees.
fn poison(data: &mut AttentionData, random: &mut Random) {
    let p = &data.problem;
    if p.packed || random.below(2) == 0 {
        return;
    }
    let weights = data.with_inputs(|inputs| {
        // Whether a pair is seen shows in the scores.
        wgpu_attention::reference::scores(inputs, wgpu_attention::reference::Stage::Masked).unwrap()
    });
    let group = p.heads / p.kv_heads;
    for item in 0..p.batch {
        for head in 0..p.kv_heads {
            for key in 0..p.kv_len {
                let seen = (0..group * p.q_len).any(|at| {
                    let (head, query) = (head * group + at / p.q_len, at % p.q_len);
                    let row = (item * p.heads + head) * p.q_len + query;
                    weights[row * p.kv_len + key] != f64::NEG_INFINITY
                });
                if !seen {
                    let token = (item * p.kv_len + key) * p.kv_heads + head;
                    let value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][key % 3];
                    data.k[token * p.head_dim..][..p.head_dim].fill(value);
                    data.v[token * p.value_dim..][..p.value_dim].fill(value);
                }
            }
        }
    }
}

/// Every kernel that takes the problem; for one in eight the weights, for one in eight the parts of a split.
fn check(gpu: &Gpu, seed: u64) -> Result<(), String> {
    let data = draw(seed);
    let expected = data.expected_all();
    leave_dirt(gpu, expected.out.len());
    let (shape, tolerance) = (data.out_shape(), data.tolerance());
    let mut checked = 0;
    for mut subject in attention_kernels() {
        if !subject.takes(gpu, &data.problem) {
            continue;
        }
        if subject.kernel.operation == Operation::Decode {
            // Those for few queries now and then: every pipeline takes a second.
            if !seed.is_multiple_of(3) || data.problem.head_dim.max(data.problem.value_dim) > 64 {
                continue;
            }
            subject.splits = [None, Some(1), Some(2), Some(3), Some(8)][seed as usize % 5];
        }
        let named = |error| format!("{subject}: {error}");
        let got = data.run_all(gpu, &subject).map_err(named)?;
        if data.out_shape().contains(&0) {
            continue;
        }
        compared(&got.out, &expected.out, &shape, tolerance).map_err(named)?;
        compared(&got.lse, &expected.lse, &[got.lse.len()], Tolerance::F32)
            .map_err(|error| format!("{subject}: lse: {error}"))?;
        checked += 1;
    }
    if checked == 0 && !data.out_shape().contains(&0) {
        return Err("no kernel takes it".into());
    }
    match seed % 8 {
        1 => check_parts(gpu, &data, &expected.out, &expected.lse),
        3 => check_weights(gpu, &data, &expected.weights),
        5 => check_split(gpu, &data, &expected.out, &expected.lse),
        _ => Ok(()),
    }
}

/// The same as if the adapter's loops ended after half of the keys.
fn check_parts(gpu: &Gpu, data: &AttentionData, out: &[f64], lse: &[f64]) -> Result<(), String> {
    if data.problem.packed || data.problem.rules.rule.is_some() {
        return Ok(());
    }
    for subject in kernels(Operation::Attention) {
        if !subject.takes(gpu, &data.problem) {
            continue;
        }
        let problem = AttentionProblem {
            form: Some(subject.kernel.form),
            decode: Some(false),
            ..data.problem.clone()
        };
        let words = |error: wgpu_attention::Error| format!("{subject} in parts: {error}");
        let whole = problem.plan(gpu.capabilities()).map_err(words)?;
        let keys = problem
            .keys
            .as_ref()
            .map_or(problem.kv_len, |keys| keys.len());
        let walk = |keys: usize| {
            let channels = problem.head_dim as u64;
            (whole.kernel.loop_iterations)(&whole.configuration, keys as u64, channels)
        };
        let few = Capabilities {
            max_loop_iterations: walk(keys / 2),
            ..gpu.capabilities().clone()
        };
        let Ok(plan) = problem.plan(&few) else {
            // So few keys that no part is shorter.
            continue;
        };
        let attention = Attention::from_plan(gpu, problem.clone(), plan).map_err(words)?;
        let named = |error| format!("{subject} in {} parts: {error}", attention.plan().parts);
        let got = data.run_with(gpu, &attention).map_err(named)?;
        compared(&got.out, out, &data.out_shape(), data.tolerance()).map_err(named)?;
        compared(&got.lse, lse, &[got.lse.len()], Tolerance::F32).map_err(named)?;
    }
    Ok(())
}

fn check_weights(gpu: &Gpu, data: &AttentionData, expected: &[f64]) -> Result<(), String> {
    let p = &data.problem;
    let words = |error: wgpu_attention::Error| format!("weights: {error}");
    let weights = AttentionWeights::new(gpu, p.clone(), WeightsStage::Weights).map_err(words)?;
    let shape = [p.batch, p.heads, p.q_len, p.kv_len];
    let guarded = Guarded::new(gpu, &shape);
    let view = guarded.tensor.view();
    let operands = data.upload(gpu);
    let mut recorded = Ok(());
    run(gpu, |encoder| {
        recorded = weights.encode(
            encoder,
            WeightsArguments {
                q: &operands.q,
                k: &operands.k,
                weights: &view,
                rules: operands.rules(),
            },
        );
    });
    recorded.map_err(words)?;
    compared(&guarded.read()?, expected, &shape, Tolerance::F32)
        .map_err(|error| format!("weights: {error}"))
}

/// The same in parts of the keys, merged: a sink belongs to the first.
fn check_split(gpu: &Gpu, data: &AttentionData, out: &[f64], lse: &[f64]) -> Result<(), String> {
    let p = &data.problem;
    // Merging is as exact as the log-sum-exp are told: beside one of -3e38 (a bias of the lowest number) nothing is left of
    // a total. (Parts that the planner makes are merged by highest scores and totals.)
    let told = |lse: &f64| !lse.is_finite() || lse.abs() < 1e5;
    if p.packed || p.rules.sinks || !lse.iter().all(told) {
        return Ok(());
    }
    let words = |error: wgpu_attention::Error| format!("split: {error}");
    let whole = p.keys.clone().unwrap_or(0..p.kv_len);
    let count = 1 + data.q.len() % 3;
    let edge = |part: usize| whole.start + whole.len() * part / count;
    let [b, t, h, d] = data.out_shape();
    let parts = Guarded::new(gpu, &[count, b, t, h, d]);
    let part_lse = Guarded::new(gpu, &[count, b, h, t]);
    let (merged, merged_lse) = (
        Guarded::typed(gpu, &[b, t, h, d], ElementType::F32),
        Guarded::new(gpu, &[b, h, t]),
    );
    let operands = data.upload(gpu);
    let merge = Merge::new(
        gpu,
        MergeProblem {
            parts: count,
            batch: b,
            heads: h,
            q_len: t,
            value_dim: d,
            out_type: ElementType::F32,
        },
    )
    .map_err(words)?;
    let subject = kernels(Operation::Attention)
        .into_iter()
        .find(|subject| subject.takes(gpu, p))
        .unwrap();
    let mut recorded = Ok(());
    run(gpu, |encoder| {
        recorded = (|| {
            for part in 0..count {
                let problem = AttentionProblem {
                    keys: Some(edge(part)..edge(part + 1)),
                    out_type: ElementType::F32,
                    ..p.clone()
                };
                let attention = subject.attention(gpu, &problem)?;
                let only = |view: &wgpu_attention::TensorView| {
                    view.slice(0, part..part + 1)
                        .unwrap()
                        .merge_axes(0..2)
                        .unwrap()
                };
                let (out, lse) = (only(&parts.tensor.view()), only(&part_lse.tensor.view()));
                let arguments = AttentionArguments {
                    lse: Some(&lse),
                    ..operands.arguments(&out)
                };
                attention.encode(encoder, arguments).map_err(words)?;
            }
            merge
                .encode(
                    encoder,
                    MergeArguments {
                        parts: &parts.tensor.view(),
                        part_lse: &part_lse.tensor.view(),
                        out: &merged.tensor.view(),
                        lse: Some(&merged_lse.tensor.view()),
                    },
                )
                .map_err(words)
        })();
    });
    recorded?;
    compared(&merged.read()?, out, &[b, t, h, d], Tolerance::F32)
        .map_err(|error| format!("split in {count}: {error}"))?;
    compared(&merged_lse.read()?, lse, &[b, h, t], Tolerance::F32)
        .map_err(|error| format!("split in {count}: lse: {error}"))
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {value}")),
    )
}

#[test]
fn random_problems_match_the_reference() {
    let Some(gpu) = gpu() else { return };
    if let Some(seed) = number("WGPU_ATTENTION_PROBLEM") {
        let data = draw(seed);
        check(&gpu, seed).unwrap_or_else(|error| panic!("{:?}\n{error}", data.problem));
        return;
    }
    let cases = number("WGPU_ATTENTION_CASES").unwrap_or(300);
    let base = number("WGPU_ATTENTION_SEED").unwrap_or(1) << 32;
    let before = gpu.pipeline_count();
    let mut failures = Failures::default();
    for seed in base..base + cases {
        let result = check(&gpu, seed);
        let what = match &result {
            Ok(()) => String::new(),
            Err(_) => format!(
                "WGPU_ATTENTION_PROBLEM={seed}: {:?} {:?}",
                draw(seed).problem,
                draw(seed).layout
            ),
        };
        failures.note(what, result);
    }
    let pipelines = gpu.pipeline_count() - before;
    eprintln!("{cases} problems, {pipelines} pipelines");
    failures.report(cases as usize);
    // Of 1000 problems over both forms, all rules, types and sizes of heads 470: what varies freely compiles nothing. (A kernel more is
    // compiled for every set of rules, type and size of heads that it has.)
    assert!(
        pipelines <= 500,
        "{pipelines} pipelines for {cases} problems"
    );
}
