//! A process's place among the ranks of a job: rank, local rank, world size, and the environment variables that carry
//! them.
//!
//! The names and their meaning are torchrun's, so that a Brigade program runs under torchrun and a PyTorch script runs
//! under `brigade launch`. [`env::TABLE`] lists all of these variables; [`World`] is a process's place, which a program
//! reads from them and a launcher writes to them. A program that Slurm, MPI or Kubeflow starts without a launcher finds
//! its place in their variables ([`scheduler`]). [`text`] escapes untrusted text from files and other hosts before it
//! is displayed.
//!
//! ```
//! use brigade_rank_env::World;
//!
//! let vars = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
//! let world = World::from_vars(|name| {
//!     vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
//! })?;
//! assert_eq!(world.rank.as_usize(), 1);
//! assert_eq!(world.to_string(), "rank 1 of 2");
//! # Ok::<(), brigade_rank_env::WorldError>(())
//! ```

pub mod env;
mod error;
mod error_file;
mod main_error;
mod progress;
mod rank;
pub mod scheduler;
mod store;
pub mod text;
mod timestamp;
mod vars;
mod world;

pub use error::WorldError;
pub use error_file::{ErrorRecord, record};
pub use main_error::{MainError, MainResult, with_causes};
pub use progress::{MAX_REPORT_LEN, Pace, ProgressPipe, ProgressReport};
pub use rank::{LocalRank, Rank, WorldSize};
pub use store::{StoreEndpoint, StoreHost, is_loopback, own_address};
pub use timestamp::timestamp;
pub use world::World;
