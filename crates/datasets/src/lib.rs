//! Datasets by name (embedded digits, MNIST, FashionMNIST, fastai's archives), with downloads and readers of their files.
//!
//! [`Digits`] are embedded in the program; [`Mnist`], [`FashionMnist`] and any folder of IDX files ([`IdxFolder`])
//! become [`LabelledImages`]. The loaders of `brigade-data` make batches of them. [`untar_data`] downloads the archives
//! that fastai offers ([`Urls`]), or any other archive, and unpacks them into fastai's folders.
//!
//! ```
//! use brigade_data::DataLoader;
//! use brigade_datasets::Digits;
//!
//! let digits = Digits::train()?.resize(28, 28)?;
//! let loader = DataLoader::new(digits).batch_size(64).shuffle(true).seed(42).threads(1);
//! for batch in &loader {
//!     let (images, labels) = batch?.into_data(); // f32 [64, 1, 28, 28], i64 [64]
//! }
//! # Ok::<(), brigade_torch::Error>(())
//! ```

mod archive;
mod digits;
mod download;
mod error;
mod idx;
mod images;
mod lock;
#[cfg(test)]
mod loopback;
mod mnist;
mod progress;
mod untar;
mod urls;

pub use archive::Extraction;
pub use digits::Digits;
pub use download::Download;
pub use error::DatasetError;
pub use idx::IdxFile;
pub use images::LabelledImages;
pub use mnist::{FashionMnist, IdxFolder, Mnist};
pub use untar::{UntarData, untar_data};
pub use urls::Urls;
