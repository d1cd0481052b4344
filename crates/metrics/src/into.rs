//! The metrics argument of a Learner.

use std::sync::Arc;

use crate::Metric;

/// The metrics argument of a Learner: none (`()`), one, a tuple of up to eight, or a list.
///
/// ```
/// use std::sync::Arc;
///
/// use brigade_metrics::{Accuracy, ErrorRate, IntoMetrics, Metric};
///
/// assert_eq!(().into_metrics().len(), 0);
/// assert_eq!(Accuracy.into_metrics().len(), 1);
/// assert_eq!((Accuracy, ErrorRate).into_metrics().len(), 2);
/// let chosen: Vec<Arc<dyn Metric<Value = f64>>> = vec![Arc::new(Accuracy)];
/// assert_eq!(chosen.into_metrics().len(), 1);
/// ```
pub trait IntoMetrics {
    /// Converts it to a list of metrics, in order.
    fn into_metrics(self) -> Vec<Arc<dyn Metric<Value = f64>>>;
}

impl<M: Metric<Value = f64> + 'static> IntoMetrics for M {
    fn into_metrics(self) -> Vec<Arc<dyn Metric<Value = f64>>> {
        vec![Arc::new(self)]
    }
}

impl IntoMetrics for () {
    fn into_metrics(self) -> Vec<Arc<dyn Metric<Value = f64>>> {
        Vec::new()
    }
}

impl IntoMetrics for Vec<Arc<dyn Metric<Value = f64>>> {
    fn into_metrics(self) -> Self {
        self
    }
}

impl IntoMetrics for Vec<Box<dyn Metric<Value = f64>>> {
    fn into_metrics(self) -> Vec<Arc<dyn Metric<Value = f64>>> {
        self.into_iter().map(Arc::from).collect()
    }
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Metric<Value = f64> + 'static),+> IntoMetrics for ($($name,)+) {
            fn into_metrics(self) -> Vec<Arc<dyn Metric<Value = f64>>> {
                vec![$(Arc::new(self.$index)),+]
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
