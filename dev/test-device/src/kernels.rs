//! Kernels that brigade-torch compiles on a GPU, compiled for the CPU.

use std::ffi::CString;
use std::{array, ptr};

use tch::Tensor;

use crate::error::FakeError;
use crate::ffi;

/// Cross-entropy of rows of logits with its gradient. The tensors are on the CPU.
#[derive(Debug)]
pub struct CrossEntropy<'a> {
    /// Logits `[rows, columns]` of bfloat16, float16 or float32, whose first `classes` columns are classes.
    pub logits: &'a Tensor,
    /// Number of classes.
    pub classes: i64,
    /// Targets, int64 `[rows]`.
    pub targets: &'a Tensor,
    /// Number that divides the gradient, an int64 scalar, if any.
    pub count: Option<&'a Tensor>,
    /// Place of the gradient, if it is wanted: it may be the logits.
    pub gradient: Option<&'a Tensor>,
    /// Target of rows that do not count.
    pub ignore_index: i64,
    /// Label smoothing.
    pub label_smoothing: f64,
    /// Factor of the squared logarithm of the sum of exponentials.
    pub z_loss: f64,
    /// Factor of the gradient.
    pub scale: f64,
}

impl CrossEntropy<'_> {
    /// Fills in the gradient and returns the losses, float32 `[rows]`.
    ///
    /// # Errors
    /// Fails if the kernels do not support the logits, and for a target that is neither a class nor `ignore_index`.
    pub fn run(&self) -> Result<Tensor, FakeError> {
        let handle = |tensor: &Tensor| tensor.as_ptr().cast();
        let inputs = [
            handle(self.logits),
            handle(self.targets),
            self.count.map_or(ptr::null(), handle),
            self.gradient.map_or(ptr::null(), handle),
        ];
        let mut losses = Tensor::new();
        // SAFETY: all are handles of tensors that live here, as many as the function takes, and it keeps none.
        let message = unsafe {
            ffi::fake_gpu_cross_entropy(
                inputs.as_ptr(),
                losses.as_mut_ptr().cast(),
                self.classes,
                self.ignore_index,
                self.label_smoothing,
                self.z_loss,
                self.scale,
            )
        };
        ffi::result(message)?;
        Ok(losses)
    }
}

/// Returns which values of `tiles` times 128 in a row dropout keeps (bool): by the function that kernels share, and by
/// that of the CPU.
///
/// Kept are values whose random number of 16 bits is at least `below`.
///
/// # Errors
/// Fails for more tiles than the threads of one block have, 64.
pub fn kept_by_dropout(
    seed: u64,
    row: u64,
    tiles: i64,
    below: u32,
) -> Result<[Tensor; 2], FakeError> {
    let mut outputs: [Tensor; 2] = array::from_fn(|_| Tensor::new());
    let places = outputs.each_mut().map(|tensor| tensor.as_mut_ptr().cast());
    // SAFETY: both handles are valid during the call.
    let message = unsafe { ffi::fake_gpu_dropout(places.as_ptr(), seed, row, tiles, below) };
    ffi::result(message)?;
    Ok(outputs)
}

/// Runs the function while operations on GPUs made of host memory call Brigade's kernels, which are emulated: a thread
/// for each one of a block. Without it they call libtorch's operators, as on a GPU without NVRTC.
pub fn emulated<R>(function: impl FnOnce() -> R) -> R {
    with_kernels(false, function)
}

/// Does the same as [`emulated`] for accounts: launches are counted, and nothing runs. Their results have no values.
pub fn counted<R>(function: impl FnOnce() -> R) -> R {
    with_kernels(true, function)
}

fn with_kernels<R>(count_only: bool, function: impl FnOnce() -> R) -> R {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            // SAFETY: takes Booleans.
            unsafe { ffi::fake_gpu_emulate_kernels(false, false) };
        }
    }
    // SAFETY: takes Booleans.
    unsafe { ffi::fake_gpu_emulate_kernels(true, count_only) };
    let _off = Off;
    function()
}

/// Times of a library of products with epilogues, in milliseconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProductTimes<'a> {
    /// Time of each algorithm that the library offers. Those below 0 fail.
    pub algorithms: &'a [f64],
    /// Time of each other launch.
    pub launch: f64,
    /// Part of the names of launches, and the time of those. There are none if it is empty.
    pub named: (&'a str, f64),
    /// GPU and versions for which choices are kept in the user's cache. They are not kept if it is empty.
    pub identity: &'a str,
}

/// Runs the function while products of GPUs made of host memory may have epilogues, as by cuBLASLt, of which no choice is
/// known.
///
/// # Panics
/// Panics if a text has a null byte.
pub fn with_products<R>(times: ProductTimes<'_>, function: impl FnOnce() -> R) -> R {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            // SAFETY: takes nothing.
            unsafe { ffi::fake_gpu_remove_products() };
        }
    }
    let ProductTimes { algorithms, launch, named: (part, own), identity } = times;
    let [part, identity] =
        [part, identity].map(|text| CString::new(text).expect("a text without null bytes"));
    // SAFETY: all are copied during the call, and the number is that of the times.
    unsafe {
        ffi::fake_gpu_set_products(
            algorithms.as_ptr(),
            algorithms.len(),
            launch,
            part.as_ptr(),
            own,
            identity.as_ptr(),
        );
    }
    let _off = Off;
    function()
}
