//! The commands: each measures, prints a table and adds to the report.

mod counts;
mod peers;
mod roofline;
mod savings;
mod scaling;

pub use counts::counts;
pub use peers::{one_thread, peers};
pub use roofline::roofline;
pub use savings::savings;
pub use scaling::scaling;

use crate::args::{Args, Probe};
use crate::lanes::{Lane, pinned};
use crate::measure::State;
use crate::results::Results;
use crate::{cachegrind, report};
use rotile::{Capabilities, TierName};
use std::time::Instant;

/// What a command works with.
#[derive(Debug)]
pub struct Context<'a> {
    /// Its options.
    pub args: &'a Args,
    /// Of this machine, pinned.
    pub capabilities: Capabilities,
    /// The tier that runs.
    pub tier: TierName,
    /// How quiet the machine is, sampled as the command goes.
    pub state: State,
    start: Instant,
}

impl Context<'_> {
    /// Says on stderr what comes next.
    pub fn progress(&self, what: &str) {
        eprintln!("[{:>5.1} s] {what}", self.start.elapsed().as_secs_f64());
    }

    /// Empty results of a command.
    pub fn results(&self, command: &str) -> Results {
        Results::new(command, &self.args.line, self.tier.name())
    }
}

/// A command.
pub type Run = fn(&mut Context<'_>) -> Result<Results, String>;

/// Runs commands one after the other; after each, its table is printed and the page rebuilt.
///
/// # Errors
///
/// What a command reports.
pub fn run(args: &Args, commands: &[Run]) -> Result<(), String> {
    if cfg!(debug_assertions) {
        return Err("this build has no optimisation: run it with cargo run --release".into());
    }
    let capabilities = pinned(args.tier)?;
    let tier = capabilities.tier().map_err(|e| e.to_string())?.name();
    let (folder, start) = (report::folder(), Instant::now());
    for command in commands {
        let mut context = Context { args, capabilities, tier, state: State::new(tier), start };
        let mut results = command(&mut context)?;
        results.state(context.state.summary());
        print!("{}\n\n", results.text());
        results.write(&folder)?;
        let page = report::rebuild(&folder)?;
        context.progress(&format!("report: {}", page.display()));
    }
    Ok(())
}

/// Runs one lane for callgrind.
///
/// # Errors
///
/// What the lane reports.
pub fn probe(args: &Args, probe: &Probe) -> Result<(), String> {
    let mut capabilities = pinned(args.tier)?;
    // The plan of the simulated device, not of this machine.
    (capabilities.l1_bytes, capabilities.l2_bytes) = (probe.l1_bytes, probe.l2_bytes);
    cachegrind::probe(&mut Lane::new(&capabilities, &probe.case, 1)?, probe.state);
    Ok(())
}
