//! A small model whose values are a formula: libtorch's random numbers belong to the whole process.

use brigade_nn::{Init, Linear, Model, Module, ParamPath};
use tch::{Kind, Tensor};

pub(crate) struct Net {
    hidden: Linear,
    head: Linear,
}

impl Net {
    pub(crate) fn new(path: &ParamPath<'_>) -> Self {
        Self { hidden: Linear::new(path / "hidden", 5, 7), head: Linear::new(path / "head", 7, 3) }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        self.head.forward(&self.hidden.forward(input)?.tanh())
    }
}

/// Three weights: `output = weight · input`.
pub(crate) struct Weight(Tensor);

impl Weight {
    pub(crate) fn new(path: &ParamPath<'_>) -> Self {
        Self(path.parameter("weight", &[3], Init::Zeros))
    }
}

impl Module<&Tensor> for Weight {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        Ok(&self.0 * input)
    }
}

/// Fills parameters with sines.
pub(crate) fn fill<M>(model: &Model<M>) {
    for parameter in model.parameters() {
        let tensor = parameter.tensor.detach();
        let values = Tensor::arange(tensor.numel() as i64, (Kind::Double, tch::Device::Cpu));
        tensor.shallow_clone().copy_(&(values.sin() * 0.4).reshape(tensor.size()));
    }
}

pub(crate) fn model(kind: Kind) -> Model<Net> {
    let model = Model::builder().kind(kind).build(Net::new).unwrap();
    fill(&model);
    model
}

/// All values of all parameters.
pub(crate) fn weights<M>(model: &Model<M>) -> Vec<f64> {
    let flat = |t: &Tensor| t.detach().to_kind(Kind::Double).reshape([-1]);
    model
        .parameters()
        .iter()
        .flat_map(|parameter| Vec::<f64>::try_from(flat(&parameter.tensor)).unwrap())
        .collect()
}
