//! An epoch's batches on their way to a GPU, one ahead of the loop.
//!
//! A thread begins the epoch, copies each batch into pinned memory and from there to the GPU on a stream of high
//! priority, and passes it on through a channel without capacity, so it is one batch ahead. The stream of the loop
//! waits for the event of the copy, and the allocator is told that the stream of the loop uses the memory. If the
//! loader has no threads, this thread also computes on the stream of the copies, under the rules of
//! `crates/data/src/beside.rs`.

use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use brigade_data::{Batch, DataError, Epoch};
use brigade_torch::{Error, Result, SideStream, StreamEvent, TensorTree, copy_to_device};
use tch::Device;

/// An epoch whose batches are copied to the GPU ahead of the loop. Copies go through pinned memory on a separate
/// stream, so that neither the host nor the computation waits for them. The copy into pinned memory, which takes some
/// milliseconds for a batch of images, is made on the reading thread, too.
pub(super) struct StagedEpoch<T> {
    /// `None` once the epoch has ended.
    batches: Option<Receiver<Result<Copied<T>>>>,
    thread: Option<JoinHandle<()>>,
    /// Reason why the thread could not be started.
    failed: Option<Error>,
    remaining: Option<usize>,
}

/// A batch that is being copied, and the event that marks the end of its copy in the stream.
type Copied<T> = (Batch<T>, Option<StreamEvent>);

impl<T: TensorTree<Owned = T> + Send + 'static> StagedEpoch<T> {
    /// Starts a thread that begins and reads the epoch, since not every epoch can be moved between threads. Returns
    /// when the epoch has begun.
    pub(super) fn new(begin: impl FnOnce() -> Epoch<T> + Send + 'static, device: Device) -> Self {
        // No capacity: the thread holds the next batch until the loop takes it, and reads no further.
        let (sender, receiver) = sync_channel(0);
        let (begun, remaining) = sync_channel(1);
        // Work queued by this thread may include the copy of the data set itself.
        let given = StreamEvent::record(device);
        let thread = thread::Builder::new().name("brigade-copies".to_owned()).spawn(move || {
            match given.and_then(|given| SideStream::enter(device, given.as_ref())) {
                Ok(stream) => {
                    let mut epoch = begin();
                    // Dropped before the epoch, whose data set the stream's kernels read: dropping it waits for them.
                    let _stream = stream;
                    let _ = begun.send(epoch.remaining());
                    copy(&mut epoch, device, &sender);
                }
                Err(error) => {
                    let _ = begun.send(Some(1));
                    let _ = sender.send(Err(error));
                }
            }
        });
        let remaining = remaining.recv().unwrap_or(None);
        let (thread, failed) = match thread {
            Ok(thread) => (Some(thread), None),
            Err(cause) => (None, Some(DataError::Spawn { thread: 1, threads: 1, cause }.into())),
        };
        Self { batches: Some(receiver), thread, failed, remaining }
    }
}

impl<T> StagedEpoch<T> {
    pub(super) fn remaining(&self) -> Option<usize> {
        self.remaining
    }

    /// Ends the thread, which may be reading a batch, and resumes its panic if it had one.
    fn end(&mut self) -> thread::Result<()> {
        self.batches = None;
        self.thread.take().map_or(Ok(()), JoinHandle::join)
    }
}

impl<T: TensorTree<Owned = T>> StagedEpoch<T> {
    pub(super) fn next(&mut self) -> Option<Result<Batch<T>>> {
        if let Some(error) = self.failed.take() {
            return Some(Err(error));
        }
        match self.batches.as_ref()?.recv() {
            Ok(copied) => Some(copied.and_then(|(batch, copied)| {
                copied.map_or(Ok(()), |copied| copied.take_over(&*batch))?;
                Ok(batch)
            })),
            Err(_) => {
                if let Err(panic) = self.end() {
                    resume_unwind(panic);
                }
                None
            }
        }
    }
}

impl<T> Drop for StagedEpoch<T> {
    fn drop(&mut self) {
        // A loop that ends early ignores a panic of the reading thread, as it ignores unread batches.
        let _ = self.end();
    }
}

fn copy<T: TensorTree<Owned = T>>(
    epoch: &mut Epoch<T>,
    device: Device,
    batches: &SyncSender<Result<Copied<T>>>,
) {
    for batch in epoch {
        let copied = batch.and_then(|batch| {
            let batch =
                batch.try_map(|data| data.try_map(&mut |tensor| copy_to_device(tensor, device)))?;
            Ok((batch, StreamEvent::record(device)?))
        });
        if batches.send(copied).is_err() {
            // The loop has ended early.
            return;
        }
    }
}
