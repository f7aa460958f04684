//! FPCR around a task. No arithmetic lives here.

use core::arch::asm;
use rotile_core::kernel::FpControl;

/// Round to nearest even, no flushing of any width, IEEE half precision, no trap, no alternative behaviour.
const DEFAULT: u64 = 0;

/// Saves, sets and restores FPCR; for every tier on aarch64, the portable one included.
pub static FP_CONTROL: FpControl = FpControl { enter, leave };

fn enter() -> u64 {
    let saved = get();
    // A write can cost a pipeline flush, and hosts with an odd state are rare.
    if saved != DEFAULT {
        set(DEFAULT);
    }
    saved
}

fn leave(saved: u64) {
    if saved != DEFAULT {
        set(saved);
    }
}

fn get() -> u64 {
    let value;
    // SAFETY: reads a register that every exception level may read.
    unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) };
    value
}

fn set(value: u64) {
    // SAFETY: the value is the default or one that FPCR held.
    unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::hint::black_box;

    const FLUSH_TO_ZERO: u64 = 1 << 24;
    const ROUND_UP: u64 = 1 << 22;

    #[test]
    fn default_inside_and_the_hosts_own_after() {
        let odd = FLUSH_TO_ZERO | ROUND_UP;
        // The outer `black_box` keeps the operation where it stands, between two writes of FPCR.
        let sum = || black_box(black_box(1.0f32) + black_box(1e-10f32));
        let denormal = || black_box(black_box(1e-38f32) * black_box(0.5f32));
        let before = get();
        set(odd);
        let (odd_sum, odd_denormal) = (sum(), denormal());
        let saved = enter();
        let (state_inside, sum_inside, denormal_inside) = (get(), sum(), denormal());
        leave(saved);
        let after = get();
        set(before);
        assert_eq!((saved, state_inside, after), (odd, DEFAULT, odd));
        // The state is more than a number: the arithmetic follows it.
        assert!(odd_sum > 1.0 && odd_denormal == 0.0, "FPCR changes nothing here: the test proves nothing");
        assert!(sum_inside == 1.0 && denormal_inside != 0.0);
    }

    #[test]
    fn a_default_host_stays_default() {
        let saved = enter();
        leave(saved);
        assert_eq!((saved, get()), (DEFAULT, DEFAULT));
    }
}
