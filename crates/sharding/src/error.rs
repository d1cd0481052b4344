//! What can be wrong with a mesh, a strategy or a plan.

use brigade_checkpoint::Dtype;
use brigade_checkpoint::layout::MeshAxis;
use brigade_rank_env::text::escaped;

/// A mesh, a strategy or a plan that cannot be made. All of these are the caller's input; the text says what
/// to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardingError {
    /// A text that is not a strategy.
    #[error(
        "`{}` is not a sharding strategy: write {}zero1, zero2, zero3 or hybrid=N",
        escaped(.text), if *.or_none { "none, " } else { "" }
    )]
    UnknownStrategy {
        /// The text.
        text: String,
        /// Whether `none` could have been written, too.
        or_none: bool,
    },

    /// A text in JSON that is not a strategy with its options.
    #[error("not the options of a sharding strategy in JSON: {}", escaped(.message))]
    Json {
        /// What the parser found.
        message: String,
    },

    /// A variable of the environment with a wrong value.
    #[error("{name}: {source}")]
    Variable {
        /// Its name.
        name: &'static str,
        /// What is wrong with its value.
        source: Box<Self>,
    },

    /// A number of ranks that is 0.
    #[error("the size of {axis} is 0: it must be at least 1")]
    EmptyAxis {
        /// The axis, or the world.
        axis: &'static str,
    },

    /// Axes whose product is not the world size.
    #[error(
        "the mesh {axes} has {product} ranks and the job has {world_size}: {}, or start {product} ranks",
        made(.fitting)
    )]
    WorldSize {
        /// The axes and their sizes: `dp_replicate 2 x dp_shard 4`.
        axes: String,
        /// The product of the sizes.
        product: usize,
        /// Ranks of the job.
        world_size: usize,
        /// The axes whose size alone could be changed, with the sizes that they would have then.
        fitting: Vec<MeshAxis>,
    },

    /// A parameter that the ranks of a tensor group cannot divide.
    #[error(
        "`{}`: {ranks} tensor ranks do not divide {size} (shape {shape:?}, dimension {dim}): take {}, or other ranks",
        escaped(.name), nearest.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ")
    )]
    Indivisible {
        /// The parameter's name.
        name: String,
        /// Its whole shape.
        shape: Vec<u64>,
        /// The dimension that is divided.
        dim: usize,
        /// Its size.
        size: u64,
        /// Ranks of the tensor group.
        ranks: usize,
        /// The nearest sizes that can be divided.
        nearest: Vec<u64>,
    },

    /// A vocabulary of which a rank of a tensor group would have nothing.
    #[error("`{}`: a vocabulary of {size} entries leaves some of {ranks} tensor ranks without one", escaped(.name))]
    EmptyPart {
        /// The parameter's name.
        name: String,
        /// Entries of the vocabulary.
        size: u64,
        /// Ranks of the tensor group.
        ranks: usize,
    },

    /// Axes whose product has no place in a number.
    #[error("the mesh {axes} has more ranks than can be counted")]
    TooManyRanks {
        /// The axes and their sizes.
        axes: String,
    },

    /// A number of expert ranks that does not divide the ranks that experts are spread over.
    #[error("ep {expert} does not divide dp_shard x cp x sp x tp, which is {inner}: take one of {}", divisors(*.inner))]
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

    /// A number of parts after forward that the ranks which share one copy cannot have.
    #[error(
        "units cannot be resharded to {size} after forward: write a number that divides the {shard_size} ranks \
         which share one copy, and is neither 1 nor {shard_size}"
    )]
    ReshardTo {
        /// Parts of a unit after forward.
        size: usize,
        /// Ranks that share one copy.
        shard_size: usize,
    },

    /// A mesh that does not have the strategy's shard size.
    #[error("hybrid={shard_size} needs a mesh with dp_shard {shard_size}, and this one is {mesh}")]
    MeshShard {
        /// Ranks that share one copy.
        shard_size: usize,
        /// The mesh.
        mesh: String,
    },

    /// A type of mixed precision that is not a float.
    #[error("the type of {what} is {dtype}: it must be F64, F32, F16 or BF16")]
    NotAFloat {
        /// What has the type.
        what: &'static str,
        /// The type.
        dtype: Dtype,
    },

    /// A model without parameters.
    #[error("there are no parameters to shard")]
    NoParameters,

    /// A parameter without a name.
    #[error("a parameter of shape {shape:?} has no name")]
    Nameless {
        /// Its shape.
        shape: Vec<u64>,
    },

    /// A name that is there twice.
    #[error("two parameters have the name {}", escaped(.name))]
    DuplicateName {
        /// The name.
        name: String,
    },

    /// A trained parameter that cannot have a gradient.
    #[error("parameter {} is trained and of type {dtype}: freeze it, or make it a float", escaped(.name))]
    NotTrainable {
        /// Its name.
        name: String,
        /// Its type.
        dtype: Dtype,
    },

    /// Parameters with more elements than can be counted.
    #[error("with parameter {} the model has more elements than can be counted", escaped(.name))]
    TooLarge {
        /// The parameter with which the sum is too large.
        name: String,
    },

    /// A pattern of units that matches nothing.
    #[error(
        "the pattern `{}` of units matches nothing; there are {}",
        escaped(.pattern), first_of(.known)
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Names of as many components.
        known: Vec<String>,
    },

    /// Two patterns of units that match one parameter.
    #[error(
        "the patterns `{}` and `{}` of units both match {}: make one of them narrower",
        escaped(.first), escaped(.second), escaped(.name)
    )]
    Overlap {
        /// A pattern.
        first: String,
        /// Another one.
        second: String,
        /// The parameter.
        name: String,
    },
}

/// `make pp 4 or tp 4`
fn made(axes: &[MeshAxis]) -> String {
    let axes: Vec<_> = axes.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
    if axes.is_empty() {
        "change two sizes".to_owned()
    } else {
        format!("make {}", axes.join(" or "))
    }
}

/// `1, 2, 4, 8`: the sizes that a number of ranks allows, up to those of the largest groups.
fn divisors(world_size: usize) -> String {
    const MOST: usize = 1024;
    let divisors = (1..=world_size.min(MOST)).filter(|size| world_size.is_multiple_of(*size));
    let divisors: Vec<_> = divisors.map(|size| size.to_string()).collect();
    divisors.join(", ") + if world_size > MOST { ", …" } else { "" }
}

/// The first names of a list that may be long.
pub(crate) fn first_of(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| escaped(name).to_string()).collect();
    shown.join(", ") + if names.len() > SHOWN { ", …" } else { "" }
}
