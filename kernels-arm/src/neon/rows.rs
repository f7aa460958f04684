//! Rows of elements: widening loads of 4, rotation of pairs in registers, narrowing stores. What every other kernel of
//! the tier builds on; no tile and no panel layout lives here.

use core::arch::{aarch64::*, asm};
use half::{bf16, f16};
use rotile_core::kernel::{Rotation, Rows, check_angles};
use rotile_core::{PairStyle, Slice, SliceMut};

/// Lanes of a vector.
pub(super) const LANES: usize = 4;

/// A storage type that can be widened on load.
///
/// Parts of a vector are loaded lane by lane: LD1 and LD2 of a single lane read what is there and no more.
pub(super) trait Element: Copy {
    /// Widens 4 elements.
    ///
    /// # Safety
    ///
    /// The 4 elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load4(p: *const Self) -> float32x4_t;

    /// Widens `n`, 1 to 3, elements; the other lanes are 0.
    ///
    /// # Safety
    ///
    /// The `n` elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load_n(p: *const Self, n: usize) -> float32x4_t;

    /// Widens 4 interleaved pairs, taken apart: the first elements, the second ones.
    ///
    /// # Safety
    ///
    /// The 8 elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load4_pairs(p: *const Self) -> [float32x4_t; 2];

    /// Widens `n`, 1 to 3, interleaved pairs, taken apart; the other lanes are 0.
    ///
    /// # Safety
    ///
    /// The `2 * n` elements at `p` are readable, and the CPU has the tier's features.
    unsafe fn load_n_pairs(p: *const Self, n: usize) -> [float32x4_t; 2];
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load4(p: *const f32) -> float32x4_t {
        // SAFETY: the caller's duty.
        unsafe { vld1q_f32(p) }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_n(p: *const f32, n: usize) -> float32x4_t {
        // SAFETY: lane `i` is loaded only if `i < n`.
        unsafe {
            let mut x = vld1q_lane_f32::<0>(p, vdupq_n_f32(0.0));
            if n > 1 {
                x = vld1q_lane_f32::<1>(p.add(1), x);
            }
            if n > 2 {
                x = vld1q_lane_f32::<2>(p.add(2), x);
            }
            x
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load4_pairs(p: *const f32) -> [float32x4_t; 2] {
        // SAFETY: the caller's duty.
        let float32x4x2_t(x, y) = unsafe { vld2q_f32(p) };
        [x, y]
    }

    #[inline]
    #[target_feature(enable = "neon")]
    unsafe fn load_n_pairs(p: *const f32, n: usize) -> [float32x4_t; 2] {
        let zero = vdupq_n_f32(0.0);
        // SAFETY: pair `i` is loaded only if `i < n`.
        let float32x4x2_t(x, y) = unsafe {
            let mut pairs = vld2q_lane_f32::<0>(p, float32x4x2_t(zero, zero));
            if n > 1 {
                pairs = vld2q_lane_f32::<1>(p.add(2), pairs);
            }
            if n > 2 {
                pairs = vld2q_lane_f32::<2>(p.add(4), pairs);
            }
            pairs
        };
        [x, y]
    }
}

/// FCVTL: a conversion of the baseline. Arithmetic on f16 would not be, and is used nowhere.
#[inline]
#[target_feature(enable = "neon")]
fn widen_f16(bits: uint16x4_t) -> float32x4_t {
    vcvt_f32_f16(vreinterpret_f16_u16(bits))
}

/// A bf16 is the upper half of an f32.
#[inline]
#[target_feature(enable = "neon")]
fn widen_bf16(bits: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(bits)))
}

macro_rules! element_of_16_bits {
    ($t:ty, $widen:ident) => {
        impl Element for $t {
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn load4(p: *const $t) -> float32x4_t {
                // SAFETY: the caller's duty.
                $widen(unsafe { vld1_u16(p.cast()) })
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn load_n(p: *const $t, n: usize) -> float32x4_t {
                let p = p.cast::<u16>();
                // SAFETY: lane `i` is loaded only if `i < n`.
                $widen(unsafe {
                    let mut x = vld1_lane_u16::<0>(p, vdup_n_u16(0));
                    if n > 1 {
                        x = vld1_lane_u16::<1>(p.add(1), x);
                    }
                    if n > 2 {
                        x = vld1_lane_u16::<2>(p.add(2), x);
                    }
                    x
                })
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn load4_pairs(p: *const $t) -> [float32x4_t; 2] {
                // SAFETY: the caller's duty.
                let uint16x4x2_t(x, y) = unsafe { vld2_u16(p.cast()) };
                [$widen(x), $widen(y)]
            }

            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn load_n_pairs(p: *const $t, n: usize) -> [float32x4_t; 2] {
                let (p, zero) = (p.cast::<u16>(), vdup_n_u16(0));
                // SAFETY: pair `i` is loaded only if `i < n`.
                let uint16x4x2_t(x, y) = unsafe {
                    let mut pairs = vld2_lane_u16::<0>(p, uint16x4x2_t(zero, zero));
                    if n > 1 {
                        pairs = vld2_lane_u16::<1>(p.add(2), pairs);
                    }
                    if n > 2 {
                        pairs = vld2_lane_u16::<2>(p.add(4), pairs);
                    }
                    pairs
                };
                [$widen(x), $widen(y)]
            }
        }
    };
}
element_of_16_bits!(f16, widen_f16);
element_of_16_bits!(bf16, widen_bf16);

/// Widens `n`, 1 to 4, elements.
///
/// # Safety
///
/// The `n` elements at `p` are readable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn load<T: Element>(p: *const T, n: usize) -> float32x4_t {
    // SAFETY: the caller's duty.
    unsafe { if n >= LANES { T::load4(p) } else { T::load_n(p, n) } }
}

/// Stores lanes `0..n`, `n` from 1 to 4.
///
/// # Safety
///
/// The `n` elements at `p` are writable.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn store_n(p: *mut f32, x: float32x4_t, n: usize) {
    // SAFETY: lane `i` is stored only if `i < n`.
    unsafe {
        if n >= LANES {
            return vst1q_f32(p, x);
        }
        vst1q_lane_f32::<0>(p, x);
        if n > 1 {
            vst1q_lane_f32::<1>(p.add(1), x);
        }
        if n > 2 {
            vst1q_lane_f32::<2>(p.add(2), x);
        }
    }
}

/// Stores `n`, 1 to 4, pairs interleaved.
///
/// # Safety
///
/// The `2 * n` elements at `p` are writable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store_n_interleaved(p: *mut f32, [x, y]: [float32x4_t; 2], n: usize) {
    let pairs = float32x4x2_t(x, y);
    // SAFETY: pair `i` is stored only if `i < n`.
    unsafe {
        if n >= LANES {
            return vst2q_f32(p, pairs);
        }
        vst2q_lane_f32::<0>(p, pairs);
        if n > 1 {
            vst2q_lane_f32::<1>(p.add(2), pairs);
        }
        if n > 2 {
            vst2q_lane_f32::<2>(p.add(4), pairs);
        }
    }
}

/// The pairs of a row that turn. Both elements of a pair are always loaded, turned and written together: LD2 takes
/// interleaved ones apart on the way, so that both pair styles are the same arithmetic.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    pub(super) count: usize,
    /// Where the first elements start.
    first: usize,
    /// Where the second elements start; `first + 1` if they are interleaved.
    second: usize,
    pub(super) interleaved: bool,
}

impl Pairs {
    /// Index in the row of the first and the second element of pair `i`.
    #[inline]
    pub(super) fn at<const INTERLEAVED: bool>(self, i: usize) -> (usize, usize) {
        let i = if INTERLEAVED { 2 * i } else { i };
        (self.first + i, self.second + i)
    }

    /// First and second elements of pairs `i..i + n` (`n` from 1 to 4) of the row at `row`, widened.
    ///
    /// # Safety
    ///
    /// - `row` points at a whole row for which [`Runs::new`] made these pairs, at least `i + n` of them.
    /// - `INTERLEAVED` is what the pairs are.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) unsafe fn load<T: Element, const INTERLEAVED: bool>(
        self,
        row: *const T,
        i: usize,
        n: usize,
    ) -> [float32x4_t; 2] {
        let (first, second) = self.at::<INTERLEAVED>(i);
        // SAFETY: the caller's duty.
        unsafe {
            match INTERLEAVED {
                true if n >= LANES => T::load4_pairs(row.add(first)),
                true => T::load_n_pairs(row.add(first), n),
                false => [load(row.add(first), n), load(row.add(second), n)],
            }
        }
    }

    /// [`Pairs::load`], rotated.
    ///
    /// # Safety
    ///
    /// As there; `row` comes from [`checked_row`] with the rotation that the pairs come from, and `i` is a multiple of 4.
    #[inline]
    #[target_feature(enable = "neon")]
    pub(super) unsafe fn turned<T: Element, const INTERLEAVED: bool>(
        self,
        row: Row<T>,
        i: usize,
        n: usize,
    ) -> [float32x4_t; 2] {
        // SAFETY: the caller's duty; angles are padded to a multiple of 16.
        unsafe {
            let pair = self.load::<T, INTERLEAVED>(row.data, i, n);
            turn(pair, vld1q_f32(row.cos.add(i)), vld1q_f32(row.sin.add(i)))
        }
    }
}

/// `x' = fma(x, cos, -(y * sin))`, `y' = fma(y, cos, x * sin)`: the only place where anything turns.
#[inline]
#[target_feature(enable = "neon")]
fn turn([x, y]: [float32x4_t; 2], cos: float32x4_t, sin: float32x4_t) -> [float32x4_t; 2] {
    [vfmaq_f32(vnegq_f32(vmulq_f32(y, sin)), x, cos), vfmaq_f32(vmulq_f32(x, sin), y, cos)]
}

/// How a row falls into runs: what passes through, and the pairs that turn.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    /// Start and end of what passes through; may be empty.
    pub(super) plain: [(usize, usize); 3],
    pub(super) pairs: Pairs,
}

impl Runs {
    #[inline]
    pub(super) fn new(rotation: Option<&Rotation<'_>>, dim: usize) -> Self {
        let Some(turn) = rotation.map(|r| r.turn) else {
            let pairs = Pairs { count: 0, first: 0, second: 0, interleaved: false };
            return Runs { plain: [(0, dim), (dim, dim), (dim, dim)], pairs };
        };
        assert!(turn.pairs >= 1 && turn.end() <= dim, "rotated elements leave the row");
        let (first, count) = (turn.offset, turn.pairs);
        match turn.style {
            PairStyle::Interleaved => {
                let pairs = Pairs { count, first, second: first + 1, interleaved: true };
                Runs { plain: [(0, first), (first + 2 * count, dim), (dim, dim)], pairs }
            }
            _ => {
                assert!(count <= turn.distance, "half-style pairs overlap");
                let second = first + turn.distance;
                let pairs = Pairs { count, first, second, interleaved: false };
                Runs { plain: [(0, first), (first + count, second), (second + count, dim)], pairs }
            }
        }
    }
}

/// A row and its angles.
#[derive(Clone, Copy)]
pub(super) struct Row<T> {
    pub(super) data: *const T,
    cos: *const f32,
    sin: *const f32,
}

/// Row `r` with its length checked, and its padded angles (dangling without a rotation).
#[inline]
pub(super) fn checked_row<T>(data: &[T], rows: &Rows<'_>, rotation: Option<&Rotation<'_>>, r: usize) -> Row<T> {
    let data = data[rows.at[r]..][..rows.dim].as_ptr();
    match rotation {
        None => Row { data, cos: core::ptr::dangling(), sin: core::ptr::dangling() },
        Some(Rotation { turn, angles }) => {
            let padded = rotile_core::rotary::padded(turn.pairs);
            let cos = angles.cos[angles.at[r]..][..padded].as_ptr();
            let sin = angles.sin[angles.at[r]..][..padded].as_ptr();
            Row { data, cos, sin }
        }
    }
}

/// Runs a block for the vectors of `from..to`, starting at `at`: `n` is 4 but for the last. A macro, for a closure with two
/// callers is not sure to be inlined, and whole vectors shall meet no branch and accumulators stay in registers.
macro_rules! for_each_vector {
    ($from:expr, $to:expr, |$at:ident, $n:ident| $block:block) => {{
        let (mut at, to) = ($from, $to);
        while at + crate::neon::rows::LANES <= to {
            let ($at, $n) = (at, crate::neon::rows::LANES);
            $block
            at += crate::neon::rows::LANES;
        }
        if at < to {
            let ($at, $n) = (at, to - at);
            $block
        }
    }};
}
pub(super) use for_each_vector;

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

/// See [`rotile_core::kernel::Kernels::load`].
#[target_feature(enable = "neon")]
pub(super) fn load_neon(
    rows: Rows<'_>,
    rotation: Option<Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    by_type!(rows.data, load_rows, rows, rotation.as_ref(), scale, out, out_stride)
}

#[target_feature(enable = "neon")]
fn load_rows<T: Element>(
    data: &[T],
    rows: Rows<'_>,
    rotation: Option<&Rotation<'_>>,
    scale: f32,
    out: &mut [f32],
    out_stride: usize,
) {
    let Runs { plain, pairs } = Runs::new(rotation, rows.dim);
    for r in 0..rows.at.len() {
        let row = checked_row(data, &rows, rotation, r);
        let out = out[r * out_stride..][..rows.dim].as_mut_ptr();
        for (from, to) in plain {
            for_each_vector!(from, to, |at, n| {
                // SAFETY: the row and `out` have `dim` elements, and runs end there.
                unsafe { store_n(out.add(at), vmulq_n_f32(load(row.data.add(at), n), scale), n) };
            });
        }
        for_each_vector!(0, pairs.count, |i, n| {
            // SAFETY: as above; `checked_row` checked the angles.
            unsafe {
                if pairs.interleaved {
                    let [x, y] = pairs.turned::<T, true>(row, i, n);
                    let scaled = [vmulq_n_f32(x, scale), vmulq_n_f32(y, scale)];
                    store_n_interleaved(out.add(pairs.at::<true>(i).0), scaled, n);
                } else {
                    let [x, y] = pairs.turned::<T, false>(row, i, n);
                    let (first, second) = pairs.at::<false>(i);
                    store_n(out.add(first), vmulq_n_f32(x, scale), n);
                    store_n(out.add(second), vmulq_n_f32(y, scale), n);
                }
            }
        });
    }
}

/// See [`rotile_core::kernel::Kernels::store`].
#[target_feature(enable = "neon")]
pub(super) fn store_neon(src: &[f32], factor: f32, dst: SliceMut<'_>) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: `at` and the `n` lanes from it on are in `src`.
    let x = |at: usize, n: usize| unsafe { vmulq_n_f32(load(src.as_ptr().add(at), n), factor) };
    match dst {
        SliceMut::F32(dst) => {
            let dst = dst.as_mut_ptr();
            // SAFETY: `dst` is as long as `src`.
            for_each_vector!(0, src.len(), |at, n| { unsafe { store_n(dst.add(at), x(at, n), n) } });
        }
        SliceMut::F16(dst) => {
            let dst = dst.as_mut_ptr().cast::<u16>();
            for_each_vector!(0, src.len(), |at, n| {
                let bits = vreinterpret_u16_f16(vcvt_f16_f32(x(at, n)));
                // SAFETY: `dst` is as long as `src`, and any bits are an f16.
                unsafe { store_n_bits(dst.add(at), bits, n) };
            });
        }
        SliceMut::Bf16(dst) => {
            let dst = dst.as_mut_ptr().cast::<u16>();
            // SAFETY: `dst` is as long as `src`, and any bits are a bf16.
            for_each_vector!(0, src.len(), |at, n| { unsafe { store_n_bits(dst.add(at), narrow_bf16(x(at, n)), n) } });
        }
        other => unreachable!("no kernel for {}", other.dtype()),
    }
}

/// Stores lanes `0..n`, `n` from 1 to 4.
///
/// # Safety
///
/// The `n` elements at `p` are writable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store_n_bits(p: *mut u16, x: uint16x4_t, n: usize) {
    // SAFETY: lane `i` is stored only if `i < n`.
    unsafe {
        if n >= LANES {
            return vst1_u16(p, x);
        }
        vst1_lane_u16::<0>(p, x);
        if n > 1 {
            vst1_lane_u16::<1>(p.add(1), x);
        }
        if n > 2 {
            vst1_lane_u16::<2>(p.add(2), x);
        }
    }
}

/// Rounds to nearest even; NaN becomes a quiet NaN. In integers: BFCVTN is not in the baseline.
#[inline]
#[target_feature(enable = "neon")]
fn narrow_bf16(x: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(x);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
    vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
}

/// See [`rotile_core::kernel::Kernels::angles`].
#[target_feature(enable = "neon")]
pub(super) fn angles_neon(
    base_cos: &[f64],
    base_sin: &[f64],
    fine_cos: &[f64],
    fine_sin: &[f64],
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let len = check_angles([base_cos, base_sin], [fine_cos, fine_sin], cos, sin);
    // cos and sin of two pairs, in f64.
    let two = |at: usize| {
        // SAFETY: all four have `len` elements, and `at + 2 <= len`.
        let of = |s: &[f64]| unsafe { vld1q_f64(s.as_ptr().add(at)) };
        let (bc, bs, fc, fs) = (of(base_cos), of(base_sin), of(fine_cos), of(fine_sin));
        (vfmsq_f64(vmulq_f64(bc, fc), bs, fs), vfmaq_f64(vmulq_f64(bc, fs), bs, fc))
    };
    for at in (0..len).step_by(LANES) {
        let ((c0, s0), (c1, s1)) = (two(at), two(at + 2));
        // SAFETY: both have `len` elements, a multiple of 4.
        unsafe {
            vst1q_f32(cos.as_mut_ptr().add(at), vcvt_high_f32_f64(vcvt_f32_f64(c0), c1));
            vst1q_f32(sin.as_mut_ptr().add(at), vcvt_high_f32_f64(vcvt_f32_f64(s0), s1));
        }
    }
}

/// See [`rotile_core::kernel::Kernels::prefetch`].
#[inline]
pub(super) fn prefetch_neon(start: *const u8, bytes: usize) {
    const LINE: usize = 64;
    let end = start.wrapping_add(bytes);
    let mut line = start.wrapping_sub(start.addr() % LINE);
    while line < end {
        // SAFETY: PRFM never faults, whatever the address.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
        line = line.wrapping_add(LINE);
    }
}

/// Asks for `elements` elements from `from` on of row `r`, if there is such a row.
#[inline]
pub(super) fn prefetch(ahead: Option<&Rows<'_>>, r: usize, from: usize, elements: usize) {
    let Some(rows) = ahead else { return };
    let Some(&at) = rows.at.get(r) else { return };
    let elements = elements.min(rows.dim.saturating_sub(from));
    prefetch_neon(rows.data.address(at + from), elements * rows.data.dtype().size());
}
