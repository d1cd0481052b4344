//! The Dice loss of segmentation.

use brigade_torch::{Error, Result};
use tch::{Kind, Reduction, Tensor};

use super::{Loss, Outputs, apply_reduction, read};

/// Dice loss: for each image and class `1 - (2 Σ p t + smooth) / (Σ (p + t) + smooth)` over its pixels, with the
/// softmax `p` of the logits, and `t` 1 where the target is the class.
///
/// Predictions `[n, classes, h, w]`, masks `[n, h, w]` or `[n, 1, h, w]`. The result is the mean over images and
/// classes. [`DiceLoss::summed`] sums instead, as fastai does.
///
/// ```
/// use brigade_learn::loss::{DiceLoss, Loss};
/// use tch::{Device, Kind, Tensor};
///
/// let certain = Tensor::from_slice(&[50f32, -50.0]).view([1, 2, 1, 1]).expand([1, 2, 4, 4], false);
/// let mask = Tensor::zeros([1, 4, 4], (Kind::Int64, Device::Cpu));
/// assert!(DiceLoss::default().forward(&certain, &mask)?.double_value(&[]).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiceLoss {
    smooth: f64,
    square_in_union: bool,
    summed: bool,
}

impl Default for DiceLoss {
    fn default() -> Self {
        Self { smooth: 1e-6, square_in_union: false, summed: false }
    }
}

impl DiceLoss {
    /// Sets the value added to numerator and denominator, so that a class that is absent from an image and from its
    /// prediction has a loss of 0. Defaults to 1e-6.
    #[must_use]
    pub fn smooth(mut self, smooth: f64) -> Self {
        self.smooth = smooth;
        self
    }

    /// Uses `p²` instead of `p` in the denominator, which makes gradients steeper.
    #[must_use]
    pub fn square_in_union(mut self) -> Self {
        self.square_in_union = true;
        self
    }

    /// Sums over images and classes instead of taking the mean, as fastai's loss does by default. The gradient then
    /// grows with the batch.
    #[must_use]
    pub fn summed(mut self) -> Self {
        self.summed = true;
        self
    }
}

impl Loss for DiceLoss {
    fn name(&self) -> &str {
        "dice"
    }

    /// Without a reduction, computes the loss of each image and class.
    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        let (scores, targets) = read::classes("Dice loss", predictions, targets)?;
        let shape = scores.size();
        if shape.len() < 3 {
            return Err(Error::invalid_argument(format!(
                "Dice loss: predictions have shape {shape:?}; expected [n, classes, h, w]"
            )));
        }
        let mut places = vec![1; shape.len()];
        places[1] = shape[1];
        let classes =
            Tensor::f_arange(shape[1], (Kind::Int64, scores.device()))?.f_reshape(&places)?;
        let there = targets.f_unsqueeze(1)?.f_eq_tensor(&classes)?.f_to_kind(scores.kind())?;
        let probabilities = read::softmax(&scores)?;
        let pixels = |tensor: &Tensor| {
            tensor.f_flatten(2, -1)?.f_sum_dim_intlist([2].as_slice(), false, None::<Kind>)
        };
        let both = pixels(&probabilities.f_mul(&there)?)?;
        let own = if self.square_in_union { probabilities.f_square()? } else { probabilities };
        let either = pixels(&own.f_add(&there)?)?;
        let dice = both
            .f_mul_scalar(2.0)?
            .f_add_scalar(self.smooth)?
            .f_div(&either.f_add_scalar(self.smooth)?)?;
        let each = dice.f_neg()?.f_add_scalar(1.0)?;
        let sums = self.summed && reduce == Reduction::Mean;
        apply_reduction(&each, if sums { Reduction::Sum } else { reduce })
    }

    fn outputs(&self) -> Outputs {
        Outputs::Classes
    }
}
