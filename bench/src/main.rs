//! `rotile-bench`: what fusing the rotation saves, and how near the kernels come to the machine's limits. `--help` says more.

use rotile_bench::args::{Args, Command, HELP};
use rotile_bench::{commands, report};
use std::process::ExitCode;

fn main() -> ExitCode {
    match Args::parse(std::env::args_os().skip(1)).and_then(|args| run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    match &args.command {
        Command::Help => print!("{HELP}"),
        Command::Probe(probe) => commands::probe(args, probe)?,
        Command::Counts => commands::counts()?,
        Command::Report => println!("{}", report::rebuild(&report::folder())?.display()),
        Command::Savings => commands::run(args, &[commands::savings])?,
        Command::Roofline => commands::run(args, &[commands::roofline])?,
        Command::Scaling => commands::run(args, &[commands::scaling])?,
        Command::Peers if commands::one_thread()? => commands::run(args, &[commands::peers])?,
        Command::Peers => {}
        Command::All => commands::run(args, &[commands::savings, commands::roofline, commands::scaling])?,
    }
    Ok(())
}
