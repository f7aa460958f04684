//! Rows of elements: widening loads of 8, rotation in registers, narrowing stores. What every other kernel of the tier
//! builds on; no tile and no panel layout lives here.

use core::arch::x86_64::*;
use half::{bf16, f16};
use rotile_core::kernel::{Rotation, Rows};
use rotile_core::{PairStyle, Slice, SliceMut};

/// Lanes of a vector.
pub(super) const LANES: usize = 8;

/// A storage type that can be widened on load.
pub(super) trait Element: Copy {
    /// Widens 8 elements.
    ///
    /// # Safety
    ///
    /// The 8 elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load8(p: *const Self) -> __m256;

    /// Widens `n < 8` elements; the other lanes are 0.
    ///
    /// # Safety
    ///
    /// The `n` elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load_n(p: *const Self, n: usize) -> __m256;
}

/// Lanes `0..n` all ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn lanes_below(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// Copies `n < 8` elements to a buffer of 8, so that a tail is never read past its end.
///
/// # Safety
///
/// The `n` elements at `p` are readable.
#[inline]
unsafe fn tail<T: Copy + Default>(p: *const T, n: usize) -> [T; LANES] {
    let mut buffer = [T::default(); LANES];
    // SAFETY: the caller's duty, and `n` fits the buffer.
    unsafe { core::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n.min(LANES)) };
    buffer
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const f32) -> __m256 {
        // SAFETY: the caller's duty.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_n(p: *const f32, n: usize) -> __m256 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm256_maskload_ps(p, lanes_below(n)) }
    }
}

impl Element for f16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const f16) -> __m256 {
        // SAFETY: the caller's duty.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_n(p: *const f16, n: usize) -> __m256 {
        // SAFETY: the caller's duty, then a buffer of 8.
        unsafe { Self::load8(tail(p, n).as_ptr()) }
    }
}

impl Element for bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const bf16) -> __m256 {
        // SAFETY: the caller's duty.
        let bits = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_n(p: *const bf16, n: usize) -> __m256 {
        // SAFETY: the caller's duty, then a buffer of 8.
        unsafe { Self::load8(tail(p, n).as_ptr()) }
    }
}

/// Stores lanes `0..n`.
///
/// # Safety
///
/// The `n <= 8` elements at `p` are writable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn store_n(p: *mut f32, x: __m256, n: usize) {
    if n >= LANES {
        // SAFETY: the caller's duty.
        unsafe { _mm256_storeu_ps(p, x) }
    } else {
        // SAFETY: masked lanes are not written.
        unsafe { _mm256_maskstore_ps(p, lanes_below(n), x) }
    }
}

/// Widens `n <= 8` elements.
///
/// # Safety
///
/// The `n` elements at `p` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn load<T: Element>(p: *const T, n: usize) -> __m256 {
    // SAFETY: the caller's duty.
    unsafe { if n >= LANES { T::load8(p) } else { T::load_n(p, n) } }
}

/// What happens to a run of elements of a row.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// They pass through.
    Copy,
    /// They are the first elements of half-style pairs; the second ones are `distance` on.
    First { distance: usize },
    /// They are the second elements of half-style pairs.
    Second { distance: usize },
    /// They are interleaved pairs.
    Interleaved,
}

/// A run of elements that are treated alike.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// The runs of a row of `dim` elements, in order; empty ones included.
#[inline]
pub(super) fn segments(rotation: Option<&Rotation<'_>>, dim: usize) -> [Segment; 5] {
    let cut = |at: [usize; 6], kinds: [Kind; 5]| {
        core::array::from_fn(|i| Segment { kind: kinds[i], start: at[i], len: at[i + 1] - at[i] })
    };
    let none = Kind::Copy;
    let Some(turn) = rotation.map(|r| r.turn) else {
        return cut([0, dim, dim, dim, dim, dim], [none; 5]);
    };
    assert!(turn.end() <= dim, "rotated elements leave the row");
    let (a, distance) = (turn.offset, turn.distance);
    match turn.style {
        PairStyle::Interleaved => {
            let b = a + 2 * turn.pairs;
            cut([0, a, b, dim, dim, dim], [none, Kind::Interleaved, none, none, none])
        }
        _ => {
            assert!(turn.pairs <= distance, "half-style pairs overlap");
            let (b, c, d) = (a + turn.pairs, a + distance, a + distance + turn.pairs);
            cut([0, a, b, c, d, dim], [none, Kind::First { distance }, none, Kind::Second { distance }, none])
        }
    }
}

/// `x' = x cos - y sin`, `y' = y cos + x sin`, one rounding for each sum.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn turn_first(x: __m256, y: __m256, cos: __m256, sin: __m256) -> __m256 {
    _mm256_fmsub_ps(x, cos, _mm256_mul_ps(y, sin))
}

/// See [`turn_first`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn turn_second(x: __m256, y: __m256, cos: __m256, sin: __m256) -> __m256 {
    _mm256_fmadd_ps(y, cos, _mm256_mul_ps(x, sin))
}

/// Rotates 4 interleaved pairs; `cos` and `sin` point at the angles of the first.
///
/// # Safety
///
/// 4 elements are readable at both (angle rows are padded).
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn turn_interleaved(v: __m256, cos: *const f32, sin: *const f32) -> __m256 {
    let twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    // SAFETY: the caller's duty.
    let spread = |p| unsafe { _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), twice) };
    let swapped = _mm256_permute_ps::<0b10_11_00_01>(v);
    // Even lanes x cos - y sin, odd lanes y cos + x sin.
    _mm256_fmaddsub_ps(v, spread(cos), _mm256_mul_ps(swapped, spread(sin)))
}

/// Elements `at..at + n` of a row (`n <= 8`, within `segment`), widened and rotated.
///
/// # Safety
///
/// - `row` points at a whole row whose segments [`segments`] made.
/// - `cos` and `sin` point at the row's padded angles, unless the segment passes through.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn turned<T: Element>(
    row: *const T,
    segment: Segment,
    at: usize,
    n: usize,
    cos: *const f32,
    sin: *const f32,
) -> __m256 {
    // SAFETY: partners lie `distance` away inside the same row; angle rows are padded to 16, so 8 from a multiple of 8
    // (4 from a multiple of 4) are readable.
    unsafe {
        let here = load(row.add(at), n);
        let i = at - segment.start;
        match segment.kind {
            Kind::Copy => here,
            Kind::First { distance } => {
                let y = load(row.add(at + distance), n);
                turn_first(here, y, _mm256_loadu_ps(cos.add(i)), _mm256_loadu_ps(sin.add(i)))
            }
            Kind::Second { distance } => {
                let x = load(row.add(at - distance), n);
                turn_second(x, here, _mm256_loadu_ps(cos.add(i)), _mm256_loadu_ps(sin.add(i)))
            }
            Kind::Interleaved => turn_interleaved(here, cos.add(i / 2), sin.add(i / 2)),
        }
    }
}

/// Pointers to the checked start of a row, and to its checked, padded angles (dangling without a rotation).
#[inline]
pub(super) fn checked_row<T>(
    data: &[T],
    rows: &Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    r: usize,
) -> (*const T, *const f32, *const f32) {
    let row = &data[rows.at[r]..][..rows.dim];
    match rotation {
        None => (row.as_ptr(), core::ptr::dangling(), core::ptr::dangling()),
        Some(Rotation { turn, angles }) => {
            let padded = turn.pairs.next_multiple_of(rotile_core::kernel::ANGLE_PAD);
            let cos = &angles.cos[angles.at[r]..][..padded];
            let sin = &angles.sin[angles.at[r]..][..padded];
            (row.as_ptr(), cos.as_ptr(), sin.as_ptr())
        }
    }
}

/// Calls `$kernel::<T>($data, ...)` for the element type of a slice.
macro_rules! by_type {
    ($slice:expr, $kernel:ident, $($arg:expr),*) => {
        match $slice {
            rotile_core::Slice::F32(data) => $kernel(data, $($arg),*),
            rotile_core::Slice::F16(data) => $kernel(data, $($arg),*),
            rotile_core::Slice::Bf16(data) => $kernel(data, $($arg),*),
            other => unreachable!("no kernel for {}", other.dtype()),
        }
    };
}
pub(super) use by_type;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_avx2(
    rows: Rows<'_>,
    rotation: Option<Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    by_type!(rows.data, load_rows, rows, rotation.as_ref(), scale, out, out_stride)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn load_rows<T: Element>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    let segments = segments(rotation, rows.dim);
    let scale = _mm256_set1_ps(scale);
    for r in 0..rows.at.len() {
        let (row, cos, sin) = checked_row(data, &rows, rotation, r);
        let out = &mut out[r * out_stride..][..rows.dim];
        for segment in segments {
            let end = segment.start + segment.len;
            for at in (segment.start..end).step_by(LANES) {
                let n = LANES.min(end - at);
                // SAFETY: `checked_row` checked the row and its angles; `out` has `dim` elements.
                unsafe {
                    let x = turned(row, segment, at, n, cos, sin);
                    store_n(out.as_mut_ptr().add(at), _mm256_mul_ps(x, scale), n);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn store_avx2(src: &[f32], factor: f32, dst: SliceMut<'_>) {
    assert_eq!(src.len(), dst.len());
    let factor = _mm256_set1_ps(factor);
    let x = |at: usize| {
        // SAFETY: `at` and the lanes from it on are in `src`.
        unsafe { _mm256_mul_ps(load(src.as_ptr().add(at), src.len() - at), factor) }
    };
    let starts = (0..src.len()).step_by(LANES);
    match dst {
        SliceMut::F32(dst) => {
            for at in starts {
                // SAFETY: `dst` is as long as `src`.
                unsafe { store_n(dst.as_mut_ptr().add(at), x(at), src.len() - at) };
            }
        }
        SliceMut::F16(dst) => {
            for (at, dst) in starts.zip(dst.chunks_mut(LANES)) {
                store_bits(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x(at)), dst);
            }
        }
        SliceMut::Bf16(dst) => {
            for (at, dst) in starts.zip(dst.chunks_mut(LANES)) {
                store_bits(to_bf16(x(at)), dst);
            }
        }
        other => unreachable!("no kernel for {}", other.dtype()),
    }
}

/// Stores the first lanes of eight 16-bit patterns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_bits<T>(bits: __m128i, dst: &mut [T]) {
    const { assert!(size_of::<T>() == 2) };
    let mut buffer = [0u16; LANES];
    // SAFETY: the buffer has 16 bytes; `dst` has at most 8 elements of 2 bytes, for which any bits are a value.
    unsafe {
        _mm_storeu_si128(buffer.as_mut_ptr().cast(), bits);
        core::ptr::copy_nonoverlapping(buffer.as_ptr().cast(), dst.as_mut_ptr(), dst.len().min(LANES));
    }
}

/// Rounds to nearest even; NaN becomes a quiet NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn to_bf16(x: __m256) -> __m128i {
    let bits = _mm256_castps_si256(x);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
    _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn angles_avx2(
    base_cos: &[f32],
    base_sin: &[f32],
    fine_cos: &[f32],
    fine_sin: &[f32],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let len = cos.len();
    let all = [base_cos.len(), base_sin.len(), fine_cos.len(), fine_sin.len(), sin.len()];
    assert!(all == [len; 5] && len.is_multiple_of(LANES));
    for at in (0..len).step_by(LANES) {
        // SAFETY: all six have `len` elements, a multiple of 8.
        unsafe {
            let of = |s: &[f32]| _mm256_loadu_ps(s.as_ptr().add(at));
            let (bc, bs, fc, fs) = (of(base_cos), of(base_sin), of(fine_cos), of(fine_sin));
            _mm256_storeu_ps(cos.as_mut_ptr().add(at), turn_first(bc, bs, fc, fs));
            _mm256_storeu_ps(sin.as_mut_ptr().add(at), turn_second(bc, bs, fc, fs));
        }
    }
}

/// Asks for the cache lines of `elements` elements of row `r`, if there is such a row. A hint: nothing is read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn prefetch(ahead: Option<&Rows<'_>>, r: usize, from: usize, elements: usize) {
    let Some(rows) = ahead else { return };
    let Some(&at) = rows.at.get(r) else { return };
    let (base, size) = match rows.data {
        Slice::F32(s) => (s.as_ptr().cast::<u8>(), 4),
        Slice::F16(s) => (s.as_ptr().cast(), 2),
        Slice::Bf16(s) => (s.as_ptr().cast(), 2),
        _ => return,
    };
    let mut byte = (at + from) * size;
    let end = (at + (from + elements).min(rows.dim)) * size;
    while byte < end {
        _mm_prefetch::<_MM_HINT_T0>(base.wrapping_add(byte).cast());
        byte += 64;
    }
}
