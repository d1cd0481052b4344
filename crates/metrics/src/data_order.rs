//! Tensors of all ranks in the order of the data.

use brigade_checkpoint::Dtype;
use brigade_torch::{Error, ProcessGroup, Result, dtype_of, kind_of};
use tch::{Device, Tensor};

/// The shape of a row and its type; `None` on a rank without a batch.
type RowShape = Option<(Vec<i64>, Dtype)>;

/// Message of a rank to the others: the numbers of its batches, their rows, and the rows' shape or the reason why they
/// cannot be concatenated.
type RankRows = (Vec<usize>, Vec<i64>, Result<RowShape, String>);

/// Gathers the batches of all ranks of a group, and concatenates them along their first dimension in the order of the
/// data, on the CPU. `None` if there is no batch.
///
/// `numbers` has the number of each batch; batches of the same number are in the order of their ranks. Every rank
/// takes part, with any number of batches. Without a group, the batches are this rank's.
///
/// ```
/// use brigade_metrics::gather_in_data_order;
/// use tch::Tensor;
///
/// let batches = vec![Tensor::from_slice(&[1, 2]), Tensor::from_slice(&[3])];
/// let all = gather_in_data_order(None, &[0, 1], batches)?;
/// assert_eq!(all, Some(Tensor::from_slice(&[1, 2, 3])));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] if rows of the ranks have different shapes or types;
/// [`brigade_torch::ErrorKind::Communication`] if another rank has failed.
#[track_caller]
pub fn gather_in_data_order(
    group: Option<&ProcessGroup>,
    numbers: &[usize],
    batches: Vec<Tensor>,
) -> Result<Option<Tensor>> {
    let mut batches: Vec<(usize, Tensor)> = numbers.iter().copied().zip(batches).collect();
    batches.sort_by_key(|(number, _)| *number);
    let (numbers, batches): (Vec<usize>, Vec<Tensor>) = batches.into_iter().unzip();
    let rows: Vec<i64> =
        batches.iter().map(|batch| batch.size().first().copied().unwrap_or(1)).collect();
    let mine = if batches.is_empty() { Ok(None) } else { Tensor::f_cat(&batches, 0).map(Some) };
    drop(batches);
    let Some(group) = group else {
        return Ok(mine?.map(|mine| mine.f_to_device(Device::Cpu)).transpose()?);
    };
    // Errors are sent to the other ranks, which would wait for this one otherwise.
    let (mine, shape) = match mine {
        Ok(mine) => {
            let shape =
                mine.as_ref().and_then(|it| Some((it.size()[1..].to_vec(), dtype_of(it.kind())?)));
            (mine, Ok(shape))
        }
        Err(error) => (None, Err(error.to_string())),
    };
    let reports: Vec<RankRows> = group.all_gather_object(&(numbers, rows, shape))?;
    let mut all: Vec<(Vec<usize>, Vec<i64>, RowShape)> = Vec::new();
    for (rank, (numbers, rows, shape)) in reports.into_iter().enumerate() {
        let shape = shape.map_err(|reason| {
            Error::invalid_argument(format!("rank {rank}'s batches cannot be joined: {reason}"))
        })?;
        all.push((numbers, rows, shape));
    }
    let Some((rest, kind)) = all.iter().find_map(|(.., shape)| shape.clone()) else {
        return Ok(None);
    };
    let differs = |other: &RowShape| other.as_ref().is_some_and(|it| *it != (rest.clone(), kind));
    if let Some(rank) = all.iter().position(|(.., other)| differs(other)) {
        return Err(Error::invalid_argument(format!(
            "the ranks' rows cannot be joined: rank {rank} has another shape or type than {rest:?} of {kind}"
        )));
    }
    let counts: Vec<i64> = all.iter().map(|(_, rows, _)| rows.iter().sum()).collect();
    let most = counts.iter().copied().max().unwrap_or(0);
    let mut padded_shape = vec![most];
    padded_shape.extend(&rest);
    let kind = kind_of(kind).ok_or_else(|| {
        Error::invalid_argument(format!("rows are of {kind}, which tensors cannot be"))
    })?;
    let padded = Tensor::f_zeros(&padded_shape, (kind, group.device()))?;
    if let Some(mine) = &mine {
        padded.f_narrow(0, 0, mine.size()[0])?.f_copy_(mine)?;
    }
    let gathered = group.all_gather(&padded)?;
    let mut parts = Vec::new();
    for (tensor, (numbers, rows, _)) in gathered.iter().zip(&all) {
        let mut begin = 0;
        for (number, rows) in numbers.iter().zip(rows) {
            parts.push((*number, tensor.f_narrow(0, begin, *rows)?));
            begin += rows;
        }
    }
    // Stable: batches of one number stay in the order of their ranks.
    parts.sort_by_key(|(number, _)| *number);
    let parts: Vec<Tensor> = parts.into_iter().map(|(_, part)| part).collect();
    Ok(Some(Tensor::f_cat(&parts, 0)?.f_to_device(Device::Cpu)?))
}
