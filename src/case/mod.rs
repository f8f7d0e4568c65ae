//! Golden cases: problems that somebody else's code has solved.
//!
//! A *case* is one safetensors file with inputs, expected outputs and the attributes of the problem;
//! `tests/cases/README.md` describes the format.
//!
//! - [`Case`]: a [`TensorFile`] whose header says what it checks. [`find_cases`] finds them.
//! - [`check`](mod@check): runs one and compares what comes out.
//! - [`Tolerances`]: how far from the expected values a result may lie.
//!
//! As with every [`tensor_file`](crate::tensor_file), the bytes are somebody else's: whatever they hold,
//! an [`Error`] comes back.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::replace_file::io_error;
use crate::tensor_file::{ElementKind, FileTensor, TensorFile, format_error};

#[cfg(not(target_family = "wasm"))]
mod attention;
#[cfg(not(target_family = "wasm"))]
pub mod check;
#[cfg(not(target_family = "wasm"))]
mod host;
#[cfg(not(target_family = "wasm"))]
mod kind;
#[cfg(not(target_family = "wasm"))]
mod layer;
#[cfg(not(target_family = "wasm"))]
mod onnx;
#[cfg(not(target_family = "wasm"))]
mod ort;
mod tolerances;
pub use tolerances::{ToleranceOrigin, Tolerances};

#[cfg(test)]
mod tests;

/// A golden case: a problem, its inputs, and what somebody else's code found the outputs to be.
#[derive(Clone, Debug)]
pub struct Case {
    /// The file it came from.
    pub file: PathBuf,
    /// What is computed: `module_fused`, `bert`, `sdpa`, ...
    pub kind: String,
    /// The name within its kind.
    pub name: String,
    /// The family it belongs to; empty where the file names none.
    pub group: String,
    /// The attributes of the problem, as written, without the `attr.` in front; see [`attr_bool`](Self::attr_bool) and its siblings.
    pub attributes: BTreeMap<String, String>,
    /// Whatever else the header says in words: `conventions`, `source`, `license`, `note`.
    pub metadata: BTreeMap<String, String>,
    /// What goes in, in the order the file lists it.
    pub inputs: Vec<FileTensor>,
    /// What is expected, in the order the file lists it; at least one.
    pub outputs: Vec<FileTensor>,
}

impl Case {
    /// Reads a case as it lies in the file: one of results only has no inputs, see [`with_twin_inputs`](Self::with_twin_inputs).
    ///
    /// # Errors
    /// Those of [`TensorFile::open`] and [`TensorFile::get`]; [`Error::Format`] where it is no case file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_tensors(&TensorFile::open(path)?)
    }

    /// [`open`](Self::open) and [`with_twin_inputs`](Self::with_twin_inputs): a case that can be run.
    ///
    /// # Errors
    /// Those of both.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(path)?.with_twin_inputs()
    }

    /// Reads a case that is in memory already; `origin` is what error messages call it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn parse(bytes: impl Into<Cow<'static, [u8]>>, origin: impl AsRef<Path>) -> Result<Self> {
        Self::from_tensors(&TensorFile::parse(bytes, origin)?)
    }

    fn from_tensors(file: &TensorFile) -> Result<Self> {
        let unsound = |problem: String| format_error(file.path(), problem);
        let (mut attributes, mut metadata) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in file.metadata() {
            match key.strip_prefix("attr.") {
                Some(name) => attributes.insert(name.to_string(), value.clone()),
                None => metadata.insert(key.clone(), value.clone()),
            };
        }
        let mut take = |key: &str| {
            metadata.remove(key).ok_or_else(|| {
                unsound(format!(
                    "expected a case file, but its header holds no `{key}`"
                ))
            })
        };
        let kind = take("kind")?;
        let version = take("format_version")?;
        if version != "1" {
            return Err(unsound(format!(
                "expected case format_version 1, got {version:?}"
            )));
        }
        let (name, inputs, outputs) = (take("name")?, take("inputs")?, take("outputs")?);
        let group = metadata.remove("group").unwrap_or_default();

        let mut listed = HashSet::new();
        let mut read = |list: &str| -> Result<Vec<FileTensor>> {
            let mut tensors = Vec::new();
            // An empty list has no names, where `split` would find one.
            for name in list.split(',').filter(|_| !list.is_empty()) {
                if !listed.insert(name.to_string()) {
                    return Err(unsound(format!(
                        "`inputs` and `outputs` list tensor {name:?} twice"
                    )));
                }
                tensors.push(file.get(name)?.ok_or_else(|| {
                    unsound(format!(
                        "the header lists tensor {name:?}, which the file does not hold"
                    ))
                })?);
            }
            Ok(tensors)
        };
        let (inputs, outputs) = (read(&inputs)?, read(&outputs)?);
        if outputs.is_empty() {
            return Err(unsound(
                "`outputs` lists no tensor, so that nothing could be compared".into(),
            ));
        }
        if let Some(extra) = file.names().find(|&name| !listed.contains(name)) {
            return Err(unsound(format!(
                "neither `inputs` nor `outputs` lists tensor {extra:?}"
            )));
        }
        Ok(Self {
            file: file.path().to_path_buf(),
            kind,
            name,
            group,
            attributes,
            metadata,
            inputs,
            outputs,
        })
    }

    /// Whether this file leaves its inputs to its `.f32` twin (attribute `results_only`).
    ///
    /// # Errors
    /// [`Error::Format`] where the attribute is neither `true` nor `false`.
    pub fn is_results_only(&self) -> Result<bool> {
        Ok(self.attributes.contains_key("results_only") && self.attr_bool("results_only")?)
    }

    /// The case with its inputs: those of the file beside it whose name ends in `.f32.safetensors`
    /// in place of `.f64.safetensors`, where this file holds results only; unchanged otherwise.
    ///
    /// # Errors
    /// [`Error::Format`] where there is no such file, or where it is not the same case; those of [`open`](Self::open).
    pub fn with_twin_inputs(self) -> Result<Self> {
        if !self.is_results_only()? {
            return Ok(self);
        }
        if let Some(input) = self.inputs.first() {
            return Err(self.error(format!(
                "attribute `results_only` is true, but the file holds input {:?}",
                input.name
            )));
        }
        let stem = self
            .file
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(".f64.safetensors"));
        let Some(stem) = stem else {
            return Err(self.error(
                "results only: its inputs lie in a `.f32.safetensors` file of the same name, \
                 which can be found only for a file named `*.f64.safetensors`",
            ));
        };
        let twin = self.file.with_file_name(format!("{stem}.f32.safetensors"));
        let twin = match Self::open(&twin) {
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(self.error(format!(
                    "results only: its inputs lie in {}, which is not there; put that file beside it",
                    twin.display()
                )));
            }
            opened => opened?,
        };
        let problem = |case: &Self| {
            let mut attributes = case.attributes.clone();
            attributes.retain(|name, _| name != "dtype" && name != "results_only");
            (case.kind.clone(), case.name.clone(), attributes)
        };
        if problem(&self) != problem(&twin) || twin.inputs.is_empty() {
            return Err(self.error(format!(
                "results only: its inputs should lie in {}, but that is another case",
                twin.file.display()
            )));
        }
        Ok(Self {
            inputs: twin.inputs,
            ..self
        })
    }

    /// What the results are precise to, and so what the case checks: f64 checks the CPU reference,
    /// anything else the kernels. Attribute `dtype` says it; without one, the first input of a float type.
    ///
    /// # Errors
    /// [`Error::Format`] where the attribute names no float type, or where nothing tells.
    pub fn precision(&self) -> Result<ElementKind> {
        if let Some(given) = self.attributes.get("dtype") {
            use ElementKind::{BF16, F16, F32, F64};
            let named = [F64, F32, F16, BF16]
                .into_iter()
                .find(|kind| kind.name() == given);
            return named
                .ok_or_else(|| self.attribute_error("dtype", "f64, f32, f16 or bf16", given));
        }
        let mut kinds = self.inputs.iter().map(|input| input.dtype);
        kinds.find(|kind| kind.is_float()).ok_or_else(|| {
            self.error(
                "neither an attribute `dtype` nor an input of a float type tells the precision",
            )
        })
    }

    /// An input by name.
    ///
    /// # Errors
    /// [`Error::Format`] where there is none of this name.
    pub fn input(&self, name: &str) -> Result<&FileTensor> {
        self.input_opt(name)
            .ok_or_else(|| self.missing("input", name, &self.inputs))
    }

    /// An input that a case may leave out, by name.
    pub fn input_opt(&self, name: &str) -> Option<&FileTensor> {
        self.inputs.iter().find(|tensor| tensor.name == name)
    }

    /// An expected output by name.
    ///
    /// # Errors
    /// [`Error::Format`] where there is none of this name.
    pub fn output(&self, name: &str) -> Result<&FileTensor> {
        self.output_opt(name)
            .ok_or_else(|| self.missing("output", name, &self.outputs))
    }

    /// An expected output that a case may leave out, by name.
    pub fn output_opt(&self, name: &str) -> Option<&FileTensor> {
        self.outputs.iter().find(|tensor| tensor.name == name)
    }

    /// An attribute as written.
    ///
    /// # Errors
    /// [`Error::Format`] where the case has none of this name.
    pub fn attr_str(&self, name: &str) -> Result<&str> {
        self.attribute(name, "a string")
    }

    /// An attribute that is `true` or `false`.
    ///
    /// # Errors
    /// [`Error::Format`] where it is missing or anything else.
    pub fn attr_bool(&self, name: &str) -> Result<bool> {
        self.attr_parsed(name, "true or false")
    }

    /// An attribute that is a finite number.
    ///
    /// # Errors
    /// [`Error::Format`] where it is missing or anything else.
    pub fn attr_f64(&self, name: &str) -> Result<f64> {
        let expected = "a finite number";
        let value: f64 = self.attr_parsed(name, expected)?;
        if value.is_finite() {
            Ok(value)
        } else {
            Err(self.attribute_error(name, expected, value))
        }
    }

    /// An attribute that is a whole number of 0 or more.
    ///
    /// # Errors
    /// [`Error::Format`] where it is missing or anything else.
    pub fn attr_usize(&self, name: &str) -> Result<usize> {
        self.attr_parsed(name, "a whole number of 0 or more")
    }

    /// An attribute that is a whole number.
    ///
    /// # Errors
    /// [`Error::Format`] where it is missing or anything else.
    pub fn attr_i64(&self, name: &str) -> Result<i64> {
        self.attr_parsed(name, "a whole number")
    }

    /// An attribute that is JSON, such as a list.
    ///
    /// # Errors
    /// [`Error::Format`] where it is missing or anything else.
    pub fn attr_json(&self, name: &str) -> Result<serde_json::Value> {
        self.attr_parsed(name, "JSON")
    }

    fn attr_parsed<T: FromStr>(&self, name: &str, expected: &str) -> Result<T> {
        let given = self.attribute(name, expected)?;
        given
            .parse()
            .map_err(|_| self.attribute_error(name, expected, format_args!("{given:?}")))
    }

    fn attribute(&self, name: &str, expected: &str) -> Result<&str> {
        match self.attributes.get(name) {
            Some(given) => Ok(given),
            None => Err(self.attribute_error(name, expected, "none")),
        }
    }

    fn attribute_error(&self, name: &str, expected: &str, got: impl fmt::Display) -> Error {
        self.error(format!(
            "attribute `{name}`: expected {expected}, got {got}"
        ))
    }

    fn missing(&self, what: &str, name: &str, there: &[FileTensor]) -> Error {
        let names: Vec<&str> = there.iter().map(|tensor| tensor.name.as_str()).collect();
        self.error(format!(
            "expected an {what} tensor `{name}`, got only [{}]",
            names.join(", ")
        ))
    }

    fn error(&self, problem: impl Into<String>) -> Error {
        format_error(&self.file, problem)
    }
}

/// The case files among `paths`, sorted, each once: a file is taken as given, a folder searched to its
/// depths for `*.safetensors`. Links are followed, and a folder is entered once however many lead to it.
///
/// A folder without cases adds nothing, so that the list can be empty: whoever compares must not take that for a success.
///
/// # Errors
/// [`Error::Io`] naming the path that does not exist or cannot be read.
pub fn find_cases(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut seen = HashSet::new();
    let mut is_new = |path: &Path| -> Result<bool> {
        let real = fs::canonicalize(path).map_err(|error| io_error(path, error))?;
        Ok(seen.insert(real))
    };
    let mut found = Vec::new();
    // In order, so that of two ways to a folder the same one is taken every time.
    let mut folders = BTreeSet::new();
    for path in paths {
        let there = fs::metadata(path).map_err(|error| io_error(path, error))?;
        if there.is_dir() {
            folders.insert(path.clone());
        } else {
            found.push(path.clone());
        }
    }
    while let Some(folder) = folders.pop_first() {
        if !is_new(&folder)? {
            continue;
        }
        let io = |error| io_error(&folder, error);
        for entry in fs::read_dir(&folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let ending = path.extension();
            let is_case = ending.is_some_and(|ending| ending == "safetensors");
            match fs::metadata(&path) {
                Ok(there) if there.is_dir() => {
                    folders.insert(path);
                }
                Ok(_) if is_case => found.push(path),
                // A link to nowhere matters only where it should have been a case.
                Err(error) if is_case => return Err(io_error(&path, error)),
                Ok(_) | Err(_) => {}
            }
        }
    }
    found.sort();
    let mut cases = Vec::with_capacity(found.len());
    for path in found {
        if is_new(&path)? {
            cases.push(path);
        }
    }
    Ok(cases)
}
