//! This rank's rows of a tensor, and who has the others.

use std::sync::Arc;

use brigade_checkpoint::Region;
use brigade_checkpoint::layout::Placement;

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
