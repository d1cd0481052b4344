//! A flag that any rank can set and all ranks read.

use std::sync::atomic::Ordering;

use brigade_torch::{ReduceOp, Result};
use tch::Tensor;

use crate::processes::Processes;

impl Processes {
    /// Sets the trigger on this rank, which [`Processes::check_trigger`] reads on all ranks. Use it for a decision that
    /// one rank makes and all must follow, such as early stopping.
    pub fn set_trigger(&self) {
        self.trigger.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if any rank has set the trigger since the last check, and resets it. Every rank calls it, at the
    /// same place of the loop.
    ///
    /// ```
    /// # use brigade_train::{ConnectOptions, Processes};
    /// # let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
    /// # let loss = 0.005;
    /// if loss < 0.01 {
    ///     processes.set_trigger();
    /// }
    /// assert!(processes.check_trigger()?); // on every rank
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone; the trigger stays set then.
    #[track_caller]
    pub fn check_trigger(&self) -> Result<bool> {
        let mine = self.trigger.load(Ordering::Relaxed);
        let any = match self.traced() {
            None => mine,
            Some(group) => {
                let mut flag =
                    Tensor::f_from_slice(&[i64::from(mine)])?.f_to_device(group.device())?;
                group.all_reduce(&mut flag, ReduceOp::Max)?;
                flag.f_int64_value(&[0])? != 0
            }
        };
        if mine {
            self.trigger.store(false, Ordering::Relaxed);
        }
        Ok(any)
    }
}
