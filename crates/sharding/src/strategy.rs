//! Sharding strategies and their options, as a user chooses them.

use std::fmt;
use std::str::FromStr;

use brigade_checkpoint::Dtype;
use serde::{Deserialize, Serialize};

use crate::{Mesh, ShardingError};

/// Sharding strategy: the training state that the ranks of a job divide among them.
///
/// | Strategy | Parameters | Gradients | Optimizer's state | DeepSpeed | PyTorch |
/// |---|---|---|---|---|---|
/// | `Zero1` | whole | whole | sharded | stage 1 | `ZeroRedundancyOptimizer` |
/// | `Zero2` | whole | sharded | sharded | stage 2 | |
/// | `Zero3` | sharded | sharded | sharded | stage 3 | FSDP, `FULL_SHARD` |
/// | `Hybrid(n)` | sharded among `n` ranks | as parameters | as parameters | MiCS | `HYBRID_SHARD` |
///
/// The text form is accepted by `--sharding`, `BRIGADE_SHARDING` and `brigade.toml`. [`Sharding::parse_setting`]
/// documents that of a strategy with options.
///
/// ```
/// use brigade_sharding::Strategy;
///
/// assert_eq!("zero3".parse(), Ok(Strategy::Zero3));
/// assert_eq!("hybrid=8".parse(), Ok(Strategy::Hybrid(8)));
/// assert_eq!(Strategy::Hybrid(8).to_string(), "hybrid=8");
/// assert_eq!(Strategy::parse_setting("none"), Ok(None));
/// assert!("zero4".parse::<Strategy>().unwrap_err().to_string().contains("zero1, zero2, zero3"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Strategy {
    /// Shards the optimizer's state. Gradients are reduced once, at the end of an accumulation window.
    Zero1,
    /// Shards gradients and the optimizer's state.
    Zero2,
    /// Shards parameters, gradients and the optimizer's state (FSDP).
    Zero3,
    /// Shards as [`Strategy::Zero3`] within groups of this number of neighbouring ranks, and replicates across these
    /// groups (HSDP).
    Hybrid(usize),
}

impl Strategy {
    /// Parses the text form of a strategy, or `none`, for which it returns `None`.
    ///
    /// # Errors
    /// [`ShardingError::UnknownStrategy`] for a text that is neither `none` nor a strategy.
    pub fn parse_setting(text: &str) -> Result<Option<Self>, ShardingError> {
        match text.parse() {
            Ok(strategy) => Ok(Some(strategy)),
            Err(_) if text == "none" => Ok(None),
            Err(_) => Err(ShardingError::UnknownStrategy { text: text.to_owned(), or_none: true }),
        }
    }

    /// Returns `true` if parameters are whole on each rank between steps.
    #[must_use]
    pub fn keeps_parameters_whole(self) -> bool {
        matches!(self, Self::Zero1 | Self::Zero2)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero1 => f.pad("zero1"),
            Self::Zero2 => f.pad("zero2"),
            Self::Zero3 => f.pad("zero3"),
            Self::Hybrid(shard_size) => f.pad(&format!("hybrid={shard_size}")),
        }
    }
}

impl FromStr for Strategy {
    type Err = ShardingError;

    fn from_str(text: &str) -> Result<Self, ShardingError> {
        let hybrid = || match text.strip_prefix("hybrid=")?.parse() {
            Ok(shard_size) if shard_size > 0 => Some(Self::Hybrid(shard_size)),
            _ => None,
        };
        match text {
            "zero1" => Ok(Self::Zero1),
            "zero2" => Ok(Self::Zero2),
            "zero3" => Ok(Self::Zero3),
            _ => hybrid().ok_or_else(|| ShardingError::UnknownStrategy {
                text: text.to_owned(),
                or_none: false,
            }),
        }
    }
}

impl TryFrom<String> for Strategy {
    type Error = ShardingError;

    fn try_from(text: String) -> Result<Self, ShardingError> {
        text.parse()
    }
}

impl From<Strategy> for String {
    fn from(strategy: Strategy) -> Self {
        strategy.to_string()
    }
}

/// Treatment of a unit's whole parameters between its forward and its backward pass (FSDP2's `reshard_after_forward`).
/// Has no effect if parameters are whole between steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// Frees parameters after the forward pass and gathers them again in the backward pass: least memory.
    #[default]
    Yes,
    /// Keeps parameters until the backward pass is done: one gather less.
    No,
    /// Keeps one of this number of parts, which neighbouring ranks gather in the backward pass (hpZ of ZeRO++).
    To(usize),
}

/// Mixed precision: the data types in which parameters are computed and gradients are summed. Shards, their gradients
/// and the optimizer's state keep the type of the model's parameters.
///
/// ```
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::MixedPrecision;
///
/// let mixed = MixedPrecision::bf16();
/// assert_eq!(mixed.param_dtype(Dtype::F32), Dtype::BF16);
/// assert_eq!(mixed.reduce_dtype(Dtype::F32), Dtype::F32);
/// assert_eq!(MixedPrecision::default().reduce_dtype(Dtype::F64), Dtype::F64);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MixedPrecision {
    /// Type in which parameters are gathered and computed. Defaults to the type of the parameters.
    pub param: Option<Dtype>,
    /// Type in which gradients are sent and summed. Defaults to float32, and to float64 for parameters of
    /// float64.
    pub reduce: Option<Dtype>,
    /// Type to which the outputs of the model are cast. Defaults to the type in which they are computed.
    pub output: Option<Dtype>,
}

impl MixedPrecision {
    /// Returns mixed precision with bfloat16 for the computation and float32 for sums.
    #[must_use]
    pub fn bf16() -> Self {
        Self { param: Some(Dtype::BF16), ..Self::default() }
    }

    /// Returns mixed precision with float16 for the computation and float32 for sums.
    #[must_use]
    pub fn fp16() -> Self {
        Self { param: Some(Dtype::F16), ..Self::default() }
    }

    /// Returns the type in which a parameter of type `own` is gathered. Types that are not floats stay as they are.
    #[must_use]
    pub fn param_dtype(&self, own: Dtype) -> Dtype {
        if is_float(own) { self.param.unwrap_or(own) } else { own }
    }

    /// Returns the type in which gradients of parameters of type `own` are summed.
    #[must_use]
    pub fn reduce_dtype(&self, own: Dtype) -> Dtype {
        self.reduce.unwrap_or(if own == Dtype::F64 { own } else { Dtype::F32 })
    }

    pub(crate) fn check(&self) -> Result<(), ShardingError> {
        let types = [
            ("the computation", self.param),
            ("reductions", self.reduce),
            ("outputs", self.output),
        ];
        match types.into_iter().find(|(_, dtype)| dtype.is_some_and(|it| !is_float(it))) {
            Some((what, Some(dtype))) => Err(ShardingError::NotAFloat { what, dtype }),
            _ => Ok(()),
        }
    }
}

pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Memory in which shards, their gradients and the optimizer's state are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Memory of the device.
    #[default]
    None,
    /// Memory of the host. The optimizer runs on the CPU.
    Cpu {
        /// `true` for page-locked memory, so that copies run beside the computation.
        pin: bool,
    },
}

/// Division of a model into units: parameters that are gathered together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    /// The units that the model defines, such as transformer blocks.
    #[default]
    Blocks,
    /// A unit for each module whose name matches one of these patterns: `h.*` gives `h.0`, `h.1`, and so on. `*` and
    /// `?` match within one component of a name.
    Matching(Vec<String>),
    /// Units of neighbouring blocks, joined until a unit has at least this number of parameters.
    AtLeast(u64),
}

/// Time at which gradients are reduced during accumulation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceGradients {
    /// Reduces in each backward pass, into sharded gradients: little memory.
    #[default]
    EachBatch,
    /// Reduces once, in the last backward pass of the window: fewer messages, but whole gradients in between.
    Window,
}

/// Sharding of a model: the strategy and its options.
///
/// ```
/// use brigade_sharding::{MixedPrecision, Offload, ReduceGradients, Reshard, Sharding, Strategy, Units};
///
/// let sharding = Sharding::zero3()
///     .reshard_after_forward(Reshard::No)
///     .mixed(MixedPrecision::bf16())
///     .offload(Offload::Cpu { pin: true })
///     .units(Units::Matching(vec!["h.*".to_owned()]))
///     .reduce(ReduceGradients::Window);
/// assert_eq!(sharding.strategy, Strategy::Zero3);
/// assert_eq!(Sharding::from(Strategy::Zero1), Sharding::zero1());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sharding {
    /// Strategy: the training state that is sharded.
    pub strategy: Strategy,
    /// Treatment of whole parameters between forward and backward pass. Defaults to [`Reshard::Yes`].
    #[serde(default)]
    pub reshard_after_forward: Reshard,
    /// Data types of the computation and of sums. Defaults to the parameters' own, with sums in float32.
    #[serde(default)]
    pub mixed: MixedPrecision,
    /// Memory in which shards are kept. Defaults to [`Offload::None`].
    #[serde(default)]
    pub offload: Offload,
    /// Division of the model into units. Defaults to [`Units::Blocks`].
    #[serde(default)]
    pub units: Units,
    /// Time at which gradients are reduced. Defaults to [`ReduceGradients::EachBatch`]. [`Strategy::Zero1`] always
    /// reduces once per window.
    #[serde(default)]
    pub reduce: ReduceGradients,
}

impl Sharding {
    /// Returns a sharding with [`Strategy::Zero1`] and default options.
    #[must_use]
    pub fn zero1() -> Self {
        Strategy::Zero1.into()
    }

    /// Returns a sharding with [`Strategy::Zero2`] and default options.
    #[must_use]
    pub fn zero2() -> Self {
        Strategy::Zero2.into()
    }

    /// Returns a sharding with [`Strategy::Zero3`] and default options.
    #[must_use]
    pub fn zero3() -> Self {
        Strategy::Zero3.into()
    }

    /// Returns a sharding with [`Strategy::Hybrid`] and default options: `shard_size` neighbouring ranks share one copy
    /// of the model.
    #[must_use]
    pub fn hybrid(shard_size: usize) -> Self {
        Strategy::Hybrid(shard_size).into()
    }

    /// Sets the treatment of whole parameters between forward and backward pass. Defaults to [`Reshard::Yes`].
    #[must_use]
    pub fn reshard_after_forward(self, reshard_after_forward: Reshard) -> Self {
        Self { reshard_after_forward, ..self }
    }

    /// Sets the data types of the computation and of sums. Defaults to the parameters' own, with sums in float32.
    #[must_use]
    pub fn mixed(self, mixed: MixedPrecision) -> Self {
        Self { mixed, ..self }
    }

    /// Sets the memory in which shards are kept. Defaults to [`Offload::None`].
    #[must_use]
    pub fn offload(self, offload: Offload) -> Self {
        Self { offload, ..self }
    }

    /// Sets the division of the model into units. Defaults to [`Units::Blocks`].
    #[must_use]
    pub fn units(self, units: Units) -> Self {
        Self { units, ..self }
    }

    /// Sets the time at which gradients are reduced during accumulation. Defaults to [`ReduceGradients::EachBatch`].
    #[must_use]
    pub fn reduce(self, reduce: ReduceGradients) -> Self {
        Self { reduce, ..self }
    }

    /// Returns the mesh for the strategy alone: one copy for all ranks, or one for each `shard_size` ranks of
    /// [`Strategy::Hybrid`].
    ///
    /// # Errors
    /// [`ShardingError`] for no ranks, and for a shard size that does not divide `world_size`.
    pub fn mesh(&self, world_size: usize) -> Result<Mesh, ShardingError> {
        let shard_size = match self.strategy {
            Strategy::Hybrid(shard_size) => shard_size,
            _ => world_size,
        };
        if shard_size == 0 || !world_size.is_multiple_of(shard_size) {
            return Err(ShardingError::ShardSize { shard_size, world_size });
        }
        Mesh::builder().replicate(world_size / shard_size).shard(shard_size).build(world_size)
    }
}

impl From<Strategy> for Sharding {
    fn from(strategy: Strategy) -> Self {
        Self {
            strategy,
            reshard_after_forward: Reshard::default(),
            mixed: MixedPrecision::default(),
            offload: Offload::default(),
            units: Units::default(),
            reduce: ReduceGradients::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strategies_keep_their_text() {
        for strategy in [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3, Strategy::Hybrid(4)] {
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
            let json = serde_json::to_value(strategy).unwrap();
            assert_eq!(json, strategy.to_string());
            assert_eq!(serde_json::from_value::<Strategy>(json).unwrap(), strategy);
        }
        for text in
            ["", "zero", "zero4", "ZERO3", "hybrid", "hybrid=", "hybrid=0", "hybrid=-1", "none"]
        {
            assert!(text.parse::<Strategy>().is_err(), "{text}");
        }
        let fault = Strategy::parse_setting("off").unwrap_err().to_string();
        assert_eq!(
            fault,
            "`off` is not a sharding strategy: write none, zero1, zero2, zero3 or hybrid=N"
        );
    }

    #[test]
    fn a_setting_needs_its_strategy_alone() {
        let sharding: Sharding = serde_json::from_str(r#"{"strategy": "zero2"}"#).unwrap();
        assert_eq!(sharding, Sharding::zero2());
        assert!(serde_json::from_str::<Sharding>(r#"{"strategy": "zero2", "stage": 2}"#).is_err());
    }

    #[test]
    fn a_shard_size_divides_the_ranks() {
        let mesh = Sharding::hybrid(2).mesh(6).unwrap();
        assert_eq!(mesh.to_string(), "dp_replicate 3 x dp_shard 2");
        let fault = Sharding::hybrid(4).mesh(6).unwrap_err().to_string();
        assert_eq!(fault, "hybrid=4 does not divide the 6 ranks: take one of 1, 2, 3, 6");
        assert!(Sharding::zero3().mesh(0).is_err());
    }
}
