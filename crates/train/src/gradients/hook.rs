//! Communication hooks: how buckets of gradients are averaged over the ranks.

mod power_sgd;

use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_torch::{
    Bucket, Compression, GradientHook, NamedTensor, ProcessGroup, Reducer, Result,
};
use parking_lot::Mutex;
use tch::Tensor;

pub use power_sgd::PowerSgd;
use power_sgd::PowerSgdHook;

use crate::stateful::Stateful;

/// A communication hook with a state ([`Stateful`]) that differs between ranks and that checkpoints hold, such as
/// [`PowerSgd`]'s.
///
/// The function given to [`CommHook::stateful`] creates one for each model when the model is prepared, with the
/// parameters that are trained.
///
/// ```
/// use std::sync::Mutex;
/// use brigade_checkpoint::Value;
/// use brigade_torch::{Bucket, Error, GradientHook, ProcessGroup, ReduceOp, Result};
/// use brigade_train::{Accelerator, CommHook, Stateful, StatefulHook};
/// use tch::Tensor;
///
/// /// Counts the bytes that this rank has sent.
/// #[derive(Default)]
/// struct Counting(Mutex<i64>);
///
/// impl GradientHook for Counting {
///     fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
///         *self.0.lock().unwrap() += 4 * bucket.buffer.numel() as i64;
///         group.all_reduce(&mut bucket.buffer, ReduceOp::Mean)
///     }
/// }
///
/// impl Stateful for Counting {
///     fn state_dict(&self) -> Result<Value<Tensor>> {
///         Ok(Value::dict([("bytes", Value::Int(*self.0.lock().unwrap()))]))
///     }
///
///     fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
///         let bytes = state.get("bytes").and_then(Value::as_int);
///         *self.0.lock().unwrap() = bytes.ok_or_else(|| Error::custom("`bytes` is missing"))?;
///         Ok(())
///     }
/// }
///
/// impl StatefulHook for Counting {
///     fn load_from_ranks(&self, states: &[&Value<Tensor>]) -> Result<()> {
///         let bytes = states.iter().filter_map(|state| state.get("bytes")?.as_int());
///         *self.0.lock().unwrap() = bytes.sum();
///         Ok(())
///     }
/// }
///
/// let hook = CommHook::stateful(|_parameters| Counting::default());
/// let accelerator = Accelerator::builder().cpu(true).comm_hook(hook).build()?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait StatefulHook: GradientHook + Stateful {
    /// Loads the state on another number of ranks, from the states of all ranks of the saved run; the list is empty if
    /// the checkpoint has none. On the same number of ranks each loads its own with [`Stateful::load_state_dict`].
    ///
    /// # Errors
    /// Fails when a tensor cannot be copied.
    fn load_from_ranks(&self, states: &[&Value<Tensor>]) -> Result<()>;

    /// Loads the state that the hook of the same model had before parameters were frozen or unfrozen
    /// ([`crate::PreparedModel::set_trainable`]). By default it calls [`Stateful::load_state_dict`].
    ///
    /// # Errors
    /// Returns the same errors as [`Stateful::load_state_dict`].
    fn carry_over(&self, state: &Value<Tensor>) -> Result<()> {
        self.load_state_dict(state)
    }

    /// Discards state that non-finite gradients have corrupted. Called on all ranks.
    fn reset(&self) {}
}

/// Creates a model's hook from its trained parameters.
type MakeHook = Arc<dyn Fn(&[NamedTensor]) -> Arc<dyn StatefulHook> + Send + Sync>;

/// Method by which buckets of gradients are averaged over the ranks. [`crate::AcceleratorBuilder::comm_hook`] sets it
/// for all prepared models.
///
/// ```
/// use brigade_torch::Compression;
/// use brigade_train::{Accelerator, CommHook, PowerSgd};
/// let accelerator = Accelerator::builder().comm_hook(CommHook::Bf16).build()?;
/// // Rank-2 approximations, sent as 16-bit floats, from the 500th step on.
/// let power = PowerSgd { matrix_approximation_rank: 2, start_iteration: 500, ..PowerSgd::default() };
/// let hook = CommHook::PowerSgd(power).wrapped(Compression::Fp16);
/// let other = Accelerator::builder().sharing(&accelerator).comm_hook(hook).build()?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum CommHook {
    /// Sends gradients in their own type, without compression.
    #[default]
    None,
    /// Sends gradients as 16-bit floats. Gradients beyond 65 504 times the world size overflow.
    Fp16,
    /// Sends gradients as bfloat16: the range of 32-bit floats, 8 significant bits.
    Bf16,
    /// Sends matrices as products of two low-rank factors.
    PowerSgd(PowerSgd),
    /// A custom hook. Every prepared model uses this instance.
    Custom(Arc<dyn GradientHook>),
    /// A custom hook with a state, created for each model: see [`CommHook::stateful`].
    Stateful(MakeHook),
    /// Casts buckets to another type before the inner hook gets them.
    Wrapped(Compression, Box<Self>),
}

impl CommHook {
    /// Returns a custom hook with a state, which `make` creates for each model from its trained parameters, in the
    /// reducer's order (the indices of [`Bucket::parameters`]). See [`StatefulHook`].
    #[must_use]
    pub fn stateful<H: StatefulHook + 'static>(
        make: impl Fn(&[NamedTensor]) -> H + Send + Sync + 'static,
    ) -> Self {
        Self::Stateful(Arc::new(move |parameters| Arc::new(make(parameters))))
    }

    /// Returns a hook that casts buckets to another type before this one gets them, as PyTorch's
    /// `fp16_compress_wrapper` and `bf16_compress_wrapper` do.
    #[must_use]
    pub fn wrapped(self, compression: Compression) -> Self {
        Self::Wrapped(compression, Box::new(self))
    }

    /// Returns `true` if gradients are sent uncompressed.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Checks the options of the hook.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::PowerSgd(options) => options.check(),
            Self::Wrapped(_, inner) => inner.check(),
            Self::None | Self::Fp16 | Self::Bf16 | Self::Custom(_) | Self::Stateful(_) => Ok(()),
        }
    }

    /// Registers the hook with a model's reducer. Returns the hook if it has a state.
    pub(crate) fn install(
        &self,
        reducer: &Reducer,
        trained: &[NamedTensor],
    ) -> Result<Option<Arc<dyn StatefulHook>>> {
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

    fn build(&self, trained: &[NamedTensor], state: &mut Option<Arc<dyn StatefulHook>>) -> Shared {
        Shared(match self {
            Self::None => Arc::new(Plain),
            Self::Fp16 => Arc::new(Wrapper::new(Compression::Fp16, Shared(Arc::new(Plain)))),
            Self::Bf16 => Arc::new(Wrapper::new(Compression::Bf16, Shared(Arc::new(Plain)))),
            Self::PowerSgd(options) => {
                let hook = Arc::new(PowerSgdHook::new(options.clone(), trained));
                *state = Some(Arc::<PowerSgdHook>::clone(&hook));
                hook
            }
            Self::Stateful(make) => {
                let hook = make(trained);
                *state = Some(Arc::clone(&hook));
                Arc::new(Forwarded(hook))
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
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        self.0.reduce(group, bucket)
    }
}

/// Passes calls of [`GradientHook`] to a stateful hook.
struct Forwarded(Arc<dyn StatefulHook>);

impl GradientHook for Forwarded {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        self.0.reduce(group, bucket)
    }
}

struct Plain;

impl GradientHook for Plain {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        // Divided before the sum, so that 16-bit floats do not overflow.
        let _ = bucket.buffer.f_div_scalar_(group.size() as f64)?;
        group.all_reduce(&mut bucket.buffer, brigade_torch::ReduceOp::Sum)
    }
}

struct Wrapper {
    kind: Compression,
    inner: Shared,
    /// Buckets of this backward, cast to the other type, and the originals. The inner hook may not fill them before its
    /// call for the last bucket.
    underway: Mutex<Vec<(Tensor, Tensor)>>,
}

impl Wrapper {
    fn new(kind: Compression, inner: Shared) -> Self {
        Self { kind, inner, underway: Mutex::default() }
    }
}

impl GradientHook for Wrapper {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        let mut small = bucket.to_kind(self.kind.kind())?;
        let mut underway = self.underway.lock();
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

impl fmt::Debug for CommHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fp16 => f.write_str("Fp16"),
            Self::Bf16 => f.write_str("Bf16"),
            Self::PowerSgd(options) => f.debug_tuple("PowerSgd").field(options).finish(),
            Self::Custom(_) => f.write_str("Custom"),
            Self::Stateful(_) => f.write_str("Stateful"),
            Self::Wrapped(compression, inner) => {
                f.debug_tuple("Wrapped").field(compression).field(inner).finish()
            }
        }
    }
}
