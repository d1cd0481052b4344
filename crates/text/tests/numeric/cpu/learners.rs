//! Learners of texts against fastai's, on ranks, and after they were stopped.

mod golden;
mod ranks;
mod setup;
