//! Data loaders: batches of tensors from datasets, prefetched on threads and sharded over the ranks.
//!
//! - Data: a [`Dataset`] returns single samples (collated by [`Collate`]), a [`BatchedDataset`] whole batches, an
//!   [`IterableDataset`] a stream. [`TensorDataset`] holds tensors. MNIST and similar datasets are in
//!   `brigade-datasets`.
//! - Loaders: [`DataLoader`] and, for streams, [`StreamLoader`]. Both cut an epoch into batches, prefetch them on
//!   threads, and distribute them to the ranks by the rules of `brigade-sampling`.
//! - Each [`Batch`](struct@Batch) contains the number of its valid rows, on this rank and on all ranks, and whether it
//!   is the last of the epoch.
//!
//! ```
//! use brigade_data::{DataLoader, dataset_from_fn};
//!
//! let squares = dataset_from_fn(100, |index, _seed| Ok((index as f32, (index * index) as f32)));
//! let loader = DataLoader::new(squares).batch_size(32).shuffle(true).seed(42).threads(1);
//! for epoch in 0..4 {
//!     for batch in &loader {
//!         let (x, y) = batch?.into_data(); // f32 [32] each, [4] at the end
//!     }
//! }
//! # Ok::<(), brigade_torch::Error>(())
//! ```

mod batch;
mod batched_dataset;
mod beside;
mod collate;
mod dataset;
mod epoch;
mod error;
mod loader;
mod options;
mod seed;
mod stream_loader;
mod tensors;
mod workers;

pub use batch::Batch;
pub use batched_dataset::{BatchContext, BatchedDataset, BatchesFromFn, Map, batches_from_fn};
/// Derives [`Collate`], [`TensorTree`](brigade_torch::TensorTree) and [`Split`](brigade_torch::Split) for a struct of
/// tensors, so that it can be a sample and a batch.
///
/// A loader can then collate it, and it can be moved to a device, split into micro-batches and between ranks, gathered
/// over ranks, and read on one rank for all. Fields are tensors or trees of them (tuples, `Vec`, `Option`, maps, other
/// such structs); structs with named fields, tuple structs and generics are supported. A field that is a number in the
/// sample and a tensor in the batch has a type parameter as its type:
///
/// ```
/// use brigade_data::{Batch, Collate, DataError, DataLoader, dataset_from_fn};
/// use brigade_torch::TensorTree;
/// use tch::{Kind, Tensor};
///
/// #[derive(Batch)]
/// #[batch(crate = "brigade_data")] // not needed in a program that depends on `brigade`
/// struct Sentence<Label> {
///     tokens: Tensor,
///     mask: Tensor,
///     label: Label,
/// }
///
/// let sentences = dataset_from_fn(6, |index, _seed| {
///     let tokens = Tensor::from_slice(&[index as i64, 7, 0]);
///     let mask = tokens.f_ne(0)?;
///     Ok(Sentence { tokens, mask, label: index % 2 }) // a Sentence<usize>
/// });
/// for batch in &DataLoader::new(sentences).batch_size(2) {
///     let batch = batch?; // a Batch<Sentence<Tensor>>
///     assert_eq!(batch.tokens.size(), [2, 3]);
///     assert_eq!(batch.mask.kind(), Kind::Bool);
///     assert_eq!(batch.label, Tensor::from_slice(&[0i64, 1]));
///     assert_eq!(batch.split_rows(1)?.len(), 2);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Enums are rejected, because samples that are each one of several kinds have no common shape:
///
/// ```compile_fail
/// use brigade_data::Batch;
/// use tch::Tensor;
///
/// #[derive(Batch)]
/// #[batch(crate = "brigade_data")]
/// enum Sample {
///     Image(Tensor),
///     Text(Tensor),
/// }
/// ```
///
/// A field that does not consist of tensors is rejected as well:
///
/// ```compile_fail
/// use brigade_data::Batch;
/// use tch::Tensor;
///
/// #[derive(Batch)]
/// #[batch(crate = "brigade_data")]
/// struct Sample {
///     image: Tensor,
///     label: i64,
/// }
/// ```
pub use brigade_derive::Batch;
pub use collate::{Collate, CollateElement};
pub use dataset::{
    Dataset, DatasetFromFn, IterableDataset, SampleStream, StreamFromFn, VecDataset,
    dataset_from_fn, stream_from_fn,
};
pub use epoch::Epoch;
pub use error::DataError;
pub use loader::{BatchSampler, DataLoader};
pub use options::{LoaderCore, LoaderOptions};
pub use seed::{draw_seed, set_thread_seed};
pub use stream_loader::StreamLoader;
pub use tensors::TensorDataset;

/// Items that the code of `#[derive(Batch)]` refers to.
#[doc(hidden)]
pub mod __derive {
    pub use brigade_torch::{Error, Split, TensorTree, TreeSpec};
    pub use tch::Tensor;

    pub use crate::Collate;
}
