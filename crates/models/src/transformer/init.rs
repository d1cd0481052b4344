//! Initial values, as by transformers' `_init_weights`.

use brigade_nn::{Embedding, Linear, ParamPath};

use crate::init::{Redraw, redraw};

/// Draws a normal weight, and sets the bias to 0.
pub(super) fn draw(path: &ParamPath<'_>, layer: &Linear, deviation: f64) {
    redraw(path, layer.weight(), Redraw::Normal(deviation));
    if let Some(bias) = layer.bias() {
        redraw(path, bias, Redraw::Constant(0.0));
    }
}

/// Draws a normal embedding, and sets the row of the padding token to 0.
pub(super) fn draw_table(
    path: &ParamPath<'_>,
    table: &Embedding,
    deviation: f64,
    padding: Option<i64>,
) {
    path.redraw(table.weight(), move |values| {
        Redraw::Normal(deviation).fill(values)?;
        match padding.filter(|row| (0..values.size()[0]).contains(row)) {
            Some(row) => values.f_get(row)?.f_zero_().map(drop),
            None => Ok(()),
        }
    });
}
