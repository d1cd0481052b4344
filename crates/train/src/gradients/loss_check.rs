//! A non-finite loss is an error on every rank, before a weight changes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use brigade_optim::Optimizer;
use brigade_torch::{
    Error, Fetch, LossFlag, NamedTensor, ProcessGroup, Result, Store, first_elements_are_finite,
    first_elements_not_finite, gradient,
};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::error::TrainError;
use crate::gradients::hook::StatefulHook;
use crate::job::Job;
use crate::recorder::AtReplay;
use crate::sharding::ShardedModels;

/// Checks the losses of one [`crate::Accelerator`].
///
/// With one process on a CPU, the loss is checked before the backward. With several ranks the check sends no
/// message: on a rank whose loss is not finite the backward writes NaN into the first element of one gradient
/// ([`LossFlag`]), the reduction carries it to all ranks, and after the backward each rank checks the first
/// elements of the reduced gradients. So a rank without this check (PyTorch's own) can be a member. The rank of
/// the loss is in the store, which is read only after a failure.
///
/// On a GPU the check does not synchronise: the flag is computed and checked by kernels, and the result is read
/// before the next step.
pub(crate) struct LossCheck {
    job: Weak<Job>,
    rank: usize,
    /// This check's number in the job, by which its keys in the store differ: ranks create them in the same order.
    number: u64,
    device: Device,
    /// `true` if the result is read at the next step.
    later: bool,
    /// Store for the rank of a non-finite loss. `None` with one rank.
    store: Option<Store>,
    state: Mutex<State>,
    models: Mutex<Vec<Weak<CheckedModel>>>,
    /// Sharded models. Their reductions carry a flag only to the rank that has the flagged row.
    sharded: Option<Arc<ShardedModels>>,
    optimizers: Mutex<Vec<Weak<CheckedOptimizer>>>,
}

#[derive(Default)]
struct State {
    /// Number of backwards of this rank: an optimizer stores the number at which its gradients were cleared.
    backwards: u64,
    /// Number of backwards in which gradients were reduced: the same on all ranks.
    reductions: u64,
    /// `true` if a loss since the last reduction was not finite on this rank.
    own: bool,
    /// As `own`, on a device that is not synchronised: a flag tensor.
    own_later: Option<Tensor>,
    /// Last result of the check.
    found: Option<Found>,
    pending: VecDeque<Pending>,
}

impl State {
    fn forget_own(&mut self) {
        self.own = false;
        self.own_later = None;
    }
}

/// A loss that was not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// Rank that reported it. `None` if no rank did: a rank without this check, or a gradient that overflowed under a
    /// finite loss.
    rank: Option<usize>,
    /// Number of the step that used its gradients, if a step did.
    used: Option<u64>,
}

/// A result that is being copied from a device. Bit 0 is set if a reduced gradient was not finite, bit 1 if a loss of
/// this rank was not.
struct Pending {
    backward: u64,
    reduction: u64,
    fetch: Fetch,
    /// `true` if an optimizer has stepped before the result was read.
    passed: bool,
    /// Number of that step, if it used the gradients.
    used: Option<u64>,
}

/// A prepared model whose gradients are reduced.
pub(crate) struct CheckedModel {
    flag: LossFlag,
    parameters: Mutex<Vec<Tensor>>,
    /// `true` if the backward of the last forward reduces gradients.
    reduces: AtomicBool,
    hook: Option<Arc<dyn StatefulHook>>,
}

/// A prepared optimizer, for as long as the program has it.
#[derive(Debug)]
pub(crate) struct CheckedOptimizer {
    optimizer: Optimizer,
    /// Number of backwards when the gradients were last cleared.
    cleared: AtomicU64,
}

/// Options of [`LossCheck`] set by the builder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LossCheckOptions {
    pub(crate) on: bool,
    pub(crate) later: bool,
}

impl Default for LossCheckOptions {
    fn default() -> Self {
        Self { on: true, later: false }
    }
}

impl CheckedModel {
    /// Records after a forward whether its backward reduces gradients.
    pub(crate) fn set_reduces(&self, reduces: bool) {
        self.reduces.store(reduces, Ordering::Relaxed);
    }
}

impl LossCheck {
    pub(crate) fn new(
        job: &Arc<Job>,
        options: LossCheckOptions,
        sharded: Option<Arc<ShardedModels>>,
    ) -> Self {
        Self {
            job: Arc::downgrade(job),
            rank: job.rank(),
            number: job.loss_checks.fetch_add(1, Ordering::Relaxed),
            device: job.device,
            later: options.later || job.device != Device::Cpu,
            store: job.store().cloned(),
            state: Mutex::default(),
            models: Mutex::default(),
            sharded,
            optimizers: Mutex::default(),
        }
    }

    /// Returns a check with the same options, for models with another sharding.
    pub(crate) fn with_sharding(
        &self,
        job: &Arc<Job>,
        sharded: Option<Arc<ShardedModels>>,
    ) -> Self {
        Self::new(job, LossCheckOptions { on: true, later: self.later }, sharded)
    }

    /// Checks the losses of a model whose gradients are reduced, until the returned guard is dropped.
    pub(crate) fn watch_model(
        &self,
        parameters: &[NamedTensor],
        hook: Option<Arc<dyn StatefulHook>>,
    ) -> Result<Arc<CheckedModel>> {
        let parameters: Vec<Tensor> =
            parameters.iter().map(|parameter| parameter.tensor.shallow_clone()).collect();
        let model = Arc::new(CheckedModel {
            flag: LossFlag::new(&parameters.iter().collect::<Vec<_>>())?,
            parameters: Mutex::new(parameters),
            reduces: AtomicBool::new(false),
            hook,
        });
        let mut models = self.models.lock();
        models.retain(|other| other.strong_count() > 0);
        models.push(Arc::downgrade(&model));
        Ok(model)
    }

    /// Checks before the steps of an optimizer, until the returned guard is dropped. Earlier backwards do not concern
    /// this optimizer.
    pub(crate) fn watch_optimizer(&self, optimizer: &Optimizer) -> Arc<CheckedOptimizer> {
        let cleared = AtomicU64::new(self.state.lock().backwards);
        let watched = Arc::new(CheckedOptimizer { optimizer: optimizer.clone(), cleared });
        let mut optimizers = self.optimizers.lock();
        optimizers.retain(|other| other.strong_count() > 0);
        optimizers.push(Arc::downgrade(&watched));
        watched
    }

    /// Runs the backward of this loss and checks it. Returns an error if the loss was not finite on one of the ranks.
    ///
    /// A tensor of several values is not checked: `backward` returns an error for it.
    pub(crate) fn around(
        self: &Arc<Self>,
        loss: &Tensor,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(group) = self.agreeing_group() {
            return self.agreed(&group, loss, backward);
        }
        let models = self.models();
        let mut state = self.state.lock();
        state.backwards += 1;
        let not_finite = if self.later {
            self.raise_later(&mut state, &models, loss)?;
            false
        } else {
            loss.numel() == 1 && !loss.f_double_value(&[])?.is_finite()
        };
        if not_finite {
            if models.is_empty() {
                let found = Found { rank: Some(self.rank), used: None };
                return Err(self.error(found, self.next_step()));
            }
            state.own = true;
            self.announce(state.reductions);
            let mark = Tensor::from(f64::NAN).f_to_kind(Kind::Float)?;
            models.iter().for_each(|model| model.flag.raise(&mark));
        }
        drop(state);
        let outcome = backward();
        let reached: Vec<_> = models.iter().filter(|model| model.flag.lower()).collect();
        outcome?;
        if reached.is_empty() {
            let found = Found { rank: Some(self.rank), used: None };
            // No prepared model takes part, so the loss concerns this rank alone.
            return if not_finite { Err(self.error(found, self.next_step())) } else { Ok(()) };
        }
        // The other ranks detect it when their gradients are reduced; under LocalSGD, this rank's step does.
        if !reached.iter().any(|model| model.reduces.load(Ordering::Relaxed)) {
            return Ok(());
        }
        self.after_reduction(&reached)
    }

    /// Returns the ranks of sharded models, which send the check's result before each backward. `None` if gradients
    /// carry it.
    fn agreeing_group(&self) -> Option<ProcessGroup> {
        self.sharded.as_ref().filter(|sharded| sharded.any())?;
        self.job.upgrade()?.group()
    }

    /// Runs the backward of a loss of sharded models when it is finite on all ranks; on a GPU the result is read before
    /// the next step.
    fn agreed(
        &self,
        group: &ProcessGroup,
        loss: &Tensor,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let finite = loss.f_detach()?.f_isfinite()?.f_all()?;
        let own = finite.f_logical_not()?.f_to_kind(Kind::Int64)?.f_reshape([1])?;
        let all = group.all_gather_flat(&own)?;
        let mut state = self.state.lock();
        state.backwards += 1;
        let reduction = state.reductions;
        state.reductions += 1;
        if self.later {
            let answer = all.f_amax([0i64], true)?.f_add(&own.f_mul_scalar(2i64)?)?;
            let (backward, fetch) = (state.backwards, Fetch::start(&answer)?);
            let pending = Pending { backward, reduction, fetch, passed: false, used: None };
            state.pending.push_back(pending);
        } else {
            let ranks = Vec::<i64>::try_from(&all)?;
            if let Some(rank) = ranks.iter().position(|not_finite| *not_finite != 0) {
                let found = Found { rank: Some(rank), used: None };
                drop(state);
                return Err(self.error(found, self.next_step()));
            }
        }
        drop(state);
        backward()
    }

    /// Flags the gradients with values computed on the device.
    fn raise_later(
        &self,
        state: &mut State,
        models: &[Arc<CheckedModel>],
        loss: &Tensor,
    ) -> Result<()> {
        let not_finite = loss.f_detach()?.f_isfinite()?.f_all()?.f_logical_not()?;
        let zero = Tensor::f_zeros([], (Kind::Float, self.device))?;
        let mark = zero.f_masked_fill(&not_finite, f64::NAN)?;
        models.iter().for_each(|model| model.flag.raise(&mark));
        state.own_later = Some(match state.own_later.take() {
            Some(before) => before.f_logical_or(&not_finite)?,
            None => not_finite,
        });
        Ok(())
    }

    /// Returns `true` if a step is being recorded, so that its operations are not executed now.
    fn is_recording(&self) -> bool {
        self.job.upgrade().is_some_and(|job| job.recorder.is_recording())
    }

    /// Registers the flag of a recorded backward, which is read after each replay.
    fn record(self: &Arc<Self>, answer: Tensor, reduces: bool) {
        if let Some(job) = self.job.upgrade() {
            job.recorder.at_each_replay(ReadLoss { check: Arc::clone(self), answer, reduces });
        }
    }

    fn after_reduction(self: &Arc<Self>, reached: &[&Arc<CheckedModel>]) -> Result<()> {
        let mut gradients = Vec::new();
        for model in reached {
            let parameters = model.parameters.lock();
            for parameter in parameters.iter() {
                gradients.extend(gradient(parameter)?);
            }
        }
        let gradients: Vec<&Tensor> = gradients.iter().collect();
        let mut state = self.state.lock();
        let reduction = state.reductions;
        state.reductions += 1;
        let own = std::mem::take(&mut state.own);
        if self.later {
            let mut answer = first_elements_not_finite(&gradients)?;
            if let Some(not_finite) = state.own_later.take() {
                answer += not_finite.f_to_kind(Kind::Int64)? * 2;
            }
            if self.is_recording() {
                state.reductions -= 1;
                state.backwards -= 1;
                drop(state);
                self.record(answer, true);
                return Ok(());
            }
            let (backward, fetch) = (state.backwards, Fetch::start(&answer)?);
            state.pending.push_back(Pending {
                backward,
                reduction,
                fetch,
                passed: false,
                used: None,
            });
            return Ok(());
        }
        if first_elements_are_finite(&gradients)? {
            return Ok(());
        }
        let rank = self.announced(reduction, own, Duration::ZERO);
        // Gradients that have not been cleared since an earlier loss was found.
        let rank = rank.or_else(|| state.found.and_then(|before| before.rank));
        let found = Found { rank, used: None };
        state.found = Some(found);
        drop(state);
        for hook in reached.iter().filter_map(|model| model.hook.as_ref()) {
            hook.reset();
        }
        Err(self.error(found, self.next_step()))
    }

    /// Checks before the next step of an optimizer.
    pub(crate) fn before_step(self: &Arc<Self>, watched: &CheckedOptimizer) -> Result<()> {
        let step = watched.optimizer.launched_steps() + 1;
        if self.later {
            return self.before_late_step(watched.cleared.load(Ordering::Relaxed), step);
        }
        if self.models().is_empty() {
            return Ok(());
        }
        let gradients = watched.optimizer.gradients()?;
        if first_elements_are_finite(&gradients.iter().collect::<Vec<_>>())? {
            return Ok(());
        }
        let mut state = self.state.lock();
        // Not reduced yet, as under LocalSGD: gradients of this rank alone.
        let own = std::mem::take(&mut state.own).then_some(self.rank);
        let rank = own.or_else(|| state.found.and_then(|found| found.rank));
        drop(state);
        Err(self.error(Found { rank, used: None }, Some(step)))
    }

    fn before_late_step(self: &Arc<Self>, cleared: u64, step: u64) -> Result<()> {
        if self.is_recording() {
            let mut state = self.state.lock();
            if let Some(not_finite) = state.own_later.take() {
                let answer =
                    not_finite.f_to_kind(Kind::Int64)?.f_mul_scalar(3i64)?.f_reshape([1])?;
                state.backwards -= 1;
                drop(state);
                self.record(answer, false);
            }
            return Ok(());
        }
        if let Some(found) = self.read_passed()? {
            return Err(self.error(found, Some(step)));
        }
        let mut state = self.state.lock();
        let State { pending, own_later, backwards, reductions, .. } = &mut *state;
        if let Some(not_finite) = own_later.take() {
            // Not reduced since: gradients of this rank alone.
            let answer = not_finite.f_to_kind(Kind::Int64)?.f_mul_scalar(3i64)?.f_reshape([1])?;
            let fetch = Fetch::start(&answer)?;
            let (backward, reduction) = (*backwards, *reductions);
            pending.push_back(Pending { backward, reduction, fetch, passed: false, used: None });
        }
        for answer in pending.iter_mut().filter(|answer| !answer.passed) {
            answer.passed = true;
            answer.used = (answer.backward > cleared).then_some(step);
        }
        Ok(())
    }

    /// Reads the results before which an optimizer has stepped, and returns the first one whose gradients a step has
    /// used. The selection does not depend on timing, so all ranks read the same ones.
    fn read_passed(&self) -> Result<Option<Found>> {
        let mut state = self.state.lock();
        let mut first = None;
        while state.pending.front().is_some_and(|answer| answer.passed) {
            let Some(Pending { reduction, fetch, used, .. }) = state.pending.pop_front() else {
                break;
            };
            let answer = fetch.wait()?;
            if answer & 1 != 0 && used.is_some() && first.is_none() {
                let own = answer & 2 != 0;
                if own {
                    self.announce(reduction);
                }
                // The rank of the loss reads its own result at the same time.
                let rank = self.announced(reduction, own, TOLD_WITHIN);
                first = Some(Found { rank, used });
            }
        }
        Ok(first)
    }

    /// Checks before weights are saved: an error when a step has used gradients that were not finite.
    pub(crate) fn before_save(&self) -> Result<()> {
        match self.read_passed()? {
            Some(found) => Err(self.error(found, None)),
            None => Ok(()),
        }
    }

    /// Reads the results before the last one that an optimizer has used, as before each step.
    fn before_replay(&self) -> Result<()> {
        match self.read_passed()? {
            Some(found) => Err(self.error(found, self.next_launched_step())),
            None => Ok(()),
        }
    }

    /// Begins to read the result of a replayed backward, whose gradients the replayed step has used.
    fn after_replay(&self, answer: &Tensor, reduces: bool) -> Result<()> {
        // The next replay overwrites the tensor with the flag.
        let fetch = Fetch::start(answer)?;
        let step = self.next_launched_step();
        let mut state = self.state.lock();
        state.backwards += 1;
        let (backward, reduction) = (state.backwards, state.reductions);
        state.reductions += u64::from(reduces);
        state.pending.push_back(Pending { backward, reduction, fetch, passed: true, used: step });
        Ok(())
    }

    /// Returns the result of [`LossCheck::next_step`] without waiting for a device.
    fn next_launched_step(&self) -> Option<u64> {
        let optimizers = self.optimizers.lock();
        let alive = optimizers.iter().filter_map(Weak::upgrade);
        alive.map(|watched| watched.optimizer.launched_steps() + 1).max()
    }

    /// Records that a rank that shadows the others in a join has taken part in a reduction of this model.
    pub(crate) fn shadowed(&self, model: Option<&CheckedModel>, finite: bool) {
        let hook = model.and_then(|model| model.hook.as_ref());
        if let (false, Some(hook)) = (finite, hook) {
            hook.reset();
        }
        let mut state = self.state.lock();
        let reduction = state.reductions;
        state.reductions += 1;
        state.found = (!finite)
            .then(|| Found { rank: self.announced(reduction, false, Duration::ZERO), used: None });
    }

    /// Returns the failure that made the other ranks stop while this rank shadowed them.
    pub(crate) fn found_in_shadow(&self) -> Option<Error> {
        let found = self.state.lock().found.take()?;
        Some(self.error(found, None))
    }

    /// Records that an optimizer's gradients were cleared: losses so far no longer concern it.
    pub(crate) fn clear(&self, watched: &CheckedOptimizer) {
        let mut state = self.state.lock();
        state.forget_own();
        watched.cleared.store(state.backwards, Ordering::Relaxed);
    }

    /// Forgets all losses, as all gradients are cleared, and does not wait for pending results.
    pub(crate) fn reset(&self) {
        let mut state = self.state.lock();
        state.forget_own();
        state.found = None;
        state.pending.clear();
    }

    /// Reports in the store that a loss of this rank makes the reduction of this number non-finite. The first
    /// rank to report is the one that errors name.
    fn announce(&self, reduction: u64) {
        if let Some(store) = &self.store {
            // Without the store, the job has already failed with an error of its own.
            let _ = store.compare_set(&self.key(reduction), "", self.rank.to_string());
        }
    }

    /// Returns the rank that reported the loss. On a CPU the report arrives before the reduction ends; on a GPU it may
    /// arrive later.
    fn announced(&self, reduction: u64, own: bool, within: Duration) -> Option<usize> {
        let Some(store) = &self.store else {
            return own.then_some(self.rank);
        };
        let key = self.key(reduction);
        if !within.is_zero() {
            let _ = store.wait(&[&key], within);
        }
        let report = match store.contains(&[&key]) {
            Ok(true) => store.get(&key).ok(),
            _ => None,
        };
        let rank = report.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
        rank.or_else(|| own.then_some(self.rank))
    }

    fn key(&self, reduction: u64) -> String {
        format!("loss_not_finite/{}/{reduction}", self.number)
    }

    /// Returns the number of the step that the prepared optimizers are about to make. `None` if there are no
    /// optimizers.
    fn next_step(&self) -> Option<u64> {
        let optimizers = self.optimizers.lock();
        let alive = optimizers.iter().filter_map(Weak::upgrade);
        alive.map(|watched| watched.optimizer.steps() + 1).max()
    }

    /// Returns the error for a loss that was not finite. `step` is the step that is about to be made.
    fn error(&self, found: Found, step: Option<u64>) -> Error {
        let Found { rank, used } = found;
        let weights_corrupted = used.is_some() || self.weights_are_corrupted();
        TrainError::LossNotFinite { rank, step: used.or(step), weights_corrupted }.into()
    }

    /// Returns `true` if a weight is not finite. Reads all weights, and synchronises a GPU.
    fn weights_are_corrupted(&self) -> bool {
        let finite = |tensor: &Tensor| {
            let all = tensor.f_detach()?.f_isfinite()?.f_all()?;
            all.f_int64_value(&[]).map(|all| all != 0)
        };
        let optimizers = self.optimizers.lock();
        let alive: Vec<_> = optimizers.iter().filter_map(Weak::upgrade).collect();
        // Unreadable weights are not reported as corrupted.
        alive.iter().any(|watched| {
            watched
                .optimizer
                .with_parameters(|tensors| tensors.iter().any(|t| !finite(t).unwrap_or(true)))
        })
    }

    fn models(&self) -> Vec<Arc<CheckedModel>> {
        let models = self.models.lock();
        models.iter().filter_map(Weak::upgrade).collect()
    }
}

/// A loss within a recorded step.
struct ReadLoss {
    check: Arc<LossCheck>,
    answer: Tensor,
    reduces: bool,
}

impl AtReplay for ReadLoss {
    fn before(&mut self) -> Result<()> {
        self.check.before_replay()
    }

    fn after(&mut self) -> Result<()> {
        self.check.after_replay(&self.answer, self.reduces)
    }
}

/// Time limit for the report of the rank whose loss was not finite, after a device has found one. A rank of another
/// program does not report.
const TOLD_WITHIN: Duration = Duration::from_secs(5);

impl fmt::Debug for CheckedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckedModel").field("reduces", &self.reduces).finish_non_exhaustive()
    }
}

impl fmt::Debug for LossCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossCheck").field("later", &self.later).finish_non_exhaustive()
    }
}
