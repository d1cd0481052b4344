//! The collectives and point-to-point operations of c10d, as methods of [`ProcessGroup`].
//!
//! Every rank of the group calls the same collective with tensors of the same shape and type; shapes are not compared
//! across ranks, because that would cost a message. A blocking call returns when this rank's result is complete;
//! `start_…` returns at once. Mistakes that a rank can detect by itself are errors of [`Fault::Invalid`] before
//! anything is sent.

mod barrier;
mod exchange;
mod gather;
#[cfg(test)]
mod list_tests;
mod message;
mod reduce;

use std::fmt;
use std::time::Instant;

use cxx::UniquePtr;
use tch::{Kind, Tensor};

pub use reduce::ReduceOp;

use crate::bridge::{borrow, ffi};
use crate::check::describe;
use crate::device::DeviceExt;
use crate::error::{CollectiveError, Error, Fault};
use crate::group::ProcessGroup;
use crate::work::{PendingWork, Work};

/// Result of the C++ side when it has started an operation.
type Begun = Result<UniquePtr<ffi::Work>, cxx::Exception>;

impl ProcessGroup {
    /// Starts a collective, which has the same number on all ranks.
    #[track_caller]
    fn collective(
        &self,
        operation: &'static str,
        what: impl FnOnce() -> String,
        start: impl FnOnce(&ffi::Group, i64) -> Begun,
    ) -> Result<PendingWork, Error> {
        self.check(operation, what)?;
        let limit = self.limit_ms();
        let since = Instant::now();
        let (started, begun) =
            self.exclusively(|group| (self.next_collective(operation), start(group, limit)));
        match begun {
            Ok(handle) => Ok(PendingWork::new(handle, self.clone(), started)),
            Err(error) => Err(self.failure(started, since, &error).into()),
        }
    }

    /// Starts a collective that changes one tensor.
    #[track_caller]
    fn in_place(
        &self,
        operation: &'static str,
        how: &dyn fmt::Debug,
        tensor: Tensor,
        start: impl FnOnce(&ffi::Group, &Tensor, i64) -> Begun,
    ) -> Result<Work<Tensor>, Error> {
        let target = dense(&tensor)?;
        let what = || format!("{how:?} {}", describe(&target));
        let pending =
            self.collective(operation, what, |group, limit| start(group, &target, limit))?;
        Ok(fill(pending, tensor, target))
    }

    fn empty_per_rank(&self, input: &Tensor) -> Result<Vec<Tensor>, Error> {
        (0..self.size()).map(|_| Ok(input.f_empty_like()?)).collect()
    }

    fn one_per_rank(&self, operation: &'static str, list: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        if list.len() != self.size() {
            return Err(self.invalid_argument(
                operation,
                format!("expected one tensor per rank ({}), found {}", self.size(), list.len()),
            ));
        }
        list.iter().map(dense).collect()
    }

    fn same_shape(
        &self,
        operation: &'static str,
        found: &Tensor,
        expected: &Tensor,
    ) -> Result<(), Error> {
        let describe = |tensor: &Tensor| -> Result<(Vec<i64>, Kind), Error> {
            Ok((tensor.size(), tensor.f_kind()?))
        };
        let (found, expected) = (describe(found)?, describe(expected)?);
        if found == expected {
            return Ok(());
        }
        let text = format!(
            "expected shape {:?} of {:?}, found {:?} of {:?}",
            expected.0, expected.1, found.0, found.1
        );
        Err(self.invalid_argument(operation, text))
    }

    fn on_one_device(&self, operation: &'static str, tensors: &[Tensor]) -> Result<(), Error> {
        let Some(first) = tensors.first().map(Tensor::device) else { return Ok(()) };
        match tensors.iter().map(Tensor::device).find(|device| *device != first) {
            None => Ok(()),
            Some(other) => Err(self.invalid_argument(
                operation,
                format!(
                    "tensors on {} and {}; call it for those of each device",
                    first.label(),
                    other.label()
                ),
            )),
        }
    }

    /// Checks that each of `wholes` holds the rows of its part of every rank.
    fn parts_fit(
        &self,
        operation: &'static str,
        wholes: &[Tensor],
        parts: &[Tensor],
    ) -> Result<(), Error> {
        self.on_one_device(operation, parts)?;
        if wholes.len() != parts.len() {
            let text = format!("{} tensors of all ranks, and {} parts", wholes.len(), parts.len());
            return Err(self.invalid_argument(operation, text));
        }
        for (whole, part) in wholes.iter().zip(parts) {
            let (found, expected) = (describe(whole), self.shape_of_all(part));
            if (whole.size(), whole.f_kind()?, whole.device())
                != (expected.clone(), part.f_kind()?, part.device())
            {
                let text =
                    format!("expected shape {expected:?} for {}, found {found}", describe(part));
                return Err(self.invalid_argument(operation, text));
            }
        }
        Ok(())
    }

    /// Returns the shape of the concatenation of all ranks' tensors of one shape along the first dimension.
    fn shape_of_all(&self, part: &Tensor) -> Vec<i64> {
        let mut shape = part.size();
        match shape.first_mut() {
            Some(rows) => *rows *= self.size() as i64,
            None => shape.push(self.size() as i64),
        }
        shape
    }

    /// Returns the shape of a tensor if its rows divide evenly among the ranks, else an error.
    fn rows_for_all(&self, operation: &'static str, input: &Tensor) -> Result<Vec<i64>, Error> {
        let shape = input.size();
        match shape.first() {
            Some(rows) if rows % self.size() as i64 == 0 => Ok(shape),
            _ => Err(self.invalid_argument(
                operation,
                format!("a tensor of shape {shape:?} has no equal parts for {} ranks", self.size()),
            )),
        }
    }

    fn rank_number(&self, operation: &'static str, rank: usize) -> Result<i32, Error> {
        match i32::try_from(rank) {
            Ok(number) if rank < self.size() => Ok(number),
            _ => Err(self.invalid_argument(
                operation,
                format!("rank {rank} does not exist among {} ranks", self.size()),
            )),
        }
    }

    /// Returns an error about arguments that this rank detects by itself.
    fn invalid_argument(&self, operation: &'static str, detail: String) -> Error {
        CollectiveError {
            operation,
            group: self.name().to_owned(),
            rank: self.rank(),
            size: self.size(),
            fault: Fault::Invalid,
            detail,
            missing: Vec::new(),
            lost_store: None,
        }
        .into()
    }
}

/// Returns a tensor over the same memory without its history if c10d can work on it, else a contiguous copy.
fn dense(tensor: &Tensor) -> Result<Tensor, Error> {
    Ok(tensor.f_detach()?.f_contiguous()?)
}

/// Returns a tensor as [`dense`] does, with a scalar as one row.
fn rows(tensor: &Tensor) -> Result<Tensor, Error> {
    let tensor = dense(tensor)?;
    if tensor.dim() == 0 { Ok(tensor.f_unsqueeze(0)?) } else { Ok(tensor) }
}

/// Returns the tensor in memory that nothing else can reach, for an operation that continues after its start has
/// returned. Returns the same tensor if that is the case already.
fn unshared(tensor: Tensor) -> Result<Tensor, Error> {
    if ffi::tensor_is_shared(borrow(&tensor)) { copy(&tensor) } else { Ok(tensor) }
}

fn copy(tensor: &Tensor) -> Result<Tensor, Error> {
    Ok(tensor.f_detach_copy()?)
}

fn copies(tensors: &[Tensor]) -> Result<Vec<Tensor>, Error> {
    tensors.iter().map(copy).collect()
}

/// Turns the operation on `target` into one on `tensor`. The result is copied into `tensor` if they do not share
/// memory.
fn fill(pending: PendingWork, tensor: Tensor, target: Tensor) -> Work<Tensor> {
    let copied = !tensor.is_contiguous();
    let work = pending.giving(tensor);
    if !copied {
        return work.reading([target]);
    }
    work.then(move |tensor| {
        tch::no_grad(|| tensor.f_copy_(&target))?;
        Ok(())
    })
}

/// Fills several tensors in the same way as [`fill`].
fn fill_all(pending: PendingWork, tensors: Vec<Tensor>, targets: Vec<Tensor>) -> Work<Vec<Tensor>> {
    pending.giving(tensors).then(move |tensors| {
        let _guard = tch::no_grad_guard();
        for (tensor, target) in tensors.iter_mut().zip(&targets) {
            if !tensor.is_contiguous() {
                tensor.f_copy_(target)?;
            }
        }
        Ok(())
    })
}
