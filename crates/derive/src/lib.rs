//! The derive macro `Batch` of [Brigade](https://docs.rs/brigade), documented as `brigade::data::Batch`.
//!
//! With the crate `brigade`, whose tests compile this example:
//!
//! ```text
//! #[derive(Batch)]
//! struct Pair {
//!     left: Tensor,
//!     right: Tensor,
//! }
//! ```

mod batch;

/// Implements `TensorTree`, `Collate` and `Split` for a struct of tensors. It is documented as `brigade::data::Batch`.
#[proc_macro_derive(Batch, attributes(batch))]
pub fn derive_batch(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let expanded = syn::parse(input).and_then(|input| batch::expand(&input));
    expanded.unwrap_or_else(|error| error.into_compile_error()).into()
}
