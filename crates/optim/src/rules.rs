//! The rules, one file each: a builder with the hyperparameters, and the arithmetic.

pub(crate) mod adafactor;
pub(crate) mod adagrad;
pub(crate) mod adam;
pub(crate) mod lamb;
pub(crate) mod lars;
pub(crate) mod muon;
pub(crate) mod qhadam;
pub(crate) mod radam;
pub(crate) mod rmsprop;
pub(crate) mod sgd;
