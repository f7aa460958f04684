//! `counts`: what `ci/counts` compares, one call per line: name, instructions, D1 misses.

use crate::cachegrind::{Job, count_all, missing};
use crate::cases::Case;
use crate::measure::CacheState;
use crate::profiles::COUNTS;

/// Calls of every kind, small enough for valgrind. The pairs fused and pre-rotated give the cost of rotating in the tile.
const CALLS: [&str; 12] = [
    "prefill:32/8x128:128:f32:fused",
    "prefill:32/8x128:128:f32:pre-rotated",
    "prefill:14/2x64:256:f32:fused",
    "prefill:14/2x64:256:f32:pre-rotated",
    "prefill:32/8x128:128:f16:fused",
    "decode:32/8x128:1024:f32:fused",
    "decode:32/8x128:1024:f16:fused",
    "decode-raw:32/8x128:1024:f32:fused",
    "append:32/8x128:256:f32:fused",
    "append:32/8x128:256:f16:fused",
    "rotate:32/8x128:128:f32:separate",
    "prefill:4/1x256:128:f32:fused",
];

/// Counts and prints.
///
/// # Errors
///
/// What valgrind reports, or that it is missing.
pub fn counts() -> Result<(), String> {
    if let Some(why) = missing() {
        return Err(why);
    }
    let job = |call: &&str| Job {
        case: call.parse::<Case>().expect("a call of this list"),
        profile: COUNTS,
        state: CacheState::Cold,
    };
    let jobs: Vec<Job> = CALLS.iter().map(job).collect();
    let found = count_all(&jobs, |done| eprintln!("counted {done} of {}", CALLS.len()))?;
    for (call, counts) in CALLS.iter().zip(found) {
        println!("{call}\t{}\t{}", counts.instructions, counts.d1());
    }
    Ok(())
}
