//! Datasets, and loaders that turn them into batches of tensors.
//!
//! - Data: [`Dataset`] makes whole batches, [`Samples`] single samples (collated by [`Collate`]),
//!   [`IterableDataset`] a stream. [`Digits`] are embedded; [`Mnist`], [`FashionMnist`] and any
//!   folder of IDX files are [`LabelledImages`]; [`TensorDataset`] holds tensors.
//! - Loaders: [`DataLoader`] and, for streams, [`StreamLoader`]. Both cut an epoch into batches,
//!   make them ahead on threads, and give each rank its part by the rules of `brigade-plan`.
//! - Each [`Batch`] knows how many of its rows are real, on this rank and on all, and whether it is
//!   the last.
//!
//! ```no_run
//! use brigade_data::{DataLoader, Digits};
//!
//! let digits = Digits::train()?.resize(28, 28)?;
//! let loader = DataLoader::new(digits).batch_size(64).shuffle(true).seed(42).threads(1);
//! for epoch in 0..4 {
//!     for batch in &loader {
//!         let (images, labels) = batch?.into_data(); // f32 [64, 1, 28, 28], i64 [64]
//!     }
//! }
//! # Ok::<(), brigade_data::DataError>(())
//! ```

mod batch;
mod collate;
mod dataset;
mod digits;
mod download;
mod epoch;
mod error;
mod idx;
mod images;
mod loader;
mod mnist;
mod options;
mod samples;
mod stream_loader;
mod tensors;
mod workers;

pub use batch::Batch;
pub use brigade_plan::{
    PlanError, Round, Sampler, Scheme, Sequential, ShardOptions, Shuffle, Weighted,
};
pub use brigade_torch::from_vec;
pub use collate::Collate;
pub use dataset::{BatchContext, BatchesFromFn, Dataset, Map, batches_from_fn};
pub use digits::Digits;
pub use download::Download;
pub use epoch::Epoch;
pub use error::DataError;
pub use idx::IdxFile;
pub use images::LabelledImages;
pub use loader::{BatchLists, DataLoader};
pub use mnist::{FashionMnist, IdxFolder, Mnist};
pub use options::LoaderOptions;
pub use samples::{
    Collated, IterableDataset, SampleStream, Samples, SamplesFromFn, StreamFromFn, samples_from_fn,
    stream_from_fn,
};
pub use stream_loader::StreamLoader;
pub use tensors::TensorDataset;
