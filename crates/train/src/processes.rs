//! What ranks do for and with each other beside the gradients: values gathered, code run in turn, work
//! shared out, a flag that all see.

pub(crate) mod gather;
pub(crate) mod metrics;
pub(crate) mod scope;
pub(crate) mod split;
pub(crate) mod trigger;
