//! Tells dependents the folder of the kernels' texts: `DEP_BRIGADE_KERNELS_FOLDER`.

fn main() {
    let folder = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    println!("cargo::metadata=FOLDER={folder}");
    println!("cargo::rerun-if-changed=build.rs");
}
