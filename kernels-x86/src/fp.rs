//! MXCSR around a task.

use core::arch::asm;
use rotile_core::kernel::FpControl;

/// Round to nearest even, no flush-to-zero, no denormals-are-zero, all exceptions masked.
const DEFAULT: u32 = 0x1F80;

/// Saves, sets and restores MXCSR; for every tier on x86-64, the portable one included.
pub static FP_CONTROL: FpControl = FpControl { enter, leave };

fn enter() -> u64 {
    let mut saved = 0u32;
    // SAFETY: stores MXCSR to a local.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut saved, options(nostack, preserves_flags)) };
    set(DEFAULT);
    u64::from(saved)
}

fn leave(saved: u64) {
    set(saved as u32);
}

fn set(value: u32) {
    // SAFETY: the value is the default or one that MXCSR held, so it sets no reserved bit.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, preserves_flags, readonly)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_inside_and_the_hosts_own_after() {
        // Flush-to-zero, denormals-are-zero, round up.
        let odd = u64::from(DEFAULT | 1 << 15 | 1 << 6 | 2 << 13);
        let before = enter();
        leave(odd);
        assert_eq!(enter(), odd);
        let inside = enter();
        leave(odd);
        let after = enter();
        leave(before);
        assert_eq!(inside, u64::from(DEFAULT));
        assert_eq!(after, odd);
    }
}
