//! Few queries over many keys: the kernels that split the keys, around every edge, and keys that lie in pages.
//!
//! What holds of all attention is in `kernels.rs` and `rules.rs`, which go through these kernels as well. Comments name
//! public fault reports of other libraries that a test rules out here.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use support::Random;
use support::check::*;
use wgpu_attention::Alignment::{BottomRight, TopLeft};
use wgpu_attention::kernels::{Configuration, FOURS_ANY, Form, Operation};
use wgpu_attention::{
    Attention, AttentionProblem, AttentionRules, Capabilities, ElementType, Error, Gpu, Tensor,
    reference, wgpu,
};

/// Runs `check` for every kernel for few queries and reports all that fail.
fn for_each_decode(least: usize, check: impl Fn(&Gpu, &Subject, &mut Failures)) {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for subject in kernels(Operation::Decode) {
        check(&gpu, &subject, &mut failures);
    }
    failures.report(least);
}

fn split(subject: &Subject, splits: u32) -> Subject {
    Subject {
        splits: Some(splits),
        ..subject.clone()
    }
}

fn decode(
    heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    d: usize,
) -> AttentionProblem {
    AttentionProblem {
        kv_heads,
        kv_len,
        rules: AttentionRules::causal(BottomRight),
        ..AttentionProblem::new(1, heads, q_len, d)
    }
}

/// Attention over zeros with V\[j\] = j: each row is the mean of the keys that it sees.
fn means(problem: AttentionProblem) -> AttentionData {
    let value = |_, t, _, _| t as f32;
    AttentionData::new(problem, |_, _, _, _| 0.0, |_, _, _, _| 1.0, value)
}

/// Queries, groups of heads and keys around every edge, in every number of parts. pytorch/pytorch#159247: a number of
/// keys off the block's.
#[test]
fn queries_groups_and_keys_around_every_edge_match_the_reference() {
    for_each_decode(500, |gpu, subject, failures| {
        let mut number = 0;
        for kv_len in [
            1, 2, 31, 32, 33, 63, 64, 65, 95, 127, 129, 191, 193, 255, 257,
        ] {
            for q_len in 1..=9 {
                for group in [1, 2, 3, 4, 8] {
                    number += 1;
                    if number % 2 == 0 {
                        continue;
                    }
                    let problem = AttentionProblem {
                        batch: 1 + number % 2,
                        page_size: [None, Some(1), Some(7), Some(32)][number % 7 % 4],
                        ..decode(2 * group, 2, q_len, kv_len, 8)
                    };
                    let mut random = Random::new(number as u64);
                    let mut data = AttentionData {
                        layout: LAYOUTS[number % 11 % 5],
                        ..random_operands(problem, &mut random)
                    };
                    if number % 3 == 0 {
                        data = data.with_sinks(random.normals(2 * group));
                    }
                    let splits = [1, 2, 3, 8, 64][number % 13 % 5];
                    let what = format!("{subject} in {splits}: {:?}", data.problem);
                    failures.note(what, data.prepare().check(gpu, &split(subject, splits)));
                }
            }
        }
    });
}

/// Every size of a head, block of rows and way of reading k and v that is compiled, for f32, and of the smaller types
/// those of one size. With [`few_configurations`], some of them.
fn every_configuration(form: Form) {
    let Some(gpu) = gpu() else { return };
    let few = few_configurations();
    let mut failures = Failures::default();
    let plain = |configuration: &Configuration| {
        let names: Vec<&str> = configuration.rules.iter().map(|rule| &*rule.name).collect();
        names[..2] == ["rules/attend_all", "rules/plain_scores"]
    };
    let wanted = configurations(&gpu, Operation::Decode, plain);
    let wanted = wanted.iter().filter(|subject| subject.kernel.form == form);
    for (number, subject) in wanted.enumerate() {
        let configuration = subject.configuration.as_ref().unwrap();
        let [size, rows, kv_type] =
            ["HEAD_DIM", "ROWS", "KV_TYPE"].map(|name| configuration.get(name));
        let size = size.max(configuration.get("VALUE_DIM")) as usize;
        let any = configuration.rules.contains(&FOURS_ANY);
        let one_count = subject.kernel.name == "decode_rows";
        if (kv_type > 0 && size != 16 && size != 64)
            || (any || kv_type > 0) && rows != 2 && !one_count
        {
            continue;
        }
        // Where compiling takes long, every number of rows with the smallest size, and one with the others.
        let smallest = if form == Form::Tiled { 64 } else { 16 };
        if few && size != smallest && (rows != 1 || any || kv_type > 0) {
            continue;
        }
        // The size itself, and one that is rounded up to it; where four channels are read at once, a multiple of four.
        let smaller = if any || form == Form::Tiled {
            size - 13
        } else {
            size - 12
        };
        for (head_dim, value_dim) in [(size, size), (smaller, size), (size, smaller)] {
            let problem = AttentionProblem {
                value_dim,
                kv_type: [ElementType::F32, ElementType::F16, ElementType::BF16][kv_type as usize],
                ..decode(6, 2, 3, 70, head_dim)
            };
            let mut random = Random::new(number as u64);
            // An odd offset would have k and v read one by one.
            let layouts = [Layout::Contiguous, Layout::HeadMajor, Layout::Fused];
            let data = AttentionData {
                layout: layouts[number % 3],
                ..random_operands(problem, &mut random)
            };
            let what = format!("{subject} {:?}", data.problem);
            failures.note(what, data.prepare().check(&gpu, &split(subject, 2)));
        }
    }
    failures.report(if few { 24 } else { 30 });
}

#[test]
fn every_configuration_of_the_lanes_form_matches_the_reference() {
    every_configuration(Form::Lanes);
}

#[test]
fn every_configuration_of_the_tiled_form_matches_the_reference() {
    every_configuration(Form::Tiled);
}

/// ml-explore/mlx#4022: garbage exactly where another path is taken at some length. ggml-org/llama.cpp#23040: wrong
/// where subgroups have another size.
#[test]
fn a_large_model_decodes_right_at_lengths_around_powers_of_two() {
    for_each_decode(20, |gpu, subject, failures| {
        if !subject.is_planned(gpu) || !subject.takes(gpu, &decode(32, 8, 1, 512, 128)) {
            return;
        }
        for around in [512, 1024, 2048, 4096] {
            for kv_len in around - 2..=around + 2 {
                let mut random = Random::new(kv_len as u64);
                let data = random_operands(decode(32, 8, 1, kv_len, 128), &mut random);
                let what = format!("{subject} {kv_len}");
                failures.note(what, data.prepare().check(gpu, subject));
            }
        }
    });
}

/// pytorch/pytorch#159247: Tq of 1 and 7, Tk = 64 k + r.
#[test]
fn lengths_off_the_block_lose_no_accuracy() {
    for_each_decode(16, |gpu, subject, failures| {
        for q_len in [1, 7] {
            for kv_len in [1, 63, 65, 127, 129, 191, 193, 255] {
                let mut random = Random::new(kv_len as u64);
                let problem = AttentionProblem {
                    rules: AttentionRules::default(),
                    ..decode(2, 2, q_len, kv_len, 64)
                };
                let data = random_operands(problem, &mut random);
                let what = format!("{subject} {q_len} {kv_len}");
                failures.note(what, data.prepare().check(gpu, subject));
            }
        }
    });
}

/// tracel-ai/cubecl#1027: the offset into a mask where keys are split.
#[test]
fn a_mask_is_read_right_in_every_part() {
    for_each_decode(5, |gpu, subject, failures| {
        let mut random = Random::new(1027);
        let data = random_operands(decode(4, 2, 2, 200, 16), &mut random)
            .with_mask([1, 4, 2, 200], random.bools(4 * 2 * 200))
            .prepare();
        for splits in [1, 2, 3, 8, 64] {
            let what = format!("{subject} in {splits}");
            failures.note(what, data.check(gpu, &split(subject, splits)));
        }
    });
}

/// Numbers known by arithmetic. pytorch/pytorch#103082, microsoft/onnxruntime#29020: the corner of a causal mask;
/// goombalab/hnet#20: a window that is dropped in decoding; microsoft/onnxruntime#29247: the length of item 0 for all.
#[test]
fn means_of_the_keys_that_are_seen() {
    for_each_decode(40, |gpu, subject, failures| {
        let mut hold = |what: &str, data: &AttentionData, right: &[f64]| {
            for splits in [1, 2, 3, 8] {
                let result = data.run(gpu, &split(subject, splits)).and_then(|got| {
                    let shape = [right.len()];
                    matches(&got, right, &shape)
                });
                failures.note(format!("{subject}: {what} in {splits}"), result);
            }
        };
        hold("1 by 16", &means(decode(1, 1, 1, 16, 1)), &[7.5]);
        hold("2 by 3", &means(decode(1, 1, 2, 3, 1)), &[0.5, 1.0]);
        hold("3 by 8", &means(decode(1, 1, 3, 8, 1)), &[2.5, 3.0, 3.5]);
        hold(
            "5 by 2",
            &means(decode(1, 1, 5, 2, 1)),
            &[0.0, 0.0, 0.0, 0.0, 0.5],
        );
        let top_left = AttentionProblem {
            rules: AttentionRules::causal(TopLeft),
            ..decode(1, 1, 2, 3, 1)
        };
        hold("top left", &means(top_left), &[0.0, 0.5]);
        // A window of 4 keys, the own one among them, at length 10.
        let mut window = decode(1, 1, 1, 10, 1);
        window.rules.window_left = Some(3);
        hold("window", &means(window), &[7.5]);
        let two = AttentionProblem {
            batch: 2,
            ..decode(1, 1, 1, 9, 1)
        };
        hold(
            "lengths",
            &means(two.clone()).with_kv_lens(&[2, 9]),
            &[0.5, 4.0],
        );
        hold("lengths", &means(two).with_kv_lens(&[9, 2]), &[4.0, 0.5]);
        // A cache of large capacity with few keys in it.
        let cache = means(decode(1, 1, 1, 4000, 1)).with_kv_lens(&[3]);
        hold("capacity", &cache, &[1.0]);
        // A sink of e^0 beside two keys of e^0 counts once: (0 + 1) / 3.
        let sink = means(decode(1, 1, 1, 2, 1)).with_sinks(vec![0.0]);
        hold("sink", &sink, &[1.0 / 3.0]);
        let none = means(decode(1, 1, 1, 5, 1)).with_kv_lens(&[0]);
        hold("no key", &none, &[0.0]);
    });
}

/// microsoft/onnxruntime#24309: one group's factor used for another.
#[test]
fn every_head_reads_its_own_kv_head_whatever_was_run_before() {
    for_each_decode(8, |gpu, subject, failures| {
        for kv_heads in [8, 4, 2, 1] {
            let problem = decode(8, kv_heads, 1, 70, 8);
            let value = |_, _, head, _| head as f32 + 1.0;
            let data = AttentionData::new(problem, |_, _, _, _| 0.0, |_, _, _, _| 1.0, value);
            let right: Vec<f64> = (0..64)
                .map(|at| (at / 8 * kv_heads / 8 + 1) as f64)
                .collect();
            let result = data
                .run(gpu, subject)
                .and_then(|got| matches(&got, &right, &[64]));
            failures.note(format!("{subject} {kv_heads}"), result);
        }
    });
}

/// Rows of k and v that begin anywhere are read as those that begin where four channels can be read at once.
#[test]
fn rows_that_begin_anywhere_give_the_bits_of_aligned_ones() {
    for_each_decode(6, |gpu, subject, failures| {
        for kv_type in [ElementType::F32, ElementType::F16, ElementType::BF16] {
            let mut random = Random::new(4);
            let problem = AttentionProblem {
                kv_type,
                ..decode(4, 2, 1, 90, 16)
            };
            let aligned = random_operands(problem, &mut random);
            let right = aligned.run(gpu, subject).unwrap();
            for layout in [Layout::Offset, Layout::Padded] {
                let data = AttentionData {
                    layout,
                    ..aligned.clone()
                };
                let result = data.run(gpu, subject);
                let result = result.and_then(|got| same_bits(&got, &right));
                failures.note(format!("{subject} {kv_type} {layout:?}"), result);
            }
        }
    });
}

/// Pages of any size, in any order, with whatever lies past the keys; every kernel that reads keys.
#[test]
fn pages_give_the_bits_of_keys_in_order() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for subject in all_attention_kernels() {
        for (number, page_size) in [1, 2, 7, 16, 33, 64, 100].into_iter().enumerate() {
            let mut random = Random::new(page_size as u64);
            let problem = AttentionProblem {
                batch: 2,
                ..decode(4, 2, [1, 5][number % 2], 64, 8)
            };
            let mut data = AttentionData {
                layout: LAYOUTS[number % 5],
                one_table: number % 3 == 0,
                ..random_operands(problem, &mut random)
            };
            if number % 2 == 0 {
                data = data.with_kv_lens(&[64, 21]);
            }
            let right = data.run(&gpu, &subject).unwrap();
            data.problem.page_size = Some(page_size);
            let result = data.run(&gpu, &subject);
            let result = result.and_then(|got| same_bits(&got, &right));
            failures.note(format!("{subject} pages of {page_size}"), result);
        }
    }
    failures.report(28);
}

/// What is wrong with pages is said, and nothing is recorded.
#[test]
fn pages_that_cannot_be_are_refused() {
    let Some(gpu) = gpu() else { return };
    let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::Cpu);
    let paged = |page_size| AttentionProblem {
        page_size: Some(page_size),
        ..decode(2, 2, 1, 10, 8)
    };
    let refused = |problem: AttentionProblem| problem.plan(&capabilities).unwrap_err().to_string();
    assert!(refused(paged(0)).contains("page_size"));
    let packed = AttentionProblem {
        packed: true,
        ..paged(4)
    };
    assert!(refused(packed).contains("page_size"));

    let attention = Attention::new(&gpu, paged(4)).unwrap();
    let f32 = ElementType::F32;
    let q = Tensor::empty(&gpu, &[1, 1, 2, 8], f32).unwrap().view();
    let out = Tensor::empty(&gpu, &[1, 1, 2, 8], f32).unwrap().view();
    let pages = Tensor::empty(&gpu, &[5, 4, 2, 8], f32).unwrap().view();
    let others = Tensor::empty(&gpu, &[6, 4, 2, 8], f32).unwrap().view();
    let wrong = Tensor::empty(&gpu, &[5, 3, 2, 8], f32).unwrap().view();
    // Tokens of a page that do not lead on to the next page.
    let apart = Tensor::empty(&gpu, &[5, 6, 2, 8], f32).unwrap();
    let apart = apart.view().slice(1, 0..4).unwrap();
    let table = Tensor::from_slice(&gpu, &[1, 3], &[0u32, 1, 2])
        .unwrap()
        .view();
    let short = Tensor::from_slice(&gpu, &[1, 2], &[0u32, 1])
        .unwrap()
        .view();
    let try_ = |k: &_, v: &_, table: Option<&_>| {
        let mut arguments = wgpu_attention::AttentionArguments::new(&q, k, v, &out);
        arguments.rules.block_table = table;
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        attention.encode(&mut encoder, arguments)
    };
    try_(&pages, &pages, Some(&table)).unwrap();
    assert!(
        matches!(try_(&apart, &pages, Some(&table)), Err(Error::Layout { argument, .. }) if argument == "k")
    );
    assert!(
        matches!(try_(&wrong, &pages, Some(&table)), Err(Error::Shape { argument, .. }) if argument == "k")
    );
    assert!(
        matches!(try_(&pages, &others, Some(&table)), Err(Error::Shape { argument, .. }) if argument == "v")
    );
    assert!(
        matches!(try_(&pages, &pages, None), Err(Error::Shape { argument, .. }) if argument == "block_table")
    );
    assert!(
        matches!(try_(&pages, &pages, Some(&short)), Err(Error::Shape { argument, .. }) if argument == "block_table")
    );
}

/// The planner takes these kernels for one to eight queries, says how it splits the keys, and counts what that takes.
#[test]
fn plans_say_how_keys_are_split() {
    let plan = |device, problem: &AttentionProblem| {
        problem
            .plan(&Capabilities::webgpu_defaults(device))
            .unwrap()
    };
    let (cpu, card) = (wgpu::DeviceType::Cpu, wgpu::DeviceType::DiscreteGpu);
    let large = decode(32, 8, 1, 4096, 128);
    let one = plan(card, &large);
    assert_eq!(one.kernel.name, "decode_tiled");
    assert_eq!((one.splits, one.groups, one.passes()), (16, 128, 2));
    assert_eq!(one.workspace_bytes, 16 * 32 * (128 + 2) * 4);
    assert!(
        one.to_string().contains("in 16 parts side by side"),
        "{one}"
    );
    let one = plan(cpu, &large);
    assert_eq!((one.kernel.name, one.splits), ("decode_lanes", 1));
    let small = plan(card, &decode(12, 12, 1, 100, 64));
    assert_eq!(
        (small.splits, small.passes(), small.workspace_bytes),
        (1, 1, 0)
    );
    for (q_len, decode_, name) in [
        (1, None, "decode_rows"),
        (2, None, "decode_lanes"),
        (8, None, "decode_lanes"),
        (9, None, "attention_lanes"),
        (9, Some(true), "decode_lanes"),
        (1, Some(false), "attention_lanes"),
    ] {
        let problem = AttentionProblem {
            decode: decode_,
            ..decode(2, 2, q_len, 100, 16)
        };
        assert_eq!(plan(cpu, &problem).kernel.name, name, "{q_len} {decode_:?}");
    }
    // Rows are queries of the heads that share a KV head.
    let grouped = plan(cpu, &decode(4, 2, 1, 100, 16));
    assert_eq!(grouped.kernel.name, "decode_lanes");
    // Eight workgroups are enough for the cores of a CPU, and keys are not split for more.
    assert_eq!(
        plan(cpu, &decode(8, 8, 1, 100, 65)).kernel.name,
        "decode_lanes"
    );
    for (heads, splits) in [(8, 1), (7, 2), (4, 2), (2, 4), (1, 8)] {
        let one = plan(cpu, &decode(heads, heads, 1, 4096, 64));
        assert_eq!(
            (one.kernel.name, one.splits),
            ("decode_rows", splits),
            "{heads}"
        );
    }
    // Heads too large for lanes go to tiles, with the reason.
    let wide = plan(cpu, &decode(2, 2, 1, 100, 160));
    assert_eq!(wide.kernel.name, "decode_tiled");
    assert!(wide.reason.contains("128"), "{wide}");
    // What no kernel for few queries holds is said by the one that takes its place.
    let lanes = AttentionProblem {
        form: Some(Form::Lanes),
        ..decode(2, 2, 1, 100, 160)
    };
    assert!(lanes.plan(&Capabilities::webgpu_defaults(cpu)).is_err());
}

/// Where loops end early the keys are in as many parts as let them end by themselves.
#[test]
fn short_loops_give_more_parts_and_the_same_answer() {
    for_each_decode(2, |gpu, subject, failures| {
        let mut random = Random::new(6);
        let kv_heads = if subject.kernel.name == "decode_rows" {
            32
        } else {
            16
        };
        let data = random_operands(decode(32, kv_heads, 1, 900, 8), &mut random).prepare();
        let problem = AttentionProblem {
            form: Some(subject.kernel.form),
            decode: Some(true),
            ..data.data.problem.clone()
        };
        let whole = problem.plan(gpu.capabilities()).unwrap();
        assert_eq!(whole.kernel.name, subject.kernel.name);
        let walk = (whole.kernel.loop_iterations)(&whole.configuration, 250, 8);
        let few = Capabilities {
            max_loop_iterations: walk,
            ..gpu.capabilities().clone()
        };
        let plan = problem.plan(&few).unwrap();
        assert!(plan.splits > whole.splits, "{plan}");
        let attention = Attention::from_plan(gpu, problem, plan).unwrap();
        let got = data.data.run_with(gpu, &attention);
        let result = got.and_then(|got| matches(&got.out, &data.expected, &[got.out.len()]));
        failures.note(format!("{subject}"), result);
    });
}

/// The reference, the kernels for many queries and those for few agree on the corner of a causal mask.
#[test]
fn all_paths_agree_on_the_causal_corner() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for (q_len, kv_len) in [(1, 16), (3, 8), (5, 2)] {
        let mut random = Random::new(29020);
        let data = random_operands(decode(2, 2, q_len, kv_len, 4), &mut random);
        let right = data.with_inputs(|inputs| reference::attention(inputs).unwrap().out);
        for subject in all_attention_kernels() {
            let result = data.run(&gpu, &subject);
            let result = result.and_then(|got| matches(&got, &right, &[got.len()]));
            failures.note(format!("{subject} {q_len} by {kv_len}"), result);
        }
    }
    failures.report(12);
}
