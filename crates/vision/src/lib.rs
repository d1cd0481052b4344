//! Images as data: sources of encoded images, transforms of samples, and data sets
//! that a loader turns into batches.
//!
//! - [`source`]: where encoded images come from.
//! - [`labels`]: the classes of images, and which of them are to validate with.
//! - [`decode`]: bytes to pixels.
//! - [`transforms`]: what is done to one image before it is part of a batch.
//! - [`augment`]: what is done to a batch of images on its device.
//! - [`ImageDataset`]: a source, labels and transforms as batches of tensors.

pub mod augment;
mod dataset;
pub mod decode;
mod error;
mod image;
pub mod labels;
mod resize;
pub mod source;
pub mod transforms;

pub use dataset::{CacheOptions, ImageDataset, OnBroken, PackReport, PackedImages, Packer};
pub use error::{Result, VisionError};
pub use image::{CropBox, Image, ImageView, Region, Size};
pub use resize::{Filter, Resizer};
