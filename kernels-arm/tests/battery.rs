//! Every function of the NEON table against its contract, with nothing but this crate and `core` in between.
#![cfg(all(target_arch = "aarch64", feature = "neon"))]

#[test]
fn kernel_battery_neon() {
    rotile_testkit::battery::run(rotile_kernels_arm::Neon::detect().unwrap().tier());
}
