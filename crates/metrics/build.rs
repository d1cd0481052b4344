//! Tests, examples and programs of this crate find libtorch where brigade-torch was linked with it.

fn main() {
    let lib = std::env::var("DEP_BRIGADE_TORCH_LIB").expect("brigade-torch exports its folder");
    println!("cargo::rustc-link-arg=-Wl,-rpath,{lib}");
    println!("cargo::rerun-if-changed=build.rs");
}
