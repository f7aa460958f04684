//! Rows of elements: widening loads of 16, rotation in registers, narrowing stores. What every other kernel of the tier
//! builds on; no tile and no panel layout lives here.

use crate::shared::{CheckedRows, Kind, Row, Segment, by_type, each_vector, segments};
use core::arch::x86_64::*;
use half::{bf16, f16};
use rotile_core::SliceMut;
use rotile_core::kernel::{Rotation, Rows, check_angles};

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// A storage type that can be widened on load.
pub(super) trait Element: Copy {
    /// Widens 16 elements.
    ///
    /// # Safety
    ///
    /// The 16 elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load16(p: *const Self) -> __m512;

    /// Widens the elements whose bits in `mask` are set; the other lanes are 0 and are not read.
    ///
    /// # Safety
    ///
    /// Those elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load_masked(p: *const Self, mask: __mmask16) -> __m512;
}

/// Lanes `0..n` of 16; all of them for a greater `n`.
#[inline]
pub(super) const fn lanes_below(n: usize) -> __mmask16 {
    if n >= LANES { !0 } else { (1 << n) - 1 }
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load16(p: *const f32) -> __m512 {
        // SAFETY: the caller's duty.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load_masked(p: *const f32, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(mask, p) }
    }
}

impl Element for f16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load16(p: *const f16) -> __m512 {
        // SAFETY: the caller's duty.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load_masked(p: *const f16, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) })
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn widen_bf16(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

impl Element for bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load16(p: *const bf16) -> __m512 {
        // SAFETY: the caller's duty.
        widen_bf16(unsafe { _mm256_loadu_si256(p.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn load_masked(p: *const bf16, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        widen_bf16(unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) })
    }
}

/// Widens `n <= 16` elements.
///
/// # Safety
///
/// The `n` elements at `p` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn load<T: Element>(p: *const T, n: usize) -> __m512 {
    // SAFETY: the caller's duty.
    unsafe { if n >= LANES { T::load16(p) } else { T::load_masked(p, lanes_below(n)) } }
}

/// Stores lanes `0..n`.
///
/// # Safety
///
/// The `n` elements at `p`, 16 at most, are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn store_n(p: *mut f32, x: __m512, n: usize) {
    if n >= LANES {
        // SAFETY: the caller's duty.
        unsafe { _mm512_storeu_ps(p, x) }
    } else {
        // SAFETY: masked lanes are not written.
        unsafe { _mm512_mask_storeu_ps(p, lanes_below(n), x) }
    }
}

/// The first and the second elements of half-style pairs `i..i + n`, `n <= 16`, rotated; the first ones start at `at`.
///
/// # Safety
///
/// The pairs are in the row and in its rotation, and `i` is a multiple of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn half<T: Element>(row: Row<T>, at: usize, distance: usize, i: usize, n: usize) -> [__m512; 2] {
    // SAFETY: the caller's duty; angle rows are padded to 16, so 16 from a multiple of 16 are readable.
    unsafe {
        let (x, y) = (load(row.data.add(at), n), load(row.data.add(at + distance), n));
        turn(x, y, _mm512_loadu_ps(row.cos.add(i)), _mm512_loadu_ps(row.sin.add(i)))
    }
}

/// Rotates pairs (x, y).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn turn(x: __m512, y: __m512, cos: __m512, sin: __m512) -> [__m512; 2] {
    [_mm512_fmsub_ps(x, cos, _mm512_mul_ps(y, sin)), _mm512_fmadd_ps(y, cos, _mm512_mul_ps(x, sin))]
}

/// Elements `at..at + n`, `n <= 16`, which are interleaved pairs from pair `i` on, rotated.
///
/// # Safety
///
/// The pairs are in the row and in its rotation, and `i` is a multiple of 8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn interleaved<T: Element>(row: Row<T>, at: usize, i: usize, n: usize) -> __m512 {
    let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    // SAFETY: the caller's duty; angle rows are padded to 16, so 8 from a multiple of 8 are readable.
    let (v, cos, sin) =
        unsafe { (load(row.data.add(at), n), _mm256_loadu_ps(row.cos.add(i)), _mm256_loadu_ps(row.sin.add(i))) };
    let cos = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(cos));
    let sin = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(sin));
    let swapped = _mm512_permute_ps::<0b10_11_00_01>(v);
    // Even lanes x cos - y sin, odd lanes y cos + x sin.
    _mm512_fmaddsub_ps(v, cos, _mm512_mul_ps(swapped, sin))
}

/// Sixteen interleaved pairs from element `at` and pair `i` on, rotated: first and second elements apart. Same arithmetic as
/// [`interleaved`], with less work for the angles.
///
/// # Safety
///
/// The pairs are in the row and in its rotation, and `i` is a multiple of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn sixteen_pairs<T: Element>(row: Row<T>, at: usize, i: usize) -> [__m512; 2] {
    // SAFETY: the caller's duty; angle rows are padded to 16, so 16 from a multiple of 16 are readable.
    unsafe {
        let [x, y] = apart(T::load16(row.data.add(at)), T::load16(row.data.add(at + LANES)));
        turn(x, y, _mm512_loadu_ps(row.cos.add(i)), _mm512_loadu_ps(row.sin.add(i)))
    }
}

/// The elements of 16 pairs, apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn apart(a: __m512, b: __m512) -> [__m512; 2] {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    [_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)]
}

/// The elements of 16 pairs, one after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn together([x, y]: [__m512; 2]) -> [__m512; 2] {
    let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    [_mm512_permutex2var_ps(x, low, y), _mm512_permutex2var_ps(x, high, y)]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn load_avx512(
    rows: Rows<'_>,
    rotation: Option<Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    by_type!(rows.data, load_rows, rows, rotation.as_ref(), scale, out, out_stride)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn load_rows<T: Element>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    let segments = segments(rotation, rows.dim);
    let scale = _mm512_set1_ps(scale);
    let checked = CheckedRows::new(data, &rows, rotation);
    for r in 0..rows.at.len() {
        let row = checked.row(r);
        let out = out[r * out_stride..][..rows.dim].as_mut_ptr();
        for Segment { kind, start, end } in segments {
            // SAFETY: `at..at + n` and its partners are in the row and in `out`, which has `dim` elements.
            unsafe {
                match kind {
                    Kind::Copy => each_vector!(start..end, |at, n| {
                        store_n(out.add(at), _mm512_mul_ps(load(row.data.add(at), n), scale), n);
                    }),
                    Kind::First { distance } => each_vector!(start..end, |at, n| {
                        let [x, y] = half(row, at, distance, at - start, n);
                        store_n(out.add(at), _mm512_mul_ps(x, scale), n);
                        store_n(out.add(at + distance), _mm512_mul_ps(y, scale), n);
                    }),
                    Kind::Second => (),
                    Kind::Interleaved => {
                        let mut from = start;
                        while from + 2 * LANES <= end {
                            let [x, y] = together(sixteen_pairs(row, from, (from - start) / 2));
                            store_n(out.add(from), _mm512_mul_ps(x, scale), LANES);
                            store_n(out.add(from + LANES), _mm512_mul_ps(y, scale), LANES);
                            from += 2 * LANES;
                        }
                        each_vector!(from..end, |at, n| {
                            let x = interleaved(row, at, (at - start) / 2, n);
                            store_n(out.add(at), _mm512_mul_ps(x, scale), n);
                        });
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn store_avx512(src: &[f32], factor: f32, dst: SliceMut<'_>) {
    assert_eq!(src.len(), dst.len());
    let (start, end) = (0, src.len());
    let factor = _mm512_set1_ps(factor);
    let x = src.as_ptr();
    match dst {
        SliceMut::F32(dst) => each_vector!(start..end, |at, n| {
            // SAFETY: `at..at + n` is in `src`, and `dst` is as long.
            unsafe { store_n(dst.as_mut_ptr().add(at), _mm512_mul_ps(load(x.add(at), n), factor), n) };
        }),
        SliceMut::F16(dst) => each_vector!(start..end, |at, n| {
            // SAFETY: as above, and any 16 bits are an f16.
            unsafe {
                let x = _mm512_mul_ps(load(x.add(at), n), factor);
                let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
                _mm256_mask_storeu_epi16(dst.as_mut_ptr().add(at).cast(), lanes_below(n), bits);
            }
        }),
        SliceMut::Bf16(dst) => each_vector!(start..end, |at, n| {
            // SAFETY: as above, and any 16 bits are a bf16.
            unsafe {
                let bits = to_bf16(_mm512_mul_ps(load(x.add(at), n), factor));
                _mm256_mask_storeu_epi16(dst.as_mut_ptr().add(at).cast(), lanes_below(n), bits);
            }
        }),
        other => unreachable!("no kernel for {}", other.dtype()),
    }
}

/// Rounds to nearest even; NaN becomes a quiet NaN. (`vcvtneps2bf16` would flush denormals.)
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn to_bf16(x: __m512) -> __m256i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000));
    _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn angles_avx512(
    base_cos: &[f64],
    base_sin: &[f64],
    fine_cos: &[f64],
    fine_sin: &[f64],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let len = check_angles([base_cos, base_sin], [fine_cos, fine_sin], cos, sin);
    let mut at = 0;
    while at < len {
        // SAFETY: all six have `len` elements, a multiple of 8.
        unsafe {
            let (bc, bs) = (_mm512_loadu_pd(base_cos.as_ptr().add(at)), _mm512_loadu_pd(base_sin.as_ptr().add(at)));
            let (fc, fs) = (_mm512_loadu_pd(fine_cos.as_ptr().add(at)), _mm512_loadu_pd(fine_sin.as_ptr().add(at)));
            let c = _mm512_fmsub_pd(bc, fc, _mm512_mul_pd(bs, fs));
            let s = _mm512_fmadd_pd(bs, fc, _mm512_mul_pd(bc, fs));
            _mm256_storeu_ps(cos.as_mut_ptr().add(at), _mm512_cvtpd_ps(c));
            _mm256_storeu_ps(sin.as_mut_ptr().add(at), _mm512_cvtpd_ps(s));
        }
        at += 8;
    }
}
