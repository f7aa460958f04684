//! The AVX-512 weighted sum, 12 rows by 32 value columns: acc = acc * factor + P V, values in column panels.

use super::{MR, NV, SUM_RUN};
use core::arch::asm;
use core::arch::x86_64::*;
use rotile_core::kernel::{WeightedSum, run_end};

/// Keys per unrolled step.
const UNROLL: usize = 4;
/// Row pointers: each reaches three rows, at 0, 1 and 2 strides, as addresses can say.
const QUARTERS: usize = 4;

/// The factors of every run but the first.
static ONES: [f32; MR] = [1.0; MR];

/// See [`rotile_core::kernel::Kernels::weighted_sum`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn weighted_sum_12x32_avx512(w: WeightedSum<'_>) {
    let panels = w.check(MR, NV);
    for c in 0..panels {
        // SAFETY: row `r` of `p` has `to` elements, the panel `tile_keys` rows of 32, and row `r` of `acc` 32 columns from
        // `c * NV` on; there are MR factors.
        unsafe {
            let v = w.v.as_ptr().add(c * w.tile_keys * NV);
            let acc = w.acc.as_mut_ptr().add(c * NV);
            tile(w.p.as_ptr(), w.p_stride, v, w.from, w.to, w.factors.as_ptr(), w.fresh, acc, w.acc_stride);
        }
    }
}

/// One tile: keys `from..to`, run by run.
///
/// # Safety
///
/// - `to` elements are readable at each of `p + r * p_stride`, `to` rows of 32 at `v`, 12 at `factors`.
/// - 32 elements are readable and writable at each of `acc + r * acc_stride`, `r < 12`.
#[allow(clippy::too_many_arguments)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn tile(
    p: *const f32,
    p_stride: usize,
    v: *const f32,
    from: usize,
    to: usize,
    mut factors: *const f32,
    mut fresh: bool,
    acc: *mut f32,
    acc_stride: usize,
) {
    let mut rows = [p.wrapping_add(from); QUARTERS];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = row.wrapping_add(i * (MR / QUARTERS) * p_stride);
    }
    let [mut a, mut b, mut c, mut d] = rows;
    // SAFETY: no instruction. That the four are independent keeps the compiler from deriving all row addresses from one
    // inside the loop: it then loads the weights of whole steps ahead of their use, and spills them.
    #[allow(clippy::pointers_in_nomem_asm_block, reason = "nothing is read through them there")]
    unsafe {
        asm!("/* {} {} {} {} */", inout(reg) a, inout(reg) b, inout(reg) c, inout(reg) d,
            options(pure, nomem, nostack, preserves_flags));
    }
    let mut rows = [a, b, c, d];
    let mut j = from;
    loop {
        let end = run_end(j, to, SUM_RUN);
        let mut sum = [[_mm512_setzero_ps(); 2]; MR];
        while j + UNROLL <= end {
            for u in 0..UNROLL {
                // SAFETY: `j + u < to`.
                unsafe { step(&mut sum, &rows, u, p_stride, v.add((j + u) * NV)) };
            }
            j += UNROLL;
            for row in &mut rows {
                *row = row.wrapping_add(UNROLL);
            }
        }
        while j < end {
            // SAFETY: `j < to`.
            unsafe { step(&mut sum, &rows, 0, p_stride, v.add(j * NV)) };
            j += 1;
            for row in &mut rows {
                *row = row.wrapping_add(1);
            }
        }
        for (r, sum) in sum.into_iter().enumerate() {
            for (c, sum) in sum.into_iter().enumerate() {
                // SAFETY: the caller's duty.
                unsafe {
                    let (to, factor) = (acc.add(r * acc_stride + 16 * c), _mm512_set1_ps(*factors.add(r)));
                    let sum = if fresh { sum } else { _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, sum) };
                    _mm512_storeu_ps(to, sum);
                }
            }
        }
        fresh = false;
        if j >= to {
            break;
        }
        factors = ONES.as_ptr();
    }
}

/// One key's weights times its values.
///
/// # Safety
///
/// An element is readable at `u` of each of the 12 rows, three from each of `rows` on, and 32 at `v`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn step(sum: &mut [[__m512; 2]; MR], rows: &[*const f32; QUARTERS], u: usize, p_stride: usize, v: *const f32) {
    // SAFETY: the caller's duty.
    unsafe {
        let (v0, v1) = (_mm512_loadu_ps(v), _mm512_loadu_ps(v.add(16)));
        for (r, sum) in sum.iter_mut().enumerate() {
            let row = rows[r / (MR / QUARTERS)].add(r % (MR / QUARTERS) * p_stride + u);
            let x = _mm512_set1_ps(*row);
            sum[0] = _mm512_fmadd_ps(x, v0, sum[0]);
            sum[1] = _mm512_fmadd_ps(x, v1, sum[1]);
        }
    }
}
