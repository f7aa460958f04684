//! Compiles the plain C lane once for each instruction set that a tier may be compared on; which one runs is decided
//! with the tier.

fn main() {
    println!("cargo:rerun-if-changed=c/plain.c");
    println!("cargo:rustc-check-cfg=cfg(plain_avx512)");
    let target = std::env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");
    let mut sets: Vec<(&str, &[&str])> = vec![("base", &[])];
    if target == "x86_64" {
        sets.push(("avx2", &["-mavx2", "-mfma", "-mf16c"]));
        // GCC halves the vectors of this level unless told otherwise.
        let wide = "-mprefer-vector-width=512";
        let build = cc::Build::new();
        if build.is_flag_supported("-march=x86-64-v4").unwrap_or(false)
            && build.is_flag_supported(wide).unwrap_or(false)
        {
            sets.push(("avx512", &["-march=x86-64-v4", "-mprefer-vector-width=512"]));
            println!("cargo:rustc-cfg=plain_avx512");
        }
    }
    for (name, flags) in sets {
        let mut build = cc::Build::new();
        // Without -ffast-math a compiler may not reorder a sum, so it could vectorise no dot product.
        build.file("c/plain.c").opt_level(3).flag("-std=c11").flag("-ffast-math").warnings_into_errors(false);
        flags.iter().for_each(|flag| {
            build.flag(flag);
        });
        build.define("ISA", name).compile(&format!("rotile_plain_{name}"));
    }
}
