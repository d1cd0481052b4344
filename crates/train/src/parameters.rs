//! Parameters whose gradients are read or changed: those of a model, of an optimizer, or of a list.

use brigade_optim::Optimizer;
use brigade_torch::NamedTensor;
use tch::Tensor;

/// A collection of parameters whose gradients can be clipped or unscaled: those of one or several prepared models, of
/// an optimizer, or of a list.
pub trait Parameters {
    /// Calls `f` with each trained parameter.
    fn each(&self, f: &mut dyn FnMut(&Tensor));
}

impl Parameters for [NamedTensor] {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.iter().for_each(|parameter| f(&parameter.tensor));
    }
}

impl Parameters for Vec<NamedTensor> {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.as_slice().each(f);
    }
}

/// Calls `f` with the parameters that the optimizer steps.
impl Parameters for Optimizer {
    fn each(&self, f: &mut dyn FnMut(&Tensor)) {
        self.with_parameters(|parameters| parameters.iter().for_each(|parameter| f(parameter)));
    }
}
