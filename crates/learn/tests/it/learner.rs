//! The Learner on one rank and on two: what its callbacks do, how a fit goes on from a checkpoint, and what it refuses.

mod cancels;
mod killed;
mod layers;
mod logs;
mod resume;
mod scopes;
mod wrong;
