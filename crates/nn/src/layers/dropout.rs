//! Dropout.

use std::borrow::Borrow;

use brigade_torch::dropout;
use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Module, ParamPath, Result, Training};

/// In training sets each value to 0 with probability `p` and divides the others by `1 − p`; in
/// evaluation passes its input. Any shape
/// ([torch.nn.Dropout](https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html)).
///
/// On the CPU [`brigade_torch::dropout`] draws what is dropped, and keeps no mask.
///
/// It has no parameters, and takes the path only for the switch between training and evaluation.
///
/// ```
/// use brigade_nn::{Dropout, Kind, Model, Tensor};
///
/// let mut model = Model::new(|p| Dropout::new(p, 0.5))?;
/// let ones = Tensor::ones([1000], (Kind::Float, model.device()));
/// assert!(model.forward(&ones)?.eq(0.0).any().double_value(&[]) == 1.0);
/// model.eval();
/// assert_eq!(model.forward(&ones)?, ones);
/// # Ok::<(), brigade_nn::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Dropout {
    probability: f64,
    training: Training,
    context: LayerContext,
}

impl Dropout {
    /// `probability` in `[0, 1]`; anything else makes the model fail to build.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, probability: f64) -> Self {
        let path = path.borrow();
        if !(0.0..=1.0).contains(&probability) {
            path.reject(format_args!("the dropout probability {probability} is not in [0, 1]"));
        }
        Self { probability, training: path.training(), context: path.layer() }
    }
}

impl Module<&Tensor> for Dropout {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let output = match self.training.is_on() {
            true => dropout(input, self.probability, None),
            false => Ok(input.shallow_clone()),
        };
        self.context.finish_border(output, input)
    }
}
