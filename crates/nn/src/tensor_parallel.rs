//! Tensor parallelism: the ranks of a group compute layers together, each with a part of the weights.
//!
//! A `TensorPlan` (`crates/sharding/src/tensor_plan.rs`) contains patterns of weights. A `TensorPart` is this rank's
//! part of one of them: a range of each block along one dimension. `ParamPath::divided_parameter` returns a layer's
//! part, whose initial values are a part of the whole parameter's. The model's registry records the part, so that whole
//! tensors can be loaded. `Linear`, `Embedding`, `Conv1D`, attention and the language head
//! (`crates/models/src/transformer/`) compute with parts; the collectives with gradients are in
//! `brigade_torch::regions`.

use std::cell::Cell;

use brigade_checkpoint::{Region, TensorReader};
use brigade_sharding::{TensorPart, TensorPlan, TensorStyle};
use brigade_torch::regions::{
    copy_to_region, gather_from_region, gather_from_sequence_region, reduce_from_region,
    reduce_scatter_to_sequence_region, scatter_to_region,
};
use brigade_torch::{
    Error, ProcessGroup, Result, TensorRead, VocabularyPart, rng_state, set_rng_state,
};
use tch::{Device, Kind, TchError, Tensor};

/// Options of tensor parallelism: the ranks over which layers are divided, and the plan of the weights that are
/// divided. Passed to [`ModelBuilder::tensor_parallel`](crate::ModelBuilder::tensor_parallel).
#[derive(Debug, Clone)]
pub struct TensorParallel {
    /// Process group of the ranks that have a part of each divided layer. `None` for a single rank: nothing is divided
    /// then, but the plan is checked.
    pub group: Option<ProcessGroup>,
    /// Patterns of the weights that the ranks divide.
    pub plan: TensorPlan,
}

impl TensorParallel {
    /// Returns the number of ranks that have a part of each divided layer.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }
}

/// Architectures that have a plan for tensor parallelism.
pub trait TensorParallelPlan {
    /// Returns the plan. Its patterns match wherever the module is in a model.
    fn tensor_plan() -> TensorPlan;
}

/// Division of a parameter over the ranks of a tensor group, as returned by
/// [`ParamPath::divided_parameter`](crate::ParamPath::divided_parameter).
#[derive(Debug, Clone)]
pub struct Divided {
    /// Style of the division, by rows or columns.
    pub style: TensorStyle,
    /// Part of the parameter that this rank has.
    pub part: TensorPart,
    /// Tensor region through which values enter and leave the divided layers.
    pub region: TensorRegion,
}

impl Divided {
    /// Returns this rank's part of the vocabulary, for a parameter that is divided along it.
    #[must_use]
    pub fn vocabulary(&self) -> VocabularyPart {
        let range = self.part.ranges().into_iter().next().unwrap_or_default();
        VocabularyPart {
            start: range.start.cast_signed(),
            size: (range.end - range.start).cast_signed(),
            vocabulary: self.part.shape()[self.part.dim()].cast_signed(),
        }
    }
}

/// The edges of divided layers: the collectives by which values that are equal on all ranks of a tensor group enter
/// layers of which each rank has a part, and by which outputs leave them ([`brigade_torch::regions`]).
///
/// ```
/// use brigade_nn::TensorRegion;
/// use tch::Tensor;
///
/// // Without a tensor group nothing is sent.
/// let region = TensorRegion::default();
/// let input = Tensor::from_slice(&[1f32, 2.0]);
/// assert_eq!(region.leave(&region.enter(&input)?)?, input);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct TensorRegion {
    group: Option<ProcessGroup>,
    has_sequence_regions: bool,
}

thread_local! {
    /// `true` if this thread computes between divided layers, where each rank has a part of the sequence.
    static IN_SEQUENCE_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Sets if a thread computes in a sequence region, until the scope is dropped.
struct SequenceScope(bool);

impl SequenceScope {
    fn enter() -> Self {
        Self(IN_SEQUENCE_REGION.replace(true))
    }
}

impl Drop for SequenceScope {
    fn drop(&mut self) {
        IN_SEQUENCE_REGION.set(self.0);
    }
}

impl TensorRegion {
    /// Returns the region of layers that are divided over the ranks of a group.
    #[must_use]
    pub fn new(group: ProcessGroup) -> Self {
        Self { group: Some(group).filter(|group| group.size() > 1), has_sequence_regions: false }
    }

    /// Returns the region of a model's divided layers.
    pub(crate) fn of(tensor: &TensorParallel) -> Self {
        let has_sequence_regions = tensor.plan.has_sequence_regions();
        let region = tensor.group.clone().map_or_else(Self::default, Self::new);
        Self { has_sequence_regions, ..region }
    }

    /// Returns the ranks of the sequence region, if this thread computes in one.
    fn sequence_group(&self) -> Option<&ProcessGroup> {
        self.group.as_ref().filter(|_| self.has_sequence_regions && IN_SEQUENCE_REGION.get())
    }

    /// Returns `true` if each rank computes a part of the sequence between divided layers (sequence parallelism).
    #[must_use]
    pub fn has_sequence_regions(&self) -> bool {
        self.has_sequence_regions && self.group.is_some()
    }

    /// Runs a sequence of layers whose input and output are hidden states `[.., sequence, hidden size]` that are equal
    /// on all ranks. If the plan has [sequence regions](brigade_sharding::TensorPlan::sequence_regions), `f` gets this
    /// rank's part of the sequence and returns its part: divided layers gather the sequence before their product and
    /// scatter the sum after it, and the other layers of this crate compute only this rank's part, and sum the
    /// gradients of their parameters over the ranks. Without sequence regions it only calls `f`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a sequence length that is not divisible by the number of
    /// ranks. Also returns the errors of `f` and of [`gather_from_region`].
    pub fn over_sequence(
        &self,
        hidden: Tensor,
        f: impl FnOnce(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let Some(group) = self.group.as_ref().filter(|_| self.has_sequence_regions) else {
            return f(hidden);
        };
        let (size, ranks) = (hidden.size(), group.size() as i64);
        let length = size.iter().rev().nth(1).copied().unwrap_or(0);
        if length % ranks != 0 || length == 0 {
            let (less, more) = (length / ranks * ranks, (length / ranks + 1) * ranks);
            let nearest = if less > 0 { format!("{less} or {more}") } else { more.to_string() };
            return Err(Error::invalid_argument(format!(
                "{ranks} tensor ranks do not divide sequences of {length} tokens into sequence regions: pad or cut the texts \
                 to {nearest} tokens, or turn sequence regions off"
            )));
        }
        let part = f(scatter_to_region(group, &hidden, -2)?)?;
        gather_from_region(group, &part, -2)
    }

    /// Runs layers as part of a sequence region. Used by [`TensorRegion::over_sequence`], and if layers are computed
    /// again in backward.
    ///
    /// # Errors
    /// Returns the errors of `f`.
    pub fn in_sequence_region<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _scope = self.has_sequence_regions().then(SequenceScope::enter);
        f()
    }

    /// Runs layers that every rank computes in the same way on the [whole sequence](TensorRegion::whole_sequence),
    /// within a sequence region.
    ///
    /// # Errors
    /// Returns the errors of `f`.
    pub fn outside_sequence_region<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _scope = SequenceScope(IN_SEQUENCE_REGION.replace(false));
        f()
    }

    /// Returns a replicated parameter for use in a layer of a sequence region: its gradient is summed over the ranks,
    /// because they have different tokens. Outside of a sequence region returns the parameter itself.
    ///
    /// # Errors
    /// Returns the errors of [`copy_to_region`].
    pub fn enter_parameter(&self, parameter: &Tensor) -> Result<Tensor> {
        match self.sequence_group() {
            Some(group) => copy_to_region(group, parameter),
            None => Ok(parameter.shallow_clone()),
        }
    }

    /// Returns the whole sequence of a sequence region, for a layer that every rank computes in the same way.
    ///
    /// # Errors
    /// Returns the errors of [`gather_from_region`].
    pub fn whole_sequence(&self, input: &Tensor) -> Result<Tensor> {
        match self.sequence_group() {
            Some(group) => gather_from_region(group, input, -2),
            None => Ok(input.shallow_clone()),
        }
    }

    /// Returns this rank's part of a [whole sequence](TensorRegion::whole_sequence) that is equal on all ranks.
    ///
    /// # Errors
    /// Returns the errors of [`scatter_to_region`].
    pub fn part_of_sequence(&self, whole: &Tensor) -> Result<Tensor> {
        match self.sequence_group() {
            Some(group) => scatter_to_region(group, whole, -2),
            None => Ok(whole.shallow_clone()),
        }
    }

    /// Returns values that are equal on all ranks, and sums their gradients over the ranks in backward.
    ///
    /// # Errors
    /// Returns the errors of [`copy_to_region`].
    pub fn enter_whole(&self, values: &Tensor) -> Result<Tensor> {
        match &self.group {
            Some(group) => copy_to_region(group, values),
            None => Ok(values.shallow_clone()),
        }
    }

    /// Returns the process group over which layers are divided. `None` for a single rank.
    #[must_use]
    pub fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_ref()
    }

    /// Returns an input for divided layers, whose gradient is summed over the ranks. Outside of a sequence region
    /// `input` is equal on all ranks; within one, the parts of all ranks are concatenated along the dimension before
    /// the last.
    ///
    /// # Errors
    /// Returns the errors of [`copy_to_region`] and [`gather_from_sequence_region`].
    pub fn enter(&self, input: &Tensor) -> Result<Tensor> {
        match self.sequence_group() {
            Some(group) => gather_from_sequence_region(group, input, -2),
            None => self.enter_whole(input),
        }
    }

    /// Returns the sum of all ranks' outputs, which is equal on all of them; in a sequence region returns this rank's
    /// part of the sum.
    ///
    /// # Errors
    /// Returns the errors of [`reduce_from_region`] and [`reduce_scatter_to_sequence_region`].
    pub fn leave(&self, output: &Tensor) -> Result<Tensor> {
        if let Some(group) = self.sequence_group() {
            return reduce_scatter_to_sequence_region(group, output, -2);
        }
        match &self.group {
            Some(group) => reduce_from_region(group, output),
            None => Ok(output.shallow_clone()),
        }
    }

    /// Returns the outputs of all ranks, concatenated along the last dimension and equal on all of them, for outputs
    /// that are divided like `part`'s dimension. The sizes of the ranks' outputs may differ by one, as those of a
    /// vocabulary may.
    ///
    /// # Errors
    /// Returns the errors of [`gather_from_region`].
    pub fn gather(&self, output: &Tensor, part: &TensorPart) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(output.shallow_clone()) };
        let sizes = (0..part.ranks()).map(|rank| part.shape_of(rank)[part.dim()].cast_signed());
        let sizes: Vec<i64> = sizes.collect();
        let most = sizes.iter().copied().max().unwrap_or_default();
        if sizes.iter().all(|&size| size == most) {
            return gather_from_region(group, output, -1);
        }
        let own = output.size().last().copied().unwrap_or_default();
        let padded = output.f_constant_pad_nd([0, most - own])?;
        let gathered = gather_from_region(group, &padded, -1)?;
        let places = sizes.iter().enumerate();
        let parts = places.map(|(rank, &size)| gathered.f_narrow(-1, rank as i64 * most, size));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&parts, -1)?)
    }
}

impl TensorRegion {
    /// Gathers a whole parameter on every rank from the parts of all ranks. Every rank has to call it.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] if a peer was lost; [`brigade_torch::ErrorKind::Tensor`] if memory
    /// runs out.
    pub fn whole(&self, own: &Tensor, part: &TensorPart) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(own.detach()) };
        let dim = part.dim() as i64;
        let sizes = (0..part.ranks()).map(|rank| part.shape_of(rank)[part.dim()].cast_signed());
        let most = sizes.max().unwrap_or_default();
        let padded = {
            let mut shape = own.size();
            let length = shape[part.dim()];
            shape[part.dim()] = most;
            let padded = Tensor::f_zeros(&shape, (own.f_kind()?, own.device()))?;
            padded.f_narrow(dim, 0, length)?.f_copy_(&own.f_detach()?)?;
            padded
        };
        let parts = group.all_gather(&padded)?;
        let shape: Vec<i64> = part.shape().iter().map(|size| size.cast_signed()).collect();
        let whole = Tensor::f_empty(shape, (own.f_kind()?, own.device()))?;
        for (rank, theirs) in parts.iter().enumerate() {
            let mut place = 0;
            for range in part.ranges_of(rank) {
                let (start, length) =
                    (range.start.cast_signed(), (range.end - range.start).cast_signed());
                whole
                    .f_narrow(dim, start, length)?
                    .f_copy_(&theirs.f_narrow(dim, place, length)?)?;
                place += length;
            }
        }
        Ok(whole)
    }

    /// Runs `f` with random numbers that differ between ranks and are the same in each run with the same seed, for
    /// dropout of values that are divided over the ranks. Numbers that are drawn outside of `f` stay equal on all
    /// ranks.
    ///
    /// # Errors
    /// Returns the errors of `f`; [`brigade_torch::ErrorKind::Tensor`] for a generator that cannot be set.
    pub fn with_own_random_numbers<T>(
        &self,
        device: Device,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        with_own_random_numbers(self.group.as_ref(), device, f)
    }
}

/// Runs `f` with random numbers that differ from rank to rank of a group.
pub(crate) fn with_own_random_numbers<T>(
    group: Option<&ProcessGroup>,
    device: Device,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let Some(group) = group else { return f() };
    // One number of the shared stream, equal on all ranks, so that each call draws others.
    let number = Tensor::f_randint(i64::MAX, [1], (Kind::Int64, Device::Cpu))?;
    let number = number.f_int64_value(&[0])?;
    let generators: Vec<Device> =
        [Device::Cpu].into_iter().chain(Some(device).filter(|it| *it != Device::Cpu)).collect();
    let before = generators.iter().map(|&device| Ok((device, rng_state(device)?)));
    let before = before.collect::<Result<Vec<_>>>()?;
    let rank = group.rank() as i64;
    tch::manual_seed(number.wrapping_add(rank.wrapping_mul(RANK_STRIDE)));
    let result = f();
    for (device, state) in before {
        set_rng_state(device, &state)?;
    }
    result
}

/// Odd number with bits all over, so that the seeds of ranks are far apart.
const RANK_STRIDE: i64 = 0x5851_f42d_4c95_7f2d;

/// Returns the reads of a tensor of open weights files into this rank's part of a parameter, or into `rows` of that
/// part. There are several reads if the part consists of several blocks. Without a part the whole tensor, or its
/// `rows`, are read.
///
/// # Errors
/// [`brigade_torch::ErrorKind::Tensor`] if libtorch cannot create views of `into`.
pub fn part_reads<'w>(
    from: TensorReader<'w>,
    into: &Tensor,
    rows: Option<Region>,
    part: Option<&TensorPart>,
) -> Result<Vec<TensorRead<'w>>> {
    let Some(part) = part else {
        let mut read = TensorRead::whole(from, into.shallow_clone());
        read.region = rows.unwrap_or(read.region);
        return Ok(vec![read]);
    };
    let rows = rows.unwrap_or_else(|| Region::whole(&part.own_shape()));
    let dim = part.dim();
    let reads = part.sources(&rows).into_iter().map(|(region, place)| {
        let (start, length) = (place.offset[dim].cast_signed(), place.shape[dim].cast_signed());
        let into = tch::no_grad(|| into.f_detach()?.f_narrow(dim as i64, start, length))?;
        Ok(TensorRead { from, region, into })
    });
    reads.collect()
}

/// Returns a copy of a rank's part of the values of a whole parameter.
///
/// ```
/// use brigade_nn::take_part;
/// use brigade_sharding::{TensorPart, TensorStyle};
/// use tch::Tensor;
///
/// let whole = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0]);
/// let part = TensorPart::new("bias", &[4], 0, &TensorStyle::Column, 1, 2)?;
/// assert_eq!(take_part(&whole, &part)?, Tensor::from_slice(&[3f32, 4.0]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::Tensor`] if the values do not have the shape of the whole parameter.
pub fn take_part(values: &Tensor, part: &TensorPart) -> Result<Tensor> {
    Ok(taken(values, part)?)
}

pub(crate) fn taken(values: &Tensor, part: &TensorPart) -> Result<Tensor, TchError> {
    let ranges = part.ranges().into_iter().map(|range| {
        let (start, end) = (range.start.cast_signed(), range.end.cast_signed());
        values.f_narrow(part.dim() as i64, start, end - start)
    });
    // A copy even of a single range, so that the whole values can be freed.
    Tensor::f_cat(&ranges.collect::<Result<Vec<_>, _>>()?, part.dim() as i64)
}
