//! The compiler of the kernels.

use brigade_dylib_call::Nvrtc;

use crate::file::Variant;

/// Compiler of kernels: NVRTC, or a replacement in tests.
pub trait Compiler: Sync {
    /// Returns the major and minor version.
    fn version(&self) -> (u32, u32);

    /// Compiles a variant and returns its code.
    ///
    /// # Errors
    /// Fails with the compiler's messages.
    fn compile(&self, variant: &Variant) -> Result<Vec<u8>, CompileError>;
}

/// Error of compiling a file of kernels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} cannot be compiled for sm_{capability}: {messages}")]
pub struct CompileError {
    /// Name of the text.
    pub name: String,
    /// Compute capability.
    pub capability: u32,
    /// Messages of the compiler.
    pub messages: String,
}

impl Compiler for Nvrtc {
    fn version(&self) -> (u32, u32) {
        Self::version(self)
    }

    fn compile(&self, variant: &Variant) -> Result<Vec<u8>, CompileError> {
        let name = variant.source_name();
        Self::compile(self, &variant.source(), &name, &variant.options()).map_err(|error| {
            CompileError { name, capability: variant.capability, messages: error.to_string() }
        })
    }
}
