//! Expert parallelism: the ranks of a group divide the experts.

use brigade_torch::ProcessGroup;

/// Ranks that divide the experts of [`Experts`](crate::Experts). Passed to
/// [`ModelBuilder::expert_parallel`](crate::ModelBuilder::expert_parallel).
///
/// Each rank has other tokens and a contiguous range of the experts; all other parameters are whole on every rank. In backward
/// an expert's gradient is the mean over the losses of all ranks of the group, and those of other parameters are of this rank's
/// loss. A job that averages gradients over its ranks therefore averages those of an expert over the ranks that have this
/// expert, which [`Accelerator`](https://docs.rs/brigade-train) does.
#[derive(Debug, Clone)]
pub struct ExpertParallel {
    /// Group of the ranks that divide the experts, or `None` for a single rank.
    pub group: Option<ProcessGroup>,
}

impl ExpertParallel {
    /// Returns the number of ranks that have the experts between them.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.group.as_ref().map_or(1, ProcessGroup::size)
    }
}
