//! What happens to gradients between the loss and the optimizer: added up over batches and averaged over
//! ranks, whole or compressed, brought within bounds, or left alone for some steps.

pub(crate) mod accumulate;
pub(crate) mod backward;
pub(crate) mod clip;
pub(crate) mod hook;
pub(crate) mod join;
pub(crate) mod local_sgd;
pub(crate) mod loss_check;
pub(crate) mod models;
mod norm;
