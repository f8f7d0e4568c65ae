//! How far from the expected values a result may lie: what the `manifest.json` beside the cases says, or a default.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Case;
use crate::compare::Tolerance;
use crate::error::Result;
use crate::replace_file::io_error;
use crate::tensor_file::{ElementKind, format_error};

/// Where a [`Tolerance`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToleranceOrigin {
    /// A `manifest.json` gives it for this output of this case.
    Stored,
    /// No manifest does, so that the rule for all cases holds.
    Default,
}

impl fmt::Display for ToleranceOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stored => "stored",
            Self::Default => "default",
        })
    }
}

/// The tolerances of cases, read from their `manifest.json`. Keep one for many cases: it reads each manifest once.
#[derive(Debug, Default)]
pub struct Tolerances {
    /// By path; `None` where there is no such file, or one that is no manifest of cases.
    manifests: HashMap<PathBuf, Option<Manifest>>,
    /// The manifest that came in memory, asked last.
    bundled: Option<Manifest>,
}

/// By base name of the case file, then by output.
type Manifest = HashMap<String, HashMap<String, Tolerance>>;

impl Tolerances {
    /// How many parents of the case's folder are looked at.
    const PARENTS: usize = 3;

    /// Nothing read yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Nothing read yet but a manifest in memory, which serves cases that no manifest on disk lists;
    /// `origin` is what error messages call it.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) where it is not a manifest.
    pub fn with_manifest(manifest: &str, origin: impl AsRef<Path>) -> Result<Self> {
        let origin = origin.as_ref();
        let Some(bundled) = parse_manifest(origin, manifest.as_bytes())? else {
            return Err(format_error(
                origin,
                "expected a manifest of cases, got JSON without a list `cases`",
            ));
        };
        Ok(Self {
            bundled: Some(bundled),
            ..Self::default()
        })
    }

    /// The tolerance of one expected output of `case`, and where it comes from.
    ///
    /// It is what a `manifest.json` in the case's folder or up to three folders above says of a file of
    /// the same base name; the nearest that lists the file counts. Where none does: for a case of
    /// precision f64, 1e-12 of the largest finite expected magnitude of this output; for any other,
    /// [`Tolerance::F32`].
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) where the case has no such output or a manifest is unsound;
    /// [`Error::Io`](crate::Error::Io) where a manifest cannot be read.
    pub fn of(&mut self, case: &Case, output: &str) -> Result<(Tolerance, ToleranceOrigin)> {
        let expected = case.output(output)?;
        if let Some(stored) = self.stored(&case.file, output)? {
            return Ok((stored, ToleranceOrigin::Stored));
        }
        let default = if case.precision()? == ElementKind::F64 {
            let magnitudes = expected.values.iter().map(|value| value.abs());
            let largest = magnitudes.filter(|value| value.is_finite());
            Tolerance::new(1e-12 * largest.fold(0.0, f64::max), 0.0)
        } else {
            Tolerance::F32
        };
        Ok((default, ToleranceOrigin::Default))
    }

    fn stored(&mut self, file: &Path, output: &str) -> Result<Option<Tolerance>> {
        let Some(name) = file.file_name().map(|name| name.to_string_lossy()) else {
            return Ok(None);
        };
        let folder = match file.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        // A case that came as bytes need not lie in any folder.
        if let Ok(folder) = fs::canonicalize(folder) {
            for folder in folder.ancestors().take(1 + Self::PARENTS) {
                let listed = self.manifest_in(folder)?.and_then(|m| m.get(&*name));
                if let Some(outputs) = listed {
                    return Ok(outputs.get(output).copied());
                }
            }
        }
        let listed = self.bundled.as_ref().and_then(|m| m.get(&*name));
        Ok(listed.and_then(|outputs| outputs.get(output).copied()))
    }

    fn manifest_in(&mut self, folder: &Path) -> Result<Option<&Manifest>> {
        let path = folder.join("manifest.json");
        if !self.manifests.contains_key(&path) {
            let manifest = match fs::read(&path) {
                Ok(bytes) => parse_manifest(&path, &bytes)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(io_error(&path, error)),
            };
            self.manifests.insert(path.clone(), manifest);
        }
        Ok(self.manifests.get(&path).and_then(Option::as_ref))
    }
}

/// The tolerances in a manifest; `None` for other programs' files of that name, which hold no list `cases`.
fn parse_manifest(path: &Path, bytes: &[u8]) -> Result<Option<Manifest>> {
    let manifest: Value = serde_json::from_slice(bytes)
        .map_err(|error| format_error(path, format!("not sound JSON: {error}")))?;
    let Some(cases) = manifest.get("cases").and_then(Value::as_array) else {
        return Ok(None);
    };
    let mut listed = Manifest::new();
    for (index, case) in cases.iter().enumerate() {
        let expected = |what: &str| format_error(path, format!("cases[{index}]: expected {what}"));
        let file = case.get("file").and_then(Value::as_str);
        let file = file.ok_or_else(|| expected("a string `file`"))?;
        let base = file.rsplit('/').next().unwrap_or(file);
        let outputs = case.get("outputs").and_then(Value::as_object);
        let outputs = outputs.ok_or_else(|| expected("an object `outputs`"))?;
        let mut tolerances = HashMap::new();
        for (output, facts) in outputs {
            let part = |key: &str| match facts.get(key) {
                None => Ok(None),
                Some(given) => match given.as_f64() {
                    Some(part) if part >= 0.0 => Ok(Some(part)),
                    _ => Err(expected(&format!(
                        "`{key}` of {output:?} to be a number of 0 or more, got {given}"
                    ))),
                },
            };
            let (absolute, relative) = (part("atol")?, part("rtol")?);
            if absolute.is_some() || relative.is_some() {
                let both =
                    Tolerance::new(absolute.unwrap_or_default(), relative.unwrap_or_default());
                tolerances.insert(output.clone(), both);
            }
        }
        if listed.insert(base.to_string(), tolerances).is_some() {
            return Err(expected(&format!(
                "every file name once, got {base:?} again"
            )));
        }
    }
    Ok(Some(listed))
}
