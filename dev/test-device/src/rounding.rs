//! Effect of rounding on results, measured by runs whose weights are perturbed by a unit in the last place.
//!
//! A comparison with numbers of another library, or of another processor, takes its tolerance from such runs, which
//! show the conditioning of the computation on the processor of the test. A tolerance that was measured elsewhere may
//! be too small here.

use tch::{Kind, Tensor, no_grad};

/// Largest relative change of an element: two units in the last place of `f32`.
const LARGEST: f64 = 1.0 / (1 << 22) as f64;

/// Multiplies each element of floating-point tensors by `1 + d` in place, with `d` uniform in ±2^-22, and leaves other
/// tensors as they are.
///
/// The factors depend only on the seed, the tensor's index in the list and the element's index.
///
/// ```
/// use brigade_test_device::perturb;
/// use tch::Tensor;
///
/// let weights = Tensor::from_slice(&[1.0f32, -2.0, 3.0]);
/// let before = weights.copy();
/// perturb([weights.shallow_clone()], 1);
/// assert_ne!(weights, before);
/// assert!(weights.allclose(&before, 5e-7, 0.0, false));
/// ```
pub fn perturb(tensors: impl IntoIterator<Item = Tensor>, seed: u64) {
    for (stream, mut tensor) in (seed << 32..).step_by(1 << 20).zip(tensors) {
        if !tensor.is_floating_point() {
            continue;
        }
        let factor = |place: u64| 1.0 + LARGEST * (2.0 * uniform(stream + place) - 1.0);
        let factors: Vec<f64> = (0..tensor.numel() as u64).map(factor).collect();
        let factors = Tensor::from_slice(&factors).view(tensor.size().as_slice());
        let exact = no_grad(|| tensor.to_kind(Kind::Double) * factors.to_device(tensor.device()));
        no_grad(|| tensor.copy_(&exact));
    }
}

/// Returns, for each index of a list of results, the largest difference of perturbed runs up to that index: a
/// difference grows from step to step, and may pass through zero.
///
/// Indices that a perturbed run has not reached, or where it is not finite, have the difference of those before them.
///
/// ```
/// use brigade_test_device::changes;
///
/// let found = changes(&[1.0, 2.0, 3.0], &[vec![1.0, 2.5, 3.25], vec![0.75]]);
/// assert_eq!(found, [0.25, 0.5, 0.5]);
/// ```
#[must_use]
pub fn changes<L: AsRef<[f64]>>(ours: &[f64], perturbed: &[L]) -> Vec<f64> {
    let mut largest = 0.0_f64;
    let change = |(place, ours): (usize, &f64)| {
        let others = perturbed.iter().filter_map(|list| list.as_ref().get(place));
        let apart = others.map(|it| (ours - it).abs()).filter(|it| it.is_finite());
        largest = apart.fold(largest, f64::max);
        largest
    };
    ours.iter().enumerate().map(change).collect()
}

/// Returns a number in `[0, 1)` by splitmix64.
fn uniform(place: u64) -> f64 {
    let mut z = (place + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53)
}
