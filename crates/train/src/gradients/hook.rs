//! What goes over the wire when gradients are averaged.

mod power_sgd;

use std::fmt;
use std::sync::Arc;

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
    pub(crate) fn install(&self, reducer: &Reducer) -> Result<Option<Arc<PowerSgdHook>>> {
        match self {
            Self::None => return Ok(None),
            Self::Fp16 => reducer.compress(Compression::Fp16)?,
            Self::Bf16 => reducer.compress(Compression::Bf16)?,
            Self::Wrapped(compression, inner) if matches!(**inner, Self::None) => {
                reducer.compress(*compression)?;
            }
            _ => {
                let mut state = None;
                reducer.set_hook(self.build(&mut state))?;
                return Ok(state);
            }
        }
        Ok(None)
    }

    fn build(&self, state: &mut Option<Arc<PowerSgdHook>>) -> Shared {
        Shared(match self {
            Self::None => Arc::new(Plain),
            Self::Fp16 => {
                Arc::new(Wrapper { kind: Compression::Fp16, inner: Shared(Arc::new(Plain)) })
            }
            Self::Bf16 => {
                Arc::new(Wrapper { kind: Compression::Bf16, inner: Shared(Arc::new(Plain)) })
            }
            Self::PowerSgd(options) => {
                let hook = Arc::new(PowerSgdHook::new(options.clone()));
                *state = Some(Arc::clone(&hook));
                hook
            }
            Self::Custom(hook) => Arc::clone(hook),
            Self::Wrapped(kind, inner) => {
                Arc::new(Wrapper { kind: *kind, inner: inner.build(state) })
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
        average(group, &mut bucket.buffer)
    }
}

struct Wrapper {
    kind: Compression,
    inner: Shared,
}

impl GradientHook for Wrapper {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> brigade_torch::Result<()> {
        let mut small = bucket.to_kind(self.kind.kind())?;
        self.inner.reduce(group, &mut small)?;
        bucket.buffer.f_copy_(&small.buffer)?;
        Ok(())
    }
}

/// The mean over the ranks; divided before the sum, so that 16-bit floats do not overflow.
fn average(group: &ProcessGroup, tensor: &mut Tensor) -> brigade_torch::Result<()> {
    let _ = tensor.f_div_scalar_(group.size() as f64)?;
    group.all_reduce(tensor, brigade_torch::ReduceOp::Sum)
}

impl<M> PreparedModel<M> {
    /// This rank's state of a communication hook that has one (PowerSGD: errors, factors, the number of
    /// iterations), as copies. `None` for the others.
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
