//! Parts of a tensor that is divided over ranks: that of this rank, and the ranks of the others.

use std::sync::Arc;

use brigade_checkpoint::Region;
use brigade_checkpoint::layout::Placement;
use brigade_nn::{TensorRegion, take_part};
use brigade_sharding::{Axis, Mesh, TensorPart};
use brigade_torch::{ProcessGroup, Result};
use tch::{Device, Tensor};

/// Part of a tensor on this rank: rows, a part along tensor ranks, or rows of a part along tensor ranks.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Shape of the tensor that is sharded by rows: the whole tensor, or a tensor rank's part of it.
    pub(crate) shape: Vec<u64>,
    /// Division of the whole tensor among tensor ranks.
    pub(crate) tensor: Option<TensorPart>,
    rows: Rows,
    writers: Arc<Writers>,
    /// Placements, one for each axis of the mesh.
    pub(crate) placements: Vec<Placement>,
}

/// The rows of a tensor that a rank has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// Dimension along which the tensor is divided.
    pub(crate) dim: usize,
    /// This rank's index among those that share one copy.
    pub(crate) place: usize,
    /// `true` for experts of a mixture, of which other ranks have the other rows.
    pub(crate) is_expert: bool,
}

/// Ranks that have the other parts of tensors, by what they divide.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartRegions {
    pub(crate) layers: TensorRegion,
    pub(crate) experts: TensorRegion,
    /// Ranks that have the other rows of the same experts.
    pub(crate) expert_rows: Option<ProcessGroup>,
}

impl PartRegions {
    /// Returns the ranks that have the other parts of a tensor.
    fn of(&self, part: &TensorPart) -> &TensorRegion {
        // Groups of one size have the same ranks, since experts are divided over whole tensor groups.
        let experts = self.experts.group();
        if experts.is_some_and(|group| group.size() == part.ranks()) {
            &self.experts
        } else {
            &self.layers
        }
    }
}

/// The rank that writes each part to checkpoints: replicas share the work.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Writers {
    /// Number of ranks that share one copy by rows.
    places: usize,
    /// Number of ranks that divide layers.
    tensor_ranks: usize,
    /// Ranks that write the parts of all tensor ranks, for each index.
    ranks: Vec<usize>,
}

impl Writers {
    /// Returns the writers of a mesh of ranks, of which `first` is the first one: 0, or that of a pipeline's stage.
    pub(crate) fn new(mesh: &Mesh, first: usize) -> Result<Arc<Self>> {
        let (places, tensor_ranks) = (mesh.size(Axis::ShardContext), mesh.size(Axis::Tensor));
        let mut holders: Vec<Vec<usize>> = vec![Vec::new(); places * tensor_ranks];
        for rank in 0..mesh.world_size() {
            let place = mesh.coordinate(rank, Axis::ShardContext)?;
            holders[place * tensor_ranks + mesh.coordinate(rank, Axis::Tensor)?].push(first + rank);
        }
        let ranks = holders.iter().enumerate().map(|(slot, ranks)| ranks[slot % ranks.len()]);
        Ok(Arc::new(Self { places, tensor_ranks, ranks: ranks.collect() }))
    }
}

impl Part {
    /// Makes a part. `shape` is the shape of the tensor that is sharded by rows, `placements` are those of the data
    /// axes.
    pub(crate) fn new(
        shape: Vec<u64>,
        tensor: Option<TensorPart>,
        rows: Rows,
        writers: &Arc<Writers>,
        mut placements: Vec<Placement>,
    ) -> Self {
        if writers.tensor_ranks > 1 {
            // The innermost axis.
            placements.push(match &tensor {
                Some(tensor) => Placement::Shard(tensor.dim()),
                None => Placement::Replicate,
            });
        }
        Self { shape, tensor, rows, writers: Arc::clone(writers), placements }
    }

    /// Returns this rank's part of a tensor of another shape, whose rows are spread over the same ranks.
    pub(crate) fn with_shape(&self, shape: &[i64]) -> Self {
        Self { shape: shape.iter().map(|size| size.unsigned_abs()).collect(), ..self.clone() }
    }

    /// Returns the shape of the whole tensor.
    pub(crate) fn whole_shape(&self) -> &[u64] {
        self.tensor.as_ref().map_or(&self.shape, TensorPart::shape)
    }

    /// Returns the rows of this rank.
    pub(crate) fn own(&self) -> Region {
        self.rows_of(&self.shape, self.rows.place)
    }

    /// Returns the rows of the first rank, which has the most.
    pub(crate) fn first(&self) -> Region {
        self.rows_of(&self.shape, 0)
    }

    fn rows_of(&self, shape: &[u64], place: usize) -> Region {
        if shape.is_empty() {
            return Region::whole(shape);
        }
        Region::whole(shape).chunk(self.rows.dim, self.writers.places as u64, place as u64)
    }

    /// Returns the shape of this rank's part.
    pub(crate) fn own_shape(&self) -> Vec<u64> {
        self.own().shape
    }

    /// Returns the boxes of the whole tensor that this rank has, each with its place in this rank's part.
    pub(crate) fn pieces(&self) -> Vec<(Region, Region)> {
        pieces(&self.own(), self.tensor.as_ref())
    }

    /// Returns `true` if the same ranks have and write the parts of both tensors.
    pub(crate) fn is_spread_as(&self, other: &Self) -> bool {
        self.writers == other.writers
    }

    /// Returns the number of parts of all tensors of the same ranks.
    pub(crate) fn slots(&self) -> usize {
        self.writers.ranks.len()
    }

    /// Returns the boxes of the whole tensor in a part, each with its place in that part. A tensor without elements has
    /// one box, without elements as well, in the first part.
    pub(crate) fn pieces_of(&self, slot: usize) -> Vec<(Region, Region)> {
        let (place, rank) = (slot / self.writers.tensor_ranks, slot % self.writers.tensor_ranks);
        let tensor = match &self.tensor {
            Some(tensor) => Some(tensor.of_rank(rank)),
            // The first tensor rank writes tensors that all tensor ranks have.
            None if rank > 0 => return Vec::new(),
            None => None,
        };
        let shape = tensor.as_ref().map_or_else(|| self.shape.clone(), TensorPart::own_shape);
        let rows = self.rows_of(&shape, place);
        if rows.elements() == 0 {
            let is_empty = self.whole_shape().contains(&0);
            let whole = Region::whole(self.whole_shape());
            return if is_empty && slot == 0 { vec![(whole, rows)] } else { Vec::new() };
        }
        pieces(&rows, tensor.as_ref())
    }

    /// Returns the rank that writes a part.
    pub(crate) fn writer(&self, slot: usize) -> Option<usize> {
        self.writers.ranks.get(slot).copied()
    }

    /// Returns the whole tensor, gathered on the groups' device. `own` is this rank's part. All ranks take part.
    pub(crate) fn gather(
        &self,
        own: &Tensor,
        rows: Option<&ProcessGroup>,
        regions: &PartRegions,
    ) -> Result<Tensor> {
        let rows = if self.rows.is_expert { regions.expert_rows.as_ref() } else { rows };
        let part = match rows.filter(|_| self.writers.places > 1) {
            Some(group) => gather_rows(own, self, group)?,
            None => own.f_detach()?,
        };
        match &self.tensor {
            Some(tensor) => {
                let region = regions.of(tensor);
                // The group sends from its device; an offloaded shard is elsewhere.
                let device = region.group().map_or_else(|| part.device(), ProcessGroup::device);
                region.whole(&part.f_to_device(device)?, tensor)
            }
            None => Ok(part),
        }
    }

    /// Returns this rank's part of a whole tensor.
    pub(crate) fn take(&self, whole: &Tensor) -> Result<Tensor> {
        match &self.tensor {
            Some(tensor) => narrow_to(&take_part(whole, tensor)?, self),
            None => narrow_to(whole, self),
        }
    }
}

fn pieces(rows: &Region, tensor: Option<&TensorPart>) -> Vec<(Region, Region)> {
    match tensor {
        Some(tensor) => tensor.sources(rows),
        None => vec![(rows.clone(), Region::whole(&rows.shape))],
    }
}

/// Returns the tensor whose rows the ranks have, gathered on the group's device. `shard` are this rank's rows. All
/// ranks take part.
fn gather_rows(shard: &Tensor, part: &Part, group: &ProcessGroup) -> Result<Tensor> {
    let shape: Vec<i64> = part.shape.iter().map(|size| size.cast_signed()).collect();
    // The dimension of the rows first: the parts of the ranks follow each other in messages.
    let dim = part.rows.dim;
    let shard = shard.f_transpose(0, dim as i64)?;
    let mut rows = shape.clone();
    rows.swap(0, dim);
    let size = rows[0];
    let mut room = rows.clone();
    room[0] = part.first().shape[dim].cast_signed();
    let padded = Tensor::f_zeros(&room, (shard.f_kind()?, group.device()))?;
    let own = padded.f_narrow(0, 0, shard.size()[0])?;
    tch::no_grad(|| own.shallow_clone().f_copy_(&shard))?;
    let all = group.all_gather_flat(&padded)?;
    if padded.numel() == 0 {
        return Ok(Tensor::f_empty(&shape, (shard.f_kind()?, Device::Cpu))?);
    }
    rows[0] = -1;
    let all = all.f_reshape(&rows)?.f_narrow(0, 0, size)?;
    Ok(all.f_transpose(0, dim as i64)?.f_contiguous()?)
}

/// Returns this rank's rows of a whole tensor.
pub(crate) fn narrow_to(values: &Tensor, part: &Part) -> Result<Tensor> {
    let (own, dim) = (part.own(), part.rows.dim);
    let (start, length) = (own.offset[dim].cast_signed(), own.shape[dim].cast_signed());
    Ok(values.f_narrow(dim as i64, start, length)?)
}
