//! Expert parallelism: each rank of a group has some of the experts.

use brigade_torch::ProcessGroup;

/// Options of expert parallelism: the ranks over which the experts of [`Experts`](crate::Experts) are divided. Passed
/// to [`ModelBuilder::expert_parallel`](crate::ModelBuilder::expert_parallel).
///
/// Each rank has different tokens and a contiguous range of the experts; all other parameters are whole on every rank,
/// or divided by [`TensorParallel`](crate::TensorParallel), whose groups must be whole within this group. Ranks of a
/// tensor group have the same tokens and one loss.
/// In backward, the gradient of an expert is that of the mean loss of all ranks of the group, and the gradients of
/// other parameters are those of this rank's loss. A job that averages gradients must therefore average those of an
/// expert over the ranks that have this expert only, which [`Accelerator`](https://docs.rs/brigade-train) does.
#[derive(Debug, Clone)]
pub struct ExpertParallel {
    /// Process group of the ranks over which experts are divided. `None` for a single rank.
    pub group: Option<ProcessGroup>,
}

impl ExpertParallel {
    /// Returns the number of ranks over which experts are divided.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }
}
