//! Errors of meshes, sharding strategies and plans.

use brigade_checkpoint::Dtype;
use brigade_checkpoint::layout::MeshAxis;
use brigade_rank_env::text::escaped;

/// Error of an invalid mesh, strategy or plan. Each is caused by the caller's input, and its message gives the
/// change to make.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// A text that is not a sharding strategy.
    #[error(
        "`{}` is not a sharding strategy: write {}zero1, zero2, zero3 or hybrid=N",
        escaped(.text), if *.or_none { "none, " } else { "" }
    )]
    UnknownStrategy {
        /// Text that could not be parsed as a strategy.
        text: String,
        /// `true` if `none` is also a valid value.
        or_none: bool,
    },

    /// A text in JSON that is not a strategy with its options.
    #[error("not the options of a sharding strategy in JSON: {}", escaped(.message))]
    Json {
        /// Error message of the JSON parser.
        message: String,
    },

    /// An environment variable with an invalid value.
    #[error("{name}: {source}")]
    Variable {
        /// Name of the environment variable.
        name: &'static str,
        /// Error in the variable's value.
        source: Box<Self>,
    },

    /// An axis whose size is 0.
    #[error("the size of {axis} is 0: it must be at least 1")]
    EmptyAxis {
        /// Name of the axis.
        axis: &'static str,
    },

    /// The product of the axes' sizes differs from the world size.
    #[error(
        "the mesh {axes} has {product} ranks and the job has {world_size}: {}, or start {product} ranks",
        made(.fitting)
    )]
    WorldSize {
        /// Axes of the mesh and their sizes, such as `dp_replicate 2 x dp_shard 4`.
        axes: String,
        /// Product of the sizes of the axes.
        product: usize,
        /// Number of ranks of the job.
        world_size: usize,
        /// Axes whose size alone could be changed to fit the world size, with the sizes that fit.
        fitting: Vec<MeshAxis>,
    },

    /// A parameter that the ranks of a tensor group cannot divide.
    #[error(
        "`{}`: {ranks} tensor ranks do not divide {size} (shape {shape:?}, dimension {dim}): take {}, or other ranks",
        escaped(.name), nearest.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ")
    )]
    Indivisible {
        /// Name of the parameter.
        name: String,
        /// Full shape of the parameter, before sharding.
        shape: Vec<u64>,
        /// Index of the dimension that is divided.
        dim: usize,
        /// Size of the dimension that is divided.
        size: u64,
        /// Number of ranks of the tensor group.
        ranks: usize,
        /// Nearest sizes of the dimension that can be divided.
        nearest: Vec<u64>,
    },

    /// A vocabulary that leaves some ranks of a tensor group without entries.
    #[error(
        "`{}`: a vocabulary of {size} entries leaves some of {ranks} tensor ranks without an entry; use \
         fewer tensor ranks",
        escaped(.name)
    )]
    EmptyPart {
        /// Name of the parameter.
        name: String,
        /// Number of entries of the vocabulary.
        size: u64,
        /// Number of ranks of the tensor group.
        ranks: usize,
    },

    /// Axes whose product overflows the integer type.
    #[error("the mesh {axes} has more ranks than can be counted")]
    TooManyRanks {
        /// Axes of the mesh and their sizes.
        axes: String,
    },

    /// A number of expert ranks that does not divide the ranks over which experts are spread.
    #[error("ep {expert} does not divide dp_shard x cp x sp x tp, which is {inner}: take one of {}", divisors(*.inner))]
    Expert {
        /// Size of the axis of experts, `ep`.
        expert: usize,
        /// Number of ranks within one pipeline stage and one replica.
        inner: usize,
    },

    /// A rank outside of the mesh.
    #[error("rank {rank} is not in a mesh of {world_size} ranks")]
    NoSuchRank {
        /// Rank that is not in the mesh.
        rank: usize,
        /// Number of ranks of the mesh.
        world_size: usize,
    },

    /// A shard size that does not divide the number of ranks.
    #[error("hybrid={shard_size} does not divide the {world_size} ranks: take one of {}", divisors(*.world_size))]
    ShardSize {
        /// Number of ranks that share one copy of the parameters.
        shard_size: usize,
        /// Number of ranks of the job.
        world_size: usize,
    },

    /// A number of parts after the forward pass that the ranks which share one copy cannot have.
    #[error(
        "units cannot be resharded to {size} after forward: write a number that divides the {shard_size} ranks \
         which share one copy, and is neither 1 nor {shard_size}"
    )]
    ReshardTo {
        /// Number of parts of a unit after the forward pass.
        size: usize,
        /// Number of ranks that share one copy of the parameters.
        shard_size: usize,
    },

    /// A mesh whose shard size is not that of the strategy.
    #[error("hybrid={shard_size} needs a mesh with dp_shard {shard_size}, and this one is {mesh}")]
    MeshShard {
        /// Number of ranks that share one copy of the parameters.
        shard_size: usize,
        /// Axes of the mesh and their sizes.
        mesh: String,
    },

    /// A type of mixed precision that is not a float.
    #[error("the type of {what} is {dtype}: it must be F64, F32, F16 or BF16")]
    NotAFloat {
        /// Purpose of the type: `the computation`, `reductions` or `outputs`.
        what: &'static str,
        /// Type that is not a floating-point type.
        dtype: Dtype,
    },

    /// A model without parameters.
    #[error("there are no parameters to shard")]
    NoParameters,

    /// A parameter without a name.
    #[error("a parameter of shape {shape:?} has no name")]
    Nameless {
        /// Shape of the parameter without a name.
        shape: Vec<u64>,
    },

    /// A name that two parameters share.
    #[error("two parameters have the name {}", escaped(.name))]
    DuplicateName {
        /// Name that occurs twice.
        name: String,
    },

    /// A trained parameter that cannot have a gradient.
    #[error(
        "parameter {} is trained and of type {dtype}: freeze it, or convert it to a floating-point type",
        escaped(.name)
    )]
    NotTrainable {
        /// Name of the parameter.
        name: String,
        /// Data type of the parameter.
        dtype: Dtype,
    },

    /// A model whose number of elements is too large to be counted.
    #[error("with parameter {} the model has more elements than can be counted", escaped(.name))]
    TooLarge {
        /// Name of the parameter with which the sum is too large.
        name: String,
    },

    /// A pattern of units that matches nothing.
    #[error(
        "the pattern `{}` of units matches nothing; there are {}",
        escaped(.pattern), first_of(.known)
    )]
    NoMatch {
        /// Pattern that matches nothing.
        pattern: String,
        /// Prefixes of the parameters' names with as many components as the pattern.
        known: Vec<String>,
    },

    /// Two patterns of units that match one parameter.
    #[error(
        "the patterns `{}` and `{}` of units both match {}: make one of them narrower",
        escaped(.first), escaped(.second), escaped(.name)
    )]
    Overlap {
        /// First of the two patterns.
        first: String,
        /// Second of the two patterns.
        second: String,
        /// Name of a parameter that both patterns match.
        name: String,
    },
}

/// Formats the changes of sizes that fit: `make pp 4 or tp 4`.
fn made(axes: &[MeshAxis]) -> String {
    let axes: Vec<_> = axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
    if axes.is_empty() {
        "change two sizes".to_owned()
    } else {
        format!("make {}", axes.join(" or "))
    }
}

/// Lists the divisors of a number of ranks, up to the size of the largest groups: `1, 2, 4, 8`.
fn divisors(world_size: usize) -> String {
    const MOST: usize = 1024;
    let divisors = (1..=world_size.min(MOST)).filter(|size| world_size.is_multiple_of(*size));
    let divisors: Vec<_> = divisors.map(|size| size.to_string()).collect();
    divisors.join(", ") + if world_size > MOST { ", …" } else { "" }
}

/// Lists the first names of a list that may be long.
pub(crate) fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| escaped(name).to_string()).collect();
    shown.join(", ") + if names.len() > SHOWN { ", …" } else { "" }
}
