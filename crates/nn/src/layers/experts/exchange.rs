//! Exchange of tokens with the ranks that have their experts.

use brigade_torch::regions::{all_to_all_rows, scale_gradient};
use brigade_torch::{Error, ProcessGroup, Result};
use tch::Tensor;

/// Ranks that divide the experts, each with a contiguous range of the same number.
#[derive(Debug)]
pub(super) struct Exchange {
    group: ProcessGroup,
    /// Number of experts per rank.
    own: usize,
    /// Number of ranks among them that have different tokens of the same samples, and the same loss.
    tensor_ranks: usize,
}

impl Exchange {
    /// Creates the exchange for `experts` experts that the ranks divide. Each `tensor_ranks` of them have parts of the
    /// same samples' tokens.
    pub(super) fn new(group: ProcessGroup, experts: i64, tensor_ranks: usize) -> Self {
        let own = usize::try_from(experts).unwrap_or(0) / group.size();
        Self { group, own: own.max(1), tensor_ranks }
    }

    /// Computes rows on the ranks that have their experts. `rows` are sorted by expert, with `counts` rows for each of
    /// all experts. `compute` gets rows sorted by this rank's experts, and their counts. Returns the results in the
    /// order of `rows`.
    pub(super) fn run(
        &self,
        rows: &Tensor,
        counts: &[i64],
        compute: impl FnOnce(&Tensor, &[i64]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let to_send = Tensor::f_from_slice(counts)?.f_to_device(rows.device())?;
        let to_receive = self.group.all_to_all_flat(&to_send, &[], &[])?;
        let arriving = Vec::<i64>::try_from(to_receive)?;
        let received =
            arriving.iter().try_fold(0i64, |sum, &n| sum.checked_add(n).filter(|_| n >= 0));
        if received.is_none() {
            return Err(Error::invalid_argument(format!(
                "a rank of the experts' group sent impossible numbers of tokens: {arriving:?}; build the same \
                 model on every rank"
            )));
        }
        let per_rank = |counts: &[i64]| -> Vec<i64> {
            counts.chunks(self.own).map(|counts| counts.iter().sum()).collect()
        };
        let (send, receive) = (per_rank(counts), per_rank(&arriving));
        // Outside of the exchange, gradients are those of each rank's own loss; within it, those of the mean of all
        // losses, of which each tensor group has one.
        let losses = self.group.size() as f64 / self.tensor_ranks as f64;
        let rows = scale_gradient(rows, losses)?;
        let received = all_to_all_rows(&self.group, &rows, &send, &receive)?;

        // Received rows are sorted by rank, then by expert; they are needed by expert, then by rank.
        let starts: Vec<i64> = arriving
            .iter()
            .scan(0, |end, count| {
                let start = *end;
                *end += count;
                Some(start)
            })
            .collect();
        let of_expert = |expert: usize| (expert..arriving.len()).step_by(self.own);
        let order: Vec<i64> = (0..self.own)
            .flat_map(of_expert)
            .flat_map(|block| starts[block]..starts[block] + arriving[block])
            .collect();
        let own: Vec<i64> = (0..self.own)
            .map(|expert| of_expert(expert).map(|block| arriving[block]).sum())
            .collect();
        let order = Tensor::f_from_slice(&order)?.f_to_device(rows.device())?;
        let computed = compute(&received.f_index_select(0, &order)?, &own)?;
        let by_rank = computed.f_zeros_like()?.f_index_copy(0, &order, &computed)?;
        scale_gradient(&all_to_all_rows(&self.group, &by_rank, &receive, &send)?, 1.0 / losses)
    }
}
