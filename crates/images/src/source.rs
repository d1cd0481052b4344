//! Sources of encoded images and their labels.
//!
//! - [`ImageFiles`]: the images below a folder, or those of a list.
//! - [`ImageFolder`]: a folder for each class, as torchvision reads it.
//! - [`WebDataset`]: tar archives.
//! - `ParquetImages`: the tables of the Hugging Face hub, with the feature `parquet`.
//!
//! [`crate::labels`] adds classes to the images of any source, and splits them into images for training and for
//! validation.

mod folder;
#[cfg(feature = "parquet")]
mod parquet;
mod paths;
mod webdataset;

pub use self::folder::{ImageFolder, ImageFolderOptions};
#[cfg(feature = "parquet")]
pub use self::parquet::{ParquetImages, ParquetOptions};
pub use self::webdataset::{WebDataset, WebDatasetOptions};
pub use crate::image_source::{
    FindFiles, Fingerprint, IMAGE_EXTENSIONS, ImageFiles, ImageSource, MAX_ENCODED_BYTES,
    file_version,
};
