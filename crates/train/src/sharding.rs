//! Models whose parameters, gradients and optimizer states are spread over the ranks.
//!
//! `Accelerator::prepare` compares the plans of the ranks, and `Model::shard` (`crates/nn/src/model/shard.rs`) gives
//! a `ShardingPlan` (`crates/sharding`, a pure function of names and shapes) to a `Sharder`
//! (`crates/torch/src/sharder.rs`). Optimizers step its shards in the place of whole parameters, whichever of the two
//! was prepared first.
//!
//! All ranks send whether their loss is finite before each backward, since a reduction carries a mark only to the
//! rank that has the marked row. Norms are sums over the ranks' rows, in the order of the ranks.
//!
//! A rule that is not elementwise steps all groups of shards in one call (`Rule::step_shards`,
//! `crates/optim/src/shards.rs`), so sums over the ranks that share a copy are one message for all parameters. Muon
//! gives each matrix to one of these ranks.
//!
//! A tensor of which this rank has rows has a `Part` (`sharding/part.rs`), by which checkpoints write chunks and read
//! any others: rows, a tensor rank's part, or rows of such a part. States of an optimizer have one where the
//! parameter has rows, except those without rows of their own (`Optimizer::spread_slots`).

mod deferred;
mod part;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use brigade_checkpoint::layout::Placement;
use brigade_nn::Model;
use brigade_optim::Optimizer;
use brigade_sharding::{
    Axis, Mesh, Offload, ReduceGradients, Reshard, Sharding, ShardingPlan, Strategy, TensorPart,
    Unit,
};
use brigade_torch::{Error, NamedTensor, ProcessGroup, Result, Sharder, TensorId};
use parking_lot::Mutex;
use tch::{Device, Tensor};

pub(crate) use part::{Part, PartRegions, Rows, Writers, narrow_to};

use crate::job::Job;
use crate::precision::NumericsOptions;

/// Sharding settings of an Accelerator, with the models that it has prepared.
pub(crate) struct ShardedModels {
    sharding: Sharding,
    mesh: Mesh,
    /// Prepared models. Accelerators with another precision share the list, since their optimizers may step them.
    models: Arc<Mutex<Vec<Weak<ShardedModel>>>>,
}

/// A model whose parameters are spread over ranks.
pub(crate) struct ShardedModel {
    sharder: Arc<Sharder>,
    /// Parameters, behind a lock because tensors are not `Sync`.
    parameters: Mutex<Vec<ShardedParameter>>,
    /// Identities of all shards.
    shards: HashSet<TensorId>,
    /// `true` if a step has updated whole parameters unit by unit, to the last one.
    stepped_in_parts: AtomicBool,
}

/// A parameter with this rank's rows of it.
pub(crate) struct ShardedParameter {
    /// Names of the parameter: several if it is tied.
    pub(crate) names: Vec<String>,
    /// The model's own tensor, which has memory only while its unit computes.
    pub(crate) whole: Tensor,
    /// This rank's rows, which the optimizer steps.
    pub(crate) shard: Tensor,
    /// This rank's part. `None` for a parameter without dimensions, which every rank has whole.
    pub(crate) part: Option<Part>,
    /// `true` if it belongs to this rank's experts of a mixture, which are shared with other ranks than the rest.
    pub(crate) is_expert: bool,
}

/// Assignment of the parts of sharded models to ranks, for holding and for writing them.
pub(crate) struct Layout {
    pub(crate) writers: Arc<Writers>,
    /// Assignment of experts to ranks, with expert parallelism.
    pub(crate) experts: Option<ExpertLayout>,
}

/// Assignment of experts to ranks, for holding and for writing them.
pub(crate) struct ExpertLayout {
    pub(crate) writers: Arc<Writers>,
    /// Placements of whole experts on the axes of a checkpoint's mesh but the innermost one.
    pub(crate) placements: Vec<Placement>,
    /// The axis of a checkpoint's mesh along which ranks have rows of the same experts, if there are several.
    pub(crate) row_axis: Option<usize>,
    /// Number of axes of a checkpoint's mesh along which other parameters have copies or rows.
    pub(crate) row_axes: usize,
}

impl ExpertLayout {
    /// Returns the placements of experts of which this rank has rows along a dimension.
    fn placements(&self, dim: usize) -> Vec<Placement> {
        let mut placements = self.placements.clone();
        if let Some(axis) = self.row_axis {
            placements[axis] = Placement::Shard(dim);
        }
        placements
    }

    /// Converts placements of rows to those of a checkpoint's mesh, in which `ep` is the innermost part of `dp_shard`.
    fn split(&self, placements: &mut Vec<Placement>) {
        // Without replicas and without other ranks of `dp_shard`, its axis is `ep` itself.
        let rows = placements.last().cloned();
        placements.resize(self.row_axes, rows.unwrap_or(Placement::Replicate));
    }
}

impl ShardedModels {
    /// Makes the settings. `experts` is the number of ranks with other samples that divide the experts.
    pub(crate) fn new(sharding: Sharding, world_size: usize, experts: usize) -> Result<Self> {
        let mesh = sharding.mesh(world_size)?;
        let (replicate, shard) = (mesh.size(Axis::Replicate), mesh.size(Axis::Shard));
        let mesh = Mesh::builder().replicate(replicate).shard(shard).expert(experts);
        Ok(Self { sharding, mesh: mesh.build(world_size)?, models: Arc::default() })
    }

    /// Returns the same settings with the parameter type that a precision requires.
    pub(crate) fn with_precision(&self, options: &mut NumericsOptions) -> Result<Self> {
        let mut sharding = self.sharding.clone();
        sharding.mixed.param = None;
        let sharding = options.with_sharding(sharding)?;
        Ok(Self { sharding, mesh: self.mesh.clone(), models: Arc::clone(&self.models) })
    }

    pub(crate) fn sharding(&self) -> &Sharding {
        &self.sharding
    }

    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the plan of a model, the same on all ranks, which take part.
    pub(crate) fn plan<M>(&self, model: &Model<M>, job: &Job) -> Result<ShardingPlan> {
        let parameters = model.sharding_parameters()?;
        let plan = ShardingPlan::new(&parameters, &self.sharding, &self.mesh)?;
        if let Some(group) = job.group() {
            compare(&group, &plan, model.is_deferred())?;
        }
        Ok(plan)
    }

    /// Shards a model over the ranks, which all have the same values. All take part.
    pub(crate) fn shard<M>(
        &self,
        model: &mut Model<M>,
        plan: ShardingPlan,
        job: &Job,
        layout: &Layout,
    ) -> Result<Arc<ShardedModel>> {
        let part = match plan.sharding().reshard_after_forward {
            Reshard::To(size) if !plan.sharding().strategy.keeps_parameters_whole() => Some(size),
            _ => None,
        };
        let has_experts = plan.parameters().any(|planned| planned.parameter.is_expert);
        let groups = job.sharding_groups(&self.mesh, part, has_experts)?;
        let place = self.mesh.coordinate(job.rank(), Axis::ShardContext)?;
        let expert_place = self.mesh.coordinate(job.rank(), Axis::ExpertShard)?;
        let divided = model.divided_parameters().into_iter();
        let mut divided: HashMap<TensorId, TensorPart> =
            divided.map(|it| (TensorId::of(&it.tensor), it.part)).collect();
        let whole = model.parameters();
        let (sharder, shards) = model.shard(groups, plan)?;
        let mut planned: Vec<_> = sharder.plan().parameters().collect();
        planned.sort_unstable_by_key(|planned| planned.index);
        let parameters = planned.into_iter().zip(whole).zip(shards);
        let parameters = parameters.map(|((planned, whole), shard)| {
            let tensor = divided.remove(&TensorId::of(&whole.tensor));
            let shape = planned.parameter.shape.clone();
            let is_expert = planned.parameter.is_expert;
            let part = match &layout.experts {
                Some(experts) if is_expert => {
                    let dim = planned.slot.dim;
                    let placements = experts.placements(dim);
                    let rows = Rows { dim, place: expert_place, is_expert };
                    Some(Part::new(shape, tensor, rows, &experts.writers, placements))
                }
                _ if planned.slot.is_whole => None,
                _ => {
                    let mut placements = sharder.plan().state_placements(planned);
                    if let Some(experts) = &layout.experts {
                        experts.split(&mut placements);
                    }
                    let rows = Rows { dim: 0, place, is_expert };
                    Some(Part::new(shape, tensor, rows, &layout.writers, placements))
                }
            };
            let names = planned.parameter.names.clone();
            ShardedParameter { names, whole: whole.tensor, shard: shard.tensor, part, is_expert }
        });
        let parameters: Vec<ShardedParameter> = parameters.collect();
        let shards = parameters.iter().map(|it| TensorId::of(&it.shard)).collect();
        let sharded = Arc::new(ShardedModel {
            sharder,
            parameters: Mutex::new(parameters),
            shards,
            stepped_in_parts: AtomicBool::new(false),
        });
        let mut models = self.models.lock();
        models.retain(|known| known.strong_count() > 0);
        models.push(Arc::downgrade(&sharded));
        Ok(sharded)
    }

    /// Makes an optimizer that was built with whole parameters, or from a sharded model, step the shards of all models.
    pub(crate) fn take_over(&self, optimizer: &Optimizer) -> Result<()> {
        let mut optimizer = optimizer.clone();
        for model in self.models() {
            model.with_parameters(|parameters| {
                let pairs: Vec<(&Tensor, &Tensor)> =
                    parameters.iter().map(|it| (&it.whole, &it.shard)).collect();
                optimizer.replace_with_shards(&pairs, &model.sharder.groups().gather)
            })?;
        }
        // Each unit's copy to the device begins while the processor steps the next.
        let (mut parts, mut units) = (Vec::new(), Vec::new());
        for model in self.models() {
            if model.copies_after_steps() && model.is_stepped_by(&optimizer) {
                for (unit, shards) in model.shards_of_units().into_iter().enumerate() {
                    parts.push(shards);
                    units.push((Arc::downgrade(&model), unit));
                }
            }
        }
        if !parts.is_empty() {
            optimizer.step_in_parts(&parts, move |part| {
                let (model, unit) = &units[part];
                model.upgrade().map_or(Ok(()), |model| model.unit_stepped(*unit))
            });
        }
        Ok(())
    }

    /// Notifies the models of an optimizer that it has stepped.
    pub(crate) fn stepped(&self, optimizer: &Optimizer) -> Result<()> {
        self.each_of(optimizer, ShardedModel::stepped)
    }

    /// Discards gradients of this optimizer's models that were not reduced.
    pub(crate) fn cleared(&self, optimizer: &Optimizer) -> Result<()> {
        self.each_of(optimizer, |model| model.sharder.clear_unreduced())
    }

    fn each_of(&self, optimizer: &Optimizer, act: fn(&ShardedModel) -> Result<()>) -> Result<()> {
        let mut models = self.models().into_iter().filter(|model| model.is_stepped_by(optimizer));
        models.try_for_each(|model| act(&model))
    }

    /// Returns the parts that this rank has of an optimizer's states, by their places in its state:
    /// `state.PARAMETER.SLOT`.
    pub(crate) fn parts_of(&self, optimizer: &Optimizer) -> HashMap<String, Part> {
        let models = self.models();
        let concerned = models.iter().filter(|model| model.is_stepped_by(optimizer));
        parts_of_state(optimizer, concerned.flat_map(|model| model.parts()))
    }

    /// Returns the ranks that share one copy of the parameters that an optimizer steps. `None` if it steps no shards.
    pub(crate) fn group_of(&self, optimizer: &Optimizer) -> Option<ProcessGroup> {
        let models = self.models();
        let model = models.iter().find(|model| model.is_stepped_by(optimizer))?;
        Some(model.gather_group().clone())
    }

    /// Returns `true` if any prepared model still exists.
    pub(crate) fn any(&self) -> bool {
        !self.models().is_empty()
    }

    pub(crate) fn models(&self) -> Vec<Arc<ShardedModel>> {
        self.models.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Fails for an operation that needs whole gradients on each rank.
    pub(crate) fn refuse(&self, what: &str, why: &str) -> Error {
        Error::invalid_argument(format!(
            "{what} does not go together with sharding ({}): {why}; train without sharding, or without {what}",
            self.sharding.strategy
        ))
    }
}

impl ShardedModel {
    pub(crate) fn sharder(&self) -> &Arc<Sharder> {
        &self.sharder
    }

    pub(crate) fn plan(&self) -> &ShardingPlan {
        self.sharder.plan()
    }

    /// Returns the device on which the model computes, also if its shards are offloaded.
    pub(crate) fn device(&self) -> Device {
        self.with_parameters(|all| all.first().map_or(Device::Cpu, |it| it.whole.device()))
    }

    pub(crate) fn with_parameters<R>(&self, f: impl FnOnce(&[ShardedParameter]) -> R) -> R {
        f(&self.parameters.lock())
    }

    /// Returns the ranks that share one copy of the parameters.
    pub(crate) fn gather_group(&self) -> &ProcessGroup {
        &self.sharder.groups().gather
    }

    /// Returns the shards under their first names, of all parameters.
    pub(crate) fn shards(&self) -> Vec<NamedTensor> {
        let shard = |it: &ShardedParameter| NamedTensor {
            name: it.names[0].clone(),
            tensor: it.shard.shallow_clone(),
        };
        self.with_parameters(|parameters| parameters.iter().map(shard).collect())
    }

    /// Returns `true` if each backward reduces gradients, regardless of the accumulation window.
    pub(crate) fn reduces_each_batch(&self) -> bool {
        let sharding = self.plan().sharding();
        sharding.strategy != Strategy::Zero1 && sharding.reduce == ReduceGradients::EachBatch
    }

    /// Returns `true` if the shards have all gradients after each backward, regardless of the accumulation window.
    pub(crate) fn has_reduced_gradients(&self) -> bool {
        self.reduces_each_batch() && self.plan().mesh().size(Axis::Replicate) == 1
    }

    /// Updates the whole parameters of a unit that was stepped before the next one is.
    fn unit_stepped(&self, unit: usize) -> Result<()> {
        self.sharder.unit_changed(unit)?;
        if unit + 1 == self.plan().units().len() {
            self.stepped_in_parts.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Updates the whole parameters after a step that did not do so itself. One that failed between two units did not.
    fn stepped(&self) -> Result<()> {
        if self.stepped_in_parts.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.sharder.shards_changed()
    }

    /// Returns `true` if a step is followed by copies of all shards from the host to the device.
    fn copies_after_steps(&self) -> bool {
        let sharding = self.plan().sharding();
        sharding.offload != Offload::None
            && sharding.strategy.keeps_parameters_whole()
            && self.device() != Device::Cpu
    }

    /// Returns the shards of each unit of the plan.
    fn shards_of_units(&self) -> Vec<Vec<Tensor>> {
        let units = self.plan().units().iter();
        self.with_parameters(|all| {
            let shards = |unit: &Unit| {
                unit.parameters.iter().map(|it| all[it.index].shard.shallow_clone()).collect()
            };
            units.map(shards).collect()
        })
    }

    /// Returns the parts that this rank has, by all names of their parameters.
    pub(crate) fn parts(&self) -> Vec<(String, Part)> {
        self.with_parameters(|parameters| {
            let parts = parameters.iter().filter_map(|it| Some((it, it.part.as_ref()?)));
            let named = parts.flat_map(|(it, part)| it.names.iter().map(move |name| (name, part)));
            named.map(|(name, part)| (name.clone(), part.clone())).collect()
        })
    }

    /// Trains the parameters whose shards require a gradient, from now on.
    pub(crate) fn update_trained(&self) -> Result<()> {
        self.sharder.clear_unreduced()?;
        for ShardedParameter { whole, shard, .. } in &*self.parameters.lock() {
            let _ = whole.shallow_clone().f_requires_grad_(shard.requires_grad())?;
        }
        self.sharder.update_trained()
    }

    /// Returns the name of a parameter that is trained now, and was frozen at the last check.
    pub(crate) fn thawed(&self) -> Option<String> {
        let differs =
            |it: &&ShardedParameter| it.whole.requires_grad() && !it.shard.requires_grad();
        self.with_parameters(|parameters| Some(parameters.iter().find(differs)?.names[0].clone()))
    }

    /// Returns the shard of the parameter with this name.
    pub(crate) fn shard(&self, name: &str) -> Option<Tensor> {
        self.with_parameters(|parameters| {
            let named = |it: &&ShardedParameter| it.names.iter().any(|known| known == name);
            Some(parameters.iter().find(named)?.shard.shallow_clone())
        })
    }

    fn is_stepped_by(&self, optimizer: &Optimizer) -> bool {
        optimizer.with_parameters(|stepped| {
            stepped.iter().any(|tensor| self.shards.contains(&TensorId::of(tensor)))
        })
    }
}

/// Compares the plan with those of all ranks, and whether the model has values.
fn compare(group: &ProcessGroup, plan: &ShardingPlan, is_deferred: bool) -> Result<()> {
    let own = plan.fingerprint();
    let (all, deferred): (Vec<u64>, Vec<bool>) =
        group.all_gather_object(&(own, is_deferred))?.into_iter().unzip();
    if let (Some(first), Some(other)) =
        (deferred.iter().position(|it| *it), deferred.iter().position(|it| !it))
    {
        return Err(Error::invalid_argument(format!(
            "the model is deferred on rank {first} and has its values on rank {other}, and nothing was prepared: build \
             it in the same way on every rank"
        )));
    }
    let Some(other) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
    let texts: Vec<String> = group.all_gather_object(&plan.description())?;
    let rank = if own == all[0] { other } else { 0 };
    let difference = plan.difference(&texts[rank]).map(|difference| difference.to_string());
    Err(Error::invalid_argument(format!(
        "the sharded models of ranks {} and {rank} differ, and nothing was prepared: {}; build the same model with the \
         same settings on every rank",
        group.rank(),
        difference.unwrap_or_else(|| "their plans have different fingerprints".to_owned())
    )))
}

/// Returns this rank's parts of an optimizer's states, by their places in its state (`state.PARAMETER.SLOT`), given its
/// parts of the parameters.
pub(crate) fn parts_of_state(
    optimizer: &Optimizer,
    parameters: impl Iterator<Item = (String, Part)>,
) -> HashMap<String, Part> {
    let of_parameter = |(name, part): (String, Part)| {
        let size: Vec<i64> = part.shape.iter().map(|size| size.cast_signed()).collect();
        let slots = optimizer.spread_slots(&size).into_iter();
        slots.map(move |(slot, shape)| (format!("state.{name}.{slot}"), part.with_shape(&shape)))
    };
    parameters.flat_map(of_parameter).collect()
}

impl fmt::Debug for ShardedModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedModels")
            .field("sharding", &self.sharding)
            .field("mesh", &self.mesh)
            .finish_non_exhaustive()
    }
}
