//! Images that are decoded on the host and resized on a device.

use std::fmt;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_images::{Filter, Size};
use brigade_torch::{Error, Result, copy_to_device, from_vec};
use tch::{Device, Kind, TchError, Tensor};

use crate::source::ImageSource;
use crate::transforms::{Flips, Operation, ToTensor};
use crate::{ImageDataset, VisionError};

/// Data set of [`ImageDataset`]'s images that are resized on a device; created by [`ImageDataset::resized_on`].
pub struct ResizedDataset<S> {
    images: ImageDataset<S>,
    device: Device,
}

impl<S: ImageSource> ImageDataset<S> {
    /// Moves the resize of each image, and the operations after it, to a device: for datasets that do not fit on a GPU,
    /// if resizing on the host's threads takes more time than on the GPU. A thread reads and decodes an image up to the
    /// resize (for a random resized crop only the rows that it keeps) and copies its bytes through pinned memory; the
    /// GPU resizes it with antialiasing, mirrors it, and writes it into the batch. In a loader with a
    /// [`device`](brigade_data::DataLoader::device), such as a prepared one, this runs concurrently with the training
    /// step.
    ///
    /// Batches are bytes on the device, `[n, 3, h, w]`, with their labels. They are within one grey level of those of
    /// the CPU, as Pillow's are. Use [`Augment`](crate::augment::Augment) for normalisation and augmentation on the
    /// device. From the first resize on, only crops, flips and further resizes with bilinear or bicubic filters are
    /// supported; any other operation, and a [`ToTensor`] other than bytes, is an error at the first batch.
    ///
    /// ```
    /// use brigade_data::DataLoader;
    /// use brigade_vision::source::ImageFolder;
    /// use brigade_vision::transforms::{Compose, RandomHorizontalFlip, RandomResizedCrop};
    /// use brigade_vision::{ImageDataset, labels::Labelled};
    /// use tch::Device;
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
    /// # bmp.resize(58, 0);
    /// # std::fs::create_dir(folder.join("dogs"))?;
    /// # std::fs::write(folder.join("dogs/one.bmp"), bmp)?;
    ///
    /// let device = Device::cuda_if_available();
    /// let crop = Compose::new().then(RandomResizedCrop::new(64)).then(RandomHorizontalFlip::default());
    /// let dataset = ImageDataset::from(ImageFolder::open(folder)?).transforms(crop).resized_on(device);
    /// for batch in &DataLoader::new(dataset).batch_size(32).threads(2).device(device) {
    ///     let (images, labels) = batch?.into_data();
    ///     assert_eq!((&images.size()[1..], images.device()), (&[3, 64, 64][..], device));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn resized_on(self, device: Device) -> ResizedDataset<S> {
        ResizedDataset { images: self, device }
    }
}

impl<S> ResizedDataset<S> {
    /// Returns the underlying dataset, which decodes.
    #[must_use]
    pub fn inner(&self) -> &ImageDataset<S> {
        &self.images
    }
}

impl<S: ImageSource> BatchedDataset for ResizedDataset<S> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.images.labels().len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let ImageDataset { samples, to_tensor, readers } = &self.images;
        let len = samples.labels().len();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len }.into());
        }
        if ![ToTensor::default(), ToTensor::u8()].contains(to_tensor) {
            return Err(Error::invalid_argument(format!(
                "images that are resized on a device are bytes, not {to_tensor:?}; leave out `to_tensor`, and \
                 normalise with Augment"
            )));
        }
        samples.begin_epoch(context.epoch).map_err(VisionError::from)?;
        let mut reader = readers.take(samples);
        let mut images: Vec<Tensor> = Vec::with_capacity(indices.len());
        let mut labels: Vec<i64> = Vec::with_capacity(indices.len());
        for &index in indices {
            let seed = context.sample_seed(index);
            let (read, operations) = samples
                .read_before_resize(&mut reader, index, context.epoch, seed)
                .map_err(VisionError::from)?;
            let (view, flips) = reader.image();
            let Size { width, height } = view.size();
            let pixels = Tensor::f_from_data_size(
                view.pixels(),
                &[i64::from(height), i64::from(width), 3],
                Kind::Uint8,
            )?;
            let pixels = copy_to_device(&pixels, self.device)?.f_permute([2, 0, 1])?;
            let name = || samples.source().name(read).into_owned();
            let image = finished(&pixels, flips, &operations, &name)?;
            if let Some(first) = images.first()
                && first.size() != image.size()
            {
                return Err(Error::invalid_argument(format!(
                    "{} has {:?} as [channels, height, width] after the transforms, the batch's first image {:?}; \
                     bring all to one size by a crop or a resize of both sides",
                    name(),
                    image.size(),
                    first.size()
                )));
            }
            images.push(image);
            labels.extend(samples.labels().get(read).copied());
        }
        readers.give_back(reader);
        let rows = labels.len() as i64;
        let images = if images.is_empty() {
            Tensor::f_empty([0, 3, 0, 0], (Kind::Uint8, self.device))?
        } else {
            Tensor::f_stack(&images, 0)?
        };
        Ok((images, copy_to_device(&from_vec(labels, &[rows])?, self.device)?))
    }
}

/// Applies the remaining part of an image's plan to `[3, h, w]`.
fn finished(
    image: &Tensor,
    flips: Flips,
    operations: &[Operation],
    name: &dyn Fn() -> String,
) -> Result<Tensor> {
    let refused = |operation: &dyn fmt::Debug, what: &dyn fmt::Display| {
        Error::invalid_argument(format!("{}: {operation:?} on a device: {what}", name()))
    };
    let mirrored = |image: &Tensor, flips: Flips| {
        let dims = [(flips.horizontal, 2), (flips.vertical, 1)];
        let dims: Vec<i64> = dims.iter().filter(|(is, _)| *is).map(|(_, dim)| *dim).collect();
        if dims.is_empty() { Ok(image.shallow_clone()) } else { image.f_flip(dims) }
    };
    let mut image = mirrored(image, flips).map_err(|error| refused(&flips, &error))?;
    for operation in operations {
        let done = match operation {
            Operation::Resize { size, filter: Filter::Bilinear } => resized(&image, *size, false),
            Operation::Resize { size, filter: Filter::Bicubic } => resized(&image, *size, true),
            Operation::Crop(region) => {
                let [left, top, width, height] =
                    [region.left, region.top, region.width, region.height].map(i64::from);
                image.f_narrow(1, top, height).and_then(|rows| rows.f_narrow(2, left, width))
            }
            Operation::FlipHorizontal => image.f_flip([2]),
            Operation::FlipVertical => image.f_flip([1]),
            other => {
                let what = "from the first resize on there are crops, flips, and bilinear and bicubic resizes alone; \
                            leave the rest to Augment, or resize on the CPU";
                return Err(refused(other, &what));
            }
        };
        image = done.map_err(|error| refused(operation, &error))?;
    }
    Ok(image)
}

/// Maximum reduction in one step; larger ones are resized in one direction after the other: CUDA's kernel holds the
/// weights of both in 48 KB, which are full at a reduction of 47 with bicubic filters.
const MOST_AT_ONCE: i64 = 32;

/// Resizes bytes as Pillow does: sums in floating point, rounded to bytes at the end.
fn resized(image: &Tensor, size: Size, cubic: bool) -> Result<Tensor, TchError> {
    let to = [i64::from(size.height), i64::from(size.width)];
    if image.size()[1..] == to {
        return Ok(image.shallow_clone());
    }
    let to_size = |numbers: &Tensor, to: [i64; 2]| {
        if cubic {
            numbers.f_internal_upsample_bicubic2d_aa(to, false, None, None)
        } else {
            numbers.f_internal_upsample_bilinear2d_aa(to, false, None, None)
        }
    };
    let mut numbers = image.f_unsqueeze(0)?.f_to_kind(Kind::Float)?;
    let (rows, columns) = (image.size()[1], image.size()[2]);
    if rows > MOST_AT_ONCE * to[0] || columns > MOST_AT_ONCE * to[1] {
        numbers = to_size(&numbers, [rows, to[1]])?;
    }
    let numbers = to_size(&numbers, to)?;
    let rounded = numbers.f_add_scalar(0.5)?.f_floor()?.f_clamp(0, 255)?;
    rounded.f_squeeze_dim(0)?.f_to_kind(Kind::Uint8)
}

impl<S> fmt::Debug for ResizedDataset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResizedDataset")
            .field("images", &self.images)
            .field("device", &self.device)
            .finish()
    }
}
