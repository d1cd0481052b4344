//! The golden files' own random numbers: splitmix64 of an index and a stream.

use tch::Tensor;

/// Returns number `index` of a stream, uniform in `[0, 1)`.
pub(crate) fn u(index: u64, stream: u64) -> f64 {
    let mut z = (index + 1).wrapping_add(stream << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53)
}

/// Returns the first `count` numbers of a stream in `[low, high)`, each rounded once.
pub(crate) fn uniform(low: f64, high: f64, stream: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|index| (low + (high - low) * u(index, stream)) as f32).collect()
}

/// Returns [`uniform`] as a tensor of a shape.
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
