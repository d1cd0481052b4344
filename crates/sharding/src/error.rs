//! What can be wrong with a mesh, a strategy or a plan.

use brigade_rank_env::text::escaped;

/// A mesh, a strategy or a plan that cannot be made. All of these are the caller's input; the text says what
/// to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// A text that is not a strategy.
    #[error("`{}` is not a sharding strategy: write none, zero1, zero2, zero3 or hybrid=N", escaped(.text))]
    UnknownStrategy {
        /// The text.
        text: String,
    },

    /// A number of ranks that is 0.
    #[error("the size of {axis} is 0: it must be at least 1")]
    EmptyAxis {
        /// The axis, or the world.
        axis: &'static str,
    },

    /// Axes whose product is not the world size.
    #[error(
        "the mesh {axes} has {product} ranks and the job has {world_size}: change a size, or start {product} ranks"
    )]
    WorldSize {
        /// The axes and their sizes: `dp_replicate 2 x dp_shard 4`.
        axes: String,
        /// The product of the sizes.
        product: usize,
        /// Ranks of the job.
        world_size: usize,
    },

    /// Axes whose product has no place in a number.
    #[error("the mesh {axes} has more ranks than can be counted")]
    TooManyRanks {
        /// The axes and their sizes.
        axes: String,
    },

    /// A number of expert ranks that does not divide the ranks that experts are spread over.
    #[error("ep {expert} does not divide dp_shard x cp x sp x tp, which is {inner}")]
    Expert {
        /// The size of the axis of experts.
        expert: usize,
        /// Ranks within one pipeline stage and one replica.
        inner: usize,
    },

    /// A rank outside of the mesh.
    #[error("rank {rank} is not in a mesh of {world_size} ranks")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// Ranks of the mesh.
        world_size: usize,
    },

    /// A shard size that does not divide the number of ranks.
    #[error("hybrid={shard_size} does not divide the {world_size} ranks: take one of {}", divisors(*.world_size))]
    ShardSize {
        /// Ranks that share one copy.
        shard_size: usize,
        /// Ranks of the job.
        world_size: usize,
    },

    /// A number of parts that does not divide the ranks that share one copy.
    #[error("reshard to {size} does not divide the {shard_size} ranks that share one copy")]
    ReshardTo {
        /// Parts of a unit after forward.
        size: usize,
        /// Ranks that share one copy.
        shard_size: usize,
    },
}

/// `1, 2, 4, 8`: the shard sizes that a world size allows.
fn divisors(world_size: usize) -> String {
    let divisors = (1..=world_size).filter(|size| world_size.is_multiple_of(*size));
    divisors.map(|size| size.to_string()).collect::<Vec<_>>().join(", ")
}
