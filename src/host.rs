//! What needs an operating system: cache sizes and the environment.

use crate::{Capabilities, Error, TierName};

/// Adds cache sizes and threads, and applies `ROTILE_TIER`.
pub(crate) fn hints(mut capabilities: Capabilities) -> Result<Capabilities, Error> {
    capabilities.l1_bytes = cache_bytes(1);
    capabilities.l2_bytes = cache_bytes(2);
    capabilities.threads = std::thread::available_parallelism().map_or(1, usize::from);
    match std::env::var_os("ROTILE_TIER") {
        None => Ok(capabilities),
        Some(name) => {
            let name = name.to_string_lossy();
            let tier = TierName::from_name(&name).ok_or_else(|| Error::unknown_tier(&name))?;
            capabilities.up_to(tier)
        }
    }
}

/// Bytes of the data cache of a level as the kernel reports it, or 0: containers, other systems and some Arm boards
/// report nothing, and plans then use their defaults.
fn cache_bytes(level: u32) -> usize {
    let read = |index: usize, file: &str| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
    };
    (0..8)
        .find_map(|index| {
            let found =
                read(index, "level")?.trim() == level.to_string() && read(index, "type")?.trim() != "Instruction";
            let kib: usize = read(index, "size")?.trim().strip_suffix('K')?.parse().ok()?;
            found.then_some(kib << 10)
        })
        .unwrap_or(0)
}
