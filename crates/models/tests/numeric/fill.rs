//! The values that the golden files' weights and inputs are filled with.

use brigade_gpukit::on_device;
use brigade_nn::{Model, Tensor};

/// The golden files' own random numbers: splitmix64 of the index and a stream, uniform in [0, 1).
pub(crate) fn fill(shape: &[i64], stream: u64, low: f64, high: f64) -> Tensor {
    let value = |index: u64| {
        let mut z = (index + 1 + (stream << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let unit = ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53);
        (low + (high - low) * unit) as f32
    };
    let length = shape.iter().product::<i64>().unsigned_abs();
    on_device(&Tensor::from_slice(&(0..length).map(value).collect::<Vec<_>>()).view(shape))
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
