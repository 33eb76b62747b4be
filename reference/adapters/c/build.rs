//! Names the shared library with the major version of its interface.

fn main() {
    let target = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    if target == "linux" {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkvc.so.0");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
