//! The loop: fastai's events in their order, with cancellations as values.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

use brigade_data::{Batch, DataError};
use brigade_torch::{Error, ErrorKind, Result, TorchError};
use brigade_train::TrainError;

use super::Learner;
use crate::callback::{Callback, Interrupt, IntoCallbacks, Level, Phases, Ranks, Step, call};
use crate::callbacks::Progress as Bars;
use crate::error::LearnError;
use crate::event::Event;
use crate::fit_progress::{FILE, FitProgress};
use crate::hyper::{Hyper, Rates};
use crate::loaders::{Parts, PreparedSource};
use crate::recording::Recording;
use crate::state::{CurrentBatch, LearnerState, Position};

/// Options of a fit besides its number of epochs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FitOptions {
    /// Learning rates of the parameter groups. Defaults to the Learner's.
    pub rates: Option<Rates>,
    /// Weight decay. Defaults to its current value.
    pub weight_decay: Option<f64>,
    /// `true` if the fit begins with a new optimizer. Defaults to `false`.
    pub reset_optimizer: bool,
    /// Number of the first epoch: those before it are left out, and schedules begin at its position. Defaults to 0.
    pub start_epoch: usize,
}

impl Learner {
    /// Trains for a number of epochs at these learning rates. `callbacks` are added for this fit only.
    ///
    /// ```no_run
    /// # fn f(mut learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
    /// learner.fit(2, 1e-3, ())?; // one rate
    /// learner.fit(2, 1e-5..1e-3, ())?; // spread over the parameter groups
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the first error of data, model, optimizer, metric or callback, and fails when a rank is lost.
    #[track_caller]
    pub fn fit(
        &mut self,
        epochs: usize,
        rates: impl Into<Rates>,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        self.fit_with(
            epochs,
            FitOptions { rates: Some(rates.into()), ..Default::default() },
            callbacks,
        )
    }

    /// Trains for a number of epochs as [`Learner::fit`] does, with options.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    #[track_caller]
    pub fn fit_with(
        &mut self,
        epochs: usize,
        options: FitOptions,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        let FitOptions { rates, weight_decay, reset_optimizer, start_epoch } = options;
        let rates = rates.unwrap_or_else(|| self.default_rates());
        let rates = rates.of_groups(self.state.grouped.len())?;
        self.make_optimizer(reset_optimizer, &rates)?;
        if let Some(weight_decay) = weight_decay {
            let all = vec![weight_decay; rates.len()];
            self.state.set_hyper(Hyper::WeightDecay, &all)?;
        }
        self.state.set_hyper(Hyper::Lr, &rates)?;
        let mut own = callbacks.into_callbacks();
        if !self.state.quiet {
            own.push(Box::new(Bars::new()));
        }
        own.push(Box::new(Recording::new(self.recording)));
        self.with_callbacks(own, |learner, callbacks| {
            learner.enter()?;
            // State of an earlier fit, such as one that ended with an error, does not belong to a step of this one.
            let cleared = learner.state.zero_grad();
            let outcome = cleared.and_then(|()| learner.run(epochs, start_epoch, callbacks));
            callbacks.iter_mut().for_each(|callback| callback.ended(&mut learner.state));
            learner.state.batch = CurrentBatch::default();
            learner.state.model.set_sync(true);
            learner.leave();
            outcome
        })
    }

    /// Makes the optimizer of the trained parameters if there is none.
    pub(super) fn make_optimizer(&mut self, reset: bool, rates: &[f64]) -> Result<()> {
        if reset {
            self.state.grouped.reset();
        }
        if self.state.grouped.is_built() {
            Ok(())
        } else {
            self.state.build_optimizer(rates.last().copied().unwrap_or(1e-3))
        }
    }

    /// Runs `body` with the Learner's callbacks and these, in order. The Learner's callbacks are restored also after an
    /// error.
    pub(crate) fn with_callbacks<R>(
        &mut self,
        own: Vec<Box<dyn Callback>>,
        body: impl FnOnce(&mut Self, &mut Vec<Box<dyn Callback>>) -> Result<R>,
    ) -> Result<R> {
        let lasting = self.callbacks.len();
        let mut callbacks: Vec<(usize, Box<dyn Callback>)> =
            std::mem::take(&mut self.callbacks).into_iter().chain(own).enumerate().collect();
        callbacks.sort_by_key(|(_, callback)| callback.order());
        let (places, mut sorted): (Vec<usize>, Vec<Box<dyn Callback>>) =
            callbacks.into_iter().unzip();
        let outcome = catch_unwind(AssertUnwindSafe(|| body(self, &mut sorted)));
        let mut lasted: Vec<(usize, Box<dyn Callback>)> =
            places.into_iter().zip(sorted).filter(|(place, _)| *place < lasting).collect();
        lasted.sort_by_key(|(place, _)| *place);
        self.callbacks = lasted.into_iter().map(|(_, callback)| callback).collect();
        outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn run(
        &mut self,
        epochs: usize,
        start_epoch: usize,
        callbacks: &mut [Box<dyn Callback>],
    ) -> Result<()> {
        let validates = self.prepared.as_ref().is_some_and(|loaders| loaders.valid.is_some());
        self.state.position = Position { epochs, validates, ..Position::default() };
        self.state.ended_on_nan = false;
        let mut fit = Loop { learner: self, callbacks, resumed: None };
        let outcome = fit.level(
            Level::Fit,
            [Event::BeforeFit, Event::AfterCancelFit, Event::AfterFit],
            |fit| fit.epochs(start_epoch),
        );
        fit.settle(outcome)
    }

    /// Runs a pass over data outside of a fit: sends the events of a validation to the callbacks that take part in such
    /// passes, and to these.
    pub(crate) fn evaluate(
        &mut self,
        source: &dyn PreparedSource,
        own: Vec<Box<dyn Callback>>,
    ) -> Result<()> {
        self.with_callbacks(own, |learner, callbacks| {
            let before = learner.state.position;
            learner.state.position =
                Position { validates: true, evaluating: true, epochs: 1, ..Position::default() };
            let mut fit = Loop { learner, callbacks, resumed: None };
            let outcome = fit.validation(Some(source.begin()), source.batches());
            let settled = fit.settle(outcome);
            callbacks.iter_mut().for_each(|callback| callback.ended(&mut learner.state));
            learner.state.batch = CurrentBatch::default();
            learner.state.position = before;
            settled
        })
    }
}

/// A running fit.
struct Loop<'a> {
    learner: &'a mut Learner,
    callbacks: &'a mut [Box<dyn Callback>],
    /// Checkpoint from which the next epoch's training resumes.
    resumed: Option<(PathBuf, FitProgress)>,
}

impl Loop<'_> {
    /// Runs a part of the fit with its events. The after-event is sent whether the part was cancelled or not.
    /// Cancellations and errors at an after-event apply to the enclosing parts.
    fn level(
        &mut self,
        level: Level,
        [before, after_cancel, after]: [Event; 3],
        body: impl FnOnce(&mut Self) -> Step,
    ) -> Step {
        let outcome = match self.fire(before) {
            Ok(()) => body(self),
            interrupted => interrupted,
        };
        match outcome {
            Err(Interrupt::Cancel(cancelled)) if cancelled == level => self.fire(after_cancel)?,
            other => other?,
        }
        self.fire(after)
    }

    /// Converts the outcome of the outermost part to a result: a cancellation there had nothing to cancel.
    fn settle(&self, outcome: Step) -> Result<()> {
        match outcome {
            Ok(()) => Ok(()),
            Err(Interrupt::Failed(error)) => Err(error),
            Err(Interrupt::Cancel(level)) => {
                Err(TorchError::Internal(format!("the cancellation of a {level} left the fit"))
                    .into())
            }
        }
    }

    /// Calls the callbacks of an event in order, up to the first that interrupts.
    fn fire(&mut self, event: Event) -> Step {
        let Learner { state, .. } = &mut *self.learner;
        match event {
            Event::AfterCancelTrain => state.position.train_cancelled = true,
            Event::AfterCancelValidate => state.position.validation_cancelled = true,
            // Before the callbacks, as fastai's TrainEvalCallback does.
            Event::AfterBatch if state.position.training => {
                let steps = state.position.batches * state.position.epochs;
                state.position.train_iter += 1;
                state.position.progress += 1.0 / steps.max(1) as f64;
            }
            _ => {}
        }
        let position = state.position;
        let main = state.accelerator.is_main_process();
        for callback in self.callbacks.iter_mut() {
            let hears = match callback.phases() {
                Phases::Both => true,
                Phases::Train => position.training,
                Phases::Validate => !position.training,
            };
            if (event.is_inner() && !hears) || (position.evaluating && !callback.in_evaluation()) {
                continue;
            }
            let outcome = match callback.ranks() {
                Ranks::All => call(&mut **callback, event, state),
                Ranks::Main if main => match call(&mut **callback, event, state) {
                    Err(Interrupt::Cancel(level)) => {
                        Err(Interrupt::Failed(Error::invalid_argument(format!(
                            "it cancelled the {level}, but is called on rank 0 alone; return another \
                             `Ranks` from its method `ranks`"
                        ))))
                    }
                    other => other,
                },
                Ranks::Main => Ok(()),
                Ranks::Any(events) => {
                    let outcome = call(&mut **callback, event, state);
                    // Ranks may have unequal numbers of validation batches: they synchronise after the last one.
                    let agrees = position.training || !event.is_inner();
                    match (agrees && events.contains(&event), outcome) {
                        (true, Ok(())) => agreed(state.accelerator(), None),
                        (true, Err(Interrupt::Cancel(level))) => {
                            agreed(state.accelerator(), Some(level))
                        }
                        (_, outcome) => outcome,
                    }
                }
            };
            match outcome {
                Ok(()) => {}
                Err(Interrupt::Cancel(level)) if !runs(level, event, position) => {
                    return Err(Interrupt::Failed(
                        LearnError::Cancel { callback: callback.name(), level, event }.into(),
                    ));
                }
                Err(Interrupt::Failed(source)) => {
                    return Err(Interrupt::Failed(named(source, callback.name(), event)));
                }
                cancelled => return cancelled,
            }
        }
        match state.save.take() {
            Some((folder, fit)) => Ok(self.save(&folder, fit, event)?),
            None => Ok(()),
        }
    }

    /// Saves a checkpoint with the state of the Learner and its callbacks. Every rank takes part.
    fn save(&mut self, folder: &Path, fit: usize, event: Event) -> Result<()> {
        let state = &mut self.learner.state;
        let mut callbacks = Vec::new();
        for callback in self.callbacks.iter_mut() {
            if let Some(kept) = callback.state(state)? {
                callbacks.push((callback.name(), kept.to_string()));
            }
        }
        let Position { epochs, epoch, iter, batches, train_iter, progress, .. } = state.position;
        let (epoch, batch) = match event {
            Event::AfterCancelFit => (epochs, 0),
            Event::AfterEpoch => (epoch + 1, 0),
            _ => (epoch, iter + 1),
        };
        let recorder = state.recorder.clone();
        let kept = FitProgress {
            fit,
            epochs,
            epoch,
            batch,
            batches,
            train_iter,
            progress,
            recorder,
            callbacks,
        };
        let bytes = rmp_serde::to_vec_named(&kept).map_err(Error::custom)?;
        let main = state.accelerator.is_main_process();
        let hook = state.accelerator.checkpoints().register_save_hook(move |folder| {
            if main {
                std::fs::write(folder.join(FILE), &bytes)?;
            }
            Ok(())
        });
        let saved = state.accelerator.save_state(folder);
        hook.remove();
        saved?;
        Ok(())
    }

    /// Resumes from a checkpoint. Every rank takes part.
    fn go_on(&mut self, folder: &Path, progress: FitProgress) -> Result<()> {
        let state = &mut self.learner.state;
        state.accelerator.load_state(folder)?;
        state.grouped.read_back()?;
        let FitProgress {
            epoch, batch, batches, train_iter, progress, recorder, callbacks, ..
        } = progress;
        let place = if epoch < state.position.epochs {
            format!("epoch {epoch}, batch {batch}")
        } else {
            "the end of the fit".to_owned()
        };
        state.position.epoch = epoch.min(state.position.epochs.saturating_sub(1));
        state.recorder = recorder;
        state.position.train_iter = train_iter;
        if batch > 0 {
            state.position.batches = batches;
            state.position.progress = progress;
        }
        for callback in self.callbacks.iter_mut() {
            let name = callback.name();
            let kept = callbacks.iter().find(|(known, _)| *known == name);
            if let Some((_, kept)) = kept {
                let kept = serde_json::from_str(kept)
                    .map_err(|error| Error::new(ErrorKind::Checkpoint, error))?;
                callback.load_state(state, &kept)?;
            }
        }
        state.println(format!("Continuing from {} at {place}", folder.display()));
        Ok(())
    }

    fn epochs(&mut self, start: usize) -> Step {
        let epochs = self.learner.state.position.epochs;
        let resumed = match self.learner.state.resume.take() {
            // A later fit was interrupted, so this one is complete.
            Some((_, false, _)) => return Level::Fit.cancel(),
            Some((folder, true, progress)) if progress.epoch >= epochs => {
                return Ok(self.go_on(&folder, progress)?);
            }
            Some((folder, true, progress)) => Some((folder, progress)),
            None => None,
        };
        let first = resumed.as_ref().map_or(0, |(_, progress)| progress.epoch);
        self.resumed = resumed;
        for epoch in first..epochs {
            let position = &mut self.learner.state.position;
            position.epoch = epoch;
            (position.train_cancelled, position.validation_cancelled) = (false, false);
            let skipped = epoch < start;
            self.level(
                Level::Epoch,
                [Event::BeforeEpoch, Event::AfterCancelEpoch, Event::AfterEpoch],
                |fit| {
                    if skipped {
                        return Level::Epoch.cancel();
                    }
                    fit.training()?;
                    let valid = fit.learner.prepared.as_ref().and_then(|it| it.valid.as_ref());
                    match valid.map(|valid| valid.batches()) {
                        Some(batches) => {
                            let items = valid.map(|valid| valid.begin());
                            fit.validation(items, batches)
                        }
                        None => Ok(()),
                    }
                },
            )?;
        }
        Ok(())
    }

    fn training(&mut self) -> Step {
        let state = &mut self.learner.state;
        state.model.set_training(true);
        let Some(loaders) = &self.learner.prepared else { return Ok(()) };
        let position = &mut state.position;
        position.training = true;
        position.batches = loaders.train.batches();
        position.progress = position.epoch as f64 / position.epochs as f64;
        self.level(
            Level::Train,
            [Event::BeforeTrain, Event::AfterCancelTrain, Event::AfterTrain],
            |fit| {
                if let Some((folder, progress)) = fit.resumed.take() {
                    fit.go_on(&folder, progress)?;
                }
                let Some(loaders) = &fit.learner.prepared else { return Ok(()) };
                let items = loaders.train.begin();
                fit.batches(items)
            },
        )
    }

    fn validation(
        &mut self,
        items: Option<Box<dyn Iterator<Item = Result<Batch<Parts>>>>>,
        batches: usize,
    ) -> Step {
        let state = &mut self.learner.state;
        // Ranks may have unequal numbers of batches, or none.
        state.model.broadcast_buffers()?;
        state.model.set_training(false);
        state.position.training = false;
        state.position.batches = batches;
        let Some(items) = items else { return Ok(()) };
        let _without_autograd = tch::no_grad_guard();
        self.level(
            Level::Validate,
            [Event::BeforeValidate, Event::AfterCancelValidate, Event::AfterValidate],
            |fit| {
                let cancelled = match fit.batches(items) {
                    Ok(()) => None,
                    Err(Interrupt::Cancel(level)) => Some(level),
                    failed => return failed,
                };
                // A rank without a batch receives the cancellation of another rank here.
                agreed(fit.learner.state.accelerator(), cancelled)
            },
        )
    }

    fn batches(&mut self, items: Box<dyn Iterator<Item = Result<Batch<Parts>>>>) -> Step {
        for batch in items {
            let state = &mut self.learner.state;
            let batch = batch?;
            // The index includes the batches that a resumed epoch skips.
            state.position.iter = batch.index();
            if !state.position.training && batch.valid() == 0 {
                // The other ranks gather the model's parts for their batches.
                let Parts { inputs, .. } = batch.into_data();
                drop(state.model.forward(&inputs)?);
                continue;
            }
            let (rank, world) = (
                state.accelerator.data_processes().process_index(),
                state.accelerator.data_processes().num_processes(),
            );
            state.batch = CurrentBatch::of(batch, rank, world);
            if !state.position.training {
                state.batch.leave_out_duplicates()?;
            }
            self.level(
                Level::Batch,
                [Event::BeforeBatch, Event::AfterCancelBatch, Event::AfterBatch],
                Self::batch,
            )?;
        }
        Ok(())
    }

    fn batch(&mut self) -> Step {
        let state = &mut self.learner.state;
        state.batch.predictions = Some(state.model.forward(&state.batch.inputs)?);
        self.fire(Event::AfterPred)?;
        self.learner.state.compute_loss()?;
        self.fire(Event::AfterLoss)?;
        let state = &self.learner.state;
        if !state.position.training {
            return Ok(());
        }
        if state.batch.loss_grad.is_none() {
            return Err(Interrupt::Failed(Error::invalid_argument(
                "a training batch has no targets, and no callback has set a loss: there is nothing to train on; \
                 give the training loader batches `(input, target)`",
            )));
        }
        self.level(
            Level::Backward,
            [Event::BeforeBackward, Event::AfterCancelBackward, Event::AfterBackward],
            |fit| {
                let state = &mut fit.learner.state;
                match state.batch.loss_grad.take() {
                    Some(loss) => {
                        let backward = state.accelerator.backward(&loss);
                        ends_on_nan(state, backward)?;
                        Ok(state.model.reduce_replicas()?)
                    }
                    None => Ok(()),
                }
            },
        )?;
        self.level(
            Level::Step,
            [Event::BeforeStep, Event::AfterCancelStep, Event::AfterStep],
            |fit| {
                let stepped = fit.learner.state.grouped.step();
                ends_on_nan(&mut fit.learner.state, stepped)
            },
        )?;
        Ok(self.learner.state.grouped.zero_grad()?)
    }
}

/// Ends the fit if the error is a loss that is not finite. The error is the same on every rank, so all end the fit at
/// the same place.
fn ends_on_nan(state: &mut LearnerState, outcome: Result<()>) -> Step {
    match outcome {
        Err(error)
            if state.ends_on_nan
                && matches!(
                    error.downcast_ref(),
                    Some(TrainError::LossNotFinite { .. } | TrainError::NotFinite { .. })
                ) =>
        {
            state.println(error);
            state.ended_on_nan = true;
            Level::Fit.cancel()
        }
        outcome => Ok(outcome?),
    }
}

/// Returns `true` if a part of the fit runs at an event, so that it can be cancelled there. At the events that end a
/// part only the enclosing parts run.
fn runs(level: Level, event: Event, position: Position) -> bool {
    use Event as E;
    let in_batch = event.is_inner() && !matches!(event, E::AfterBatch | E::AfterCancelBatch);
    let in_backward = matches!(event, E::BeforeBackward);
    let in_step = matches!(event, E::BeforeStep);
    let inner = event.is_inner();
    match level {
        Level::Batch => in_batch,
        Level::Backward => in_backward,
        Level::Step => in_step,
        Level::Train => event == E::BeforeTrain || (inner && position.training),
        Level::Validate => event == E::BeforeValidate || (inner && !position.training),
        Level::Epoch => {
            !position.evaluating
                && !matches!(
                    event,
                    E::BeforeFit
                        | E::AfterCancelEpoch
                        | E::AfterEpoch
                        | E::AfterCancelFit
                        | E::AfterFit
                )
        }
        Level::Fit => !position.evaluating && !matches!(event, E::AfterCancelFit | E::AfterFit),
    }
}

/// Returns the outermost level that any rank cancels, on all ranks.
fn agreed(accelerator: &brigade_train::Accelerator, mine: Option<Level>) -> Step {
    const OUTERMOST_FIRST: [Level; 7] = [
        Level::Fit,
        Level::Epoch,
        Level::Validate,
        Level::Train,
        Level::Step,
        Level::Backward,
        Level::Batch,
    ];
    if !accelerator.processes().use_distributed() {
        return mine.map_or(Ok(()), Level::cancel);
    }
    let mine = mine.and_then(|level| OUTERMOST_FIRST.iter().position(|it| *it == level));
    let all = accelerator.processes().gather_object(mine)?;
    match all.into_iter().flatten().min() {
        Some(index) => OUTERMOST_FIRST[index].cancel(),
        None => Ok(()),
    }
}

/// Adds the callback's name to an error of the callback. Errors of the ranks, the data or the tensors are returned
/// unchanged.
fn named(source: Error, callback: String, event: Event) -> Error {
    let own = match source.kind() {
        ErrorKind::InvalidArgument | ErrorKind::Custom => {
            source.downcast_ref::<DataError>().is_none()
        }
        _ => matches!(source.downcast_ref(), Some(LearnError::File { .. } | LearnError::Plot(_))),
    };
    if own { LearnError::Callback { callback, event, source }.into() } else { source }
}
