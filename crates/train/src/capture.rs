//! Steps that are recorded once and replayed: [`Accelerator::capture`].

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use brigade_torch::{
    Backend, Device, Graph, GraphRecording, Kind, ProcessGroup, StreamEvent, Tensor, TensorTree,
    records_graphs,
};

use crate::accelerator::{Accelerator, Job};
use crate::error::Result;
use crate::gradients::hook::CommHook;

/// What a part of a recorded step has to do on the host at each replay.
pub(crate) trait AtReplay: Send {
    /// Before the device is given the step.
    fn before(&mut self) -> Result<()> {
        Ok(())
    }

    /// After it was given the step; it may not be done.
    fn after(&mut self) -> Result<()> {
        Ok(())
    }

    /// What is given to the device between two recordings: of a part that [`Recorder::cut`] was given.
    fn between(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether a number that was recorded by value has changed, so that the step has to be recorded again.
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

/// A step as far as it is recorded: graphs, and what happens around them.
#[derive(Default)]
struct Recorded {
    parts: Vec<Box<dyn AtReplay>>,
    /// One more than cuts, in their order.
    graphs: Vec<Graph>,
    /// Which parts come between two graphs.
    cuts: Vec<usize>,
    /// The graph that is being recorded.
    open: Option<GraphRecording>,
}

impl Recorder {
    /// Whether what is called now is recorded and not done.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
    }

    pub(crate) fn at_each_replay(&self, part: impl AtReplay + 'static) {
        self.recorded().parts.push(Box::new(part));
    }

    /// Ends the graph here and begins the next one: `part` gives the device its work between the two, at each replay.
    pub(crate) fn cut(&self, part: impl AtReplay + 'static) -> Result<()> {
        let mut recorded = self.recorded();
        recorded.close()?;
        let place = recorded.parts.len();
        recorded.cuts.push(place);
        recorded.parts.push(Box::new(part));
        let before = recorded.graphs.last();
        let device = before.map_or(Device::Cpu, Graph::device);
        let next = GraphRecording::begin(device, before)?;
        recorded.open = Some(next);
        drop(recorded);
        // libtorch warns of a graph without operations, as the one behind the last part of a step may be.
        let _ = Tensor::f_zeros([1], (Kind::Float, device))?;
        Ok(())
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recorded {
    fn close(&mut self) -> Result<()> {
        if let Some(open) = self.open.take() {
            self.graphs.push(open.end()?);
        }
        Ok(())
    }

    fn is_stale(&mut self) -> bool {
        // All are asked, because each takes note.
        let stale = self.parts.iter_mut().map(|part| part.is_stale());
        stale.filter(|&stale| stale).count() > 0
    }

    fn replay(&mut self) -> Result<()> {
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

/// Ends the recording also by a panic or an error.
struct RecordingGuard<'a>(&'a Recorder);

impl<'a> RecordingGuard<'a> {
    fn begin(recorder: &'a Recorder, device: Device, shared: Option<&Graph>) -> Result<Self> {
        let open = Some(GraphRecording::begin(device, shared)?);
        *recorder.recorded() = Recorded { open, ..Recorded::default() };
        recorder.recording.store(true, Ordering::Relaxed);
        Ok(Self(recorder))
    }

    fn end(self) -> Result<Recorded> {
        let mut recorded = std::mem::take(&mut *self.0.recorded());
        recorded.close()?;
        Ok(recorded)
    }
}

impl Drop for RecordingGuard<'_> {
    fn drop(&mut self) {
        self.0.recording.store(false, Ordering::Relaxed);
        *self.0.recorded() = Recorded::default();
    }
}

impl Accelerator {
    /// Makes a whole training step one call of the GPU's driver: forward, backward, reduction, clipping, optimizer and
    /// loss scale are recorded as a CUDA graph, and replayed for each further batch. For small networks, whose kernels
    /// take less time than their launches.
    ///
    /// The first three batches run as they are, then the step is recorded, and from the fourth on it is replayed; a
    /// batch of other shapes runs once and is recorded, too. The losses are those of the step that is not recorded, bit
    /// for bit. What changes from step to step lies on the device: the batch, which is copied into the tensors that were
    /// recorded, learning rates, the loss scale with its overflows, counts of steps, and random numbers, so that dropout
    /// differs between replays.
    ///
    /// The body gets a batch and returns tensors, such as the loss; [`CapturedStep::run`] returns copies of them. It is
    /// called for the first batches only. So what it does on the host is done once, or in other words: values that it
    /// reads from tensors, branches, counters, and messages belong behind `run`. Schedules may step in the body or
    /// behind it. Its models must be in training mode or not as they were when it was recorded
    /// ([`CapturedStep::forget`] has it recorded again). A momentum or a weight decay that has changed has it recorded
    /// again by itself, once: from then on the optimizer is called between two recordings, at each step, since its
    /// kernels have those numbers by value. So are optimizers of float64 parameters, and rules of one's own that take no
    /// numbers from the device.
    ///
    /// Where a step cannot be recorded it runs as it is: on a CPU, with Gloo between several ranks, with accumulation
    /// over several batches, with communication hooks of one's own, in debug mode, and after an operation that waits
    /// for the device, of which a line on standard error tells once.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_train::{Accelerator, Adam, Kind, Tensor};
    ///
    /// let accelerator = Accelerator::new()?;
    /// let model = Model::new(|p| Linear::new(p, 4, 2))?;
    /// let optimizer = Adam::default().build(&model)?;
    /// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
    ///     let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
    ///     optimizer.zero_grad()?;
    ///     accelerator.backward(&loss)?;
    ///     optimizer.step()?;
    ///     Ok(loss)
    /// });
    /// let inputs = Tensor::ones([8, 4], (Kind::Float, accelerator.device()));
    /// let labels = Tensor::zeros([8], (Kind::Int64, accelerator.device()));
    /// let first = step.run(&(inputs.shallow_clone(), labels.shallow_clone()))?;
    /// let second = step.run(&(inputs, labels))?;
    /// assert!(second.double_value(&[]) < first.double_value(&[]));
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn capture<'a, B, R>(
        &self,
        body: impl FnMut(&B) -> Result<R> + 'a,
    ) -> CapturedStep<'a, B, R>
    where
        B: TensorTree<Owned = B>,
        R: TensorTree<Owned = R>,
    {
        CapturedStep {
            plain: self.cannot_record(),
            accelerator: self.clone(),
            body: Box::new(body),
            recordings: HashMap::new(),
            runs: 0,
        }
    }

    /// Why steps run as they are; `None` where they can be recorded.
    fn cannot_record(&self) -> Option<String> {
        let gloo = |group: &ProcessGroup| matches!(group.backend(), Backend::Gloo(_));
        let reason = if !records_graphs(self.device()) {
            "the device records no graphs"
        } else if self.accumulator.steps() > 1 {
            "gradients are accumulated over several batches"
        } else if self.processes.job.debug {
            "debug mode compares ranks before each collective"
        } else if self.group().as_ref().is_some_and(gloo) {
            "Gloo's messages go through the host"
        } else if !matches!(
            self.options.comm_hook,
            CommHook::None | CommHook::Fp16 | CommHook::Bf16
        ) {
            "the communication hook runs on the host"
        } else {
            return None;
        };
        Some(reason.to_owned())
    }
}

/// A training step that is recorded and replayed where the device can; made by [`Accelerator::capture`].
#[must_use = "a step does nothing until `run` is called"]
pub struct CapturedStep<'a, B, R> {
    accelerator: Accelerator,
    body: Body<'a, B, R>,
    /// By the shapes of the batch.
    recordings: HashMap<Vec<Form>, Recording<B, R>>,
    /// Batches that ran as they are.
    runs: usize,
    /// Why nothing is recorded.
    plain: Option<String>,
}

type Body<'a, B, R> = Box<dyn FnMut(&B) -> Result<R> + 'a>;

/// A tensor's shape, kind and place.
type Form = (Vec<i64>, Kind, Device);

struct Recording<B, R> {
    /// Where the step has its batch from.
    batch: B,
    /// Where it leaves its results.
    results: R,
    /// `None` where the step ran once, so that its memory and kernels are there.
    recorded: Option<Recorded>,
}

/// Batches that run before the first one is recorded: they make the optimizers' states, the libraries' handles and
/// workspaces, and the reducer's final buckets.
const WARM_UP: usize = 3;

impl<B, R> CapturedStep<'_, B, R>
where
    B: TensorTree<Owned = B>,
    R: TensorTree<Owned = R>,
{
    /// Makes the step with this batch. Does not wait for the device.
    ///
    /// # Errors
    /// Those of the body, and of [`crate::PreparedOptimizer::step`]: a non-finite loss of an earlier step among them.
    /// [`crate::Error::Torch`] where an earlier replay was not done within the job's time limit, with the ranks that did
    /// not come.
    pub fn run(&mut self, batch: &B) -> Result<R> {
        if self.plain.is_some() {
            return (self.body)(batch);
        }
        let forms = forms(batch)?;
        let known = self.recordings.contains_key(&forms);
        if self.runs < WARM_UP || !known {
            self.runs += 1;
            let results = (self.body)(batch)?;
            if self.runs >= WARM_UP {
                let recording =
                    Recording { batch: copied(batch)?, results: copied(&results)?, recorded: None };
                self.recordings.insert(forms, recording);
            }
            return Ok(results);
        }
        match self.replay(&forms, batch)? {
            Some(results) => Ok(results),
            // The recording failed, and nothing was done.
            None => (self.body)(batch),
        }
    }

    /// Whether steps are recorded here, and if not, why.
    ///
    /// # Errors
    /// The reason, such as `the device records no graphs`.
    pub fn records(&self) -> Result<(), &str> {
        self.plain.as_deref().map_or(Ok(()), Err)
    }

    /// Drops what was recorded: the next batches are recorded again. After something changed that the body reads on the
    /// host, such as a model's training mode.
    pub fn forget(&mut self) {
        self.recordings.clear();
    }

    fn replay(&mut self, forms: &[Form], batch: &B) -> Result<Option<R>> {
        let job = Arc::clone(&self.accelerator.processes.job);
        // Schedules that had to wait for the last step come first: they may change what was recorded by value.
        self.accelerator.accumulator.settle()?;
        let Some(recording) = self.recordings.get_mut(forms) else { return Ok(None) };
        let ready = recording.recorded.as_mut().is_some_and(|it| !it.is_stale());
        recording.fill(batch)?;
        if !ready && !self.record(forms)? {
            return Ok(None);
        }
        let Some(recording) = self.recordings.get_mut(forms) else { return Ok(None) };
        if let Some(recorded) = &mut recording.recorded {
            let group = self.accelerator.group();
            // Its last collectives may never end, or have been aborted.
            group.as_ref().map_or(Ok(()), ProcessGroup::watched)?;
            recorded.replay()?;
            if let (Some(group), Some(done)) = (group, StreamEvent::record(job.device)?) {
                group.watch("replay", move || done.is_done())?;
            }
        }
        // The next replay writes over them.
        copied(&recording.results).map(Some)
    }

    /// Records the step; false, with a warning, where it cannot be.
    fn record(&mut self, forms: &[Form]) -> Result<bool> {
        let job: &Arc<Job> = &self.accelerator.processes.job;
        let Some(Recording { batch, .. }) = self.recordings.remove(forms) else { return Ok(false) };
        let recorded = self.recordings.values().filter_map(|other| other.recorded.as_ref());
        let shared = recorded.filter_map(|other| other.graphs.last()).next();
        let body = &mut self.body;
        let recorded = RecordingGuard::begin(&job.recorder, job.device, shared).and_then(|guard| {
            let results = body(&batch);
            // Also after a failure: the stream has to leave the recording. Which of both is the reason, the body
            // says better.
            let recorded = guard.end();
            let results = results?;
            Ok((recorded?, results))
        });
        match recorded {
            Ok((recorded, results)) => {
                let recording = Recording { batch, results, recorded: Some(recorded) };
                self.recordings.insert(forms.to_vec(), recording);
                Ok(true)
            }
            Err(error) => {
                self.run_plainly(&error.to_string());
                Ok(false)
            }
        }
    }

    fn run_plainly(&mut self, reason: &str) {
        self.recordings.clear();
        self.accelerator
            .warn(&format!("the training step runs without being recorded as a graph: {reason}"));
        self.plain = Some(reason.to_owned());
    }
}

impl<B: TensorTree<Owned = B>, R> Recording<B, R> {
    /// Copies a batch to where the step reads it.
    fn fill(&self, batch: &B) -> Result<()> {
        let mut places = Vec::new();
        self.batch.visit(&mut |tensor| places.push(tensor.shallow_clone()));
        let mut places = places.into_iter();
        let mut outcome = Ok(());
        batch.visit(&mut |tensor| {
            if let (Some(mut place), true) = (places.next(), outcome.is_ok()) {
                outcome = tch::no_grad(|| place.f_copy_(tensor));
            }
        });
        Ok(outcome?)
    }
}

fn copied<T: TensorTree<Owned = T>>(tree: &T) -> Result<T> {
    tch::no_grad(|| {
        tree.try_map(&mut |tensor| {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(&tensor.f_detach()?)?;
            Ok(copy)
        })
    })
}

fn forms(tree: &impl TensorTree) -> Result<Vec<Form>> {
    let mut forms = Vec::new();
    let mut outcome = Ok(());
    tree.visit(&mut |tensor: &Tensor| match tensor.f_kind() {
        Ok(kind) => forms.push((tensor.size(), kind, tensor.device())),
        Err(error) => outcome = Err(error),
    });
    outcome?;
    Ok(forms)
}

impl<B, R> fmt::Debug for CapturedStep<'_, B, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedStep")
            .field("recordings", &self.recordings.len())
            .field("plain", &self.plain)
            .finish_non_exhaustive()
    }
}
