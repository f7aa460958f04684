//! Element types, and slices whose element type is known only at run time.

use core::fmt;
use half::{bf16, f16};

/// Storage type of an element. Arithmetic is f32 whatever the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }

    /// The name used in messages and kernel names: `f32`, `f16`, `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Elements to read: one of the storage types.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Slice<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// f16 elements.
    F16(&'a [f16]),
    /// bf16 elements.
    Bf16(&'a [bf16]),
}

impl Slice<'_> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            Slice::F32(s) => s.len(),
            Slice::F16(s) => s.len(),
            Slice::Bf16(s) => s.len(),
        }
    }

    /// The address of element `at`, which need not exist: for [`crate::kernel::Kernels::prefetch`].
    pub fn address(&self, at: usize) -> *const u8 {
        let start: *const u8 = match self {
            Slice::F32(s) => s.as_ptr().cast(),
            Slice::F16(s) => s.as_ptr().cast(),
            Slice::Bf16(s) => s.as_ptr().cast(),
        };
        start.wrapping_add(at.wrapping_mul(self.dtype().size()))
    }

    /// True if there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Storage type of the elements.
    pub const fn dtype(&self) -> DType {
        match self {
            Slice::F32(_) => DType::F32,
            Slice::F16(_) => DType::F16,
            Slice::Bf16(_) => DType::Bf16,
        }
    }
}

/// Elements to write: one of the storage types.
#[derive(Debug)]
#[non_exhaustive]
pub enum SliceMut<'a> {
    /// f32 elements.
    F32(&'a mut [f32]),
    /// f16 elements.
    F16(&'a mut [f16]),
    /// bf16 elements.
    Bf16(&'a mut [bf16]),
}

impl SliceMut<'_> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        match self {
            SliceMut::F32(s) => s.len(),
            SliceMut::F16(s) => s.len(),
            SliceMut::Bf16(s) => s.len(),
        }
    }

    /// True if there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Storage type of the elements.
    pub const fn dtype(&self) -> DType {
        match self {
            SliceMut::F32(_) => DType::F32,
            SliceMut::F16(_) => DType::F16,
            SliceMut::Bf16(_) => DType::Bf16,
        }
    }
}

macro_rules! from_slice {
    ($($t:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a [$t]> for Slice<'a> {
            fn from(s: &'a [$t]) -> Self { Slice::$variant(s) }
        }
        impl<'a> From<&'a mut [$t]> for SliceMut<'a> {
            fn from(s: &'a mut [$t]) -> Self { SliceMut::$variant(s) }
        }
    )*};
}
from_slice!(f32 => F32, f16 => F16, bf16 => Bf16);
