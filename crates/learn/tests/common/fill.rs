//! The golden files' own random numbers as tensors.

use tch::Tensor;

pub(crate) use brigade_testkit::golden_uniform as uniform;
pub(crate) use brigade_testkit::golden_unit as u;

/// Returns [`golden_uniform`](brigade_testkit::golden_uniform) as a tensor of a shape.
pub(crate) fn uniform_tensor(shape: &[i64], low: f64, high: f64, stream: u64) -> Tensor {
    let count = shape.iter().product::<i64>() as usize;
    Tensor::from_slice(&uniform(low, high, stream, count)).view(shape)
}

/// Returns class numbers of a shape: `floor(classes * u)`.
pub(crate) fn classes(shape: &[i64], classes: i64, stream: u64) -> Tensor {
    let count = shape.iter().product::<i64>() as u64;
    let drawn: Vec<i64> =
        (0..count).map(|index| (classes as f64 * u(index, stream)).floor() as i64).collect();
    Tensor::from_slice(&drawn).view(shape)
}
