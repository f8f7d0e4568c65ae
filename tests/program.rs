//! The program `wgpu-attention` as a user meets it: what it prints, what it writes, and how it refuses.
#![allow(clippy::unwrap_used, clippy::panic)] // A test may end so.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use support::{Random, gpu};
use wgpu_attention::compare::{Tolerance, compare};
use wgpu_attention::reference;
use wgpu_attention::results::ResultFile;
use wgpu_attention::tensor_file::{TensorFile, write_tensors};

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases");

fn program(arguments: &[&str]) -> Output {
    program_with(arguments, &[])
}

fn program_with(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wgpu-attention"));
    command.args(arguments).stdin(Stdio::null());
    for (name, value) in environment {
        if value.is_empty() {
            command.env_remove(name);
        } else {
            command.env(name, value);
        }
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit status 2, one line on standard error that holds all of `words`, and no panic.
fn refused(output: &Output, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(2),
        "{error}{}",
        text(&output.stdout)
    );
    assert!(!error.contains("panicked"), "{error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

/// The numbers after "largest error".
fn largest_errors(output: &str) -> Vec<f64> {
    output
        .split("largest error ")
        .skip(1)
        .map(|rest| rest.split_whitespace().next().unwrap().parse().unwrap())
        .collect()
}

#[test]
fn the_bare_command_runs_a_real_layer_and_says_how_right_it_is() {
    let Some(gpu) = gpu() else { return };
    let output = program(&[]);
    let shown = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{shown}{}",
        text(&output.stderr)
    );
    for word in [
        "all-MiniLM-L6-v2",
        "How are you?",
        &gpu.adapter_info().name,
        "QKV projection",
        "attention_",
        "since the adapter is",
        "GFLOP/s",
        "median of",
        "whole",
        "key padding mask",
    ] {
        assert!(shown.contains(word), "expected {word:?} in:\n{shown}");
    }
    let errors = largest_errors(&shown);
    assert_eq!(errors.len(), 2, "{shown}");
    assert!(
        errors.iter().all(|error| *error > 0.0 && *error < 3e-5),
        "{shown}"
    );
}

#[test]
fn both_forms_can_be_asked_for() {
    if gpu().is_none() {
        return;
    }
    for form in ["tiled", "lanes"] {
        let output = program(&["run", "--form", form, "--samples", "1"]);
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{shown}");
        for kernel in ["attention", "linear"] {
            assert!(shown.contains(&format!("{kernel}_{form}")), "{shown}");
        }
    }
}

/// A layer in files: its folder, weights and input.
struct Files {
    folder: tempfile::TempDir,
}

const D_IN: usize = 10;
const D_OUT: usize = 12;
const BATCH: usize = 2;
const TOKENS: usize = 7;

impl Files {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Writes the same random layer under several names, and inputs; returns what the causal layer gives with 3 heads.
    fn new() -> (Self, Vec<f64>) {
        let files = Files {
            folder: tempfile::tempdir().unwrap(),
        };
        let mut random = Random::new(7);
        let (qkv, qkv_bias) = (random.normals(3 * D_OUT * D_IN), random.normals(3 * D_OUT));
        let (output, output_bias) = (random.normals(D_OUT * D_OUT), random.normals(D_OUT));
        let x = random.normals(BATCH * TOKENS * D_IN);
        let turned = |w: &[f32], out: usize| -> Vec<f32> {
            let d_in = w.len() / out;
            (0..d_in)
                .flat_map(|i| (0..out).map(move |o| w[o * d_in + i]))
                .collect()
        };
        let (conv_qkv, conv_output) = (turned(&qkv, 3 * D_OUT), turned(&output, D_OUT));
        let other = random.normals(3 * D_OUT * D_IN);
        let layer = |prefix: &str, qkv: &[f32], file: &str| {
            write_tensors(
                files.path(file),
                &[
                    (
                        &format!("{prefix}.attn.c_attn.weight"),
                        &[D_IN, 3 * D_OUT],
                        qkv,
                    ),
                    (
                        &format!("{prefix}.attn.c_attn.bias"),
                        &[3 * D_OUT],
                        &qkv_bias,
                    ),
                    (
                        &format!("{prefix}.attn.c_proj.weight"),
                        &[D_OUT, D_OUT],
                        &conv_output,
                    ),
                    (
                        &format!("{prefix}.attn.c_proj.bias"),
                        &[D_OUT],
                        &output_bias,
                    ),
                    (&format!("{prefix}.mlp.c_proj.weight"), &[2], &[1.0, 2.0]),
                    ("h.10.attn.c_attn.weight", &[D_IN, 3 * D_OUT], &other),
                    ("h.0.attn.c_attn.weight", &[D_IN, 3 * D_OUT], &other),
                ],
            )
            .unwrap();
        };
        layer("h.2", &conv_qkv, "gpt2.safetensors");
        write_tensors(
            files.path("fused.safetensors"),
            &[
                ("Wqkv", &[3 * D_OUT, D_IN], &qkv),
                ("bqkv", &[3 * D_OUT], &qkv_bias),
                ("Wproj", &[D_OUT, D_OUT], &output),
                ("bproj", &[D_OUT], &output_bias),
            ],
        )
        .unwrap();
        let third = D_OUT * D_IN;
        write_tensors(
            files.path("separate.safetensors"),
            &[
                ("Wq", &[D_OUT, D_IN], &qkv[..third]),
                ("Wk", &[D_OUT, D_IN], &qkv[third..2 * third]),
                ("Wv", &[D_OUT, D_IN], &qkv[2 * third..]),
                ("bq", &[D_OUT], &qkv_bias[..D_OUT]),
                ("bk", &[D_OUT], &qkv_bias[D_OUT..2 * D_OUT]),
                ("bv", &[D_OUT], &qkv_bias[2 * D_OUT..]),
                ("Wo", &[D_OUT, D_OUT], &output),
                ("bo", &[D_OUT], &output_bias),
            ],
        )
        .unwrap();
        write_tensors(
            files.path("x.safetensors"),
            &[("X", &[BATCH, TOKENS, D_IN], &x)],
        )
        .unwrap();
        write_tensors(
            files.path("flat.safetensors"),
            &[("anything", &[TOKENS, D_IN], &x[..TOKENS * D_IN])],
        )
        .unwrap();
        let widen = reference::widen;
        let (qkv, qkv_bias, output, output_bias) = (
            widen(&qkv),
            widen(&qkv_bias),
            widen(&output),
            widen(&output_bias),
        );
        let result = reference::layer_without_weights(&reference::LayerInputs {
            batch: BATCH,
            tokens: TOKENS,
            d_in: D_IN,
            d_out: D_OUT,
            heads: 3,
            x: &widen(&x),
            qkv_weight: &qkv,
            qkv_bias: Some(&qkv_bias),
            output_weight: Some(&output),
            output_bias: Some(&output_bias),
            rules: reference::Rules {
                causal: true,
                ..Default::default()
            },
            ..Default::default()
        });
        (files, result.unwrap().y)
    }

    fn run(&self, weights: &str, input: &str, more: &[&str]) -> Output {
        let (weights, input) = (self.name(weights), self.name(input));
        let mut arguments = vec![
            "run",
            "--weights",
            &weights,
            "--input",
            &input,
            "--samples",
            "2",
        ];
        arguments.extend(more);
        program(&arguments)
    }
}

#[test]
fn a_users_own_layer_runs_from_files_under_every_name() {
    if gpu().is_none() {
        return;
    }
    let (files, expected) = Files::new();
    let shape = [BATCH, TOKENS, D_OUT];
    for (weights, more) in [
        ("gpt2.safetensors", &["--layer", "2"][..]),
        ("fused.safetensors", &[]),
        ("separate.safetensors", &[]),
    ] {
        let y = files.name("y.safetensors");
        let mut arguments = vec!["--heads", "3", "--causal", "--output", &y];
        arguments.extend(more);
        let output = files.run(weights, "x.safetensors", &arguments);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{weights}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
        let written = TensorFile::open(&y).unwrap().get("Y").unwrap().unwrap();
        let comparison = compare(
            &written.values,
            &written.shape,
            &expected,
            &shape,
            Tolerance::F32,
        );
        assert!(comparison.passed(), "{weights}: {comparison}");
        std::fs::remove_file(&y).unwrap();
    }
    // One sequence without a batch axis, in the only tensor of its file.
    let y = files.name("y.safetensors");
    let output = files.run(
        "fused.safetensors",
        "flat.safetensors",
        &["--heads", "3", "--causal", "--output", &y],
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let written = TensorFile::open(&y).unwrap().get("Y").unwrap().unwrap();
    let first = &expected[..TOKENS * D_OUT];
    assert!(
        compare(
            &written.values,
            &written.shape,
            first,
            &[1, TOKENS, D_OUT],
            Tolerance::F32
        )
        .passed()
    );
}

#[test]
fn unsound_requests_are_refused_in_one_line() {
    if gpu().is_none() {
        return;
    }
    let (files, _) = Files::new();
    let heads3 = ["--heads", "3"];
    refused(
        &files.run("fused.safetensors", "x.safetensors", &["--heads", "5"]),
        &["d_out = 12", "heads = 5"],
    );
    refused(
        &files.run("fused.safetensors", "x.safetensors", &["--heads", "0"]),
        &["heads = 0"],
    );
    refused(
        &files.run("none.safetensors", "x.safetensors", &heads3),
        &["none.safetensors", "No such file"],
    );
    refused(
        &files.run("fused.safetensors", "fused.safetensors", &heads3),
        &["X, x, hidden or input"],
    );
    refused(
        &files.run("x.safetensors", "x.safetensors", &heads3),
        &["no attention weights", "Wqkv"],
    );
    refused(
        &files.run(
            "gpt2.safetensors",
            "x.safetensors",
            &["--heads", "3", "--layer", "3"],
        ),
        &["--layer 3", "h.0.attn.", "h.10.attn."],
    );
    refused(
        &files.run(
            "fused.safetensors",
            "x.safetensors",
            &["--heads", "3", "--adapter", "no such adapter"],
        ),
        &["no such adapter"],
    );
    refused(
        &files.run(
            "fused.safetensors",
            "x.safetensors",
            &["--heads", "3", "--output", "/no/such/folder/y.safetensors"],
        ),
        &["/no/such/folder"],
    );

    // Inputs that do not fit.
    write_tensors(
        files.path("narrow.safetensors"),
        &[("X", &[1, 2, 9], &[0.0; 18])],
    )
    .unwrap();
    refused(
        &files.run("fused.safetensors", "narrow.safetensors", &heads3),
        &["expected 10 channels", "got 9"],
    );
    write_tensors(files.path("rank.safetensors"), &[("X", &[10], &[0.0; 10])]).unwrap();
    refused(
        &files.run("fused.safetensors", "rank.safetensors", &heads3),
        &["(B, T, d_in)"],
    );

    // Weights that do not fit each other.
    let weights = |name: &str, tensors: &[(&str, &[usize], &[f32])]| {
        write_tensors(files.path(name), tensors).unwrap()
    };
    weights("thirds.safetensors", &[("Wqkv", &[4, 10], &[0.0; 40])]);
    refused(
        &files.run("thirds.safetensors", "x.safetensors", &heads3),
        &["Wqkv", "(3*d_out, d_in)", "(4, 10)"],
    );
    weights(
        "bias.safetensors",
        &[
            ("Wqkv", &[36, 10], &[0.0; 360]),
            ("bqkv", &[35], &[0.0; 35]),
        ],
    );
    refused(
        &files.run("bias.safetensors", "x.safetensors", &heads3),
        &["\"bqkv\"", "(36)", "(35)"],
    );
    weights(
        "missing.safetensors",
        &[
            ("Wq", &[12, 10], &[0.0; 120]),
            ("Wk", &[12, 10], &[0.0; 120]),
        ],
    );
    refused(
        &files.run("missing.safetensors", "x.safetensors", &heads3),
        &["\"Wv\"", "missing"],
    );
    weights("empty.safetensors", &[("Wqkv", &[0, 10], &[])]);
    refused(
        &files.run("empty.safetensors", "x.safetensors", &heads3),
        &["size 0"],
    );

    // Damaged files.
    let sound = std::fs::read(files.path("fused.safetensors")).unwrap();
    for (name, bytes) in [
        ("truncated", sound[..sound.len() / 2].to_vec()),
        ("header", sound[..20].to_vec()),
        ("nothing", Vec::new()),
        (
            "length",
            [&u64::MAX.to_le_bytes()[..], &sound[8..]].concat(),
        ),
        ("garbage", vec![b'{'; 4096]),
    ] {
        let name = format!("{name}.safetensors");
        std::fs::write(files.path(&name), bytes).unwrap();
        refused(&files.run(&name, "x.safetensors", &heads3), &[&name]);
        refused(&files.run("fused.safetensors", &name, &heads3), &[&name]);
    }
    refused(&files.run("", "x.safetensors", &heads3), &["folder"]);

    // Values that would make NaN of everything.
    for value in [f32::NAN, f32::NEG_INFINITY] {
        write_tensors(
            files.path("nan.safetensors"),
            &[("X", &[1, 1, 10], &[[0.0; 9].as_slice(), &[value]].concat())],
        )
        .unwrap();
        refused(
            &files.run("fused.safetensors", "nan.safetensors", &heads3),
            &["nan.safetensors", "\"X\"", "value 9", "finite"],
        );
    }

    // A result that would take the place of what it came from, or of what is no file.
    for name in ["fused.safetensors", "x.safetensors"] {
        let output = files.name(name);
        let before = std::fs::read(&output).unwrap();
        refused(
            &files.run(
                "fused.safetensors",
                "x.safetensors",
                &["--heads", "3", "--output", &output],
            ),
            &[name, "another name"],
        );
        assert_eq!(std::fs::read(&output).unwrap(), before);
    }
    let folder = files.folder.path().display().to_string();
    refused(
        &files.run(
            "fused.safetensors",
            "x.safetensors",
            &["--heads", "3", "--output", &folder],
        ),
        &[&folder, "not a file"],
    );

    // Nothing was left behind.
    let left: Vec<_> = std::fs::read_dir(files.folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| !name.to_string_lossy().ends_with(".safetensors"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn incomplete_requests_are_refused() {
    for arguments in [
        &["run", "--weights", "w.safetensors"][..],
        &["run", "--heads", "3"],
        &["run", "--causal"],
        &["run", "--samples", "0"],
        &["run", "--form", "square"],
        &["verify"],
        &["verify", CASES, "--outputs", "Y,,P"],
        &["fly"],
    ] {
        let output = program(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(
            !output.stderr.is_empty() && !text(&output.stderr).contains("panicked"),
            "{arguments:?}"
        );
    }
}

/// gfx-rs/wgpu#368: no adapter is an error or the CPU reference, never a panic.
#[test]
fn without_an_adapter_it_says_so_and_uses_the_reference() {
    let hidden = [
        ("WGPU_BACKEND", ""),
        ("WGPU_ADAPTER_NAME", ""),
        ("VK_DRIVER_FILES", "/none"),
        ("VK_ICD_FILENAMES", "/none"),
        ("__EGL_VENDOR_LIBRARY_FILENAMES", "/none"),
    ];
    let output = program_with(&[], &hidden);
    let shown = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{shown}{}",
        text(&output.stderr)
    );
    for word in [
        "no GPU adapter was found",
        "Install",
        "CPU reference",
        "passed",
    ] {
        assert!(shown.contains(word), "expected {word:?} in:\n{shown}");
    }
    let output = program_with(&["info"], &hidden);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("no adapter. Install"));

    // What was asked for by name or backend is not exchanged for something else.
    let mut asked = hidden.to_vec();
    asked[0] = ("WGPU_BACKEND", "vulkan");
    refused(&program_with(&[], &asked), &["backend vulkan", "Install"]);
    refused(
        &program_with(&["run", "--adapter", "H200"], &hidden),
        &["\"H200\"", "Install"],
    );
    asked[0] = ("WGPU_BACKEND", "voodoo");
    refused(&program_with(&[], &asked), &["voodoo", "vulkan"]);

    // Cases for the kernels need an adapter, cases for the reference do not.
    let fused = format!("{CASES}/module_fused");
    let toy = |precision: &str| {
        format!("{fused}/module_fused__toy_identical_bias.{precision}.safetensors")
    };
    refused(
        &program_with(&["verify", &toy("f32"), "--outputs", "Y"], &hidden),
        &["no GPU adapter"],
    );
    let output = program_with(
        &["verify", "--strict", &toy("f64"), "--outputs", "Y,P"],
        &hidden,
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
}

#[test]
fn info_lists_this_adapter_as_text_and_json() {
    let Some(gpu) = gpu() else { return };
    let output = program(&["info"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains(&gpu.adapter_info().name));
    let output = program(&["info", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let adapters = json["adapters"].as_array().unwrap();
    let ours = adapters
        .iter()
        .find(|a| a["name"] == gpu.adapter_info().name.as_str())
        .unwrap();
    assert!(
        ours["limits"]["max_storage_buffer_binding_size"]
            .as_u64()
            .unwrap()
            >= 128 << 20
    );
    let kernels = ours["kernels"].as_array().unwrap();
    assert_eq!(kernels.len(), wgpu_attention::kernels::KERNELS.len());
    assert!(
        kernels
            .iter()
            .all(|kernel| kernel["runs"] == true || kernel["name"] == "attention_matrices")
    );
}

/// What `verify --strict --json` with these options says of all golden cases.
fn verified(options: &[&str]) -> serde_json::Value {
    let arguments = [
        "verify",
        "--strict",
        "--json",
        "--outputs",
        "forward",
        CASES,
    ];
    let output = program(&[&arguments, options].concat());
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cases = json["cases"].as_array().unwrap();
    assert!(cases.len() >= 270, "{}", cases.len());
    let all_passed = cases.iter().all(|case| case["status"] == "passed");
    assert_eq!(output.status.code(), Some(i32::from(!all_passed)));
    json
}

#[test]
fn verify_passes_the_golden_cases_in_both_forms() {
    if gpu().is_none() {
        return;
    }
    let mut options = "auto";
    for _ in 0..2 {
        let json = verified(&["--form", options]);
        let cases = json["cases"].as_array().unwrap();
        let by = |kind: &str, kernel: &str| {
            let of_kind = cases.iter().filter(|case| case["kind"] == kind);
            of_kind
                .clone()
                .any(|case| case["kernel"].as_str().unwrap().contains(kernel))
        };
        for case in cases.iter().filter(|case| case["status"] != "passed") {
            // Without broadcasts the lanes form holds heads of up to 64 channels: of itself the planner takes another for larger ones.
            let reason = case["reason"].as_str().unwrap();
            assert!(
                options == "lanes" && case["status"] == "unsupported",
                "{case:#}"
            );
            assert!(
                reason.contains("the largest head of attention_lanes allows 64"),
                "{case:#}"
            );
        }
        assert!(
            json["passed"].as_u64().unwrap() >= 240,
            "{}",
            json["passed"]
        );
        let chosen = match options {
            "auto" if by("sdpa", "attention_lanes") => "lanes",
            "auto" => "tiled",
            form => form,
        };
        for kind in [
            "bert",
            "module_fused",
            "module_heads",
            "module_mha4",
            "onnx",
            "ort",
            "sdpa",
            "sdpa_varlen",
        ] {
            // Some kinds have few queries in every case.
            let ran = |kernel: &str| by(kind, &format!("{kernel}_{chosen}"));
            assert!(ran("attention") || ran("decode"), "{kind} by {chosen}");
            assert_eq!(by(kind, "reference"), kind.starts_with("module_"), "{kind}");
        }
        options = if chosen == "lanes" { "tiled" } else { "lanes" };
    }
}

#[test]
fn verify_holds_the_reference_to_every_case() {
    let json = verified(&["--reference"]);
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(
        json["passed"].as_u64().unwrap() as usize,
        cases.len(),
        "{json:#}"
    );
    assert!(cases.iter().all(|case| case["kernel"] == "reference"));
    assert!(json["adapter"].is_null());
    let output = program(&["verify", CASES, "--reference", "--form", "tiled"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_cannot_be_done_yet_is_unsupported_and_strict_makes_that_a_failure() {
    if gpu().is_none() {
        return;
    }
    let case =
        format!("{CASES}/module_heads/module_heads__B2_T7_din16_dh5_H4_bias.f32.safetensors");
    let output = program(&["verify", &case]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    assert!(shown.contains("gradients are not built yet"), "{shown}");
    let output = program(&["verify", &case, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&json["passed"], &json["unsupported"]),
        (&0.into(), &1.into())
    );
    for (output, expected) in [
        ("Y", "passed"),
        ("Y_fused", "passed"),
        ("P", "passed"),
        ("dX", "unsupported"),
    ] {
        assert_eq!(json["cases"][0]["outputs"][output], expected, "{output}");
    }
    assert_eq!(
        program(&["verify", "--strict", &case]).status.code(),
        Some(1)
    );
    // Nothing that could be compared.
    let output = program(&["verify", &case, "--outputs", "dX"]);
    refused(&output, &["nothing was compared"]);
    let output = program(&["verify", &case, "--outputs", "nonsense"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("\"nonsense\""));
}

/// Replaces the first value of a tensor in a safetensors file.
fn damage(from: &Path, to: &Path, tensor: &str, value: f32) {
    let mut bytes = std::fs::read(from).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = 8 + header + json[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(to, bytes).unwrap();
}

#[test]
fn verify_tells_a_wrong_result_with_its_worst_element() {
    if gpu().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let sound =
        Path::new(CASES).join("module_fused/module_fused__toy_identical_bias.f32.safetensors");
    let path = folder
        .path()
        .join("module_fused__toy_identical_bias.f32.safetensors");
    for (value, expected) in [
        (123.0, "expected 123"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
    ] {
        damage(&sound, &path, "Y", value);
        let output = program(&["verify", &path.display().to_string(), "--outputs", "Y"]);
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{shown}");
        assert!(
            shown.contains("FAILED module_fused toy_identical_bias"),
            "{shown}"
        );
        assert!(
            shown.contains("[0, 0, 0]") && shown.contains(expected),
            "{shown}"
        );
    }
    // An input that is changed makes the result wrong as well.
    damage(&sound, &path, "Wqkv", 50.0);
    assert_eq!(
        program(&["verify", &path.display().to_string(), "--outputs", "Y"])
            .status
            .code(),
        Some(1)
    );
    // A file that cannot be read, beside one that is right.
    std::fs::copy(&sound, &path).unwrap();
    std::fs::write(
        folder.path().join("broken.safetensors"),
        b"not a tensor file",
    )
    .unwrap();
    let output = program(&[
        "verify",
        &folder.path().display().to_string(),
        "--outputs",
        "Y",
    ]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("broken.safetensors"));
}

#[test]
fn bench_checks_a_case_measures_it_and_writes_what_it_found() {
    let Some(gpu) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bench.json").display().to_string();
    let name = "layer-causal-b5-t6-3x18-h2-f32";
    let arguments = ["bench", "--case", name, "--samples", "3", "--save", &path];
    let output = program(&arguments);
    let shown = text(&output.stdout);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{shown}{errors}");
    for word in [
        name,
        &gpu.adapter_info().name,
        "f32",
        "memory",
        "1 case measured",
    ] {
        assert!(shown.contains(word), "expected {word:?} in:\n{shown}");
    }
    let read = || -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
    };
    let file = read();
    assert_eq!(file["schema"], 2);
    assert_eq!(file["complete"], true);
    let run = &file["runs"][0];
    assert_eq!(run["adapter"]["name"], gpu.adapter_info().name);
    let cases = run["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 1);
    assert_eq!(cases[0]["name"], name);
    assert_eq!(cases[0]["status"], "measured");
    let rounds = cases[0]["wall"]["rounds_s"].as_array().unwrap();
    let samples = rounds.iter().map(|round| round.as_array().unwrap().len());
    assert_eq!(samples.collect::<Vec<_>>(), [3, 3, 3]);
    assert_eq!(
        cases[0]["flops"],
        2 * 30 * (3 * 54 + 18 * 18) + 5 * 4 * 18 * 21
    );
    let share = cases[0]["share_of_peak"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{share}");
    let rates = &run["peaks"];
    // The best of each peak after each round.
    let peaks = if gpu.capabilities().offers(wgpu_attention::Tier::Half) {
        3
    } else {
        2
    };
    assert_eq!(rates["after"].as_array().unwrap().len(), 3 * peaks);
    assert!(shown.contains("peaks after the cases"), "{shown}");
    assert!(rates["f32_flops_per_second"].as_f64().unwrap() > 1e8);
    assert!(rates["bytes_per_second"].as_f64().unwrap() > 1e8);
    ResultFile::load(&path).unwrap();

    // What is there is not replaced unasked, and that is said before anything is measured.
    refused(&program(&arguments), &["bench.json", "already"]);
    assert_eq!(read(), file);
}

#[test]
fn tune_keeps_what_it_finds_and_run_and_bench_take_it() {
    let Some(gpu) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let name = |name: &str| folder.path().join(name).display().to_string();
    let file = name("tuning.json");
    let tune = |more: &[&str]| {
        let shape = ["tune", "--d-model", "16", "--heads", "2", "--tokens", "5"];
        program(&[&shape[..], &["--seconds", "0.05", "--file", &file], more].concat())
    };
    let output = tune(&[]);
    let shown = text(&output.stdout);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{shown}{}",
        text(&output.stderr)
    );
    for word in [
        &gpu.adapter_info().name,
        "a call of 5 tokens",
        "a step on a cache of 5 tokens",
        "linear 5 rows, 16 to 48",
        "* ",
        "written",
    ] {
        assert!(shown.contains(word), "expected {word:?} in:\n{shown}");
    }
    let run = |file: &str| program(&["run", "--samples", "1", "--tuning", file]);
    let output = run(&file);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("6 problems of this adapter"));
    // A file that is not there, or no tuning file, is not what was asked for; one of another driver is told.
    refused(&run(&name("none.json")), &["none.json"]);
    std::fs::write(name("text"), "no JSON").unwrap();
    refused(&run(&name("text")), &["text", "JSON"]);
    let other = std::fs::read_to_string(&file).unwrap();
    let other = other.replace("\"kernels\": \"", "\"kernels\": \"0");
    std::fs::write(name("other.json"), other).unwrap();
    let output = run(&name("other.json"));
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("nothing of this adapter"));
    for (more, words) in [
        (&["--heads", "3"][..], &["heads"][..]),
        (&["--kv-heads", "5"], &["kv_heads"]),
        (&["--tokens", "0"], &["tokens"]),
        (&["--batch", "0"], &["batch"]),
        (&["--d-model", "18446744073709551614"], &["machine word"]),
        (&["--d-model", "1000000"], &["d_model"]),
    ] {
        let mut arguments = vec!["tune", "--seconds", "0.05"];
        for (option, value) in [("--d-model", "16"), ("--heads", "2"), ("--tokens", "5")] {
            if more[0] != option {
                arguments.extend([option, value]);
            }
        }
        arguments.extend(more);
        refused(&program(&arguments), words);
    }
    let bench = [
        "bench",
        "--case",
        "layer-causal-b5",
        "--tuning",
        &file,
        "--save",
        &file,
        "--force",
    ];
    refused(&program(&bench), &["--tuning"]);
    assert_eq!(run(&file).status.code(), Some(0));
}

#[test]
fn qualify_says_which_tiers_are_right() {
    let Some(gpu) = gpu() else { return };
    let output = program(&["qualify"]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(shown.contains(&gpu.adapter_info().name), "{shown}");
    assert!(
        shown.contains("half-precision tiles: ") && shown.contains("cooperative matrices: "),
        "{shown}"
    );
}

#[test]
fn bench_lists_its_cases_and_refuses_what_it_does_not_have() {
    let output = program(&["bench", "--list"]);
    assert_eq!(output.status.code(), Some(0));
    let shown = text(&output.stdout);
    for case in wgpu_attention::bench::CASES {
        assert!(shown.contains(&case.work.name()), "{shown}");
    }
    let Some(gpu) = gpu() else { return };
    refused(
        &program(&["bench", "--case", "no-such-case"]),
        &["no-such-case", "--list"],
    );
    refused(
        &program(&["bench", "--quick", "--case", "k16384"]),
        &["quick set"],
    );
    if gpu.adapter_info().device_type == wgpu_attention::wgpu::DeviceType::Cpu {
        let output = program(&["bench", "--case", "t16384-"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("GPUs"));
    }
    for shape in [
        "attention-causal-t0-h1-d1-f32",
        "attention",
        "linear-r1-2x-f32",
        "",
    ] {
        let output = program(&["bench", "--shape", shape]);
        assert_eq!(output.status.code(), Some(2));
        assert!(
            text(&output.stderr).contains("decode-k4096"),
            "{}",
            text(&output.stderr)
        );
    }
    let output = program(&["bench", "--kernel", "no_such_kernel"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("attention_tiled"));
    let nowhere = [
        "bench",
        "--case",
        "b5-t6",
        "--save",
        "/no/such/folder/b.json",
    ];
    refused(&program(&nowhere), &["/no/such/folder"]);
}

/// A shape beside the table, by each kernel that can compute it, in every format; a kernel that cannot is told.
#[test]
fn bench_takes_shapes_kernels_and_formats() {
    if gpu().is_none() {
        return;
    }
    let shape = "attention-causal-t7-h2-d8-f32";
    let bench = |more: &[&str]| {
        let common = ["bench", "--shape", shape, "--samples", "1", "--rounds", "1"];
        program(&[&common, more].concat())
    };
    let output = bench(&["--kernel", "all", "--format", "json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cases = json["runs"][0]["cases"].as_array().unwrap();
    // Seven queries: kernels for many and for few.
    assert!(cases.len() >= 2, "{cases:?}");
    for case in cases {
        assert_eq!(case["name"], shape);
        let kernels = case["kernels"].as_array().unwrap();
        assert!(kernels.contains(&case["variant"]), "{case}");
    }
    let output = bench(&["--kernel", "linear_few"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("linear_few is not supported"));
    let csv = text(&bench(&["--format", "csv"]).stdout);
    assert_eq!(csv.lines().count(), 2, "{csv}");
    assert!(csv.contains(shape), "{csv}");
    let markdown = text(&bench(&["--format", "markdown"]).stdout);
    assert!(markdown.contains(&format!("| {shape} |")), "{markdown}");
    let noise = bench(&["--check-noise"]);
    assert_eq!(noise.status.code(), Some(0), "{}", text(&noise.stderr));
    assert!(text(&noise.stdout).contains("two runs differ by"));
}

/// Ctrl-C keeps what is done; a full disk is one line and status 2.
#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_bench_leaves_a_file_of_what_was_done() {
    if gpu().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part.json");
    let shown = path.display().to_string();
    let mut child = Command::new(env!("CARGO_BIN_EXE_wgpu-attention"))
        .args(["bench", "--case", "layer-causal-b5", "--rounds", "100"])
        .args(["--samples", "10000", "--save", &shown])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Until the first case is in it.
    let measured = || {
        let file = ResultFile::load(&path).ok()?;
        let case = file.runs.first()?.cases.first()?.clone();
        Some((file.complete, case))
    };
    while measured().is_none() {
        assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let interrupted = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(interrupted.success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("interrupted"));
    let (complete, case) = measured().unwrap();
    assert!(!complete && case.measured().is_some());

    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_wgpu-attention"))
        .args(["bench", "--list"])
        .stdout(full)
        .output()
        .unwrap();
    refused(&output, &["standard output"]);
}

/// A reader that goes away early is no reason to panic.
#[test]
fn a_closed_pipe_is_no_panic() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_wgpu-attention"))
        .args(["info", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(
        !text(&output.stderr).contains("panicked"),
        "{}",
        text(&output.stderr)
    );
}
