//! Runs conformance vectors on every tier of this CPU:
//! `cargo run --release --example conformance -- [--tier NAME] [--allow-unsupported] DIR...`
//!
//! A line for each vector and tier; the exit code is 1 if any fails, or is unsupported without `--allow-unsupported`.

use rotile::TierName;
use rotile_testkit::conform::{self, Verdict};
use rotile_testkit::vectors;
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: conformance [--tier NAME] [--allow-unsupported] DIR...";

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, String> {
    let (mut tier, mut allow_unsupported, mut dirs) = (None, false, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--tier" => {
                let name = args.next().ok_or("--tier needs a name")?;
                tier = Some(TierName::from_name(&name).ok_or_else(|| rotile::Error::unknown_tier(&name).to_string())?);
            }
            "--allow-unsupported" => allow_unsupported = true,
            "--help" | "-h" => return Err("help".into()),
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
            dir => dirs.push(PathBuf::from(dir)),
        }
    }
    if dirs.is_empty() {
        return Err("no folder given".into());
    }
    let capabilities = rotile::capabilities().map_err(|e| e.to_string())?;
    let tiers = match tier {
        Some(tier) => {
            let pinned = capabilities.require(tier);
            pinned.tier().map_err(|e| e.to_string())?;
            vec![pinned]
        }
        None => rotile_testkit::tiers::each(capabilities),
    };

    println!("{:<34} {:<9} {:<26} {:>9} {:>9}", "case", "tier", "kernel", "error", "bound");
    let (mut passed, mut failed, mut unsupported) = (0, 0, 0);
    for dir in &dirs {
        for path in vectors::list(dir)? {
            let file = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
            if file == "rotary_tables" {
                println!("{file:<34} skipped: tables, not an attention; rotile-core's own tests run them");
                continue;
            }
            let case = match vectors::load(&path) {
                Ok(case) => case,
                Err(reason) => {
                    println!("{file:<34} FAIL: can't be read: {reason}");
                    failed += 1;
                    continue;
                }
            };
            for tier in &tiers {
                let name = tier.tier().map_err(|e| e.to_string())?.name();
                print!("{:<34} {:<9} ", case.name, name.name());
                match conform::run(&case, tier) {
                    Verdict::Pass { kernel, error, bound } => {
                        println!("{kernel:<26} {error:>9.1e} {bound:>9.1e} pass");
                        passed += 1;
                    }
                    Verdict::Fail(reason) => {
                        println!("FAIL: {reason}");
                        failed += 1;
                    }
                    Verdict::Unsupported(reason) => {
                        println!("{reason}");
                        unsupported += 1;
                    }
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed, {unsupported} unsupported");
    Ok(failed == 0 && (allow_unsupported || unsupported == 0))
}
