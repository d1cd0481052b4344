//! Compiles the simulated GPUs in host memory against the libtorch with which torch-sys was built.

use std::env;
use std::path::PathBuf;

fn main() {
    let lib =
        PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports its folder"));
    let torch = lib.parent().expect("libtorch's lib folder has a parent");
    // As in torch-sys: another folder of headers may be set.
    let include = env::var_os("LIBTORCH_INCLUDE")
        .map_or_else(|| torch.to_owned(), PathBuf::from)
        .join("include");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .files([
            "cpp/device.cpp",
            "cpp/operators.cpp",
            "cpp/attention.cpp",
            "cpp/account.cpp",
            "cpp/kernels.cpp",
            "cpp/products.cpp",
        ])
        .include("../../crates/torch/cpp")
        .include("../../crates/torch/kernels")
        // libtorch's own headers need it from 2.11 on.
        .std("c++20")
        // libtorch's headers cause warnings, which `isystem` alone would not suppress.
        .warnings(false)
        // Debug information of libtorch's headers doubles the time of each file.
        .debug(false)
        // Kernels say where a product and a sum are rounded once.
        .flag_if_supported("-ffp-contract=off")
        .flag("-isystem")
        .flag(include.to_str().expect("libtorch's path is UTF-8"))
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").to_str().expect("checked above"))
        .flag_if_supported("-fvisibility=hidden");
    if env::var("LIBTORCH_CXX11_ABI").as_deref() == Ok("0") {
        build.define("_GLIBCXX_USE_CXX11_ABI", "0");
    }
    build.compile("brigade_test_device");

    println!("cargo::rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib={library}");
    }
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cpp");
    println!("cargo::rerun-if-changed=../../crates/torch/kernels");
    println!("cargo::rerun-if-changed=../../crates/torch/cpp/kernels");
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");
}
