//! Host work of a step that is recorded once, done each time it is replayed.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use brigade_torch::{Graph, GraphRecording, Result};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

/// Work of the host for a part of a recorded step, done at each replay.
pub(crate) trait AtReplay: Send {
    /// Runs before the step is queued on the device.
    fn before(&mut self) -> Result<()> {
        Ok(())
    }

    /// Runs after the step was queued on the device, which may not have completed it.
    fn after(&mut self) -> Result<()> {
        Ok(())
    }

    /// Queues the device work between two recordings, of a part that was passed to [`Recorder::cut`].
    fn between(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns `true` if a number that was recorded by value has changed, so that the step has to be recorded again.
    fn is_stale(&mut self) -> bool {
        false
    }
}

/// Collects, while a step is recorded, what its parts do at each replay.
#[derive(Default)]
pub(crate) struct Recorder {
    recording: AtomicBool,
    recorded: Mutex<Recorded>,
}

/// A recorded step: graphs, and the work of the host around them.
#[derive(Default)]
pub(crate) struct Recorded {
    parts: Vec<Box<dyn AtReplay>>,
    /// Recorded graphs in order: one more than cuts.
    graphs: Vec<Graph>,
    /// Indices of the parts that run between two graphs.
    cuts: Vec<usize>,
    /// The graph that is being recorded.
    open: Option<GraphRecording>,
}

impl Recorder {
    /// Returns `true` if operations are being recorded and not executed.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    pub(crate) fn at_each_replay(&self, part: impl AtReplay + 'static) {
        self.recorded.lock().parts.push(Box::new(part));
    }

    /// Ends the graph here and begins the next one. At each replay, `part` queues its device work between the two.
    pub(crate) fn cut(&self, part: impl AtReplay + 'static) -> Result<()> {
        let mut recorded = self.recorded.lock();
        recorded.close()?;
        let place = recorded.parts.len();
        recorded.cuts.push(place);
        recorded.parts.push(Box::new(part));
        let before = recorded.graphs.last();
        let device = before.map_or(Device::Cpu, Graph::device);
        let next = GraphRecording::begin(device, before)?;
        recorded.open = Some(next);
        drop(recorded);
        // libtorch warns about a graph without operations, which the one after the last part of a step may be.
        let _ = Tensor::f_zeros([1], (Kind::Float, device))?;
        Ok(())
    }
}

impl Recorded {
    /// Returns one of the step's graphs, whose memory another recording may share.
    pub(crate) fn last_graph(&self) -> Option<&Graph> {
        self.graphs.last()
    }

    fn close(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            self.graphs.push(open.end()?);
        }
        Ok(())
    }

    pub(crate) fn is_stale(&mut self) -> bool {
        // All parts must be called, because each updates its state.
        let stale = self.parts.iter_mut().map(|part| part.is_stale());
        stale.filter(|&stale| stale).count() > 0
    }

    pub(crate) fn replay(&mut self) -> Result<()> {
        for part in &mut self.parts {
            part.before()?;
        }
        for (place, graph) in self.graphs.iter_mut().enumerate() {
            if let Some(part) = place.checked_sub(1).and_then(|cut| self.cuts.get(cut)) {
                self.parts[*part].between()?;
            }
            graph.replay()?;
        }
        for part in &mut self.parts {
            part.after()?;
        }
        Ok(())
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("recording", &self.is_recording()).finish_non_exhaustive()
    }
}

/// Guard that ends the recording when dropped, also after a panic or an error.
pub(crate) struct RecordingGuard<'a>(&'a Recorder);

impl<'a> RecordingGuard<'a> {
    pub(crate) fn begin(
        recorder: &'a Recorder,
        device: Device,
        shared: Option<&Graph>,
    ) -> Result<Self> {
        let open = Some(GraphRecording::begin(device, shared)?);
        *recorder.recorded.lock() = Recorded { open, ..Recorded::default() };
        recorder.recording.store(true, Ordering::Relaxed);
        Ok(Self(recorder))
    }

    pub(crate) fn end(self) -> Result<Recorded> {
        let mut recorded = std::mem::take(&mut *self.0.recorded.lock());
        recorded.close()?;
        Ok(recorded)
    }
}

impl Drop for RecordingGuard<'_> {
    fn drop(&mut self) {
        self.0.recording.store(false, Ordering::Relaxed);
        *self.0.recorded.lock() = Recorded::default();
    }
}
