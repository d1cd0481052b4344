//! Images without tensors: sources, labels, decoding, transforms, caches and packs.
//!
//! `brigade-vision` makes batches of tensors from them. The crate does not use libtorch, so that `brigade data` can
//! examine a folder of images without it.
//!
//! - [`source`]: sources of encoded images.
//! - [`labels`]: classes of images, and the split into training and validation.
//! - [`decode`]: decoding of images to pixels.
//! - [`transforms`]: transforms of one image.
//! - [`ImageSamples`]: images of a source with labels and transforms, read one at a time.
//! - [`Packer`], [`PackedImages`]: decoded images in one file.
//! - [`ImageStats`]: sizes, broken images, mean and standard deviation of the colours.
//!
//! ```
//! use brigade_images::source::ImageFolder;
//! use brigade_images::transforms::{Compose, Resize};
//! use brigade_images::{ImageSamples, Size};
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
//! # bmp.resize(58, 0);
//! # std::fs::create_dir(folder.join("dogs"))?;
//! # std::fs::write(folder.join("dogs/one.bmp"), bmp)?;
//!
//! let samples = ImageSamples::from(ImageFolder::open(folder)?)
//!     .transforms(Compose::new().then(Resize::shorter(8)));
//! samples.begin_epoch(0)?;
//! let mut reader = samples.reader();
//! samples.read(&mut reader, 0, 0, 1)?;
//! let (image, _still_to_mirror) = reader.image();
//! assert_eq!((image.size(), samples.labels()), (Size::from(8), &[0][..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How an image becomes a sample
//!
//! An [`ImageSource`](source::ImageSource) returns encoded bytes by index, and labels add classes. [`ImageSamples`]
//! reads one sample: the transforms create a [`Plan`](transforms::Plan) from the size of the image, which is known from
//! its header, and the renderer executes it. Operations are plain data that are known before the image is decoded, so
//! neighbouring crops, resizes and flips become one pass: the decoder decodes a region, the resizer resizes a part, and
//! mirroring is left to the code that writes the batch (`to_tensor.rs` of `brigade-vision`), which reads each pixel
//! once and writes each number once.
//!
//! Random numbers of a sample depend on the seed, the epoch, the sample and the position of the transform, and on
//! nothing else. A mask goes through the same plan, without the operations that leave pixels in place
//! (`Plan::for_masks`).
//!
//! JPEG is decoded by libjpeg-turbo-rs. Its results are those of libjpeg-turbo, and therefore of Pillow, byte for byte,
//! without C, cmake or nasm at build time; it can skip blocks outside of a region, and decode at fractions of the size.
//! On photographs of 500 x 375 it decodes 2,060 images/s on a thread (Pillow, with libjpeg-turbo in C: 1,600); the
//! pixels of zune-jpeg differ. A scan is read no further than the last row of the crop (`decode/jpeg.rs`): entropy
//! decoding takes most of the time, and cannot be skipped above a crop. So a file that is damaged below the crop can be
//! read as a sample, although decoding the whole file would be an error.
//!
//! The cache (`samples/cache.rs`) and packs (`pack.rs`) are read at offsets, not mapped: a file that is cut short is
//! then an error, where a mapped file would end the process with SIGBUS. The name of a cache file is a key of the
//! source's fingerprint, the transforms before the first random one, and the options of the decoder. All entries have
//! checksums, which a process compares once.
//!
//! fast_image_resize 6.1 reads pixels outside of a temporary image if a filter is zero at a point within its support at
//! the edge of the image (found by the fuzz target `transforms`); `resize.rs` passes a bicubic filter without such a
//! point.

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
