//! Reports as a browser shows them: nothing outside its chart, no text over another, no page that scrolls sideways.
//!
//! Needs Chromium; `CHROMIUM` may name one. Pages and screenshots stay in `target/tmp/report/`.
#![allow(clippy::unwrap_used, clippy::panic)] // A test may end so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use wgpu_attention::bench::{CASES, Work};
use wgpu_attention::results::{
    Adapter, CaseResult, Clock, Limits, MeasuredCase, MeasuredPeaks, Outcome, PeakForm, ResultFile,
    Run, Settings, Times,
};

// ---------------------------------------------------------------- runs, made up

/// An adapter: its name, backend, driver, and its peaks in GFLOP/s (f32, f16, matrices) and GB/s.
struct Made {
    name: &'static str,
    backend: &'static str,
    driver: &'static str,
    peaks: (f64, Option<f64>, Option<f64>, f64),
}

const fn made(
    name: &'static str,
    backend: &'static str,
    driver: &'static str,
    peaks: (f64, Option<f64>, Option<f64>, f64),
) -> Made {
    Made {
        name,
        backend,
        driver,
        peaks,
    }
}

const ADAPTERS: [Made; 8] = [
    made(
        "NVIDIA GeForce RTX 4090",
        "vulkan",
        "NVIDIA 570.86.16",
        (76_000.0, Some(79_000.0), Some(165_000.0), 930.0),
    ),
    made(
        "AMD Radeon RX 7900 XTX (RADV NAVI31)",
        "vulkan",
        "radv Mesa 25.0.2",
        (38_000.0, Some(71_000.0), Some(98_000.0), 870.0),
    ),
    made(
        "Intel(R) Arc(TM) A770 Graphics (DG2)",
        "vulkan",
        "Intel open-source Mesa driver Mesa 25.0.2",
        (15_000.0, Some(29_000.0), None, 470.0),
    ),
    made(
        "Apple M3 Max",
        "metal",
        "",
        (13_500.0, Some(13_800.0), None, 370.0),
    ),
    made(
        "llvmpipe (LLVM 15.0.6, 256 bits)",
        "vulkan",
        "llvmpipe Mesa 22.3.6 (LLVM 15.0.6)",
        (52.0, None, None, 9.5),
    ),
    made(
        "Qualcomm(R) Adreno(TM) X1-85 GPU",
        "dx12",
        "31.0.88.0",
        (3_800.0, Some(7_500.0), None, 120.0),
    ),
    made(
        "NVIDIA H200",
        "vulkan",
        "NVIDIA 580.12",
        (61_000.0, Some(120_000.0), Some(420_000.0), 4_300.0),
    ),
    made(
        "AMD Radeon 780M Graphics (RADV GFX1103_R1)",
        "vulkan",
        "radv Mesa 25.0.2",
        (7_900.0, Some(15_500.0), None, 85.0),
    ),
];

fn sizes(work: &Work) -> BTreeMap<String, u64> {
    let named: Vec<(&str, usize)> = match *work {
        Work::Attention {
            tokens,
            heads,
            kv_heads,
            head_dim,
            ..
        } => vec![
            ("q_len", tokens),
            ("kv_len", tokens),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ],
        Work::Decode {
            keys,
            heads,
            kv_heads,
            head_dim,
            ..
        } => vec![
            ("q_len", 1),
            ("kv_len", keys),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
        ],
        Work::Linear { rows, d_in, d_out } => {
            vec![("rows", rows), ("d_in", d_in), ("d_out", d_out)]
        }
        Work::Layer {
            batch,
            tokens,
            heads,
            ..
        } => vec![("batch", batch), ("q_len", tokens), ("heads", heads)],
    };
    let named = named
        .into_iter()
        .map(|(name, size)| (name.to_string(), size as u64));
    named.collect()
}

/// A case as an adapter of these peaks might do it.
fn case(work: &Work, peaks: &MeasuredPeaks, efficiency: f64, variant: Option<&str>) -> CaseResult {
    let (flops, bytes) = (work.flops(), work.bytes());
    let faster = if variant.is_some() { 2.2 } else { 1.0 };
    let compute = flops as f64 / (peaks.f32_flops_per_second * faster);
    let memory = bytes as f64 / peaks.bytes_per_second;
    let seconds = peaks.dispatch_s + (compute + memory) / efficiency;
    let times = Times::of(vec![vec![seconds * 0.98, seconds, seconds * 1.03]; 2]).unwrap();
    let kind = work.kind();
    CaseResult {
        name: work.name(),
        variant: variant.map(str::to_string),
        kind: kind.into(),
        element: work.element().to_string(),
        sizes: sizes(work),
        causal: matches!(kind, "attention" | "layer").then_some(true),
        flops,
        bytes,
        outcome: Outcome::Measured(Box::new(MeasuredCase {
            kernels: match kind {
                "layer" => vec!["linear_tiled".into(), "attention_tiled".into()],
                "decode" => vec!["decode_tiled".into(), "merge".into()],
                kind => vec![format!("{kind}_{}", variant.unwrap_or("tiled"))],
            },
            tier: variant.unwrap_or("plain").into(),
            operand_sets: 1,
            first_s: 0.2,
            checked: 4096,
            max_error: 3.1e-6,
            calls_per_sample: 12,
            clock: Clock::Gpu,
            no_gpu_time: None,
            wall: times.clone(),
            gpu: Some(times),
            flops_per_second: flops as f64 / seconds,
            bytes_per_second: bytes as f64 / seconds,
            bound: Some(if compute > memory { "f32" } else { "memory" }.into()),
            share_of_peak: Some(compute.max(memory) / seconds),
        })),
    }
}

/// A file of the whole table on an adapter.
fn file(number: usize) -> ResultFile {
    let made = &ADAPTERS[number];
    let software = made.peaks.0 < 1000.0;
    let settings = Settings {
        quick: false,
        cases: Vec::new(),
        shapes: Vec::new(),
        kernel: None,
        form: "auto".into(),
        tiers: "auto".into(),
        samples: 30,
        rounds: 3,
    };
    let mut file = ResultFile::new(format!("2026-11-{:02}T09:30:00Z", 20 + number), settings);
    file.complete = true;
    let (f32_peak, f16_peak, matrix_peak, memory) = made.peaks;
    let after = |bound: &str, rate: f64| PeakForm {
        bound: bound.into(),
        form: "peak".into(),
        rate_per_second: rate,
        wall: Times::of(vec![vec![1e-3]]).unwrap(),
        gpu: None,
    };
    let peaks = MeasuredPeaks {
        f32_flops_per_second: f32_peak * 1e9,
        f16_flops_per_second: f16_peak.map(|peak| peak * 1e9),
        matrix_flops_per_second: matrix_peak.map(|peak| peak * 1e9),
        bytes_per_second: memory * 1e9,
        dispatch_s: 2.4e-6,
        submission_s: 3.1e-5,
        buffer_bytes: 512 << 20,
        forms: Vec::new(),
        after: vec![
            after("f32", f32_peak * 0.988e9),
            after("memory", memory * 1.004e9),
        ],
    };
    let efficiency = |at: usize| 0.35 + 0.05 * ((at * 7 + number * 3) % 9) as f64;
    let measured = CASES.iter().enumerate();
    let measured = measured.filter(|(_, case)| case.software || !software);
    let mut cases: Vec<CaseResult> = measured
        .map(|(at, own)| case(&own.work, &peaks, efficiency(at), None))
        .collect();
    if let Some(last) = cases.last_mut().filter(|_| number == 2) {
        last.outcome = Outcome::Wrong {
            kernels: vec!["attention_tiled".into()],
            reason: "786,432 of 786,432 values compared, 12 wrong; the worst at (0, 17, 301): expected 0.25, got 0.75".into(),
        };
    }
    if number == 5 {
        cases[4].outcome = Outcome::Refused {
            reason: "the operands need 402653184 bytes, but max_buffer_size allows 268435456"
                .into(),
        };
        cases[5].outcome = Outcome::Failed {
            reason: "the GPU device was lost: a timeout; open it again".into(),
        };
    }
    let left_out = CASES.iter().filter(|case| software && !case.software);
    file.runs.push(Run {
        adapter: Adapter {
            name: made.name.into(),
            backend: made.backend.into(),
            device_type: if software { "Cpu" } else { "DiscreteGpu" }.into(),
            driver: made.driver.into(),
            driver_info: String::new(),
            vendor: 0x10de,
            device: 1,
            tiers: Vec::new(),
            limits: Limits {
                max_storage_buffer_binding_size: 1 << 31,
                max_buffer_size: 1 << 31,
                max_compute_workgroup_storage_size: 49152,
                max_compute_invocations_per_workgroup: 1024,
                max_compute_workgroups_per_dimension: 65535,
                max_storage_buffers_per_shader_stage: 16,
                min_subgroup_size: 32,
                max_subgroup_size: 32,
            },
        },
        peaks,
        tuned_problems: None,
        left_out: left_out.map(|case| case.work.name()).collect(),
        cases,
    });
    file
}

/// As much of a name as somebody could want to do harm with.
const HOSTILE: &str = "</text></svg><script>document.title='hurt'</script><img src=x onerror=alert(1)> \" ' & &lt; \u{202e}drowssap\u{0}\u{1b}[31m שלום 漢字漢字 a_name_that_has_no_end_and_no_place_to_break_it_anywhere_at_all_in_the_world_wide_web";

fn hostile() -> Vec<ResultFile> {
    let mut files = vec![file(0), file(1)];
    for file in &mut files {
        file.date = HOSTILE.into();
        file.version = HOSTILE.into();
        file.kernels = HOSTILE.into();
        file.system.os = HOSTILE.into();
        let run = &mut file.runs[0];
        run.adapter.name = format!("{HOSTILE} {}", run.adapter.name);
        run.adapter.driver = HOSTILE.repeat(5);
        run.adapter.device_type = HOSTILE.into();
        run.left_out.push(HOSTILE.into());
        for (at, case) in run.cases.iter_mut().enumerate() {
            if at % 3 == 0 {
                case.name = format!("{}-{HOSTILE}", case.name);
                case.variant = Some(HOSTILE.into());
            }
            if at % 5 == 0 {
                case.kind = HOSTILE.into();
            }
            if let Outcome::Measured(measured) = &mut case.outcome {
                measured.kernels.push(HOSTILE.into());
                measured.tier = HOSTILE.into();
                measured.no_gpu_time = Some(HOSTILE.into());
                measured.clock = Clock::Wall;
                if at % 4 == 0 {
                    measured.bound = Some(HOSTILE.into());
                }
            }
        }
        run.cases[1].outcome = Outcome::Failed {
            reason: format!("two\nlines of {HOSTILE}"),
        };
    }
    files
}

fn extreme() -> Vec<ResultFile> {
    let strange = [1e-300, 1e-30, 1e-9, 1.0, 1e9, 1e30, 1e300];
    let mut files = vec![file(0), file(1)];
    files[0].complete = false;
    for (number, file) in files.iter_mut().enumerate() {
        let run = &mut file.runs[0];
        run.peaks.f32_flops_per_second = strange[number * 3];
        run.peaks.f16_flops_per_second = Some(strange[6 - number]);
        run.peaks.matrix_flops_per_second = Some(strange[6 - number]);
        for (at, case) in run.cases.iter_mut().enumerate() {
            let value = |turn: usize| strange[(at * turn + number) % strange.len()];
            case.flops = [0, 1, u64::MAX][at % 3];
            for size in case.sizes.values_mut().filter(|_| at % 4 == 0) {
                *size = [0, 1, u64::MAX][at / 4 % 3];
            }
            if let Outcome::Measured(measured) = &mut case.outcome {
                let times = Times::of(vec![vec![value(1), value(2)]]).unwrap();
                measured.wall = times.clone();
                measured.gpu = Some(times);
                measured.flops_per_second = value(3);
                measured.bytes_per_second = value(4);
                measured.share_of_peak = (at % 5 != 0).then_some(value(5));
                measured.max_error = value(2);
            }
        }
    }
    files
}

/// One of everything that a page is made for.
fn all_pages() -> Vec<(&'static str, Vec<ResultFile>)> {
    let with_variants = |number: usize| {
        let mut file = file(number);
        let run = &mut file.runs[0];
        let attention = CASES.iter().filter(|case| case.work.kind() == "attention");
        let more = attention.map(|own| case(&own.work, &run.peaks, 0.6, Some("matrices")));
        let more: Vec<CaseResult> = more.collect();
        run.cases.extend(more);
        file
    };
    let mut unmeasured = file(4);
    unmeasured.complete = false;
    unmeasured.runs[0].cases.clear();
    let mut one_file = file(0);
    one_file
        .runs
        .extend([file(1), file(2)].map(|file| file.runs[0].clone()));
    let mut equal = vec![file(0), file(1)];
    for file in &mut equal {
        for case in &mut file.runs[0].cases {
            if let Outcome::Measured(measured) = &mut case.outcome {
                let times = Times::of(vec![vec![1e-3; 4]]).unwrap();
                measured.wall = times.clone();
                measured.gpu = Some(times);
                measured.flops_per_second = 1e12;
                measured.share_of_peak = None;
            }
        }
    }
    vec![
        ("one", vec![file(0)]),
        ("software", vec![file(4)]),
        ("three", vec![file(0), file(1), file(4)]),
        ("variants", vec![with_variants(0), with_variants(6)]),
        ("one-file", vec![one_file]),
        ("eight", (0..8).map(file).collect()),
        ("unmeasured", vec![unmeasured]),
        ("equal", equal),
        ("hostile", hostile()),
        ("hostile-one", hostile()[..1].to_vec()),
        ("extreme", extreme()),
        ("extreme-one", extreme()[1..].to_vec()),
    ]
}

// ---------------------------------------------------------------- the program

fn program(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wgpu-attention"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit status 2 and one line on standard error that holds all of `expected`.
fn refused(arguments: &[&str], expected: &[&str]) {
    let output = program(arguments);
    let error = words(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    for word in expected {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
}

/// Writes the files and their report into a folder of that name, and returns the page.
fn page(folder: &Path, name: &str, files: &[ResultFile]) -> String {
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let mut arguments = vec!["report".to_string()];
    for (number, file) in files.iter().enumerate() {
        let path = folder.join(format!("run-{number}.json"));
        file.save(&path, true).unwrap();
        arguments.push(path.display().to_string());
    }
    let page = folder.join("report.html");
    arguments.extend(["-o".into(), page.display().to_string(), "--force".into()]);
    arguments.extend(["--svg".into(), folder.join("svg").display().to_string()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = program(&arguments);
    assert_eq!(
        output.status.code(),
        Some(0),
        "{name}: {}",
        words(&output.stderr)
    );
    std::fs::read_to_string(page).unwrap()
}

#[test]
fn a_report_is_written_as_a_whole_or_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    file(0).save(path("a.json"), false).unwrap();
    let (results, page, charts) = (path("a.json"), path("page.html"), path("new/charts"));
    let output = program(&["report", &results, "-o", &page, "--svg", &charts]);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output.stderr));
    let written = std::fs::read_to_string(&page).unwrap();
    assert!(written.starts_with("<!DOCTYPE html>") && written.ends_with("</html>"));
    for name in ["roofline-1", "attention-1", "decode-1", "share-attention"] {
        let chart = std::fs::read_to_string(format!("{charts}/{name}.svg")).unwrap();
        assert!(
            chart.starts_with("<svg xmlns=") && chart.ends_with("</svg>"),
            "{name}"
        );
        assert!(chart.contains("prefers-color-scheme"), "{name}");
    }

    // What is there stays, and nothing is half done.
    std::fs::write(&page, "mine").unwrap();
    refused(
        &["report", &results, "-o", &page],
        &["page.html", "there already"],
    );
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "mine");
    let other = path("other.html");
    refused(
        &["report", &results, "-o", &other, "--svg", &charts],
        &["roofline-1.svg", "there already"],
    );
    assert!(!Path::new(&other).exists());
    let output = program(&["report", &results, "-o", &page, "--svg", &charts, "--force"]);
    assert_eq!(output.status.code(), Some(0), "{}", words(&output.stderr));
    assert_eq!(std::fs::read_to_string(&page).unwrap(), written);

    refused(
        &["report", &results, "-o", &results, "--force"],
        &["a.json", "another name"],
    );
    refused(
        &["report", &path("none.json"), "-o", &other],
        &["none.json"],
    );
    refused(&["report", &page, "-o", &other], &["page.html", "JSON"]);
    refused(
        &["report", &results, "-o", &path("no/folder/page.html")],
        &["no/folder"],
    );
    refused(
        &["report", &results, "-o", &other, "--svg", &results],
        &["a.json"],
    );
    assert!(!Path::new(&other).exists());
}

// ---------------------------------------------------------------- the browser

/// Chromium; without one a test must return, which is said loudly, and is a failure where `WGPU_ATTENTION_REQUIRE_GPU=1`.
fn chromium() -> Option<PathBuf> {
    let named = std::env::var_os("CHROMIUM").map(PathBuf::from);
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut found =
        std::env::split_paths(&paths).flat_map(|path| names.map(|name| path.join(name)));
    let found = named.or_else(|| found.find(|path| path.is_file()));
    if found.is_none() {
        let required = std::env::var("WGPU_ATTENTION_REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(
            !required,
            "WGPU_ATTENTION_REQUIRE_GPU=1, but there is no Chromium"
        );
        eprintln!("\n*** NOT TESTED IN A BROWSER: there is no Chromium ***\n");
    }
    found
}

/// One browser at a time: several take more memory than a small machine has.
static BROWSER: Mutex<()> = Mutex::new(());

/// Opens a file and returns what is on standard output. Fails on any word on the console.
fn browse(chromium: &Path, page: &Path, arguments: &[&str]) -> String {
    let _one = BROWSER
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--virtual-time-budget=20000",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let log = words(&output.stderr);
    assert!(output.status.success(), "{}: {log}", page.display());
    let console = log.lines().find(|line| line.contains("CONSOLE"));
    assert_eq!(console, None, "{}", page.display());
    words(&output.stdout)
}

/// What the measuring script finds wrong with a page at each width. The first is what it found at all.
fn problems(chromium: &Path, folder: &Path, name: &str, html: &str, widths: &[u32]) -> Vec<String> {
    let page = folder.join(format!("{name}-measured.html"));
    let attribute = html.replace('&', "&amp;").replace('"', "&quot;");
    let frames: String = widths
        .iter()
        .map(|width| format!("<iframe width={width} height=900 style=\"border:0\" srcdoc=\"{attribute}\"></iframe>\n"))
        .collect();
    let script = include_str!("report/measure.js");
    std::fs::write(
        &page,
        format!(
            "<!DOCTYPE html><meta charset=utf-8><body>{frames}<script>{script}</script></body>"
        ),
    )
    .unwrap();
    let shown = browse(chromium, &page, &["--window-size=1600,1000", "--dump-dom"]);
    let begin = shown
        .find("[[[")
        .unwrap_or_else(|| panic!("{name}: not measured: {shown}"))
        + 3;
    let end = shown[begin..].find("]]]").unwrap() + begin;
    let found = shown[begin..end].split('|').filter(|line| !line.is_empty());
    found.map(decoded).collect()
}

/// What JavaScript's `encodeURIComponent` made of a text.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next().unwrap(), rest.next().unwrap()];
        let digits = std::str::from_utf8(&digits).unwrap().to_string();
        bytes.push(u8::from_str_radix(&digits, 16).unwrap());
    }
    words(&bytes)
}

fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn nothing_is_outside_its_chart_at_any_width() {
    let Some(chromium) = chromium() else { return };
    let folder = folder();
    let mut wrong = Vec::new();
    for (name, files) in all_pages() {
        let html = page(&folder, name, &files);
        let own = html.replace("http://www.w3.org/2000/svg", "");
        for outside in [
            "http:", "https:", "url(", "@import", "<script", "<img", "<link", "<iframe",
        ] {
            assert!(!own.contains(outside), "{name}: {outside}");
        }
        let found = problems(&chromium, &folder, name, &html, &[320, 360, 700, 900, 1400]);
        println!("{name}: {}", found[0]);
        wrong.extend(found[1..].iter().map(|problem| format!("{name} {problem}")));
        let charts = match name {
            "unmeasured" => "1 charts",
            "one" => "7 charts",
            _ => " charts",
        };
        assert!(found[0].contains(charts), "{name}: {}", found[0]);
        for (width, scheme) in [(360, 1), (1400, 0)] {
            let shot = folder.join(format!("{name}-{width}-{}.png", ["dark", "light"][scheme]));
            let _ = std::fs::remove_file(&shot);
            let frame = folder.join(name).join(format!("{width}.html"));
            let begin = format!(
                "<!DOCTYPE html><meta charset=utf-8><body style=\"margin:0\"><iframe width={width} height=3400 style=\"border:0\" src=\"report.html\"></iframe>"
            );
            std::fs::write(&frame, begin).unwrap();
            browse(
                &chromium,
                &frame,
                &[
                    &format!("--window-size={},3400", width.max(500)),
                    &format!("--blink-settings=preferredColorScheme={scheme}"),
                    &format!("--screenshot={}", shot.display()),
                ],
            );
            let png = std::fs::read(&shot).unwrap();
            assert!(
                png.starts_with(b"\x89PNG") && png.len() > 10_000,
                "{}",
                shot.display()
            );
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn charts_that_stand_alone_are_sound() {
    let Some(chromium) = chromium() else { return };
    let folder = folder();
    page(&folder, "alone", &hostile());
    for entry in std::fs::read_dir(folder.join("alone/svg")).unwrap() {
        let chart = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        // As XML, which forgives nothing: an error shows as an element of that name.
        let name = "alone-chart.html";
        let frame = folder.join(name);
        let escaped = chart.replace('&', "&amp;").replace('<', "&lt;");
        std::fs::write(
            &frame,
            format!(
                "<!DOCTYPE html><meta charset=utf-8><textarea>{escaped}</textarea><p id=p></p><script>\
                 const parsed = new DOMParser().parseFromString(document.querySelector('textarea').value, 'image/svg+xml');\
                 document.body.innerHTML = '<p>root ' + parsed.documentElement.nodeName + ' errors ' + \
                 parsed.querySelectorAll('parsererror, script').length + '</p>';</script>"
            ),
        )
        .unwrap();
        let shown = browse(&chromium, &frame, &["--dump-dom"]);
        assert!(shown.contains("root svg errors 0"), "{shown}");
    }
}

/// The measuring script must notice what it is there for.
#[test]
fn the_measuring_script_can_fail() {
    let Some(chromium) = chromium() else { return };
    let folder = folder();
    let chart = |inside: &str| {
        format!(
            "<!DOCTYPE html><body style=\"margin:0\"><svg role=img aria-label=x width=300 height=100 viewBox=\"0 0 300 100\" style=\"display:block;overflow:visible\">\
             <polyline stroke=\"#57606A\" points=\"20,80 280,80\" fill=none /><text x=20 y=95 font-size=12>10</text>\
             <text x=200 y=95 font-size=12>20</text><circle cx=50 cy=50 r=4 fill=\"#0072B2\" />{inside}</svg>"
        )
    };
    let found = |name: &str, html: &str| {
        let found = problems(&chromium, &folder, &format!("broken-{name}"), html, &[360]);
        found[1..].join("; ")
    };
    assert_eq!(found("sound", &chart("")), "");
    let outside = chart("<text x=280 y=50 font-size=12>outside the frame</text>");
    assert!(
        found("text", &outside).contains("outside"),
        "{}",
        found("text", &outside)
    );
    let mark = chart("<circle cx=299 cy=50 r=8 fill=\"#0072B2\" />");
    assert!(found("mark", &mark).contains("outside"));
    let over = chart("<text x=22 y=95 font-size=12>over it</text>");
    assert!(found("over", &over).contains("overlap"));
    let small = chart("<text x=100 y=30 font-size=7>small</text>");
    assert!(found("small", &small).contains("small"));
    let empty = chart("").replace("circle", "g");
    assert!(found("empty", &empty).contains("marks"));
    let axes = chart("").replace("polyline", "g");
    assert!(found("axes", &axes).contains("axes"));
    let wide = format!("{}<div style=\"width:500px\">wide</div>", chart(""));
    assert!(found("wide", &wide).contains("sideways"));
    let colour = chart("<text x=100 y=30 font-size=12 fill=\"#123456\">own colour</text>");
    assert!(found("colour", &colour).contains("colour"));
}
