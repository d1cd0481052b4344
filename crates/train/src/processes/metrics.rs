//! Metrics: sums over batches and ranks, and the number that is computed of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use brigade_data::Batch;
use brigade_torch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::processes::Processes;

/// A metric over all samples of all ranks.
///
/// Each rank updates its own with its batches, and nothing is sent until
/// [`crate::Accelerator::compute_metric`], which adds the states of all ranks up: so a state is sums and counts,
/// of which the value is computed. The metrics of this crate leave the sums of tensors on a GPU there until they
/// are asked for, so that no batch waits for the device. [`crate::Accelerator::update_metric`] leaves out the duplicates that complete
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

    /// Fails where a batch was wrong in a way that could not be told on the device without waiting for it.
    /// [`crate::Accelerator::compute_metric`] calls it. The provided one finds nothing.
    ///
    /// # Errors
    /// The metric's own.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Computes the value of what was added so far.
    fn compute(&self) -> Self::Value;

    /// Begins anew.
    fn reset(&mut self);

    /// Returns the sums that add up over ranks, as many on each.
    fn state(&self) -> Vec<f64>;

    /// Takes such sums.
    fn load_state(&mut self, state: &[f64]);
}

/// Adds this rank's part of a batch to a metric, without the duplicates that complete uneven batches.
pub(crate) fn update<B>(
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

impl Processes {
    /// Computes a metric's value over all ranks, the same on each.
    #[track_caller]
    pub(crate) fn compute_metric<M: Metric>(&self, metric: &M) -> Result<M::Value> {
        metric.check()?;
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

/// Sums that a metric keeps: of tensors on a GPU on that device, until they are read.
#[derive(Debug, Default)]
struct Sums {
    host: Vec<f64>,
    /// Behind a lock, since a tensor may not be shared by threads.
    device: Mutex<Option<Tensor>>,
}

impl Clone for Sums {
    fn clone(&self) -> Self {
        // Never changed in place, so that clones may share it.
        let device = self.device().as_ref().map(Tensor::shallow_clone);
        Self { host: self.host.clone(), device: Mutex::new(device) }
    }
}

impl PartialEq for Sums {
    fn eq(&self, other: &Self) -> bool {
        self.read() == other.read()
    }
}

impl Sums {
    fn zeros(count: usize) -> Self {
        Self::of(vec![0.0; count])
    }

    fn of(host: Vec<f64>) -> Self {
        Self { host, device: Mutex::default() }
    }

    fn device(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a tensor of as many numbers, of any kind.
    fn add(&mut self, numbers: &Tensor) -> Result<()> {
        let numbers = numbers.f_reshape([-1])?.f_to_kind(Kind::Double)?;
        if numbers.device() == Device::Cpu {
            self.add_host(&Vec::<f64>::try_from(&numbers)?);
            return Ok(());
        }
        let mut device = self.device();
        *device = Some(match device.take() {
            Some(before) => before.f_add(&numbers)?,
            None => numbers,
        });
        Ok(())
    }

    fn add_host(&mut self, numbers: &[f64]) {
        self.host.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
    }

    /// Returns all sums. Waits for the device; NaN where it has failed, which the next operation says.
    fn read(&self) -> Vec<f64> {
        let device = self.device();
        let Some(device) = &*device else { return self.host.clone() };
        let lost = || vec![f64::NAN; self.host.len()];
        let read = device.f_to_device(Device::Cpu).and_then(|it| Vec::<f64>::try_from(&it));
        let device = read.unwrap_or_else(|_| lost());
        self.host.iter().zip(device).map(|(host, device)| host + device).collect()
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
#[derive(Debug, Clone, PartialEq)]
pub struct Accuracy {
    right: Sums,
    total: i64,
}

impl Default for Accuracy {
    fn default() -> Self {
        Self { right: Sums::zeros(1), total: 0 }
    }
}

impl Accuracy {
    /// Counts predicted classes against labels, both `[n]`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the shapes differ; [`Error::Tensor`].
    pub fn update(&mut self, predicted: &Tensor, labels: &Tensor) -> Result<()> {
        same_shapes("accuracy", predicted, labels)?;
        self.right.add(&predicted.f_eq_tensor(labels)?.f_sum(Kind::Int64)?)?;
        self.total += labels.numel() as i64;
        Ok(())
    }

    /// Right over total, 0 to 1; NaN before anything was counted.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.right.read()[0] / self.total as f64
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
        vec![self.right.read()[0], self.total as f64]
    }

    fn load_state(&mut self, state: &[f64]) {
        if let [right, total] = *state {
            self.right = Sums::of(vec![right]);
            self.total = total as i64;
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
#[derive(Debug, Clone, PartialEq)]
pub struct TopK {
    k: i64,
    right: Sums,
    total: f64,
}

impl TopK {
    /// Counts the `k` largest scores.
    #[must_use]
    pub fn new(k: i64) -> Self {
        Self { k, right: Sums::zeros(1), total: 0.0 }
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
        self.right.add(&found.f_sum(Kind::Int64)?)?;
        self.total += targets.numel() as f64;
        Ok(())
    }

    fn compute(&self) -> f64 {
        self.right.read()[0] / self.total
    }

    fn reset(&mut self) {
        *self = Self::new(self.k);
    }

    fn state(&self) -> Vec<f64> {
        vec![self.right.read()[0], self.total]
    }

    fn load_state(&mut self, state: &[f64]) {
        if let [right, total] = *state {
            self.right = Sums::of(vec![right]);
            self.total = total;
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
    /// Rightly predicted, predicted, and there: of each class, and of what is none.
    counts: Sums,
}

impl FBeta {
    /// Counts classes below `classes`. A `beta` above 1 weighs recall more; 1 is the F1 score.
    #[must_use]
    pub fn new(beta: f64, classes: usize) -> Self {
        Self { beta, classes, counts: Sums::zeros(3 * (classes + 1)) }
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
        let flat = |tensor: &Tensor| {
            let classes = tensor.f_flatten(0, -1)?.f_to_kind(Kind::Int64)?;
            // Numbers that are no class are counted together, behind the classes.
            let outside = classes.f_lt(0)?.f_logical_or(&classes.f_ge(self.classes as i64)?)?;
            classes.f_masked_fill(&outside, self.classes as i64)
        };
        let (predicted, there) = (flat(predictions)?, flat(targets)?);
        let options = (Kind::Double, predicted.device());
        let hits = predicted.f_eq_tensor(&there)?.f_to_kind(Kind::Double)?;
        let ones = Tensor::f_ones_like(&hits)?;
        let count = |classes: &Tensor, weights: &Tensor| {
            Tensor::f_zeros([self.classes as i64 + 1], options)?.f_scatter_add(0, classes, weights)
        };
        let counts = [count(&there, &hits)?, count(&predicted, &ones)?, count(&there, &ones)?];
        let counts = Tensor::f_cat(&counts, 0)?;
        if options.1 == Device::Cpu {
            self.check_counts(&Vec::try_from(&counts)?)?;
        }
        self.counts.add(&counts)
    }

    fn check(&self) -> Result<()> {
        self.check_counts(&self.counts.read())
    }

    fn compute(&self) -> Vec<f64> {
        let weight = self.beta * self.beta;
        let counts = self.counts.read();
        let score = |class: usize| {
            let [right, predicted, there] =
                [0, 1, 2].map(|of| counts[of * (self.classes + 1) + class]);
            let whole = weight * there + predicted;
            if whole > 0.0 { (1.0 + weight) * right / whole } else { 0.0 }
        };
        (0..self.classes).map(score).collect()
    }

    fn reset(&mut self) {
        *self = Self::new(self.beta, self.classes);
    }

    fn state(&self) -> Vec<f64> {
        self.counts.read()
    }

    fn load_state(&mut self, state: &[f64]) {
        if state.len() == self.counts.host.len() {
            self.counts = Sums::of(state.to_vec());
        }
    }
}

impl FBeta {
    fn check_counts(&self, counts: &[f64]) -> Result<()> {
        let outside = |of: usize| counts[of * (self.classes + 1) + self.classes];
        if outside(1) + outside(2) > 0.0 {
            return Err(Error::InvalidArgument(format!(
                "F-beta: found {} predictions and {} targets that are not classes below {}",
                outside(1),
                outside(2),
                self.classes
            )));
        }
        Ok(())
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
#[derive(Debug, Clone, PartialEq)]
pub struct Mean {
    /// Of the weighted values, and of the weights.
    sums: Sums,
}

impl Default for Mean {
    fn default() -> Self {
        Self { sums: Sums::zeros(2) }
    }
}

impl Mean {
    /// Adds one value with its weight.
    pub fn add(&mut self, value: f64, weight: f64) {
        self.sums.add_host(&[value * weight, weight]);
    }
}

impl Metric for Mean {
    type Value = f64;

    /// Adds values and their weights, of one shape.
    fn update(&mut self, predictions: &Tensor, targets: &Tensor) -> Result<()> {
        same_shapes("mean", predictions, targets)?;
        let (values, weights) =
            (predictions.f_to_kind(Kind::Double)?, targets.f_to_kind(Kind::Double)?);
        let sum = values.f_mul(&weights)?.f_sum(Kind::Double)?;
        self.sums.add(&Tensor::f_stack(&[sum, weights.f_sum(Kind::Double)?], 0)?)
    }

    fn compute(&self) -> f64 {
        let sums = self.sums.read();
        sums[0] / sums[1]
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn state(&self) -> Vec<f64> {
        self.sums.read()
    }

    fn load_state(&mut self, state: &[f64]) {
        if state.len() == 2 {
            self.sums = Sums::of(state.to_vec());
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
