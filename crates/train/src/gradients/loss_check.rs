//! Losses that are infinite or not a number: seen on one rank, known to all before a weight changes.

mod ledger;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use brigade_torch::{Device, Fetch, Kind, ProcessGroup, ReduceOp, Reducer, Tensor, Work};

use crate::accelerator::{Accelerator, AcceleratorBuilder};
use crate::error::{Error, Result};
use crate::optim::{Core, lock};
use ledger::{Found, Ledger};

/// Looks at the losses of one [`Accelerator`].
///
/// Alone, a CPU looks before the backward, and nothing has happened yet. Several ranks tell each other:
/// when a backward that reduces reaches its model, each starts to send one number (its own plus one when
/// a loss of this window was not finite, else 0; the largest arrives), and the optimizer waits for it
/// before it steps. The reducer itself says when, so that ranks cannot come apart over it.
///
/// A GPU must not be waited for. There the number is computed, reduced and fetched on the device's own
/// time, and read when the next step is about to be made.
pub(crate) struct LossCheck {
    rank: usize,
    device: Device,
    /// Whether the number is read at the next step.
    later: bool,
    state: Mutex<State>,
    /// Prepared models whose gradients are reduced. Without one there is nobody to tell.
    reduced: AtomicUsize,
    optimizers: Mutex<Vec<Weak<Mutex<Core>>>>,
}

#[derive(Default)]
struct State {
    ledger: Ledger<Flight>,
    /// What the next message says of the losses since the last one; sound when there is none.
    carried: Option<Tensor>,
}

/// The way of a number to the host.
enum Flight {
    Reducing(Work<Tensor>),
    /// Of this rank alone: no backward since has sent anything.
    Local(Tensor),
    Fetching(Fetch),
}

/// A prepared model whose gradients are reduced, as long as it lives.
pub(crate) struct Reduced(Arc<LossCheck>);

impl Drop for Reduced {
    fn drop(&mut self) {
        self.0.reduced.fetch_sub(1, Ordering::Relaxed);
    }
}

impl AcceleratorBuilder {
    /// Whether a loss that is infinite or not a number is an error ([`Error::LossNotFinite`]), on every
    /// rank the same one, instead of weights that are no numbers afterwards. On unless set; with fp16 the
    /// loss scaler does it in its own way.
    ///
    /// One process learns of it from [`Accelerator::backward`], several from the step of the prepared
    /// optimizer, before it changes a weight. On a GPU, which is not waited for, it is the step after.
    /// Several processes send 8 bytes for it in each backward that reduces gradients.
    ///
    /// A program can leave such a batch out: all ranks get the error in the same step, so it calls
    /// [`crate::Optimizer::zero_grad`] and goes on. With accumulation the window's other batches are
    /// left out, too, where there are several processes.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, Error, Optimizer, PreparedModel, Result, Tensor};
    /// # use brigade_models::Cnn;
    /// # fn f(accelerator: &Accelerator, model: &PreparedModel<Cnn>, optimizer: &mut Optimizer,
    /// #      images: &Tensor, labels: &Tensor) -> Result<()> {
    /// let loss = model.forward(images)?.cross_entropy_for_logits(labels);
    /// match accelerator.backward(&loss).and_then(|()| optimizer.step()) {
    ///     Err(error @ Error::LossNotFinite { spoilt: false, .. }) => {
    ///         accelerator.println(format!("batch left out: {error}"));
    ///     }
    ///     other => other?,
    /// }
    /// optimizer.zero_grad()
    /// # }
    /// ```
    ///
    /// Under LocalSGD, and where no prepared model takes part, the error is that of the rank alone.
    pub fn check_loss(mut self, on: bool) -> Self {
        self.loss_check.on = on;
        self
    }

    /// Goes about it as with a GPU also without one: for tests.
    #[doc(hidden)]
    pub fn check_loss_later(mut self, later: bool) -> Self {
        self.loss_check.later = later;
        self
    }
}

/// What the builder collects for [`LossCheck`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LossCheckOptions {
    pub(crate) on: bool,
    later: bool,
}

impl Default for LossCheckOptions {
    fn default() -> Self {
        Self { on: true, later: false }
    }
}

impl Accelerator {
    /// Weights that a GPU has spoilt, and that no later step has told of, are not saved.
    pub(crate) fn weights_may_be_saved(&self) -> Result<()> {
        self.loss_check.as_ref().map_or(Ok(()), |check| check.before_save())
    }

    /// Has the reducer tell when a backward reaches its model.
    pub(crate) fn check_losses_of(&self, reducer: &mut Reducer) -> Option<Reduced> {
        let check = self.loss_check.as_ref()?;
        // Debug mode compares the backward itself; its place in the program is not known in there.
        let (own, group) = (Arc::clone(check), reducer.group().unchecked());
        reducer.on_arrival(move || own.send(&group));
        check.reduced.fetch_add(1, Ordering::Relaxed);
        Some(Reduced(Arc::clone(check)))
    }
}

impl LossCheck {
    pub(crate) fn new(rank: usize, device: Device, options: LossCheckOptions) -> Self {
        Self {
            rank,
            device,
            later: options.later || device != Device::Cpu,
            state: Mutex::default(),
            reduced: AtomicUsize::new(0),
            optimizers: Mutex::default(),
        }
    }

    /// An optimizer that is prepared now: the backwards so far, none of which concerns it.
    pub(crate) fn register(&self, optimizer: &Arc<Mutex<Core>>) -> u64 {
        let mut optimizers = self.optimizers.lock().unwrap_or_else(PoisonError::into_inner);
        optimizers.retain(|other| other.strong_count() > 0);
        optimizers.push(Arc::downgrade(optimizer));
        drop(optimizers);
        self.state().ledger.backwards()
    }

    /// Before the backward of this loss. What has more than one value is no loss, and libtorch says so.
    pub(crate) fn before_backward(&self, loss: &Tensor) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        let next_step = self.next_step();
        if next_step.is_none() {
            // Somebody else steps, so it is told here: what all ranks know of the backwards before.
            state.ledger.read_all(Flight::read)?;
            if let Some(found) = state.ledger.take_found() {
                return Err(self.error(found, None));
            }
        }
        let backward = state.ledger.next_backward();
        if self.later {
            let unsound = loss.f_detach()?.f_isfinite()?.f_all()?.f_logical_not()?;
            let code = unsound.f_to_kind(Kind::Int64)?.f_mul_scalar(self.code())?.f_reshape([1])?;
            state.carried = Some(match state.carried.take() {
                Some(before) => before.f_maximum(&code)?,
                None => code,
            });
        } else if loss.numel() == 1 && !loss.f_double_value(&[])?.is_finite() {
            if self.reduced.load(Ordering::Relaxed) == 0 {
                return Err(self.error(Found::of(self.rank), next_step));
            }
            if next_step.is_some() {
                state.ledger.note(backward, None, self.code());
            }
            state.carried = Some(Tensor::f_from_slice(&[self.code()])?);
        }
        Ok(())
    }

    /// When a backward reaches a model, and on the ranks that shadow it in a join.
    fn send(&self, group: &ProcessGroup) -> brigade_torch::Result<()> {
        let mut state = self.state();
        let number = match state.carried.take() {
            Some(number) => number,
            None => Tensor::f_zeros([1], (Kind::Int64, self.device))?,
        };
        let work = group.start_all_reduce(number, ReduceOp::Max)?;
        state.ledger.push(Flight::Reducing(work));
        Ok(())
    }

    /// Before an optimizer makes its step of this number; `cleared` is what [`LossCheck::clear`] gave when
    /// its gradients were cleared last.
    pub(crate) fn before_step(&self, cleared: u64, step: u64) -> Result<()> {
        let mut state = self.state();
        let state = &mut *state;
        if self.later {
            if let Some(number) = state.carried.take() {
                state.ledger.push(Flight::Local(number));
            }
            state.ledger.read_passed(Flight::read)?;
        } else {
            state.ledger.read_all(Flight::read)?;
        }
        if let Some(found) = state.ledger.verdict(cleared) {
            return Err(self.error(found, Some(step)));
        }
        state.ledger.pass(cleared, step, Flight::fetch)
    }

    /// Before weights are written down: an error when a step has used gradients that were not finite.
    fn before_save(&self) -> Result<()> {
        let mut state = self.state();
        state.ledger.read_passed(Flight::read)?;
        match state.ledger.take_passed() {
            Some(found) => Err(self.error(found, None)),
            None => Ok(()),
        }
    }

    /// A rank that shadows others keeps up with what they know of the last iteration.
    pub(crate) fn shadowed(&self) -> Result<()> {
        let mut state = self.state();
        let _ = state.ledger.take_found();
        state.ledger.read_all(Flight::read)
    }

    /// What the others stopped for, when they have gone while this rank shadowed them.
    pub(crate) fn found_in_shadow(&self) -> Option<Error> {
        let found = self.state().ledger.take_found()?;
        Some(self.error(found, None))
    }

    /// Gradients were cleared: what is known of losses so far does not concern who did so any more.
    pub(crate) fn clear(&self) -> u64 {
        let mut state = self.state();
        state.carried = None;
        state.ledger.backwards()
    }

    /// All gradients are gone, and what was under way is not waited for.
    pub(crate) fn reset(&self) {
        let mut state = self.state();
        state.carried = None;
        state.ledger.forget();
    }

    /// This rank, for the wire: 0 is a sound loss.
    fn code(&self) -> i64 {
        self.rank as i64 + 1
    }

    /// The step that the prepared optimizers are about to make; `None` when there are none.
    fn next_step(&self) -> Option<u64> {
        let optimizers = self.optimizers.lock().unwrap_or_else(PoisonError::into_inner);
        let alive = optimizers.iter().filter_map(Weak::upgrade);
        alive.map(|core| lock(&core).steps() + 1).max()
    }

    /// `step` is the one that is about to be made.
    fn error(&self, found: Found, step: Option<u64>) -> Error {
        let Found { rank, passed, .. } = found;
        let spoilt = passed.is_some() || self.weights_are_spoilt();
        Error::LossNotFinite { rank, step: passed.or(step), spoilt }
    }

    /// Takes a pass over all weights, and a GPU is waited for.
    fn weights_are_spoilt(&self) -> bool {
        let finite = |tensor: &Tensor| {
            let all = tensor.f_detach()?.f_isfinite()?.f_all()?;
            all.f_int64_value(&[]).map(|all| all != 0)
        };
        let optimizers = self.optimizers.lock().unwrap_or_else(PoisonError::into_inner);
        let alive: Vec<_> = optimizers.iter().filter_map(Weak::upgrade).collect();
        // What cannot be looked at is not known to be spoilt.
        alive
            .iter()
            .any(|core| lock(core).tensors().into_iter().any(|t| !finite(t).unwrap_or(true)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    fn read(self) -> Result<i64> {
        match self {
            Self::Reducing(work) => Ok(work.wait()?.f_int64_value(&[0])?),
            Self::Local(number) => Ok(number.f_int64_value(&[0])?),
            Self::Fetching(fetch) => Ok(fetch.wait()?),
        }
    }

    /// Begins to bring it to the host.
    fn fetch(self) -> Result<Self> {
        Ok(Self::Fetching(match self {
            // With NCCL this makes the device wait, not the host.
            Self::Reducing(work) => Fetch::start(&work.wait()?)?,
            Self::Local(number) => Fetch::start(&number)?,
            Self::Fetching(fetch) => fetch,
        }))
    }
}

impl fmt::Debug for LossCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossCheck").field("later", &self.later).finish_non_exhaustive()
    }
}
