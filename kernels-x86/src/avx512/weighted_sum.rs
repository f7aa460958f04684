//! The AVX-512 weighted sum, 12 rows by 32 value columns: acc = acc * factor + P V, values in column panels.

use super::{MR, NV};
use crate::shared::span;
use core::arch::asm;
use core::arch::x86_64::*;
use rotile_core::kernel::{WeightedSum, run_end};

/// Keys per unrolled step.
const UNROLL: usize = 4;
/// Row pointers: each reaches three rows, at 0, 1 and 2 strides, as addresses can say.
const QUARTERS: usize = 4;

/// See [`rotile_core::kernel::Kernels::weighted_sum`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn weighted_sum_12x32_avx512(w: WeightedSum<'_>) {
    let panel = w.tile_keys.checked_mul(NV).expect("the tile reaches beyond the address space");
    let panels = w.v.len() / panel;
    assert!(w.from <= w.to && w.to <= w.tile_keys && w.factors.len() >= MR);
    assert!(w.p.len() >= span(MR, w.p_stride, w.to) && w.acc.len() >= span(MR, w.acc_stride, panels * NV));
    for c in 0..panels {
        let (mut from, mut factors) = (w.from, w.factors);
        loop {
            let to = run_end(from, w.to);
            // SAFETY: row `r` of `p` has `to` elements, the panel `tile_keys` rows of 32, and row `r` of `acc` 32
            // columns from `c * NV` on; there are MR factors.
            unsafe {
                let p = w.p.as_ptr().add(from);
                let v = w.v.as_ptr().add(c * panel + from * NV);
                let acc = w.acc.as_mut_ptr().add(c * NV);
                tile(p, w.p_stride, v, to - from, factors.as_ptr(), acc, w.acc_stride);
            }
            (from, factors) = (to, &[1.0; MR]);
            if from >= w.to {
                break;
            }
        }
    }
}

/// One run of keys of a tile.
///
/// # Safety
///
/// - `keys` elements are readable at each of `p + r * p_stride`, `keys` rows of 32 at `v`, 12 at `factors`.
/// - 32 elements are readable and writable at each of `acc + r * acc_stride`, `r < 12`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline(never)]
unsafe fn tile(
    p: *const f32,
    p_stride: usize,
    v: *const f32,
    keys: usize,
    factors: *const f32,
    acc: *mut f32,
    acc_stride: usize,
) {
    let mut sum = [[_mm512_setzero_ps(); 2]; MR];
    let mut rows = [p; QUARTERS];
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
    let mut j = 0;
    while j + UNROLL <= keys {
        for u in 0..UNROLL {
            // SAFETY: `j + u < keys`.
            unsafe { step(&mut sum, &rows, u, p_stride, v.add((j + u) * NV)) };
        }
        j += UNROLL;
        for row in &mut rows {
            *row = row.wrapping_add(UNROLL);
        }
    }
    while j < keys {
        // SAFETY: `j < keys`.
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
                let (row, factor) = (acc.add(r * acc_stride + 16 * c), _mm512_set1_ps(*factors.add(r)));
                _mm512_storeu_ps(row, _mm512_fmadd_ps(_mm512_loadu_ps(row), factor, sum));
            }
        }
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
