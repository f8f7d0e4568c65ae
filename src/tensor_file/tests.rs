//! What is read and written, and what is refused. The helpers make files for other tests too.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on fails"
)]

use std::collections::HashMap;
use std::fmt;

use super::*;

/// f32 elements as they lie in a file.
pub(crate) fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A file around `header`.
fn raw(header: &[u8], data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length, header, data].concat()
}

/// A file of tensors (name, type, shape, bytes) that lie one behind the other.
pub(crate) fn file(words: &[(&str, &str)], tensors: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let words: HashMap<_, _> = words.iter().copied().collect();
    header.insert("__metadata__".into(), serde_json::json!(words));
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let info = serde_json::json!({
            "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()],
        });
        header.insert(name.to_string(), info);
    }
    raw(&serde_json::to_vec(&header).unwrap(), &data)
}

/// A file of two tensors and a word.
fn sound() -> Vec<u8> {
    let x = ("x", "F32", &[2][..], f32s(&[1.5, -2.0]));
    let y = ("y", "F32", &[2][..], f32s(&[3.0, 0.5]));
    file(&[("note", "made up")], &[x, y])
}

/// The problem of an `Error::Format`.
pub(crate) fn problem<T: fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Format { path, problem }) => {
            assert!(!path.is_empty());
            problem
        }
        other => panic!("expected Error::Format, got {other:?}"),
    }
}

#[test]
fn every_element_type_is_read_exactly() {
    let tensors: &[(&str, &str, &[usize], Vec<u8>)] = &[
        ("f64", "F64", &[1], 1e-300_f64.to_le_bytes().to_vec()),
        (
            "i64",
            "I64",
            &[2],
            [i64::MIN, -1].map(i64::to_le_bytes).concat(),
        ),
        ("u64", "U64", &[1], (1_u64 << 53).to_le_bytes().to_vec()),
        ("f32", "F32", &[1, 2], f32s(&[f32::MIN, f32::NEG_INFINITY])),
        ("i32", "I32", &[], (-7_i32).to_le_bytes().to_vec()),
        ("u32", "U32", &[1], u32::MAX.to_le_bytes().to_vec()),
        ("f16", "F16", &[2], vec![0x01, 0x00, 0x00, 0xfc]),
        ("bf16", "BF16", &[1], vec![0x80, 0x3f]),
        ("i16", "I16", &[1], (-300_i16).to_le_bytes().to_vec()),
        ("u16", "U16", &[1], 65535_u16.to_le_bytes().to_vec()),
        ("i8", "I8", &[1], vec![0x80]),
        ("u8", "U8", &[2], vec![255, 0]),
        ("bool", "BOOL", &[3], vec![0, 1, 2]),
        ("empty", "F32", &[0, 5], vec![]),
    ];
    let tensor = TensorFile::parse(file(&[], tensors), "kinds").unwrap();
    let get = |name| tensor.get(name).unwrap().unwrap();
    let values = |name| get(name).values;
    assert_eq!(values("f64"), [1e-300]);
    assert_eq!(values("i64"), [-9_223_372_036_854_775_808.0, -1.0]);
    assert_eq!(values("u64"), [9_007_199_254_740_992.0]);
    assert_eq!(values("f32"), [f32::MIN.into(), f64::NEG_INFINITY]);
    assert_eq!(values("i32"), [-7.0]);
    assert_eq!(values("u32"), [4_294_967_295.0]);
    assert_eq!(values("f16"), [2_f64.powi(-24), f64::NEG_INFINITY]);
    assert_eq!(values("bf16"), [1.0]);
    assert_eq!(values("i16"), [-300.0]);
    assert_eq!(values("u16"), [65535.0]);
    assert_eq!(values("i8"), [-128.0]);
    assert_eq!(values("bool"), [0.0, 1.0, 1.0]);
    assert!(values("empty").is_empty());
    assert_eq!(tensor.shape("f32").unwrap(), [1, 2]);
    assert_eq!(tensor.names().count(), tensors.len());
    assert!(tensor.get("absent").unwrap().is_none());
    assert!(tensor.shape("absent").is_none());
    assert_eq!(get("bool").to_bool().unwrap(), [false, true, true]);
    assert_eq!(get("u8").to_bool().unwrap(), [true, false]);
    assert_eq!(get("u32").to_usize().unwrap(), [4_294_967_295]);
    assert!(matches!(get("f32").to_bool(), Err(Error::Type { argument, .. }) if argument == "f32"));
    assert!(matches!(get("f16").to_usize(), Err(Error::Type { .. })));
    assert!(matches!(get("i32").to_usize(), Err(Error::Shape { .. })));
}

#[test]
fn elements_that_cannot_be_exact_are_refused() {
    for (dtype, bytes) in [
        ("I64", ((1_i64 << 53) + 1).to_le_bytes()),
        ("I64", i64::MAX.to_le_bytes()),
        ("U64", ((1_u64 << 53) + 1).to_le_bytes()),
        ("U64", u64::MAX.to_le_bytes()),
    ] {
        let bytes = file(&[], &[("n", dtype, &[1], bytes.to_vec())]);
        let tensor = TensorFile::parse(bytes, "large").unwrap();
        assert!(problem(tensor.get("n")).contains("53 bits"), "{dtype}");
    }
    let bytes = file(&[], &[("n", "F8_E4M3", &[1], vec![0])]);
    let tensor = TensorFile::parse(bytes, "narrow").unwrap();
    assert!(matches!(tensor.get("n"), Err(Error::Unsupported { .. })));
}

#[test]
fn unsound_files_are_refused() {
    let sound = sound();
    let mut longer = sound.clone();
    longer.push(0);
    // The header `{}`, whose length field says something else.
    let longer_header = |length: u64| [&length.to_le_bytes(), &b"{}"[..]].concat();
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        let header =
            format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
        raw(header.as_bytes(), &[0; 8])
    };
    let two = |second: &str| {
        let header = format!(
            r#"{{"a":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},"b":{{"dtype":"F32","shape":[1],"data_offsets":{second}}}}}"#
        );
        raw(header.as_bytes(), &[0; 8])
    };
    let files: &[(&str, Vec<u8>)] = &[
        ("empty", vec![]),
        ("seven bytes", vec![0; 7]),
        ("no header", 0_u64.to_le_bytes().to_vec()),
        ("a header of u64::MAX", [[0xff; 8], *b"{\"x\": 1}"].concat()),
        ("a header of 99 MB", longer_header(99_000_000)),
        ("a header past the end", longer_header(3)),
        ("truncated by one", sound[..sound.len() - 1].to_vec()),
        ("truncated in its header", sound[..40].to_vec()),
        ("one byte too many", longer),
        ("no JSON", raw(b"{{{{", b"")),
        ("deep JSON", raw("[".repeat(100_000).as_bytes(), b"")),
        ("not UTF-8", raw(b"{\"\xff\xfe\": 1}", b"")),
        ("a list", raw(b"[1, 2]", b"")),
        (
            "metadata that is no map",
            raw(br#"{"__metadata__": 3}"#, b""),
        ),
        (
            "metadata of numbers",
            raw(br#"{"__metadata__": {"a": 3}}"#, b""),
        ),
        ("an unknown type", tensor("F31", "[2]", "[0,8]")),
        ("offsets out of range", tensor("F32", "[4]", "[0,16]")),
        ("offsets backwards", tensor("F32", "[2]", "[8,0]")),
        ("offsets that start late", tensor("F32", "[1]", "[4,8]")),
        ("offsets that are negative", tensor("F32", "[2]", "[-8,0]")),
        ("a shape of fewer bytes", tensor("F32", "[3]", "[0,8]")),
        (
            "a shape that overflows",
            tensor("F32", "[4294967296,4294967296,4]", "[0,8]"),
        ),
        (
            "a size that overflows",
            tensor("F64", "[4611686018427387904]", "[0,8]"),
        ),
        (
            "a shape hidden by 0",
            tensor("F32", "[0,4294967296,4294967296]", "[0,0]"),
        ),
        (
            "an axis past u64",
            tensor("F32", "[99999999999999999999]", "[0,8]"),
        ),
        ("tensors that overlap", two("[0,4]")),
        ("tensors that overlap in part", two("[2,6]")),
        ("bytes of no tensor", two("[0,8]")),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (what, bytes) in files {
        let path = folder.path().join("x.safetensors");
        fs::write(&path, bytes).unwrap();
        for opened in [
            TensorFile::open(&path),
            TensorFile::parse(bytes.clone(), *what),
        ] {
            assert!(
                matches!(opened, Err(Error::Format { .. })),
                "{what}: {opened:?}"
            );
        }
    }
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let bytes = sound();
    for length in 0..bytes.len() {
        let cut = TensorFile::parse(bytes[..length].to_vec(), "cut");
        assert!(matches!(cut, Err(Error::Format { .. })), "{length}");
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let opened = TensorFile::open(&path);
    assert!(matches!(opened, Err(Error::Io { path: p, .. }) if p.contains("x.safetensors")));
    fs::create_dir(&path).unwrap();
    assert!(problem(TensorFile::open(&path)).contains("a folder"));
}

#[test]
fn written_tensors_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    let tensors: &[(&str, &[usize], &[f32])] = &[
        ("b", &[2, 1], &[1.0, f32::MIN_POSITIVE]),
        ("a", &[], &[-0.0]),
        ("empty", &[0, 3], &[]),
    ];
    fs::write(&path, b"what was there").unwrap();
    write_tensors(&path, tensors).unwrap();
    let back = TensorFile::open(&path).unwrap();
    assert_eq!(back.names().collect::<Vec<_>>(), ["a", "b", "empty"]);
    for (name, shape, values) in tensors {
        let tensor = back.get(name).unwrap().unwrap();
        assert_eq!((&*tensor.shape, tensor.dtype), (*shape, ElementKind::F32));
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&tensor.to_f32()), bits(values));
    }
    // More than one chunk, read back while the file is open.
    let many: Vec<f32> = (0..CHUNK_BYTES / 4 + 3).map(|i| i as f32).collect();
    write_tensors(&path, &[("many", &[many.len()], &many)]).unwrap();
    let tensor = TensorFile::open(&path).unwrap().get("many").unwrap();
    assert_eq!(tensor.unwrap().to_f32(), many);
    assert!(back.get("a").unwrap().unwrap().shape.is_empty());
    write_tensors(&path, &[]).unwrap();
    assert_eq!(TensorFile::open(&path).unwrap().names().count(), 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_failed_write_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w.safetensors");
    fs::write(&path, b"what was there").unwrap();
    let wrong = write_tensors(&path, &[("a", &[3], &[1.0])]);
    assert!(matches!(wrong, Err(Error::Shape { argument, .. }) if argument == "a"));
    let wrong = write_tensors(&path, &[("a", &[usize::MAX, 2], &[1.0])]);
    assert!(matches!(wrong, Err(Error::Shape { .. })));
    let wrong = write_tensors(&path, &[("a", &[0, usize::MAX], &[])]);
    assert!(matches!(wrong, Err(Error::Shape { .. })));
    let twice = write_tensors(&path, &[("a", &[1], &[1.0]), ("a", &[1], &[2.0])]);
    assert!(matches!(twice, Err(Error::Parameter { .. })));
    let reserved = write_tensors(&path, &[("__metadata__", &[1], &[1.0])]);
    assert!(matches!(reserved, Err(Error::Parameter { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"what was there");

    // A folder in the place of the file: the rename fails, and the temporary file goes.
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("inside"), b"").unwrap();
    let failed = write_tensors(&taken, &[("a", &[1], &[1.0])]);
    assert!(matches!(failed, Err(Error::Io { path, .. }) if path.ends_with("taken")));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);

    let nowhere = write_tensors(folder.path().join("no/w"), &[("a", &[1], &[1.0])]);
    assert!(matches!(nowhere, Err(Error::Io { .. })));
    assert!(matches!(write_tensors("..", &[]), Err(Error::Io { .. })));
}

/// A link is followed, permissions stay, and what is no file is left alone.
#[cfg(unix)]
#[test]
fn only_files_are_replaced() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path().to_path_buf();
    let (file, link) = (folder.join("file"), folder.join("link"));
    fs::write(&file, b"old").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&file, &link).unwrap();
    write_tensors(&link, &[("a", &[1], &[1.0])]).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert_eq!(TensorFile::open(&file).unwrap().names().count(), 1);

    let pipe = folder.join("pipe");
    let made = std::process::Command::new("mkfifo")
        .arg(&pipe)
        .status()
        .unwrap();
    assert!(made.success());
    for path in [&pipe, &folder] {
        let error = write_tensors(path, &[("a", &[1], &[1.0])]).unwrap_err();
        assert!(error.to_string().contains("not a file"), "{error}");
    }
    assert!(!fs::metadata(&pipe).unwrap().is_file());
}
