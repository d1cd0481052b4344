//! Stochastic depth (Huang et al., 2016).

use brigade_nn::{ParamPath, Training};
use brigade_torch::Result;
use tch::Tensor;

/// Stochastic depth: in training, sets a sample's residual branch to 0 with probability `p` and divides the others by
/// `1 − p`. The same as `torchvision.ops.stochastic_depth` in its mode "row", and timm's `DropPath`.
#[derive(Debug)]
pub(crate) struct DropPath {
    probability: f64,
    training: Training,
}

impl DropPath {
    pub(crate) fn new(path: &ParamPath<'_>, probability: f64) -> Self {
        if !(0.0..1.0).contains(&probability) {
            path.reject(format_args!(
                "the probability {probability} of stochastic depth is not in [0, 1)"
            ));
        }
        Self { probability, training: path.training() }
    }

    pub(crate) fn apply(&self, branch: &Tensor) -> Result<Tensor> {
        if self.probability == 0.0 || !self.training.is_on() {
            return Ok(branch.shallow_clone());
        }
        let survival = 1.0 - self.probability;
        let mut shape = vec![1; branch.dim()];
        if let (Some(rows), Some(samples)) = (shape.first_mut(), branch.size().first()) {
            *rows = *samples;
        }
        let mut noise = Tensor::f_empty(&shape, (branch.kind(), branch.device()))?;
        let noise = noise.f_bernoulli_float_(survival)?.f_div_scalar(survival)?;
        Ok(branch.f_mul(&noise)?)
    }
}
