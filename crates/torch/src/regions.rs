//! Collectives with gradients, for layers that the ranks of a group compute together.
//!
//! A *region* is a part of a model in which each rank has a part of every layer (tensor parallelism), or a part of the
//! sequence (sequence parallelism). These functions are its edges, as in Megatron-LM. Sums are never divided by the
//! number of ranks. The gradient's message is sent in backward, so that all ranks must run the same edges in the same
//! order.
//!
//! | edge | forward | gradient |
//! |---|---|---|
//! | [`copy_to_region`] | nothing | sum over the ranks |
//! | [`reduce_from_region`] | sum over the ranks | nothing |
//! | [`scatter_to_region`] | this rank's part | gathered |
//! | [`gather_from_region`] | gathered | this rank's part |
//! | [`gather_from_sequence_region`] | gathered | this rank's part of the sum |
//! | [`reduce_scatter_to_sequence_region`] | this rank's part of the sum | gathered |
//! | [`all_to_all`] | parts exchanged | exchanged back |
//! | [`all_to_all_rows`] | rows exchanged, any number to each rank | exchanged back |
//! | [`scale_gradient`] | nothing | times a factor |
//!
//! A linear layer whose output features are divided over the ranks, followed by one whose input features are, needs one
//! message in forward and one in backward:
//!
//! ```
//! # use brigade_torch::{Backend, ProcessGroup, Store};
//! # let gloo = Backend::Gloo(Default::default());
//! # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
//! use brigade_torch::regions::{copy_to_region, reduce_from_region};
//! use tch::{Device, Kind, Tensor};
//!
//! // This rank's rows of the first weight, and columns of the second.
//! let up = Tensor::randn([8 / group.size() as i64, 4], (Kind::Float, Device::Cpu));
//! let down = Tensor::randn([4, 8 / group.size() as i64], (Kind::Float, Device::Cpu));
//! let input = Tensor::randn([2, 4], (Kind::Float, Device::Cpu));
//! let hidden = copy_to_region(group, &input)?.f_linear(&up, None::<&Tensor>)?.f_relu()?;
//! let output = reduce_from_region(group, &hidden.f_linear(&down, None::<&Tensor>)?)?;
//! assert_eq!(output.size(), [2, 4]);
//! # Ok::<(), brigade_torch::Error>(())
//! ```

use std::time::Instant;

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;
use crate::group::ProcessGroup;

/// Returns the input, equal on all ranks, for layers of which each rank has a part. Its gradient is summed over all
/// ranks (Megatron's `f`).
///
/// # Errors
/// [`crate::ErrorKind::Tensor`] if memory runs out. In backward [`crate::ErrorKind::Communication`] if a peer was lost.
pub fn copy_to_region(group: &ProcessGroup, input: &Tensor) -> Result<Tensor, Error> {
    edge(group, "copy_to_region", input, ffi::RegionEdge::Copy, 0, 0)
}

/// Returns the sum of all ranks' inputs, equal on all of them (Megatron's `g`).
///
/// # Errors
/// [`crate::ErrorKind::Communication`] if a peer was lost; [`crate::ErrorKind::Tensor`] if memory runs out.
pub fn reduce_from_region(group: &ProcessGroup, input: &Tensor) -> Result<Tensor, Error> {
    edge(group, "reduce_from_region", input, ffi::RegionEdge::Reduce, 0, 0)
}

/// Returns this rank's part, along `dim`, of an input that is equal on all ranks.
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] if the size of the dimension is not divisible by the number of ranks;
/// [`crate::ErrorKind::Tensor`] if memory runs out.
pub fn scatter_to_region(group: &ProcessGroup, input: &Tensor, dim: i64) -> Result<Tensor, Error> {
    let dim = divided("scatter_to_region", group, input, dim)?;
    edge(group, "scatter_to_region", input, ffi::RegionEdge::Scatter, dim, 0)
}

/// Returns the inputs of all ranks, which have one shape, concatenated along `dim`, for layers that every rank computes
/// in the same way.
///
/// # Errors
/// [`crate::ErrorKind::Communication`] if a peer was lost; [`crate::ErrorKind::InvalidArgument`] if there is no such
/// dimension.
pub fn gather_from_region(group: &ProcessGroup, input: &Tensor, dim: i64) -> Result<Tensor, Error> {
    let dim = known("gather_from_region", input, dim)?;
    edge(group, "gather_from_region", input, ffi::RegionEdge::Gather, dim, 0)
}

/// Returns the inputs of all ranks concatenated along `dim`, for layers of which each rank has a part: gradients of the
/// whole are summed over the ranks.
///
/// # Errors
/// Returns the same errors as [`gather_from_region`].
pub fn gather_from_sequence_region(
    group: &ProcessGroup,
    input: &Tensor,
    dim: i64,
) -> Result<Tensor, Error> {
    let dim = known("gather_from_sequence_region", input, dim)?;
    edge(group, "gather_from_sequence_region", input, ffi::RegionEdge::GatherSequence, dim, 0)
}

/// Returns this rank's part, along `dim`, of the sum of all ranks' inputs.
///
/// # Errors
/// Returns the same errors as [`scatter_to_region`], and [`crate::ErrorKind::Communication`] if a peer was lost.
pub fn reduce_scatter_to_sequence_region(
    group: &ProcessGroup,
    input: &Tensor,
    dim: i64,
) -> Result<Tensor, Error> {
    let operation = "reduce_scatter_to_sequence_region";
    let dim = divided(operation, group, input, dim)?;
    edge(group, operation, input, ffi::RegionEdge::ReduceScatterSequence, dim, 0)
}

/// Cuts the input along `split` into a part for each rank, and returns the parts for this rank concatenated along
/// `concat`: a tensor that is divided over the ranks along one dimension becomes divided along another, such as along
/// heads instead of the sequence (DeepSpeed-Ulysses).
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::regions::all_to_all;
/// use tch::{Device, Kind, Tensor};
///
/// // [batch, part of the sequence, heads, size] becomes [batch, sequence, part of the heads, size], and back.
/// let queries = Tensor::randn([2, 6, 4, 8], (Kind::Float, Device::Cpu));
/// let by_heads = all_to_all(group, &queries, 2, 1)?;
/// assert_eq!(all_to_all(group, &by_heads, 1, 2)?, queries);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`reduce_scatter_to_sequence_region`].
pub fn all_to_all(
    group: &ProcessGroup,
    input: &Tensor,
    split: i64,
    concat: i64,
) -> Result<Tensor, Error> {
    let split = divided("all_to_all", group, input, split)?;
    let concat = known("all_to_all", input, concat)?;
    edge(group, "all_to_all", input, ffi::RegionEdge::AllToAll, split, concat)
}

/// Sends blocks of rows to all ranks and returns theirs, in the order of the ranks: `send_rows[i]` rows, which follow
/// those for the ranks before, go to rank `i`, and `receive_rows[j]` come from rank `j`. The numbers must be known
/// before, for example from [`ProcessGroup::all_to_all_flat`]. The gradient is sent back in the same way. Ranks without
/// rows take part, too.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::regions::all_to_all_rows;
/// use tch::{Device, Kind, Tensor};
///
/// // Tokens for the experts of this rank, which is alone here.
/// let tokens = Tensor::randn([5, 8], (Kind::Float, Device::Cpu));
/// let received = all_to_all_rows(group, &tokens, &[5], &[5])?;
/// assert_eq!(all_to_all_rows(group, &received, &[5], &[5])?, tokens);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] where the numbers are not one per rank or do not add up to the rows of the
/// input; [`crate::ErrorKind::Communication`] if a peer was lost; [`crate::ErrorKind::Tensor`] if memory runs out.
pub fn all_to_all_rows(
    group: &ProcessGroup,
    input: &Tensor,
    send_rows: &[i64],
    receive_rows: &[i64],
) -> Result<Tensor, Error> {
    let operation = "all_to_all_rows";
    let Some(&rows) = input.size().first() else {
        return Err(Error::invalid_argument(format!(
            "{operation}: a tensor without dimensions has no rows to send"
        )));
    };
    let total = |counts: &[i64]| {
        let sum = counts.iter().try_fold(0i64, |sum, &n| sum.checked_add(n).filter(|_| n >= 0));
        sum.filter(|_| counts.len() == group.size())
    };
    let Some((sent, received)) = total(send_rows).zip(total(receive_rows)) else {
        return Err(Error::invalid_argument(format!(
            "{operation}: expected {} numbers of rows to send and to receive, found {send_rows:?} and {receive_rows:?}",
            group.size()
        )));
    };
    if sent != rows || (group.size() == 1 && received != rows) {
        return Err(Error::invalid_argument(format!(
            "{operation}: the input has {rows} rows, but {send_rows:?} are to be sent and {receive_rows:?} received"
        )));
    }
    together(group, operation, input, |handle| {
        ffi::region_exchange_rows(handle, borrow(input), send_rows, receive_rows)
    })
}

/// Returns the input, and multiplies its gradient by a factor: for parameters whose gradient is a sum over the losses
/// of several ranks, in a job that averages. No message is sent.
///
/// ```
/// use brigade_torch::regions::scale_gradient;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// scale_gradient(&x, 0.25)?.sum(Kind::Float).backward();
/// assert_eq!(Vec::<f32>::try_from(x.grad())?, [0.25, 0.25]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`crate::ErrorKind::Tensor`] for a tensor without memory.
pub fn scale_gradient(input: &Tensor, factor: f64) -> Result<Tensor, Error> {
    let scaled = ffi::region_scale_gradient(borrow(input), factor)
        .map_err(|error| Error::libtorch("scaling a gradient", &error))?;
    Ok(own(scaled))
}

fn edge(
    group: &ProcessGroup,
    operation: &'static str,
    input: &Tensor,
    edge: ffi::RegionEdge,
    dim: i64,
    other: i64,
) -> Result<Tensor, Error> {
    together(group, operation, input, |handle| {
        ffi::region_edge(handle, borrow(input), edge, dim, other)
    })
}

/// Runs an operation of all ranks. With only one rank it returns the input.
fn together(
    group: &ProcessGroup,
    operation: &'static str,
    input: &Tensor,
    run: impl FnOnce(&ffi::Group) -> Result<UniquePtr<ffi::Tensor>, cxx::Exception>,
) -> Result<Tensor, Error> {
    if group.size() == 1 {
        return Ok(input.shallow_clone());
    }
    let begun = Instant::now();
    let (started, output) = group.exclusively(|handle| {
        let started = group.next_collective(operation);
        (started, run(handle))
    });
    match output {
        Ok(output) => Ok(own(output)),
        Err(error) => Err(group.failure(started, begun, &error).into()),
    }
}

/// Returns the number of a dimension, counted from the front.
fn known(operation: &str, input: &Tensor, dim: i64) -> Result<i64, Error> {
    let dimensions = input.dim() as i64;
    let place = if dim < 0 { dim + dimensions } else { dim };
    if (0..dimensions).contains(&place) {
        return Ok(place);
    }
    Err(Error::invalid_argument(format!(
        "{operation}: there is no dimension {dim} in a tensor of shape {:?}",
        input.size()
    )))
}

fn divided(operation: &str, group: &ProcessGroup, input: &Tensor, dim: i64) -> Result<i64, Error> {
    let place = known(operation, input, dim)?;
    let (size, ranks) = (input.size()[place as usize], group.size() as i64);
    if size % ranks == 0 {
        return Ok(place);
    }
    let (less, more) = (size / ranks * ranks, (size / ranks + 1) * ranks);
    Err(Error::invalid_argument(format!(
        "{operation}: dimension {dim} has {size} elements, which {ranks} ranks do not divide; take {} or {more}",
        if less == 0 { more } else { less }
    )))
}
