//! What goes over the wire when gradients are averaged.

mod power_sgd;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use brigade_models::StateDict;
use brigade_torch::{Bucket, Compression, GradientHook, ProcessGroup, Reducer, Tensor};

pub use power_sgd::PowerSgd;
pub(crate) use power_sgd::PowerSgdHook;

use crate::error::{Error, Result};
use crate::model::PreparedModel;

/// How buckets of gradients are averaged over the ranks; chosen with
/// [`crate::AcceleratorBuilder::comm_hook`] for all models that are prepared.
///
/// ```no_run
/// use brigade_train::{Accelerator, CommHook, Compression, PowerSgd};
/// let accelerator = Accelerator::builder().comm_hook(CommHook::Bf16).build()?;
/// // Rank-2 approximations, sent as 16-bit floats, from the 500th step on.
/// let power = PowerSgd { matrix_approximation_rank: 2, start_iteration: 500, ..PowerSgd::default() };
/// let hook = CommHook::PowerSgd(power).wrapped(Compression::Fp16);
/// let other = Accelerator::builder().sharing(&accelerator).comm_hook(hook).build()?;
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum CommHook {
    /// In their own type, whole.
    #[default]
    None,
    /// As 16-bit floats. Gradients beyond 65 504 times the number of ranks overflow.
    Fp16,
    /// As bfloat16: the range of 32-bit floats, 8 significant bits.
    Bf16,
    /// Matrices as products of two thin ones.
    PowerSgd(PowerSgd),
    /// One's own; every prepared model uses this one.
    Custom(Arc<dyn GradientHook>),
    /// In another type, and then as the hook inside does.
    Wrapped(Compression, Box<Self>),
}

impl CommHook {
    /// Puts buckets into another type before this hook gets them, as PyTorch's `fp16_compress_wrapper`
    /// and `bf16_compress_wrapper`.
    #[must_use]
    pub fn wrapped(self, compression: Compression) -> Self {
        Self::Wrapped(compression, Box::new(self))
    }

    /// Whether the numbers make sense.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::PowerSgd(options) => options.check(),
            Self::Wrapped(_, inner) => inner.check(),
            Self::None | Self::Fp16 | Self::Bf16 | Self::Custom(_) => Ok(()),
        }
    }

    /// Registers it with a model's reducer. Gives back what has a state.
    pub(crate) fn install(
        &self,
        reducer: &Reducer,
        trained: &[(String, Tensor)],
    ) -> Result<Option<Arc<PowerSgdHook>>> {
        match self {
            Self::None => return Ok(None),
            Self::Fp16 => reducer.compress(Compression::Fp16)?,
            Self::Bf16 => reducer.compress(Compression::Bf16)?,
            Self::Wrapped(compression, inner) if matches!(**inner, Self::None) => {
                reducer.compress(*compression)?;
            }
            _ => {
                let mut state = None;
                reducer.set_hook(self.build(trained, &mut state))?;
                return Ok(state);
            }
        }
        Ok(None)
    }

    fn build(&self, trained: &[(String, Tensor)], state: &mut Option<Arc<PowerSgdHook>>) -> Shared {
        Shared(match self {
            Self::None => Arc::new(Plain),
            Self::Fp16 => Arc::new(Wrapper::new(Compression::Fp16, Shared(Arc::new(Plain)))),
            Self::Bf16 => Arc::new(Wrapper::new(Compression::Bf16, Shared(Arc::new(Plain)))),
            Self::PowerSgd(options) => {
                let hook = Arc::new(PowerSgdHook::new(options.clone(), trained));
                *state = Some(Arc::clone(&hook));
                hook
            }
            Self::Custom(hook) => Arc::clone(hook),
            Self::Wrapped(kind, inner) => {
                Arc::new(Wrapper::new(*kind, inner.build(trained, state)))
            }
        })
    }
}

struct Shared(Arc<dyn GradientHook>);

impl GradientHook for Shared {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> brigade_torch::Result<()> {
        self.0.reduce(group, bucket)
    }
}

struct Plain;

impl GradientHook for Plain {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> brigade_torch::Result<()> {
        // Divided before the sum, so that 16-bit floats do not overflow.
        let _ = bucket.buffer.f_div_scalar_(group.size() as f64)?;
        group.all_reduce(&mut bucket.buffer, brigade_torch::ReduceOp::Sum)
    }
}

struct Wrapper {
    kind: Compression,
    inner: Shared,
    /// Of this backward: in the other type, and where they belong. The hook inside may fill them as late
    /// as in its call for the last bucket.
    underway: Mutex<Vec<(Tensor, Tensor)>>,
}

impl Wrapper {
    fn new(kind: Compression, inner: Shared) -> Self {
        Self { kind, inner, underway: Mutex::default() }
    }
}

impl GradientHook for Wrapper {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> brigade_torch::Result<()> {
        let mut small = bucket.to_kind(self.kind.kind())?;
        let mut underway = self.underway.lock().unwrap_or_else(PoisonError::into_inner);
        if bucket.index == 0 {
            underway.clear();
        }
        self.inner.reduce(group, &mut small)?;
        underway.push((small.buffer, bucket.buffer.shallow_clone()));
        if bucket.is_last {
            for (small, mut buffer) in underway.drain(..) {
                buffer.f_copy_(&small)?;
            }
        }
        Ok(())
    }
}

impl<M> PreparedModel<M> {
    /// This rank's state of a communication hook that has one (PowerSGD: `iteration`, and by parameter
    /// `error.NAME` and `factor.NAME`), as copies. `None` for the others. A checkpoint
    /// ([`crate::Accelerator::save_state`]) holds it anyway.
    ///
    /// # Errors
    /// [`Error::Tensor`] when memory runs out.
    pub fn comm_hook_state(&self) -> Result<Option<StateDict>> {
        self.hook_state().map(|hook| hook.state_dict()).transpose()
    }

    /// Goes on from such a state, which this rank has saved.
    ///
    /// # Errors
    /// [`Error::Misuse`] when this model's hook has no state, or this is none of its states.
    pub fn load_comm_hook_state(&self, state: &StateDict) -> Result<()> {
        match self.hook_state() {
            Some(hook) => hook.load_state_dict(state),
            None => Err(Error::Misuse(
                "load_comm_hook_state: this model's communication hook has no state; build the \
                 Accelerator with CommHook::PowerSgd"
                    .into(),
            )),
        }
    }
}

impl fmt::Debug for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fp16 => f.write_str("Fp16"),
            Self::Bf16 => f.write_str("Bf16"),
            Self::PowerSgd(options) => f.debug_tuple("PowerSgd").field(options).finish(),
            Self::Custom(_) => f.write_str("Custom"),
            Self::Wrapped(compression, inner) => {
                f.debug_tuple("Wrapped").field(compression).field(inner).finish()
            }
        }
    }
}
