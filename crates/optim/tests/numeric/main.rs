//! The optimizers against torch.optim and fastai, their groups, and their state.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

mod device;
mod filled;
mod golden;
mod groups;
mod import;
mod place;
mod slips;
mod state;
