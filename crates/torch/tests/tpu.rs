//! Reasons why a TPU cannot be used: each is named, and the process goes on with the CPU.

#![allow(clippy::unwrap_used)] // also in what the tests share

use std::fs;
use std::path::{Path, PathBuf};

use brigade_libtorch_setup::TpuFiles;
use brigade_test_needs::needs;
use brigade_testkit::DistTest;
use brigade_torch::{DeviceExt, DeviceKind, DeviceUnavailable, TPU, Tpu, TpuUnavailable};
use tch::{Device, Kind, Tensor};

/// Runs `check` with the reason in a process with these variables.
fn with(name: &str, variables: &[(&'static str, &Path)], check: impl Fn(TpuUnavailable)) {
    let test = variables.iter().fold(DistTest::new(name, 1), |test, (variable, value)| {
        // The test's process ends soon.
        test.variable(variable, value.to_str().unwrap().to_owned().leak())
    });
    test.run_or_panic(|_| {
        let Err(DeviceUnavailable::Tpu(reason)) = Tpu.devices() else {
            panic!("a TPU was found");
        };
        let error = TPU.load().unwrap_err();
        assert_eq!(error.to_string(), reason.to_string());
        assert_eq!(error.downcast_ref(), Some(&DeviceUnavailable::Tpu(reason.clone())));
        check(reason);
        // The CPU is as before.
        let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        weight.matmul(&weight).sum(Kind::Float).backward();
        assert_eq!(weight.grad().sum(Kind::Float).double_value(&[]), 16.0);
    });
}

/// Returns a library that has none of the functions.
fn other_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    path.filter(|path| path.contains("/libm.so")).map(PathBuf::from).next().unwrap()
}

/// Makes a cache of Brigade's with libraries that are none of TorchTPU's.
fn cache(glue: bool) -> tempfile::TempDir {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("brigade/tpu").join(TpuFiles::find().unwrap().version());
    let common = folder.join("torch_tpu/csrc/common");
    let release = brigade_torch::libtorch_version().split('+').next().unwrap().replace('.', "_");
    let release = if glue { release } else { "1_0_0".to_owned() };
    let of_libtorch = common.join(format!("glue_{release}"));
    fs::create_dir_all(&of_libtorch).unwrap();
    let version = TpuFiles::find().unwrap().version().to_owned();
    fs::write(folder.join("VERSION"), format!("TorchTPU\ntorch-tpu=={version}\n")).unwrap();
    fs::copy(other_library(), common.join("libxla_base.so")).unwrap();
    let name = format!("libpywrap_{release}_common.so");
    fs::copy(other_library(), of_libtorch.join(name)).unwrap();
    cache
}

#[needs()]
fn nothing_is_installed() {
    let name = concat!(module_path!(), "::nothing_is_installed");
    with(name, &[("XDG_CACHE_HOME", Path::new("/proc/none"))], |reason| {
        assert_eq!(reason, TpuUnavailable::NotInstalled);
        let text = "TorchTPU is not installed: run `brigade setup --tpu`";
        assert_eq!(reason.to_string(), text);
    });
}

#[needs(Tpu)]
fn a_plugin_without_its_function_is_named() {
    let name = concat!(module_path!(), "::a_plugin_without_its_function_is_named");
    let plugin = other_library();
    with(name, &[("TPU_LIBRARY_PATH", &plugin)], |reason| {
        let text = reason.to_string();
        assert!(text.starts_with("TorchTPU cannot be loaded: /"), "{text}");
        assert!(text.ends_with("has no function GetPjrtApi"), "{text}");
    });
}

#[needs(Tpu)]
fn a_missing_plugin_is_named() {
    let name = concat!(module_path!(), "::a_missing_plugin_is_named");
    with(name, &[("TPU_LIBRARY_PATH", Path::new("/proc/none.so"))], |reason| {
        assert!(reason.to_string().contains("/proc/none.so"), "{reason}");
    });
}

#[needs(Tpu)]
fn a_library_without_a_function_is_named() {
    let name = concat!(module_path!(), "::a_library_without_a_function_is_named");
    let (cache, plugin) = (cache(true), TpuFiles::find().unwrap().plugin().unwrap());
    let variables = [("XDG_CACHE_HOME", cache.path()), ("TPU_LIBRARY_PATH", &*plugin)];
    with(name, &variables, |reason| {
        let text = reason.to_string();
        assert!(text.contains("libpywrap_"), "{text}");
        assert!(text.ends_with("has no function torch_tpu::AddTpuHooks()"), "{text}");
    });
}

#[needs(Tpu)]
fn a_libtorch_without_a_library_is_named() {
    let name = concat!(module_path!(), "::a_libtorch_without_a_library_is_named");
    let (cache, plugin) = (cache(false), TpuFiles::find().unwrap().plugin().unwrap());
    let variables = [("XDG_CACHE_HOME", cache.path()), ("TPU_LIBRARY_PATH", &*plugin)];
    with(name, &variables, |reason| {
        let libtorch = brigade_torch::libtorch_version();
        assert!(matches!(reason, TpuUnavailable::OtherLibtorch { .. }), "{reason:?}");
        assert!(reason.to_string().contains(&libtorch), "{reason}");
    });
}

#[needs(Tpu)]
fn a_machine_without_a_tpu_is_told_from_one_with_it() {
    let name = concat!(module_path!(), "::a_machine_without_a_tpu_is_told_from_one_with_it");
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("libtpu.so");
    fs::copy(other_library(), &plugin).unwrap();
    // Where the file system of a host without devices begins.
    let variables = [("TPU_LIBRARY_PATH", &*plugin), ("BRIGADE_HOST_ROOT", folder.path())];
    with(name, &variables, |reason| assert_eq!(reason, TpuUnavailable::NoDevice));
}

brigade_test_needs::main!();
