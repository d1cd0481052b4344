//! Messages from one rank to another.

use std::time::Instant;

use tch::Tensor;

use super::{Begun, copy, dense, fill, unshared};
use crate::bridge::{borrow, ffi};
use crate::error::Error;
use crate::group::{ProcessGroup, Started};
use crate::work::{PendingWork, Work};

impl ProcessGroup {
    /// Sends a tensor to one rank. Returns when the tensor may be changed again.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when there is no such rank or it is this
    /// one.
    ///
    /// ```no_run
    /// # fn f(group: &brigade_torch::ProcessGroup) -> Result<(), brigade_torch::Error> {
    /// use tch::Tensor;
    /// let mut number = Tensor::from(group.rank() as f64);
    /// match group.rank() {
    ///     0 => group.send(&number, 1, 0)?,
    ///     _ => group.recv(&mut number, 0, 0)?,
    /// }
    /// # Ok(()) }
    /// ```
    pub fn send(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<(), Error> {
        self.begin_send(tensor, to, tag)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::send`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::send`].
    pub fn start_send(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<Work<Tensor>, Error> {
        self.begin_send(&copy(tensor)?, to, tag)
    }

    fn begin_send(&self, tensor: &Tensor, to: usize, tag: u16) -> Result<Work<Tensor>, Error> {
        let to = self.peer("send", to)?;
        let tensor = dense(tensor)?;
        let pending =
            self.message("send", |group| ffi::send(group, borrow(&tensor), to, tag.into()))?;
        Ok(pending.giving(tensor))
    }

    /// Receives a tensor that rank `from` sends with the same tag.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::send`].
    pub fn recv(&self, tensor: &mut Tensor, from: usize, tag: u16) -> Result<(), Error> {
        self.begin_recv(tensor.shallow_clone(), from, tag)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::recv`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::recv`].
    pub fn start_recv(&self, tensor: Tensor, from: usize, tag: u16) -> Result<Work<Tensor>, Error> {
        self.begin_recv(unshared(tensor)?, from, tag)
    }

    fn begin_recv(&self, tensor: Tensor, from: usize, tag: u16) -> Result<Work<Tensor>, Error> {
        let from = self.peer("recv", from)?;
        let target = dense(&tensor)?;
        let pending =
            self.message("recv", |group| ffi::recv(group, borrow(&target), from, tag.into()))?;
        Ok(fill(pending, tensor, target))
    }

    /// Receives a tensor that any rank sends with the tag, and returns the sender's rank. Gloo only.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if the communication fails.
    pub fn recv_any(&self, tensor: &mut Tensor, tag: u16) -> Result<usize, Error> {
        let (_, source) = self.begin_recv_any(tensor.shallow_clone(), tag)?.wait_source()?;
        source.ok_or_else(|| {
            self.invalid_argument("recv_any", "the backend does not report the sender".into())
        })
    }

    /// Starts [`ProcessGroup::recv_any`] and returns without waiting. [`Work::wait_source`] returns the sender.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::recv_any`].
    pub fn start_recv_any(&self, tensor: Tensor, tag: u16) -> Result<Work<Tensor>, Error> {
        self.begin_recv_any(unshared(tensor)?, tag)
    }

    fn begin_recv_any(&self, tensor: Tensor, tag: u16) -> Result<Work<Tensor>, Error> {
        let target = dense(&tensor)?;
        let pending =
            self.message("recv_any", |group| ffi::recv_any(group, borrow(&target), tag.into()))?;
        Ok(fill(pending, tensor, target))
    }

    fn message(
        &self,
        operation: &'static str,
        start: impl FnOnce(&ffi::Group) -> Begun,
    ) -> Result<PendingWork, Error> {
        let (started, begun) = (Started::unnumbered(operation), Instant::now());
        match self.exclusively(start) {
            Ok(handle) => Ok(PendingWork::new(handle, self.clone(), started)),
            Err(error) => Err(self.failure(started, begun, &error).into()),
        }
    }

    fn peer(&self, operation: &'static str, rank: usize) -> Result<i32, Error> {
        if rank == self.rank() {
            return Err(
                self.invalid_argument(operation, format!("rank {rank} is this rank itself"))
            );
        }
        self.rank_number(operation, rank)
    }
}
