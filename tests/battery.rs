//! Every function of every tier's kernel table, against its contract.

#[test]
fn kernel_battery_on_every_tier() {
    for capabilities in rotile_testkit::tiers::each(rotile::capabilities().unwrap()) {
        rotile_testkit::battery::run(capabilities.tier().unwrap());
    }
}
