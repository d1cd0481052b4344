//! The Learner on one rank and on two: what its callbacks do, what ranks agree on, how a fit goes on from a checkpoint,
//! devices of one process, pictures, and what it refuses.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "learner/averages.rs"]
mod averages;
#[path = "learner/cancels.rs"]
mod cancels;
#[path = "common/fill.rs"]
mod fill;
#[path = "learner/gradients.rs"]
mod gradients;
#[path = "learner/killed.rs"]
mod killed;
#[path = "learner/layers.rs"]
mod layers;
#[path = "learner/logs.rs"]
mod logs;
#[path = "learner/mixtures.rs"]
mod mixtures;
#[path = "learner/parallel.rs"]
mod parallel;
#[path = "learner/pictures.rs"]
mod pictures;
#[path = "learner/ranks.rs"]
mod ranks;
#[allow(dead_code, reason = "the runs of the golden file use the rest of it")]
#[path = "golden/recipe.rs"]
mod recipe;
#[path = "learner/resume.rs"]
mod resume;
#[path = "learner/scopes.rs"]
mod scopes;
#[path = "learner/setup.rs"]
mod setup;
#[path = "learner/wrong.rs"]
mod wrong;
