//! Steps that are recorded once and replayed: [`crate::Accelerator::capture`].
//!
//! A recorded step is a graph and a list of what its parts do on the host at each replay (`AtReplay`, `recorder.rs`):
//! the optimizer writes its rates and counts, the loss check and the scaler fetch their results. Parts add themselves
//! to the list while the job's `Recorder` is on. Recording fails where something waits for the device; nothing has
//! been computed then, and the step runs without a recording.
//!
//! Everything that a step needs from the host is on the device: learning rates (`DeviceRates`, written by a kernel
//! when they change), the loss scale and its growth (`DeviceScale`, updated by PyTorch's kernel), overflows
//! (`found_inf`, by which kernels leave a step out), numbers of steps. Everything that the host needs from a step is
//! fetched into pinned memory behind it and read when the next step is made: the copy is done by then, and nothing
//! waits. Schedules that depend on whether an fp16 step was made are stepped then, too
//! (`GradientAccumulator::settle`); the scale on the host follows the same rule as that on the device. Learning rates
//! are device numbers in steps that are not recorded, too: a kernel gets a number by value as a double, and from
//! memory as a float32, so the two would differ in the last bit.
//!
//! Numbers that a kernel gets by value cannot change in a recording: momenta and weight decays, learning rates of
//! float64 parameters, all numbers of a program's own rule. An optimizer with such numbers cuts the recording
//! (`Recorder::cut`): a replay is then a graph, the optimizer's launches, and a graph. A momentum that has never
//! changed is recorded, and its first change cuts. A momentum on the device would need no cut, but fused kernels do
//! not accept one, and steps by foreach operations read and write four times as much.
//!
//! Batches are copied from the loader's tensors into those that were recorded, within the GPU's memory. A loader that
//! wrote into those tensors would have to wait until the step before has read them, and could not be a batch ahead.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use brigade_torch::{
    Backend, Error, ProcessGroup, Result, StreamEvent, TensorTree, records_graphs,
};
use tch::{Device, Kind, Tensor};

use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::gradients::hook::CommHook;
use crate::job::Job;
use crate::processes::Processes;
use crate::recorder::{Recorded, RecordingGuard};
use crate::sharding::ShardedModels;

/// A training step that is recorded as a CUDA graph and replayed where the device supports it. Made by
/// [`crate::Accelerator::capture`].
#[must_use = "a step does nothing until `run` is called"]
pub struct CapturedStep<'a, B, R> {
    processes: Processes,
    accumulator: GradientAccumulator,
    /// `true` if no line is printed about a step that cannot be recorded.
    quiet: bool,
    body: Body<'a, B, R>,
    /// Recordings by the shapes of the batch.
    recordings: HashMap<Vec<Form>, Recording<B, R>>,
    /// Number of batches that ran without a recording.
    runs: usize,
    /// Reason why steps are not recorded.
    plain: Option<String>,
    /// Error of an invalid setting, which the first run returns.
    refused: Option<Error>,
}

pub(crate) type Body<'a, B, R> = Box<dyn FnMut(&B) -> Result<R> + 'a>;

/// Shape, kind and device of a tensor.
type Form = (Vec<i64>, Kind, Device);

struct Recording<B, R> {
    /// Batch whose tensors the recorded step reads.
    batch: B,
    /// Results whose tensors the recorded step writes.
    results: R,
    /// The recording. `None` after a first run that only initialises memory and kernels.
    recorded: Option<Recorded>,
}

/// Batches that run before the first one is recorded: they make the optimizers' states, the libraries' handles and
/// workspaces, and the reducer's final buckets.
const WARM_UP: usize = 3;

impl<'a, B, R> CapturedStep<'a, B, R>
where
    B: TensorTree<Owned = B>,
    R: TensorTree<Owned = R>,
{
    pub(crate) fn new(
        gradients: &Gradients,
        comm_hook: &CommHook,
        quiet: bool,
        body: Body<'a, B, R>,
    ) -> Self {
        let Gradients { processes, accumulator, sharded, tensor, .. } = gradients;
        let everyone = tensor.as_ref().map_or(processes, |tensor| tensor.everyone());
        let moves = |it: &&Arc<ShardedModels>| !it.sharding().strategy.keeps_parameters_whole();
        CapturedStep {
            refused: sharded.as_ref().filter(moves).map(|sharded| {
                sharded.refuse(
                    "a captured step",
                    "a recording holds the memory of parameters, which moves from unit to unit",
                )
            }),
            plain: cannot_record(gradients, comm_hook),
            processes: everyone.clone(),
            accumulator: accumulator.clone(),
            quiet,
            body,
            recordings: HashMap::new(),
            runs: 0,
        }
    }

    /// Runs the step with this batch. Does not wait for the device.
    ///
    /// # Errors
    /// Returns the errors of the body and of [`crate::PreparedOptimizer::step`], such as a non-finite loss of an
    /// earlier step. [`brigade_torch::ErrorKind::Communication`] if an earlier replay did not complete within the job's
    /// time limit, with the missing ranks. [`brigade_torch::ErrorKind::InvalidArgument`] if the parameters are sharded
    /// between steps; nothing has run then.
    pub fn run(&mut self, batch: &B) -> Result<R> {
        if let Some(error) = &self.refused {
            return Err(Error::invalid_argument(error.to_string()));
        }
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
            // The recording failed before anything was executed.
            None => (self.body)(batch),
        }
    }

    /// Returns `Ok` if steps are recorded as CUDA graphs, otherwise the reason why they are not.
    ///
    /// # Errors
    /// Returns the reason, such as `the device records no graphs`.
    pub fn records(&self) -> Result<(), &str> {
        self.plain.as_deref().map_or(Ok(()), Err)
    }

    /// Discards the recordings, so that the next batches are recorded again. Required after a change of a value that
    /// the body reads on the host, such as a model's training mode.
    pub fn forget(&mut self) {
        self.recordings.clear();
    }

    fn replay(&mut self, forms: &[Form], batch: &B) -> Result<Option<R>> {
        let job = Arc::clone(&self.processes.job);
        // Schedules that had to wait for the last step come first: they may change values that were recorded by value.
        self.accumulator.settle()?;
        let Some(recording) = self.recordings.get_mut(forms) else { return Ok(None) };
        let ready = recording.recorded.as_mut().is_some_and(|it| !it.is_stale());
        recording.fill(batch)?;
        if !ready && !self.record(forms)? {
            return Ok(None);
        }
        let Some(recording) = self.recordings.get_mut(forms) else { return Ok(None) };
        if let Some(recorded) = &mut recording.recorded {
            let group = self.processes.group();
            // Its last collectives may never end, or may have been aborted.
            group.as_ref().map_or(Ok(()), ProcessGroup::watched)?;
            recorded.replay()?;
            if let (Some(group), Some(done)) = (group, StreamEvent::record(job.device)?) {
                group.watch("replay", move || done.is_done())?;
            }
        }
        // The next replay overwrites them.
        copied(&recording.results).map(Some)
    }

    /// Records the step. Returns `false`, after a warning, if it cannot be recorded.
    fn record(&mut self, forms: &[Form]) -> Result<bool> {
        let job: &Arc<Job> = &self.processes.job;
        let Some(Recording { batch, .. }) = self.recordings.remove(forms) else { return Ok(false) };
        let recorded = self.recordings.values().filter_map(|other| other.recorded.as_ref());
        let shared = recorded.filter_map(|other| other.last_graph()).next();
        let body = &mut self.body;
        let recorded = RecordingGuard::begin(&job.recorder, job.device, shared).and_then(|guard| {
            let results = body(&batch);
            // Also ends the recording after a failure, because the stream must leave capture mode. The body's error
            // describes the cause better.
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
        if !self.quiet {
            self.processes.warn(&format!(
                "the training step runs without being recorded as a graph: {reason}"
            ));
        }
        self.plain = Some(reason.to_owned());
    }
}

/// Returns the reason why steps cannot be recorded. `None` if they can.
fn cannot_record(gradients: &Gradients, comm_hook: &CommHook) -> Option<String> {
    let Gradients { processes, accumulator, .. } = gradients;
    let gloo = |group: &ProcessGroup| matches!(group.backend(), Backend::Gloo(_));
    let reason = if !records_graphs(processes.device()) {
        "the device records no graphs"
    } else if accumulator.steps() > 1 {
        "gradients are accumulated over several batches"
    } else if processes.job.debug {
        "debug mode compares ranks before each collective"
    } else if gradients.sharded.is_some() {
        "the optimizer's states are spread over the ranks"
    } else if gradients.tensor.is_some() {
        "ranks divide layers or experts between them, and send messages within the forward"
    } else if gradients.pipeline.is_some() {
        "ranks have stages of models, and send messages within the step"
    } else if gradients.context.is_some() {
        "ranks have parts of each sequence, and send messages within the forward"
    } else if processes.group().as_ref().is_some_and(gloo) {
        "Gloo's messages go through the host"
    } else if !matches!(comm_hook, CommHook::None | CommHook::Fp16 | CommHook::Bf16) {
        "the communication hook runs on the host"
    } else {
        return None;
    };
    Some(reason.to_owned())
}

impl<B: TensorTree<Owned = B>, R> Recording<B, R> {
    /// Copies a batch into the tensors that the recorded step reads.
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
