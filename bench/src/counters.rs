//! Hardware counters, through the perf events of Linux where it offers them.

/// Misses of one call, the least of some repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misses {
    /// Loads that missed the L1 data cache.
    pub l1_loads: u64,
    /// Loads that missed the last level, where that is counted.
    pub ll_loads: Option<u64>,
}

/// Counts the misses of `run` in user mode on this thread.
///
/// # Errors
///
/// Why the system offers no such counter.
#[cfg(target_os = "linux")]
pub fn count(repeats: usize, run: &mut dyn FnMut()) -> Result<Misses, String> {
    use perf_event::events::{Cache, CacheId, CacheOp, CacheResult};
    use perf_event::{Builder, Counter};

    let open =
        |which: CacheId| Builder::new(Cache { which, operation: CacheOp::READ, result: CacheResult::MISS }).build();
    let mut l1 = open(CacheId::L1D).map_err(|error| {
        let paranoid = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
        // ENOENT: the processor, or the virtual machine, has no such event.
        let why = match error.raw_os_error() {
            Some(2) => "the kernel has no such event, as in a virtual machine without counters",
            Some(1 | 13) => "not permitted; lower perf_event_paranoid or run as root",
            _ => "perf_event_open failed",
        };
        format!("{why} ({error}; perf_event_paranoid {})", paranoid.trim())
    })?;
    let mut ll = open(CacheId::LL).ok();
    let mut least = |counter: &mut Counter| -> std::io::Result<u64> {
        let mut least = u64::MAX;
        for _ in 0..repeats.max(1) {
            counter.reset()?;
            counter.enable()?;
            run();
            counter.disable()?;
            least = least.min(counter.read()?);
        }
        Ok(least)
    };
    let l1_loads = least(&mut l1).map_err(|error| format!("reading the counter failed: {error}"))?;
    Ok(Misses { l1_loads, ll_loads: ll.as_mut().and_then(|counter| least(counter).ok()) })
}

/// Other systems have no such interface.
///
/// # Errors
///
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn count(_repeats: usize, _run: &mut dyn FnMut()) -> Result<Misses, String> {
    Err("perf events are Linux's".into())
}
