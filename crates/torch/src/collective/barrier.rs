//! Collectives without data.

use std::time::Instant;

use crate::bridge::ffi;
use crate::device::gpu;
use crate::error::Error;
use crate::group::{ProcessGroup, Started};
use crate::store::milliseconds;
use crate::work::Work;

impl ProcessGroup {
    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if the communication fails.
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        self.start_barrier()?.wait()
    }

    /// Starts [`ProcessGroup::barrier`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::barrier`].
    #[track_caller]
    pub fn start_barrier(&self) -> Result<Work<()>, Error> {
        let device = gpu(self.device())?.map_or(-1, i64::from);
        let pending = self.collective("barrier", String::new, |group, limit| {
            ffi::barrier(group, device, limit)
        })?;
        Ok(pending.giving(()))
    }

    /// Waits until all ranks have called it, and reports missing ranks: rank 0 waits for every rank, and its error
    /// contains all ranks that did not arrive within the limit ([`crate::CollectiveError::missing`]). Gloo only.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], on rank 0 with the missing ranks, on other ranks because rank 0 did not
    /// respond.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// group.within(std::time::Duration::from_secs(60)).monitored_barrier()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn monitored_barrier(&self) -> Result<(), Error> {
        let limit = milliseconds(self.timeout());
        self.check("monitored_barrier", String::new)?;
        let (started, begun) = (Started::unnumbered("monitored_barrier"), Instant::now());
        let done = self.exclusively(|group| ffi::monitored_barrier(group, limit, true));
        done.map_err(|error| {
            let mut failed = self.failure(started, begun, &error);
            failed.missing = named_ranks(&failed.detail);
            failed.into()
        })
    }
}

/// Parses the ranks in the message of Gloo's monitored barrier: "Ranks 1, 3 failed to pass monitoredBarrier …".
fn named_ranks(detail: &str) -> Vec<usize> {
    let Some((head, _)) = detail.split_once("failed to pass") else {
        return Vec::new();
    };
    let Some(start) = head.rfind("Rank") else {
        return Vec::new();
    };
    head[start..]
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_read_from_the_text() {
        let text = "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 200 ms";
        assert_eq!(named_ranks(text), [1, 3]);
        assert_eq!(named_ranks("[Rank 0]: Rank 2 failed to pass monitoredBarrier in 9 ms"), [2]);
        assert_eq!(named_ranks("Connection closed by peer"), [0usize; 0]);
    }
}
