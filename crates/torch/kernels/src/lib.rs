//! GPU kernels of Brigade as text, and the cache of their compiled code.
//!
//! Each [`File`] has the kernels of one concept. [`Variant`] is such a file for a type of elements and a GPU's compute
//! capability. A training program compiles it at its first use with the NVRTC of libtorch, and keeps the code in the
//! user's [`Cache`]; `brigade kernels --build` fills the cache on a machine without a GPU. Both go through this crate,
//! so they agree about the names of the cached files.
//!
//! ```
//! use brigade_kernels::{Element, File, Variant};
//!
//! let file = File::find("norm_relu").expect("the name of a file");
//! let variant = Variant { file, element: Element::Bfloat16, capability: 90 };
//! assert_eq!(variant.options()[0], "--gpu-architecture=sm_90");
//! assert!(variant.source().contains("struct NormArguments"));
//! ```
//!
//! # Adding a file
//!
//! 1. `NAME.cu` in this folder: the struct that its kernels take by value, which C++ includes, too; then the kernels,
//!    inside of `#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)`. Its head states the registers of a
//!    thread. It includes nothing; `common.cuh` stands in front of it.
//! 2. An entry in [`FILES`].
//! 3. `NAME.h` and `NAME.cpp` in `crates/torch/cpp/kernels`, which fill in the struct and launch the kernels.
//! 4. Its names in the emulation, `dev/test-device/cpp/kernels.cpp`, and tests in `crates/torch/tests/numeric`.
//! 5. `cargo xtask check --kernels libnvrtc.so` compiles it for all capabilities and reads ptxas's report.

mod cache;
mod file;
mod fused;
mod nvrtc;

pub use cache::{Cache, Code, KeptChoice, KeptChoices, Origin};
pub use file::{CAPABILITIES, Element, FILES, File, MIN_CAPABILITY, Variant};
pub use fused::{EPILOGUES, FUSED_VARIABLE, Fused, FusedError};
pub use nvrtc::{CompileError, Compiler};
