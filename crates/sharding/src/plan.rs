//! The plan of a sharded model: units, slots, placements.

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

/// How a model is divided among the ranks of a mesh, and which messages they send for it.
///
/// It is a function of names, shapes and settings, so that all ranks have the same one; nothing in it is stored for
/// each rank. [`fingerprint`](Self::fingerprint) and [`difference`](Self::difference) find ranks that do not.
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

/// Parameters that are gathered together, in one storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The name of its first module; empty for the root, which has what no other unit has.
    pub name: String,
    /// The names of its modules: several where ties or [`Units::AtLeast`](crate::Units::AtLeast) joined them. The
    /// unit is gathered where any of them runs.
    pub modules: Vec<String>,
    /// Its parameters, in the order of registration, which is that of messages of lists.
    pub parameters: Vec<UnitParameter>,
    /// What becomes of its whole parameters after forward. [`Reshard::No`] for the root, which runs around all
    /// others, or for the last unit where there is no root: backward needs it at once.
    pub reshard: Reshard,
}

/// A parameter of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitParameter {
    /// Its place in the list that the plan was made of.
    pub index: usize,
    /// What the list has of it.
    pub parameter: Parameter,
    /// Its place in the unit's storage, and which rows are whose.
    pub slot: Slot,
    /// The type in which it is gathered and computed.
    pub compute_dtype: Dtype,
    /// The type in which its gradient is summed.
    pub reduce_dtype: Dtype,
}

impl ShardingPlan {
    /// Plans a model whose parameters are in the order of registration, in which units run.
    ///
    /// # Errors
    /// No parameters, a parameter without a name, two of one name, integers that are trained or computed in,
    /// sizes that cannot be counted; patterns of units that match nothing or overlap; a mesh that does not have
    /// the shard size of [`Strategy::Hybrid`]; [`Reshard::To`] with a number that is 1, that of all ranks, or does
    /// not divide it.
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
            units.push(Unit::new(unit, parameters, sharding, ranks as u64, &mut elements)?);
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

    /// Returns the settings that it was made of.
    #[must_use]
    pub fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    /// Returns the mesh that it was made for.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the units in the order in which they are expected to run; the root, if there is one, is the first.
    /// Gradients are reduced in the reverse order.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Returns what a user should know: units that ties merged, a model of one unit.
    #[must_use]
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Returns all parameters, by units.
    pub fn parameters(&self) -> impl Iterator<Item = &UnitParameter> {
        self.units.iter().flat_map(|unit| &unit.parameters)
    }

    /// Returns the unit with the largest storage; `None` for a model without units.
    #[must_use]
    pub fn largest_unit(&self) -> Option<&Unit> {
        self.units.iter().max_by_key(|unit| unit.storage_bytes())
    }

    /// Returns the number of ranks that share one copy of the parameters: the axes `dp_shard` and `cp`.
    #[must_use]
    pub fn shard_ranks(&self) -> usize {
        self.mesh.size(Axis::ShardContext)
    }

    /// Returns the number by which summed gradients are divided: the ranks of `dp_cp`.
    #[must_use]
    pub fn divisor(&self) -> usize {
        self.mesh.size(Axis::DataContext)
    }

    /// Returns the number by which summed gradients of experts are divided: the ranks of `edp`.
    #[must_use]
    pub fn expert_divisor(&self) -> usize {
        self.mesh.size(Axis::ExpertData)
    }

    /// Returns what a rank has of a parameter's optimizer state, and of the parameter where the strategy shards it.
    ///
    /// # Errors
    /// A rank outside of the mesh.
    pub fn region(&self, parameter: &UnitParameter, rank: usize) -> Result<Region, ShardingError> {
        let place = self.mesh.coordinate(rank, Axis::ShardContext)? as u64;
        let whole = Region::whole(&parameter.parameter.shape);
        if parameter.slot.is_whole {
            return Ok(whole);
        }
        Ok(whole.chunk(0, self.shard_ranks() as u64, place))
    }

    /// Returns how the ranks hold a parameter between steps, for each of [`Mesh::axes`].
    #[must_use]
    pub fn placements(&self, parameter: &UnitParameter) -> Vec<Placement> {
        let is_whole = self.sharding.strategy.keeps_parameters_whole();
        self.placed(is_whole || parameter.slot.is_whole)
    }

    /// Returns how the ranks hold the optimizer's state of a parameter, for each of [`Mesh::axes`].
    #[must_use]
    pub fn state_placements(&self, parameter: &UnitParameter) -> Vec<Placement> {
        self.placed(parameter.slot.is_whole)
    }

    fn placed(&self, is_whole: bool) -> Vec<Placement> {
        let axes = self.mesh.used();
        let placement = |(axis, _)| match axis {
            Axis::Shard | Axis::Context if !is_whole => Placement::Shard(0),
            _ => Placement::Replicate,
        };
        axes.map(placement).collect()
    }
}

impl Unit {
    fn new(
        grouped: Grouped,
        parameters: &[Parameter],
        sharding: &Sharding,
        ranks: u64,
        elements: &mut u64,
    ) -> Result<Self, ShardingError> {
        let mut offset = 0u64;
        let mut planned = Vec::with_capacity(grouped.parameters.len());
        for index in grouped.parameters {
            let parameter = &parameters[index];
            let compute_dtype = parameter.compute_dtype(&sharding.mixed);
            let slot = Slot {
                offset,
                rows: parameter.shape.first().copied().unwrap_or(1),
                row_elements: parameter.row_elements()?,
                element_bytes: compute_dtype.bytes(),
                ranks,
                is_whole: parameter.shape.is_empty() || parameter.is_expert,
                keeps_memory: parameter.is_expert
                    && compute_dtype == parameter.dtype
                    && sharding.offload == Offload::None,
            };
            // Keeps all later sums of bytes within 64 bits.
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

    /// Returns whether it has what no other unit has.
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.name.is_empty()
    }

    /// Returns its name for a reader: `the root` for the one without a name.
    #[must_use]
    pub fn title(&self) -> &str {
        if self.is_root() { "the root" } else { &self.name }
    }

    /// Returns the number of its parameters' elements, without padding.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.parameters.iter().map(|parameter| parameter.slot.elements()).sum()
    }

    /// Returns the bytes of the storage with all of its parameters whole, with padding.
    #[must_use]
    pub fn storage_bytes(&self) -> u64 {
        self.parameters.last().map_or(0, |last| last.slot.offset + last.slot.bytes())
    }

    /// Its parameters that are trained.
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

/// Elements of all parameters with their padding. Their bytes, gradients and states have a place in 64 bits.
const MAX_ELEMENTS: u64 = 1 << 56;
