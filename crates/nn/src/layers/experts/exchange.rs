//! Exchange of tokens with the ranks that have their experts.

use brigade_torch::regions::{all_to_all_rows, scale_gradient};
use brigade_torch::{Error, ProcessGroup, Result};
use tch::Tensor;

/// The ranks that have experts between them, each a contiguous range of as many.
#[derive(Debug)]
pub(super) struct Exchange {
    group: ProcessGroup,
    /// Experts of each rank.
    own: usize,
}

impl Exchange {
    /// `experts` is what the ranks divide.
    pub(super) fn new(group: ProcessGroup, experts: i64) -> Self {
        let own = usize::try_from(experts).unwrap_or(0) / group.size();
        Self { group, own: own.max(1) }
    }

    /// Sends rows that are sorted by expert, of which each of all experts has `counts`, to the ranks of these experts, has them
    /// computed there by `compute`, which gets rows sorted by own expert and their counts, and returns the results in the
    /// order of the rows.
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
                "a rank of the experts' group sent numbers of tokens that there cannot be: {arriving:?}; build the same \
                 model on every rank"
            )));
        }
        let per_rank = |counts: &[i64]| -> Vec<i64> {
            counts.chunks(self.own).map(|counts| counts.iter().sum()).collect()
        };
        let (send, receive) = (per_rank(counts), per_rank(&arriving));
        // Gradients are those of the ranks' own losses outside of the exchange, and those of the mean of all losses within it.
        let ranks = self.group.size() as f64;
        let rows = scale_gradient(rows, ranks)?;
        let received = all_to_all_rows(&self.group, &rows, &send, &receive)?;

        // By rank, and of each rank by expert: sorted by expert, and of each expert by rank.
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
        scale_gradient(&all_to_all_rows(&self.group, &by_rank, &receive, &send)?, 1.0 / ranks)
    }
}
