//! What needs an operating system: cache sizes, the environment, threads, memory.

use crate::{Batch, Capabilities, Error, Executor, Plan, TierName};
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// Runs tasks on scoped threads, taken on demand: a slow core takes fewer. Threads live for one phase; with one thread
/// nothing is spawned.
#[derive(Debug, Default)]
pub struct Threads {
    workspaces: Vec<Vec<u8>>,
}

impl Threads {
    /// `threads` threads, the calling one among them; 0 counts as 1.
    pub fn new(threads: usize) -> Self {
        Threads { workspaces: vec![Vec::new(); threads.max(1)] }
    }
}

// SAFETY: an index is handed out by one atomic increment, so once; the scope joins every thread before `for_each`
// returns; every thread has a workspace of its own.
unsafe impl Executor for Threads {
    fn prepare(&mut self, workspace_len: usize) -> Result<(), Error> {
        for workspace in &mut self.workspaces {
            if workspace.len() < workspace_len {
                workspace.resize(workspace_len, 0);
            }
        }
        Ok(())
    }

    fn for_each(&mut self, tasks: usize, body: &(dyn Fn(usize, &mut [u8]) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = |workspace: &mut Vec<u8>| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                body(task, workspace);
            }
        };
        let threads = self.workspaces.len().min(tasks.max(1));
        let (own, others) = self.workspaces[..threads].split_first_mut().expect("at least one");
        std::thread::scope(|scope| {
            for workspace in others {
                scope.spawn(|| work(workspace));
            }
            work(own);
        });
    }
}

/// Keeps scratch, workspaces and a number of threads from call to call.
#[derive(Debug, Default)]
pub struct Runner {
    threads: Threads,
    scratch: Vec<u8>,
}

impl Runner {
    /// Runs on `threads` threads, the calling one among them.
    pub fn new(threads: usize) -> Self {
        Runner { threads: Threads::new(threads), scratch: Vec::new() }
    }

    /// Prepares and runs one step.
    ///
    /// # Errors
    ///
    /// As [`Plan::prepare`]; nothing has been written then.
    pub fn run(&mut self, plan: &Plan, batch: &mut Batch<'_>) -> Result<(), Error> {
        let need = plan.scratch_len(batch.sequences);
        if self.scratch.len() < need {
            self.scratch.try_reserve_exact(need - self.scratch.len()).map_err(|_| Error::TooShort {
                what: "memory for scratch".into(),
                need,
                have: self.scratch.len(),
            })?;
            self.scratch.resize(need, 0);
        }
        plan.prepare(batch, &mut self.scratch)?.run_on(&mut self.threads)
    }
}
