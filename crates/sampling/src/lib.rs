//! Sampling for distributed training: the order of an epoch, and the assignment of samples to ranks.
//!
//! Everything here is a pure function of its arguments. The crate uses no libtorch, no I/O, no clock and no hidden
//! random state, so that every rank computes the same plan by itself and no rank has to send one.
//!
//! - [`Sampler`]: the order of an epoch ([`Sequential`], [`Shuffle`], [`Weighted`]), and
//!   [`BatchSampler`] to cut it into batches.
//! - [`Shards`]: the batches of every rank, by the rules of Accelerate, of torch's `DistributedSampler` or of fastai;
//!   [`StreamShard`] does the same for data without a length. Each batch contains the number of its valid samples, each
//!   [`Round`] those of all ranks.
//!
//! ```
//! use brigade_sampling::{Sampler, ShardOptions, Shards, Shuffle};
//!
//! let order = Shuffle::new(50, 42).order(0);
//! let shards = Shards::new(order, 12, 4, ShardOptions::default())?;
//! let last = shards.round(1);
//! assert_eq!(last.rows, [12, 12, 12, 12]); // the ranks stay in step ...
//! assert_eq!(last.valid, [2, 0, 0, 0]); // ... and only two of these samples are new
//! # Ok::<(), brigade_sampling::PlanError>(())
//! ```

mod batches;
mod error;
mod order;
mod round;
mod sampler;
mod shards;
mod stream;
mod stream_shard;
mod weighted;

pub use batches::BatchSampler;
pub use error::PlanError;
pub use order::Order;
pub use round::{PlannedBatch, Round};
pub use sampler::{Sampler, Sequential, Shuffle};
pub use shards::{RankBatches, Scheme, ShardOptions, Shards, Totals};
pub use stream::stream;
pub use stream_shard::{StreamBatch, StreamShard};
pub use weighted::Weighted;
