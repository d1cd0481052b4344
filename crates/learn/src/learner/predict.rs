//! Validation and predictions.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_data::{BatchedDataset, DataLoader};
use brigade_metrics::gather_in_data_order;
use brigade_torch::{Error, Result, TensorTree};
use tch::{Device, Kind, Tensor};

use super::Learner;
use crate::callback::{Callback, Step};
use crate::loaders::{BatchSource, Item, ModelInput, PreparedSource, Target, encoded, source};
use crate::loss::Loss;
use crate::recording::{Meters, unique};
use crate::state::LearnerState;

/// A part of the Learner's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// The validation data of the Learner.
    #[default]
    Valid,
    /// The training data, each sample once and in order, with the training's transforms.
    Train,
}

/// Results of a validation: loss and metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// Mean loss over the samples.
    pub loss: f64,
    /// Values of the metrics, by name.
    pub metrics: Vec<(String, f64)>,
}

impl Validation {
    /// Returns the value of the metric with this name. `None` if there is no such metric.
    #[must_use]
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }
}

/// Predictions of all samples in the order of the data, on the CPU and equal on every rank.
#[derive(Debug)]
pub struct Predictions {
    /// Outputs of the model after the loss's activation: probabilities of classes, for example.
    pub predictions: Tensor,
    /// Targets of the samples. `None` if the data have none.
    pub targets: Option<Tensor>,
    /// Decoded predictions: the number of the most probable class, for example.
    pub decoded: Tensor,
    /// Loss of each sample, the mean over its elements. `None` without targets.
    pub losses: Option<Tensor>,
}

/// The prediction of one item.
#[derive(Debug)]
pub struct Prediction {
    /// Name of the class. `None` if the data have no class names.
    pub class: Option<String>,
    /// Decoded prediction: the number of the most probable class, for example.
    pub decoded: Tensor,
    /// Output of the model after the loss's activation: probabilities of classes, for example.
    pub probabilities: Tensor,
}

/// Records loss and metrics of a pass.
#[derive(Debug)]
struct Measuring {
    meters: Meters,
    found: Rc<RefCell<Vec<f64>>>,
}

impl Callback for Measuring {
    fn order(&self) -> i32 {
        50
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.meters.add(learner)?)
    }

    fn after_validate(&mut self, learner: &mut LearnerState) -> Step {
        if learner.validation_was_cancelled() {
            return Err(cancelled("validation").into());
        }
        *self.found.borrow_mut() = self.meters.values(learner)?;
        Ok(())
    }
}

/// Collects the outputs of a pass.
#[derive(Debug, Default)]
struct Gathered {
    places: Vec<usize>,
    predictions: Vec<Tensor>,
    targets: Vec<Tensor>,
}

#[derive(Debug)]
struct Gathering(Rc<RefCell<Gathered>>);

impl Callback for Gathering {
    fn order(&self) -> i32 {
        50
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        let Some(predictions) = learner.predictions() else { return Ok(()) };
        let samples = learner.batch_samples() as i64;
        let real = |tensor: &Tensor| -> Result<Tensor> {
            Ok(tensor.f_narrow(0, 0, samples)?.f_detach()?.f_to_device(Device::Cpu)?)
        };
        let mut gathered = self.0.borrow_mut();
        gathered.places.push(learner.batch.place);
        gathered.predictions.push(real(predictions)?);
        if let Some(target) = learner.target() {
            gathered.targets.push(real(target)?);
        }
        Ok(())
    }

    fn after_validate(&mut self, learner: &mut LearnerState) -> Step {
        if learner.validation_was_cancelled() {
            Err(cancelled("prediction").into())
        } else {
            Ok(())
        }
    }
}

fn cancelled(what: &str) -> Error {
    Error::invalid_argument(format!(
        "a callback has cancelled the {what}; return `false` from its `in_evaluation` if it is for fits \
         only"
    ))
}

/// Converts an output with a batch dimension of 1 to a prediction.
pub(crate) fn predicted(
    loss: &dyn Loss,
    output: &Tensor,
    classes: Option<&[String]>,
) -> Result<Prediction> {
    let probabilities = loss.activation(output)?.f_squeeze_dim(0)?.f_to_device(Device::Cpu)?;
    let decoded = loss.decode(output)?.f_squeeze_dim(0)?.f_to_device(Device::Cpu)?;
    let class = match (classes, decoded.kind(), decoded.numel()) {
        (Some(names), Kind::Int64, 1) => {
            let number = usize::try_from(decoded.f_sum(Kind::Int64)?.f_int64_value(&[])?).ok();
            number.and_then(|number| names.get(number).cloned())
        }
        _ => None,
    };
    Ok(Prediction { class, decoded, probabilities })
}

impl Learner {
    /// Computes loss and metrics on the validation data. The recorder is not changed.
    ///
    /// # Errors
    /// Fails if there are no such data. Otherwise returns the same errors as [`Learner::fit`].
    pub fn validate(&mut self) -> Result<Validation> {
        self.validate_on(Part::Valid)
    }

    /// Computes loss and metrics on a part of the data, as [`Learner::validate`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::validate`].
    pub fn validate_on(&mut self, part: Part) -> Result<Validation> {
        unique(&self.state.metrics.iter().map(|metric| metric.name()).collect::<Vec<_>>())?;
        let found = Rc::new(RefCell::new(Vec::new()));
        let measuring = Measuring { meters: Meters::default(), found: Rc::clone(&found) };
        self.pass(part, measuring)?;
        let found = found.take();
        let loss = found.first().copied().unwrap_or(f64::NAN);
        let names = self.state.metrics.iter().map(|metric| metric.name());
        Ok(Validation { loss, metrics: names.zip(found.iter().skip(1).copied()).collect() })
    }

    /// Predicts the validation data, in their order on any number of ranks (fastai's `get_preds`).
    ///
    /// # Errors
    /// Fails if there are no such data. Otherwise returns the same errors as [`Learner::fit`].
    pub fn predictions(&mut self) -> Result<Predictions> {
        self.predictions_on(Part::Valid)
    }

    /// Predicts a part of the data, as [`Learner::predictions`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::predictions`].
    pub fn predictions_on(&mut self, part: Part) -> Result<Predictions> {
        let gathered = Rc::new(RefCell::new(Gathered::default()));
        let places = match (part, &self.valid) {
            (Part::Train, _) => self.train.in_order().places()?,
            (Part::Valid, Some(valid)) => valid.places()?,
            (Part::Valid, None) => None,
        };
        self.pass(part, Gathering(Rc::clone(&gathered)))?;
        self.collected(gathered.take(), places.as_deref())
    }

    /// Predicts other data, in batches `(X, target)`, or `(X, None::<Tensor>)` without targets.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::predictions`].
    pub fn predictions_of<D, X, Y>(&mut self, loader: DataLoader<D>) -> Result<Predictions>
    where
        D: BatchedDataset<Batch = (X, Y)> + 'static,
        (X, Y): TensorTree<Owned = (X, Y)>,
        X: ModelInput,
        Y: Target,
    {
        let source = source("prediction", loader, Ok)?;
        self.predictions_from(&*source)
    }

    pub(crate) fn predictions_from(&mut self, source: &dyn BatchSource) -> Result<Predictions> {
        let gathered = Rc::new(RefCell::new(Gathered::default()));
        let own = Gathering(Rc::clone(&gathered));
        let places = source.places()?;
        self.distributed(|learner| {
            let source = source.prepare(&learner.state.accelerator, false)?;
            learner.evaluate(&*source, vec![Box::new(own)])
        })?;
        self.collected(gathered.take(), places.as_deref())
    }

    /// Predicts the validation data `passes` times with the training's transforms and once without them, and mixes the
    /// results (test-time augmentation, fastai's `tta`): `beta` is the weight of the prediction without transforms,
    /// 0.25 in fastai.
    ///
    /// # Errors
    /// Fails if the data do not support repeated transforms, as the data blocks of images do. Also returns the errors
    /// of [`Learner::predictions`].
    pub fn tta(&mut self, passes: usize, beta: f64) -> Result<Predictions> {
        let augmented = self.augmented_valid.take().ok_or_else(|| {
            Error::invalid_argument(
                "test-time augmentation needs validation data with the training's transforms: a DataBlock of \
                 images has them",
            )
        })?;
        let outcome = self.distributed(|learner| {
            let mut sum: Option<Tensor> = None;
            for _ in 0..passes.max(1) {
                let pass = learner.predictions_from(&*augmented)?.predictions;
                sum = Some(match sum {
                    None => pass,
                    Some(sum) => sum.f_add(&pass)?,
                });
            }
            let plain = learner.predictions()?;
            let Some(sum) = sum else { return Ok(plain) };
            let mean = sum.f_div_scalar(passes.max(1) as f64)?;
            let predictions = mean.f_lerp(&plain.predictions, beta)?;
            let decoded = learner.state.loss.decode_activated(&predictions)?;
            Ok(Predictions { predictions, decoded, losses: None, targets: plain.targets })
        });
        self.augmented_valid = Some(augmented);
        outcome
    }

    /// Predicts one item: a file or its bytes if the data have a codec, such as for images; or a tensor of the model's
    /// input without the batch dimension. One rank alone can call it outside of [`Learner::distributed`]. With a
    /// sharded model every rank must call it, each with its own item. If ranks divide layers or sequences, the ranks of
    /// a group must pass the same item.
    ///
    /// # Errors
    /// Fails when the item cannot be read or does not fit.
    pub fn predict(&mut self, item: impl Into<Item>) -> Result<Prediction> {
        let item = item.into();
        let inputs = encoded(&item, self.state.codec.as_deref())?;
        let output = self.forward(&inputs)?;
        predicted(&*self.state.loss, &output, self.state.classes.as_deref())
    }

    /// Runs `body` with the model in evaluation mode and without autograd, to use the module of the Learner directly,
    /// such as for generating text. One rank alone can call it; with a sharded model, which is whole within the scope,
    /// every rank calls it. The next fit switches back to training.
    ///
    /// # Errors
    /// Returns the errors of `body`, and of [`LearnerState::gathered`].
    pub fn evaluated<R>(&mut self, body: impl FnOnce(&LearnerState) -> Result<R>) -> Result<R> {
        self.state.model.set_training(false);
        let _without_autograd = tch::no_grad_guard();
        self.state.gathered(body)
    }

    /// Returns the output of the model in evaluation, with the Accelerator's precision.
    pub(crate) fn forward(&mut self, inputs: &[Tensor]) -> Result<Tensor> {
        let device = self.state.model.parameters().first().map(|it| it.tensor.device());
        let device = device.unwrap_or(Device::Cpu);
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.f_to_device(device))
            .collect::<std::result::Result<_, _>>()?;
        self.state.model.set_training(false);
        let _without_autograd = tch::no_grad_guard();
        let model = &self.state.model;
        let output = if device == self.state.accelerator.device() {
            self.state.accelerator.autocast(|| model.forward(&inputs))??
        } else {
            model.forward(&inputs)?
        };
        Ok(output.f_to_kind(match output.kind() {
            Kind::Half | Kind::BFloat16 => Kind::Float,
            kind => kind,
        })?)
    }

    /// Runs a pass over a part of the data with this callback.
    fn pass(&mut self, part: Part, own: impl Callback) -> Result<()> {
        self.distributed(|learner| match part {
            Part::Valid => {
                let Some(loaders) = learner.prepared.take() else { return Ok(()) };
                let outcome = match &loaders.valid {
                    Some(valid) => learner.evaluate(&**valid, vec![Box::new(own)]),
                    None => Err(Error::invalid_argument(
                        "the Loaders have no validation data; make them with `Loaders::new`",
                    )),
                };
                learner.prepared = Some(loaders);
                outcome
            }
            Part::Train => {
                let epoch = learner.train.epoch();
                let source: Box<dyn PreparedSource> =
                    learner.train.in_order().prepare(&learner.state.accelerator, false)?;
                let outcome = learner.evaluate(&*source, vec![Box::new(own)]);
                learner.train.set_epoch(epoch);
                outcome
            }
        })
    }

    /// Joins the outputs of all ranks. `order` is the position of each sample in the order of the batches, if that
    /// differs from the data's.
    fn collected(&self, gathered: Gathered, order: Option<&[i64]>) -> Result<Predictions> {
        let Gathered { places, predictions, targets } = gathered;
        let group = self.state.accelerator.data_processes().group();
        let order = order.map(Tensor::from_slice);
        let restored = |joined: Option<Tensor>| match (joined, &order) {
            (Some(joined), Some(order)) if joined.size().first() == order.size().first() => {
                joined.f_index_select(0, order).map(Some)
            }
            (joined, _) => Ok(joined),
        };
        let outputs = restored(gather_in_data_order(group.as_ref(), &places, predictions)?)?
            .ok_or_else(|| Error::invalid_argument("there was no batch to predict"))?;
        let targets = restored(gather_in_data_order(group.as_ref(), &places, targets)?)?;
        let _without_autograd = tch::no_grad_guard();
        let loss = &self.state.loss;
        let losses = match &targets {
            Some(targets) => {
                let each = loss.each(&outputs, targets)?;
                // With a loss for each element of a sample: their mean.
                let rows = outputs.size()[0].max(1);
                let each = each.f_reshape([rows, -1])?;
                Some(each.f_mean_dim(1, false, None)?)
            }
            None => None,
        };
        Ok(Predictions {
            predictions: loss.activation(&outputs)?,
            decoded: loss.decode(&outputs)?,
            targets,
            losses,
        })
    }
}
