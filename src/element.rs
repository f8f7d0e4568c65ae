//! The types of elements, on the host and on the GPU.

use std::fmt;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// 32-bit float.
    F32,
    /// 16-bit float (IEEE 754 binary16).
    F16,
    /// 16-bit float with the exponent of f32.
    BF16,
    /// One byte, 0 or 1.
    Bool,
    /// 32-bit unsigned number: lengths, starts, indices.
    U32,
}

impl ElementType {
    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            ElementType::F32 | ElementType::U32 => 4,
            ElementType::F16 | ElementType::BF16 => 2,
            ElementType::Bool => 1,
        }
    }

    /// How kernels number the float types (shaders/shared/elements.wgsl); `None` for others.
    pub(crate) fn float_number(self) -> Option<u32> {
        match self {
            ElementType::F32 => Some(0),
            ElementType::F16 => Some(1),
            ElementType::BF16 => Some(2),
            ElementType::Bool | ElementType::U32 => None,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::BF16 => "bf16",
            ElementType::Bool => "bool",
            ElementType::U32 => "u32",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for bool {}
    impl Sealed for u32 {}
}

/// A host type that a tensor can be made from and read back to: `f32`, [`half::f16`], [`half::bf16`], `u32`, `bool`.
pub trait Element: sealed::Sealed + Copy {
    /// Its type on the GPU.
    const TYPE: ElementType;
    #[doc(hidden)]
    fn to_bytes(values: &[Self]) -> std::borrow::Cow<'_, [u8]>;
    #[doc(hidden)]
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! element {
    ($host:ty, $ty:expr) => {
        impl Element for $host {
            const TYPE: ElementType = $ty;
            fn to_bytes(values: &[Self]) -> std::borrow::Cow<'_, [u8]> {
                bytemuck::cast_slice(values).into()
            }
            fn from_bytes(bytes: &[u8]) -> Vec<Self> {
                bytemuck::pod_collect_to_vec(bytes)
            }
        }
    };
}

element!(f32, ElementType::F32);
element!(u32, ElementType::U32);
element!(half::f16, ElementType::F16);
element!(half::bf16, ElementType::BF16);

impl Element for bool {
    const TYPE: ElementType = ElementType::Bool;
    fn to_bytes(values: &[Self]) -> std::borrow::Cow<'_, [u8]> {
        bytemuck::cast_slice(values).into()
    }
    fn from_bytes(bytes: &[u8]) -> Vec<Self> {
        bytes.iter().map(|byte| *byte != 0).collect()
    }
}
