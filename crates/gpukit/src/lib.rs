//! GPUs for tests: the device on which tests run, and GPUs made of host memory.
//!
//! A libtorch for CPUs has no kernel for CUDA. [`fake::install`] makes it believe that it has CUDA devices: their
//! memory is the host's, and their operators are the CPU's. Tests then hold, without a GPU, that tensors are on the
//! device where they belong, that nothing waits for the device without need, that copies from pinned memory are waited
//! for, and that generators of different devices have states of their own. What a GPU computes, and how fast, they
//! do not show.
//!
//! [`device`] is the device that the variable `BRIGADE_TEST_DEVICE` names, so that one test runs on the CPU, on such
//! GPUs, and on a real one.

pub mod fake;
mod ffi;
mod graphs;

use tch::Device;

/// Runs something that may not have the host wait for a GPU, and fails where it does: with the names of what waited on
/// GPUs made of host memory, with libtorch's own check on real ones. On the CPU it only runs it.
///
/// # Panics
///
/// On a wait.
pub fn without_waiting<R>(function: impl FnOnce() -> R) -> R {
    match device() {
        Device::Cpu => function(),
        _ if fake::is_installed() => {
            let mut result = None;
            let waits = fake::synchronizations(|| result = Some(function()));
            assert!(waits.is_empty(), "the host waited for the GPU: {waits:?}");
            result.expect("the function has run")
        }
        _ => {
            struct Allowed;
            impl Drop for Allowed {
                fn drop(&mut self) {
                    brigade_torch::forbid_waiting(false);
                }
            }
            brigade_torch::forbid_waiting(true);
            let _allowed = Allowed;
            function()
        }
    }
}

/// The variable that names the device of the tests.
pub const DEVICE_VARIABLE: &str = "BRIGADE_TEST_DEVICE";

/// Returns the device that `BRIGADE_TEST_DEVICE` names.
///
/// Unset or `cpu`: the CPU. `fake`: the first of two GPUs made of host memory, which it installs. `cuda`: the first
/// real GPU.
///
/// # Panics
///
/// On another value, with `cuda` where tch finds no GPU, and with `fake` where the program is linked with CUDA.
#[must_use]
pub fn device() -> Device {
    let value = std::env::var(DEVICE_VARIABLE).unwrap_or_default();
    match value.as_str() {
        "" | "cpu" => Device::Cpu,
        "fake" => {
            fake::install(2).unwrap_or_else(|error| panic!("{DEVICE_VARIABLE}=fake: {error}"));
            Device::Cuda(0)
        }
        "cuda" => {
            assert!(
                tch::Cuda::is_available(),
                "{DEVICE_VARIABLE}=cuda: tch finds no GPU; on a machine with one run `cargo xtask setup --cuda` \
                 and build with the feature `cuda`, or use {DEVICE_VARIABLE}=fake"
            );
            Device::Cuda(0)
        }
        other => panic!("{DEVICE_VARIABLE}={other}: it is cpu, fake or cuda"),
    }
}
