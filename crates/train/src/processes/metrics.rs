//! Metrics over gathered values.

use brigade_torch::{Kind, Tensor};

use crate::error::{Error, Result};

/// The share of predictions that are right.
///
/// ```no_run
/// use brigade_train::{Accuracy, Tensor};
///
/// let mut accuracy = Accuracy::default();
/// accuracy.update(&Tensor::from_slice(&[3i64, 1, 4]), &Tensor::from_slice(&[3i64, 1, 5]))?;
/// assert_eq!(accuracy.total(), 3);
/// assert_eq!(accuracy.value(), 2.0 / 3.0);
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accuracy {
    right: i64,
    total: i64,
}

impl Accuracy {
    /// Counts predicted classes against labels, both `[n]`.
    ///
    /// # Errors
    /// [`Error::Misuse`] when the shapes differ; [`Error::Tensor`].
    pub fn update(&mut self, predicted: &Tensor, labels: &Tensor) -> Result<()> {
        if predicted.size() != labels.size() {
            return Err(Error::Misuse(format!(
                "accuracy: predictions have shape {:?}, labels {:?}",
                predicted.size(),
                labels.size()
            )));
        }
        // host-device sync
        let right = predicted.f_eq_tensor(labels)?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        self.right += right;
        self.total += labels.numel() as i64;
        Ok(())
    }

    /// Right over total, 0 to 1; NaN before anything was counted.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.right as f64 / self.total as f64
    }

    /// Predictions counted so far.
    #[must_use]
    pub fn total(&self) -> i64 {
        self.total
    }
}
