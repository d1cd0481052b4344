//! Tests of this crate find libtorch where brigade-torch was linked with it, if it is there at all.

fn main() {
    if let Ok(lib) = std::env::var("DEP_BRIGADE_TORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
