//! Images as batches of tensors: datasets for a loader, and transforms of batches on their device.
//!
//! Everything that does not use tensors is in `brigade-images`, and is re-exported here.
//!
//! - [`source`]: sources of encoded images.
//! - [`labels`]: classes of images, and the split into training and validation.
//! - [`decode`]: decoding of images to pixels.
//! - [`transforms`]: transforms of one image, before it is part of a batch.
//! - [`augment`]: transforms of a batch of images on its device.
//! - [`ImageDataset`]: batches of tensors from a source, labels and transforms.
//! - [`ResizedDataset`]: an [`ImageDataset`] whose images are resized on a GPU.
//! - [`SegmentationDataset`]: images, each with a mask of classes.
//! - [`PointDataset`]: images with points as targets.
//!
//! ```
//! use std::borrow::Cow;
//!
//! use brigade_data::DataLoader;
//! use brigade_vision::source::ImageSource;
//! use brigade_vision::transforms::{Compose, Normalize, RandomResizedCrop, ToTensor};
//! use brigade_vision::{ImageDataset, ImageError};
//!
//! /// The same picture, again and again.
//! struct Repeated(Vec<u8>, usize);
//!
//! impl ImageSource for Repeated {
//!     fn len(&self) -> usize {
//!         self.1
//!     }
//!
//!     fn read(&self, _: usize, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
//!         buffer.clone_from(&self.0);
//!         Ok(())
//!     }
//!
//!     fn name(&self, index: usize) -> Cow<'_, str> {
//!         format!("picture {index}").into()
//!     }
//! }
//!
//! # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
//! # bmp.resize(54, 0);
//! # bmp.extend([1, 2, 3, 0]);
//! let pictures = Repeated(bmp, 100);
//! let dataset = ImageDataset::new(pictures, (0..100).collect())?
//!     .transforms(Compose::new().then(RandomResizedCrop::new(32)))
//!     .to_tensor(ToTensor::f32().normalize(Normalize::IMAGENET));
//! for batch in &DataLoader::new(dataset).batch_size(20).shuffle(true).threads(2) {
//!     let (images, labels) = batch?.into_data();
//!     assert_eq!((images.size(), labels.size()), (vec![20, 3, 32, 32], vec![20]));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Transforms of batches
//!
//! The random numbers of a batch's transforms are drawn in the loader's threads (`augment/draw.rs`): a row of 25
//! numbers for each sample, which is part of the batch, so that the device only computes. Constants are created by
//! kernels, never copied from pageable memory, because the host would wait for such a copy. Positions are computed
//! elementwise, because a product of matrices is rounded in TF32. Transforms that only move whole pixels
//! (`moves_whole_pixels`) gather them without interpolation. [`ResizedDataset`] splits the plan of an image at its
//! first resize: decoding and the operations before the resize run on the CPU.

mod agree;
pub mod augment;
mod dataset;
mod error;
mod points;
mod resized;
mod segmentation;
mod to_tensor;

pub use agree::check_ranks_agree;
pub use brigade_images::{
    CacheOptions, CropBox, Filter, Image, ImageError, ImageSamples, ImageStats, ImageView,
    OnBroken, PackReport, PackedImages, Packer, Region, Resizer, Size, decode, labels, source,
    transforms_table,
};
pub use dataset::ImageDataset;
pub use error::VisionError;
pub use points::PointDataset;
pub use resized::ResizedDataset;
pub use segmentation::SegmentationDataset;

/// Transforms of a single image, before it becomes part of a batch.
pub mod transforms {
    #[doc(inline)]
    pub use brigade_images::transforms::*;

    pub use crate::to_tensor::{Normalize, ToTensor};
}
