//! Every function of the AVX2 table against its contract, with nothing but this crate and `core` in between.
#![cfg(all(target_arch = "x86_64", feature = "avx2"))]

#[test]
fn kernel_battery_avx2() {
    match rotile_kernels_x86::Avx2::detect() {
        Ok(token) => rotile_testkit::battery::run(token.tier()),
        Err(why) => {
            let required = std::env::var("ROTILE_REQUIRE_TIERS").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "avx2"), "the avx2 tier is required, but {why}");
            eprintln!("NOTE: the AVX2 tier is NOT tested: {why}");
        }
    }
}
