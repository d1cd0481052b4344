//! This rank's rows of a tensor, and who has the others.

use std::sync::Arc;

use brigade_checkpoint::Region;
use brigade_checkpoint::layout::Placement;
use brigade_torch::{ProcessGroup, Result};
use tch::{Device, Tensor};

/// What this rank has of a tensor whose rows are spread over ranks.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// The global shape.
    pub(crate) shape: Vec<u64>,
    /// This rank's place among those that share one copy.
    place: usize,
    /// The rank that writes each place's rows to checkpoints.
    writers: Arc<[usize]>,
    /// For each axis of the mesh.
    pub(crate) placements: Vec<Placement>,
}

impl Part {
    pub(super) fn new(
        shape: Vec<u64>,
        place: usize,
        writers: &Arc<[usize]>,
        placements: Vec<Placement>,
    ) -> Self {
        Self { shape, place, writers: Arc::clone(writers), placements }
    }

    /// Returns this rank's part of a tensor of another shape, whose rows are spread over the same ranks.
    pub(super) fn with_shape(&self, shape: &[i64]) -> Self {
        Self { shape: shape.iter().map(|size| size.unsigned_abs()).collect(), ..self.clone() }
    }

    /// Returns the rows of this rank.
    pub(crate) fn own(&self) -> Region {
        self.of(self.place)
    }

    /// Returns the rows of a place.
    pub(crate) fn of(&self, place: usize) -> Region {
        Region::whole(&self.shape).chunk(0, self.writers.len() as u64, place as u64)
    }

    /// Returns the shape of this rank's rows.
    pub(crate) fn own_shape(&self) -> Vec<u64> {
        self.own().shape
    }

    pub(crate) fn place(&self) -> usize {
        self.place
    }

    pub(crate) fn writers(&self) -> &[usize] {
        &self.writers
    }
}

/// Returns the tensor of which `shard` is this rank's rows, on the group's device. All ranks take part.
pub(crate) fn gather_rows(shard: &Tensor, part: &Part, group: &ProcessGroup) -> Result<Tensor> {
    let shape: Vec<i64> = part.shape.iter().map(|size| size.cast_signed()).collect();
    let mut room = shape.clone();
    room[0] = part.of(0).shape[0].cast_signed();
    let padded = Tensor::f_zeros(&room, (shard.f_kind()?, group.device()))?;
    let own = padded.f_narrow(0, 0, shard.size()[0])?;
    tch::no_grad(|| own.shallow_clone().f_copy_(shard))?;
    let all = group.all_gather_flat(&padded)?;
    let mut rows = shape.clone();
    rows[0] = -1;
    if padded.numel() == 0 {
        return Ok(Tensor::f_empty(&shape, (shard.f_kind()?, Device::Cpu))?);
    }
    Ok(all.f_reshape(&rows)?.f_narrow(0, 0, shape[0])?)
}

/// Returns this rank's rows of a whole tensor.
pub(crate) fn narrow_to(values: &Tensor, part: &Part) -> Result<Tensor> {
    let own = part.own();
    Ok(values.f_narrow(0, own.offset[0].cast_signed(), own.shape[0].cast_signed())?)
}
