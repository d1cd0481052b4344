//! Conversion of images to the rows of a batch.

use brigade_rank_env::text::counted;
use brigade_torch::{Element, Error, Result, from_vec};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::transforms::Flips;
use crate::{ImageView, Size};

/// Normalisation by the mean and standard deviation of each channel, for values of 0 to 1: torchvision's `Normalize`.
///
/// ```
/// use brigade_vision::transforms::Normalize;
///
/// assert_eq!(Normalize::IMAGENET.mean, [0.485, 0.456, 0.406]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Normalize {
    /// Mean of red, green and blue, which is subtracted.
    pub mean: [f32; 3],
    /// Standard deviation of red, green and blue, by which the differences are divided.
    pub std: [f32; 3],
}

impl Normalize {
    /// Mean and standard deviation of ImageNet, which the weights of torchvision, timm and fastai expect.
    pub const IMAGENET: Self = Self { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] };
}

/// Format of the tensor of a batch of images: the last step of every dataset of images.
///
/// A batch is `[n, 3, h, w]`. As [`f32`](ToTensor::f32) or [`bf16`](ToTensor::bf16) its values are 0 to 1, like those
/// of torchvision's `ToTensor`, or [normalised](ToTensor::normalize). As [`u8`](ToTensor::u8) they are 0 to 255 and
/// take a quarter of the memory of `f32`, for transforms on the device.
///
/// The values of `f32` are bitwise equal to torchvision's.
///
/// ```
/// use brigade_vision::transforms::{Normalize, ToTensor};
///
/// let to_tensor = ToTensor::bf16().normalize(Normalize::IMAGENET).channels_last(true);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ToTensor {
    kind: Numbers,
    normalize: Option<Normalize>,
    layout: Layout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Channels first: channel by channel.
    Planes,
    /// Channels last: pixel by pixel.
    Pixels,
    /// A single channel, the luminance.
    Grey,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    F32,
    Bf16,
    U8,
}

/// The default is `f32`, with values of 0 to 1.
impl Default for ToTensor {
    fn default() -> Self {
        Self::f32()
    }
}

impl ToTensor {
    const fn new(kind: Numbers) -> Self {
        Self { kind, normalize: None, layout: Layout::Planes }
    }

    /// Creates a format with tensors of single precision.
    #[must_use]
    pub const fn f32() -> Self {
        Self::new(Numbers::F32)
    }

    /// Creates a format with tensors of bfloat16, rounded to the nearest from single precision.
    #[must_use]
    pub const fn bf16() -> Self {
        Self::new(Numbers::Bf16)
    }

    /// Creates a format with tensors of bytes.
    #[must_use]
    pub const fn u8() -> Self {
        Self::new(Numbers::U8)
    }

    /// Sets a normalisation: values minus a mean, divided by a standard deviation. Bytes cannot be normalised: a
    /// dataset with both fails at its first batch.
    #[must_use]
    pub const fn normalize(mut self, normalize: Normalize) -> Self {
        self.normalize = Some(normalize);
        self
    }

    /// Sets whether the memory format is channels-last (`torch.channels_last`), with which convolutions on CPUs and on
    /// tensor cores are faster. The shape stays `[n, 3, h, w]`.
    #[must_use]
    pub const fn channels_last(mut self, last: bool) -> Self {
        self.layout = if last { Layout::Pixels } else { Layout::Planes };
        self
    }

    /// Converts images to greyscale batches `[n, 1, h, w]`: the luminance with the weights of Pillow's mode `L`. They
    /// are normalised with the mean and standard deviation of the first channel. Replaces
    /// [`channels_last`](Self::channels_last): with one channel both orders are the same.
    #[must_use]
    pub const fn grey(mut self) -> Self {
        self.layout = Layout::Grey;
        self
    }

    /// Creates an empty batch for `rows` images.
    pub(crate) fn batch(&self, rows: usize) -> Result<BatchMemory> {
        let [mean, std] = match (self.kind, self.normalize) {
            (Numbers::U8, Some(_)) => {
                return Err(Error::invalid_argument(
                    "bytes cannot be normalised; use ToTensor::f32 or bf16, or normalise on the \
                     device",
                ));
            }
            (_, normalize) => normalize.map_or([[0.0; 3], [1.0; 3]], |by| [by.mean, by.std]),
        };
        // In the order of torchvision, with a rounding after each step.
        let value =
            |channel: usize, byte: usize| (byte as f32 / 255.0 - mean[channel]) / std[channel];
        let values = match self.kind {
            Numbers::F32 => Values::F32(Filled::new(value)),
            Numbers::Bf16 => {
                Values::Bf16(Filled::new(|channel, byte| to_bf16(value(channel, byte))))
            }
            Numbers::U8 => Values::U8(Filled::new(|_, byte| byte as u8)),
        };
        Ok(BatchMemory { values, rows, size: None, layout: self.layout })
    }
}

/// Rounds to the nearest bfloat16, ties to even, and returns its bits.
fn to_bf16(value: f32) -> i16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
    (rounded >> 16) as i16
}

/// Memory of a batch, into which images are written one after another.
pub(crate) struct BatchMemory {
    values: Values,
    rows: usize,
    /// Size of the first image, which the others must have.
    size: Option<Size>,
    layout: Layout,
}

enum Values {
    F32(Filled<f32>),
    /// Values as their bits: Rust has no bfloat16 type, and a tensor of these bits can be viewed as one.
    Bf16(Filled<i16>),
    U8(Filled<u8>),
}

/// Batch that is filled from the front, with a table of the value of each byte in each channel. Each element is written
/// once: zeroing the memory first would cost as much as writing the elements.
struct Filled<T> {
    table: Box<[[T; 256]; 3]>,
    /// Elements channel by channel, unless the channels come last.
    planes: Vec<T>,
    /// Elements pixel by pixel, if the channels come last.
    pixels: Vec<[T; 3]>,
}

impl BatchMemory {
    /// Appends an image to the batch.
    pub(crate) fn push(&mut self, image: ImageView<'_>, flips: Flips, name: &str) -> Result<()> {
        let size = *self.size.get_or_insert_with(|| image.size());
        if size != image.size() {
            return Err(Error::invalid_argument(format!(
                "{name} has {} pixels after the transforms, the batch's first image {size}; bring \
                 all to one size by a crop or a resize of both sides",
                image.size()
            )));
        }
        match &mut self.values {
            Values::F32(batch) => batch.push(image, flips, self.layout, self.rows),
            Values::Bf16(batch) => batch.push(image, flips, self.layout, self.rows),
            Values::U8(batch) => batch.push(image, flips, self.layout, self.rows),
        }
    }

    /// Returns the tensor, `[n, channels, h, w]`, or `[0, channels, 0, 0]` without images.
    pub(crate) fn into_tensor(self) -> Result<Tensor> {
        let size = self.size.unwrap_or(Size::new(0, 0));
        let layout = self.layout;
        match self.values {
            Values::F32(batch) => batch.into_tensor(size, layout),
            Values::U8(batch) => batch.into_tensor(size, layout),
            Values::Bf16(batch) => {
                let bits = batch.into_tensor(size, layout)?;
                Ok(bits.f_view_dtype(Kind::BFloat16)?)
            }
        }
    }
}

impl<T: Element> Filled<T> {
    fn new(value: impl Fn(usize, usize) -> T) -> Self {
        let table = std::array::from_fn(|channel| std::array::from_fn(|byte| value(channel, byte)));
        Self { table: Box::new(table), planes: Vec::new(), pixels: Vec::new() }
    }

    fn push(
        &mut self,
        image: ImageView<'_>,
        flips: Flips,
        layout: Layout,
        rows: usize,
    ) -> Result<()> {
        let [reds, greens, blues] = &*self.table;
        let pixels = image.pixels().as_chunks::<3>().0;
        let reserved = match layout {
            Layout::Pixels => reserve(&mut self.pixels, pixels.len(), rows),
            Layout::Planes => reserve(&mut self.planes, image.pixels().len(), rows),
            Layout::Grey => reserve(&mut self.planes, pixels.len(), rows),
        };
        reserved.ok_or_else(|| {
            Error::invalid_argument(format!(
                "there is no memory for a batch of {} of {} pixels; make the batch or the images smaller",
                counted(rows, "image"),
                image.size()
            ))
        })?;
        let width = image.size().width as usize;
        match layout {
            Layout::Pixels => {
                let value = |[r, g, b]: &[u8; 3]| {
                    [reds[usize::from(*r)], greens[usize::from(*g)], blues[usize::from(*b)]]
                };
                extend(&mut self.pixels, pixels, width, flips, value);
            }
            Layout::Planes => {
                for (channel, values) in self.table.iter().enumerate() {
                    let value = |pixel: &[u8; 3]| values[usize::from(pixel[channel])];
                    extend(&mut self.planes, pixels, width, flips, value);
                }
            }
            Layout::Grey => {
                let value = |pixel: &[u8; 3]| reds[luminance(pixel)];
                extend(&mut self.planes, pixels, width, flips, value);
            }
        }
        Ok(())
    }

    fn into_tensor(self, size: Size, layout: Layout) -> Result<Tensor> {
        let (height, width) = (i64::from(size.height), i64::from(size.width));
        let pixels = usize::try_from(size.pixels()).unwrap_or(usize::MAX);
        if layout == Layout::Pixels {
            let rows = self.pixels.len().checked_div(pixels).unwrap_or(0) as i64;
            let tensor = from_vec(self.pixels.into_flattened(), &[rows, height, width, 3])?;
            return Ok(tensor.f_permute([0, 3, 1, 2])?);
        }
        let channels = if layout == Layout::Grey { 1 } else { 3 };
        let rows = self.planes.len().checked_div(pixels.saturating_mul(channels)).unwrap_or(0);
        from_vec(self.planes, &[rows as i64, channels as i64, height, width])
    }
}

/// Returns the luminance of Pillow's `L`: ITU-R 601-2 with 16 fractional bits, rounded.
fn luminance([red, green, blue]: &[u8; 3]) -> usize {
    let [red, green, blue] = [red, green, blue].map(|value| u32::from(*value));
    ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16) as usize
}

/// Reserves memory for a whole batch at its first image. Returns `None` if there is not enough memory.
fn reserve<T>(batch: &mut Vec<T>, image: usize, rows: usize) -> Option<()> {
    if batch.is_empty() {
        batch.try_reserve_exact(image.checked_mul(rows)?).ok()?;
    }
    Some(())
}

/// Appends a value for each pixel, row by row in the order of the mirrored image.
fn extend<T>(
    batch: &mut Vec<T>,
    pixels: &[[u8; 3]],
    width: usize,
    flips: Flips,
    value: impl Fn(&[u8; 3]) -> T,
) {
    let mut row = |row: &[[u8; 3]]| {
        if flips.horizontal {
            batch.extend(row.iter().rev().map(&value));
        } else {
            batch.extend(row.iter().map(&value));
        }
    };
    let rows = pixels.chunks_exact(width.max(1));
    if flips.vertical {
        rows.rev().for_each(&mut row);
    } else {
        rows.for_each(&mut row);
    }
}

#[cfg(test)]
mod tests {
    use brigade_torch::{elements, is_channels_last};

    use super::*;
    use crate::Image;

    fn batch(to_tensor: ToTensor, images: &[Image], flips: Flips) -> Tensor {
        let mut memory = to_tensor.batch(images.len()).unwrap();
        for image in images {
            memory.push(image.view(), flips, "image").unwrap();
        }
        memory.into_tensor().unwrap()
    }

    fn images() -> Vec<Image> {
        let image = |start: u8| Image::new(3, 2, (start..start + 18).collect()).unwrap();
        vec![image(0), image(100)]
    }

    fn bytes(tensor: &Tensor) -> Vec<u8> {
        elements::<u8>(&tensor.contiguous()).unwrap().to_vec()
    }

    #[test]
    fn normalised_values_are_torchvisions_to_the_bit() {
        let text = include_str!("../tests/golden/transforms.json");
        let tables: serde_json::Value = serde_json::from_str(text).unwrap();
        let pixels = serde_json::from_value(tables["image"].clone()).unwrap();
        let image = Image::new(64, 48, pixels).unwrap();
        let case = tables["cases"].as_array().unwrap().last().unwrap();
        let first: Vec<Vec<f32>> =
            serde_json::from_value(case["out_chw_first_row"].clone()).unwrap();
        for last in [false, true] {
            let to_tensor = ToTensor::f32().normalize(Normalize::IMAGENET).channels_last(last);
            let tensor = batch(to_tensor, std::slice::from_ref(&image), Flips::default());
            assert_eq!(tensor.size(), [1, 3, 48, 64]);
            assert_eq!(is_channels_last(&tensor).unwrap(), last);
            let row = tensor.narrow(2, 0, 1).contiguous();
            assert_eq!(elements::<f32>(&row).unwrap().to_vec(), first.concat());
            let mean = tensor.to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            assert!((mean - case["mean"].as_f64().unwrap()).abs() < 1e-6, "{mean}");
        }
    }

    #[test]
    fn bfloat16_is_rounded_as_torch_rounds() {
        let to_tensor = |kind: ToTensor| kind.normalize(Normalize::IMAGENET);
        let values = Image::new(16, 16, (0..=255).flat_map(|value| [value; 3]).collect()).unwrap();
        let values = std::slice::from_ref(&values);
        let exact = batch(to_tensor(ToTensor::f32()), values, Flips::default());
        for last in [false, true] {
            let half = to_tensor(ToTensor::bf16()).channels_last(last);
            let half = batch(half, values, Flips::default());
            assert_eq!(half.kind(), Kind::BFloat16);
            assert_eq!(is_channels_last(&half).unwrap(), last);
            assert_eq!(half.size(), [1, 3, 16, 16]);
            assert_eq!(half, exact.to_kind(Kind::BFloat16));
        }
    }

    #[test]
    fn planes_and_flips_are_in_their_place() {
        let images = images();
        let plain = batch(ToTensor::u8(), &images, Flips::default());
        assert_eq!((plain.kind(), plain.size()), (Kind::Uint8, vec![2, 3, 2, 3]));
        let red: Vec<u8> = (0..6).map(|pixel| 3 * pixel).collect();
        assert_eq!(bytes(&plain)[..6], red);
        assert_eq!(bytes(&plain)[18 + 12], 102);
        for (horizontal, vertical) in [(true, false), (false, true), (true, true)] {
            let flips = Flips { horizontal, vertical };
            let dims = [(horizontal, 3), (vertical, 2)];
            let dims: Vec<i64> = dims.iter().filter(|(is, _)| *is).map(|(_, dim)| *dim).collect();
            let expected = bytes(&plain.flip(&dims));
            assert_eq!(bytes(&batch(ToTensor::u8(), &images, flips)), expected);
            let last = batch(ToTensor::u8().channels_last(true), &images, flips);
            assert!(is_channels_last(&last).unwrap());
            assert_eq!(bytes(&last), expected);
        }
    }

    #[test]
    fn grey_batches_have_one_channel_of_luminance() {
        // Results of Pillow's `convert("L")` for these colours.
        let colours = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30], [77, 77, 77], [255; 3]];
        let image = Image::new(3, 2, colours.concat()).unwrap();
        let grey = batch(ToTensor::u8().grey(), &[image.clone(), image], Flips::default());
        assert_eq!(grey.size(), [2, 1, 2, 3]);
        assert_eq!(bytes(&grey)[..6], [76, 150, 29, 18, 77, 255]);
        let normalize = Normalize { mean: [0.5; 3], std: [0.5; 3] };
        let to_tensor = ToTensor::f32().grey().normalize(normalize);
        let white = Image::new(1, 1, vec![255; 3]).unwrap();
        let white = batch(to_tensor, &[white], Flips::default());
        assert_eq!((white.size(), white.double_value(&[0, 0, 0, 0])), (vec![1, 1, 1, 1], 1.0));
    }

    #[test]
    fn batches_that_cannot_be_are_refused() {
        let mut memory = ToTensor::f32().batch(2).unwrap();
        memory.push(images()[0].view(), Flips::default(), "a.png").unwrap();
        let wide = Image::new(4, 1, vec![0; 12]).unwrap();
        let error = memory.push(wide.view(), Flips::default(), "b.png").unwrap_err().to_string();
        assert!(
            error.starts_with("b.png has 4 x 1 pixels after the transforms, the batch's first"),
            "{error}"
        );
        assert!(ToTensor::u8().normalize(Normalize::IMAGENET).batch(1).is_err());
        let huge =
            ToTensor::f32().batch(usize::MAX).unwrap().push(wide.view(), Flips::default(), "b.png");
        assert!(huge.unwrap_err().to_string().starts_with("there is no memory for a batch"));
        let none = ToTensor::bf16().batch(0).unwrap().into_tensor().unwrap();
        assert_eq!((none.size(), none.kind()), (vec![0, 3, 0, 0], Kind::BFloat16));
    }
}
