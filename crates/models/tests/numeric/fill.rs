//! The values that the golden files' weights and inputs are filled with.

use brigade_nn::Model;
use brigade_test_device::on_device;
use brigade_testkit::golden_uniform;
use tch::Tensor;

/// Returns the golden files' own random numbers as a tensor of a shape.
pub(crate) fn fill(shape: &[i64], stream: u64, low: f64, high: f64) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    on_device(&Tensor::from_slice(&golden_uniform(low, high, stream, count)).view(shape))
}

/// Gives every parameter the golden files' values.
pub(crate) fn filled<M>(model: &Model<M>) {
    for (stream, parameter) in (0..).zip(model.parameters()) {
        let shape = parameter.tensor.size();
        let (low, high) = match shape.as_slice() {
            [_] if parameter.name.ends_with("weight") => (0.8, 1.2),
            [_] => (-0.1, 0.1),
            [_, row @ ..] => {
                let bound = (6.0 / row.iter().product::<i64>() as f64).sqrt();
                (-bound, bound)
            }
            [] => unreachable!("no parameter is a scalar"),
        };
        let values = fill(&shape, stream, low, high);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
    for buffer in model.buffers() {
        // The vectors of a spectral norm: equal numbers of norm 1.
        if buffer.name.ends_with("weight_u") || buffer.name.ends_with("weight_v") {
            let value = 1.0 / (buffer.tensor.numel() as f64).sqrt();
            let _ = tch::no_grad(|| buffer.tensor.shallow_clone().fill_(value));
        }
    }
}
