//! Values of all ranks: gather, reduce, broadcast, pad.

use brigade_data::Batch;
use brigade_sampling::Round;
use brigade_torch::{Error, ProcessGroup, ReduceOp, Result, TensorTree, elements};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::{Device, Tensor};

use crate::error::TrainError;
use crate::processes::Processes;

impl Processes {
    /// Gathers the tensors of all ranks, concatenated along the first dimension: `[n, …]` becomes `[num_processes * n,
    /// …]`, a scalar `[num_processes]`. All ranks' tensors must have the same shape; see
    /// [`Processes::pad_across_processes`].
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn gather<T: TensorTree>(&self, values: &T) -> Result<T::Owned> {
        let group = self.traced();
        if let (Some(group), Some(tensors)) = (&group, together(values)) {
            return in_place_of(values, group.all_gather_flat_coalesced(&tensors)?);
        }
        values.try_map(&mut |tensor| match &group {
            Some(group) => Ok(group.all_gather_flat(tensor)?),
            None if tensor.dim() == 0 => Ok(tensor.f_unsqueeze(0)?),
            None => Ok(tensor.shallow_clone()),
        })
    }

    /// Gathers values computed from a batch as [`Processes::gather`] does, without the duplicates that complete uneven
    /// batches: over an epoch, every sample counts exactly once.
    ///
    /// The batch carries its number of real rows, so nested loops, early breaks and skipped batches are handled
    /// correctly. Each tensor must have one row per sample of the batch.
    ///
    /// # Errors
    /// [`crate::TrainError::Rows`] for a tensor of another length; [`crate::TrainError::UnevenRound`] when some rank
    /// has no batch in this round; [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn gather_for_metrics<B, T: TensorTree>(
        &self,
        batch: &Batch<B>,
        values: &T,
    ) -> Result<T::Owned> {
        let round = batch.round();
        let rows = batch.rows();
        let group = self.traced();
        if let (Some(_), Some(rank)) = (&group, round.rows.iter().position(|&n| n == 0)) {
            return Err(TrainError::UnevenRound { rank }.into());
        }
        values.try_map(&mut |tensor| {
            let shape = tensor.size();
            if shape.first().copied() != Some(rows as i64) {
                return Err(TrainError::Rows { expected: rows, found: shape }.into());
            }
            gather_valid(group.as_ref(), tensor, round)
        })
    }

    /// Gathers objects computed from a batch, one per sample, from all ranks, without those of duplicates.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when there is not one object per sample. Also returns the errors
    /// of [`Processes::gather_for_metrics`].
    #[track_caller]
    pub fn gather_objects_for_metrics<B, T>(
        &self,
        batch: &Batch<B>,
        objects: Vec<T>,
    ) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let round = batch.round();
        if objects.len() != batch.rows() {
            return Err(Error::invalid_argument(format!(
                "gather_objects_for_metrics: expected one object for each of the batch's {} \
                 samples, found {}",
                batch.rows(),
                objects.len()
            )));
        }
        let Some(group) = self.traced() else {
            return Ok(objects.into_iter().take(batch.valid()).collect());
        };
        if let Some(rank) = round.rows.iter().position(|&n| n == 0) {
            return Err(TrainError::UnevenRound { rank }.into());
        }
        let gathered = group.all_gather_object(&objects)?;
        Ok(gathered
            .into_iter()
            .zip(&round.valid)
            .flat_map(|(objects, &valid)| objects.into_iter().take(valid))
            .collect())
    }

    /// Reduces each tensor over all ranks and returns the result on every rank. The arguments are not changed.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone, or for the mean of integers.
    #[track_caller]
    pub fn reduce<T: TensorTree>(&self, values: &T, op: ReduceOp) -> Result<T::Owned> {
        let group = self.traced();
        if let (Some(group), Some(tensors)) = (&group, together(values)) {
            let mut reduced =
                tensors.iter().map(Tensor::f_detach_copy).collect::<Result<Vec<_>, _>>()?;
            group.all_reduce_coalesced(&mut reduced, op)?;
            return in_place_of(values, reduced);
        }
        values.try_map(&mut |tensor| {
            let mut reduced = tensor.f_detach_copy()?;
            if let Some(group) = &group {
                group.all_reduce(&mut reduced, op)?;
            }
            Ok(reduced)
        })
    }

    /// Broadcasts the tensors of rank `from` to every rank. Shapes and types must be the same on all ranks.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone or there is no such rank.
    #[track_caller]
    pub fn broadcast<T: TensorTree>(&self, values: &T, from: usize) -> Result<T::Owned> {
        let group = self.traced();
        values.try_map(&mut |tensor| {
            let mut copy = tensor.f_detach_copy()?;
            if let Some(group) = &group {
                group.broadcast(&mut copy, from)?;
            }
            Ok(copy)
        })
    }

    /// Pads the tensors of all ranks to the same length in one dimension, so that they can be gathered: shorter ones
    /// are filled with `value` at the end, or at the front with `first`.
    ///
    /// A negative dimension counts from the end. A tensor without the dimension is not changed.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn pad_across_processes<T: TensorTree>(
        &self,
        values: &T,
        dim: i64,
        value: f64,
        first: bool,
    ) -> Result<T::Owned> {
        let group = self.traced();
        values.try_map(&mut |tensor| {
            let dims = tensor.dim() as i64;
            let dim = if dim < 0 { dim + dims } else { dim };
            let Some(group) = &group else {
                return Ok(tensor.shallow_clone());
            };
            if !(0..dims).contains(&dim) {
                return Ok(tensor.shallow_clone());
            }
            let mine = Tensor::from_slice(&[tensor.size()[dim as usize]]);
            let lengths = group.all_gather_flat(&mine.f_to_device(group.device())?)?;
            let lengths = lengths.f_to_device(Device::Cpu)?;
            let longest = elements::<i64>(&lengths)?.to_vec().into_iter().max().unwrap_or(0);
            pad_to(tensor, dim, longest, value, first)
        })
    }

    /// Broadcasts the object of rank `from` to every rank.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone or the object cannot be serialized.
    #[track_caller]
    pub fn broadcast_object<T>(&self, object: T, from: usize) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        match self.traced() {
            Some(group) => Ok(group.broadcast_object(Some(&object), from)?),
            None => Ok(object),
        }
    }

    /// Gathers the objects of all ranks on every rank, in the order of ranks.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone or an object cannot be serialized.
    #[track_caller]
    pub fn gather_object<T>(&self, object: T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        match self.traced() {
            Some(group) => Ok(group.all_gather_object(&object)?),
            None => Ok(vec![object]),
        }
    }
}

fn gather_valid(group: Option<&ProcessGroup>, tensor: &Tensor, round: &Round) -> Result<Tensor> {
    let (gathered, ranges) = match group {
        None => (tensor.shallow_clone(), round.valid_ranges()),
        Some(group) if round.is_even() => (group.all_gather_flat(tensor)?, round.valid_ranges()),
        Some(group) => {
            let longest = round.rows.iter().copied().max().unwrap_or(0);
            let padded = pad_to(tensor, 0, longest as i64, 0.0, false)?;
            let even = Round { rows: vec![longest; round.rows.len()], valid: round.valid.clone() };
            (group.all_gather_flat(&padded)?, even.valid_ranges())
        }
    };
    match ranges.as_slice() {
        [all] if all.start == 0 && all.end as i64 == gathered.size()[0] => Ok(gathered),
        [] => Ok(gathered.f_narrow(0, 0, 0)?),
        ranges => {
            let kept = ranges
                .iter()
                .map(|range| gathered.f_narrow(0, range.start as i64, range.len() as i64))
                .collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(Tensor::f_cat(&kept, 0)?)
        }
    }
}

fn pad_to(tensor: &Tensor, dim: i64, length: i64, value: f64, first: bool) -> Result<Tensor> {
    let mut shape = tensor.size();
    let missing = length - shape[dim as usize];
    if missing <= 0 {
        return Ok(tensor.shallow_clone());
    }
    shape[dim as usize] = missing;
    let filling = Tensor::f_full(shape, value, (tensor.f_kind()?, tensor.device()))?;
    let parts = if first { [&filling, tensor] } else { [tensor, &filling] };
    Ok(Tensor::f_cat(&parts, dim)?)
}

/// Returns the tensors of a tree if they can be sent in one operation: several, on one device.
fn together<T: TensorTree>(values: &T) -> Option<Vec<Tensor>> {
    let mut tensors: Vec<Tensor> = Vec::new();
    values.visit(&mut |tensor| tensors.push(tensor.shallow_clone()));
    let device = tensors.first()?.device();
    (tensors.len() > 1 && tensors.iter().all(|it| it.device() == device)).then_some(tensors)
}

/// Returns the tree with its tensors replaced by these, in its own order.
fn in_place_of<T: TensorTree>(values: &T, tensors: Vec<Tensor>) -> Result<T::Owned> {
    let mut tensors = tensors.into_iter();
    values.try_map(&mut |_| {
        tensors.next().ok_or_else(|| {
            Error::invalid_argument(
                "try_map has more tensors than visit: a mistake of the TensorTree",
            )
        })
    })
}
