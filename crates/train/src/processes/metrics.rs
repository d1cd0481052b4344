//! Metrics: sums over batches and ranks, and the number that is computed of them.

use brigade_data::Batch;
use brigade_torch::{Kind, Tensor};

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};

/// A metric over all samples of all ranks.
///
/// Each rank updates its own with its batches, and nothing is sent until
/// [`Accelerator::compute_metric`], which adds the states of all ranks up: so a state is sums and counts,
/// of which the value is computed. [`Accelerator::update_metric`] leaves out the duplicates that complete
/// uneven batches, so every sample counts exactly once, on any number of ranks.
///
/// ```
/// use brigade_data::{DataLoader, TensorDataset};
/// use brigade_train::{Accelerator, Kind, Metric, Result, Tensor};
///
/// /// The mean absolute error.
/// #[derive(Clone, Default)]
/// struct MeanAbsoluteError { sum: f64, count: f64 }
///
/// impl Metric for MeanAbsoluteError {
///     type Value = f64;
///
///     fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
///         self.sum += (predictions - targets).f_abs()?.f_sum(Kind::Double)?.f_double_value(&[])?;
///         self.count += targets.numel() as f64;
///         Ok(())
///     }
///
///     fn compute(&self) -> f64 { self.sum / self.count }
///
///     fn reset(&mut self) { *self = Self::default(); }
///
///     fn state(&self) -> Vec<f64> { vec![self.sum, self.count] }
///
///     fn load_state(&mut self, state: &[f64]) {
///         if let [sum, count] = *state {
///             (self.sum, self.count) = (sum, count);
///         }
///     }
/// }
///
/// let accelerator = Accelerator::builder().cpu(true).build()?;
/// let data = TensorDataset::new(Tensor::from_slice(&[1.0, 2.0, 3.0])).unwrap();
/// let loader = accelerator.prepare(DataLoader::new(data).batch_size(2))?;
/// let mut metric = MeanAbsoluteError::default();
/// for batch in &loader {
///     let batch = batch?;
///     accelerator.update_metric(&mut metric, &batch, &(&*batch + 0.5), &batch)?;
/// }
/// assert_eq!(accelerator.compute_metric(&metric)?, 0.5);
/// # Ok::<(), brigade_train::Error>(())
/// ```
pub trait Metric: Clone {
    /// What is computed: a number, or several.
    type Value;

    /// Adds a batch: one row of each for every sample.
    ///
    /// # Errors
    /// Where the shapes do not fit.
    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()>;

    /// Computes the value of what was added so far.
    fn compute(&self) -> Self::Value;

    /// Begins anew.
    fn reset(&mut self);

    /// Returns the sums that add up over ranks, as many on each.
    fn state(&self) -> Vec<f64>;

    /// Takes such sums.
    fn load_state(&mut self, state: &[f64]);
}

impl Accelerator {
    /// Adds this rank's part of a batch to a metric, without the duplicates that complete uneven batches.
    /// Sends nothing.
    ///
    /// # Errors
    /// [`Error::Rows`] for a tensor without one row per sample of the batch; those of the metric.
    pub fn update_metric<B>(
        &self,
        metric: &mut impl Metric,
        batch: &Batch<B>,
        predictions: &Tensor,
        targets: &Tensor,
    ) -> Result<()> {
        let (rows, valid) = (batch.rows(), batch.valid() as i64);
        let real = |tensor: &Tensor| {
            if tensor.size().first().copied() != Some(rows as i64) {
                return Err(Error::Rows { expected: rows, found: tensor.size() });
            }
            Ok(tensor.f_narrow(0, 0, valid)?)
        };
        let (predictions, targets) = (real(predictions)?, real(targets)?);
        if valid == 0 {
            return Ok(());
        }
        metric.update(&predictions, &targets)
    }

    /// Computes a metric's value over all ranks, the same on each. The metric itself stays this rank's, and
    /// can be updated further. Every rank calls it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], on every rank, when their states have different lengths; [`Error::Torch`] when a
    /// peer is gone.
    #[track_caller]
    pub fn compute_metric<M: Metric>(&self, metric: &M) -> Result<M::Value> {
        let Some(group) = self.traced() else { return Ok(metric.compute()) };
        let states: Vec<Vec<f64>> = group.all_gather_object(&metric.state())?;
        if let Some(rank) = states.iter().position(|state| state.len() != states[0].len()) {
            return Err(Error::InvalidArgument(format!(
                "compute_metric: rank 0's state has {} numbers, rank {rank}'s {}; make the same metric on \
                 every rank",
                states[0].len(),
                states[rank].len()
            )));
        }
        let mut sums = vec![0.0; states[0].len()];
        for state in &states {
            sums.iter_mut().zip(state).for_each(|(sum, number)| *sum += number);
        }
        let mut all = metric.clone();
        all.load_state(&sums);
        Ok(all.compute())
    }
}

/// The share of predictions that are right.
///
/// ```
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
    /// [`Error::InvalidArgument`] when the shapes differ; [`Error::Tensor`].
    pub fn update(&mut self, predicted: &Tensor, labels: &Tensor) -> Result<()> {
        same_shapes("accuracy", predicted, labels)?;
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

impl Metric for Accuracy {
    type Value = f64;

    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        Self::update(self, predictions, targets)
    }

    fn compute(&self) -> f64 {
        self.value()
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn state(&self) -> Vec<f64> {
        vec![self.right as f64, self.total as f64]
    }

    fn load_state(&mut self, state: &[f64]) {
        if let [right, total] = *state {
            (self.right, self.total) = (right as i64, total as i64);
        }
    }
}

/// The share of samples whose label is among the `k` classes with the largest scores.
///
/// ```
/// use brigade_train::{Metric, Tensor, TopK};
///
/// let scores = Tensor::from_slice2(&[[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]);
/// let mut top_2 = TopK::new(2);
/// top_2.update(&scores, &Tensor::from_slice(&[1i64, 0]))?;
/// assert_eq!(top_2.compute(), 0.5);
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopK {
    k: i64,
    right: f64,
    total: f64,
}

impl TopK {
    /// Counts the `k` largest scores.
    #[must_use]
    pub fn new(k: i64) -> Self {
        Self { k, right: 0.0, total: 0.0 }
    }
}

impl Metric for TopK {
    type Value = f64;

    /// Counts scores `[n, classes]` against labels `[n]`.
    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        let classes = match predictions.size()[..] {
            [rows, classes] if targets.size() == [rows] => classes,
            _ => {
                return Err(Error::InvalidArgument(format!(
                    "top-{}: scores have shape {:?}, labels {:?}; expected [n, classes] and [n]",
                    self.k,
                    predictions.size(),
                    targets.size()
                )));
            }
        };
        if !(1..=classes).contains(&self.k) {
            return Err(Error::InvalidArgument(format!("top-{} of {classes} classes", self.k)));
        }
        let (_, indices) = predictions.f_topk(self.k, -1, true, false)?;
        let found = indices.f_eq_tensor(&targets.f_unsqueeze(-1)?)?;
        self.right += found.f_sum(Kind::Int64)?.f_int64_value(&[])? as f64;
        self.total += targets.numel() as f64;
        Ok(())
    }

    fn compute(&self) -> f64 {
        self.right / self.total
    }

    fn reset(&mut self) {
        *self = Self::new(self.k);
    }

    fn state(&self) -> Vec<f64> {
        vec![self.right, self.total]
    }

    fn load_state(&mut self, state: &[f64]) {
        if let [right, total] = *state {
            (self.right, self.total) = (right, total);
        }
    }
}

/// The F-beta score of each class, from precision and recall: `(1 + b²) p r / (b² p + r)`, 0 for a class
/// that was neither predicted nor there.
///
/// ```
/// use brigade_train::{FBeta, Metric, Tensor};
///
/// let mut f1 = FBeta::new(1.0, 2);
/// f1.update(&Tensor::from_slice(&[1i64, 1, 0, 0]), &Tensor::from_slice(&[1i64, 0, 0, 0]))?;
/// assert_eq!(f1.compute(), [0.8, 2.0 / 3.0]); // of classes 0 and 1
/// assert_eq!(f1.mean(), (0.8 + 2.0 / 3.0) / 2.0); // "macro"
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct FBeta {
    beta: f64,
    classes: usize,
    /// Rightly predicted, predicted, and there: of each class.
    counts: Vec<f64>,
}

impl FBeta {
    /// Counts classes below `classes`. A `beta` above 1 weighs recall more; 1 is the F1 score.
    #[must_use]
    pub fn new(beta: f64, classes: usize) -> Self {
        Self { beta, classes, counts: vec![0.0; 3 * classes] }
    }

    /// Returns the mean of this rank's scores over the classes ("macro").
    #[must_use]
    pub fn mean(&self) -> f64 {
        let scores = self.compute();
        scores.iter().sum::<f64>() / scores.len() as f64
    }
}

impl Metric for FBeta {
    type Value = Vec<f64>;

    /// Counts predicted classes against labels, both `[n]`.
    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        same_shapes("F-beta", predictions, targets)?;
        let right = predictions.f_masked_select(&predictions.f_eq_tensor(targets)?)?;
        let mut counts = Vec::with_capacity(self.counts.len());
        for classes in [&right, predictions, targets] {
            let classes = classes.f_flatten(0, -1)?.f_to_kind(Kind::Int64)?;
            let found = classes.f_bincount(None::<&Tensor>, self.classes as i64)?;
            let found: Vec<i64> = Vec::try_from(&found)?;
            if found.len() != self.classes {
                return Err(Error::InvalidArgument(format!(
                    "F-beta: found class {}, expected classes below {}",
                    found.len() - 1,
                    self.classes
                )));
            }
            counts.extend(found);
        }
        self.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count as f64);
        Ok(())
    }

    fn compute(&self) -> Vec<f64> {
        let weight = self.beta * self.beta;
        let score = |class: usize| {
            let [right, predicted, there] =
                [0, 1, 2].map(|of| self.counts[of * self.classes + class]);
            let whole = weight * there + predicted;
            if whole > 0.0 { (1.0 + weight) * right / whole } else { 0.0 }
        };
        (0..self.classes).map(score).collect()
    }

    fn reset(&mut self) {
        self.counts.fill(0.0);
    }

    fn state(&self) -> Vec<f64> {
        self.counts.clone()
    }

    fn load_state(&mut self, state: &[f64]) {
        if state.len() == self.counts.len() {
            self.counts.copy_from_slice(state);
        }
    }
}

/// The weighted mean of values: of losses by their rows or tokens, say.
///
/// ```
/// use brigade_train::{Mean, Metric, Tensor};
///
/// let mut loss = Mean::default();
/// loss.update(&Tensor::from_slice(&[2.0, 5.0]), &Tensor::from_slice(&[1.0, 2.0]))?;
/// loss.add(0.0, 1.0);
/// assert_eq!(loss.compute(), 3.0);
/// # Ok::<(), brigade_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    /// Adds one value with its weight.
    pub fn add(&mut self, value: f64, weight: f64) {
        self.sum += value * weight;
        self.weight += weight;
    }
}

impl Metric for Mean {
    type Value = f64;

    /// Adds values and their weights, of one shape.
    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        same_shapes("mean", predictions, targets)?;
        let (values, weights) =
            (predictions.f_to_kind(Kind::Double)?, targets.f_to_kind(Kind::Double)?);
        self.sum += values.f_mul(&weights)?.f_sum(Kind::Double)?.f_double_value(&[])?;
        self.weight += weights.f_sum(Kind::Double)?.f_double_value(&[])?;
        Ok(())
    }

    fn compute(&self) -> f64 {
        self.sum / self.weight
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn state(&self) -> Vec<f64> {
        vec![self.sum, self.weight]
    }

    fn load_state(&mut self, state: &[f64]) {
        if let [sum, weight] = *state {
            (self.sum, self.weight) = (sum, weight);
        }
    }
}

fn same_shapes(what: &str, predictions: &Tensor, targets: &Tensor) -> Result<()> {
    if predictions.size() == targets.size() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{what}: predictions have shape {:?}, labels {:?}",
        predictions.size(),
        targets.size()
    )))
}
