//! The optimizers against torch.optim and fastai, their groups, and their state.

#![allow(clippy::unwrap_used)] // also in what the tests share

mod device;
mod filled;
mod golden;
mod groups;
mod import;
mod slips;
mod state;
