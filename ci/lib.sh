# Shared by the scripts of this folder: strict mode, progress with times, installing what a new Debian 12 lacks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\n==> [%4ds] %s\n' "$SECONDS" "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

sudo() { if [ "$(id -u)" = 0 ]; then "$@"; else command sudo "$@"; fi; }

# need COMMAND PACKAGE...: installs the Debian packages unless the command (or file) is there.
need() {
    local what=$1; shift
    if command -v "$what" >/dev/null 2>&1 || [ -e "$what" ]; then return; fi
    step "installing $* (for $what)"
    command -v apt-get >/dev/null || fail "$what is missing and this is no Debian system: install the equivalent of $*"
    sudo apt-get update -qq
    DEBIAN_FRONTEND=noninteractive sudo apt-get install -y -qq "$@" >/dev/null || fail "could not install $*"
    command -v "$what" >/dev/null 2>&1 || [ -e "$what" ] || fail "$* is installed, but $what is still missing"
}

# aarch64_std: the library for aarch64-unknown-linux-gnu: a rustup target if there is one, else Debian's with its compiler.
aarch64_std() {
    local target=aarch64-unknown-linux-gnu
    if [ -d "$(rustc --print target-libdir --target $target)" ]; then return; fi
    if ! [ -e /usr/lib/rustlib/$target ]; then
        dpkg --print-foreign-architectures | grep -qx arm64 || sudo dpkg --add-architecture arm64
        need /usr/lib/rustlib/$target rustc-web libstd-rust-web-dev:arm64
    fi
    export RUSTC=/usr/bin/rustc
}

# True if this CPU has what the AVX-512 tier needs.
has_avx512() {
    local flag
    for flag in avx512f avx512bw avx512vl avx512dq avx2 fma f16c; do grep -qw $flag /proc/cpuinfo || return 1; done
}

command -v cargo >/dev/null || fail "cargo is missing: install Rust 1.95 or later (rustup.rs)"
need cc gcc libc6-dev
