//! An epoch's batches on their way to a GPU, one ahead of the loop.

use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use brigade_data::{Batch, DataError, Epoch};
use brigade_torch::{CopyStream, Device, DeviceExt, Staged, StreamEvent, TensorTree};

use crate::error::{Error, Result};

/// Copies go through pinned memory on a stream of their own, so that neither the host nor the computation waits
/// for them. The thread also takes the copy into pinned memory, some milliseconds for a batch of images, off the
/// training thread.
pub(super) struct StagedEpoch<T> {
    /// `None` once the epoch has ended.
    batches: Option<Receiver<Result<Batch<Staged<T>>>>>,
    thread: Option<JoinHandle<()>>,
    /// Why there is no thread.
    failed: Option<Error>,
    remaining: Option<usize>,
}

impl<T: TensorTree<Owned = T> + Send + 'static> StagedEpoch<T> {
    /// Begins an epoch in the thread that reads it, since not every epoch may change threads, and returns when
    /// it has begun.
    pub(super) fn new(begin: impl FnOnce() -> Epoch<T> + Send + 'static, device: Device) -> Self {
        // No capacity: the thread holds the next batch until the loop takes it, and reads no further.
        let (sender, receiver) = sync_channel(0);
        let (begun, remaining) = sync_channel(1);
        // What this thread has given the device may be the data set itself.
        let given = StreamEvent::record(device);
        let thread = thread::Builder::new().name("brigade-copies".to_owned()).spawn(move || {
            match entered(device, given) {
                Ok(Some(stream)) => {
                    let epoch = begin();
                    let _ = begun.send(epoch.remaining());
                    copy(epoch, stream, &sender);
                }
                Ok(None) => {}
                Err(error) => {
                    let _ = begun.send(Some(1));
                    let _ = sender.send(Err(error.into()));
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

    /// Ends the thread, which may be reading a batch; a panic of it goes on here.
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
            Ok(batch) => Some(
                batch
                    .and_then(|batch| batch.try_map(|staged| staged.finish().map_err(Error::from))),
            ),
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
        // A loop that ends early leaves a panic of the reading thread unseen, as it leaves batches unread.
        let _ = self.end();
    }
}

/// Makes a stream of the device this thread's own, behind what another thread has given the device.
fn entered(
    device: Device,
    given: brigade_torch::Result<Option<StreamEvent>>,
) -> brigade_torch::Result<Option<CopyStream>> {
    device.make_current()?;
    let Some(stream) = CopyStream::of(device)? else { return Ok(None) };
    stream.enter()?;
    if let Some(given) = given? {
        given.follow()?;
    }
    Ok(Some(stream))
}

/// Waits for what the device was given before the epoch, which is declared earlier and so dropped later: kernels read
/// the data set's memory.
struct Entered(CopyStream);

impl Drop for Entered {
    fn drop(&mut self) {
        // A kernel that has failed is an error of what comes next on the device.
        let _ = self.0.wait();
    }
}

fn copy<T: TensorTree<Owned = T>>(
    mut epoch: Epoch<T>,
    stream: CopyStream,
    batches: &SyncSender<Result<Batch<Staged<T>>>>,
) {
    let stream = Entered(stream);
    for batch in &mut epoch {
        let batch = batch
            .map_err(Error::from)
            .and_then(|batch| batch.try_map(|data| stream.0.start(&data).map_err(Error::from)));
        if batches.send(batch).is_err() {
            // The loop has ended early.
            return;
        }
    }
}
