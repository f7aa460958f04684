//! What a call adds to its scores, besides its tensors: bias and boolean masks of a sequence, and numbers for each head.

use crate::{Error, Place, Slice};

/// An additive bias of one sequence: the element for query head `h`, query `i` and key `j` (of the `kv_len` held) is
/// `data[h * head_stride + i * query_stride + j]`, in natural units, added after scale and softcap. -inf hides the key. A
/// stride of 0 broadcasts.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a> {
    /// The elements.
    pub data: Slice<'a>,
    /// Elements between query heads.
    pub head_stride: usize,
    /// Elements between queries.
    pub query_stride: usize,
}

/// How a boolean mask is stored.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum MaskData<'a> {
    /// One byte each: 0 hides the key, anything else lets it be seen.
    Bytes(&'a [u8]),
    /// One bit each, the lowest of a byte first: 0 hides the key.
    Bits(&'a [u8]),
}

impl MaskData<'_> {
    fn len(&self) -> usize {
        match self {
            MaskData::Bytes(bytes) => bytes.len(),
            MaskData::Bits(bytes) => bytes.len().saturating_mul(8),
        }
    }
}

/// A boolean mask of one sequence over its keys from `first_key` on: the element for query head `h`, query `i` and key `j` is
/// number `h * head_stride + i * query_stride + (j - first_key)`. Keys before `first_key` are not masked by it, so that the
/// mask of a tree of draft tokens covers only them: `first_key = kv_len - q_len`. Strides of 0 broadcast.
#[derive(Clone, Copy, Debug)]
pub struct BoolMask<'a> {
    /// The elements.
    pub data: MaskData<'a>,
    /// Elements between query heads.
    pub head_stride: usize,
    /// Elements between queries.
    pub query_stride: usize,
    /// First key (of the `kv_len` held) that the mask covers, at most `kv_len`.
    pub first_key: usize,
}

/// Numbers for each query head, the same for every sequence of a batch. What the description has no use for must be absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weights<'a> {
    /// ALiBi slopes, one per query head: `-slope * distance` in key index is added to the scores, on both sides.
    pub alibi: Option<&'a [f32]>,
    /// Attention sinks, one per query head: the raw logit of one more key with value 0. -inf is no sink.
    pub sinks: Option<&'a [f32]>,
}

/// Fills `slopes`, one per query head, with the slopes of the ALiBi paper (Press, Smith and Lewis, 2022): for `n` heads, `n` a
/// power of two, `2^(-8 (h + 1) / n)`. For other numbers, those of the power of two below, then every second one of the power
/// of two above, as the paper's authors do.
pub fn alibi_slopes(slopes: &mut [f32]) {
    let heads = slopes.len();
    let below = if heads == 0 { 1 } else { 1usize << heads.ilog2() };
    for (h, slope) in slopes.iter_mut().enumerate() {
        let exponent =
            if h < below { (h + 1) as f64 / below as f64 } else { (2 * (h - below) + 1) as f64 / (2 * below) as f64 };
        *slope = libm::exp2(-8.0 * exponent) as f32;
    }
}

/// Checks that `rows` rows of `len` elements for each of `heads` heads lie in `have` elements.
fn check_reach(
    place: Place,
    have: usize,
    [head_stride, query_stride]: [usize; 2],
    [heads, rows, len]: [usize; 3],
) -> Result<(), Error> {
    if heads == 0 || rows == 0 || len == 0 {
        return Ok(());
    }
    let reach = (heads - 1)
        .checked_mul(head_stride)
        .and_then(|h| (rows - 1).checked_mul(query_stride)?.checked_add(h)?.checked_add(len))
        .ok_or(Error::Overflow { what: place })?;
    if reach > have { Err(Error::TooShort { what: place, need: reach, have }) } else { Ok(()) }
}

impl Bias<'_> {
    pub(crate) fn check(&self, place: Place, heads: usize, q_len: usize, kv_len: usize) -> Result<(), Error> {
        check_reach(place, self.data.len(), [self.head_stride, self.query_stride], [heads, q_len, kv_len])
    }

    /// Where the row of a head and query starts.
    pub(crate) fn row(&self, head: usize, query: usize) -> usize {
        head * self.head_stride + query * self.query_stride
    }
}

impl BoolMask<'_> {
    pub(crate) fn check(&self, place: Place, heads: usize, q_len: usize, kv_len: usize) -> Result<(), Error> {
        if self.first_key > kv_len {
            return Err(Error::OutOfRange { what: place, value: self.first_key as i128, min: 0, max: kv_len as i128 });
        }
        let shape = [heads, q_len, kv_len - self.first_key];
        check_reach(place, self.data.len(), [self.head_stride, self.query_stride], shape)
    }

    /// Calls `hide(i)` for every key `first + i`, `i` in `0..len`, that the query does not see.
    pub(crate) fn hidden(&self, head: usize, query: usize, first: usize, len: usize, mut hide: impl FnMut(usize)) {
        let skip = self.first_key.saturating_sub(first).min(len);
        let start = head * self.head_stride + query * self.query_stride + (first + skip).saturating_sub(self.first_key);
        match self.data {
            MaskData::Bytes(bytes) => {
                for (i, &byte) in bytes[start..][..len - skip].iter().enumerate() {
                    if byte == 0 {
                        hide(skip + i);
                    }
                }
            }
            MaskData::Bits(bytes) => {
                for i in 0..len - skip {
                    if bytes[(start + i) / 8] >> ((start + i) % 8) & 1 == 0 {
                        hide(skip + i);
                    }
                }
            }
        }
    }

    /// True if the query sees some of the keys `first..first + len`.
    pub(crate) fn sees_any(&self, head: usize, query: usize, first: usize, len: usize) -> bool {
        if first < self.first_key && len > 0 {
            return true;
        }
        let start = head * self.head_stride + query * self.query_stride + first.saturating_sub(self.first_key);
        match self.data {
            MaskData::Bytes(bytes) => bytes[start..][..len].iter().any(|&byte| byte != 0),
            MaskData::Bits(bytes) => (start..start + len).any(|i| bytes[i / 8] >> (i % 8) & 1 != 0),
        }
    }
}
