//! Checks of the ranges of hyperparameters.

use std::ops::Range;

use brigade_torch::{Error, Result};

/// Rejects decay rates of running means that are out of range or NaN.
pub(crate) fn check_betas((first, second): (f64, f64)) -> Result<()> {
    check("the first beta", first, 0.0..1.0)?;
    check("the second beta", second, 0.0..1.0)
}

/// Rejects hyperparameters that are out of range or NaN.
pub(crate) fn check(name: &str, value: f64, allowed: Range<f64>) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "{name} is {value}, but must be at least {} and below {}",
        allowed.start, allowed.end
    )))
}
