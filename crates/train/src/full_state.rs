//! Whole states of sharded models and optimizers, which rank 0 alone has.

use std::collections::{HashMap, HashSet};

use brigade_checkpoint::{TensorInfo, Value};
use brigade_nn::StateDict;
use brigade_optim::OptimizerState;
use brigade_torch::{Error, Result, TensorId};
use tch::{Device, Tensor};

use crate::checkpoint::{joined_optimizers, restrict_optimizer};
use crate::model::PreparedModel;
use crate::optimizer::PreparedOptimizer;
use crate::pipeline::PipelineRanks;
use crate::sharding::Part;
use crate::stateful::{Stateful, infos, mismatch, no_state};

impl<M> PreparedModel<M> {
    /// Returns the model's whole parameters and saved buffers on rank 0, copied to the host's memory, and `None` on the
    /// other ranks (PyTorch's `get_model_state_dict` with `full_state_dict` and `cpu_offload`). Every rank must call
    /// it. In addition to the shards of a sharded model, and to the copies on rank 0, a rank has at most one whole
    /// tensor in memory.
    ///
    /// [`Accelerator::save_model`](crate::Accelerator::save_model) writes a file without the copies.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator =
    ///     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let mut model = accelerator.prepare(Model::new(|path| Linear::new(path, 4, 2))?)?;
    /// let state = model.full_state_dict()?;
    /// assert_eq!(state.as_ref().unwrap().get("weight").unwrap().size(), [2, 4]);
    /// model.load_full_state_dict(state.as_ref())?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone; [`brigade_torch::ErrorKind::Tensor`] when
    /// memory runs out.
    pub fn full_state_dict(&self) -> Result<Option<StateDict>> {
        let main = self.everyone().is_main_process();
        let mut full = StateDict::new();
        if let Some(pipeline) = self.pipeline() {
            self.each_of_stages(pipeline, |name, whole| {
                full.insert(name, copied(whole, Device::Cpu)?)
            })?;
            return Ok(main.then_some(full));
        }
        let spread = self.spread();
        for (name, tensor) in self.inner().state_dict() {
            let whole = match &spread {
                Some(spread) => spread.whole_value(&name, &tensor)?,
                None => tensor,
            };
            if main {
                full.insert(name, copied(&whole, Device::Cpu)?)?;
            }
        }
        Ok(main.then_some(full))
    }

    /// Replaces parameters and saved buffers by those of rank 0's `state`; the other ranks pass `None`. Every rank
    /// calls it, and gets its rows of a sharded model. Names and shapes must fit as for
    /// [`Model::load_state_dict`](brigade_nn::Model::load_state_dict).
    ///
    /// # Errors
    /// Fails on every rank, with nothing changed, when rank 0 has no state or it does not fit;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn load_full_state_dict(&mut self, state: Option<&StateDict>) -> Result<()> {
        if let Some(pipeline) = self.pipeline() {
            return self.take_state_of_stages(pipeline, state);
        }
        let processes = self.everyone();
        let Some(spread) = self.spread() else {
            processes.on_main_process(|| self.inner_mut().load_state_dict(given(state)?))?;
            return self.broadcast_values();
        };
        let mut from: HashMap<TensorId, &Tensor> = HashMap::new();
        processes.on_main_process(|| {
            let (matched, _) = self.inner().matched_state(given(state)?)?;
            for (values, into) in matched {
                from.entry(TensorId::of(&into)).or_insert(values);
            }
            Ok::<_, Error>(())
        })?;
        spread.take_values(|tensor, into| {
            let values = from.get(&TensorId::of(tensor));
            Ok(values.map_or(Ok(()), |values| into.shallow_clone().f_copy_(values))?)
        })
    }
}

impl PreparedOptimizer {
    /// Returns the optimizer's state on rank 0, its tensors whole and copied to the host's memory, and `None` on the
    /// other ranks (PyTorch's `get_optimizer_state_dict` with `full_state_dict` and `cpu_offload`). Every rank calls
    /// it.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_optim::AdamW;
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator =
    ///     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// let optimizer = AdamW::default().lr(0.25).build(&model)?;
    /// let (_model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let state = optimizer.full_state_dict()?;
    /// optimizer.load_full_state_dict(state)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedModel::full_state_dict`].
    pub fn full_state_dict(&self) -> Result<Option<OptimizerState>> {
        let main = self.everyone().is_main_process();
        let parts = self.parts();
        let (group, regions) = (self.gather_group(), self.regions());
        let whole = Stateful::state_dict(self)?.try_map(&mut |place, tensor| {
            let whole = match parts.get(place).filter(|part| is_own(part, &tensor)) {
                Some(part) => part.gather(&tensor, group.as_ref(), &regions)?,
                None => tensor,
            };
            let is_kept = main || self.pipeline().is_some();
            if is_kept { copied(&whole, Device::Cpu) } else { Ok(whole) }
        })?;
        let whole = match self.pipeline() {
            Some(pipeline) => joined(pipeline, whole)?,
            None => whole,
        };
        if main { state_of(&whole).map(Some) } else { Ok(None) }
    }

    /// Distributes rank 0's state, with whole tensors, to the ranks: each gets the part that it needs. The other ranks
    /// pass `None`. Every rank calls it. The optimizer itself is not changed.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 has no state, or a part in the place of a whole tensor;
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn scatter_state_dict(&self, state: Option<OptimizerState>) -> Result<OptimizerState> {
        let parts = self.parts();
        let processes = self.everyone();
        let value = processes.on_main_process(|| {
            let state = state.ok_or_else(no_state)?;
            // A part would fit each rank's own state, so every rank would continue from rank 0's part.
            state.to_value().try_map(&mut |place, tensor| match parts.get(place) {
                Some(part) if tensor.size() != sizes(part) => Err(mismatch(format!(
                    "`{place}` has shape {:?} in the optimizer's state, expected that of the whole, {:?}",
                    tensor.size(),
                    sizes(part)
                ))),
                _ => Ok(tensor),
            })
        })?;
        let own = processes.broadcast_values(value, &mut |place, whole| {
            match parts.get(place) {
                // A copy, so that the memory of the whole tensor is freed.
                Some(part) => copied(&part.take(&whole)?, whole.device()),
                None => Ok(whole),
            }
        })?;
        let mut own = state_of(&own)?;
        if self.pipeline().is_some() {
            let names = self.parameter_names()?;
            restrict_optimizer(&mut own, |name| names.contains(name));
        }
        Ok(own)
    }

    /// Loads rank 0's optimizer state, with whole tensors; the other ranks pass `None`. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`brigade_optim::Optimizer::load_state_dict`] and
    /// [`PreparedOptimizer::scatter_state_dict`], on every rank and with nothing changed.
    pub fn load_full_state_dict(&mut self, state: Option<OptimizerState>) -> Result<()> {
        let own = self.scatter_state_dict(state)?;
        let mut optimizer = self.settled()?;
        let fits = optimizer.check_state(&own, |tensor| tensor.size());
        let fits = fits.map_err(|error| mismatch(error.to_string()));
        self.everyone().agree("load_full_state_dict", fits)?;
        optimizer.adopt_state(own)
    }
}

/// Joins the optimizer states of all stages, whose tensors are whole, on the first rank of the pipeline. All of its
/// ranks take part.
fn joined(pipeline: &PipelineRanks, own: Value<Tensor>) -> Result<Value<Tensor>> {
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    let infos = infos(&own)?;
    let tree = own.try_map(&mut |place, tensor| {
        tensors.insert(place.to_owned(), tensor);
        Ok::<_, Error>(place.to_owned())
    })?;
    let mut places: Vec<(String, TensorInfo)> = Vec::new();
    infos.try_map(&mut |place, info| {
        places.push((place.to_owned(), info));
        Ok::<_, Error>(())
    })?;
    let group = pipeline.group();
    let all: Vec<(serde_json::Value, Vec<(String, TensorInfo)>)> =
        group.all_gather_object(&(tree.to_json(), places))?;
    let trees = all.iter().map(|(tree, _)| Value::from_json(tree)).collect::<Result<Vec<_>, _>>();
    let trees = trees.map_err(Error::invalid_argument)?;
    let tree = joined_optimizers(&trees, &pipeline.tensor_order())?;
    let mut known = HashSet::new();
    let mut whole = HashMap::new();
    for (owner, (_, places)) in all.iter().enumerate() {
        for (place, info) in places.iter().filter(|(place, _)| known.insert(place.clone())) {
            let own = tensors.remove(place).filter(|_| group.rank() == owner);
            if let Some(found) = pipeline.to_first(owner, own, place, info)? {
                whole.insert(place.clone(), copied(&found, Device::Cpu)?);
            }
        }
    }
    if group.rank() > 0 {
        return Ok(Value::None);
    }
    tree.try_map(&mut |_, place| {
        whole.remove(&place).ok_or_else(|| Error::invalid_argument(format!("no rank has {place}")))
    })
}

fn given(state: Option<&StateDict>) -> Result<&StateDict> {
    state.ok_or_else(no_state)
}

fn state_of(value: &Value<Tensor>) -> Result<OptimizerState> {
    OptimizerState::from_value(value, Tensor::shallow_clone).map_err(mismatch)
}

fn sizes(part: &Part) -> Vec<i64> {
    part.whole_shape().iter().map(|size| size.cast_signed()).collect()
}

fn is_own(part: &Part, tensor: &Tensor) -> bool {
    let own = part.own_shape();
    own.iter().copied().eq(tensor.size().iter().map(|size| size.unsigned_abs()))
}

/// Returns a contiguous copy without a graph.
fn copied(tensor: &Tensor, device: Device) -> Result<Tensor> {
    let copy = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, device))?;
    tch::no_grad(|| copy.shallow_clone().f_copy_(tensor))?;
    Ok(copy)
}
