//! The tiers that tests must run, and the loudness about those that they can't.

use rotile_core::{Capabilities, TierName};

/// `capabilities` once for each tier in it, pinned. `ROTILE_ONLY_TIER` leaves out all but one, for emulators.
///
/// # Panics
///
/// If `ROTILE_REQUIRE_TIERS` (names with commas between) or `ROTILE_ONLY_TIER` names a tier that is not among them.
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
    let only = std::env::var("ROTILE_ONLY_TIER").ok();
    let tested: Vec<TierName> =
        found.iter().copied().filter(|tier| only.as_ref().is_none_or(|only| tier.name() == only)).collect();
    assert!(!tested.is_empty(), "ROTILE_ONLY_TIER names {only:?}, but this build on this CPU offers {found:?}");
    tested.into_iter().map(|tier| capabilities.require(tier)).collect()
}
