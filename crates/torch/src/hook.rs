//! Communication hooks, which replace the all-reduce of a bucket of gradients.

use std::fmt;

use tch::Kind;

use crate::bridge::{Hook, ffi};
use crate::bucket::Bucket;
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::reducer::Reducer;

/// Data type in which a bucket is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// IEEE half precision (fp16): 11 significant bits, up to 65 504.
    Fp16,
    /// bfloat16: 8 significant bits, the exponent range of float32.
    Bf16,
}

impl Compression {
    /// Returns libtorch's kind of the type.
    #[must_use]
    pub fn kind(self) -> Kind {
        match self {
            Self::Fp16 => Kind::Half,
            Self::Bf16 => Kind::BFloat16,
        }
    }
}

/// A communication hook: a way to average buckets over the ranks.
///
/// ```
/// use brigade_torch::{Bucket, Error, GradientHook, ProcessGroup, ReduceOp};
///
/// /// What the reducer does without a hook.
/// struct Plain;
///
/// impl GradientHook for Plain {
///     fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<(), Error> {
///         group.all_reduce(&mut bucket.buffer, ReduceOp::Mean)
///     }
/// }
/// ```
pub trait GradientHook: Send + Sync {
    /// Averages the bucket's buffer over the ranks, in place. Called during `backward`, for one bucket after another,
    /// in the same order on all ranks, each as soon as its gradients are computed.
    ///
    /// All buffers must be complete when the call for the last bucket ([`Bucket::is_last`]) returns: a hook may start
    /// an operation in one call and wait for it in a later one, while gradients of other buckets are computed.
    /// Operations must be started within the calls, in the same order on all ranks. If a hook still has operations in a
    /// call for bucket 0, the last backward was interrupted.
    ///
    /// # Errors
    /// Any error ends the backward, which returns it unchanged ([`ProcessGroup::backward`]).
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<(), Error>;
}

impl Reducer {
    /// Sets the type in which buckets are sent. They are divided by the number of ranks before the sum, so that it does
    /// not overflow. Call it once for a reducer, before its first backward.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if a hook was set before.
    pub fn compress(&self, compression: Compression) -> Result<(), Error> {
        ffi::reducer_compress(self.raw(), self.group().raw(), compression.kind() as i8)
            .map_err(|error| Error::libtorch("compress", &error))
    }

    /// Replaces the reduction of buckets by a hook. Call it once for a reducer, before its first backward.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if a hook was set before.
    pub fn set_hook(&self, hook: impl GradientHook + 'static) -> Result<(), Error> {
        let group = self.group().clone();
        let run = Box::new(move |mut bucket: Bucket| {
            hook.reduce(&group, &mut bucket).map_err(|error| {
                let text = Error::invalid_argument(error.to_string());
                group.keep_hook_error(error);
                text
            })
        });
        ffi::reducer_hook(self.raw(), Box::new(Hook { run }))
            .map_err(|error| Error::libtorch("set_hook", &error))
    }
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}
