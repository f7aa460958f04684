//! The tiers that tests must run, and the loudness about those that they can't.

use rotile_core::{Capabilities, TierName};

/// `capabilities` once for each tier in it, pinned.
///
/// # Panics
///
/// If `ROTILE_REQUIRE_TIERS` (names with commas between) names a tier that is not among them.
pub fn each(capabilities: Capabilities) -> Vec<Capabilities> {
    let found: Vec<TierName> = capabilities.tiers().map(|t| t.name()).collect();
    if let Ok(required) = std::env::var("ROTILE_REQUIRE_TIERS") {
        for name in required.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let there = TierName::from_name(name).is_some_and(|t| found.contains(&t));
            assert!(there, "ROTILE_REQUIRE_TIERS names {name}, but this build on this CPU offers {found:?}");
        }
    } else if found.len() == 1 {
        eprintln!("NOTE: only {found:?} is tested: this build on this CPU offers no other tier");
    }
    found.into_iter().map(|tier| capabilities.require(tier)).collect()
}
