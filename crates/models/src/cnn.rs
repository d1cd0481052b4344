//! The CNN of the FashionMNIST example.

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Flatten, Linear, MaxPool2d, Module, ParamPath, Result,
    Sequential,
};
use tch::Tensor;

/// Two blocks of convolution (5x5, padding 2), [`BatchNorm2d`], ReLU and pooling by 2, with 32 and
/// 64 channels, then two linear layers: from images `[n, 1, 28, 28]` to logits `[n, 10]`.
///
/// 253 706 parameters under the names `module1.0.weight` (convolution), `module1.1.weight`
/// (normalisation), `module2.…`, `linear1.weight`, `linear2.weight`: those of the PyTorch model
/// with `module1 = Sequential(Conv2d, BatchNorm2d, ReLU, MaxPool2d)`.
///
/// ```no_run
/// use brigade_models::Cnn;
/// use brigade_nn::{Kind, Model, Tensor};
///
/// let model = Model::new(Cnn::new)?;
/// let images = Tensor::zeros([64, 1, 28, 28], (Kind::Float, model.device()));
/// let loss = model.forward(&images)?.cross_entropy_for_logits(&Tensor::zeros(64, (Kind::Int64, model.device())));
/// assert_eq!(loss.size(), [0; 0]);
/// # Ok::<(), brigade_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Cnn {
    module1: Sequential,
    module2: Sequential,
    linear1: Linear,
    linear2: Linear,
}

impl Cnn {
    /// Registers all layers below the path.
    #[must_use]
    pub fn new(path: &ParamPath<'_>) -> Self {
        Self {
            module1: block(&(path / "module1"), 1, 32),
            module2: block(&(path / "module2"), 32, 64),
            linear1: Linear::new(path / "linear1", 64 * 7 * 7, 64),
            linear2: Linear::new(path / "linear2", 64, 10),
        }
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

/// The normalisation and the ReLU after it, in one operation.
#[derive(Debug)]
struct NormRelu(BatchNorm2d);

impl Module<&Tensor> for NormRelu {
    type Output = Tensor;

    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        self.0.forward_relu(maps, None)
    }
}
