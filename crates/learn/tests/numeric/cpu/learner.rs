//! The Learner on one rank and on two: what its callbacks do, what ranks agree on, how a fit goes on from a checkpoint,
//! devices of one process, pictures, and what it refuses.

mod averages;
mod cancels;
mod gradients;
mod killed;
mod layers;
mod logs;
mod mixtures;
mod parallel;
mod pictures;
mod ranks;
mod resume;
mod scopes;
mod setup;
mod wrong;
