//! The tuner: what it measures, what it keeps, and what becomes of files that are old, damaged or somebody else's.
// A test that cannot go on says so by panicking.
#![allow(clippy::unwrap_used, clippy::panic)]
#![cfg(feature = "tuning-file")]

mod support;

use std::collections::HashSet;
use std::fs;
use std::time::Duration;
use support::check::*;
use wgpu_attention::kernels::{Form, Operation};
use wgpu_attention::{
    Alignment, Attention, AttentionProblem, AttentionRules, Capabilities, ElementType, Error, Gpu,
    GpuOptions, LayerConfig, LayerShape, Linear, LinearProblem, Tier, TuneOptions, Tuned, wgpu,
};

/// A device of its own, so that no other test sees what is tuned.
fn fresh() -> Option<Gpu> {
    support::open(&GpuOptions::default())
}

fn quick() -> TuneOptions {
    TuneOptions::within(Duration::from_millis(200))
}

fn projection() -> LinearProblem {
    LinearProblem {
        batch: 1,
        tokens: 70,
        d_in: 48,
        d_out: 50,
        form: None,
        few: None,
    }
}

fn causal(tokens: usize) -> AttentionProblem {
    AttentionProblem {
        rules: AttentionRules::causal(Alignment::TopLeft),
        ..AttentionProblem::new(1, 2, tokens, 16)
    }
}

/// What is kept of a problem, changed by hand as a file could be: the first of its candidates that planning does not choose.
fn other_than_planned(gpu: &Gpu, problem: &LinearProblem) -> wgpu_attention::Plan {
    let candidates = problem.candidates(gpu.capabilities()).unwrap();
    assert!(candidates.len() > 1);
    candidates[1].clone()
}

/// Candidates are those that planning would take first, all different, all of them right.
#[test]
fn every_candidate_computes_the_problem() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Failures::default();
    for form in [Form::Tiled, Form::Lanes] {
        for (q_len, kv_heads) in [(50, 2), (1, 2), (1, 4), (3, 1)] {
            let problem = AttentionProblem {
                kv_heads,
                kv_len: 130,
                form: Some(form),
                rules: AttentionRules::causal(Alignment::BottomRight),
                ..AttentionProblem::new(2, 4, q_len, 20)
            };
            let planned = problem.plan(gpu.capabilities()).unwrap();
            let candidates = problem.candidates(gpu.capabilities()).unwrap();
            assert_eq!(candidates[0].to_string(), planned.to_string());
            let labels: HashSet<String> = candidates
                .iter()
                .map(|plan| {
                    format!(
                        "{} {} {}",
                        plan.kernel.name, plan.configuration, plan.splits
                    )
                })
                .collect();
            assert_eq!(labels.len(), candidates.len(), "{candidates:?}");
            assert!(candidates.iter().all(|plan| plan.kernel.form == form));
            let data = random_operands(problem.clone(), &mut support::Random::new(7));
            let expected = data.expected();
            for plan in candidates {
                let label = plan.to_string();
                let attention = Attention::from_plan(&gpu, problem.clone(), plan).unwrap();
                let checked = data
                    .run_with(&gpu, &attention)
                    .and_then(|outputs| matches(&outputs.out, &expected, &data.out_shape()));
                failures.note(label, checked);
            }
        }
    }
    failures.report(20);
}

#[test]
fn what_is_tuned_is_taken_and_measured_with_the_planned_one() {
    let Some(gpu) = fresh() else { return };
    let problem = projection();
    let tuned = problem.tune_blocking(&gpu, &quick()).unwrap();
    assert!(!tuned.measured.is_empty() && tuned.measured.iter().any(|m| m.planned));
    assert_eq!(tuned.measured.iter().filter(|m| m.taken).count(), 1);
    let sorted = tuned
        .measured
        .windows(2)
        .all(|two| two[0].seconds <= two[1].seconds);
    assert!(
        sorted && tuned.measured.iter().all(|m| m.seconds > 0.0),
        "{tuned}"
    );
    let all = problem.candidates(gpu.capabilities()).unwrap().len();
    assert_eq!(tuned.measured.len() + tuned.left_out, all);
    // What is made from now on takes it, and says so; planning itself knows nothing of it.
    let winner = tuned.winner().unwrap();
    let linear = Linear::new(&gpu, problem).unwrap();
    assert_eq!(linear.plan().configuration, winner.plan.configuration);
    assert!(linear.plan().reason.contains("tuned"), "{}", linear.plan());
    assert!(
        !problem
            .plan(gpu.capabilities())
            .unwrap()
            .reason
            .contains("tuned")
    );
    // An equal problem alone.
    let other = LinearProblem {
        d_out: 51,
        ..problem
    };
    let other = Linear::new(&gpu, other).unwrap();
    assert!(!other.plan().reason.contains("tuned"));
    // Clones of the handle share it, other handles of the device too.
    let again = Linear::new(&gpu.with_runtime_checks(true), problem).unwrap();
    assert!(again.plan().reason.contains("tuned"));
}

/// Time or no time, the planner's choice is measured; the rest is counted.
#[test]
fn the_budget_bounds_what_is_measured() {
    let Some(gpu) = fresh() else { return };
    let options = TuneOptions::within(Duration::ZERO);
    let tuned = projection().tune_blocking(&gpu, &options).unwrap();
    assert_eq!(tuned.measured.len(), 1);
    assert!(tuned.measured[0].planned && tuned.measured[0].taken);
    assert!(tuned.left_out > 0);
    assert!(tuned.to_string().contains("not measured"), "{tuned}");
}

/// Every operand that rules may take is made for the measurement.
#[test]
fn problems_with_every_rule_are_tuned_on_operands_of_their_own() {
    let Some(gpu) = fresh() else { return };
    let rules = AttentionRules {
        softcap: Some(20.0),
        mask: true,
        bias: true,
        kv_lens: true,
        q_lens: true,
        alibi: true,
        sinks: true,
        ..AttentionRules::causal(Alignment::BottomRight)
    };
    let rule = wgpu_attention::Rule::new(
        "fn score(score: f32, batch: u32, head: u32, query: u32, key: u32) -> f32 { return score + rule_data(key); }",
    )
    .unwrap();
    let full = AttentionProblem {
        rules: rules.clone(),
        ..causal(20)
    };
    let problems = [
        // Rows of 16 bits that end within a word.
        AttentionProblem {
            value_dim: 7,
            ..causal(11)
        }
        .stored_as(ElementType::F16),
        full.clone(),
        AttentionProblem {
            page_size: Some(7),
            kv_len: 40,
            q_len: 2,
            ..full.clone()
        },
        AttentionProblem {
            packed: true,
            batch: 3,
            rules: AttentionRules::causal(Alignment::TopLeft),
            ..causal(9)
        },
        AttentionProblem {
            rules: AttentionRules {
                rule: Some(rule),
                ..Default::default()
            },
            ..causal(12).stored_as(ElementType::F16)
        },
        causal(10).stored_as(ElementType::BF16),
    ];
    let mut names = HashSet::new();
    let options = TuneOptions::within(Duration::ZERO);
    for problem in problems {
        let tuned = problem.tune_blocking(&gpu, &options).unwrap();
        assert!(tuned.winner().is_some(), "{tuned}");
        assert!(names.insert(tuned.problem.clone()), "{}", tuned.problem);
        let attention = Attention::new(&gpu, problem).unwrap();
        assert!(
            attention.plan().reason.contains("tuned"),
            "{}",
            attention.plan()
        );
    }
}

#[test]
fn what_cannot_be_planned_cannot_be_tuned_and_what_is_empty_needs_no_tuning() {
    let Some(gpu) = fresh() else { return };
    let wrong = AttentionProblem {
        kv_heads: 3,
        ..causal(8)
    };
    assert!(matches!(
        wrong.tune_blocking(&gpu, &quick()),
        Err(Error::Parameter { .. })
    ));
    let large = LinearProblem {
        d_out: 1 << 40,
        ..projection()
    };
    assert!(large.tune_blocking(&gpu, &quick()).is_err());
    for empty in [
        LinearProblem {
            tokens: 0,
            ..projection()
        },
        LinearProblem {
            d_out: 0,
            ..projection()
        },
    ] {
        let tuned = empty.tune_blocking(&gpu, &quick()).unwrap();
        assert!(tuned.winner().is_none() && tuned.measured.is_empty());
    }
    let tuned = causal(0).tune_blocking(&gpu, &quick()).unwrap();
    assert!(tuned.winner().is_none());
}

#[test]
fn a_layer_tunes_its_parts_and_takes_them() {
    let Some(gpu) = fresh() else { return };
    let (layer, _) = small_layer(&gpu);
    let shape = LayerShape::new(1, 30);
    let tuned: Vec<Tuned> = layer.tune_blocking(shape, &quick()).unwrap();
    let problems: Vec<&str> = tuned.iter().map(|tuned| tuned.problem.as_str()).collect();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(
        problems[0].starts_with("linear 30 rows, 24 to 72"),
        "{problems:?}"
    );
    let plan = layer.plan(shape).unwrap().to_string();
    assert_eq!(plan.matches("tuned").count(), 3, "{plan}");
    // A projection into a cache takes the winner of the same projection.
    let cache = layer.cache_config(1, 40);
    let plan = layer
        .plan(LayerShape::cached(&cache, 30))
        .unwrap()
        .to_string();
    assert_eq!(plan.matches("tuned").count(), 2, "{plan}");
}

fn small_layer(gpu: &Gpu) -> (wgpu_attention::MultiHeadAttention, usize) {
    let config = LayerConfig::new(24, 24, 3).causal(true);
    let values = vec![0.01f32; 24 * 72];
    let matrix = |weight| wgpu_attention::Projection {
        weight,
        bias: None,
        layout: wgpu_attention::MatrixLayout::OutIn,
    };
    let weights = wgpu_attention::LayerWeights {
        qkv: wgpu_attention::QkvWeights::Fused(matrix(&values[..])),
        output: Some(matrix(&values[..24 * 24])),
    };
    (
        wgpu_attention::MultiHeadAttention::new(gpu, config, &weights).unwrap(),
        24,
    )
}

#[test]
fn a_file_keeps_what_was_tuned_for_the_next_device() {
    let (Some(gpu), Some(next)) = (fresh(), fresh()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tuning.json");
    assert_eq!(gpu.load_tuning(&file).unwrap(), 0);
    gpu.check_tuning(&file).unwrap();
    projection().tune_blocking(&gpu, &quick()).unwrap();
    causal(20).tune_blocking(&gpu, &quick()).unwrap();
    gpu.save_tuning(&file).unwrap();
    assert_eq!(next.load_tuning(&file).unwrap(), 2);
    let [here, there] = [&gpu, &next].map(|gpu| Linear::new(gpu, projection()).unwrap());
    assert_eq!(here.plan().configuration, there.plan().configuration);
    assert!(there.plan().reason.contains("tuned"));
    // Saving adds to what is there.
    let more = LinearProblem {
        d_in: 9,
        ..projection()
    };
    let Some(third) = fresh() else { return };
    more.tune_blocking(&third, &quick()).unwrap();
    third.save_tuning(&file).unwrap();
    let Some(fourth) = fresh() else { return };
    assert_eq!(fourth.load_tuning(&file).unwrap(), 3);
    // Nothing but the file is left in the folder.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// What a file says is taken, whether or not it is what planning chooses: the choice of another candidate by hand.
#[test]
fn a_winner_of_a_file_is_what_runs() {
    let Some(gpu) = fresh() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tuning.json");
    let problem = projection();
    problem.tune_blocking(&gpu, &quick()).unwrap();
    gpu.save_tuning(&file).unwrap();
    let wanted = other_than_planned(&gpu, &problem);
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    let winner = &mut json["devices"][0]["winners"][0];
    winner["kernel"] = wanted.kernel.name.into();
    winner["constants"] = wanted
        .configuration
        .consts
        .iter()
        .map(|(name, value)| serde_json::json!([name, value]))
        .collect();
    winner["seconds"] = 0.5e-3.into();
    winner["planned_seconds"] = 1e-3.into();
    fs::write(&file, json.to_string()).unwrap();
    let Some(next) = fresh() else { return };
    assert_eq!(next.load_tuning(&file).unwrap(), 1);
    let linear = Linear::new(&next, problem).unwrap();
    assert_eq!(linear.plan().configuration, wanted.configuration);
    assert!(
        linear
            .plan()
            .reason
            .contains("tuned: 0.5000 ms, 1.0000 ms as planned"),
        "{}",
        linear.plan()
    );
    // What names no candidate is ignored.
    json["devices"][0]["winners"][0]["constants"] = serde_json::json!([["ROWS", 7]]);
    fs::write(&file, json.to_string()).unwrap();
    let Some(next) = fresh() else { return };
    assert_eq!(next.load_tuning(&file).unwrap(), 1);
    let linear = Linear::new(&next, problem).unwrap();
    let planned = problem.plan(next.capabilities()).unwrap();
    assert_eq!(linear.plan().to_string(), planned.to_string());
}

#[test]
fn old_damaged_and_foreign_files_are_ignored_and_never_overwritten() {
    let Some(gpu) = fresh() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tuning.json");
    projection().tune_blocking(&gpu, &quick()).unwrap();
    gpu.save_tuning(&file).unwrap();
    let good = fs::read_to_string(&file).unwrap();
    let json: serde_json::Value = serde_json::from_str(&good).unwrap();
    let Some(next) = fresh() else { return };
    // Of another device, driver, crate or kernels: nothing is taken, and saving keeps what is another device's.
    for (key, own) in [
        ("adapter", false),
        ("driver", false),
        ("driver_info", false),
        ("backend", false),
        ("crate", true),
        ("kernels", true),
    ] {
        let mut other = json.clone();
        other["devices"][0][key] = "another".into();
        fs::write(&file, other.to_string()).unwrap();
        assert_eq!(next.load_tuning(&file).unwrap(), 0, "{key}");
        next.save_tuning(&file).unwrap();
        let saved: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let devices = saved["devices"].as_array().unwrap().len();
        assert_eq!(devices, if own { 1 } else { 2 }, "{key}");
    }
    // Damaged in every way.
    let mut damaged: Vec<Vec<u8>> = vec![
        vec![],
        b"{}".to_vec(),
        b"[]".to_vec(),
        b"null".to_vec(),
        vec![0xff; 300],
        vec![b'['; 100_000],
        good.replace("\"version\": 1", "\"version\": 2")
            .into_bytes(),
        good.replace("wgpu-attention tuning", "something else")
            .into_bytes(),
        good.replace("\"devices\": [", "\"devices\": [17,")
            .into_bytes(),
    ];
    damaged.extend(
        (0..good.len())
            .step_by(97)
            .map(|end| good.as_bytes()[..end].to_vec()),
    );
    for bytes in damaged {
        fs::write(&file, &bytes).unwrap();
        assert_eq!(next.load_tuning(&file).unwrap(), 0);
        assert!(matches!(
            next.check_tuning(&file),
            Err(Error::Format { .. })
        ));
        assert!(matches!(next.save_tuning(&file), Err(Error::Format { .. })));
        assert_eq!(fs::read(&file).unwrap(), bytes, "left as it is");
    }
    // Entries that make no sense, one by one.
    for (key, value) in [
        ("problem", serde_json::json!(5)),
        ("kernel", serde_json::json!(null)),
        ("tier", serde_json::json!(3)),
        ("constants", serde_json::json!({"ROWS": 1})),
        ("constants", serde_json::json!([["ROWS", -1]])),
        ("splits", serde_json::json!(1e30)),
        ("seconds", serde_json::json!("fast")),
        ("planned_seconds", serde_json::json!(-1.0)),
    ] {
        let mut other = json.clone();
        other["devices"][0]["winners"][0][key] = value;
        fs::write(&file, other.to_string()).unwrap();
        assert_eq!(next.load_tuning(&file).unwrap(), 0, "{key}");
    }
    // A folder.
    assert!(matches!(
        next.load_tuning(folder.path()),
        Err(Error::Io { .. })
    ));
    assert!(next.save_tuning(folder.path()).is_err());
    assert!(matches!(
        next.save_tuning(folder.path().join("none/t.json")),
        Err(Error::Io { .. })
    ));
}

#[test]
fn a_measured_rate_replaces_the_guess_of_that_handle_alone() {
    let Some(gpu) = fresh() else { return };
    let guess = gpu.capabilities().flops_per_second;
    let measured = gpu.measure_rate_blocking().unwrap();
    assert_eq!(gpu.capabilities().flops_per_second, guess);
    let rate = measured.capabilities().flops_per_second;
    assert!(
        (10_000_000..1_000_000_000_000_000).contains(&rate),
        "{rate} FLOP/s"
    );
    assert_ne!(rate, guess);
    assert!(measured.same_as(&gpu));
}

/// Tuning knows kernels that split keys, whose parts are candidates of their own.
#[test]
fn parts_of_the_keys_are_candidates() {
    let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::DiscreteGpu);
    let problem = AttentionProblem {
        kv_len: 8192,
        ..AttentionProblem::new(1, 8, 1, 64)
    };
    let candidates = problem.candidates(&capabilities).unwrap();
    let splits: HashSet<u32> = candidates
        .iter()
        .filter(|plan| plan.kernel.operation == Operation::Decode)
        .map(|plan| plan.splits)
        .collect();
    assert!(splits.len() >= 3, "{splits:?}");
    assert!(
        candidates
            .iter()
            .any(|plan| plan.kernel.operation == Operation::Attention)
    );
}

/// What decides nothing is no part of what is kept: a layer's causal calls and causal attention by itself are one problem, whatever
/// corner they count from.
#[test]
fn equal_problems_are_one_however_they_are_put() {
    let Some(gpu) = fresh() else { return };
    let none = AttentionProblem {
        rules: AttentionRules {
            causal: true,
            ..Default::default()
        },
        ..causal(20)
    };
    none.tune_blocking(&gpu, &quick()).unwrap();
    for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
        let problem = AttentionProblem {
            rules: AttentionRules::causal(alignment),
            ..none.clone()
        };
        let attention = Attention::new(&gpu, problem.clone()).unwrap();
        assert!(attention.plan().reason.contains("tuned"), "{alignment:?}");
        // Where there are more keys than queries it decides.
        let longer = AttentionProblem {
            kv_len: 30,
            ..problem
        };
        let attention = Attention::new(&gpu, longer).unwrap();
        assert!(!attention.plan().reason.contains("tuned"));
    }
}

/// Plain tiles and half-precision ones have the same constants: what is kept tells them apart.
#[test]
fn the_arithmetic_of_a_winner_is_kept() {
    let Some(gpu) = fresh() else { return };
    let qualified = |gpu: &Gpu| gpu.qualify_blocking().unwrap().0;
    let gpu = qualified(&gpu);
    let problem = AttentionProblem {
        form: Some(Form::Tiled),
        ..causal(70).stored_as(ElementType::F16)
    };
    let candidates = problem.candidates(gpu.capabilities()).unwrap();
    let tier = |plan: &wgpu_attention::Plan| plan.kernel.tier(&plan.configuration);
    let tiers: HashSet<_> = candidates.iter().map(tier).collect();
    if !gpu.capabilities().has_qualified(Tier::Half) {
        assert_eq!(tiers, HashSet::from([Tier::Plain]));
        return;
    }
    assert!(tiers.contains(&Tier::Half) && tiers.contains(&Tier::Plain));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tuning.json");
    problem.tune_blocking(&gpu, &quick()).unwrap();
    gpu.save_tuning(&file).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    for wanted in [Tier::Plain, Tier::Half] {
        json["devices"][0]["winners"][0]["tier"] = format!("{wanted:?}").into();
        fs::write(&file, json.to_string()).unwrap();
        let Some(next) = fresh() else { return };
        let next = qualified(&next);
        assert_eq!(next.load_tuning(&file).unwrap(), 1);
        let attention = Attention::new(&next, problem.clone()).unwrap();
        assert_eq!(tier(attention.plan()), wanted, "{}", attention.plan());
    }
    // A handle that may not use it does not.
    let plain = Attention::new(&fresh().unwrap(), problem.clone()).unwrap();
    assert_eq!(tier(plain.plan()), Tier::Plain);
}
