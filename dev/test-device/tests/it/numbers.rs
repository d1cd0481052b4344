//! Random numbers of the tests.

#![cfg(not(feature = "cuda"))] // so are the tests that use them

use std::cell::Cell;

use tch::{Device, Kind, Tensor};

/// Returns normally distributed numbers, which are the same in each run: those of the first draw of a test, its second,
/// and so on. (A generator without a seed begins in a random state, so a failure could not be reproduced.)
pub(crate) fn random(size: &[i64]) -> Tensor {
    thread_local!(static DRAWS: Cell<i64> = const { Cell::new(0) });
    let draw = DRAWS.get() + 1;
    DRAWS.set(draw);
    tch::manual_seed(draw);
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}
