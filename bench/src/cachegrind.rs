//! Counts under valgrind: this program runs itself with one lane and the cache model of cachegrind (as callgrind
//! has it, since that one can be switched on for the call alone: setup is neither counted nor waited for).

use crate::cases::Case;
use crate::lanes::Lane;
use crate::measure::CacheState;
use crate::profiles::Profile;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// Events of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions.
    pub instructions: u64,
    /// Misses of the data cache next to the core, reading.
    pub d1_read: u64,
    /// Writing.
    pub d1_write: u64,
    /// Misses of the last cache, by data, reading.
    pub ll_read: u64,
    /// Writing.
    pub ll_write: u64,
}

impl Counts {
    /// Misses of the cache next to the core.
    pub fn d1(&self) -> u64 {
        self.d1_read + self.d1_write
    }

    /// Misses of the last cache.
    pub fn ll(&self) -> u64 {
        self.ll_read + self.ll_write
    }

    /// Reads what callgrind wrote.
    ///
    /// # Errors
    ///
    /// What is missing in it.
    pub fn parse(text: &str) -> Result<Counts, String> {
        let line = |key: &str| text.lines().rev().find_map(|line| line.strip_prefix(key));
        let names = line("events:").ok_or("callgrind's output has no line \"events:\"")?.split_whitespace();
        let totals =
            line("totals:").or_else(|| line("summary:")).ok_or("callgrind's output has no line \"totals:\"")?;
        // Trailing zeros are left out.
        let values: Vec<&str> = totals.split_whitespace().collect();
        let names: Vec<&str> = names.collect();
        let event = |name: &str| {
            let at =
                names.iter().position(|n| *n == name).ok_or(format!("callgrind counted no {name}, only {names:?}"))?;
            let value = values.get(at).unwrap_or(&"0");
            value.parse::<u64>().map_err(|e| format!("callgrind's {name} is {value:?}: {e}"))
        };
        Ok(Counts {
            instructions: event("Ir")?,
            d1_read: event("D1mr")?,
            d1_write: event("D1mw")?,
            ll_read: event("DLmr")?,
            ll_write: event("DLmw")?,
        })
    }
}

/// One run to make.
#[derive(Clone, Debug)]
pub struct Job {
    /// What runs.
    pub case: Case,
    /// On which caches.
    pub profile: Profile,
    /// Starting with what in them.
    pub state: CacheState,
}

/// Why there can be no counts here, if so.
pub fn missing() -> Option<String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Some("counts are of the AVX2 tier, under valgrind on x86-64 Linux".into());
    }
    match Command::new("valgrind").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("valgrind --version ended with {status}")),
        Err(error) => Some(format!("valgrind can't be run ({error}): install the package valgrind")),
    }
}

/// Counts all jobs, as many at a time as there are threads; `done` is called after each.
///
/// # Errors
///
/// The first that a job reports.
pub fn count_all(jobs: &[Job], mut done: impl FnMut(usize)) -> Result<Vec<Counts>, String> {
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..crate::machine::threads().min(jobs.len()) {
            let (next, send) = (&next, send.clone());
            scope.spawn(move || {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(at) else { break };
                    // The receiver is gone after a failure: nobody wants the rest.
                    if send.send((at, count(job, at))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(send);
        let mut found = vec![Counts::default(); jobs.len()];
        for (finished, (at, counts)) in receive.iter().enumerate() {
            found[at] = counts?;
            done(finished + 1);
        }
        Ok(found)
    })
}

fn count(job: &Job, index: usize) -> Result<Counts, String> {
    let exe = std::env::current_exe().map_err(|e| format!("this program can't find itself: {e}"))?;
    let file = std::env::temp_dir().join(format!("rotile-bench-{}-{index}.callgrind", std::process::id()));
    let result = run(&exe, &file, job);
    // Left behind where the run failed before it wrote one.
    let _ = std::fs::remove_file(&file);
    result.map_err(|error| format!("{} under valgrind, profile {}: {error}", job.case, job.profile.name))
}

fn run(exe: &Path, file: &Path, job: &Job) -> Result<Counts, String> {
    let Profile { d1, ll, l2_bytes, .. } = &job.profile;
    let cache = |c: &crate::machine::Cache| format!("{},{},{}", c.bytes, c.ways, c.line);
    let output = Command::new("valgrind")
        // The environment lies on the stack and would move it.
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .args(["--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes", "--I1=32768,8,64"])
        .arg(format!("--D1={}", cache(d1)))
        .arg(format!("--LL={}", cache(ll)))
        .arg(format!("--callgrind-out-file={}", file.display()))
        .arg(exe)
        .args(["probe", &job.case.to_string(), "--tier", "avx2", "--state", job.state.name()])
        .args(["--l1", &d1.bytes.to_string(), "--l2", &l2_bytes.to_string()])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("valgrind can't be run: {e}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last: Vec<&str> = errors.lines().rev().take(6).collect();
        return Err(format!("{}: {}", output.status, last.into_iter().rev().collect::<Vec<_>>().join(" | ")));
    }
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    let counts = Counts::parse(&text)?;
    if counts.instructions == 0 {
        return Err("nothing was counted: the requests to start and stop did not reach valgrind".into());
    }
    Ok(counts)
}

/// The inner side: runs the lane so that callgrind counts one call and nothing else.
pub fn probe(lane: &mut Lane, state: CacheState) {
    // From here on caches are simulated; at first they are empty. A run before would be lost time: fused multiply-adds
    // are emulated one by one.
    request(Request::Start);
    if state == CacheState::Warm {
        lane.run();
        request(Request::Zero);
    }
    lane.run();
    request(Request::Stop);
}

/// Client requests of callgrind.
#[derive(Clone, Copy)]
enum Request {
    Zero = 0x4354_0001,
    Start = 0x4354_0004,
    Stop = 0x4354_0005,
}

/// Asks callgrind for something; does nothing outside valgrind.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
fn request(request: Request) {
    let arguments: [u64; 6] = [request as u64, 0, 0, 0, 0, 0];
    // SAFETY: four rotations by 128 bits in all and an exchange of a register with itself change nothing; valgrind takes
    // them as a request with the arguments at rax and writes its answer to rdx.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") arguments.as_ptr(),
            inout("rdx") 0u64 => _,
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn request(_request: Request) {}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "# callgrind format\nversion: 1\npositions: line\nevents: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw\n\
        fl=(1) x.rs\nfn=(1) f\n10 5 4 3\n\ntotals: 2000 500 250 7 60 30 5 20\n";

    #[test]
    fn totals_are_read_and_missing_zeros_filled_in() {
        let counts = Counts::parse(SAMPLE).unwrap();
        assert_eq!(counts, Counts { instructions: 2000, d1_read: 60, d1_write: 30, ll_read: 20, ll_write: 0 });
        assert_eq!((counts.d1(), counts.ll()), (90, 20));
    }

    #[test]
    fn other_output_says_what_is_missing() {
        for (text, want) in [
            ("", "\"events:\""),
            ("events: Ir\n", "\"totals:\""),
            ("events: Ir\ntotals: 5\n", "no D1mr"),
            ("events: Ir D1mr D1mw DLmr DLmw\ntotals: 5 x\n", "D1mr is \"x\""),
        ] {
            let error = Counts::parse(text).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn requests_do_nothing_outside_valgrind() {
        request(Request::Start);
        request(Request::Zero);
        request(Request::Stop);
    }
}
