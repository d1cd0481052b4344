//! A batch of images in a gallery.

use brigade_plot::{Gallery, Picture, PlotError};
use tch::{Device, Kind, TchError, Tensor};

use super::{CellDisplay, Content};

/// Makes images from a tensor: one image `[height, width]` or `[1 or 3, height, width]`, or several, `[n, height,
/// width]` or `[n, 1 or 3, height, width]`.
///
/// Bytes have values 0 to 255, other numbers 0 to 1. If some values are outside of this range, as after normalisation,
/// the minimum and the maximum are shown as black and white. NaN is black. [`denormalize`](Images::denormalize)
/// restores the true colours.
///
/// ```
/// use brigade_notebook::prelude::*;
/// use tch::{Device, Kind, Tensor};
///
/// let batch = Tensor::rand([8, 1, 28, 28], (Kind::Float, Device::Cpu));
/// let labels = Tensor::from_slice(&[0i64, 1, 0, 1, 1, 1, 0, 0]);
/// let pictures = images(&batch).labels(&labels, &["cat", "dog"]);
/// assert_eq!(pictures.gallery()?.pictures[1].captions[0].text, "dog");
/// pictures.evcxr_display();
/// # Ok::<(), brigade_notebook::display::ImagesError>(())
/// ```
#[must_use]
pub fn images(tensor: &Tensor) -> Images {
    Images {
        tensor: tensor.shallow_clone(),
        statistics: None,
        captions: Vec::new(),
        labels: None,
        columns: 0,
        limit: 64,
    }
}

/// The images of a tensor, made by [`images`].
#[derive(Debug)]
pub struct Images {
    tensor: Tensor,
    statistics: Option<([f32; 3], [f32; 3])>,
    captions: Vec<String>,
    labels: Option<(Tensor, Vec<String>)>,
    columns: usize,
    limit: usize,
}

/// Reason why a tensor cannot be displayed as images.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImagesError {
    /// The shape of the tensor is not that of images.
    #[error(
        "a tensor of shape {shape:?} holds no images: expected [height, width], [n, height, width], or 1 or 3 channels \
         before the height, each of at least 1"
    )]
    Shape {
        /// Shape of the tensor.
        shape: Vec<i64>,
    },
    /// The tensor has complex numbers, which have no brightness.
    #[error(
        "a tensor of kind {kind:?} holds no images: expected bytes, other integers, floats or booleans"
    )]
    Kind {
        /// Kind of the tensor.
        kind: Kind,
    },
    /// The number of captions or labels differs from that of images.
    #[error("{given} {what} were given for {images} images: one each, or none")]
    Captions {
        /// Name of the list: `captions` or `labels`.
        what: &'static str,
        /// Number of captions or labels that were passed.
        given: usize,
        /// Number of images in the tensor.
        images: usize,
    },
    /// An operation of libtorch on the pixels failed.
    #[error("cannot read the images: {0}")]
    Torch(#[from] TchError),
    /// The image cannot be drawn in the gallery.
    #[error(transparent)]
    Plot(#[from] PlotError),
}

impl Images {
    /// Undoes the normalisation by a mean and a standard deviation of each channel: `Normalize::IMAGENET` of
    /// `brigade-vision` has those of ImageNet. An image of one channel uses the first.
    #[must_use]
    pub fn denormalize(mut self, mean: [f32; 3], std: [f32; 3]) -> Self {
        self.statistics = Some((mean, std));
        self
    }

    /// Adds a caption above each image.
    #[must_use]
    pub fn captions<T: ToString>(mut self, captions: impl IntoIterator<Item = T>) -> Self {
        self.captions = captions.into_iter().map(|it| it.to_string()).collect();
        self
    }

    /// Adds the name of its class above each image, or the class number if it has no name. `labels` is `[n]`, of
    /// integers.
    #[must_use]
    pub fn labels<T: AsRef<str>>(mut self, labels: &Tensor, names: &[T]) -> Self {
        let names = names.iter().map(|it| it.as_ref().to_owned()).collect();
        self.labels = Some((labels.shallow_clone(), names));
        self
    }

    /// Sets the number of images in a row. Defaults to a number that makes the grid roughly square.
    #[must_use]
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns;
        self
    }

    /// Sets the maximum number of images that are displayed, at least 1. Defaults to 64.
    #[must_use]
    pub fn limit(mut self, images: usize) -> Self {
        self.limit = images;
        self
    }

    /// Makes the gallery of the images, to set a title or write a file.
    ///
    /// # Errors
    /// [`ImagesError::Shape`] and [`ImagesError::Kind`] for a tensor that holds no images, [`ImagesError::Captions`]
    /// for another number of captions or labels than of images, [`ImagesError::Torch`] when the values cannot be read.
    pub fn gallery(&self) -> Result<Gallery, ImagesError> {
        let batch = self.batch()?;
        let all = batch.size()[0] as usize;
        let captions = self.all_captions(all)?;
        let shown = all.min(self.limit.max(1));
        let (pixels, [height, width]) = self.pixels(&batch.f_narrow(0, 0, shown as i64)?)?;
        let title = if shown < all { format!("{shown} of {all} images") } else { String::new() };
        let mut gallery = Gallery::new(title).columns(self.columns);
        if shown > 16 {
            gallery = gallery.cell(96);
        }
        for (index, rgb) in pixels.chunks(3 * (height * width) as usize).enumerate() {
            let mut picture = Picture::rgb(width as u32, height as u32, rgb.to_vec())?;
            if let Some(caption) = captions.get(index) {
                picture = picture.caption(caption);
            }
            gallery = gallery.picture(picture);
        }
        Ok(gallery)
    }

    /// The images as `[n, 1 or 3, height, width]`.
    fn batch(&self) -> Result<Tensor, ImagesError> {
        let shape = self.tensor.size();
        let kind = self.tensor.kind();
        let is_number = matches!(
            kind,
            Kind::Bool
                | Kind::Uint8
                | Kind::Int8
                | Kind::Int16
                | Kind::Int
                | Kind::Int64
                | Kind::Half
                | Kind::BFloat16
                | Kind::Float
                | Kind::Double
        );
        if !is_number {
            return Err(ImagesError::Kind { kind });
        }
        let tensor = self.tensor.f_detach()?;
        let batch = match shape.as_slice() {
            [_, _] => tensor.f_unsqueeze(0)?.f_unsqueeze(0)?,
            [1 | 3, _, _] => tensor.f_unsqueeze(0)?,
            [_, _, _] => tensor.f_unsqueeze(1)?,
            [_, 1 | 3, _, _] => tensor,
            _ => return Err(ImagesError::Shape { shape }),
        };
        if shape.contains(&0) { Err(ImagesError::Shape { shape }) } else { Ok(batch) }
    }

    fn all_captions(&self, images: usize) -> Result<Vec<String>, ImagesError> {
        let mut captions = self.captions.clone();
        let mut what = "captions";
        if let Some((labels, names)) = &self.labels {
            what = "labels";
            let labels = labels.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?;
            let labels = Vec::<i64>::try_from(&labels.f_contiguous()?.f_view([-1])?)?;
            let name = |label: &i64| {
                let name = usize::try_from(*label).ok().and_then(|it| names.get(it));
                name.cloned().unwrap_or_else(|| label.to_string())
            };
            captions = labels.iter().map(name).collect();
        }
        match captions.len() {
            given if given == images || given == 0 => Ok(captions),
            given => Err(ImagesError::Captions { what, given, images }),
        }
    }

    /// Red, green and blue of each pixel, image by image, with the height and width of each image.
    fn pixels(&self, images: &Tensor) -> Result<(Vec<u8>, [i64; 2]), ImagesError> {
        let (count, channels) = (images.size()[0], images.size()[1]);
        let size = [images.size()[2], images.size()[3]];
        let is_bytes = images.kind() == Kind::Uint8;
        let mut values = images.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        if let (Some((mean, std)), false) = (self.statistics, is_bytes) {
            let of_channels = |numbers: [f32; 3]| {
                Tensor::f_from_slice(&numbers[..channels as usize])?.f_view([1, channels, 1, 1])
            };
            values = values.f_mul(&of_channels(std)?)?.f_add(&of_channels(mean)?)?;
        }
        values = values.f_nan_to_num(0.0, 1.0, 0.0)?;
        if !is_bytes {
            let [least, greatest] =
                [values.f_min()?.f_double_value(&[])?, values.f_max()?.f_double_value(&[])?];
            // True colours are out of range by rounding, or by the transforms of training.
            let slack = if self.statistics.is_some() { f64::INFINITY } else { 1e-3 };
            if least < -slack || greatest > 1.0 + slack {
                let range = if greatest > least { greatest - least } else { 1.0 };
                values = values.f_sub_scalar(least)?.f_div_scalar(range)?;
            }
            values = values.f_mul_scalar(255.0)?.f_round()?.f_clamp(0.0, 255.0)?;
        }
        let bytes = values.f_to_kind(Kind::Uint8)?.f_expand([count, 3, size[0], size[1]], false)?;
        let bytes = bytes.f_permute([0, 2, 3, 1])?.f_contiguous()?.f_view([-1])?;
        Ok((Vec::<u8>::try_from(&bytes)?, size))
    }
}

impl CellDisplay for Images {
    fn cell_content(&self) -> Content {
        self.gallery().cell_content()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pixels(images: &Images) -> Vec<Vec<u8>> {
        let gallery = images.gallery().unwrap();
        gallery.pictures.iter().map(|it| it.pixels().to_vec()).collect()
    }

    #[test]
    fn each_shape_of_images_is_known() {
        for (shape, images, size) in [
            (vec![2, 3], 1, (3, 2)),
            (vec![1, 2, 3], 1, (3, 2)),
            (vec![3, 2, 4], 1, (4, 2)),
            (vec![5, 2, 3], 5, (3, 2)),
            (vec![2, 1, 4, 3], 2, (3, 4)),
            (vec![2, 3, 4, 5], 2, (5, 4)),
        ] {
            let gallery = images_of(&shape).gallery().unwrap();
            let first = gallery.pictures[0].size();
            assert_eq!((gallery.pictures.len(), (first.width, first.height)), (images, size));
        }
        for shape in [vec![], vec![4], vec![2, 4, 3, 3], vec![0, 3, 2, 2], vec![2, 0]] {
            let error = images_of(&shape).gallery().unwrap_err();
            assert!(
                matches!(&error, ImagesError::Shape { shape: found } if *found == shape),
                "{error}"
            );
        }
        let complex = Tensor::zeros([2, 2], (Kind::ComplexFloat, Device::Cpu));
        assert!(matches!(images(&complex).gallery(), Err(ImagesError::Kind { .. })));
    }

    fn images_of(shape: &[i64]) -> Images {
        images(&Tensor::zeros(shape, (Kind::Float, Device::Cpu)))
    }

    #[test]
    fn colours_are_those_of_the_tensor() {
        let rgb = Tensor::from_slice(&[10u8, 20, 30, 40, 50, 60]).view([3, 1, 2]);
        assert_eq!(pixels(&images(&rgb)), [[10, 30, 50, 20, 40, 60]]);
        let grey = Tensor::from_slice(&[0.0f32, 0.5, 1.0]).view([1, 3]);
        assert_eq!(pixels(&images(&grey)), [[0, 0, 0, 128, 128, 128, 255, 255, 255]]);
        let mask = Tensor::from_slice(&[true, false]).view([1, 2]);
        assert_eq!(pixels(&images(&mask)), [[255, 255, 255, 0, 0, 0]]);
        // Class numbers and normalised values are stretched, all images by the same.
        let stretched = Tensor::from_slice(&[-1.0f64, 0.0, f64::NAN, 1.5]).view([2, 1, 1, 2]);
        assert_eq!(
            pixels(&images(&stretched)),
            [[0, 0, 0, 102, 102, 102], [102, 102, 102, 255, 255, 255]]
        );
    }

    #[test]
    fn normalisation_is_undone() {
        let (mean, std) = ([0.5, 0.4, 0.3], [0.1, 0.2, 0.5]);
        let colours = Tensor::from_slice(&[0.2f32, 0.6, 0.9]).view([3, 1, 1]);
        let of = |numbers: [f32; 3]| Tensor::from_slice(&numbers).view([3, 1, 1]);
        let normalised = (&colours - of(mean)) / of(std);
        assert_eq!(pixels(&images(&normalised).denormalize(mean, std)), [[51, 153, 230]]);
    }

    #[test]
    fn captions_and_labels_belong_to_images() {
        let batch = Tensor::zeros([3, 2, 2], (Kind::Uint8, Device::Cpu)).repeat([30, 1, 1]);
        let labels = Tensor::arange(90, (Kind::Int64, Device::Cpu)) - 1;
        let gallery = images(&batch).labels(&labels, &["a", "b"]).limit(20).gallery().unwrap();
        let captions: Vec<&str> =
            gallery.pictures.iter().map(|it| it.captions[0].text.as_str()).take(4).collect();
        assert_eq!((captions, gallery.pictures.len()), (vec!["-1", "a", "b", "2"], 20));
        assert_eq!(gallery.title, "20 of 90 images");
        let error = images(&batch).captions(["a", "b"]).gallery().unwrap_err();
        assert_eq!(error.to_string(), "2 captions were given for 90 images: one each, or none");
        let content = images(&batch).captions(["a", "b"]).cell_content();
        assert_eq!(content.plain(), format!("Error: {error}"));
    }
}
