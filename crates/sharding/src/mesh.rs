//! The mesh: the grid in which the ranks of a job are arranged.

use std::fmt;

use brigade_checkpoint::layout::MeshAxis;
use serde::{Deserialize, Serialize};

use crate::ShardingError;

/// Axis of a [`Mesh`], or several of its axes flattened into one.
///
/// The first six are the axes of the grid, from the outermost to the innermost: neighbouring ranks differ in the
/// innermost one. The others are flattened axes or, for experts, another division of the same ranks. The names in
/// messages and manifests are Accelerate's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Stages of a pipeline: `pp`.
    Pipeline,
    /// Copies of the sharded model: `dp_replicate`.
    Replicate,
    /// Shards of the model, each rank with data of its own: `dp_shard`.
    Shard,
    /// Parts of the sequence, with ring or gathered attention: `cp`.
    Context,
    /// Parts of the sequence, exchanged for heads (Ulysses): `sp`.
    Sequence,
    /// Parts of each layer (tensor parallelism): `tp`.
    Tensor,
    /// `Replicate` and `Shard`: ranks that read different samples: `dp`.
    Data,
    /// `Shard`, `Context` and `Sequence`: ranks that share one copy of the parameters: `dp_shard_cp`.
    ShardContext,
    /// `Replicate`, `Shard`, `Context` and `Sequence`: ranks over which losses and gradients are averaged: `dp_cp`.
    DataContext,
    /// Experts, spread over the innermost ranks of `Shard` to `Tensor`: `ep`.
    Expert,
    /// Ranks of `Shard` to `Tensor` with the same experts, which share one copy of them: `efsdp`.
    ExpertShard,
    /// `Replicate` and `ExpertShard`: all ranks of a stage with the same experts: `edp`.
    ExpertData,
}

impl Axis {
    /// The axes of the grid, from the outermost to the innermost.
    pub const GRID: [Self; 6] =
        [Self::Pipeline, Self::Replicate, Self::Shard, Self::Context, Self::Sequence, Self::Tensor];

    /// All axes, in the order in which ranks create their process groups.
    pub const ALL: [Self; 12] = [
        Self::Pipeline,
        Self::Replicate,
        Self::Shard,
        Self::Context,
        Self::Sequence,
        Self::Tensor,
        Self::Data,
        Self::ShardContext,
        Self::DataContext,
        Self::Expert,
        Self::ExpertShard,
        Self::ExpertData,
    ];

    /// Returns the short name of the axis, which is Accelerate's: `dp_shard`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pipeline => "pp",
            Self::Replicate => "dp_replicate",
            Self::Shard => "dp_shard",
            Self::Context => "cp",
            Self::Sequence => "sp",
            Self::Tensor => "tp",
            Self::Data => "dp",
            Self::ShardContext => "dp_shard_cp",
            Self::DataContext => "dp_cp",
            Self::Expert => "ep",
            Self::ExpertShard => "efsdp",
            Self::ExpertData => "edp",
        }
    }

    /// Returns the neighbouring axes of the grid that the axis consists of. `None` for the axes of experts.
    fn grid(self) -> Option<std::ops::Range<usize>> {
        Some(match self {
            Self::Data => 1..3,
            Self::ShardContext => 2..5,
            Self::DataContext => 1..5,
            Self::Expert | Self::ExpertShard | Self::ExpertData => return None,
            single => single as usize..single as usize + 1,
        })
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Arrangement of the ranks of a job: a grid with named axes, in Accelerate's order (`pp`, `dp_replicate`, `dp_shard`,
/// `cp`, `sp`, `tp`).
///
/// ```
/// use brigade_sharding::{Axis, Mesh};
///
/// let mesh = Mesh::builder().replicate(2).shard(4).build(8)?;
/// assert_eq!(mesh.to_string(), "dp_replicate 2 x dp_shard 4");
/// assert_eq!(mesh.group(5, Axis::Shard)?, [4, 5, 6, 7]);
/// assert_eq!(mesh.group(5, Axis::Replicate)?, [1, 5]);
/// assert_eq!(mesh.coordinate(5, Axis::Shard)?, 1);
/// assert_eq!(mesh.size(Axis::Data), 8);
///
/// let error = Mesh::builder().replicate(2).shard(3).build(8).unwrap_err();
/// assert!(error.to_string().starts_with("the mesh dp_replicate 2 x dp_shard 3 has 6 ranks and the job has 8"));
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Sizes of the axes, in the order of [`Axis::GRID`].
    sizes: [usize; 6],
    expert: usize,
}

/// Ranks of a process group, and the axes that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshGroup {
    /// Axes of which this is a group. There are several if other axes have size 1, such as `dp_shard` and `dp`.
    pub axes: Vec<Axis>,
    /// Ranks of the group in ascending order. The index of a rank is its rank in the group.
    pub ranks: Vec<usize>,
}

/// Builder of a [`Mesh`]. The size of each axis defaults to 1.
#[derive(Debug, Clone)]
pub struct MeshBuilder {
    sizes: [usize; 6],
    expert: usize,
}

impl MeshBuilder {
    /// Sets the number of copies of the sharded model.
    #[must_use]
    pub fn replicate(self, size: usize) -> Self {
        self.size(Axis::Replicate, size)
    }

    /// Sets the number of ranks that share one copy of the model.
    #[must_use]
    pub fn shard(self, size: usize) -> Self {
        self.size(Axis::Shard, size)
    }

    /// Sets the number of ranks of a pipeline (pipeline parallelism).
    #[must_use]
    pub fn pipeline(self, size: usize) -> Self {
        self.size(Axis::Pipeline, size)
    }

    /// Sets the number of parts of the sequence under context parallelism.
    #[must_use]
    pub fn context(self, size: usize) -> Self {
        self.size(Axis::Context, size)
    }

    /// Sets the number of parts of the sequence under Ulysses' sequence parallelism.
    #[must_use]
    pub fn sequence(self, size: usize) -> Self {
        self.size(Axis::Sequence, size)
    }

    /// Sets the number of parts of each layer under tensor parallelism.
    #[must_use]
    pub fn tensor(self, size: usize) -> Self {
        self.size(Axis::Tensor, size)
    }

    /// Sets the number of ranks over which experts are spread (expert parallelism). They are the innermost ranks of
    /// `dp_shard`, `cp`, `sp` and `tp`: the number has to divide the product of these sizes, and does not count in the
    /// world size.
    #[must_use]
    pub fn expert(self, size: usize) -> Self {
        Self { expert: size, ..self }
    }

    /// Returns the mesh of a job with `world_size` ranks.
    ///
    /// # Errors
    /// [`ShardingError::EmptyAxis`] for a size of 0, [`ShardingError::WorldSize`] for sizes whose product is not the
    /// world size, [`ShardingError::TooManyRanks`] for a product that overflows, and [`ShardingError::Expert`] for a
    /// number of expert ranks that does not divide the ranks inside of `dp_replicate`.
    pub fn build(self, world_size: usize) -> Result<Mesh, ShardingError> {
        let empty = Axis::GRID.into_iter().find(|axis| self.sizes[*axis as usize] == 0);
        let empty = empty.or_else(|| (self.expert == 0).then_some(Axis::Expert));
        if let Some(axis) = empty {
            return Err(ShardingError::EmptyAxis { axis: axis.name() });
        }
        let mesh = Mesh { sizes: self.sizes, expert: self.expert };
        let Some(product) =
            self.sizes.iter().try_fold(1, |all: usize, size| all.checked_mul(*size))
        else {
            return Err(ShardingError::TooManyRanks { axes: mesh.to_string() });
        };
        if product != world_size {
            let fitting = mesh.fitting(product, world_size);
            return Err(ShardingError::WorldSize {
                axes: mesh.to_string(),
                product,
                world_size,
                fitting,
            });
        }
        if !mesh.inner().is_multiple_of(self.expert) {
            return Err(ShardingError::Expert { expert: self.expert, inner: mesh.inner() });
        }
        Ok(mesh)
    }

    fn size(mut self, axis: Axis, size: usize) -> Self {
        self.sizes[axis as usize] = size;
        self
    }
}

impl Mesh {
    /// Returns the builder of a mesh, with size 1 for all axes.
    #[must_use]
    pub fn builder() -> MeshBuilder {
        MeshBuilder { sizes: [1; 6], expert: 1 }
    }

    /// Returns the world size: the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Returns the number of ranks along an axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> usize {
        self.pattern(axis).size
    }

    /// Returns the coordinate of a rank along an axis, which is its rank in the group of that axis.
    ///
    /// # Errors
    /// [`ShardingError::NoSuchRank`] for a rank outside of the mesh.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> Result<usize, ShardingError> {
        self.check(rank)?;
        let pattern = self.pattern(axis);
        Ok(rank / pattern.stride % pattern.size)
    }

    /// Returns the group of a rank along an axis, in ascending order: the ranks that differ from `rank` in this axis
    /// alone, and `rank` itself.
    ///
    /// # Errors
    /// [`ShardingError::NoSuchRank`] for a rank outside of the mesh.
    pub fn group(&self, rank: usize, axis: Axis) -> Result<Vec<usize>, ShardingError> {
        let place = self.coordinate(rank, axis)?;
        let pattern = self.pattern(axis);
        Ok(pattern.ranks(rank - place * pattern.stride))
    }

    /// Returns all groups of an axis, ordered by their first rank. Each rank is in exactly one of them.
    #[must_use]
    pub fn groups(&self, axis: Axis) -> Vec<Vec<usize>> {
        let pattern = self.pattern(axis);
        let firsts = (0..self.world_size())
            .filter(|rank| (rank / pattern.stride).is_multiple_of(pattern.size));
        firsts.map(|first| pattern.ranks(first)).collect()
    }

    /// Returns the groups of an axis, divided into parts of `size` neighbouring members each. [`Reshard::To`] gathers
    /// within these parts.
    ///
    /// [`Reshard::To`]: crate::Reshard::To
    ///
    /// # Errors
    /// [`ShardingError::ReshardTo`] for a size that does not divide that of the axis.
    pub fn parts(&self, axis: Axis, size: usize) -> Result<Vec<Vec<usize>>, ShardingError> {
        let whole = self.size(axis);
        if size == 0 || !whole.is_multiple_of(size) {
            return Err(ShardingError::ReshardTo { size, shard_size: whole });
        }
        let groups = self.groups(axis);
        Ok(groups.iter().flat_map(|group| group.chunks(size)).map(<[usize]>::to_vec).collect())
    }

    /// Returns all distinct groups of more than one rank. Each rank has to create the process groups in this order,
    /// also those that it is not in: otherwise ranks wait for each other without end.
    ///
    /// ```
    /// use brigade_sharding::Mesh;
    ///
    /// let mesh = Mesh::builder().replicate(2).shard(2).build(4)?;
    /// let groups: Vec<_> = mesh.process_groups().into_iter().map(|group| group.ranks).collect();
    /// assert_eq!(groups, [vec![0, 2], vec![1, 3], vec![0, 1], vec![2, 3], vec![0, 1, 2, 3]]);
    /// # Ok::<(), brigade_sharding::ShardingError>(())
    /// ```
    #[must_use]
    pub fn process_groups(&self) -> Vec<MeshGroup> {
        // Axes with the same stride and size have the same groups.
        let mut shapes: Vec<(Pattern, Vec<Axis>)> = Vec::new();
        for axis in Axis::ALL {
            // Without expert parallelism all ranks have the same experts, and nothing is reduced over this axis.
            if axis == Axis::ExpertData && self.expert == 1 {
                continue;
            }
            let pattern = self.pattern(axis);
            match shapes.iter_mut().find(|(known, _)| *known == pattern) {
                Some((_, axes)) => axes.push(axis),
                None if pattern.size > 1 => shapes.push((pattern, vec![axis])),
                None => {}
            }
        }
        let groups = shapes.into_iter().flat_map(|(_, axes)| {
            let groups = self.groups(axes[0]).into_iter();
            groups.map(move |ranks| MeshGroup { axes: axes.clone(), ranks })
        });
        groups.collect()
    }

    /// Returns the first axis of [`Axis::ALL`] that has the same groups as this one: `dp_shard` for `dp_shard_cp` if
    /// nothing is divided along `cp`.
    #[must_use]
    pub fn first_axis(&self, axis: Axis) -> Axis {
        let same = |other: &Axis| self.pattern(*other) == self.pattern(axis);
        Axis::ALL.into_iter().find(same).unwrap_or(axis)
    }

    /// Returns the axes of the grid with more than one rank, from the outermost to the innermost, as a checkpoint's
    /// manifest has them.
    #[must_use]
    pub fn axes(&self) -> Vec<MeshAxis> {
        self.used().map(|(axis, size)| MeshAxis { name: axis.name().to_owned(), size }).collect()
    }

    /// Returns the axes of the grid with more than one rank, with their sizes.
    pub(crate) fn used(&self) -> impl Iterator<Item = (Axis, usize)> {
        Axis::GRID.into_iter().zip(self.sizes).filter(|(_, size)| *size > 1)
    }

    /// Returns the size of each used axis, and of `dp_shard`, with which the mesh would have `world_size` ranks.
    fn fitting(&self, product: usize, world_size: usize) -> Vec<MeshAxis> {
        let fitting = |(axis, size): (Axis, usize)| {
            let size = world_size.checked_mul(size)?;
            let fits = size > 0 && size.is_multiple_of(product);
            fits.then(|| MeshAxis { name: axis.name().to_owned(), size: size / product })
        };
        let axes = Axis::GRID.into_iter().zip(self.sizes);
        axes.filter(|(axis, size)| *size > 1 || *axis == Axis::Shard).filter_map(fitting).collect()
    }

    /// Returns the number of ranks within one pipeline stage and one replica, over which experts are spread.
    fn inner(&self) -> usize {
        self.sizes[2..].iter().product()
    }

    fn pattern(&self, axis: Axis) -> Pattern {
        match axis.grid() {
            Some(grid) => Pattern {
                stride: self.sizes[grid.end..].iter().product(),
                size: self.sizes[grid].iter().product(),
            },
            None if axis == Axis::Expert => Pattern { stride: 1, size: self.expert },
            None => {
                let copies = if axis == Axis::ExpertData { self.size(Axis::Replicate) } else { 1 };
                Pattern { stride: self.expert, size: copies * self.inner() / self.expert }
            }
        }
    }

    fn check(&self, rank: usize) -> Result<(), ShardingError> {
        let world_size = self.world_size();
        if rank < world_size { Ok(()) } else { Err(ShardingError::NoSuchRank { rank, world_size }) }
    }
}

impl fmt::Display for Mesh {
    /// Writes the axes with more than one rank: `dp_replicate 2 x dp_shard 4`. A mesh of one rank is `dp_shard 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text: Vec<String> =
            self.used().map(|(axis, size)| format!("{axis} {size}")).collect();
        if text.is_empty() {
            text.push("dp_shard 1".to_owned());
        }
        let experts = if self.expert > 1 { format!(", ep {}", self.expert) } else { String::new() };
        f.pad(&(text.join(" x ") + &experts))
    }
}

/// Ranks at equal distances from each other: the pattern of an axis's groups.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Pattern {
    stride: usize,
    size: usize,
}

impl Pattern {
    fn ranks(self, first: usize) -> Vec<usize> {
        (0..self.size).map(|place| first + place * self.stride).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_accelerates() {
        let mesh = Mesh::builder()
            .pipeline(2)
            .replicate(2)
            .shard(2)
            .context(2)
            .tensor(2)
            .build(32)
            .unwrap();
        assert_eq!(mesh.to_string(), "pp 2 x dp_replicate 2 x dp_shard 2 x cp 2 x tp 2");
        assert_eq!(mesh.group(0, Axis::Tensor).unwrap(), [0, 1]);
        assert_eq!(mesh.group(0, Axis::Context).unwrap(), [0, 2]);
        assert_eq!(mesh.group(0, Axis::Shard).unwrap(), [0, 4]);
        assert_eq!(mesh.group(0, Axis::Replicate).unwrap(), [0, 8]);
        assert_eq!(mesh.group(0, Axis::Pipeline).unwrap(), [0, 16]);
        assert_eq!(mesh.group(1, Axis::ShardContext).unwrap(), [1, 3, 5, 7]);
        assert_eq!(mesh.group(0, Axis::Data).unwrap(), [0, 4, 8, 12]);
        assert_eq!(mesh.size(Axis::DataContext), 8);
        let names: Vec<_> = mesh.axes().into_iter().map(|axis| axis.name).collect();
        assert_eq!(names, ["pp", "dp_replicate", "dp_shard", "cp", "tp"]);
    }

    #[test]
    fn experts_are_spread_over_the_inner_ranks() {
        let mesh = Mesh::builder().replicate(2).shard(2).tensor(2).expert(2).build(8).unwrap();
        assert_eq!(mesh.groups(Axis::Expert), [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert_eq!(mesh.groups(Axis::ExpertShard), [[0, 2], [1, 3], [4, 6], [5, 7]]);
        let fault = Mesh::builder().replicate(2).shard(4).expert(3).build(8).unwrap_err();
        assert_eq!(
            fault.to_string(),
            "ep 3 does not divide dp_shard x cp x sp x tp, which is 4: take one of 1, 2, 4"
        );
    }

    #[test]
    fn parts_are_neighbours_within_a_group() {
        let mesh = Mesh::builder().shard(4).tensor(2).build(8).unwrap();
        let parts = mesh.parts(Axis::Shard, 2).unwrap();
        assert_eq!(parts, [[0, 2], [4, 6], [1, 3], [5, 7]]);
        assert!(mesh.parts(Axis::Shard, 3).is_err());
    }

    #[test]
    fn groups_of_axes_that_are_the_same_ranks_are_made_once() {
        let mesh = Mesh::builder().shard(4).build(4).unwrap();
        let groups = mesh.process_groups();
        assert_eq!(groups.len(), 1);
        assert!(groups[0].axes.starts_with(&[Axis::Shard, Axis::Data, Axis::ShardContext]));
        assert_eq!(mesh.first_axis(Axis::DataContext), Axis::Shard);
        assert!(Mesh::builder().build(1).unwrap().process_groups().is_empty());
    }

    #[test]
    fn contradictions_are_named() {
        let fault = |builder: MeshBuilder, world| builder.build(world).unwrap_err().to_string();
        assert_eq!(
            fault(Mesh::builder().shard(0), 1),
            "the size of dp_shard is 0: it must be at least 1"
        );
        assert_eq!(
            fault(Mesh::builder().shard(3).tensor(2), 8),
            "the mesh dp_shard 3 x tp 2 has 6 ranks and the job has 8: make dp_shard 4, or start 6 ranks"
        );
        assert!(
            fault(Mesh::builder().tensor(2).pipeline(2), 8)
                .ends_with("job has 8: make pp 4 or dp_shard 2 or tp 4, or start 4 ranks")
        );
        assert!(
            fault(Mesh::builder(), 8).ends_with("job has 8: make dp_shard 8, or start 1 ranks")
        );
        assert!(
            fault(Mesh::builder().shard(3).tensor(3), 8)
                .ends_with("job has 8: change two sizes, or start 9 ranks")
        );
        assert!(
            fault(Mesh::builder().shard(usize::MAX).tensor(2), 8).contains("than can be counted")
        );
        let mesh = Mesh::builder().shard(2).build(2).unwrap();
        let fault = mesh.group(2, Axis::Shard).unwrap_err().to_string();
        assert_eq!(fault, "rank 2 is not in a mesh of 2 ranks");
    }
}
