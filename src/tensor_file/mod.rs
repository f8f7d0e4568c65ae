//! Safetensors files: reading, checking, writing.
//!
//! - [`TensorFile`]: any safetensors file. Opening reads the header alone; a tensor is read and
//!   converted when it is asked for, so a checkpoint of many gigabytes opens at once.
//! - [`FileTensor`]: what came of one tensor, every element as an f64 of the same value.
//! - [`write_tensors`]: the way back, all or nothing.
//!
//! The bytes are somebody else's: whatever they hold, these functions return an [`Error`] and
//! neither panic nor allocate more than the file's own size calls for.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use crate::error::{Error, Result};
use crate::replace_file::{io_error, replace_file};

mod kind;
pub use kind::ElementKind;

#[cfg(test)]
pub(crate) mod tests;

/// Bytes of the length field in front of the header.
const LENGTH_BYTES: u64 = 8;
/// The longest header that is read, in bytes: what the safetensors library itself allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// How much of a tensor is read from disk at once, in bytes; a multiple of every element size.
const CHUNK_BYTES: usize = 1 << 20;

/// A tensor read from a file, row-major, every element as the f64 of exactly the same value.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    /// Its name in the file.
    pub name: String,
    /// Its axes, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// What its elements were in the file.
    pub dtype: ElementKind,
    /// The elements, as many as the product of `shape`.
    pub values: Vec<f64>,
}

impl FileTensor {
    /// The elements as f32: exact where the file held f32, f16, bf16 or small integers, rounded once otherwise.
    pub fn to_f32(&self) -> Vec<f32> {
        self.values.iter().map(|&value| value as f32).collect()
    }

    /// The elements of a mask: true where not 0.
    ///
    /// # Errors
    /// [`Error::Type`] where the file held floats.
    pub fn to_bool(&self) -> Result<Vec<bool>> {
        self.expect_integers("bool or an integer type")?;
        Ok(self.values.iter().map(|&value| value != 0.0).collect())
    }

    /// The elements of a list of lengths or positions.
    ///
    /// # Errors
    /// [`Error::Type`] where the file held floats, [`Error::Shape`] where an element is negative.
    pub fn to_usize(&self) -> Result<Vec<usize>> {
        self.expect_integers("an integer type")?;
        let lengths = self.values.iter().map(|&value| {
            // Every value is whole, so `as` changes only those that it saturates.
            let length = value as usize;
            if length as f64 == value {
                Ok(length)
            } else {
                Err(Error::shape(&self.name, "lengths of 0 or more", value))
            }
        });
        lengths.collect()
    }

    fn expect_integers(&self, expected: &str) -> Result<()> {
        if self.dtype.is_float() {
            return Err(Error::Type {
                argument: self.name.clone(),
                expected: expected.into(),
                got: self.dtype.to_string(),
            });
        }
        Ok(())
    }
}

/// A safetensors file, open: names and shapes at hand, elements read when asked for.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    /// Where the tensors' bytes start, in bytes from the start of the file.
    data_start: u64,
    source: Source,
}

#[derive(Debug)]
enum Source {
    /// The lock keeps one reader's seek and read together.
    File(Mutex<File>),
    Bytes(Cow<'static, [u8]>),
}

impl TensorFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read; [`Error::Format`] where it is not a sound safetensors file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |error| io_error(path, error);
        // Asked first: opening a pipe would wait for somebody to write to it.
        let found = fs::metadata(path).map_err(io)?;
        if !found.is_file() {
            let what = if found.is_dir() {
                "a folder"
            } else {
                "a device or pipe"
            };
            return Err(format_error(
                path,
                format!("expected a safetensors file, got {what}"),
            ));
        }
        let mut file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        let (header, data_start) = read_header(path, &mut file, length)?;
        let source = Source::File(Mutex::new(file));
        Self::new(path, &header, data_start, length, source)
    }

    /// Reads a file that is in memory already; `origin` is what error messages call it.
    ///
    /// # Errors
    /// [`Error::Format`] where it is not a sound safetensors file.
    pub fn parse(bytes: impl Into<Cow<'static, [u8]>>, origin: impl AsRef<Path>) -> Result<Self> {
        let (bytes, origin) = (bytes.into(), origin.as_ref());
        let length = bytes.len() as u64;
        let (header, data_start) = read_header(origin, &mut bytes.as_ref(), length)?;
        Self::new(origin, &header, data_start, length, Source::Bytes(bytes))
    }

    fn new(
        path: &Path,
        header: &[u8],
        data_start: u64,
        length: u64,
        source: Source,
    ) -> Result<Self> {
        let unsound = |problem: String| format_error(path, problem);
        // The library checks that offsets neither overlap nor leave gaps and agree with shape and type.
        let header: Metadata = serde_json::from_slice(header)
            .map_err(|error| unsound(format!("unsound safetensors header: {error}")))?;
        let (described, held) = (header.data_len(), length - data_start);
        if described as u64 != held {
            return Err(unsound(format!(
                "the header describes {described} bytes of tensors, the file holds {held}; it may be cut short"
            )));
        }
        let mut tensors = BTreeMap::new();
        for (name, info) in header.tensors() {
            if element_count(&info.shape).is_none() {
                return Err(unsound(format!(
                    "tensor {name:?}: shape {:?} overflows",
                    info.shape
                )));
            }
            tensors.insert(name, info.clone());
        }
        let metadata = header.metadata().iter().flatten();
        Ok(Self {
            path: path.to_path_buf(),
            metadata: metadata.map(|(k, v)| (k.clone(), v.clone())).collect(),
            tensors,
            data_start,
            source,
        })
    }

    /// The file, or what [`parse`](Self::parse) was told to call it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The header's map of strings (`__metadata__`); empty where there is none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The axes of a tensor, without reading it; `None` where there is no tensor of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| info.shape.as_slice())
    }

    /// Reads one tensor; `None` where there is no tensor of this name.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be read any more; [`Error::Unsupported`] for element types
    /// that this crate cannot read; [`Error::Format`] for an integer of more than 53 bits and for a
    /// tensor that does not fit into memory.
    pub fn get(&self, name: &str) -> Result<Option<FileTensor>> {
        let Some(info) = self.tensors.get(name) else {
            return Ok(None);
        };
        let unsound = |problem: String| format_error(&self.path, problem);
        let Some(kind) = ElementKind::from_dtype(info.dtype) else {
            let path = self.path.display();
            return Err(Error::Unsupported {
                what: format!("{path}: tensor {name:?} of type {}", info.dtype),
                reason: "convert it to f32, f16, bf16 or an integer type of whole bytes".into(),
            });
        };
        let (start, end) = info.data_offsets;
        let count = (end - start) / kind.bytes();
        let mut values = Vec::new();
        values.try_reserve_exact(count).map_err(|error| {
            unsound(format!(
                "tensor {name:?} of {count} elements does not fit into memory: {error}"
            ))
        })?;
        self.read(start, end, |bytes| {
            kind.decode(bytes, &mut values).ok_or_else(|| {
                unsound(format!(
                    "tensor {name:?} of type {kind} holds an integer of more than 53 bits"
                ))
            })
        })?;
        Ok(Some(FileTensor {
            name: name.into(),
            shape: info.shape.clone(),
            dtype: kind,
            values,
        }))
    }

    /// Hands the bytes from `start` to `end` of the data to `take`, in pieces of whole elements.
    fn read(
        &self,
        start: usize,
        end: usize,
        mut take: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut file = match &self.source {
            // In range: `new` compared the header with the length. The start fits, being part of a slice.
            Source::Bytes(bytes) => return take(&bytes[self.data_start as usize..][start..end]),
            Source::File(file) => file.lock().unwrap_or_else(PoisonError::into_inner),
        };
        let io = |error| io_error(&self.path, error);
        file.seek(SeekFrom::Start(self.data_start + start as u64))
            .map_err(io)?;
        let mut left = end - start;
        let mut chunk = vec![0; CHUNK_BYTES.min(left)];
        while left > 0 {
            let bytes = &mut chunk[..CHUNK_BYTES.min(left)];
            file.read_exact(bytes).map_err(io)?;
            take(bytes)?;
            left -= bytes.len();
        }
        Ok(())
    }
}

/// The header's bytes and where the data starts. Allocates no more than the `length` of the file.
fn read_header(path: &Path, file: &mut impl Read, length: u64) -> Result<(Vec<u8>, u64)> {
    let io = |error| io_error(path, error);
    if length < LENGTH_BYTES {
        return Err(format_error(
            path,
            format!("expected a safetensors file, got {length} bytes"),
        ));
    }
    let mut size = [0; LENGTH_BYTES as usize];
    file.read_exact(&mut size).map_err(io)?;
    let size = u64::from_le_bytes(size);
    if size > MAX_HEADER_BYTES || size > length - LENGTH_BYTES {
        return Err(format_error(
            path,
            format!(
                "expected a safetensors file: its first 8 bytes give a header of {size} bytes, \
                 but the file has {length} bytes and a header may have {MAX_HEADER_BYTES}"
            ),
        ));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header).map_err(io)?;
    Ok((header, LENGTH_BYTES + size))
}

/// How many elements a shape has; `None` where elements of 8 bytes would overflow.
///
/// Axes of 0 are left out of that: [0, huge, huge] has no elements, and would still overflow whoever
/// computes strides.
fn element_count(shape: &[usize]) -> Option<usize> {
    let mut axes = shape.iter().filter(|&&axis| axis != 0);
    let count = axes.try_fold(1_usize, |product, &axis| product.checked_mul(axis))?;
    isize::try_from(count.checked_mul(8)?).ok()?;
    Some(if shape.contains(&0) { 0 } else { count })
}

/// Writes f32 tensors (name, shape, elements) to a safetensors file.
///
/// The bytes go to a temporary file in the same folder, which then takes the name `path`: a reader
/// sees the old file or the new one, and after a failure the old one is still there. A link is followed, an
/// existing file keeps its permissions, and anything that is not a file (a device, a pipe, a folder) is refused.
///
/// # Errors
/// [`Error::Shape`] where a shape and its elements differ in number; [`Error::Parameter`] where a name
/// comes twice or is reserved; [`Error::Io`] where the file cannot be written.
pub fn write_tensors(path: impl AsRef<Path>, tensors: &[(&str, &[usize], &[f32])]) -> Result<()> {
    let path = path.as_ref();
    let header = header_of(path, tensors)?;
    replace_file(path, |file| write_all(file, &header, tensors))
}

/// The length field and header of these tensors, which lie in the order given.
fn header_of(path: &Path, tensors: &[(&str, &[usize], &[f32])]) -> Result<Vec<u8>> {
    let mut names = HashSet::new();
    let mut infos = Vec::with_capacity(tensors.len());
    let mut offset = 0;
    for (name, shape, values) in tensors {
        if *name == "__metadata__" || !names.insert(*name) {
            return Err(Error::parameter(
                "tensors",
                format!("{name:?}"),
                "every name may come once, and \"__metadata__\" is reserved",
            ));
        }
        if element_count(shape) != Some(values.len()) {
            return Err(Error::shape(
                *name,
                format!("as many elements as shape {shape:?} has"),
                values.len(),
            ));
        }
        let end = offset + size_of_val(*values);
        let info = TensorInfo {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            data_offsets: (offset, end),
        };
        infos.push((name.to_string(), info));
        offset = end;
    }
    let json = Metadata::new(None, infos)
        .and_then(|metadata| Ok(serde_json::to_vec(&metadata)?))
        .map_err(|error| format_error(path, format!("cannot describe the tensors: {error}")))?;
    // Spaces behind the JSON let the elements start at a multiple of 8 bytes.
    let size = json.len().next_multiple_of(LENGTH_BYTES as usize);
    let mut header = (size as u64).to_le_bytes().to_vec();
    header.extend(json);
    header.resize(LENGTH_BYTES as usize + size, b' ');
    Ok(header)
}

fn write_all(
    file: &mut File,
    header: &[u8],
    tensors: &[(&str, &[usize], &[f32])],
) -> io::Result<()> {
    let mut writer = BufWriter::with_capacity(CHUNK_BYTES, file);
    writer.write_all(header)?;
    for (_, _, values) in tensors {
        for value in *values {
            writer.write_all(&value.to_le_bytes())?;
        }
    }
    writer.flush()
}

/// A file that was read but does not hold what it should.
pub(crate) fn format_error(path: &Path, problem: impl Into<String>) -> Error {
    Error::Format {
        path: path.display().to_string(),
        problem: problem.into(),
    }
}
