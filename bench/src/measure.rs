//! Timing: lanes in turn, so that a machine whose speed drifts treats them alike; and the peak they are held against.

use std::hint::black_box;
use std::time::Instant;

/// Times of lanes that were run in turn.
#[derive(Debug)]
pub struct Paired {
    /// Sorted seconds of each lane.
    pub seconds: Vec<Vec<f64>>,
}

impl Paired {
    /// The fastest run of a lane.
    pub fn best(&self, lane: usize) -> f64 {
        self.seconds[lane][0]
    }

    /// The median run of a lane.
    pub fn median(&self, lane: usize) -> f64 {
        self.seconds[lane][self.seconds[lane].len() / 2]
    }
}

/// Runs the lanes in turn, A B A B ..., after one run of each that is not counted.
pub fn paired(repeats: usize, lanes: &mut [&mut dyn FnMut()]) -> Paired {
    lanes.iter_mut().for_each(|lane| lane());
    let mut seconds = vec![Vec::new(); lanes.len()];
    for _ in 0..repeats {
        for (lane, seconds) in lanes.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            lane();
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    seconds.iter_mut().for_each(|s| s.sort_by(f64::total_cmp));
    Paired { seconds }
}

/// FLOP/s of a loop of independent fused multiply-adds on the widest vectors of the tier: best and median of some.
pub fn fma_peak(tier: rotile::TierName) -> Option<(f64, f64)> {
    const STEPS: usize = 200_000;
    let mut rates: Vec<f64> = (0..21)
        .filter_map(|_| {
            let start = Instant::now();
            let flops = fma_loop(tier, STEPS)?;
            Some(flops / start.elapsed().as_secs_f64())
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    Some((*rates.last()?, rates[rates.len() / 2]))
}

#[cfg(target_arch = "x86_64")]
fn fma_loop(tier: rotile::TierName, steps: usize) -> Option<f64> {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps, _mm512_fmadd_ps, _mm512_set1_ps};

    #[target_feature(enable = "avx2,fma")]
    fn avx2(steps: usize) -> f64 {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
        let mut acc = [_mm256_set1_ps(1.0); 12];
        for _ in 0..steps {
            for x in &mut acc {
                *x = _mm256_fmadd_ps(*x, a, b);
            }
        }
        black_box(acc);
        (steps * 12 * 16) as f64
    }

    #[target_feature(enable = "avx512f")]
    fn avx512(steps: usize) -> f64 {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
        let mut acc = [_mm512_set1_ps(1.0); 12];
        for _ in 0..steps {
            for x in &mut acc {
                *x = _mm512_fmadd_ps(*x, a, b);
            }
        }
        black_box(acc);
        (steps * 12 * 32) as f64
    }

    match tier {
        // SAFETY: the features were just detected.
        rotile::TierName::Avx2 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") => unsafe {
            Some(avx2(steps))
        },
        // SAFETY: as above.
        rotile::TierName::Avx512 if is_x86_feature_detected!("avx512f") => unsafe { Some(avx512(steps)) },
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fma_loop(_tier: rotile::TierName, _steps: usize) -> Option<f64> {
    None
}
