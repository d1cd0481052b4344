//! Local SGD: each rank trains on its own, and the parameters are averaged every few steps.

use std::fmt;

use brigade_torch::{Error, ReduceOp, Result};

use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::models::{NoSyncGuard, PreparedModels};
use crate::processes::Processes;

/// [Local SGD](https://arxiv.org/abs/1808.07217): gradients are not averaged until it is finished or dropped; the
/// parameters are averaged in every `steps`-th call of [`LocalSgd::step`], and at the end.
///
/// Each rank keeps its own optimizer state. [`crate::Accelerator::local_sgd`] creates it; with one process it has no
/// effect.
#[must_use = "gradients are averaged again when it is dropped"]
pub struct LocalSgd<'a, P: PreparedModels + ?Sized> {
    processes: Processes,
    accumulator: GradientAccumulator,
    models: &'a P,
    steps: usize,
    taken: usize,
    _switched: Option<NoSyncGuard<'a, P>>,
}

impl<'a, P: PreparedModels + ?Sized> LocalSgd<'a, P> {
    pub(crate) fn begin(
        processes: &Processes,
        accumulator: &GradientAccumulator,
        models: &'a P,
        steps: usize,
        enabled: bool,
    ) -> Result<Self> {
        if steps == 0 {
            return Err(Error::invalid_argument(
                "local_sgd: the weights are averaged every 0 steps; 1 averages after every step",
            ));
        }
        let on = enabled && processes.use_distributed();
        Ok(Self {
            processes: processes.clone(),
            accumulator: accumulator.clone(),
            models,
            steps,
            taken: 0,
            _switched: on.then(|| NoSyncGuard::off(models)),
        })
    }
}

impl<P: PreparedModels + ?Sized> LocalSgd<'_, P> {
    /// Counts an optimizer step, and averages the parameters in every `steps`-th one. While batches are being
    /// accumulated it does nothing, as the optimizer does.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn step(&mut self) -> Result<()> {
        if self._switched.is_none() || !self.accumulator.sync_gradients() {
            return Ok(());
        }
        self.taken += 1;
        if self.taken.is_multiple_of(self.steps) { self.average() } else { Ok(()) }
    }

    /// Averages the parameters a last time if steps were made since the last average. Afterwards gradients are averaged
    /// again.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn finish(self) -> Result<()> {
        // Needed even if this rank has made no step since: another may have.
        if self._switched.is_some() { self.average() } else { Ok(()) }
    }

    #[track_caller]
    fn average(&self) -> Result<()> {
        let Some(group) = self.processes.traced() else {
            return Ok(());
        };
        let mut parameters = Vec::new();
        let mut outcome = Ok(());
        self.models.each_parameter(&mut |parameter| match parameter.f_detach() {
            Ok(parameter) => parameters.push(parameter),
            Err(error) => outcome = Err(Error::from(error)),
        });
        outcome?;
        group.all_reduce_coalesced(&mut parameters, ReduceOp::Mean)
    }
}

impl<P: PreparedModels + ?Sized> fmt::Debug for LocalSgd<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSgd")
            .field("steps", &self.steps)
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}
