//! Matrix products on the CPU whose bits do not depend on the memory addresses of their operands.

use crate::bridge::ffi;
pub use crate::bridge::ffi::Products;

/// Makes matrix products on the CPU reproducible, so that their bits do not depend on the memory addresses of the
/// operands, and returns whether that succeeded.
///
/// libtorch leaves float32 and float64 products to MKL, which chooses among kernels by the alignment of the operands: a
/// gradient at another position in a bucket, or a batch in another block of memory, then has different last digits.
/// MKL's conditional numerical reproducibility (`MKL_CBWR=AUTO,STRICT`) prevents that. It is a setting of the whole
/// process that must be made before MKL's first product; the environment variable `MKL_CBWR` takes precedence. The
/// Accelerator and models make it; [`crate::ProcessGroup`]s do not need it.
///
/// Last digits still depend on the number of threads, the generation of the processor, and the version of libtorch.
/// They also depend on the number of rows of a product, by which MKL chooses kernels: a sample alone and the same
/// sample in a batch may differ.
///
/// ```
/// use brigade_torch::make_products_reproducible;
/// if let Some(caveat) = make_products_reproducible().caveat() {
///     eprintln!("{caveat}");
/// }
/// ```
#[must_use]
pub fn make_products_reproducible() -> Products {
    ffi::make_products_reproducible()
}

/// Returns the kernels that libtorch and MKL choose on this processor, such as `AVX512, MKL branch 12`. Other kernels
/// round differently.
#[must_use]
pub fn cpu_kernels() -> String {
    ffi::cpu_kernels()
}

impl Products {
    /// Returns a message if products are not reproducible: the consequence, the reason, and the remedy. `None` if they
    /// are.
    #[must_use]
    pub fn caveat(self) -> Option<&'static str> {
        match self {
            Self::TurnedOff => Some(
                "the last digits of matrix products may depend on where tensors lie in memory, since \
                 MKL_CBWR is set to something else than a strict mode of MKL; unset it, or set \
                 MKL_CBWR=AUTO,STRICT",
            ),
            Self::UsedBefore => Some(
                "the last digits of matrix products may depend on where tensors lie in memory, since \
                 they were used before the Accelerator was made; make it first, or set \
                 MKL_CBWR=AUTO,STRICT",
            ),
            Self::Unsupported => Some(
                "the last digits of matrix products may depend on where tensors lie in memory, since \
                 MKL has no reproducible mode for this processor, or libtorch was built without MKL",
            ),
            _ => None,
        }
    }
}
