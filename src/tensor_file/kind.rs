//! The element types a tensor in a file can have, and how their bytes become numbers.

use std::fmt;

use safetensors::Dtype;

/// What a tensor's elements are in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementKind {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an f32.
    BF16,
    /// One byte, 0 or not.
    Bool,
    /// Unsigned byte.
    U8,
    /// Signed byte.
    I8,
    /// 16-bit unsigned integer.
    U16,
    /// 16-bit signed integer.
    I16,
    /// 32-bit unsigned integer.
    U32,
    /// 32-bit signed integer.
    I32,
    /// 64-bit unsigned integer.
    U64,
    /// 64-bit signed integer.
    I64,
}

impl ElementKind {
    /// The kind of a safetensors type, where this crate can read it (not the 8-bit floats and below).
    pub(super) fn from_dtype(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F64 => Self::F64,
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::BF16 => Self::BF16,
            Dtype::BOOL => Self::Bool,
            Dtype::U8 => Self::U8,
            Dtype::I8 => Self::I8,
            Dtype::U16 => Self::U16,
            Dtype::I16 => Self::I16,
            Dtype::U32 => Self::U32,
            Dtype::I32 => Self::I32,
            Dtype::U64 => Self::U64,
            Dtype::I64 => Self::I64,
            _ => return None,
        })
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 => 1,
            Self::F16 | Self::BF16 | Self::U16 | Self::I16 => 2,
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F64 | Self::U64 | Self::I64 => 8,
        }
    }

    /// Whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16)
    }

    /// The name, in lower case: `f32`, `bf16`, `bool`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Bool => "bool",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
        }
    }

    /// Appends the elements of `bytes` (little-endian, whole elements) to `values`.
    ///
    /// `None` where an integer is too large for an f64 to hold it exactly.
    pub(super) fn decode(self, bytes: &[u8], values: &mut Vec<f64>) -> Option<()> {
        /// Whole elements of `N` bytes.
        fn each<const N: usize>(
            bytes: &[u8],
            values: &mut Vec<f64>,
            convert: impl Fn([u8; N]) -> f64,
        ) {
            let (elements, _) = bytes.as_chunks::<N>();
            values.extend(elements.iter().map(|element| convert(*element)));
        }
        /// Elements of 8 bytes; an i128 holds all of them, and whatever f64 they round to.
        fn each_exact(
            bytes: &[u8],
            values: &mut Vec<f64>,
            convert: impl Fn([u8; 8]) -> i128,
        ) -> Option<()> {
            for element in bytes.as_chunks().0 {
                let whole = convert(*element);
                let value = whole as f64;
                if value as i128 != whole {
                    return None;
                }
                values.push(value);
            }
            Some(())
        }
        match self {
            Self::F64 => each(bytes, values, f64::from_le_bytes),
            Self::F32 => each(bytes, values, |b| f32::from_le_bytes(b).into()),
            Self::F16 => each(bytes, values, |b| half::f16::from_le_bytes(b).to_f64()),
            Self::BF16 => each(bytes, values, |b| half::bf16::from_le_bytes(b).to_f64()),
            Self::Bool => each(bytes, values, |[b]| f64::from(b != 0)),
            Self::U8 => each(bytes, values, |[b]| b.into()),
            Self::I8 => each(bytes, values, |b| i8::from_le_bytes(b).into()),
            Self::U16 => each(bytes, values, |b| u16::from_le_bytes(b).into()),
            Self::I16 => each(bytes, values, |b| i16::from_le_bytes(b).into()),
            Self::U32 => each(bytes, values, |b| u32::from_le_bytes(b).into()),
            Self::I32 => each(bytes, values, |b| i32::from_le_bytes(b).into()),
            Self::U64 => return each_exact(bytes, values, |b| u64::from_le_bytes(b).into()),
            Self::I64 => return each_exact(bytes, values, |b| i64::from_le_bytes(b).into()),
        }
        Some(())
    }
}

impl fmt::Display for ElementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
