//! Images as batches of tensors: data sets that a loader turns into batches, and transforms of
//! batches on their device. What needs no tensor is in `brigade-images` and re-exported here.
//!
//! - [`source`]: where encoded images come from.
//! - [`labels`]: the classes of images, and which of them are to validate with.
//! - [`decode`]: bytes to pixels.
//! - [`transforms`]: what is done to one image before it is part of a batch.
//! - [`augment`]: what is done to a batch of images on its device.
//! - [`ImageDataset`]: a source, labels and transforms as batches of tensors.
//! - [`ResizedDataset`]: the same, with the resize on a GPU.
//! - [`SegmentationDataset`]: images with a mask of classes each.
//! - [`PointDataset`]: images with points on them.

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
