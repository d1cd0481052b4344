//! Compiles the C++ side of the border and tells every crate above where libtorch lies.

#[path = "build/object_cache.rs"]
mod object_cache;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use object_cache::{Flags, Inputs, Label, ObjectCache, Toolchain};

/// The C++ files of the border: one translation unit, with the C++ that cxx generates. libtorch's headers, and the
/// templates that they leave to be instantiated at the end of each unit, take most of the time of compiling a file.
/// Each further unit costs about 15 s of a processor; with many processors two units would end sooner.
const FILES: [&str; 57] = [
    "norm.cpp",
    "norm_relu.cpp",
    "norm_residual.cpp",
    "kernels/program.cpp",
    "kernels/choice.cpp",
    "kernels/products.cpp",
    "kernels/norm_relu.cpp",
    "kernels/norm_residual.cpp",
    "kernels/cross_entropy.cpp",
    "kernels/activation.cpp",
    "kernels/embedding.cpp",
    "kernels/rotary.cpp",
    "kernels/images.cpp",
    "images.cpp",
    "kernels/optimizer.cpp",
    "max_pool.cpp",
    "cross_entropy.cpp",
    "dropout.cpp",
    "embedding.cpp",
    "attention.cpp",
    "weights.cpp",
    "convolution.cpp",
    "activation.cpp",
    "linear.cpp",
    "feed_forward.cpp",
    "rotary.cpp",
    "foreach.cpp",
    "flat.cpp",
    "optimizer.cpp",
    "precision.cpp",
    "matrix_step.cpp",
    "tensors.cpp",
    "loss_flag.cpp",
    "memory.cpp",
    "device.cpp",
    "store.cpp",
    "group.cpp",
    "gloo.cpp",
    "gloo_loop.cpp",
    "ordered.cpp",
    "shared_memory.cpp",
    "through_host.cpp",
    "combine.cpp",
    "forks.cpp",
    "fake.cpp",
    "reducer.cpp",
    "sharder.cpp",
    "sharder_gather.cpp",
    "sharder_reduce.cpp",
    "regions.cpp",
    "context_attention.cpp",
    "storage.cpp",
    "hook.cpp",
    "reproducible.cpp",
    "profiler.cpp",
    "recompute.cpp",
    "script.cpp",
];
/// Loops whose results must not depend on the processor or on a compiler's choice. Compiled with the same flags in every
/// profile, so that tests run the released code.
const LOOPS: [&str; 3] =
    ["cpp/step_kernels.cpp", "cpp/rotary_kernels.cpp", "cpp/activation_loops.cpp"];
/// Name of the static library of the border's objects.
const ARCHIVE: &str = "brigade_torch";
/// Of the feature `tpu`, with the library that the program carries.
const TPU_FILE: &str = "cpp/tpu.cpp";
const TPU_CARRIED: &str = "cpp/tpu/compat.c";
/// Needs CUDA's headers.
const CUDA_FILES: [&str; 5] =
    ["cuda.cpp", "graph.cpp", "kernels/cublaslt.cpp", "kernels/load.cpp", "nccl.cpp"];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(parallel_loops)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        // Build scripts of dependents ask for a folder, and link nothing.
        println!("cargo::metadata=LIB=");
        return;
    }
    let (lib, include) = libtorch();
    let torch = lib.parent().expect("libtorch's lib folder has a parent");
    let cuda = env::var("CARGO_FEATURE_CUDA").is_ok();
    let cuda_folders = if cuda { cuda_headers(torch) } else { Vec::new() };
    let kernels = env::var_os("DEP_BRIGADE_KERNELS_FOLDER").map(PathBuf::from);
    let kernels = kernels.expect("brigade-kernels exports its folder");
    let bridge = cxx_build::bridge("src/bridge.rs");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .includes(includes(&bridge))
        .file(unit("border", bridge.get_files().map(Path::to_owned).chain(FILES.map(text))))
        // As libtorch's own headers need from 2.11 on.
        .std("c++20")
        // Their headers warn; with `isystem` ours still would not.
        .warnings(false)
        // Debug information of libtorch's headers doubles the time of each file.
        .debug(false)
        .flag("-isystem")
        .flag(include.to_str().expect("libtorch's path is UTF-8"))
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").to_str().expect("checked above"))
        .include("cpp/gloo_declarations")
        // The structs that the kernels take.
        .include(&kernels)
        .flag_if_supported("-fvisibility=hidden")
        // So that loops with square roots become vector instructions.
        .flag_if_supported("-fno-math-errno")
        .cargo_metadata(false);
    without_paths(&mut build, torch);
    if env::var("LIBTORCH_CXX11_ABI").as_deref() == Ok("0") {
        build.define("_GLIBCXX_USE_CXX11_ABI", "0");
    }
    if cuda {
        assert!(
            lib.join("libtorch_cuda.so").exists(),
            "feature cuda: the libtorch in {} is one for CPUs; run `brigade setup --cuda` (in Brigade's \
             own checkout `cargo xtask setup --cuda`), or name one for CUDA",
            torch.display()
        );
        build.define("BRIGADE_CUDA", None);
        build.file(unit("cuda", CUDA_FILES.map(text)));
        for folder in &cuda_folders {
            build.flag("-isystem").flag(folder.to_str().expect("path is UTF-8"));
        }
        // Behind all others: only for headers that are nowhere else.
        build.flag("-idirafter").flag("cpp/cuda_declarations");
    }
    let openmp = build.get_compiler().is_like_gnu().then(|| openmp(&lib)).flatten();
    if openmp.is_some() {
        build.flag("-fopenmp");
    }
    let headers: Vec<&Path> =
        [&include].into_iter().chain(&cuda_folders).map(PathBuf::as_path).collect();
    compile_or_load(&mut build, torch, &kernels, &headers);
    let tpu = env::var_os("CARGO_FEATURE_TPU").is_some();
    if tpu {
        compile_tpu(torch, &include, &bridge);
    }

    // What cc prints for an archive that it compiles. Crate cxx links the standard library of C++.
    println!("cargo::rustc-link-lib=static={ARCHIVE}");
    if tpu {
        // Behind the archive that refers to it.
        println!("cargo::rustc-link-lib=static={ARCHIVE}_tpu");
    }
    println!("cargo::rustc-link-search=native={}", variable("OUT_DIR").display());
    println!("cargo::rustc-link-search=native={}", lib.display());
    for library in ["torch_cpu", "c10"] {
        println!("cargo::rustc-link-lib={library}");
    }
    if let Some(openmp) = openmp {
        println!("cargo::rustc-link-lib=dylib:+verbatim={openmp}");
        println!("cargo::rustc-cfg=parallel_loops");
    }
    if cuda {
        // Linkers leave out what nothing refers to: cpp/cuda.cpp refers to both.
        println!("cargo::rustc-link-lib=torch_cuda");
        println!("cargo::rustc-link-lib=c10_cuda");
    }
    // For direct dependents: DEP_BRIGADE_TORCH_LIB, from which their build scripts set the run path.
    println!("cargo::metadata=LIB={}", lib.display());
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());

    println!("cargo::rerun-if-changed=src/bridge.rs");
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    watch(Path::new("cpp"));
    for entry in fs::read_dir(&kernels).expect("brigade-kernels' own folder can be read") {
        let path = entry.expect("brigade-kernels' own folder can be read").path();
        if is_kernel(&path) {
            println!("cargo::rerun-if-changed={}", path.display());
        }
    }
}

/// Puts the archive of the border into cargo's `OUT_DIR`: from the user's cache if the same was compiled before, in
/// any project or for a release of Brigade, or else by compiling it. A cache that cannot be read or written costs only
/// time.
fn compile_or_load(build: &mut cc::Build, torch: &Path, kernels: &Path, headers: &[&Path]) {
    println!("cargo::rerun-if-env-changed=BRIGADE_OBJECT_CACHE");
    let archive = variable("OUT_DIR").join(format!("lib{ARCHIVE}.a"));
    let keys = keys(&build.get_compiler(), torch, kernels, headers).ok().flatten();
    let cached = ObjectCache::of_user().zip(keys);
    if let Some((cache, keys)) = &cached {
        if cache.load(&keys.exact, &archive).expect("cargo's OUT_DIR can be written") {
            return;
        }
        if let Some(label) = &keys.label
            && cache.load_shipped(label, &archive).expect("cargo's OUT_DIR can be written")
        {
            // Cargo shows it with `-vv`.
            println!("the C++ was compiled for a release of Brigade");
            return;
        }
    }
    build.objects(loops(torch, headers[0], kernels)).compile(ARCHIVE);
    if let Some((cache, keys)) = cached
        && let Err(error) = cache.store(&keys.exact, keys.label.as_ref(), &archive)
    {
        // Cargo shows it with `-vv`. It is not a warning for users of a read-only home folder.
        println!("cannot keep the compiled C++ for other projects: {error}");
    }
}

/// Keys of the archive in the cache.
struct Keys {
    /// Hash of the C++ texts, the flags, the compiler, and libtorch's version and headers.
    exact: String,
    /// Label of an archive from a release that can take its place: compiled by an older compiler, perhaps with another
    /// optimisation. `None` if the user sets flags, or there is no such release.
    label: Option<Label>,
}

/// Returns the keys of the archive. `None` if the objects depend on the processor of this host: a user's cache may be
/// shared by several.
fn keys(
    compiler: &cc::Tool,
    torch: &Path,
    kernels: &Path,
    headers: &[&Path],
) -> io::Result<Option<Keys>> {
    let mut inputs = Inputs::new();
    // Folders in flags differ between projects, and the objects do not depend on them.
    let mut folders = vec![
        variable("OUT_DIR").display().to_string(),
        variable("CARGO_MANIFEST_DIR").display().to_string(),
        torch.display().to_string(),
        kernels.display().to_string(),
    ];
    folders.extend(headers.iter().map(|folder| folder.display().to_string()));
    let arguments = compiler.args().iter().map(OsString::as_os_str);
    let Some(flags) = Flags::of(arguments, &folders) else { return Ok(None) };
    for flag in flags.meaning {
        inputs.add("flag", flag.as_bytes());
    }
    for name in ["CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
        inputs.add(name, env::var_os(name).unwrap_or_default().as_encoded_bytes());
    }
    let target = env::var("TARGET").expect("cargo sets it");
    inputs.add("target", target.as_bytes());
    inputs.add("build.rs", include_bytes!("build.rs"));
    inputs.add_contents(Path::new("cpp"), |_| true)?;
    // The manifest of a published package differs from that of the checkout.
    inputs.add_contents(kernels, is_kernel)?;
    let generated = variable("OUT_DIR").join("cxxbridge");
    inputs.add_contents(&generated.join("sources"), |_| true)?;
    inputs.add("cxx.h", &fs::read(generated.join("include/rust/cxx.h"))?);
    for name in ["build-version", "build-hash", "version.py"] {
        inputs.add(name, &fs::read(torch.join(name)).unwrap_or_default());
    }
    for folder in headers {
        inputs.add_sizes(folder)?;
    }

    for name in object_cache::flag_variables(&target) {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let value = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    let has_own_flags = object_cache::has_own_flags(&target, value);
    let is_shipped = env::var_os("CARGO_FEATURE_CUDA").is_none();
    let toolchain = if is_shipped && !has_own_flags { toolchain(compiler)? } else { None };
    let label = toolchain.map(|toolchain| Label { key: inputs.clone().key(), toolchain });

    for flag in flags.optimisation {
        inputs.add("optimisation", flag.as_bytes());
    }
    for question in ["--version", "-dumpmachine"] {
        let output = Command::new(compiler.path()).arg(question).output()?;
        inputs.add(question, &output.stdout);
    }
    Ok(Some(Keys { exact: inputs.key(), label }))
}

/// Returns the versions of g++, libstdc++ and glibc; `None` with others.
fn toolchain(compiler: &cc::Tool) -> io::Result<Option<Toolchain>> {
    let question = variable("OUT_DIR").join("toolchain.cpp");
    fs::write(&question, Toolchain::QUESTION)?;
    let output = compiler.to_command().args(["-E", "-P"]).arg(question).output()?;
    Ok(Toolchain::parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Returns `true` for the text of a kernel, or of what kernels share.
fn is_kernel(path: &Path) -> bool {
    path.extension().is_some_and(|it| it == "cu" || it == "cuh")
}

/// Replaces the folders of the package, of what is generated, and of libtorch in texts of the objects (`__FILE__`, in
/// messages of errors), so that the objects do not depend on them.
fn without_paths(build: &mut cc::Build, torch: &Path) {
    let (package, out) = (variable("CARGO_MANIFEST_DIR"), variable("OUT_DIR"));
    // The last one that matches wins: the package's folder may have cargo's in it.
    for (folder, name) in
        [(torch, "libtorch"), (&package, "brigade-torch"), (&out, "brigade-torch")]
    {
        build.flag_if_supported(format!("-ffile-prefix-map={}={name}", folder.display()));
    }
}

/// Returns a variable that cargo sets for build scripts.
fn variable(name: &str) -> PathBuf {
    PathBuf::from(env::var_os(name).expect("cargo sets it"))
}

/// Finds the folders of libtorch's libraries and headers, by the rules of torch-sys, so that both are built with
/// the same. torch-sys would tell (`DEP_TCH_LIBTORCH_LIB`), but only after its own C++, a minute and a half:
/// so the two compile side by side.
fn libtorch() -> (PathBuf, PathBuf) {
    let setting = |name: &str| {
        println!("cargo::rerun-if-env-changed={name}");
        env::var_os(name).map(PathBuf::from)
    };
    if setting("LIBTORCH_USE_PYTORCH").is_some() {
        let python = if setting("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
        let script = "import os, torch; print(os.path.dirname(torch.__file__))";
        let output = Command::new(python).args(["-c", script]).output();
        let output = output.unwrap_or_else(|error| panic!("cannot start {python}: {error}"));
        let reason = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{python} cannot import torch: {reason}");
        let torch = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        return (torch.join("lib"), torch.join("include"));
    }
    let system = || Path::new("/usr/lib/libtorch.so").exists().then(|| PathBuf::from("/usr"));
    let torch = setting("LIBTORCH").or_else(system).unwrap_or_else(|| {
        panic!(
            "cannot find libtorch: run `brigade setup` in this project (`cargo install brigade-cli` \
             installs it; in Brigade's own checkout it is `cargo xtask setup`), or set LIBTORCH to the \
             folder of a libtorch 2.11 to 2.13"
        )
    });
    let part = |name, folder| setting(name).unwrap_or_else(|| torch.clone()).join(folder);
    (part("LIBTORCH_LIB", "lib"), part("LIBTORCH_INCLUDE", "include"))
}

/// The OpenMP library that libtorch brings and uses, so that our loops run on its threads: without it
/// `at::parallel_for` is a loop on one. One of another make would start threads of its own beside them.
fn openmp(lib: &Path) -> Option<String> {
    let entries = fs::read_dir(lib).expect("libtorch's library folder can be read");
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find(|name| name.starts_with("libgomp") && name.contains(".so"))
}

/// Compiles [`LOOPS`]; the paths of the objects.
fn loops(torch: &Path, include: &Path, kernels: &Path) -> Vec<PathBuf> {
    let mut build = cc::Build::new();
    without_paths(&mut build, torch);
    build
        .cpp(true)
        .files(LOOPS)
        .std("c++20")
        .opt_level(3)
        .debug(false)
        .include(kernels)
        .flag("-isystem")
        .flag(include.to_str().expect("checked before"))
        .flag_if_supported("-fvisibility=hidden")
        .cargo_metadata(false)
        // A multiplication and an addition that are contracted to one instruction are rounded once. Which ones are
        // depends on the processor, and may differ between vectors and the elements after the last vector.
        .flag("-ffp-contract=off")
        // So that square roots and conditions become vector instructions. Neither changes a result.
        .flag_if_supported("-fno-math-errno")
        .flag_if_supported("-fno-trapping-math")
        .compile_intermediates()
}

/// Compiles what the feature `tpu` adds: an archive, and a shared library that the program contains as bytes.
fn compile_tpu(torch: &Path, include: &Path, bridge: &cc::Build) {
    let mut build = cc::Build::new();
    without_paths(&mut build, torch);
    build
        .cpp(true)
        .includes(includes(bridge))
        .file(TPU_FILE)
        .std("c++20")
        .warnings(false)
        .debug(false)
        .flag("-isystem")
        .flag(include.to_str().expect("checked before"))
        .flag("-isystem")
        .flag(include.join("torch/csrc/api/include").to_str().expect("checked before"))
        .include("cpp/gloo_declarations")
        .flag_if_supported("-fvisibility=hidden")
        .cargo_metadata(false);
    if env::var("LIBTORCH_CXX11_ABI").as_deref() == Ok("0") {
        build.define("_GLIBCXX_USE_CXX11_ABI", "0");
    }
    build.compile(&format!("{ARCHIVE}_tpu"));

    let mut carried = cc::Build::new();
    without_paths(&mut carried, torch);
    let compiler = carried.pic(true).debug(false).get_compiler();
    let library = variable("OUT_DIR").join("libbrigade_tpu.so");
    let mut command = compiler.to_command();
    command.args(["-shared", "-Wl,-soname,libtorch_python.so", TPU_CARRIED, "-ldl", "-o"]);
    let status = command.arg(&library).status();
    let status = status.unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    assert!(status.success(), "{command:?} failed");
}

/// Returns the path of a file of the folder `cpp`.
fn text(name: &str) -> PathBuf {
    variable("CARGO_MANIFEST_DIR").join("cpp").join(name)
}

/// Writes a file that includes others; its path.
fn unit(name: &str, files: impl IntoIterator<Item = PathBuf>) -> PathBuf {
    let path = variable("OUT_DIR").join(name).with_extension("cpp");
    let text: String = files.into_iter().map(|file| format!("#include {file:?}\n")).collect();
    fs::write(&path, text).expect("cargo's OUT_DIR can be written");
    path
}

/// Returns the folders of headers that cxx has generated.
fn includes(bridge: &cc::Build) -> Vec<PathBuf> {
    let compiler = bridge.get_compiler();
    let arguments = compiler.args();
    let pairs = arguments.windows(2).filter(|pair| pair[0] == "-I");
    pairs.map(|pair| PathBuf::from(&pair[1])).collect()
}

/// The folders of CUDA's headers: those that `cargo xtask setup --cuda` and pip put beside libtorch
/// (`nvidia/cu13/include`, `nvidia/nccl/include`, ...), or those of a toolkit.
fn cuda_headers(torch: &Path) -> Vec<PathBuf> {
    let site = torch.parent().expect("the torch package lies in a folder");
    let packages = fs::read_dir(site.join("nvidia")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = packages.map(|entry| entry.path().join("include")).collect();
    found.sort();
    let toolkit = env::var_os("CUDA_HOME").map_or_else(|| "/usr/local/cuda".into(), PathBuf::from);
    found.push(toolkit.join("include"));
    found.retain(|folder| folder.is_dir());
    for header in ["cuda_runtime_api.h", "cublas_v2.h", "nccl.h"] {
        assert!(
            // Debian's packages put theirs where the compiler looks.
            found.iter().any(|folder| folder.join(header).exists())
                || Path::new("/usr/include").join(header).exists(),
            "feature cuda: there is no {header} in {}/nvidia/*/include or {}; run `brigade setup --cuda` \
             (in Brigade's own checkout `cargo xtask setup --cuda`), name a Python's PyTorch with CUDA \
             (LIBTORCH_USE_PYTORCH=1), or set CUDA_HOME to a toolkit",
            site.display(),
            toolkit.display(),
        );
    }
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
