//! Plan of a sharded model: its units, slots and placements.

use std::collections::HashSet;
use std::fmt;

use brigade_checkpoint::layout::Placement;
use brigade_checkpoint::{Dtype, Region};
use brigade_rank_env::text::{counted, escaped};

use crate::slot::ALIGNMENT;
use crate::unit::{Grouped, group};
use crate::{
    Axis, Mesh, Note, Offload, Parameter, Reshard, Sharding, ShardingError, Slot, Strategy,
};

/// Plan of a sharded model: its division among the ranks of a mesh, and the messages that the ranks send.
///
/// A plan is a function of names, shapes and settings, so that all ranks have the same one; it stores nothing for each
/// rank. [`fingerprint`](Self::fingerprint) and [`difference`](Self::difference) find ranks with a different plan.
///
/// ```
/// use brigade_checkpoint::{Dtype, Region};
/// use brigade_sharding::{Parameter, Sharding, ShardingPlan};
///
/// let parameters = [
///     Parameter::new("embedding.weight", &[100, 8], Dtype::F32),
///     Parameter::new("h.0.weight", &[8, 8], Dtype::F32).in_unit("h.0"),
///     Parameter::new("h.0.bias", &[8], Dtype::F32).in_unit("h.0"),
///     Parameter::new("h.1.weight", &[8, 8], Dtype::F32).in_unit("h.1"),
/// ];
/// let sharding = Sharding::zero3();
/// let plan = ShardingPlan::new(&parameters, &sharding, &sharding.mesh(4)?)?;
/// let units: Vec<_> = plan.units().iter().map(|unit| unit.title()).collect();
/// assert_eq!(units, ["the root", "h.0", "h.1"]);
///
/// let bias = &plan.units()[1].parameters[1];
/// assert_eq!(bias.slot.rows_of(3), 6..8);
/// assert_eq!(bias.slot.offset, 8 * 8 * 4);
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardingPlan {
    sharding: Sharding,
    mesh: Mesh,
    units: Vec<Unit>,
    notes: Vec<Note>,
}

/// Unit of a plan: parameters that are gathered together and lie in one storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// Name of the unit's first module. Empty for the root, which has the parameters of no other unit.
    pub name: String,
    /// Names of the unit's modules. There are several if ties or [`Units::AtLeast`](crate::Units::AtLeast) joined them.
    /// The unit is gathered when any of them runs.
    pub modules: Vec<String>,
    /// Parameters of the unit, in the order of registration, which is also their order in messages.
    pub parameters: Vec<UnitParameter>,
    /// Treatment of the unit's whole parameters after the forward pass. [`Reshard::No`] for the root, which runs around
    /// all others, or without a root for the last unit, which the backward pass needs at once.
    pub reshard: Reshard,
}

/// Parameter of a unit, with its place in the unit's storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitParameter {
    /// Index of the parameter in the list from which the plan was made.
    pub index: usize,
    /// Names, shape and type of the parameter.
    pub parameter: Parameter,
    /// Place in the unit's storage, and division of the rows among the ranks.
    pub slot: Slot,
    /// Data type in which the parameter is gathered and computed.
    pub compute_dtype: Dtype,
    /// Data type in which the gradient is summed.
    pub reduce_dtype: Dtype,
}

impl ShardingPlan {
    /// Creates the plan of a model. `parameters` are in the order of registration, in which units are expected to run.
    ///
    /// # Errors
    /// - [`ShardingError::NoParameters`], [`Nameless`](ShardingError::Nameless),
    ///   [`DuplicateName`](ShardingError::DuplicateName), [`NotTrainable`](ShardingError::NotTrainable) and
    ///   [`TooLarge`](ShardingError::TooLarge) for parameters that cannot be planned, and
    ///   [`NotAFloat`](ShardingError::NotAFloat) for a type of mixed precision that is not a float.
    /// - [`NoMatch`](ShardingError::NoMatch) and [`Overlap`](ShardingError::Overlap) for patterns of units that match
    ///   nothing, or the same parameter.
    /// - [`MeshShard`](ShardingError::MeshShard) for a mesh that does not have the shard size of [`Strategy::Hybrid`],
    ///   and [`ReshardTo`](ShardingError::ReshardTo) for [`Reshard::To`] with a number that is 1 or that of all ranks,
    ///   or does not divide it.
    pub fn new(
        parameters: &[Parameter],
        sharding: &Sharding,
        mesh: &Mesh,
    ) -> Result<Self, ShardingError> {
        check(parameters)?;
        sharding.mixed.check()?;
        let ranks = mesh.size(Axis::ShardContext);
        match (sharding.strategy, sharding.reshard_after_forward) {
            (Strategy::Hybrid(shard_size), _) if shard_size != mesh.size(Axis::Shard) => {
                return Err(ShardingError::MeshShard { shard_size, mesh: mesh.to_string() });
            }
            (Strategy::Zero3 | Strategy::Hybrid(_), Reshard::To(size))
                if size <= 1 || size >= ranks || !ranks.is_multiple_of(size) =>
            {
                return Err(ShardingError::ReshardTo { size, shard_size: ranks });
            }
            _ => {}
        }
        let (grouped, mut notes) = group(parameters, &sharding.units)?;
        let mut elements = 0u64;
        let mut units = Vec::with_capacity(grouped.len());
        for unit in grouped {
            units.push(Unit::new(unit, parameters, sharding, mesh, &mut elements)?);
        }
        let kept = units.iter().position(Unit::is_root).or_else(|| units.len().checked_sub(1));
        if let Some(kept) = kept {
            units[kept].reshard = Reshard::No;
        }
        if let [unit] = &*units
            && !sharding.strategy.keeps_parameters_whole()
        {
            notes.push(Note::OneUnit { bytes: unit.storage_bytes() });
        }
        Ok(Self { sharding: sharding.clone(), mesh: mesh.clone(), units, notes })
    }

    /// Returns the settings from which the plan was made.
    #[must_use]
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Returns the mesh for which the plan was made.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the units in the order in which they are expected to run. The root is the first, if there is one.
    /// Gradients are reduced in the reverse order.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Returns notes for the user: units that ties merged, or a model of one unit.
    #[must_use]
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Returns the parameters of all units, unit by unit.
    pub fn parameters(&self) -> impl Iterator<Item = &UnitParameter> {
        self.units.iter().flat_map(|unit| &unit.parameters)
    }

    /// Returns the unit with the largest storage. `None` for a model without units.
    #[must_use]
    pub fn largest_unit(&self) -> Option<&Unit> {
        self.units.iter().max_by_key(|unit| unit.storage_bytes())
    }

    /// Returns the number of ranks that share one copy of the parameters: those of the axes `dp_shard`, `cp` and `sp`.
    /// For experts of a mixture it is the size of [`UnitParameter::axis`].
    #[must_use]
    pub fn shard_ranks(&self) -> usize {
        self.mesh.size(Axis::ShardContext)
    }

    /// Returns the number by which summed gradients are divided to average them: the number of ranks of `dp_cp`.
    #[must_use]
    pub fn divisor(&self) -> usize {
        self.mesh.size(Axis::DataContext)
    }

    /// Returns the number by which summed gradients of experts are divided to average them: the number of ranks of
    /// `edp`.
    #[must_use]
    pub fn expert_divisor(&self) -> usize {
        self.mesh.size(Axis::ExpertData)
    }

    /// Returns the region of a parameter that a rank holds: of its optimizer state, and of the parameter itself if the
    /// strategy shards parameters.
    ///
    /// # Errors
    /// [`ShardingError::NoSuchRank`] for a rank outside of the mesh.
    pub fn region(&self, parameter: &UnitParameter, rank: usize) -> Result<Region, ShardingError> {
        let place = self.mesh.coordinate(rank, parameter.axis())? as u64;
        let whole = Region::whole(&parameter.parameter.shape);
        if parameter.slot.is_whole {
            return Ok(whole);
        }
        Ok(whole.chunk(parameter.slot.dim, parameter.slot.ranks, place))
    }

    /// Returns the placement of a parameter between steps, along each of [`Mesh::axes`].
    #[must_use]
    pub fn placements(&self, parameter: &UnitParameter) -> Vec<Placement> {
        let is_whole = self.sharding.strategy.keeps_parameters_whole();
        self.placed(is_whole || parameter.slot.is_whole, parameter.slot.dim)
    }

    /// Returns the placement of a parameter's optimizer state, along each of [`Mesh::axes`].
    #[must_use]
    pub fn state_placements(&self, parameter: &UnitParameter) -> Vec<Placement> {
        self.placed(parameter.slot.is_whole, parameter.slot.dim)
    }

    fn placed(&self, is_whole: bool, dim: usize) -> Vec<Placement> {
        let axes = self.mesh.used();
        let placement = |(axis, _)| match axis {
            Axis::Shard | Axis::Context | Axis::Sequence if !is_whole => Placement::Shard(dim),
            _ => Placement::Replicate,
        };
        axes.map(placement).collect()
    }
}

impl UnitParameter {
    /// Returns the axis whose ranks share one copy of the parameter: [`Axis::ExpertShard`] for experts of a mixture,
    /// [`Axis::ShardContext`] for all others.
    #[must_use]
    pub fn axis(&self) -> Axis {
        axis_of(&self.parameter)
    }
}

fn axis_of(parameter: &Parameter) -> Axis {
    if parameter.is_expert { Axis::ExpertShard } else { Axis::ShardContext }
}

/// Returns the dimension along which ranks have rows of a parameter. The experts of a rank are its first dimension, and
/// are often fewer than the ranks: then each rank has rows of every expert.
fn dim_of_rows(parameter: &Parameter, ranks: u64) -> usize {
    match &*parameter.shape {
        [experts, _, ..] if parameter.is_expert && !experts.is_multiple_of(ranks) => 1,
        _ => 0,
    }
}

impl Unit {
    fn new(
        grouped: Grouped,
        parameters: &[Parameter],
        sharding: &Sharding,
        mesh: &Mesh,
        elements: &mut u64,
    ) -> Result<Self, ShardingError> {
        let mut offset = 0u64;
        let mut planned = Vec::with_capacity(grouped.parameters.len());
        for index in grouped.parameters {
            let parameter = &parameters[index];
            let compute_dtype = parameter.compute_dtype(&sharding.mixed);
            let ranks = mesh.size(axis_of(parameter)) as u64;
            let is_whole = parameter.shape.is_empty() || (parameter.is_expert && ranks == 1);
            let dim = dim_of_rows(parameter, ranks);
            let slot = Slot {
                offset,
                rows: parameter.shape.get(dim).copied().unwrap_or(1),
                row_elements: parameter.row_elements(dim)?,
                element_bytes: compute_dtype.bytes(),
                ranks,
                dim,
                is_whole,
                keeps_memory: parameter.is_expert
                    && is_whole
                    && compute_dtype == parameter.dtype
                    && sharding.offload == Offload::None,
            };
            // Checks the number of elements: all later sums of bytes must fit into 64 bits.
            let rows = if slot.is_whole { Some(slot.rows) } else { None };
            let padded = rows.or_else(|| slot.rows.checked_next_multiple_of(ranks));
            let padded = padded.and_then(|rows| rows.checked_mul(slot.row_elements));
            match padded.and_then(|padded| elements.checked_add(padded)) {
                Some(sum) if sum <= MAX_ELEMENTS => *elements = sum,
                _ => return Err(ShardingError::TooLarge { name: parameter.name().to_owned() }),
            }
            offset = (offset + slot.bytes()).next_multiple_of(ALIGNMENT);
            planned.push(UnitParameter {
                index,
                parameter: parameter.clone(),
                slot,
                compute_dtype,
                reduce_dtype: sharding.mixed.reduce_dtype(parameter.dtype),
            });
        }
        Ok(Self {
            name: grouped.modules.first().cloned().unwrap_or_default(),
            modules: grouped.modules,
            parameters: planned,
            reshard: sharding.reshard_after_forward,
        })
    }

    /// Returns `true` for the root, which has the parameters of no other unit.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.name.is_empty()
    }

    /// Returns the name of the unit for messages: `the root` for the root.
    #[must_use]
    pub fn title(&self) -> &str {
        if self.is_root() { "the root" } else { &self.name }
    }

    /// Returns the number of elements of the unit's parameters, without padding.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.parameters.iter().map(|parameter| parameter.slot.elements()).sum()
    }

    /// Returns the bytes of the unit's storage with whole parameters, with padding.
    #[must_use]
    pub fn storage_bytes(&self) -> u64 {
        self.parameters.last().map_or(0, |last| last.slot.offset + last.slot.bytes())
    }

    /// Returns the parameters of the unit that are trained.
    pub(crate) fn trained(&self) -> impl Iterator<Item = &UnitParameter> {
        self.parameters.iter().filter(|parameter| parameter.parameter.trained)
    }
}

impl fmt::Display for ShardingPlan {
    /// Writes `zero3 on dp_shard 4: 3 units, the largest h.0 of 48 parameters`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = counted(self.units.len(), "unit");
        write!(f, "{} on {}: {units}", self.sharding.strategy, self.mesh)?;
        match self.largest_unit() {
            Some(unit) => {
                write!(
                    f,
                    ", the largest {} of {} parameters",
                    escaped(unit.title()),
                    unit.elements()
                )
            }
            None => Ok(()),
        }
    }
}

fn check(parameters: &[Parameter]) -> Result<(), ShardingError> {
    if parameters.is_empty() {
        return Err(ShardingError::NoParameters);
    }
    let mut seen = HashSet::new();
    for parameter in parameters {
        parameter.check()?;
        if let Some(name) = parameter.names.iter().find(|name| !seen.insert(name.as_str())) {
            return Err(ShardingError::DuplicateName { name: name.clone() });
        }
    }
    Ok(())
}

/// Maximum number of elements of all parameters with padding. Bytes of parameters, gradients and states then fit into
/// 64 bits.
const MAX_ELEMENTS: u64 = 1 << 56;
