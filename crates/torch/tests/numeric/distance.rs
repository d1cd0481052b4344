//! How far two results lie apart.

use tch::{Kind, Tensor};

/// The largest difference, over the largest value.
pub(crate) fn apart(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let size = other.abs().max().double_value(&[]);
    (one - other).abs().max().double_value(&[]) / size
}
