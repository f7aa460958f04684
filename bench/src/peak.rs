//! The limits of one core, measured: fused multiply-adds, and bytes read from each level of memory.

use crate::machine;
use crate::measure::{Repeats, State, Times, paired};
use rotile::TierName;
use std::hint::black_box;
use std::time::Instant;

/// A rate: of the fastest repeat, and of the median one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Of the fastest.
    pub best: f64,
    /// Of the median.
    pub median: f64,
}

impl Rate {
    /// `amount` per second.
    pub fn of(amount: f64, times: &Times) -> Rate {
        Rate { best: amount / times.best(), median: amount / times.median() }
    }
}

/// FLOP/s of a loop of independent fused multiply-adds on the widest vectors of the tier; none for the portable tier, which
/// has no vectors of its own.
pub fn fma_peak(tier: TierName) -> Option<Rate> {
    const STEPS: usize = 200_000;
    // A sixth of a second: a burst of noise on a shared machine is shorter.
    const REPEATS: usize = 401;
    let mut flops = 0.0;
    let seconds = (0..REPEATS)
        .map(|_| {
            let start = Instant::now();
            flops = fma_loop(tier, STEPS)?;
            Some(start.elapsed().as_secs_f64())
        })
        .collect::<Option<Vec<f64>>>()?;
    Some(Rate::of(flops, &Times::new(seconds)))
}

/// Reads memory with the tier's vectors, with and without prefetching: neither is the faster one everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    plain: fn(&[f32]) -> f32,
    ahead: fn(&[f32]) -> f32,
}

impl Reader {
    /// The reader of a tier that this CPU has.
    pub fn new(tier: TierName) -> Reader {
        let (plain, ahead) = readers(tier);
        Reader { plain, ahead }
    }

    /// Reads all of `data`.
    pub fn read(&self, data: &[f32]) {
        black_box((self.plain)(black_box(data)));
    }

    /// Reads all of `data`, prefetching.
    pub fn read_ahead(&self, data: &[f32]) {
        black_box((self.ahead)(black_box(data)));
    }
}

/// A level of memory and how fast one core reads from it.
#[derive(Clone, Debug)]
pub struct Bandwidth {
    /// `L1`, `L2`, `L3`, `DRAM`.
    pub level: String,
    /// Bytes of the buffer that was read.
    pub bytes: usize,
    /// Bytes per second.
    pub rate: Rate,
}

/// Reading bandwidth of every level, inner to outer: buffers of half an inner cache, a quarter of the outermost (which is
/// shared), and four times that for DRAM.
pub fn bandwidths(tier: TierName, repeats: Repeats, state: &mut State) -> Vec<Bandwidth> {
    let caches = machine::caches();
    let last = caches.len().saturating_sub(1);
    let mut levels: Vec<(String, usize)> = caches
        .iter()
        .enumerate()
        .map(|(i, cache)| (format!("L{}", cache.level), cache.bytes / if i == last && i > 0 { 4 } else { 2 }))
        .collect();
    levels.push(("DRAM".into(), 4 * machine::last_level_bytes()));
    let reader = Reader::new(tier);
    levels
        .into_iter()
        .map(|(level, bytes)| {
            let data = vec![1.0f32; bytes / 4];
            // A repeat reads at least 8 MB, so that the clock's own time does not count.
            let passes = (8usize << 20).div_ceil(bytes);
            let mut plain = || (0..passes).for_each(|_| reader.read(&data));
            let mut ahead = || (0..passes).for_each(|_| reader.read_ahead(&data));
            let times = paired(repeats, None, state, &mut [&mut plain, &mut ahead]);
            let faster = times.iter().min_by(|a, b| a.best().total_cmp(&b.best())).expect("two");
            Bandwidth { level, bytes, rate: Rate::of((passes * bytes) as f64, faster) }
        })
        .collect()
}

/// A plain loop and one that prefetches.
type Readers = (fn(&[f32]) -> f32, fn(&[f32]) -> f32);

/// Reads without vectors of a tier.
fn read_any(data: &[f32]) -> f32 {
    let mut sums = [0.0f32; 32];
    for chunk in data.chunks_exact(32) {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().sum()
}

#[cfg(target_arch = "x86_64")]
mod arch {
    use rotile::TierName;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// Declares a loop of fused multiply-adds and a reading loop for one vector type.
    macro_rules! loops {
        ($fma:ident, $read:ident, $features:literal, $lanes:literal, $set:ident, $zero:ident, $madd:ident, $load:ident, $or:ident) => {
            #[target_feature(enable = $features)]
            fn $fma(steps: usize) -> f64 {
                // Twelve chains cover four cycles of latency on up to three ports.
                let (a, b) = ($set(black_box(0.999)), $set(black_box(0.001)));
                let mut acc = [$set(1.0); 12];
                for _ in 0..steps {
                    for x in &mut acc {
                        *x = $madd(*x, a, b);
                    }
                }
                black_box(acc);
                (steps * 12 * 2 * $lanes) as f64
            }

            #[target_feature(enable = $features)]
            fn $read<const PREFETCH: bool>(data: &[f32]) -> f32 {
                // Sixteen vectors a turn; ORs in four chains, as nothing else may be the limit.
                const TURN: usize = 16 * $lanes;
                const AHEAD: usize = 256;
                let mut acc = [$zero(); 4];
                for chunk in data.chunks_exact(TURN) {
                    let at = chunk.as_ptr();
                    if PREFETCH {
                        for line in (0..TURN).step_by(16) {
                            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD + line).cast());
                        }
                    }
                    for i in 0..16 {
                        // SAFETY: a chunk holds sixteen vectors.
                        acc[i % 4] = $or(acc[i % 4], unsafe { $load(at.add(i * $lanes).cast()) });
                    }
                }
                black_box(acc);
                0.0
            }
        };
    }
    loops!(
        fma_avx2,
        read_avx2,
        "avx2,fma",
        8,
        _mm256_set1_ps,
        _mm256_setzero_si256,
        _mm256_fmadd_ps,
        _mm256_loadu_si256,
        _mm256_or_si256
    );
    loops!(
        fma_avx512,
        read_avx512,
        "avx512f",
        16,
        _mm512_set1_ps,
        _mm512_setzero_si512,
        _mm512_fmadd_ps,
        _mm512_loadu_si512,
        _mm512_or_si512
    );

    fn has(tier: TierName) -> bool {
        match tier {
            TierName::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            TierName::Avx512 => is_x86_feature_detected!("avx512f"),
            _ => false,
        }
    }

    pub(super) fn fma_loop(tier: TierName, steps: usize) -> Option<f64> {
        match tier {
            // SAFETY: the features were just detected.
            TierName::Avx2 if has(tier) => Some(unsafe { fma_avx2(steps) }),
            // SAFETY: as above.
            TierName::Avx512 if has(tier) => Some(unsafe { fma_avx512(steps) }),
            _ => None,
        }
    }

    pub(super) fn readers(tier: TierName) -> super::Readers {
        match tier {
            TierName::Avx2 if has(tier) => (
                // SAFETY: the features were just detected.
                |data| unsafe { read_avx2::<false>(data) },
                // SAFETY: as above.
                |data| unsafe { read_avx2::<true>(data) },
            ),
            TierName::Avx512 if has(tier) => (
                // SAFETY: as above.
                |data| unsafe { read_avx512::<false>(data) },
                // SAFETY: as above.
                |data| unsafe { read_avx512::<true>(data) },
            ),
            _ => (super::read_any, super::read_any),
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use rotile::TierName;
    use std::arch::aarch64::*;
    use std::hint::black_box;

    pub(super) fn fma_loop(tier: TierName, steps: usize) -> Option<f64> {
        if tier != TierName::Neon {
            return None;
        }
        // SAFETY: baseline aarch64 has NEON.
        unsafe {
            let (a, b) = (vdupq_n_f32(black_box(0.999)), vdupq_n_f32(black_box(0.001)));
            // Sixteen chains cover four cycles of latency on four ports.
            let mut acc = [vdupq_n_f32(1.0); 16];
            for _ in 0..steps {
                for x in &mut acc {
                    *x = vfmaq_f32(b, *x, a);
                }
            }
            black_box(acc);
        }
        Some((steps * 16 * 8) as f64)
    }

    // The compiler's own vectors are NEON here.
    pub(super) fn readers(_tier: TierName) -> super::Readers {
        (super::read_any, super::read_any)
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    use rotile::TierName;

    pub(super) fn fma_loop(_tier: TierName, _steps: usize) -> Option<f64> {
        None
    }

    pub(super) fn readers(_tier: TierName) -> super::Readers {
        (super::read_any, super::read_any)
    }
}

use arch::{fma_loop, readers};
