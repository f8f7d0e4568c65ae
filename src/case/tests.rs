//! Cases, where they lie, and their tolerances.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

use super::*;
use crate::compare::Tolerance;
use crate::tensor_file::tests::{f32s, file, problem};

/// The words that make a file of tensors into a case.
const CASE: &[(&str, &str)] = &[
    ("format_version", "1"),
    ("kind", "module_fused"),
    ("name", "tiny"),
    ("group", "fused"),
    ("inputs", "x"),
    ("outputs", "y"),
    ("note", "made up"),
    ("attr.causal", "true"),
    ("attr.scale", "-0.125"),
    ("attr.T", "6"),
    ("attr.window_left", "-1"),
    ("attr.lens", "[3, 5]"),
    ("attr.tags", "exact"),
    ("attr.infinite", "inf"),
];

/// `CASE` with some values replaced or added.
fn words<'a>(changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut words = CASE.to_vec();
    for (key, value) in changes {
        words.retain(|(k, _)| k != key);
        words.push((key, value));
    }
    words
}

/// Input x = [1.5, -2], output y = [3, 0.5], both f32.
fn case_bytes(words: &[(&str, &str)]) -> Vec<u8> {
    let x = ("x", "F32", &[2][..], f32s(&[1.5, -2.0]));
    let y = ("y", "F32", &[2][..], f32s(&[3.0, 0.5]));
    file(words, &[x, y])
}

fn case(changes: &[(&str, &str)]) -> Case {
    Case::parse(case_bytes(&words(changes)), "tiny").unwrap()
}

#[test]
fn a_case_is_read() {
    let case = case(&[]);
    assert_eq!(
        (&*case.kind, &*case.name, &*case.group),
        ("module_fused", "tiny", "fused")
    );
    assert_eq!(case.metadata.get("note").unwrap(), "made up");
    assert!(!case.metadata.contains_key("attr.T"));
    assert_eq!(case.input("x").unwrap().values, [1.5, -2.0]);
    assert_eq!(case.input("x").unwrap().to_f32(), [1.5, -2.0]);
    assert_eq!(case.output("y").unwrap().shape, [2]);
    assert!(case.input_opt("y").is_none());
    let said = problem(case.input("k").cloned());
    assert!(said.contains("`k`") && said.contains("[x]"), "{said}");
    let said = problem(case.output("x").cloned());
    assert!(said.contains("`x`") && said.contains("[y]"), "{said}");
    assert_eq!(case.precision().unwrap(), ElementKind::F32);
}

#[test]
fn attributes_are_typed() {
    let case = case(&[]);
    assert!(case.attr_bool("causal").unwrap());
    assert_eq!(case.attr_f64("scale").unwrap(), -0.125);
    assert_eq!(case.attr_usize("T").unwrap(), 6);
    assert_eq!(case.attr_i64("window_left").unwrap(), -1);
    assert_eq!(case.attr_str("tags").unwrap(), "exact");
    assert_eq!(case.attr_json("lens").unwrap(), serde_json::json!([3, 5]));
    for said in [
        problem(case.attr_bool("T")),
        problem(case.attr_f64("tags")),
        problem(case.attr_f64("infinite")),
        problem(case.attr_usize("window_left")),
        problem(case.attr_usize("scale")),
        problem(case.attr_i64("scale")),
        problem(case.attr_json("tags")),
    ] {
        assert!(
            said.starts_with("attribute `") && said.contains("expected") && said.contains("got"),
            "{said}"
        );
    }
    assert_eq!(
        problem(case.attr_usize("heads")),
        "attribute `heads`: expected a whole number of 0 or more, got none"
    );
    assert_eq!(
        problem(case.attr_usize("scale")),
        "attribute `scale`: expected a whole number of 0 or more, got \"-0.125\""
    );
}

#[test]
fn precision_is_the_attribute_or_the_inputs() {
    let with_dtype = |dtype| case(&[("attr.dtype", dtype)]).precision();
    assert_eq!(with_dtype("f64").unwrap(), ElementKind::F64);
    assert_eq!(with_dtype("bf16").unwrap(), ElementKind::BF16);
    assert!(problem(with_dtype("i32")).contains("dtype"));
    let mask = ("x", "BOOL", &[2][..], vec![0, 1]);
    let y = ("y", "F32", &[1][..], f32s(&[0.0]));
    let bytes = file(CASE, &[mask.clone(), y.clone()]);
    assert!(problem(Case::parse(bytes, "masks").unwrap().precision()).contains("dtype"));
    let q = ("q", "F16", &[1][..], vec![0, 0x3c]);
    let bytes = file(&words(&[("inputs", "x,q")]), &[mask, q, y]);
    let case = Case::parse(bytes, "half").unwrap();
    assert_eq!(case.precision().unwrap(), ElementKind::F16);
}

#[test]
fn files_that_are_no_cases_are_refused() {
    let without = |key: &str| {
        let mut words = CASE.to_vec();
        words.retain(|(k, _)| *k != key);
        case_bytes(&words)
    };
    let with = |key, value| case_bytes(&words(&[(key, value)]));
    let cases: &[(&str, Vec<u8>)] = &[
        ("`kind`", without("kind")),
        ("`name`", without("name")),
        ("`inputs`", without("inputs")),
        ("`outputs`", without("outputs")),
        ("`format_version`", without("format_version")),
        ("format_version 1", with("format_version", "2")),
        (
            "\"z\", which the file does not hold",
            with("outputs", "y,z"),
        ),
        ("\"x\" twice", with("inputs", "x,x")),
        ("\"x\" twice", with("outputs", "y,x")),
        ("\"\"", with("inputs", "x,")),
        ("nothing could be compared", with("outputs", "")),
        ("lists tensor \"x\"", with("inputs", "")),
    ];
    for (expected, bytes) in cases {
        let said = problem(Case::parse(bytes.clone(), "none"));
        assert!(said.contains(expected), "expected {expected}, got {said}");
    }
}

#[test]
fn inputs_come_from_the_twin() {
    let folder = tempfile::tempdir().unwrap();
    let twin = folder.path().join("tiny.f32.safetensors");
    let path = folder.path().join("tiny.f64.safetensors");
    let words64 = words(&[
        ("inputs", ""),
        ("attr.dtype", "f64"),
        ("attr.results_only", "true"),
    ]);
    let y = ("y", "F64", &[1][..], 2.5_f64.to_le_bytes().to_vec());
    fs::write(&path, file(&words64, &[y])).unwrap();

    let alone = Case::open(&path).unwrap();
    assert!(alone.inputs.is_empty() && alone.is_results_only().unwrap());
    assert!(problem(Case::load(&path)).contains("tiny.f32.safetensors, which is not there"));

    fs::write(&twin, case_bytes(&words(&[("attr.dtype", "f32")]))).unwrap();
    let case = Case::load(&path).unwrap();
    assert_eq!(case.input("x").unwrap().values, [1.5, -2.0]);
    assert_eq!(case.output("y").unwrap().values, [2.5]);
    assert_eq!(case.precision().unwrap(), ElementKind::F64);
    // A case with inputs of its own keeps them.
    assert_eq!(Case::load(&twin).unwrap().inputs.len(), 1);

    for changes in [("attr.T", "7"), ("name", "other"), ("kind", "sdpa")] {
        fs::write(&twin, case_bytes(&words(&[changes]))).unwrap();
        assert!(problem(Case::load(&path)).contains("another case"));
    }
    fs::write(&twin, b"").unwrap();
    problem(Case::load(&path));

    let misnamed = folder.path().join("tiny.safetensors");
    fs::rename(&path, &misnamed).unwrap();
    assert!(problem(Case::load(&misnamed)).contains("*.f64.safetensors"));
    let own = case_bytes(&words(&[("attr.results_only", "true")]));
    let own = Case::parse(own, "tiny.f64.safetensors").unwrap();
    assert!(problem(own.with_twin_inputs()).contains("input \"x\""));
    let vague = case_bytes(&words(&[("attr.results_only", "maybe")]));
    problem(Case::parse(vague, "tiny").unwrap().with_twin_inputs());
}

#[test]
fn tolerances_are_stored_or_default() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("a/b");
    fs::create_dir_all(&inner).unwrap();
    let path = inner.join("tiny.safetensors");
    fs::write(&path, case_bytes(CASE)).unwrap();
    let case = Case::open(&path).unwrap();
    let of = |case: &Case| Tolerances::new().of(case, "y");
    let stored = (Tolerance::new(2e-5, 1e-3), ToleranceOrigin::Stored);
    let default = (Tolerance::F32, ToleranceOrigin::Default);
    assert_eq!(of(&case).unwrap(), default);
    assert!(problem(Tolerances::new().of(&case, "z")).contains("`z`"));

    // Another program's manifest is passed over; the one above it counts, under whatever folder it lists the file.
    let manifest = r#"{"cases": [{"file": "public/k/tiny.safetensors", "outputs": {"y": {"atol": 2e-5, "rtol": 1e-3}}}]}"#;
    fs::write(inner.join("manifest.json"), r#"{"name": "app"}"#).unwrap();
    fs::write(folder.path().join("manifest.json"), manifest).unwrap();
    assert_eq!(of(&case).unwrap(), stored);
    let mut kept = Tolerances::new();
    assert_eq!(kept.of(&case, "y").unwrap(), stored);
    fs::remove_file(folder.path().join("manifest.json")).unwrap();
    assert_eq!(kept.of(&case, "y").unwrap(), stored);

    // Listed, but without a tolerance.
    let bare = r#"{"cases": [{"file": "tiny.safetensors", "outputs": {"y": {}}}]}"#;
    fs::write(inner.join("manifest.json"), bare).unwrap();
    assert_eq!(of(&case).unwrap(), default);

    // One part of it alone.
    let part = r#"{"cases": [{"file": "tiny.safetensors", "outputs": {"y": {"rtol": 0.5}}}]}"#;
    fs::write(inner.join("manifest.json"), part).unwrap();
    let relative = Tolerance::new(0.0, 0.5);
    assert_eq!(of(&case).unwrap(), (relative, ToleranceOrigin::Stored));

    let mut bundled = Tolerances::with_manifest(manifest, "bundled").unwrap();
    let origin = "no such folder/tiny.safetensors";
    let in_memory = Case::parse(case_bytes(CASE), origin).unwrap();
    assert_eq!(bundled.of(&in_memory, "y").unwrap(), stored);

    for unsound in [
        "{",
        r#"{"cases": [3]}"#,
        r#"{"cases": [{"file": "tiny.safetensors"}]}"#,
        r#"{"cases": [{"file": 3, "outputs": {}}]}"#,
        r#"{"cases": [{"file": "t", "outputs": {"y": {"atol": "1e-5"}}}]}"#,
        r#"{"cases": [{"file": "t", "outputs": {"y": {"atol": -1}}}]}"#,
        r#"{"cases": [{"file": "a/t", "outputs": {}}, {"file": "b/t", "outputs": {}}]}"#,
    ] {
        fs::write(inner.join("manifest.json"), unsound).unwrap();
        problem(of(&case));
        problem(Tolerances::with_manifest(unsound, "bundled"));
    }
    problem(Tolerances::with_manifest("{}", "bundled"));
}

#[test]
fn f64_cases_are_held_to_their_largest_value() {
    let bytes = [-4.0_f64, 0.5, f64::NEG_INFINITY].map(f64::to_le_bytes);
    let x = ("x", "F64", &[1][..], 1_f64.to_le_bytes().to_vec());
    let y = ("y", "F64", &[3][..], bytes.concat());
    let case = Case::parse(file(CASE, &[x, y]), "no such folder/f64").unwrap();
    let found = Tolerances::new().of(&case, "y").unwrap();
    let expected = Tolerance::new(4e-12, 0.0);
    assert_eq!(found, (expected, ToleranceOrigin::Default));
}

#[test]
fn cases_are_found_once_and_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::create_dir_all(root.join("b/d.safetensors")).unwrap();
    for name in [
        "b/2.safetensors",
        "b/d.safetensors/3.safetensors",
        "1.safetensors",
        "note.txt",
        ".4.safetensors.0.tmp",
    ] {
        fs::write(root.join(name), b"").unwrap();
    }
    let expected = [
        "1.safetensors",
        "b/2.safetensors",
        "b/d.safetensors/3.safetensors",
    ];
    let expected: Vec<_> = expected.iter().map(|name| root.join(name)).collect();
    let all = [
        root.to_path_buf(),
        root.join("b"),
        root.join("1.safetensors"),
    ];
    assert_eq!(find_cases(&all).unwrap(), expected);
    let given = [root.join("note.txt")];
    assert_eq!(find_cases(&given).unwrap(), given);
    assert_eq!(find_cases(&[]).unwrap(), [] as [PathBuf; 0]);
    let missing = find_cases(&[root.join("nowhere")]);
    assert!(matches!(missing, Err(Error::Io { path, .. }) if path.contains("nowhere")));
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        symlink(root, root.join("b/loop")).unwrap();
        symlink("self", root.join("self")).unwrap();
        assert_eq!(find_cases(&all).unwrap(), expected);
        symlink("nowhere", root.join("b/dangling.safetensors")).unwrap();
        let dangling = find_cases(&all);
        assert!(matches!(dangling, Err(Error::Io { path, .. }) if path.contains("dangling")));
    }
}
