//! Strided views of the caller's memory: shape `[batch, token, head, dim]`, innermost stride 1, all offsets checked when
//! the view is made. No element is read or written here.

use crate::{DType, Error, Place, Slice, SliceMut};
use core::marker::PhantomData;
use half::{bf16, f16};

/// Sizes of a view. Queries have `heads_q` heads, keys and values `heads_kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Entries of the batch axis; 1 for packed (variable-length) storage.
    pub batch: usize,
    /// Tokens of each entry; for a cache its capacity.
    pub tokens: usize,
    /// Heads of each token.
    pub heads: usize,
    /// Elements of each head.
    pub dim: usize,
}

/// Distances, in elements, between neighbours along each axis.
///
/// A stride of 0 broadcasts (one key head shown as eight, say); views that are written must not use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Between entries of the batch axis.
    pub batch: usize,
    /// Between tokens.
    pub token: usize,
    /// Between heads.
    pub head: usize,
    /// Between elements of a head. Must be 1.
    pub dim: usize,
}

impl Shape {
    /// Strides of contiguous `[batch, token, head, dim]` storage.
    pub const fn token_major(&self) -> Strides {
        let head = self.dim;
        let token = self.heads.wrapping_mul(head);
        Strides { batch: self.tokens.wrapping_mul(token), token, head, dim: 1 }
    }

    /// Strides of contiguous `[batch, head, token, dim]` storage.
    pub const fn head_major(&self) -> Strides {
        let token = self.dim;
        let head = self.tokens.wrapping_mul(token);
        Strides { batch: self.heads.wrapping_mul(head), token, head, dim: 1 }
    }

    /// Elements from the first to one past the last, or 0 for an empty view.
    fn extent(&self, strides: &Strides, what: &'static str) -> Result<usize, Error> {
        if strides.dim != 1 && self.dim > 1 {
            return Err(Error::InnerStride { what: what.into(), stride: strides.dim });
        }
        if self.batch == 0 || self.tokens == 0 || self.heads == 0 || self.dim == 0 {
            return Ok(0);
        }
        let axis = |n: usize, stride: usize| (n - 1).checked_mul(stride);
        let sum = || {
            axis(self.batch, strides.batch)?
                .checked_add(axis(self.tokens, strides.token)?)?
                .checked_add(axis(self.heads, strides.head)?)?
                .checked_add(self.dim)
        };
        sum().ok_or(Error::Overflow { what: what.into() })
    }
}

/// Elements to read.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub(crate) raw: RawTensor,
    data: PhantomData<&'a [f32]>,
}

/// Elements to write.
#[derive(Debug)]
pub struct TensorMut<'a> {
    pub(crate) raw: RawTensor,
    data: PhantomData<&'a mut [f32]>,
}

impl<'a> Tensor<'a> {
    /// A view of `data`.
    ///
    /// # Errors
    ///
    /// [`Error::InnerStride`] if `strides.dim` is not 1, [`Error::TooShort`] if the view leaves `data`,
    /// [`Error::Overflow`] if its extent does not fit in `usize`.
    pub fn new(data: impl Into<Slice<'a>>, shape: Shape, strides: Strides) -> Result<Self, Error> {
        let data = data.into();
        let ptr = match data {
            Slice::F32(s) => s.as_ptr().cast_mut().cast(),
            Slice::F16(s) => s.as_ptr().cast_mut().cast(),
            Slice::Bf16(s) => s.as_ptr().cast_mut().cast(),
        };
        let raw = RawTensor::new(ptr, data.len(), data.dtype(), shape, strides)?;
        Ok(Tensor { raw, data: PhantomData })
    }

    /// A view of contiguous `[batch, token, head, dim]` elements.
    ///
    /// # Errors
    ///
    /// As [`Tensor::new`].
    pub fn token_major(data: impl Into<Slice<'a>>, shape: Shape) -> Result<Self, Error> {
        Self::new(data, shape, shape.token_major())
    }

    /// A view of contiguous `[batch, head, token, dim]` elements.
    ///
    /// # Errors
    ///
    /// As [`Tensor::new`].
    pub fn head_major(data: impl Into<Slice<'a>>, shape: Shape) -> Result<Self, Error> {
        Self::new(data, shape, shape.head_major())
    }

    /// Its sizes.
    pub const fn shape(&self) -> Shape {
        self.raw.shape
    }

    /// Its element type.
    pub const fn dtype(&self) -> DType {
        self.raw.dtype
    }
}

impl<'a> TensorMut<'a> {
    /// A view of `data`.
    ///
    /// # Errors
    ///
    /// As [`Tensor::new`], and [`Error::Overlap`] if two rows share memory. The test wants strides that nest (each at
    /// least the extent of what lies inside it), as those of every permuted or sliced contiguous tensor do.
    pub fn new(data: impl Into<SliceMut<'a>>, shape: Shape, strides: Strides) -> Result<Self, Error> {
        let data = data.into();
        let (len, dtype) = (data.len(), data.dtype());
        let ptr = match data {
            SliceMut::F32(s) => s.as_mut_ptr().cast(),
            SliceMut::F16(s) => s.as_mut_ptr().cast(),
            SliceMut::Bf16(s) => s.as_mut_ptr().cast(),
        };
        let raw = RawTensor::new(ptr, len, dtype, shape, strides)?;
        raw.check_disjoint()?;
        Ok(TensorMut { raw, data: PhantomData })
    }

    /// A view of contiguous `[batch, token, head, dim]` elements.
    ///
    /// # Errors
    ///
    /// As [`TensorMut::new`].
    pub fn token_major(data: impl Into<SliceMut<'a>>, shape: Shape) -> Result<Self, Error> {
        Self::new(data, shape, shape.token_major())
    }

    /// A view of contiguous `[batch, head, token, dim]` elements.
    ///
    /// # Errors
    ///
    /// As [`TensorMut::new`].
    pub fn head_major(data: impl Into<SliceMut<'a>>, shape: Shape) -> Result<Self, Error> {
        Self::new(data, shape, shape.head_major())
    }

    /// Its sizes.
    pub const fn shape(&self) -> Shape {
        self.raw.shape
    }

    /// Its element type.
    pub const fn dtype(&self) -> DType {
        self.raw.dtype
    }
}

/// A checked view without a lifetime, for a prepared call; the call keeps the borrow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawTensor {
    ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
}

impl RawTensor {
    fn new(ptr: *mut u8, len: usize, dtype: DType, shape: Shape, strides: Strides) -> Result<Self, Error> {
        let need = shape.extent(&strides, "tensor")?;
        if need > len {
            return Err(Error::TooShort { what: "tensor".into(), need, have: len });
        }
        Ok(RawTensor { ptr, dtype, shape, strides })
    }

    fn check_disjoint(&self) -> Result<(), Error> {
        let (shape, strides) = (&self.shape, &self.strides);
        let mut axes = [(strides.batch, shape.batch), (strides.token, shape.tokens), (strides.head, shape.heads)];
        if axes.iter().any(|&(_, n)| n == 0) {
            return Ok(());
        }
        axes.sort_unstable();
        let mut extent = shape.dim;
        for (stride, n) in axes {
            if n > 1 {
                if stride < extent {
                    return Err(Error::Overlap {
                        what: "tensor".into(),
                        token_stride: strides.token,
                        head_stride: strides.head,
                        dim: shape.dim,
                    });
                }
                // Fits: the whole extent was checked against the buffer's length.
                extent += (n - 1) * stride;
            }
        }
        Ok(())
    }

    /// Offset of the row of (batch entry, token, head). In range and free of overflow if the indices are in the shape.
    pub(crate) const fn row(&self, batch: usize, token: usize, head: usize) -> usize {
        batch * self.strides.batch + token * self.strides.token + head * self.strides.head
    }

    /// The address of an element, for [`crate::kernel::Kernels::prefetch`].
    pub(crate) fn address(&self, at: usize) -> *const u8 {
        self.ptr.cast::<u8>().wrapping_add(at.wrapping_mul(self.dtype.size()))
    }

    /// Elements from the first to one past the last of `tokens` rows of one head.
    pub(crate) const fn head_extent(&self, tokens: usize) -> usize {
        if tokens == 0 { 0 } else { (tokens - 1) * self.strides.token + self.shape.dim }
    }

    /// The elements `start..start + len`.
    ///
    /// # Safety
    ///
    /// - The range lies within the view's extent, and the borrow that the view was made from is alive for `'a`.
    /// - Nothing writes to those elements during `'a`.
    pub(crate) unsafe fn slice<'a>(&self, start: usize, len: usize) -> Slice<'a> {
        macro_rules! make {
            ($variant:ident, $t:ty) => {
                // SAFETY: the type is the one the pointer was made from; range, life and exclusion are the caller's.
                Slice::$variant(unsafe { core::slice::from_raw_parts(self.ptr.cast::<$t>().add(start), len) })
            };
        }
        match self.dtype {
            DType::F32 => make!(F32, f32),
            DType::F16 => make!(F16, f16),
            DType::Bf16 => make!(Bf16, bf16),
        }
    }

    /// The elements `start..start + len`, to write.
    ///
    /// # Safety
    ///
    /// - The view was made from a [`TensorMut`], the range lies within its extent, and the borrow is alive for `'a`.
    /// - Nothing else reads or writes those elements during `'a`.
    pub(crate) unsafe fn slice_mut<'a>(&self, start: usize, len: usize) -> SliceMut<'a> {
        macro_rules! make {
            ($variant:ident, $t:ty) => {
                // SAFETY: the type is the one the pointer was made from; range, life and exclusion are the caller's.
                SliceMut::$variant(unsafe { core::slice::from_raw_parts_mut(self.ptr.cast::<$t>().add(start), len) })
            };
        }
        match self.dtype {
            DType::F32 => make!(F32, f32),
            DType::F16 => make!(F16, f16),
            DType::Bf16 => make!(Bf16, bf16),
        }
    }

    /// Checks that the tensor is what a description says.
    pub(crate) fn check(&self, what: &'static str, dtype: DType, heads: usize, dim: usize) -> Result<(), Error> {
        if self.dtype != dtype {
            return Err(Error::DType { what: what.into(), expected: dtype, found: self.dtype });
        }
        let sizes: [(usize, usize); 2] = [(heads, self.shape.heads), (dim, self.shape.dim)];
        for (expected, found) in sizes {
            if expected != found {
                return Err(Error::Mismatch { what: what.into(), expected, found });
            }
        }
        Ok(())
    }

    /// Checks that `len` tokens from `at` on lie in the tensor.
    pub(crate) fn check_tokens(&self, what: Place, at: At, len: usize) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        if at.batch >= self.shape.batch {
            return Err(Error::OutOfRange { what, value: at.batch as i128, min: 0, max: self.shape.batch as i128 - 1 });
        }
        let need = at.token.checked_add(len).ok_or(Error::Overflow { what })?;
        if need > self.shape.tokens {
            return Err(Error::TooShort { what, need, have: self.shape.tokens });
        }
        Ok(())
    }
}

/// Where a sequence starts in a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct At {
    /// Entry of the batch axis.
    pub batch: usize,
    /// First token: the sequence's entry of cu_seqlens in packed storage, 0 in padded storage.
    pub token: usize,
}
