//! Caches of devices, for the simulator: sizes, ways and lines, each with its source.

use crate::machine::{self, Cache};

/// The caches of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Its name on the command line.
    pub name: &'static str,
    /// The data cache next to the core.
    pub d1: Cache,
    /// Bytes of the second level, which plans heed.
    pub l2_bytes: usize,
    /// The last cache before DRAM.
    pub ll: Cache,
    /// Where the figures are from.
    pub source: &'static str,
}

const fn cache(level: usize, kib: usize, ways: usize) -> Cache {
    Cache { level, bytes: kib << 10, ways, line: 64 }
}

const fn device(name: &'static str, d1: Cache, l2_kib: usize, ll: Cache, source: &'static str) -> Profile {
    Profile { name, d1, l2_bytes: l2_kib << 10, ll, source }
}

/// The devices.
pub const DEVICES: [Profile; 5] = [
    device(
        "cortex-a53",
        cache(1, 32, 4),
        512,
        cache(2, 512, 16),
        "Arm Cortex-A53 MPCore Technical Reference Manual (DDI 0500), chapters 6 and 7: L1 data cache 8 to 64 KB, 4 ways, \
         L2 128 KB to 2 MB, 16 ways, lines of 64 bytes; 32 KB and 512 KB as in Broadcom's BCM2837; no L3",
    ),
    device(
        "cortex-a76",
        cache(1, 64, 4),
        256,
        cache(2, 256, 8),
        "Arm Cortex-A76 Core Technical Reference Manual (100798), L1 and L2 memory systems: L1 data cache 64 KB, 4 ways, \
         L2 128 to 512 KB, 8 ways, lines of 64 bytes; here 256 KB and a cluster without L3",
    ),
    device(
        "raspberry-pi-5",
        cache(1, 64, 4),
        512,
        cache(3, 2048, 16),
        "Raspberry Pi documentation, BCM2712: four Cortex-A76 with 512 KB L2 each and 2 MB of shared L3; ways from the \
         Arm Cortex-A76 (100798) and DynamIQ Shared Unit (100453) Technical Reference Manuals",
    ),
    device(
        "skylake",
        cache(1, 32, 8),
        256,
        cache(3, 8192, 16),
        "Intel 64 and IA-32 Architectures Optimization Reference Manual (248966), cache parameters of Skylake client: L1 \
         data cache 32 KB, 8 ways, L2 256 KB, 4 ways, L3 2 MB for each core, up to 16 ways; four cores",
    ),
    device(
        "zen3",
        cache(1, 32, 8),
        512,
        cache(3, 32768, 16),
        "AMD Software Optimization Guide for AMD Family 19h Processors (56665), cache and memory subsystem: L1 data \
         cache 32 KB, 8 ways, L2 512 KB, 8 ways, L3 32 MB for eight cores, 16 ways, lines of 64 bytes",
    ),
];

/// What `ci/counts` counts with: fixed whatever the machine, small enough that misses are many.
pub const COUNTS: Profile =
    device("counts", cache(1, 32, 8), 512, cache(2, 1024, 16), "a common 32 KB L1 and a 1 MB last level");

impl Profile {
    /// The profile of that name.
    ///
    /// # Errors
    ///
    /// A message with the names there are, or that this machine does not describe its caches.
    pub fn named(name: &str) -> Result<Profile, String> {
        if name == "host" {
            return host();
        }
        DEVICES.into_iter().find(|profile| profile.name == name).ok_or_else(|| {
            let names: Vec<&str> = DEVICES.iter().map(|profile| profile.name).collect();
            format!("there is no profile {name:?}: give {} or host", names.join(", "))
        })
    }

    /// D1 and LL, for a table.
    pub fn sizes(&self) -> String {
        let text = |cache: &Cache| format!("{} KiB, {} ways, line {}", cache.bytes >> 10, cache.ways, cache.line);
        format!("D1 {}; LL (L{}) {}", text(&self.d1), self.ll.level, text(&self.ll))
    }
}

/// This machine's own.
fn host() -> Result<Profile, String> {
    let caches = machine::caches();
    let (Some(&d1), Some(&ll)) = (caches.first(), caches.last()) else {
        return Err("this system does not describe its caches in /sys: give another profile than host".into());
    };
    let l2_bytes = caches.get(1).map_or(0, |cache| cache.bytes);
    Ok(Profile {
        name: "host",
        d1: simulable(d1),
        l2_bytes,
        ll: simulable(ll),
        source: "this machine, /sys/devices/system/cpu; a number of sets that is no power of two is rounded down",
    })
}

/// The simulator wants a power of two of sets.
fn simulable(cache: Cache) -> Cache {
    let sets = (cache.bytes / (cache.ways.max(1) * cache.line)).max(1);
    Cache { bytes: (1 << sets.ilog2()) * cache.ways.max(1) * cache.line, ways: cache.ways.max(1), ..cache }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_can_be_simulated() {
        for profile in DEVICES {
            assert_eq!(Profile::named(profile.name), Ok(profile.clone()));
            for cache in [profile.d1, profile.ll] {
                assert_eq!(simulable(cache), cache, "{}", profile.name);
            }
        }
        let odd = Cache { level: 3, bytes: 48 << 20, ways: 12, line: 64 };
        assert_eq!(simulable(odd).bytes, 48 << 20);
        assert_eq!(simulable(Cache { bytes: 36 << 20, ..odd }).bytes, 24 << 20);
        assert!(Profile::named("cortex-m0").unwrap_err().contains("raspberry-pi-5"));
    }
}
