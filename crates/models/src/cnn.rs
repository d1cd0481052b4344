//! The convolutional network of the FashionMNIST example.

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Flatten, Linear, MaxPool2d, Module, ParamPath, Sequential,
};
use brigade_torch::Result;
use tch::Tensor;

use crate::ImageClassifier;

/// Small convolutional network: two blocks of convolution (5x5, padding 2), [`BatchNorm2d`], ReLU and pooling by 2,
/// with 32 and 64 channels, then two linear layers, from images `[n, 1, 28, 28]` to logits `[n, 10]`.
///
/// 253 706 parameters under the names `module1.0.weight` (convolution), `module1.1.weight`
/// (normalisation), `module2.…`, `linear1.weight`, `linear2.weight`: those of the PyTorch model
/// with `module1 = Sequential(Conv2d, BatchNorm2d, ReLU, MaxPool2d)`.
///
/// ```
/// use brigade_models::Cnn;
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(Cnn::new)?;
/// let images = Tensor::zeros([64, 1, 28, 28], (Kind::Float, model.device()));
/// let loss = model.forward(&images)?.cross_entropy_for_logits(&Tensor::zeros(64, (Kind::Int64, model.device())));
/// assert_eq!(loss.size(), [0; 0]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// For other images and classes use [`with_options`](Cnn::with_options).
#[derive(Debug)]
pub struct Cnn {
    module1: Sequential,
    module2: Sequential,
    linear1: Linear,
    linear2: Linear,
}

/// Options of a [`Cnn`]: the size of its images, and the number of classes.
///
/// ```
/// use brigade_models::{Cnn, CnnOptions};
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let photos = CnnOptions { channels: 3, size: [32, 48], classes: 4 };
/// let model = Model::new(|path| Cnn::with_options(path, photos))?;
/// let images = Tensor::zeros([2, 3, 32, 48], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 4]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CnnOptions {
    /// Number of channels of the images. Defaults to 1.
    pub channels: i64,
    /// Size `[height, width]` of the images in pixels, at least 4 each. Defaults to 28 by 28.
    pub size: [i64; 2],
    /// Number of classes. Defaults to 10.
    pub classes: i64,
}

impl Default for CnnOptions {
    fn default() -> Self {
        Self { channels: 1, size: [28, 28], classes: 10 }
    }
}

impl Cnn {
    /// Registers all layers below the path, for grey images of 28 x 28 pixels and ten classes.
    #[must_use]
    pub fn new(path: &ParamPath<'_>) -> Self {
        Self::with_options(path, CnnOptions::default())
    }

    /// Registers all layers below the path, for the images and classes of `options`. Names are the same as in
    /// [`Cnn::new`].
    #[must_use]
    pub fn with_options(path: &ParamPath<'_>, options: CnnOptions) -> Self {
        let CnnOptions { channels, size: [height, width], classes } = options;
        Self {
            module1: block(&(path / "module1"), channels, 32),
            module2: block(&(path / "module2"), 32, 64),
            linear1: Linear::new(path / "linear1", 64 * (height / 4) * (width / 4), 64),
            linear2: Linear::new(path / "linear2", 64, classes),
        }
    }
}

impl ImageClassifier for Cnn {
    fn classifier(&self) -> String {
        "linear2".to_owned()
    }

    fn first_convolution(&self) -> String {
        "module1.0".to_owned()
    }
}

impl Module<&Tensor> for Cnn {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let maps = self.module2.forward(&self.module1.forward(images)?)?;
        let hidden = self.linear1.forward(&Flatten.forward(&maps)?)?.relu();
        self.linear2.forward(&hidden)
    }
}

fn block(path: &ParamPath<'_>, inputs: i64, outputs: i64) -> Sequential {
    let padded = Conv2dOptions { padding: [2, 2], ..Conv2dOptions::default() };
    let convolution = Conv2d::new(path / 0, inputs, outputs, [5, 5], padded);
    let norm = BatchNorm2d::new(path / 1, outputs);
    Sequential::new().add(convolution).add(NormRelu(norm)).add(MaxPool2d::new(2))
}

/// Normalisation followed by a ReLU, in one operation.
#[derive(Debug)]
struct NormRelu(BatchNorm2d);

impl Module<&Tensor> for NormRelu {
    type Output = Tensor;

    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        self.0.forward_relu(maps, None)
    }
}
