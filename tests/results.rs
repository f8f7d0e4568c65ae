//! Result files as somebody else's bytes, and their comparison: by the library and by `wgpu-attention compare`. No GPU.
#![allow(clippy::unwrap_used, clippy::panic)] // A test may end so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use wgpu_attention::Error;
use wgpu_attention::results::{
    Adapter, CaseResult, Change, Clock, Comparison, Limits, MeasuredCase, MeasuredPeaks, Outcome,
    PeakForm, ResultFile, Run, Settings, Times, Verdict, change_of, labelled,
};

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wgpu-attention"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit status 2, one line on standard error that holds all of `words`, and no panic.
fn refused(output: &Output, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert!(!error.contains("panicked"), "{error}");
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

/// Three rounds of five samples around that many seconds.
fn times(seconds: f64) -> Times {
    let round = |round: usize| {
        let sample = |i: usize| seconds * (1.0 + 0.002 * i as f64 + 0.001 * round as f64);
        (0..5).map(sample).collect()
    };
    Times::of((0..3).map(round).collect()).unwrap()
}

fn case(name: &str, seconds: f64) -> CaseResult {
    CaseResult {
        name: name.into(),
        variant: None,
        kind: "linear".into(),
        element: "f32".into(),
        sizes: BTreeMap::from([("rows".into(), 128)]),
        causal: None,
        flops: 1000,
        bytes: 100,
        outcome: Outcome::Measured(Box::new(MeasuredCase {
            kernels: vec!["linear_tiled".into()],
            tier: "plain".into(),
            operand_sets: 1,
            first_s: 0.1,
            checked: 10,
            max_error: 1e-7,
            calls_per_sample: 4,
            clock: Clock::Gpu,
            no_gpu_time: None,
            wall: times(seconds * 1.1),
            gpu: Some(times(seconds)),
            flops_per_second: 1000.0 / seconds,
            bytes_per_second: 100.0 / seconds,
            bound: Some("f32".into()),
            share_of_peak: Some(0.5),
        })),
    }
}

fn run(adapter: &str, cases: Vec<CaseResult>) -> Run {
    let form = |bound: &str, rate_per_second| PeakForm {
        bound: bound.into(),
        form: "peak".into(),
        rate_per_second,
        wall: times(1e-3),
        gpu: None,
    };
    Run {
        adapter: Adapter {
            name: adapter.into(),
            backend: "vulkan".into(),
            device_type: "DiscreteGpu".into(),
            driver: "driver".into(),
            driver_info: "1.0".into(),
            vendor: 1,
            device: 2,
            tiers: vec![],
            limits: Limits {
                max_storage_buffer_binding_size: 1,
                max_buffer_size: 1,
                max_compute_workgroup_storage_size: 1,
                max_compute_invocations_per_workgroup: 1,
                max_compute_workgroups_per_dimension: 1,
                max_storage_buffers_per_shader_stage: 1,
                min_subgroup_size: 0,
                max_subgroup_size: 0,
            },
        },
        peaks: MeasuredPeaks {
            f32_flops_per_second: 1e12,
            f16_flops_per_second: None,
            matrix_flops_per_second: None,
            bytes_per_second: 1e11,
            dispatch_s: 1e-6,
            submission_s: 1e-5,
            buffer_bytes: 1 << 20,
            forms: vec![form("f32", 1e12), form("memory", 1e11)],
            after: vec![form("f32", 1e12)],
        },
        tuned_problems: None,
        left_out: vec![],
        cases,
    }
}

fn file(runs: Vec<Run>) -> ResultFile {
    let settings = Settings {
        quick: true,
        cases: vec![],
        shapes: vec![],
        kernel: None,
        form: "auto".into(),
        tiers: "auto".into(),
        samples: 5,
        rounds: 3,
    };
    ResultFile {
        complete: true,
        runs,
        ..ResultFile::new("2026-01-02T03:04:05Z".into(), settings)
    }
}

fn write(folder: &Path, name: &str, file: &ResultFile) -> String {
    let path = folder.join(name);
    file.save(&path, false).unwrap();
    path.display().to_string()
}

#[test]
fn a_file_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let mut broken = case("broken", 1.0);
    broken.variant = Some("half".into());
    broken.outcome = Outcome::Wrong {
        kernels: vec!["a".into()],
        reason: "off by 1".into(),
    };
    let refused = |name: &str| CaseResult {
        outcome: Outcome::Refused {
            reason: "too large".into(),
        },
        ..case(name, 1.0)
    };
    let all = file(vec![
        run(
            "A \"quoted\" <name>\u{1b}[2J",
            vec![case("one", 1e-3), broken],
        ),
        run("B", vec![refused("one")]),
    ]);
    let path = write(folder.path(), "all.json", &all);
    assert_eq!(ResultFile::load(&path).unwrap(), all);
    assert_eq!(all.runs[0].cases[1].id(), "broken@half");
    // What later versions add does not matter.
    let more = std::fs::read_to_string(&path).unwrap();
    let more = more.replacen("{", "{ \"more\": [1, {}],", 1);
    std::fs::write(&path, more).unwrap();
    assert_eq!(ResultFile::load(&path).unwrap(), all);
}

/// llama.cpp's and others' tools die of a traceback on such files.
#[test]
fn a_file_that_is_none_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let good = write(
        folder.path(),
        "good.json",
        &file(vec![run("A", vec![case("one", 1e-3)])]),
    );
    let whole = std::fs::read_to_string(&good).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(whole.contains(from), "{from}");
        whole.replacen(from, to, 1).into_bytes()
    };
    let median = format!("\"median_s\": {}", times(1e-3).median_s);
    let mut all: Vec<(Vec<u8>, &str)> = vec![
        (b"".to_vec(), "empty"),
        (b" \n\t".to_vec(), "empty"),
        (b"no JSON".to_vec(), "no JSON"),
        (b"\x00\xff\xfe".to_vec(), "no JSON"),
        (b"[]".to_vec(), "expected"),
        (b"null".to_vec(), "expected"),
        (b"{}".to_vec(), "bench"),
        ([b'['; 100_000].to_vec(), "expected"),
        (b"{\"what\": \"wgpu-attention bench\"}".to_vec(), "schema"),
        (changed("\"schema\": 2", "\"schema\": 1"), "schema 2, got 1"),
        (changed("\"schema\": 2", "\"schema\": 3000000000"), "schema"),
        (changed("\"schema\": 2", "\"schema\": -1"), "expected"),
        (changed("wgpu-attention bench", "something"), "bench"),
        (changed("\"runs\"", "\"walks\""), "runs"),
        (
            changed("\"status\": \"measured\"", "\"status\": \"guessed\""),
            "guessed",
        ),
        (changed(&median, "\"median_s\": NaN"), "no JSON"),
        (changed(&median, "\"median_s\": null"), "expected"),
        (changed(&median, "\"median_s\": 1e999"), "no JSON"),
        (changed(&median, "\"median_s\": 2.0"), "median_s"),
        (changed("\"clock\": \"gpu\"", "\"clock\": \"sun\""), "sun"),
        (changed("1000000000000.0", "-1.0"), "positive"),
        (changed("1000000000000.0", "0.0"), "positive"),
        (
            changed("\"share_of_peak\": 0.5", "\"share_of_peak\": -0.5"),
            "positive",
        ),
    ];
    all.push((changed("\"first_s\": 0.1", "\"first_s\": -0.1"), "first_s"));
    all.push((
        changed("\"dispatch_s\": 1e-6", "\"dispatch_s\": -1.0"),
        "dispatch_s",
    ));
    // A sample that is no time, and none at all.
    let samples = first_samples(&whole);
    all.push((changed(&samples, "[[-1.0]]"), "positive"));
    all.push((changed(&samples, "[]"), "positive"));
    all.push((changed(&samples, "[[], [1.0]]"), "positive"));
    // The same case twice.
    let twice = file(vec![run("A", vec![case("one", 1.0), case("one", 2.0)])]);
    all.push((twice.to_json().into_bytes(), "twice"));
    for (at, (bytes, word)) in all.iter().enumerate() {
        let path = folder.path().join(format!("bad-{at}.json"));
        std::fs::write(&path, bytes).unwrap();
        let error = ResultFile::load(&path).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{at}: {error}");
        assert!(
            error.to_string().contains(word),
            "{at}: expected {word:?} in: {error}"
        );
        let name = path.display().to_string();
        refused(
            &program(&["compare", &good, &name]),
            &[&format!("bad-{at}.json")],
        );
    }
    // Cut anywhere it is refused as well.
    for end in (1..whole.trim_end().len()).step_by(97) {
        let path = folder.path().join("cut.json");
        std::fs::write(&path, &whole.as_bytes()[..end]).unwrap();
        let error = ResultFile::load(&path).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{end}: {error}");
    }
    refused(
        &program(&["compare", &good, "/no/such/file.json"]),
        &["/no/such/file.json"],
    );
    let directory = folder.path().display().to_string();
    refused(&program(&["compare", &good, &directory]), &[&directory]);
}

/// The list of samples of the first peak, as it stands in the text.
fn first_samples(text: &str) -> String {
    let begin = text.find("\"rounds_s\": ").unwrap() + "\"rounds_s\": ".len();
    let mut depth = 0;
    for (at, letter) in text[begin..].char_indices() {
        match letter {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return text[begin..=begin + at].to_string();
        }
    }
    panic!("no list")
}

#[test]
fn runs_are_told_apart_by_what_differs() {
    let labels = |files: &[(String, ResultFile)]| -> Vec<String> {
        labelled(files).into_iter().map(|run| run.label).collect()
    };
    let of = |name: &str, adapters: &[&str]| {
        let runs = adapters
            .iter()
            .map(|adapter| run(adapter, vec![]))
            .collect();
        (name.to_string(), file(runs))
    };
    assert_eq!(
        labels(&[of("x", &["A"]), of("y", &["B"])]),
        ["A (vulkan)", "B (vulkan)"]
    );
    assert_eq!(labels(&[of("x", &["A"]), of("y", &["A"])]), ["x", "y"]);
    assert_eq!(
        labels(&[of("x", &["A", "B"]), of("y", &["A"])]),
        ["x: A (vulkan)", "x: B (vulkan)", "y: A (vulkan)"]
    );
    let same = labels(&[of("x", &["A", "A"]), of("x", &["A"])]);
    assert_eq!(
        same.iter().collect::<std::collections::HashSet<_>>().len(),
        3,
        "{same:?}"
    );
}

#[test]
fn compare_matches_cases_and_says_what_changed() {
    let folder = tempfile::tempdir().unwrap();
    let broken = CaseResult {
        outcome: Outcome::Failed {
            reason: "lost".into(),
        },
        ..case("breaks", 1.0)
    };
    let before = file(vec![run(
        "A",
        vec![
            case("same", 1e-3),
            case("slower", 1e-3),
            case("faster", 1e-3),
            case("breaks", 1.0),
            case("old", 1.0),
        ],
    )]);
    let after = file(vec![run(
        "A",
        vec![
            case("faster", 0.5e-3),
            case("slower", 1.3e-3),
            case("same", 1.001e-3),
            broken,
            case("new", 1.0),
        ],
    )]);
    let files = [
        ("before".to_string(), before.clone()),
        ("after".to_string(), after.clone()),
    ];
    let runs = labelled(&files);
    let comparison = Comparison::of(&runs).unwrap();
    let verdict = |id: &str| {
        let case = comparison.cases.iter().find(|case| case.id == id).unwrap();
        case.against_first(1).map(|change: &Change| change.verdict)
    };
    assert_eq!(comparison.cases.len(), 4);
    assert_eq!(comparison.unmatched, 2);
    assert_eq!(verdict("same"), Some(Verdict::Noise));
    assert_eq!(verdict("slower"), Some(Verdict::Slower));
    assert_eq!(verdict("faster"), Some(Verdict::Faster));
    assert_eq!(verdict("breaks"), None);
    let ids = |ratio| -> Vec<String> {
        let slower = comparison.slower_than(ratio).into_iter();
        slower.map(|(case, _)| case.id.clone()).collect()
    };
    assert_eq!(ids(1.1), ["slower", "breaks"]);
    assert_eq!(ids(1.5), ["breaks"]);

    let a = write(folder.path(), "before.json", &before);
    let b = write(folder.path(), "after.json", &after);
    let output = program(&["compare", &a, &b]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for word in [
        "before",
        "after",
        "1.300 slower",
        "0.500 faster",
        "noise",
        "FAILED",
        "2 more",
    ] {
        assert!(shown.contains(word), "expected {word:?} in:\n{shown}");
    }
    let failing = program(&["compare", "--fail-above", "1.1", &a, &b]);
    assert_eq!(failing.status.code(), Some(1));
    assert!(
        text(&failing.stderr).contains("breaks"),
        "{}",
        text(&failing.stderr)
    );
    let same = program(&["compare", "--fail-above", "1.1", &a, &a]);
    assert_eq!(same.status.code(), Some(0), "{}", text(&same.stderr));
    for ratio in ["0.5", "NaN", "inf", "x"] {
        assert_eq!(
            program(&["compare", "--fail-above", ratio, &a, &b])
                .status
                .code(),
            Some(2)
        );
    }

    let markdown = text(&program(&["compare", "--format", "markdown", &a, &b]).stdout);
    assert!(
        markdown.contains("| slower | 1.0010 | 1.3013 | 1.300 slower |"),
        "{markdown}"
    );
    let csv = text(&program(&["compare", "--format", "csv", &a, &b]).stdout);
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert!(csv.starts_with("case,first,other,clock,first_s"), "{csv}");
    let json: serde_json::Value =
        serde_json::from_slice(&program(&["compare", "--format", "json", &a, &b]).stdout).unwrap();
    assert_eq!(json["cases"][1]["changes"][0]["verdict"], "slower");

    // One file alone, and files with nothing in common.
    refused(&program(&["compare", &a]), &["two runs"]);
    let other = write(
        folder.path(),
        "other.json",
        &file(vec![run("A", vec![case("z", 1.0)])]),
    );
    refused(&program(&["compare", &a, &other]), &["in common"]);
}

/// Names are somebody else's words.
#[test]
fn hostile_names_are_shown_and_not_obeyed() {
    let folder = tempfile::tempdir().unwrap();
    let name = "X | <b>\"y\", z\u{1b}[31m\u{202e}\n`w`";
    let both = file(vec![
        run(name, vec![case("one\u{1b}[31m", 1.0)]),
        run("B", vec![case("one\u{1b}[31m", 2.0)]),
    ]);
    let path = write(folder.path(), "both.json", &both);
    // What is refused is quoted.
    let bad = both.to_json().replace("\"measured\"", "\"\\u001b[2J\"");
    std::fs::write(folder.path().join("bad.json"), bad).unwrap();
    let bad = folder.path().join("bad.json").display().to_string();
    let output = program(&["compare", &path, &bad]);
    refused(&output, &["bad.json"]);
    assert!(!text(&output.stderr).contains('\u{1b}'));
    for format in ["table", "markdown", "csv", "json"] {
        let output = program(&["compare", "--format", format, &path]);
        let shown = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(
            !shown.contains(['\u{1b}', '\u{202e}']) || format == "json",
            "{format}: {shown}"
        );
        assert!(!shown.contains("\u{1b}"), "{format}: {shown}");
        let worse = program(&["compare", "--format", format, "--fail-above", "1.1", &path]);
        assert_eq!(worse.status.code(), Some(1));
        let errors = text(&worse.stderr);
        assert!(!errors.contains(['\u{1b}', '\u{202e}']), "{errors}");
        if format == "markdown" {
            assert!(shown.contains("X \\| &lt;b&gt;"), "{shown}");
        }
    }
}

/// The verdict itself, on a machine with slow minutes: samples lie up to a fifth above the fastest, one round in four is 1.4
/// times as slow, and the first sample of a round more.
#[test]
fn noise_is_called_noise_and_a_slower_kernel_slower() {
    let mut state = 1u64;
    let mut random = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    let mut measured = |seconds: f64| {
        let rounds = (0..3).map(|_| {
            let slow = if random() < 0.25 { 1.4 } else { 1.0 };
            (0..10)
                .map(|i| {
                    let first = if i == 0 { 1.3 } else { 1.0 };
                    seconds * slow * first * (1.0 + 0.2 * random() * random())
                })
                .collect()
        });
        Times::of(rounds.collect()).unwrap()
    };
    let mut verdict = |ratio: f64| {
        let (first, other) = (measured(1.0), measured(ratio));
        change_of(&first, &other, Clock::Wall, 0.0).verdict
    };
    let noise = (0..1000).filter(|_| verdict(1.0) == Verdict::Noise).count();
    assert!(noise >= 950, "{noise} of 1000");
    let slower = (0..1000)
        .filter(|_| verdict(1.5) == Verdict::Slower)
        .count();
    assert!(slower >= 900, "{slower} of 1000");
    let faster = (0..1000)
        .filter(|_| verdict(1.5) == Verdict::Faster)
        .count();
    assert_eq!(faster, 0);
}

/// The files that come with the repository, if it is the repository and not the package.
#[test]
fn the_files_in_results_can_be_read_and_compared() {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/results"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ending| ending == "json") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let file = ResultFile::load(&path).unwrap();
            assert!(file.complete && !file.runs.is_empty(), "{name}");
            files.push((name, file));
        }
    }
    assert!(files.len() >= 3, "{}", folder.display());
    let runs = labelled(&files);
    let comparison = Comparison::of(&runs).unwrap();
    assert!(comparison.cases.len() >= 8);
    for run in &runs {
        for case in run.run.cases.iter().filter_map(CaseResult::measured) {
            assert!(
                case.share_of_peak.is_none_or(|share| share <= 1.0),
                "{}",
                run.label
            );
        }
    }
}
