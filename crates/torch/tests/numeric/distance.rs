//! How far two results lie apart, and gradients from finite differences.

use brigade_torch::{GradOptions, grad};
use tch::{Kind, Tensor};

/// The largest difference, over the largest value.
pub(crate) fn apart(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let size = other.abs().max().double_value(&[]);
    (one - other).abs().max().double_value(&[]) / size
}

/// Asserts that the gradients of a loss by float64 leaves are finite differences of it. The loss is a sum of some dozen
/// values of at most about 10, each rounded by 1e-15, over the step; the rest of the allowance is the square of the step
/// times a third derivative of at most some dozen.
#[track_caller]
pub(crate) fn assert_finite_differences(
    about: &str,
    leaves: &[&Tensor],
    loss: &dyn Fn() -> Tensor,
) {
    const STEP: f64 = 1e-6;
    let gradients = grad(&[&loss()], leaves, GradOptions::default()).unwrap();
    for (leaf, gradient) in leaves.iter().zip(gradients) {
        let gradient = gradient.unwrap();
        for place in 0..leaf.numel() as i64 {
            let moved = |by: f64| {
                tch::no_grad(|| {
                    let _ = leaf.view([-1]).narrow(0, place, 1).g_add_scalar_(by);
                });
                loss().double_value(&[])
            };
            let difference = (moved(STEP) - moved(-2.0 * STEP)) / (2.0 * STEP);
            moved(STEP);
            let found = gradient.view([-1]).double_value(&[place]);
            assert!((found - difference).abs() < 1e-7, "{about}: {found} is not {difference}");
        }
    }
}
