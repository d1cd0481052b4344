//! Models that are measured, the shapes of their batches, and the floating-point operations of a step.

use anyhow::{Context, Result, bail};
use brigade::models::{Cnn, ResNet, XResNet};
use brigade::prelude::*;

use crate::transformer::Block;

/// Model by the first word of `train` and related measurements; `peers/train.py` has the same words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Net {
    /// The CNN on 64 images of 28 x 28, with Adam.
    Cnn,
    /// ResNet-18 on 32 images of 128 x 128, with AdamW.
    Resnet18,
    /// ResNet-50 on 16 images of 160 x 160, with AdamW.
    Resnet50,
    /// fastai's xresnet50 on 16 images of 128 x 128, with its Adam.
    Xresnet50,
    /// [`Mlp`] on 256 rows, with AdamW.
    Mlp,
    /// [`Block`] on 8 sequences of 128 tokens, with AdamW.
    Block,
}

/// Model of any of these kinds.
pub(crate) struct AnyModule(Box<dyn for<'a> Module<&'a Tensor, Output = Tensor>>);

impl Module<&Tensor> for AnyModule {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade::Result<Tensor> {
        self.0.forward(input)
    }
}

impl Net {
    /// Hidden size of the block.
    const WIDTH: i64 = 768;

    pub(crate) fn named(name: &str) -> Result<Self> {
        Ok(match name {
            "cnn" => Self::Cnn,
            "resnet18" => Self::Resnet18,
            "resnet50" => Self::Resnet50,
            "xresnet50" => Self::Xresnet50,
            "mlp" => Self::Mlp,
            "block" => Self::Block,
            other => bail!("there is no model {other:?}"),
        })
    }

    pub(crate) fn build(self, path: &ParamPath<'_>) -> AnyModule {
        AnyModule(match self {
            Self::Cnn => Box::new(Cnn::new(path)),
            Self::Resnet18 => Box::new(ResNet::resnet18(path, self.classes())),
            Self::Resnet50 => Box::new(ResNet::resnet50(path, self.classes())),
            Self::Xresnet50 => Box::new(XResNet::xresnet50(path, self.classes())),
            Self::Mlp => Box::new(Mlp::new(path)),
            Self::Block => Box::new(Block::new(path, Self::WIDTH, 12)),
        })
    }

    /// Returns the shape of a batch, with the samples first.
    pub(crate) fn shape(self) -> &'static [i64] {
        match self {
            Self::Cnn => &[64, 1, 28, 28],
            Self::Resnet18 => &[32, 3, 128, 128],
            Self::Resnet50 => &[16, 3, 160, 160],
            Self::Xresnet50 => &[16, 3, 128, 128],
            Self::Mlp => &[256, Mlp::SIZES[0]],
            Self::Block => &[8, 128, Self::WIDTH],
        }
    }

    /// Returns the number of outputs per sample, of which the label selects one.
    pub(crate) fn classes(self) -> i64 {
        match self {
            Self::Cnn | Self::Xresnet50 => 10,
            Self::Resnet18 | Self::Resnet50 => 1000,
            Self::Mlp => Mlp::SIZES[3],
            Self::Block => Self::WIDTH,
        }
    }

    pub(crate) fn optimizer<M>(self, lr: f64, model: &Model<M>) -> brigade::Result<Optimizer> {
        match self {
            Self::Cnn => Ok(Adam::default().lr(lr).build(model)?),
            // Defaults of fastai's Adam.
            Self::Xresnet50 => AdamW::default()
                .lr(lr)
                .betas(0.9, 0.99)
                .eps(1e-5)
                .weight_decay(0.01)
                .no_decay_on_norms_and_biases(true)
                .build(model),
            _ => AdamW::default().lr(lr).build(model),
        }
    }

    /// Returns the floating-point operations of a training step, as `torch.utils.flop_counter` counts them.
    ///
    /// A multiplication and the following addition are two operations. Only the products of convolutions and linear
    /// layers are counted, with zeros of the padding and without biases: once in the forward pass, and twice in the
    /// backward pass, for the gradients of the weights and of the input; the latter is not computed in the first layer.
    /// Normalisation, activations, pooling, loss and optimizer are not counted; their time is in the step.
    pub(crate) fn flops(self) -> Result<f64> {
        let layers = self.layers().with_context(|| format!("{self:?} has no list of layers"))?;
        let forward: Vec<i64> = layers.iter().map(Layer::flops).collect();
        Ok((3 * forward.iter().sum::<i64>() - forward[0]) as f64)
    }

    /// Returns the convolutions and linear layers, in the order of the model.
    fn layers(self) -> Option<Vec<Layer>> {
        let layer =
            |channels, kernel, side| Layer { batch: self.shape()[0], channels, kernel, side };
        match self {
            Self::Cnn => Some(vec![
                layer([1, 32], 5, 28),
                layer([32, 64], 5, 14),
                layer([64 * 7 * 7, 64], 1, 1),
                layer([64, 10], 1, 1),
            ]),
            Self::Resnet18 => {
                let mut side = self.shape()[2] / 2;
                let mut layers = vec![layer([3, 64], 7, side)];
                let mut inputs = 64;
                for outputs in [64, 128, 256, 512] {
                    // Pooling before the first stage, or the stride of the others.
                    side /= 2;
                    layers.push(layer([inputs, outputs], 3, side));
                    layers.extend([layer([outputs, outputs], 3, side); 3]);
                    if inputs != outputs {
                        layers.push(layer([inputs, outputs], 1, side));
                    }
                    inputs = outputs;
                }
                layers.push(layer([inputs, self.classes()], 1, 1));
                Some(layers)
            }
            Self::Resnet50 | Self::Xresnet50 | Self::Mlp | Self::Block => None,
        }
    }
}

/// Convolution with a square kernel, or a linear layer: a kernel of 1 x 1 at one position.
#[derive(Clone, Copy)]
struct Layer {
    batch: i64,
    channels: [i64; 2],
    kernel: i64,
    /// Side of the output in pixels.
    side: i64,
}

impl Layer {
    fn weights(&self) -> i64 {
        self.channels[0] * self.channels[1] * self.kernel * self.kernel
    }

    /// Returns the operations of the forward pass.
    fn flops(&self) -> i64 {
        2 * self.batch * self.side * self.side * self.weights()
    }
}

/// Three linear layers with GELU between them, with a transformer's widths.
struct Mlp([Linear; 3]);

impl Mlp {
    const SIZES: [i64; 4] = [768, 3072, 3072, 768];

    fn new(path: &ParamPath<'_>) -> Self {
        let layer = |i: usize| Linear::new(path / i, Self::SIZES[i], Self::SIZES[i + 1]);
        Self([layer(0), layer(1), layer(2)])
    }
}

impl Module<&Tensor> for Mlp {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade::Result<Tensor> {
        let [first, second, third] = &self.0;
        let hidden = second.forward(&first.forward(input)?.gelu("none"))?;
        third.forward(&hidden.gelu("none"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // Tests.
mod tests {
    use super::*;

    #[test]
    fn flops_are_those_of_pytorchs_counter() {
        // Results of `FlopCounterMode` around forward, cross-entropy and backward, in PyTorch 2.13.
        assert_eq!(Net::Cnn.flops().unwrap(), 4_091_396_096.0);
        assert_eq!(Net::Resnet18.flops().unwrap(), 111_331_246_080.0);
    }

    #[test]
    fn the_layers_are_those_of_the_models() {
        for net in [Net::Cnn, Net::Resnet18] {
            let model = Model::new(|path| net.build(path)).unwrap();
            // Biases and normalisations are vectors.
            let shapes = model.trainable_parameters().into_iter().map(|named| named.tensor.size());
            let weights =
                shapes.filter(|shape| shape.len() > 1).map(|shape| shape.iter().product::<i64>());
            let (mut found, mut expected): (Vec<i64>, Vec<i64>) =
                (net.layers().unwrap().iter().map(Layer::weights).collect(), weights.collect());
            found.sort_unstable();
            expected.sort_unstable();
            assert_eq!(found, expected, "{net:?}");
        }
    }
}
