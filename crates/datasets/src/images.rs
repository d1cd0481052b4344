//! Greyscale images with labels, stored in memory as bytes and converted to tensors batch by batch.

use std::path::Path;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_rank_env::text::counted;
use brigade_torch::{Result, from_vec};
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use tch::Tensor;

use crate::{DatasetError, IdxFile};

/// A dataset of greyscale images and their labels, one byte each, all in memory.
///
/// A batch is `(images, labels)`: images `f32 [b, 1, height, width]`, scaled to 0..1 and, after
/// [`normalize`](LabelledImages::normalize), normalized by mean and standard deviation; labels `i64 [b]`. Sixty
/// thousand images of 28x28 take 47 MB; as `f32` they would take four times that.
///
/// ```
/// use brigade_datasets::LabelledImages;
///
/// let images = LabelledImages::new(vec![0, 255, 51, 0], vec![0, 1], 1, 2)?;
/// assert_eq!((images.len(), images.classes()), (2, 2));
/// assert_eq!(images.sample(1)?, (&[51, 0][..], 1));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone)]
pub struct LabelledImages {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    height: usize,
    width: usize,
    classes: usize,
    /// Mean and standard deviation, of values from 0 to 1.
    normal: Option<(f32, f32)>,
}

impl LabelledImages {
    /// Creates a dataset of `pixels`, `[count, height, width]` with the width fastest, and `labels`, `[count]`. The
    /// number of classes is the largest label plus one.
    ///
    /// # Errors
    /// Fails if the lengths do not match, or an image has no pixels.
    pub fn new(pixels: Vec<u8>, labels: Vec<u8>, height: usize, width: usize) -> Result<Self> {
        let expected = height.checked_mul(width).and_then(|area| area.checked_mul(labels.len()));
        if height == 0 || width == 0 || expected != Some(pixels.len()) {
            let message = format!(
                "found {} of pixels for {} and images of {height}x{width}",
                counted(pixels.len(), "byte"),
                counted(labels.len(), "label")
            );
            return Err(DataError::Unfit { message }.into());
        }
        let classes = labels.iter().max().map_or(0, |largest| usize::from(*largest) + 1);
        Ok(Self { pixels, labels, height, width, classes, normal: None })
    }

    /// Reads a pair of IDX files, plain or gzip.
    ///
    /// # Errors
    /// Returns the same errors as [`IdxFile::open`], and fails if the numbers of images and labels differ.
    pub fn open(images: impl AsRef<Path>, labels: impl AsRef<Path>) -> Result<Self> {
        let (images, labels) = (images.as_ref(), labels.as_ref());
        Self::from_idx(IdxFile::open(images, 3)?, images, IdxFile::open(labels, 1)?, labels)
    }

    /// Joins the content of two IDX files. The paths are used in error messages.
    pub(crate) fn from_idx(
        images: IdxFile,
        images_path: &Path,
        labels: IdxFile,
        labels_path: &Path,
    ) -> Result<Self> {
        let [count, height, width] = images.shape[..] else {
            return Err(
                DatasetError::Shape { path: images_path.into(), shape: images.shape }.into()
            );
        };
        if count != labels.data.len() {
            return Err(DatasetError::CountMismatch {
                images: images_path.into(),
                image_count: count,
                labels: labels_path.into(),
                label_count: labels.data.len(),
            }
            .into());
        }
        Self::new(images.data, labels.data, height, width)
    }

    /// Sets the number of classes. `path` is the file of the labels, for the error message.
    ///
    /// # Errors
    /// Fails if a label is not below `classes`.
    pub fn with_classes(mut self, classes: usize, path: impl AsRef<Path>) -> Result<Self> {
        let wrong = self.labels.iter().position(|label| usize::from(*label) >= classes);
        if let Some(position) = wrong {
            let (path, label) = (path.as_ref().into(), self.labels[position]);
            return Err(DatasetError::Label { path, label, position, classes }.into());
        }
        self.classes = classes;
        Ok(self)
    }

    /// Resizes every image to `height` x `width`, once, by bilinear interpolation with pixel centres at half
    /// coordinates. When it shrinks, the filter is widened as in Pillow, so that every source pixel contributes.
    ///
    /// # Errors
    /// Fails if a side is 0 or the images would not fit into memory.
    pub fn resize(self, height: usize, width: usize) -> Result<Self> {
        if (height, width) == (self.height, self.width) {
            return Ok(self);
        }
        let too_large = |_| DataError::Unfit {
            message: format!("images cannot be brought to {height}x{width}: too large"),
        };
        if height == 0 || width == 0 {
            let message = format!("images cannot be brought to {height}x{width}: a side is 0");
            return Err(DataError::Unfit { message }.into());
        }
        let area = u32::try_from(height)
            .and_then(|height| Ok((u32::try_from(width)?, height)))
            .map_err(too_large)?;
        let source_area = u32::try_from(self.height)
            .and_then(|height| Ok((u32::try_from(self.width)?, height)))
            .map_err(too_large)?;

        let refused = |cause: &dyn std::fmt::Display| DataError::Unfit {
            message: format!("images cannot be brought to {height}x{width}: {cause}"),
        };
        let bilinear = ResizeAlg::Convolution(FilterType::Bilinear);
        let options = ResizeOptions::new().resize_alg(bilinear);
        let mut resizer = Resizer::new();
        let mut target = TypedImage::<U8>::new(area.0, area.1);
        let total = height
            .checked_mul(width)
            .and_then(|area| area.checked_mul(self.labels.len()))
            .ok_or_else(|| refused(&"too large"))?;
        let mut pixels = Vec::new();
        pixels.try_reserve_exact(total).map_err(|cause| refused(&cause))?;
        for image in self.pixels.chunks_exact(self.height * self.width) {
            let source = TypedImageRef::<U8>::from_buffer(source_area.0, source_area.1, image)
                .map_err(|cause| refused(&cause))?;
            // `resize` would compile the kernels of all pixel types, which takes a minute.
            resizer
                .resize_typed(&source, &mut target, &options)
                .map_err(|cause| refused(&cause))?;
            pixels.extend(target.pixels().iter().map(|pixel| pixel.0));
        }
        Ok(Self { pixels, height, width, ..self })
    }

    /// Normalizes the values of batches: each becomes `(x / 255 - mean) / std` instead of `x / 255`. The usual values
    /// are 0.1307 and 0.3081 for MNIST, 0.2860 and 0.3530 for FashionMNIST.
    ///
    /// # Errors
    /// Fails if `std` is not above 0, or `mean` or `std` is not finite.
    pub fn normalize(mut self, mean: f32, std: f32) -> Result<Self> {
        if !(mean.is_finite() && std.is_finite() && std > 0.0) {
            let message = format!(
                "images cannot be normalized by mean {mean} and standard deviation {std}: \
                 both must be finite and the second above 0"
            );
            return Err(DataError::Unfit { message }.into());
        }
        self.normal = Some((mean, std));
        Ok(self)
    }

    /// Returns the bytes of one image, row by row, and its label.
    ///
    /// # Errors
    /// Fails if `index` is not below the number of images.
    pub fn sample(&self, index: usize) -> Result<(&[u8], u8)> {
        let label = self.labels.get(index);
        let label = label.ok_or(DataError::Index { index, len: self.labels.len() })?;
        let area = self.height * self.width;
        Ok((&self.pixels[index * area..][..area], *label))
    }

    /// Returns the number of images.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns `true` if there are no images.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the height of the images in pixels.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// Returns the width of the images in pixels.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Returns the number of classes. Every label is below it.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.classes
    }
}

impl BatchedDataset for LabelledImages {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.labels.len()
    }

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<Self::Batch> {
        let area = self.height * self.width;
        let mut images = Vec::with_capacity(indices.len() * area);
        let mut labels = Vec::with_capacity(indices.len());
        // Shuffled rows are scattered over memory. Copying some of them first lets the processor fetch many at once;
        // converting each in place took twice as long.
        let rows_together = (GATHERED_BYTES / area).max(1);
        let mut gathered = Vec::with_capacity(rows_together.min(indices.len()) * area);
        for indices in indices.chunks(rows_together) {
            gathered.clear();
            for &index in indices {
                let (pixels, label) = self.sample(index)?;
                gathered.extend_from_slice(pixels);
                labels.push(i64::from(label));
            }
            match self.normal {
                None => images.extend(gathered.iter().map(|byte| unit(*byte))),
                Some((mean, std)) => {
                    images.extend(gathered.iter().map(|byte| (unit(*byte) - mean) / std));
                }
            }
        }
        let count = indices.len() as i64;
        let images = from_vec(images, &[count, 1, self.height as i64, self.width as i64])?;
        Ok((images, from_vec(labels, &[count])?))
    }
}

impl std::fmt::Debug for LabelledImages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { height, width, classes, .. } = self;
        let classes = counted(classes, "class");
        write!(f, "LabelledImages({} of {height}x{width}, {classes})", self.labels.len())
    }
}

/// Returns `byte / 255`, exact to the last bit, without a division, which takes more than twice as long: 1/255 is split
/// into a part whose product with a byte is exact and a small rest.
fn unit(byte: u8) -> f32 {
    let byte = f32::from(byte);
    byte * INVERSE_HIGH + byte * INVERSE_LOW
}

/// 1/255 with its last eight bits cleared, and the rest.
const INVERSE_HIGH: f32 = f32::from_bits((1.0f32 / 255.0).to_bits() & !0xff);
const INVERSE_LOW: f32 = (1.0 / 255.0 - INVERSE_HIGH as f64) as f32;

/// Fits into the first-level cache together with the converted values.
const GATHERED_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_torch::elements;
    use tch::Kind;

    fn two() -> LabelledImages {
        LabelledImages::new(vec![0, 51, 102, 255, 5, 6, 7, 8], vec![3, 0], 2, 2).unwrap()
    }

    #[test]
    fn a_batch_is_scaled_and_in_the_order_asked_for() {
        let (images, labels) = two().batch(&[1, 0, 0], &BatchContext::default()).unwrap();
        assert_eq!((images.size(), images.kind()), (vec![3, 1, 2, 2], Kind::Float));
        assert_eq!((labels.size(), labels.kind()), (vec![3], Kind::Int64));
        assert_eq!(elements::<i64>(&labels).unwrap().to_vec(), [0, 3, 3]);
        let expected: Vec<f32> = [5, 6, 7, 8, 0, 51, 102, 255, 0, 51, 102, 255]
            .iter()
            .map(|byte| *byte as f32 / 255.0)
            .collect();
        assert_eq!(elements::<f32>(&images).unwrap().to_vec(), expected);
    }

    #[test]
    fn scaling_is_the_division_to_the_last_bit() {
        for byte in 0..=255u8 {
            assert_eq!(unit(byte).to_bits(), (f32::from(byte) / 255.0).to_bits(), "{byte}");
        }
    }

    #[test]
    fn batches_larger_than_a_gathering_keep_their_order() {
        let area = GATHERED_BYTES / 3;
        let pixels = (0..5 * area).map(|place| (place / area * 40) as u8).collect();
        let images = LabelledImages::new(pixels, (0..5).collect(), 1, area).unwrap();
        let order = [4, 0, 3, 3, 1, 2, 0];
        let (batch, labels) = images.batch(&order, &BatchContext::default()).unwrap();
        assert_eq!(elements::<i64>(&labels).unwrap().to_vec(), order.map(|index| index as i64));
        let firsts: Vec<f32> = elements::<f32>(&batch)
            .unwrap()
            .to_vec()
            .chunks_exact(area)
            .map(|row| row[area - 1])
            .collect();
        assert_eq!(firsts, order.map(|index| (index * 40) as f32 / 255.0));
    }

    #[test]
    fn normalized_values_are_those_of_the_formula() {
        let images = two().normalize(0.5, 0.25).unwrap();
        let (batch, _) = images.batch(&[0], &BatchContext::default()).unwrap();
        let expected = [0.0f32, 51.0, 102.0, 255.0].map(|x| (x / 255.0 - 0.5) / 0.25);
        assert_eq!(elements::<f32>(&batch).unwrap().to_vec(), expected);
        for (mean, std) in [(0.0, 0.0), (0.0, -1.0), (f32::NAN, 1.0), (0.0, f32::INFINITY)] {
            let error = two().normalize(mean, std).unwrap_err().to_string();
            assert!(error.contains("above 0"), "{error}");
        }
    }

    #[test]
    fn resizing_interpolates_between_pixel_centres() {
        let image = LabelledImages::new(vec![0, 100, 40, 140], vec![0], 2, 2).unwrap();
        let large = image.resize(4, 4).unwrap();
        // Rows at -0.25, 0.25, 0.75, 1.25 of the source: weights 0, 1/4, 3/4, 1.
        #[rustfmt::skip]
        let expected = [
             0, 25,  75, 100,
            10, 35,  85, 110,
            30, 55, 105, 130,
            40, 65, 115, 140,
        ];
        assert_eq!(large.sample(0).unwrap().0, expected);
        // Down to one pixel: with PIL's widened triangle every pixel has the same weight.
        assert_eq!(large.resize(1, 1).unwrap().sample(0).unwrap().0, [70]);
        assert!(two().resize(0, 4).unwrap_err().to_string().contains("a side is 0"));
        assert!(two().resize(usize::MAX, 4).is_err());
    }

    #[test]
    fn mismatched_files_are_refused() {
        let error = LabelledImages::new(vec![0; 7], vec![0, 1], 2, 2).unwrap_err().to_string();
        assert_eq!(error, "found 7 bytes of pixels for 2 labels and images of 2x2");
        assert!(LabelledImages::new(vec![], vec![1], 0, 2).is_err());
        let error = two().with_classes(3, "labels").unwrap_err().to_string();
        assert_eq!(error, "labels: label 3 at position 0, expected 0 to 2");
        assert_eq!(two().with_classes(10, "labels").unwrap().classes(), 10);
        let error = two().batch(&[0, 2], &BatchContext::default()).unwrap_err().to_string();
        assert_eq!(error, "sample 2 is out of range: the dataset has 2 samples");
    }
}
