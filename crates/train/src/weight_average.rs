//! Moving averages of a model's weights, of which each rank averages the tensors that it holds.

use std::sync::Arc;

use brigade_checkpoint::{TensorInfo, Value};
use brigade_nn::Model;
use brigade_torch::{Error, NamedTensor, Result, Sharder};
use parking_lot::Mutex;
use tch::Tensor;

use crate::model::PreparedModel;
use crate::stateful::{Stateful, infos, mismatch, same_shape};

/// A moving average of a model's parameters and floating-point buffers (PyTorch's `AveragedModel`, timm's `ModelEma`):
/// exponential ([`WeightAverage::update`]) or of equal weights ([`WeightAverage::update_mean`]).
///
/// Each rank averages the tensors that it holds, without messages: its shards with `zero1` to `zero3`, its parts of
/// divided layers, the experts and the pipeline stages that it has. Averages have the types of their tensors, and their
/// memory. The state in a checkpoint contains each averaged tensor under its own name, so it loads on any mesh.
///
/// The tensors of the model are kept, as an optimizer keeps its parameters.
///
/// ```
/// use std::sync::Arc;
/// use brigade_nn::{Linear, Model};
/// use brigade_optim::Sgd;
/// use brigade_train::{Accelerator, WeightAverage};
/// use tch::{Device, Kind, Tensor};
///
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let model = Model::new(|path| Linear::new(path, 4, 1))?;
/// let optimizer = Sgd::new(0.1).build(&model)?;
/// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
/// let average = Arc::new(WeightAverage::new(&model)?);
/// accelerator.checkpoints().register(&average);
/// let batch = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
/// let loss = model.forward(&batch)?.square().mean(Kind::Float);
/// accelerator.backward(&loss)?;
/// optimizer.step()?;
/// average.update(0.999)?;
/// // Evaluate, or save the weights, with the average in the model.
/// average.swap()?;
/// let averaged = model.forward(&batch)?;
/// average.swap()?;
/// assert!(averaged.mean(Kind::Float) != model.forward(&batch)?.mean(Kind::Float));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightAverage {
    inner: Mutex<Inner>,
    /// The sharder of a sharded model, whose gathered parameters follow the shards.
    sharder: Option<Arc<Sharder>>,
}

#[derive(Debug)]
struct Inner {
    averaged: Vec<Averaged>,
    /// Number of updates.
    count: i64,
}

#[derive(Debug)]
struct Averaged {
    name: String,
    /// The model's own tensor. Checkpoints find this rank's part by its identity.
    tensor: Tensor,
    average: Tensor,
}

impl WeightAverage {
    /// Makes the average of a prepared model's current weights. No messages are sent.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::OutOfMemory`] if there is no memory for the averages.
    pub fn new<M>(model: &PreparedModel<M>) -> Result<Self> {
        let sharder = model.sharder().cloned();
        Self::of_tensors(model.local_parameters(), model.inner().buffers(), sharder)
    }

    /// Makes the average of the current weights of a model that is not prepared.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::OutOfMemory`] if there is no memory for the averages.
    pub fn of_model<M>(model: &Model<M>) -> Result<Self> {
        Self::of_tensors(model.parameters(), model.buffers(), None)
    }

    fn of_tensors(
        parameters: Vec<NamedTensor>,
        buffers: Vec<NamedTensor>,
        sharder: Option<Arc<Sharder>>,
    ) -> Result<Self> {
        let buffers = buffers.into_iter().filter(|buffer| buffer.tensor.is_floating_point());
        let averaged = parameters.into_iter().chain(buffers).map(|NamedTensor { name, tensor }| {
            let value = tensor.f_detach()?;
            let mut average = value.f_empty_like()?;
            average.f_copy_(&value)?;
            Ok(Averaged { name, tensor, average })
        });
        let averaged = averaged.collect::<Result<_>>()?;
        Ok(Self { inner: Mutex::new(Inner { averaged, count: 0 }), sharder })
    }

    /// Moves the average towards the model's weights: `average = decay * average + (1 - decay) * weight`. To be called
    /// after each step of the optimizer. Within a window of accumulated gradients, weights do not change: call it where
    /// [`sync_gradients`](crate::Accelerator::sync_gradients) is `true`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a decay outside of 0 to 1; nothing was changed then.
    pub fn update(&self, decay: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&decay) {
            return Err(Error::invalid_argument(format!(
                "the decay of the average is {decay}, expected a number from 0 to 1, such as 0.999"
            )));
        }
        self.move_by(|_| 1.0 - decay)
    }

    /// Adds the model's weights to an average of equal weights (stochastic weight averaging, Izmailov et al., 2018).
    /// The first call replaces the values with which the average began.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if libtorch fails.
    pub fn update_mean(&self) -> Result<()> {
        self.move_by(|updates| 1.0 / updates as f64)
    }

    fn move_by(&self, weight: impl FnOnce(i64) -> f64) -> Result<()> {
        let mut inner = self.inner.lock();
        inner.count += 1;
        let weight = weight(inner.count);
        for Averaged { tensor, average, .. } in &mut inner.averaged {
            let _ = average.f_lerp_(&tensor.f_detach()?, weight)?;
        }
        Ok(())
    }

    /// Exchanges the averages and the model's weights: an evaluation or a saved file between two calls has the average.
    /// With a sharded model every rank must call it.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn swap(&self) -> Result<()> {
        for Averaged { tensor, average, .. } in &mut self.inner.lock().averaged {
            let mut value = tensor.f_detach()?;
            let mut before = value.f_empty_like()?;
            before.f_copy_(&value)?;
            value.f_copy_(average)?;
            average.f_copy_(&before)?;
        }
        self.sharder.as_ref().map_or(Ok(()), |sharder| sharder.shards_changed())
    }

    /// Returns the number of updates.
    #[must_use]
    pub fn updates(&self) -> i64 {
        self.inner.lock().count
    }

    /// Returns this rank's averages, under the names of the model's tensors. They share memory with the average.
    #[must_use]
    pub fn averages(&self) -> Vec<NamedTensor> {
        let named = |it: &Averaged| NamedTensor {
            name: it.name.clone(),
            tensor: it.average.shallow_clone(),
        };
        self.inner.lock().averaged.iter().map(named).collect()
    }
}

impl Stateful for WeightAverage {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let inner = self.inner.lock();
        let tensors = inner
            .averaged
            .iter()
            .map(|it| (it.name.clone(), Value::Tensor(it.average.shallow_clone())));
        Ok(Value::dict([("count", Value::Int(inner.count)), ("tensors", Value::dict(tensors))]))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let tensors = state.get("tensors").ok_or("the state has no `tensors`")?;
        let inner = self.inner.lock();
        for Averaged { name, average, .. } in &inner.averaged {
            let found = tensors.get(name).and_then(Value::as_tensor);
            same_shape(name, average, found.ok_or_else(|| format!("it lacks `{name}`"))?)?;
        }
        let known = |name: &str| inner.averaged.iter().any(|it| it.name == name);
        let mut names = tensors.as_dict().into_iter().flatten().filter_map(|(key, _)| key.as_str());
        match names.find(|name| !known(name)) {
            Some(name) => Err(format!("it has `{name}`, which the model lacks")),
            None => Ok(()),
        }
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.check_state_dict(&infos(state)?).map_err(mismatch)?;
        let mut inner = self.inner.lock();
        for Averaged { name, average, .. } in &mut inner.averaged {
            let value = state.get("tensors").and_then(|it| it.get(name)).and_then(Value::as_tensor);
            if let Some(value) = value {
                average.f_copy_(value)?;
            }
        }
        inner.count = state.get("count").and_then(Value::as_int).unwrap_or(0);
        Ok(())
    }

    fn shards(&self) -> Vec<(String, Tensor)> {
        let place = |it: &Averaged| (format!("tensors.{}", it.name), it.tensor.shallow_clone());
        self.inner.lock().averaged.iter().map(place).collect()
    }
}
