//! Pipeline parallelism as data: the order in which each rank computes, sends and receives.
//!
//! A model is divided into *stages*, consecutive layers that one rank has, and a batch into *micro-batches*. A
//! [`Schedule`] orders the forward and backward passes of all stages. A [`PipelineTable`] has the actions of each rank
//! with all messages, and is checked to be free of deadlocks. [`PipelineTable::simulate`] runs it on a simulated clock.
//! Nothing in this module has a tensor or a process group.
//!
//! ```
//! use brigade_sharding::pipeline::{Costs, PipelineTable, Schedule};
//!
//! let table = PipelineTable::new(Schedule::OneForwardOneBackward, 2, 4, 1)?;
//! assert_eq!(
//!     table.to_string(),
//!     "0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 - \n\
//!      1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  . \n"
//! );
//! assert_eq!((table.held(0), table.held(1)), (2, 1));
//! let timeline = table.simulate(&Costs::equal(table.stages()))?;
//! assert_eq!(timeline.total, 15.0);
//! assert_eq!(timeline.bubble(), 0.25);
//! # Ok::<(), brigade_sharding::pipeline::PipelineError>(())
//! ```
//!
//! `order.rs` has the order of each rank's passes, and times them on a clock of slots. `build.rs` then takes passes and
//! messages of all ranks from one order by time, so that ranks do not deadlock, even if a send ends only when its
//! receive has begun. `check.rs` checks every table, those of schedules too, and returns a topological order, in which
//! `clock.rs` simulates other costs in one pass. Tests run tables with ranks as threads and channels without capacity,
//! and check that sixteen kinds of changes to a table are refused.

mod action;
mod build;
mod check;
mod clock;
mod cut;
mod error;
mod order;
mod schedule;
mod slots;
mod table;
#[cfg(test)]
mod tests;

pub use action::{Action, ActionKind};
pub use clock::{Costs, RankTimeline, Span, StageCosts, Timeline};
pub use cut::{cut_at, cut_by_cost, cut_evenly};
pub use error::{ActionFault, PipelineError, Place};
pub use schedule::Schedule;
pub use slots::Slot;
pub use table::PipelineTable;
