//! The pipelines of an Accelerator's mesh, and the models whose stages they have.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};

use brigade_checkpoint::TensorInfo;
use brigade_nn::{Model, PipelineParallel};
use brigade_sharding::Mesh;
use brigade_torch::{
    Backend, Error, GroupOptions, NamedTensor, ProcessGroup, ReduceOp, Result, Store, TensorId,
    TensorTree, gradient, kind_of, set_gradient,
};
use parking_lot::Mutex;
use tch::{Device, Tensor};

use super::wire::Wire;
use super::{Pipeline, PipelineLoss, PipelineOptions, Shares, StepLoss, Stepped};
use crate::model_parallel::expert_parts;
use crate::processes::Processes;

/// The ranks that have the stages of one model, and read the same samples.
pub(crate) struct PipelineRanks {
    mesh: Mesh,
    pipeline: Pipeline,
    /// All ranks of the job.
    everyone: Processes,
    models: Mutex<Vec<Weak<StageModel>>>,
}

/// A model of which this rank has some stages.
#[derive(Debug)]
pub(crate) struct StageModel {
    /// Parameters that an earlier rank has as well, and counts.
    counted_before: HashSet<TensorId>,
    /// The names of the whole model's state dictionary, in its order.
    order: Vec<String>,
}

/// Tag of messages with whole tensors for the first rank.
const TAG_WHOLE: u16 = 4;

impl PipelineRanks {
    pub(crate) fn new(
        mesh: Mesh,
        group: &ProcessGroup,
        options: PipelineOptions,
        everyone: &Processes,
    ) -> Result<Self> {
        let pipeline = Pipeline::new(group.clone(), options)?;
        Ok(Self { mesh, pipeline, everyone: everyone.clone(), models: Mutex::default() })
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        self.pipeline.group()
    }

    pub(crate) fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    pub(crate) fn everyone(&self) -> &Processes {
        &self.everyone
    }

    /// Returns a group of this rank alone.
    pub(crate) fn alone(&self) -> Result<ProcessGroup> {
        let gloo = Backend::Gloo(Default::default());
        ProcessGroup::new(&Store::hash()?, 0, 1, gloo, GroupOptions::default())
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the context with which models are built.
    pub(crate) fn of_models(&self) -> PipelineParallel {
        self.pipeline.parallel()
    }

    /// Checks when a model is prepared that every rank of the pipeline has stages of the same model. All of them take
    /// part.
    pub(crate) fn check<M>(&self, model: &Model<M>) -> Result<()> {
        let own = self.pipeline.stages_of(model).map(|stages| {
            let names = (0..stages.stages()).map(|stage| stages.parameters_of(stage).to_vec());
            names.collect::<Vec<_>>()
        });
        let PipelineOptions { micro_batches, schedule, .. } = self.pipeline.options();
        let order = format!("{schedule} with {micro_batches} micro-batches");
        // Ranks with an error take part, so that no rank waits for one that has ended.
        let all: Vec<(String, Option<Vec<Vec<String>>>)> =
            self.group().all_gather_object(&(order.clone(), own.as_ref().ok().cloned()))?;
        let (orders, all): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        if let Some(rank) = orders.iter().position(|other| *other != order) {
            return Err(Error::invalid_argument(format!(
                "rank {} of the pipeline runs {order}, and rank {rank} {}: set the same options on every rank",
                self.group().rank(),
                orders[rank]
            )));
        }
        if let Err(error) = own {
            return Err(Error::invalid_argument(format!(
                "the ranks have stages of models (mesh {}), and {error}; `Accelerator::parallel().model` and \
                 `parallel().model_builder` do",
                self.mesh
            )));
        }
        let Some(rank) = all.iter().position(|names| *names != all[self.group().rank()]) else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "the models of ranks {} and {rank} of the pipeline have other stages: build the same model on every rank",
            self.group().rank()
        )))
    }

    /// Sets parameters that several ranks have to the values of the first of these ranks, and records which parameters
    /// this rank counts. `stepped` are the tensors that optimizers step: the parameters, or their shards. All ranks of
    /// the pipeline take part.
    pub(crate) fn add<M>(
        &self,
        model: &Model<M>,
        stepped: &[NamedTensor],
    ) -> Result<Arc<StageModel>> {
        let stages = self.pipeline.stages_of(model)?;
        let mut wire = Wire::new(self.group(), &self.pipeline.forms, model.device());
        let mut counted_before = HashSet::new();
        for shared in stages.shared() {
            let own = stepped.iter().find(|it| it.name == shared.name).map(|it| &it.tensor);
            let Some(own) = own.filter(|_| shared.ranks.contains(&stages.rank())) else { continue };
            let values = wire.exchange(&own.f_detach()?, &shared.ranks)?;
            if shared.ranks.first() != Some(&stages.rank()) {
                if let Some(first) = values.first() {
                    tch::no_grad(|| own.f_detach()?.f_copy_(first))?;
                }
                counted_before.insert(TensorId::of(own));
            }
        }
        let order = stages.saved_names().to_vec();
        let model = Arc::new(StageModel { counted_before, order });
        let mut models = self.models.lock();
        models.retain(|known| known.strong_count() > 0);
        models.push(Arc::downgrade(&model));
        Ok(model)
    }

    fn models(&self) -> Vec<Arc<StageModel>> {
        self.models.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the positions of all stages' tensors in the state dictionaries of the whole models.
    pub(crate) fn tensor_order(&self) -> HashMap<String, usize> {
        let models = self.models();
        let names = models.iter().flat_map(|model| model.order.iter().cloned());
        names.zip(0..).collect()
    }

    /// Returns `true` if an earlier rank counts a parameter.
    pub(crate) fn is_counted_before(&self, parameter: &Tensor) -> bool {
        self.models().iter().any(|model| model.counted_before.contains(&TensorId::of(parameter)))
    }

    /// Runs a step. `averaged` are the ranks with other samples, over which the weights of sums are added. `window` is
    /// the weight of the previous batches of an accumulation window; the step adds this batch's.
    pub(crate) fn forward_backward<M, B, L>(
        &self,
        (model, stepped): (&Model<M>, &Stepped<'_>),
        batch: &B,
        (factor, window): (f64, &Cell<f64>),
        averaged: &Processes,
        loss: impl FnMut(&B::Owned) -> Result<L>,
    ) -> Result<StepLoss>
    where
        B: TensorTree,
        L: PipelineLoss,
    {
        let share = |weight: f64| {
            if !L::IS_SUM {
                return Ok(Shares { own: 1.0, earlier: 1.0 });
            }
            let (mut all, mut ranks) = (weight, 1);
            if let Some(group) = averaged.group() {
                let mut sum =
                    Tensor::from(weight).f_to_device(averaged.device())?.f_reshape([1])?;
                group.all_reduce(&mut sum, ReduceOp::Sum)?;
                (all, ranks) = (sum.f_to_device(Device::Cpu)?.f_double_value(&[0])?, group.size());
            }
            let before = window.replace(window.get() + all);
            let whole = window.get();
            // Mean over the window so far. Gradients are averaged over the ranks afterwards.
            Ok(match whole {
                0.0 => Shares { own: 0.0, earlier: 1.0 },
                _ => Shares { own: ranks as f64 / whole, earlier: before / whole },
            })
        };
        self.pipeline.scaled_forward_backward(model, stepped, batch, (factor, &share), loss)
    }

    /// Averages gradients over the ranks that have the same stages and other samples; those of experts over `copies`,
    /// the ranks that have the same ones.
    pub(crate) fn average<M>(
        &self,
        model: &Model<M>,
        averaged: &Processes,
        copies: Option<&ProcessGroup>,
    ) -> Result<()> {
        let divided = expert_parts(model);
        let (experts, others): (Vec<_>, Vec<_>) =
            model.trainable_parameters().into_iter().partition(|it| divided.contains(&it.name));
        for (group, parameters) in [(averaged.group().as_ref(), others), (copies, experts)] {
            if let Some(group) = group {
                average_over(group, &parameters)?;
            }
        }
        Ok(())
    }

    /// Sends a tensor from the rank of the pipeline that passes `own` to the first rank, which returns it; the others
    /// return `None`. All ranks of the pipeline take part.
    pub(crate) fn to_first(
        &self,
        owner: usize,
        own: Option<Tensor>,
        name: &str,
        info: &TensorInfo,
    ) -> Result<Option<Tensor>> {
        let group = self.group();
        if group.rank() == owner {
            if owner == 0 {
                return Ok(own);
            }
            if let Some(own) = own {
                group.send(&own.f_to_device(group.device())?.f_contiguous()?, 0, TAG_WHOLE)?;
            }
            return Ok(None);
        }
        if group.rank() != 0 {
            return Ok(None);
        }
        let shape: Vec<i64> = info.shape.iter().map(|size| size.cast_signed()).collect();
        let kind = kind_of(info.dtype)
            .ok_or_else(|| Error::invalid_argument(format!("`{name}` is {}", info.dtype)))?;
        let mut tensor = Tensor::f_empty(shape, (kind, group.device()))?;
        group.recv(&mut tensor, owner, TAG_WHOLE)?;
        Ok(Some(tensor))
    }

    /// Fails for an operation that is not supported with a pipeline.
    pub(crate) fn refuse(&self, what: &str, instead: &str) -> Error {
        Error::invalid_argument(format!(
            "{what} does not work where ranks have stages of models (mesh {}): {instead}",
            self.mesh
        ))
    }
}

/// Averages the gradients of parameters over the ranks of a group. A missing gradient counts as zero.
fn average_over(group: &ProcessGroup, parameters: &[NamedTensor]) -> Result<()> {
    let found = parameters.iter().map(|parameter| match gradient(&parameter.tensor)? {
        Some(found) => Ok(found),
        None => Ok(parameter.tensor.f_detach()?.f_zeros_like()?),
    });
    let mut found = found.collect::<Result<Vec<_>>>()?;
    if found.is_empty() {
        return Ok(());
    }
    group.all_reduce_coalesced(&mut found, ReduceOp::Mean)?;
    parameters.iter().zip(&found).try_for_each(|(it, found)| set_gradient(&it.tensor, found))
}

impl fmt::Debug for PipelineRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PipelineRanks").field("mesh", &self.mesh).finish_non_exhaustive()
    }
}
