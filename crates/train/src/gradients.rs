//! Gradients between the loss and the optimizer: accumulated over batches, averaged over ranks with or without
//! compression, clipped, or kept local for some steps.

pub(crate) mod accumulate;
pub(crate) mod backward;
pub(crate) mod clip;
pub(crate) mod hook;
pub(crate) mod join;
pub(crate) mod local_sgd;
pub(crate) mod loss_check;
pub(crate) mod models;
mod norm;
