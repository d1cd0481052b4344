//! What [`Accelerator::prepare`] takes.

use crate::accelerator::Accelerator;
use crate::error::Result;

/// Something that works on one process and can be made to work on all ranks: a model, an optimizer, a
/// loader, a scheduler, or a tuple of up to eight of them.
pub trait Prepare {
    /// The same thing, prepared.
    type Prepared;

    /// Called by [`Accelerator::prepare`].
    ///
    /// # Errors
    /// When the ranks disagree or one is gone.
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared>;
}

/// In the order of the tuple, on every rank: preparing sends messages. No order is wrong: optimizers
/// share their model's tensors, and schedulers their optimizer's learning rate.
macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Prepare),+> Prepare for ($($name,)+) {
            type Prepared = ($($name::Prepared,)+);

            fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                Ok(($(self.$index.prepare(accelerator)?,)+))
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

impl<T: Prepare> Prepare for Vec<T> {
    type Prepared = Vec<T::Prepared>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        self.into_iter().map(|object| object.prepare(accelerator)).collect()
    }
}
