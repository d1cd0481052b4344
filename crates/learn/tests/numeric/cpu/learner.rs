//! The numbers of a Learner's fits on one rank and on two: averages, gradients, mixtures, devices of one process and
//! pictures.

mod averages;
mod dispatched;
mod divided;
mod gradients;
mod mixtures;
mod parallel;
mod pictures;
mod ranks;
mod sharded;
