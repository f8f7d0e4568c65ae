//! Every kind of golden case, damaged: an error or "unsupported" comes of it, never a pass and never a panic.
//! On the reference, and on the kernels where there is an adapter.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::Path;
use wgpu_attention::Error;
use wgpu_attention::case::check::{CaseReport, Engine, Selection, Status, check};
use wgpu_attention::case::{Case, Tolerances};
use wgpu_attention::tensor_file::FileTensor;

/// Small cases of each kind; together they have every input and every attribute.
const EXAMPLES: &[&str] = &[
    "sdpa/sdpa__bias_plus_mask_plus_lens",
    "sdpa/sdpa__lens_q_and_kv",
    "sdpa/sdpa__sink_gqa_window_T40",
    "sdpa/sdpa__alibi2_gqa_full_br_q5_k40",
    "sdpa/sdpa__lens_poison_inf",
    "sdpa_varlen/sdpa_varlen__vl_more_q_than_k",
    "sdpa_varlen/sdpa_varlen__vl_grad_cross_gqa",
    "onnx/onnx__3d_with_past_and_present_qk_matmul_softcap",
    "onnx/onnx__4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "onnx/onnx__4d_causal_nonpad_attn_mask_composition",
    "onnx/onnx__4d_causal_padded_kv_bf16",
    "onnx/onnx__local_window_with_past",
    "onnx/onnx__local_window_gqa_rank4_mask",
    "onnx/onnx__3d_diff_heads_sizes_scaled",
    "ort/ort__gqa_sink_decode_window_B1_8_2_P17_D64",
    "ort/ort__gqa_rotary_interleaved_decode_B1_4_2_P10_D32",
    "ort/ort__mha_pad2d_B2_H4_S11_L11_D24",
    "ort/ort__mha_cross_Dv8_B1_H3_S9_L6_D16",
    "ort/ort__mha_abias_bcast_B2_H3_S8_L13_D16",
    "ort/ort__mha_scale_dh80_B1_H2_S6",
    "ort/ort__mha_self_causal_B2_H2_S17_D40",
    "module_mha4/module_mha4__blocked_row3_T6_C32_h4_uniform.f32",
    "module_mha4/module_mha4__cross_B3_q7_k11_C32_h4_padmask.f32",
    "module_mha4/module_mha4__cross_B1_q17_k4_C40_h2.f32",
    "module_mha4/module_mha4__blocked_row3_T6_C32_h4_uniform.f64",
    "module_heads/module_heads__B2_T7_din16_dh5_H4_bias.f32",
    "module_fused/module_fused__dh9_H3_T17_bias.f32",
];

fn load(name: &str) -> Case {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    Case::load(folder.join(format!("{name}.safetensors"))).unwrap()
}

fn engines() -> Vec<Engine> {
    let kernels = support::gpu().map(|gpu| Engine::Kernels { gpu, form: None });
    [Engine::Reference].into_iter().chain(kernels).collect()
}

/// One process keeps the manifest that it read.
fn run(case: &Case, engine: &Engine, tolerances: &mut Tolerances) -> Result<CaseReport, Error> {
    check(case, &Selection::Forward, tolerances, Some(engine))
}

fn passed(report: &Result<CaseReport, Error>) -> bool {
    report
        .as_ref()
        .is_ok_and(|report| report.status == Status::Passed)
}

#[test]
fn a_wrong_expected_value_fails_and_no_other_output_with_it() {
    let mut tolerances = Tolerances::new();
    for engine in engines() {
        for name in EXAMPLES.iter().chain(&["bert/bert__minilm_layer0_batch3"]) {
            let case = load(name);
            let report = run(&case, &engine, &mut tolerances).unwrap();
            assert_eq!(
                report.status,
                Status::Passed,
                "{name}: {:?}",
                report.reason()
            );
            for (number, output) in case.outputs.iter().enumerate() {
                if output.name.starts_with('d') {
                    continue;
                }
                for wrong in [f64::NAN, f64::INFINITY, 3e4] {
                    let mut case = case.clone();
                    *case.outputs[number].values.last_mut().unwrap() = wrong;
                    let report = run(&case, &engine, &mut tolerances).unwrap();
                    assert_eq!(report.status, Status::Failed, "{name} {}", output.name);
                    for of in report.outputs {
                        let expected = match of.name == output.name {
                            true => Status::Failed,
                            false => Status::Passed,
                        };
                        assert_eq!(
                            of.status, expected,
                            "{name}: {} of {}",
                            of.name, output.name
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_understood_is_unsupported() {
    let mut tolerances = Tolerances::new();
    for engine in engines() {
        for name in EXAMPLES {
            let whole = load(name);
            let novel = FileTensor {
                name: "novel".into(),
                ..whole.inputs[0].clone()
            };
            let mut changed: Vec<(&str, Case)> = [
                "novel attribute",
                "novel input",
                "novel output",
                "novel kind",
            ]
            .map(|what| (what, whole.clone()))
            .into();
            changed[0].1.attributes.insert("novel".into(), "1".into());
            changed[1].1.inputs.push(novel.clone());
            changed[2].1.outputs.push(novel);
            changed[3].1.kind = "novel".into();
            for (what, case) in changed {
                let report = run(&case, &engine, &mut tolerances).unwrap();
                assert_eq!(report.status, Status::Unsupported, "{name}, {what}");
                assert!(report.reason().unwrap().contains("novel"), "{name}, {what}");
            }
        }
    }
    // Gradients are told apart from what is not understood.
    let case = load("sdpa_varlen/sdpa_varlen__vl_grad_cross_gqa");
    let report = check(
        &case,
        &Selection::All,
        &mut tolerances,
        Some(&Engine::Reference),
    )
    .unwrap();
    assert_eq!(report.status, Status::Unsupported);
    assert!(
        report.reason().unwrap().contains("dq: gradients"),
        "{:?}",
        report.reason()
    );
}

/// Inputs of gradients, which no forward result depends on.
const UNUSED: &[&str] = &["dY", "dout"];
/// A bias that all keys have in common cancels in the softmax.
const CANCELS: &[&str] = &["bk"];
/// Inputs that broadcast: an axis of 1, in front or in place of equal values, changes nothing.
const BROADCAST: &[&str] = &[
    "mask",
    "bias",
    "attn_mask",
    "attention_bias",
    "alibi_slopes",
];

#[test]
fn inputs_that_are_missing_or_misshapen_never_pass() {
    let mut tolerances = Tolerances::new();
    let (mut errors, mut wrong) = (0, Vec::new());
    for engine in engines() {
        for name in EXAMPLES {
            let whole = load(name);
            for number in 0..whole.inputs.len() {
                let input = &whole.inputs[number];
                let mut expect = |what: &str, case: Case, may_pass: bool| {
                    let report = run(&case, &engine, &mut tolerances);
                    errors += usize::from(report.is_err());
                    if passed(&report) && !may_pass {
                        wrong.push(format!("{name} with {} {what}", input.name));
                    }
                };
                let unused = UNUSED.contains(&&*input.name);
                let broadcasts = BROADCAST.contains(&&*input.name);
                let mut case = whole.clone();
                case.inputs.remove(number);
                let cancels = CANCELS.contains(&&*input.name);
                expect("missing", case, unused || cancels);

                let with = |shape: Vec<usize>| {
                    let mut case = whole.clone();
                    let count = shape.iter().product();
                    case.inputs[number].values.resize(count, 0.25);
                    case.inputs[number].shape = shape;
                    case
                };
                for axis in 0..input.shape.len() {
                    for length in [
                        0,
                        input.shape[axis].saturating_sub(1),
                        input.shape[axis] + 1,
                    ] {
                        if length != input.shape[axis] {
                            let mut shape = input.shape.clone();
                            shape[axis] = length;
                            let what = format!("of shape {shape:?}");
                            let may_pass = unused || broadcasts && length == 1;
                            expect(&what, with(shape), may_pass);
                        }
                    }
                }
                expect(
                    "with an axis in front",
                    with([&[1], &input.shape[..]].concat()),
                    unused || broadcasts,
                );
                expect(
                    "without its first axis",
                    with(input.shape[1..].to_vec()),
                    unused || broadcasts,
                );
                expect("as a scalar", with(Vec::new()), unused);
            }
        }
    }
    assert!(wrong.is_empty(), "these pass: {wrong:#?}");
    assert!(errors > 500, "{errors}");
}

/// Attributes that only say in words or numbers where a case comes from.
const WORDS: &[&str] = &[
    "grad",
    "lens",
    "official_atol",
    "official_rtol",
    "opset",
    "poison",
    "qkv_bias",
    "role",
    "tags",
];

#[test]
fn attributes_that_say_something_else_never_pass() {
    let (mut tolerances, mut wrong) = (Tolerances::new(), Vec::new());
    for engine in engines() {
        for name in EXAMPLES {
            let whole = load(name);
            for attribute in whole.attributes.keys() {
                for value in ["", "novel", "-7", "1e300", "nan", "18446744073709551615"] {
                    let mut case = whole.clone();
                    case.attributes.insert(attribute.clone(), value.into());
                    let report = run(&case, &engine, &mut tolerances);
                    // A cap out of reach is none.
                    let far = attribute == "softcap" && value.len() == 20;
                    if passed(&report) && !WORDS.contains(&&**attribute) && !far {
                        wrong.push(format!("{name} with {attribute} = {value:?}"));
                    }
                }
                // Some may be left out: then what they say by default holds.
                let mut case = whole.clone();
                case.attributes.remove(attribute);
                let _ = run(&case, &engine, &mut tolerances);
            }
        }
    }
    assert!(wrong.is_empty(), "these pass: {wrong:#?}");
}
