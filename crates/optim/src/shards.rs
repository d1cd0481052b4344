//! Parameters whose rows are distributed over ranks, and sums over the ranks.

use std::collections::HashMap;
use std::ops::Range;

use brigade_torch::{Error, ProcessGroup, ReduceOp, Result, TensorId};
use tch::{Kind, Tensor};

/// Distribution of parameters' rows over the ranks of a group: `ceil(rows / ranks)` for each rank; the last ranks may
/// have fewer or none.
#[derive(Debug)]
pub struct Shards {
    group: ProcessGroup,
    /// Shapes of the whole parameters, by the identities of this rank's shards. An identity is unique as long as there
    /// is a handle of the tensor.
    shapes: HashMap<TensorId, (Tensor, Vec<i64>)>,
}

impl Shards {
    pub(crate) fn new(group: &ProcessGroup) -> Self {
        Self { group: group.clone(), shapes: HashMap::new() }
    }

    pub(crate) fn add(&mut self, shard: &Tensor, shape: Vec<i64>) {
        self.shapes.insert(TensorId::of(shard), (shard.shallow_clone(), shape));
    }

    /// Returns the process group of the ranks that share one copy of the parameters.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the shape of the whole parameter of which `shard` contains this rank's rows. `None` for a parameter that
    /// is whole on every rank.
    #[must_use]
    pub fn whole_shape(&self, shard: &Tensor) -> Option<&[i64]> {
        self.shapes.get(&TensorId::of(shard)).map(|(_, shape)| shape.as_slice())
    }

    /// Returns the range of a parameter's rows that a rank of the group has.
    #[must_use]
    pub fn rows_of(&self, rank: usize, rows: i64) -> Range<i64> {
        let ranks = self.group.size() as i64;
        let share = (rows + ranks - 1) / ranks;
        let first = (rank as i64 * share).min(rows);
        first..(first + share).min(rows)
    }

    /// Begins a list of sums over the ranks.
    #[must_use]
    pub fn sums(&self) -> RankSums<'_> {
        RankSums { shards: self, values: Vec::new() }
    }
}

/// A list of values that are summed over the ranks in one message. Created by [`Shards::sums`].
#[derive(Debug)]
pub struct RankSums<'a> {
    shards: &'a Shards,
    /// `true` if each is this rank's part of a sum.
    values: Vec<(bool, Tensor)>,
}

impl RankSums<'_> {
    /// Adds this rank's part of a sum over the rows of a parameter, of the same shape on each rank. For a parameter
    /// that is whole on every rank, `value` is already the sum.
    pub fn add(&mut self, shard: &Tensor, value: Tensor) {
        self.values.push((self.shards.whole_shape(shard).is_some(), value));
    }

    /// Adds a value for each of these parameters.
    pub(crate) fn add_all(&mut self, shards: &[&Tensor], values: Vec<Tensor>) {
        shards.iter().zip(values).for_each(|(shard, value)| self.add(shard, value));
    }

    /// Computes the sums over the ranks, in the order in which they were added. All ranks take part and get the same
    /// bits.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] if a peer was lost; [`brigade_torch::ErrorKind::Tensor`] if memory
    /// runs out.
    pub fn reduce(self) -> Result<ReducedSums> {
        let Self { shards, values } = self;
        let flat = values.iter().filter(|(spread, _)| *spread);
        let flat = flat.map(|(_, value)| Ok(value.f_to_kind(Kind::Double)?.f_reshape([-1])?));
        let flat = flat.collect::<Result<Vec<_>>>()?;
        let mut sums = Vec::new().into_iter();
        if !flat.is_empty() {
            let sizes: Vec<i64> = flat.iter().map(|value| value.numel() as i64).collect();
            let parts = Tensor::f_cat(&flat, 0)?;
            // Offloaded shards are in the host's memory, which the group's messages may not use.
            let mut sum = parts.f_to_device(shards.group.device())?;
            shards.group.all_reduce(&mut sum, ReduceOp::Sum)?;
            let sum = sum.f_to_device(parts.device())?;
            sums = sum.f_split_with_sizes(&sizes, 0)?.into_iter();
        }
        let all = values.into_iter().map(|(spread, value)| {
            let sum = if spread { sums.next() } else { None };
            Ok(match sum {
                Some(sum) => sum.f_reshape(value.size())?,
                None => value.f_to_kind(Kind::Double)?,
            })
        });
        let all: Vec<Tensor> = all.collect::<Result<_>>()?;
        Ok(ReducedSums(all.into_iter()))
    }
}

/// Sums over the ranks, as returned by [`RankSums::reduce`].
#[derive(Debug)]
pub struct ReducedSums(std::vec::IntoIter<Tensor>);

impl ReducedSums {
    /// Returns the next sum, in double precision.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if there are no more sums.
    #[expect(clippy::should_implement_trait, reason = "a missing sum is an error")]
    pub fn next(&mut self) -> Result<Tensor> {
        let missing = || Error::invalid_argument("a rule reads more sums than it has added");
        self.0.next().ok_or_else(missing)
    }

    /// Returns the next sums.
    pub(crate) fn take(&mut self, count: usize) -> Result<Vec<Tensor>> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// Converts a tensor to the type in which a step is computed: float32 or wider.
pub(crate) fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(match tensor.f_kind()? {
        Kind::Half | Kind::BFloat16 => tensor.f_to_kind(Kind::Float)?,
        _ => tensor.shallow_clone(),
    })
}

/// Returns the slots of a parameter of this size whose rows are divided as the parameter's, with their whole shapes.
pub(crate) fn spread_slots(
    names: &[&'static str],
    shape: impl Fn(usize, &[i64]) -> Option<Vec<i64>>,
    size: &[i64],
) -> Vec<(&'static str, Vec<i64>)> {
    // A rank without rows of the parameter has no rows of such a slot.
    let mut empty = size.to_vec();
    if let Some(rows) = empty.first_mut() {
        *rows = 0;
    }
    let slots = names.iter().enumerate().filter_map(|(slot, &name)| {
        let is_spread = shape(slot, &empty)?.first() == Some(&0);
        is_spread.then(|| shape(slot, size)).flatten().map(|shape| (name, shape))
    });
    slots.collect()
}
