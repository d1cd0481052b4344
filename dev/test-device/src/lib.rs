//! GPUs for tests: the device on which tests run, and GPUs made of host memory.
//!
//! A libtorch for CPUs has no kernel for CUDA. [`fake::install`] makes it believe that it has CUDA devices: their
//! memory is the host's, and their operators are the CPU's. Tests then hold, without a GPU, that tensors are on the
//! device where they belong, that nothing waits for the device without need, that copies from pinned memory are waited
//! for, and that generators of different devices have states of their own. [`fake::account`] counts the operators of a
//! training step and the bytes that they move, so that a ceiling fails where a change brings a cast or a copy back. What
//! a GPU computes, and how fast, they do not show.
//!
//! [`device`] is the device that the variable `BRIGADE_TEST_DEVICE` names, so that one test runs on the CPU, on such
//! GPUs, and on a real one.
//!
//! [`perturb`] and [`changes`] measure, on the processor of the test, how far rounding can move results.
//!
//! # How GPUs are made of host memory
//!
//! Kernels are registered for libtorch's dispatch key CUDA, which has none in a libtorch for CPUs: a boxed function
//! turns the tensors of a call into CPU tensors on the same memory, calls the CPU's kernel, and returns the results
//! as tensors of the device. The hooks that libtorch calls for CUDA, an allocator, and a device guard with streams
//! and events complete it. tch has no devices but CPU, CUDA, MPS and Vulkan, so a custom device (PrivateUse1) cannot
//! be used.
//!
//! This shows where tensors are, what waits for a device, which copies were not waited for, which memory was freed
//! too early, and what a graph replays. Only copies on streams other than the default one are delayed; everything
//! else runs at once, so a missing synchronisation between kernels is not found.
//!
//! # Tests of numbers
//!
//! Tests of numbers take the device of their tensors from `numeric_device` (without TF32) and compare with
//! `tolerance`, which is 0 if the kernels are the CPU's. `cargo xtask test --device fake` runs them, and CI does
//! after the suite. A test of the CPU's own kernels, threads or memory names the CPU. A test of something that only a
//! GPU does takes its device from `gpu`, in the suite too, and counts waits with `without_waiting`.
//! `crates/train/tests/torch_losses.rs` compares losses with those of the PyTorch of the machine, on either device.
//!
//! Trainings that are compared with fastai's take their tolerance from runs of the same training with weights
//! perturbed by two units in the last place ([`perturb`], [`changes`]). `cargo xtask test --processor avx2|avx512`
//! runs the tests of numbers with the kernels of other processors, and CI does after the suite.

mod error;
pub mod fake;
mod ffi;
pub mod kernels;
mod rounding;

use brigade_torch::{DeviceExt, GpuMath, TPU, tpu_compiled};
use parking_lot::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};

pub use rounding::{changes, perturb};

/// Runs a function that must not make the host wait for a GPU, and panics if it does: with the names of the waits on
/// GPUs made of host memory, with libtorch's own check on real ones. On the CPU it only runs the function.
///
/// Threads that read data may wait for their own streams.
///
/// # Panics
///
/// Panics on a wait.
pub fn without_waiting<R>(function: impl FnOnce() -> R) -> R {
    // First: tests install such GPUs even if no variable asks for a device.
    if fake::is_installed() {
        let mut result = None;
        let mut waits = fake::synchronizations(|| result = Some(function()));
        waits.retain(|wait| wait != fake::SIDE_STREAM);
        assert!(waits.is_empty(), "the host waited for the GPU: {waits:?}");
        return result.expect("the function has run");
    }
    if device() == Device::Cpu {
        return function();
    }
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

/// Variable that selects the device of the tests.
pub const DEVICE_VARIABLE: &str = "BRIGADE_TEST_DEVICE";

/// Returns the device that `BRIGADE_TEST_DEVICE` selects.
///
/// Unset or `cpu`: the CPU. `fake`: the first of two GPUs made of host memory, which it installs. `cuda`: the first
/// real GPU. `tpu`: the TPU, or what TorchTPU's plug-in has instead.
///
/// # Panics
///
/// Panics on another value, with `cuda` if tch finds no GPU, with `fake` if the program is linked with CUDA, and with
/// `tpu` if there is none.
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
        "tpu" => {
            TPU.load().unwrap_or_else(|error| panic!("{DEVICE_VARIABLE}=tpu: {error}"));
            assert!(tpu_compiled(), "{DEVICE_VARIABLE}=tpu: build with the feature tpu");
            TPU
        }
        other => panic!("{DEVICE_VARIABLE}={other}: it is cpu, fake, cuda or tpu"),
    }
}

/// Returns the GPU for a test of GPU behaviour, and a guard to hold while the test runs: waits are counted for the
/// whole process, which also shares libtorch's random numbers and settings.
///
/// It is the second of two GPUs made of host memory, which is not the current device at the start, unless
/// `BRIGADE_TEST_DEVICE` selects another one.
///
/// # Panics
///
/// Panics as [`device`] does, and in a program that is linked with CUDA if the variable is unset.
pub fn gpu() -> (Device, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    // The result of a failed test does not affect the next one.
    let alone = ALONE.lock();
    let device = match device() {
        Device::Cpu => {
            fake::install(2).unwrap_or_else(|error| panic!("a GPU for tests: {error}"));
            Device::Cuda(1)
        }
        device => device,
    };
    (device, alone)
}

/// Returns [`device`] for comparisons of numbers: on a GPU, products and convolutions of float32 then have full
/// precision, in the whole process.
///
/// With TF32, the default of libtorch's convolutions, operands are rounded to 10 bits: results differ by 1e-3 from
/// those of a CPU, which no comparison could distinguish from a mistake. An `Accelerator` has a setting of its own:
/// tests that build one call `.tf32(false)`.
///
/// # Panics
///
/// Panics as [`device`] does.
#[must_use]
pub fn numeric_device() -> Device {
    let device = device();
    if device != Device::Cpu {
        GpuMath { tf32: false, benchmark: false, deterministic: false }.apply();
    }
    device
}

/// Returns a tensor on [`numeric_device`], for inputs and expected values that are made from numbers of the host.
///
/// # Panics
///
/// Panics as [`device`] does.
pub fn on_device(tensor: &Tensor) -> Tensor {
    tensor.to_device(numeric_device())
}

/// Returns the allowed difference of results that have the same bits on a CPU: the largest difference, divided by the
/// largest value.
///
/// It is 0 on the CPU, and on GPUs made of host memory, whose kernels are the CPU's. On a real GPU a sum is computed by
/// threads, in an order that depends on shapes, on the kernel that cuBLAS or cuDNN chooses, and with atomic additions
/// on timing; `exp` and similar functions differ in the last digit; and a compiler fuses products and sums into one
/// rounding.
///
/// - float64: 1e-10. An operation rounds by 1.1e-16; a million roundings that all go one way come to that.
/// - float32: 1e-5. An operation rounds by 6e-8; tests sum some thousand products, whose roundings come to less than
///   170 of one.
/// - float16 and bfloat16: twice the rounding of the result, 2⁻¹⁰ and 2⁻⁷, since a value that lies between two numbers
///   can be rounded to either.
/// - Whole numbers and truth values: 0.
///
/// # Panics
///
/// Panics as [`device`] does.
#[must_use]
pub fn tolerance(kind: Kind) -> f64 {
    if device() == Device::Cpu || fake::is_installed() {
        return 0.0;
    }
    match kind {
        Kind::Double | Kind::ComplexDouble => 1e-10,
        Kind::Float | Kind::ComplexFloat => 1e-5,
        Kind::Half => 2_f64.powi(-10),
        Kind::BFloat16 => 2_f64.powi(-7),
        _ => 0.0,
    }
}

/// Asserts that two tensors have the same kind, shape, device and values: the same bits on the CPU, and within
/// [`tolerance`] on a real GPU.
///
/// # Panics
///
/// Panics if they do not.
#[track_caller]
pub fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(
        (found.kind(), found.size(), found.device()),
        (expected.kind(), expected.size(), expected.device()),
        "{what}: kind, shape and device"
    );
    let allowed = tolerance(expected.kind());
    if allowed == 0.0 || expected.numel() == 0 {
        assert!(found.equal(expected), "{what}: other values than expected");
        return;
    }
    let [found, expected] = [found, expected].map(|it| it.to_kind(Kind::Double));
    let size = expected.abs().max().double_value(&[]);
    let apart = (found - expected).abs().max().double_value(&[]);
    assert!(apart <= allowed * size, "{what}: {apart} apart, of {size}; allowed: {allowed} of it");
}
