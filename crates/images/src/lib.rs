//! Images without tensors: where encoded images come from, their labels, decoding, transforms, and
//! samples that are cached or packed. `brigade-vision` makes batches of them.
//!
//! - [`source`]: where encoded images come from.
//! - [`labels`]: the classes of images, and which of them are to validate with.
//! - [`decode`]: bytes to pixels.
//! - [`transforms`]: what is done to one image.
//! - [`ImageSamples`]: a source, labels and transforms, one image at a time.
//! - [`Packer`], [`PackedImages`]: images without encoding in one file.
//! - [`ImageStats`]: sizes, broken images, mean and deviation of the colours.

pub mod decode;
mod error;
mod image;
mod image_source;
pub mod labels;
mod pack;
mod resize;
mod samples;
pub mod source;
mod stats;
pub mod transforms;

pub use error::{ImageError, Result};
pub use image::{CropBox, Image, ImageView, Region, Size};
pub use pack::{PackReport, PackedImages, Packer};
pub use resize::{Filter, Resizer};
pub use samples::{CacheOptions, ImageSamples, OnBroken, SampleReader};
pub use stats::ImageStats;
