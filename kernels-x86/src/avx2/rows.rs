//! Rows of elements: widening loads of 8, rotation in registers, narrowing stores. What every other kernel of the tier
//! builds on; no tile and no panel layout lives here.

use crate::shared::{CheckedRows, Kind, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use half::{bf16, f16};
use rotile_core::SliceMut;
use rotile_core::kernel::{Rotation, Rows, check_angles};

/// Lanes of a vector.
pub(super) const LANES: usize = 8;

/// A storage type that can be widened on load.
pub(crate) trait Element: Copy {
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

/// `n < 8` elements of 16 bits in the low lanes, the others 0, by reads of 8, 4 and 2 bytes: a tail is never read past
/// its end. (Out of line it saved 5 % of the tier's code and brought spills into full loops.)
///
/// # Safety
///
/// The `n` elements at `p` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_bits<T>(p: *const T, n: usize) -> __m128i {
    const { assert!(size_of::<T>() == 2) };
    let p: *const u16 = p.cast();
    // SAFETY: `n & 4`, `n & 2` and `n & 1` elements follow one another, `n` in all.
    let (first, rest) = unsafe {
        let mut at = n & 4;
        let mut rest = 0;
        if n & 2 != 0 {
            rest = u64::from(p.add(at).cast::<u32>().read_unaligned());
            at += 2;
        }
        if n & 1 != 0 {
            rest |= u64::from(p.add(at).read()) << (16 * (n & 2));
        }
        (if n & 4 != 0 { p.cast::<u64>().read_unaligned() } else { rest }, rest)
    };
    _mm_set_epi64x(if n & 4 != 0 { rest as i64 } else { 0 }, first as i64)
}

/// Writes the low `n < 8` elements of 16 bits.
///
/// # Safety
///
/// The `n` elements at `p` are writable, and any 16 bits are a value of `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_bits<T>(p: *mut T, bits: __m128i, n: usize) {
    const { assert!(size_of::<T>() == 2) };
    let p: *mut u16 = p.cast();
    let (mut at, mut rest) = (0, _mm_cvtsi128_si64(bits) as u64);
    // SAFETY: `n & 4`, `n & 2` and `n & 1` elements follow one another, `n` in all.
    unsafe {
        if n & 4 != 0 {
            p.cast::<u64>().write_unaligned(rest);
            (at, rest) = (4, _mm_extract_epi64::<1>(bits) as u64);
        }
        if n & 2 != 0 {
            p.add(at).cast::<u32>().write_unaligned(rest as u32);
            (at, rest) = (at + 2, rest >> 32);
        }
        if n & 1 != 0 {
            p.add(at).write(rest as u16);
        }
    }
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

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen_bf16(bits: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
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
        // SAFETY: the caller's duty.
        _mm256_cvtph_ps(unsafe { load_bits(p, n) })
    }
}

impl Element for bf16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load8(p: *const bf16) -> __m256 {
        // SAFETY: the caller's duty.
        widen_bf16(unsafe { _mm_loadu_si128(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_n(p: *const bf16, n: usize) -> __m256 {
        // SAFETY: the caller's duty.
        widen_bf16(unsafe { load_bits(p, n) })
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

impl<T: Element> Row<T> {
    /// Elements `at..at + n`, `n <= 8`, widened.
    ///
    /// # Safety
    ///
    /// They are in the row.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn plain(self, at: usize, n: usize) -> __m256 {
        // SAFETY: the caller's duty.
        unsafe { load(self.data.add(at), n) }
    }

    /// The first and the second elements of half-style pairs `i..i + n`, `n <= 8`, rotated; the first ones start at `at`.
    ///
    /// # Safety
    ///
    /// The pairs are in the row and in its rotation, and `i` is a multiple of 8.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn half(self, at: usize, distance: usize, i: usize, n: usize) -> [__m256; 2] {
        // SAFETY: the caller's duty; angle rows are padded to 16, so 8 from a multiple of 8 are readable.
        let (x, y, cos, sin) = unsafe {
            let (x, y) = (load(self.data.add(at), n), load(self.data.add(at + distance), n));
            (x, y, _mm256_loadu_ps(self.cos.add(i)), _mm256_loadu_ps(self.sin.add(i)))
        };
        [_mm256_fmsub_ps(x, cos, _mm256_mul_ps(y, sin)), _mm256_fmadd_ps(y, cos, _mm256_mul_ps(x, sin))]
    }

    /// Elements `at..at + n`, `n <= 8`, which are interleaved pairs from pair `i` on, rotated.
    ///
    /// # Safety
    ///
    /// The pairs are in the row and in its rotation, and `i` is a multiple of 4.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn interleaved(self, at: usize, i: usize, n: usize) -> __m256 {
        let twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
        // SAFETY: the caller's duty; angle rows are padded to 16, so 4 from a multiple of 4 are readable.
        let (v, cos, sin) =
            unsafe { (load(self.data.add(at), n), _mm_loadu_ps(self.cos.add(i)), _mm_loadu_ps(self.sin.add(i))) };
        let cos = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(cos), twice);
        let sin = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(sin), twice);
        let swapped = _mm256_permute_ps::<0b10_11_00_01>(v);
        // Even lanes x cos - y sin, odd lanes y cos + x sin.
        _mm256_fmaddsub_ps(v, cos, _mm256_mul_ps(swapped, sin))
    }

    /// Eight interleaved pairs from element `at` and pair `i` on, rotated: first and second elements apart, in the order
    /// of pairs that shuffles inside 128 bits give, [`PAIR_ORDER`]. Same arithmetic as [`Row::interleaved`] with half the work
    /// for the angles, and without shuffles across halves, which are slow on Zen.
    ///
    /// # Safety
    ///
    /// The pairs are in the row and in its rotation, and `i` is a multiple of 8.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn eight_pairs(self, at: usize, i: usize) -> [__m256; 2] {
        // SAFETY: angle rows are padded to 16, so 8 from a multiple of 8 are readable.
        let ordered = |p: *const f32| unsafe {
            let (low, high) = (_mm_loadu_ps(p), _mm_loadu_ps(p.add(4)));
            let (low, high) = (_mm256_set_m128(low, low), _mm256_set_m128(high, high));
            let both = _mm256_shuffle_pd::<0b1100>(_mm256_castps_pd(low), _mm256_castps_pd(high));
            _mm256_castpd_ps(both)
        };
        // SAFETY: the caller's duty.
        let (a, b, cos, sin) = unsafe {
            let (a, b) = (T::load8(self.data.add(at)), T::load8(self.data.add(at + LANES)));
            (a, b, ordered(self.cos.add(i)), ordered(self.sin.add(i)))
        };
        let (x, y) = (_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b));
        [_mm256_fmsub_ps(x, cos, _mm256_mul_ps(y, sin)), _mm256_fmadd_ps(y, cos, _mm256_mul_ps(x, sin))]
    }

    /// The 16 elements of [`Row::eight_pairs`], in their own order.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn interleaved16(self, at: usize, i: usize) -> [__m256; 2] {
        // SAFETY: the caller's duty.
        let [x, y] = unsafe { self.eight_pairs(at, i) };
        [_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y)]
    }
}

/// Which pair is in which lane of [`Row::eight_pairs`].
pub(super) const PAIR_ORDER: [usize; LANES] = [0, 1, 4, 5, 2, 3, 6, 7];

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
    let checked = CheckedRows::new(data, &rows, rotation);
    for r in 0..rows.at.len() {
        let row = checked.row(r);
        let out = out[r * out_stride..][..rows.dim].as_mut_ptr();
        for Segment { kind, start, end } in segments {
            // SAFETY: `at..at + n` and its partners are in the row and in `out`, which has `dim` elements.
            unsafe {
                match kind {
                    Kind::Copy => each_vector!(start..end, |at, n| {
                        store_n(out.add(at), _mm256_mul_ps(row.plain(at, n), scale), n);
                    }),
                    Kind::First { distance } => each_vector!(start..end, |at, n| {
                        let [x, y] = row.half(at, distance, at - start, n);
                        store_n(out.add(at), _mm256_mul_ps(x, scale), n);
                        store_n(out.add(at + distance), _mm256_mul_ps(y, scale), n);
                    }),
                    Kind::Second => (),
                    Kind::Interleaved => {
                        let mut from = start;
                        while from + 2 * LANES <= end {
                            let [x, y] = row.interleaved16(from, (from - start) / 2);
                            store_n(out.add(from), _mm256_mul_ps(x, scale), LANES);
                            store_n(out.add(from + LANES), _mm256_mul_ps(y, scale), LANES);
                            from += 2 * LANES;
                        }
                        each_vector!(from..end, |at, n| {
                            let x = row.interleaved(at, (at - start) / 2, n);
                            store_n(out.add(at), _mm256_mul_ps(x, scale), n);
                        });
                    }
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
            for at in starts {
                let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x(at));
                // SAFETY: `dst` is as long as `src`, and any 16 bits are an f16.
                unsafe { store16(dst.as_mut_ptr().add(at), bits, src.len() - at) };
            }
        }
        SliceMut::Bf16(dst) => {
            for at in starts {
                // SAFETY: `dst` is as long as `src`, and any 16 bits are a bf16.
                unsafe { store16(dst.as_mut_ptr().add(at), to_bf16(x(at)), src.len() - at) };
            }
        }
        other => unreachable!("no kernel for {}", other.dtype()),
    }
}

/// Writes 8 elements of 16 bits, or the first `n` if that is less.
///
/// # Safety
///
/// As many elements at `p` are writable, and any 16 bits are a value of `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store16<T>(p: *mut T, bits: __m128i, n: usize) {
    const { assert!(size_of::<T>() == 2) };
    // SAFETY: the caller's duty.
    unsafe { if n >= LANES { _mm_storeu_si128(p.cast(), bits) } else { store_bits(p, bits, n) } }
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
    base_cos: &[f64],
    base_sin: &[f64],
    fine_cos: &[f64],
    fine_sin: &[f64],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let len = check_angles([base_cos, base_sin], [fine_cos, fine_sin], cos, sin);
    for at in (0..len).step_by(4) {
        // SAFETY: all six have `len` elements, a multiple of 4.
        unsafe {
            let of = |s: &[f64]| _mm256_loadu_pd(s.as_ptr().add(at));
            let (bc, bs, fc, fs) = (of(base_cos), of(base_sin), of(fine_cos), of(fine_sin));
            let c = _mm256_fmsub_pd(bc, fc, _mm256_mul_pd(bs, fs));
            let s = _mm256_fmadd_pd(bs, fc, _mm256_mul_pd(bc, fs));
            _mm_storeu_ps(cos.as_mut_ptr().add(at), _mm256_cvtpd_ps(c));
            _mm_storeu_ps(sin.as_mut_ptr().add(at), _mm256_cvtpd_ps(s));
        }
    }
}
