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

mod cache;
mod file;
mod fused;
mod nvrtc;

pub use cache::{Cache, Code, Origin};
pub use file::{CAPABILITIES, Element, FILES, File, MIN_CAPABILITY, Variant};
pub use fused::{FUSED_VARIABLE, Fused, FusedError};
pub use nvrtc::{CompileError, Compiler};
