//! First values that transformers' `_init_weights` draws.

use brigade_nn::{Linear, ParamPath};
use tch::Tensor;

use crate::init::{Redraw, redraw};

/// A normal weight and a bias of 0.
pub(super) fn draw(path: &ParamPath<'_>, layer: &Linear, deviation: f64) {
    redraw(path, layer.weight(), Redraw::Normal(deviation));
    if let Some(bias) = layer.bias() {
        redraw(path, bias, Redraw::Constant(0.0));
    }
}

/// The row of an embedding that stands for padding.
pub(super) fn clear_row(path: &ParamPath<'_>, weight: &Tensor, row: Option<i64>) {
    let Some(row) = row.filter(|&row| weight.defined() && (0..weight.size()[0]).contains(&row))
    else {
        return;
    };
    if let Err(error) = tch::no_grad(|| weight.f_get(row)?.f_zero_()) {
        path.reject(error);
    }
}
