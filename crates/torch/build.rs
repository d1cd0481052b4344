//! Compiles the C++ side of the border and tells every crate above where libtorch lies.

use std::path::{Path, PathBuf};
use std::{env, fs};

const SOURCES: &[&str] = &[
    "cpp/tensors.cpp",
    "cpp/loss_flag.cpp",
    "cpp/memory.cpp",
    "cpp/store.cpp",
    "cpp/group.cpp",
    "cpp/gloo.cpp",
    "cpp/shared_memory.cpp",
    "cpp/combine.cpp",
    "cpp/forks.cpp",
    "cpp/fake.cpp",
    "cpp/reducer.cpp",
    "cpp/hook.cpp",
    "cpp/norm.cpp",
    "cpp/norm_relu.cpp",
    "cpp/optimizer.cpp",
    "cpp/precision.cpp",
    "cpp/reproducible.cpp",
    "cpp/flat.cpp",
    "cpp/matrix_step.cpp",
    "cpp/max_pool.cpp",
    "cpp/profiler.cpp",
];

fn main() {
    let lib = PathBuf::from(
        env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys exports libtorch's library folder"),
    );
    let torch = lib.parent().expect("libtorch's lib folder has a parent");
    let cuda = env::var("CARGO_FEATURE_CUDA").is_ok();

    let mut build = cxx_build::bridge("src/bridge.rs");
    build
        .files(SOURCES)
        // As libtorch's own headers need from 2.11 on.
        .std("c++20")
        // Their headers warn; with `isystem` ours still would not.
        .warnings(false)
        // Debug information of libtorch's headers doubles the time of each file.
        .debug(false)
        .flag("-isystem")
        .flag(torch.join("include").to_str().expect("libtorch's path is UTF-8"))
        .flag("-isystem")
        .flag(torch.join("include/torch/csrc/api/include").to_str().expect("checked above"))
        .include("cpp/gloo_declarations")
        .flag_if_supported("-fvisibility=hidden")
        // So that loops with square roots become vector instructions.
        .flag_if_supported("-fno-math-errno");
    if env::var("LIBTORCH_CXX11_ABI").as_deref() == Ok("0") {
        build.define("_GLIBCXX_USE_CXX11_ABI", "0");
    }
    if cuda {
        build.define("BRIGADE_CUDA", None).file("cpp/nccl.cpp");
        for folder in cuda_headers(torch) {
            build.flag("-isystem").flag(folder.to_str().expect("path is UTF-8"));
        }
        // Behind all others: only for headers that are nowhere else.
        build.flag("-idirafter").flag("cpp/cuda_declarations");
    }
    let openmp = build.get_compiler().is_like_gnu().then(|| openmp(&lib)).flatten();
    if openmp.is_some() {
        build.flag("-fopenmp");
    }
    precompile(&mut build, torch);
    build.compile("brigade_torch");

    println!("cargo::rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib={library}");
    }
    if let Some(openmp) = openmp {
        println!("cargo::rustc-link-lib=dylib:+verbatim={openmp}");
        println!("cargo::rustc-cfg=parallel_loops");
    }
    if cuda {
        // Nothing in our objects names a symbol that only this library has before NCCL is used, and
        // its kernels register themselves when it is loaded.
        println!("cargo::rustc-link-arg=-Wl,--no-as-needed,-ltorch_cuda,-lc10_cuda,--as-needed");
        println!("cargo::rustc-link-lib=torch_cuda");
        println!("cargo::rustc-link-lib=c10_cuda");
    }
    // For direct dependents: DEP_BRIGADE_TORCH_LIB, from which their build scripts set the run path.
    println!("cargo::metadata=LIB={}", lib.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());

    println!("cargo::rustc-check-cfg=cfg(parallel_loops)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/bridge.rs");
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    watch(Path::new("cpp"));
}

/// The OpenMP library that libtorch brings and uses, so that our loops run on its threads: without it
/// `at::parallel_for` is a loop on one. One of another make would start threads of its own beside them.
fn openmp(lib: &Path) -> Option<String> {
    let entries = fs::read_dir(lib).expect("libtorch's library folder can be read");
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find(|name| name.starts_with("libgomp") && name.contains(".so"))
}

/// Compiles libtorch's headers once for all files. Where the compiler cannot, or will not use the result,
/// each file includes the header itself: slower, and the same objects.
fn precompile(build: &mut cc::Build, torch: &Path) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let (header, compiled) = (out.join("libtorch.h"), out.join("libtorch.h.gch"));
    let source = fs::read("cpp/libtorch.h").expect("the crate's own files can be read");
    let command = build.get_compiler().to_command();
    // The compiler looks at its flags itself, but not at whether libtorch has become another.
    let version = fs::read_to_string(torch.join("include/torch/headeronly/version.h"));
    let stamp = format!("{command:?}\n{version:?}\n{}", String::from_utf8_lossy(&source));
    let stamp_file = out.join("libtorch.h.stamp");
    if fs::read_to_string(&stamp_file).ok().as_deref() != Some(stamp.as_str()) || !compiled.exists()
    {
        fs::write(&header, &source).expect("cargo's OUT_DIR can be written");
        let _ = fs::remove_file(&compiled);
        let mut command = command;
        command.args(["-x", "c++-header"]).arg(&header).arg("-o").arg(&compiled);
        if !command.status().is_ok_and(|status| status.success()) {
            let _ = fs::remove_file(&compiled);
            return;
        }
        fs::write(&stamp_file, stamp).expect("cargo's OUT_DIR can be written");
    }
    build.flag("-include").flag(header.to_str().expect("OUT_DIR is UTF-8"));
}

/// The CUDA headers: those that `cargo xtask setup --cuda` puts beside libtorch, those of the nvidia
/// wheels when libtorch belongs to a Python installation, those of a toolkit.
fn cuda_headers(torch: &Path) -> Vec<PathBuf> {
    let site = torch.parent().expect("the torch package lies in a folder");
    let toolkit = env::var_os("CUDA_HOME").map_or_else(|| "/usr/local/cuda".into(), PathBuf::from);
    let found: Vec<PathBuf> = [
        site.join("cuda/include"),
        site.join("nvidia/cu13/include"),
        site.join("nvidia/nccl/include"),
        toolkit.join("include"),
    ]
    .into_iter()
    .filter(|folder| folder.is_dir())
    .collect();
    assert!(
        found.iter().any(|folder| folder.join("cuda_runtime_api.h").exists()),
        "feature cuda: no cuda_runtime_api.h found beside libtorch ({}) or in {}; \
         run `cargo xtask setup --cuda` or set CUDA_HOME",
        site.display(),
        toolkit.display(),
    );
    found
}

fn watch(folder: &Path) {
    let entries = fs::read_dir(folder).expect("the crate's own folder can be read");
    for entry in entries {
        let path = entry.expect("the crate's own folder can be read").path();
        if path.is_dir() {
            watch(&path);
        } else {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
}
