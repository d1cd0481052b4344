//! Models of which the ranks of a group have parts: of layers that they compute together, or some of the experts.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};

use brigade_checkpoint::layout::{MeshAxis, Placement};
use brigade_nn::{
    DividedParameter, ExpertParallel, Model, ModelBuilder, TensorParallel, TensorRegion,
};
use brigade_optim::Optimizer;
use brigade_sharding::{Axis, Mesh, TensorPart, TensorPlan};
use brigade_torch::{Error, NamedTensor, ProcessGroup, Result, TensorId, gradient};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

use crate::processes::Processes;
use crate::sharding::{ExpertLayout, Part, PartRegions, Rows, Writers, parts_of_state};

/// Ranks that divide layers, experts, or both, and the models of which they have parts.
pub(crate) struct ModelParallelRanks {
    /// All ranks.
    mesh: Mesh,
    /// Ranks that have the other parts of layers, and read the same samples.
    layers: Option<ProcessGroup>,
    /// Ranks that have the other experts: whole tensor groups, of which each reads other samples.
    experts: Option<ProcessGroup>,
    /// Ranks with the same experts, if there are several.
    copies: Option<ProcessGroup>,
    /// Ranks of `copies` that share one copy of the experts where models are sharded, if there are several.
    expert_rows: Option<ProcessGroup>,
    /// `true` if each rank has a part of the sequence between divided layers.
    has_sequence_regions: bool,
    /// All ranks of the job.
    everyone: Processes,
    models: Mutex<Vec<Weak<DividedModel>>>,
}

/// A model of which each rank of a group has a part.
#[derive(Debug)]
pub(crate) struct DividedModel {
    /// The tensors that an optimizer steps, parts of parameters or shards of such parts.
    stepped: HashSet<TensorId>,
    /// Those of experts.
    experts: HashSet<TensorId>,
    /// Parts of this rank by all names of the tensors, if nothing else shards them.
    parts: HashMap<String, Part>,
}

impl ModelParallelRanks {
    /// Makes the groups of a mesh. `None` if its ranks divide neither layers nor experts. All ranks take part.
    pub(crate) fn new(
        mesh: &Mesh,
        everyone: &Processes,
        has_sequence_regions: bool,
    ) -> Result<Option<Self>> {
        let along = |axis: Axis| {
            let has_several = mesh.size(axis) > 1;
            has_several.then(|| everyone.job.group_along(mesh, axis)).transpose()
        };
        let (layers, experts) = (along(Axis::Tensor)?, along(Axis::Expert)?);
        let (mut copies, mut expert_rows) = (None, None);
        if experts.is_some() {
            (copies, expert_rows) = (along(Axis::ExpertData)?, along(Axis::ExpertShard)?);
        }
        if layers.is_none() && experts.is_none() {
            return Ok(None);
        }
        let (mesh, everyone, models) = (mesh.clone(), everyone.clone(), Mutex::default());
        Ok(Some(Self {
            mesh,
            layers,
            experts,
            copies,
            expert_rows,
            has_sequence_regions,
            everyone,
            models,
        }))
    }

    /// Returns the builder of a model that these ranks divide by a plan.
    pub(crate) fn of_models(&self, plan: TensorPlan) -> ModelBuilder {
        let has_regions = self.has_sequence_regions || plan.has_sequence_regions();
        let plan = plan.sequence_regions(has_regions);
        let builder =
            Model::builder().tensor_parallel(TensorParallel { group: self.layers.clone(), plan });
        match &self.experts {
            Some(group) => builder.expert_parallel(ExpertParallel { group: Some(group.clone()) }),
            None => builder,
        }
    }

    /// Returns the ranks that have the other parts of layers. `None` if layers are whole.
    pub(crate) fn layers(&self) -> Option<&ProcessGroup> {
        self.layers.as_ref()
    }

    /// Returns the ranks that have the other experts. `None` if each rank has all experts.
    pub(crate) fn experts(&self) -> Option<&ProcessGroup> {
        self.experts.as_ref()
    }

    /// Returns `true` if each rank has some of the experts.
    pub(crate) fn divides_experts(&self) -> bool {
        self.experts.is_some()
    }

    /// Returns the number of ranks that divide layers.
    pub(crate) fn tensor_ranks(&self) -> usize {
        self.layers.as_ref().map_or(1, ProcessGroup::size)
    }

    /// Returns the number of ranks with other samples that divide the experts.
    pub(crate) fn expert_ranks(&self) -> usize {
        self.experts.as_ref().map_or(1, |group| group.size() / self.tensor_ranks())
    }

    /// Returns the ranks that have the other parts of tensors.
    pub(crate) fn regions(&self) -> PartRegions {
        let region =
            |group: &Option<ProcessGroup>| group.clone().map(TensorRegion::new).unwrap_or_default();
        PartRegions {
            layers: region(&self.layers),
            experts: region(&self.experts),
            expert_rows: self.expert_rows.clone(),
        }
    }

    /// Returns the ranks with the same experts. `None` if there are no others.
    pub(crate) fn copies(&self) -> Option<&ProcessGroup> {
        self.copies.as_ref()
    }

    /// Returns the ranks that share one copy of the same experts where models are sharded. `None` if there are no
    /// others.
    pub(crate) fn expert_rows(&self) -> Option<&ProcessGroup> {
        self.expert_rows.as_ref()
    }

    /// Returns the mesh of all ranks.
    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the mesh of all ranks, or those of a stage, given the mesh of those over which gradients are averaged.
    pub(crate) fn mesh_with(&self, averaged: &Mesh) -> Result<Mesh> {
        let tensor = self.tensor_ranks();
        let builder = Mesh::builder().replicate(averaged.size(Axis::Replicate));
        let builder = builder.shard(averaged.size(Axis::Shard)).tensor(tensor);
        Ok(builder.build(averaged.world_size() * tensor)?)
    }

    /// Returns the writers of parts of which there are `parts`, on neighbouring ranks, each in `rows`, and `copies` of
    /// each of these.
    fn writers(&self, copies: usize, rows: usize, parts: usize) -> Result<Arc<Writers>> {
        let mesh = Mesh::builder().replicate(copies).shard(rows).tensor(parts);
        let mesh = mesh.build(copies * rows * parts)?;
        let rank = self.everyone.process_index();
        // The ranks of a stage follow each other.
        Writers::new(&mesh, rank - rank % mesh.world_size())
    }

    /// Returns the assignment of experts to ranks, and to writers of checkpoints, for models that are sharded on a
    /// mesh, or not at all. `None` if every rank has all experts.
    pub(crate) fn expert_layout(&self, sharded: Option<&Mesh>) -> Result<Option<ExpertLayout>> {
        let Some(experts) = &self.experts else { return Ok(None) };
        let rows = sharded.map_or(1, |mesh| mesh.size(Axis::ExpertShard));
        let writers =
            self.writers(self.mesh.size(Axis::ExpertData) / rows, rows, experts.size())?;
        let axes = self.axes(sharded);
        let (divided, copied): (Vec<_>, Vec<_>) = axes.iter().partition(|axis| {
            [Axis::Expert, Axis::Tensor].iter().any(|own| axis.name == own.name())
        });
        let mut placements = vec![Placement::Replicate; copied.len()];
        // A part adds its innermost axis.
        placements.resize(copied.len() + divided.len() - 1, Placement::Shard(0));
        let row_axes = axes.len() - usize::from(self.layers.is_some());
        let row_axis = copied.iter().position(|it| it.name == Axis::Shard.name());
        Ok(Some(ExpertLayout { writers, placements, row_axis, row_axes }))
    }

    /// Returns the mesh axes on which checkpoints place the ranks' parts. Those that divide experts are `ep`, unless
    /// they are the ranks that divide layers, and both where there are more of them.
    pub(crate) fn axes(&self, sharded: Option<&Mesh>) -> Vec<MeshAxis> {
        let experts = self.expert_ranks();
        let (replicate, shard) = match sharded {
            Some(mesh) => (mesh.size(Axis::Replicate), mesh.size(Axis::Shard) / experts),
            None => (self.mesh.size(Axis::DataContext) / experts, 1),
        };
        let axes = [
            (Axis::Replicate, replicate),
            (Axis::Shard, shard),
            (Axis::Expert, experts),
            (Axis::Tensor, self.tensor_ranks()),
        ];
        let used = axes.into_iter().filter(|(_, size)| *size > 1);
        used.map(|(axis, size)| MeshAxis { name: axis.name().to_owned(), size }).collect()
    }

    pub(crate) fn everyone(&self) -> &Processes {
        &self.everyone
    }

    /// Checks when a model is prepared that it was built for these ranks, and alike on all of them. Replaces tensors
    /// that all ranks have whole by those of the group's first rank. All ranks take part.
    pub(crate) fn check<M>(&self, model: &Model<M>) -> Result<()> {
        let divided = model.divided_parameters();
        let parts: HashMap<TensorId, &TensorPart> =
            divided.iter().map(|it| (TensorId::of(&it.tensor), &it.part)).collect();
        let described = |it: &NamedTensor| match parts.get(&TensorId::of(&it.tensor)) {
            Some(part) => format!("{} {:?} divided along {}", it.name, part.shape(), part.dim()),
            None => format!("{} {:?} whole", it.name, it.tensor.size()),
        };
        let own: Vec<String> = model.parameters().iter().map(described).collect();
        // Ranks without tensor parallelism take part, so that no rank waits for one that has an error.
        let tensor = model.tensor_parallel().map(TensorParallel::ranks);
        let experts = model.expert_parallel().map(ExpertParallel::ranks);
        let kinds = [("tensor", &self.layers, tensor), ("expert", &self.experts, experts)];
        for (kind, group, ranks) in kinds {
            if let Some(group) = group {
                self.check_over(group, kind, ranks, &own)?;
            }
        }
        Ok(())
    }

    /// Checks that a model was built for a group of ranks, and alike on all of them: `own` are its parameters.
    fn check_over(
        &self,
        group: &ProcessGroup,
        kind: &str,
        ranks: Option<usize>,
        own: &[String],
    ) -> Result<()> {
        let all: Vec<(Option<usize>, Vec<String>)> =
            group.all_gather_object(&(ranks, own.to_vec()))?;
        let (ranks, own) = &all[group.rank()];
        let Some(ranks) = ranks else {
            return Err(Error::invalid_argument(format!(
                "the ranks divide {} (mesh {}), and the model was built whole: build it by \
                 `Accelerator::parallel().model`, or by `parallel().model_builder` with an empty plan where every rank of the \
                 group is to have all of it",
                self.divided(),
                self.mesh
            )));
        };
        if *ranks != group.size() {
            return Err(Error::invalid_argument(format!(
                "the model was built for {ranks} {kind} ranks, and this job has {}: build it by \
                 `Accelerator::parallel().model` of this Accelerator",
                group.size()
            )));
        }
        let mut others = all.iter().enumerate();
        if let Some((rank, (their_ranks, theirs))) =
            others.find(|(_, it)| (&it.0, &it.1) != (&Some(*ranks), own))
        {
            let first = own.iter().zip(theirs).find(|(own, theirs)| own != theirs);
            let difference = match (first, their_ranks) {
                (Some((own, theirs)), _) => format!("`{own}` here and `{theirs}` there"),
                (None, Some(theirs)) if theirs != ranks => {
                    format!("built for {ranks} {kind} ranks here and for {theirs} there")
                }
                (None, None) => format!("built for {kind} ranks here and whole there"),
                (None, Some(_)) => {
                    format!("{} parameters here and {} there", own.len(), theirs.len())
                }
            };
            return Err(Error::invalid_argument(format!(
                "the models of {kind} ranks {} and {rank} differ, and nothing was prepared: {difference}; build the same \
                 model with the same plan on every rank",
                group.rank()
            )));
        }
        Ok(())
    }

    /// Records the tensors that optimizers of a prepared model step: `stepped`, of all parameters; shards if the model
    /// is sharded.
    pub(crate) fn add<M>(
        &self,
        model: &Model<M>,
        stepped: &[NamedTensor],
        is_sharded: bool,
    ) -> Result<Arc<DividedModel>> {
        let divided = model.divided_parameters().into_iter();
        let divided: HashMap<String, DividedParameter> =
            divided.map(|it| (it.name.clone(), it)).collect();
        let mut parts = HashMap::new();
        if !is_sharded {
            let copies = self.mesh.size(Axis::DataContext);
            let writers = self.writers(copies, 1, self.tensor_ranks())?;
            let copied = vec![Placement::Replicate; self.axes(None).len().saturating_sub(1)];
            let experts = self.expert_layout(None)?;
            for (name, _) in model.state_dict() {
                let first = model.parameter_name(&name).unwrap_or_default();
                let Some(DividedParameter { part, is_expert, .. }) = divided.get(first) else {
                    continue;
                };
                let (writers, placements) = match experts.as_ref().filter(|_| *is_expert) {
                    Some(experts) => (&experts.writers, &experts.placements),
                    None => (&writers, &copied),
                };
                let (own, part) = (part.own_shape(), Some(part.clone()));
                let rows = Rows { dim: 0, place: 0, is_expert: *is_expert };
                parts.insert(name, Part::new(own, part, rows, writers, placements.clone()));
            }
        }
        let ids = |is_wanted: &dyn Fn(&DividedParameter) -> bool| {
            let wanted = |it: &&NamedTensor| divided.get(&it.name).is_some_and(is_wanted);
            stepped.iter().filter(wanted).map(|it| TensorId::of(&it.tensor)).collect()
        };
        let (experts, stepped) = (ids(&|it| it.is_expert), ids(&|_| true));
        let model = Arc::new(DividedModel { stepped, experts, parts });
        let mut models = self.models.lock();
        models.retain(|known| known.strong_count() > 0);
        models.push(Arc::downgrade(&model));
        Ok(model)
    }

    fn models(&self) -> Vec<Arc<DividedModel>> {
        self.models.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns the axis whose ranks have the other parts of a tensor that an optimizer steps: [`Axis::Tensor`] or
    /// [`Axis::Expert`]. `None` if this rank has all of it.
    pub(crate) fn divided_along(&self, stepped: TensorId) -> Option<Axis> {
        let models = self.models();
        let model = models.iter().find(|model| model.stepped.contains(&stepped))?;
        let is_expert = model.experts.contains(&stepped);
        Some(if is_expert { Axis::Expert } else { Axis::Tensor })
    }

    /// Returns this rank's parts of an optimizer's states, by their places in its state, if nothing else spreads them.
    pub(crate) fn parts_of(&self, optimizer: &Optimizer) -> HashMap<String, Part> {
        let models = self.models();
        let concerned = models.iter().filter(|model| model.is_stepped_by(optimizer));
        let parts = concerned.flat_map(|model| model.parts.clone());
        parts_of_state(optimizer, parts)
    }

    /// Fails for an optimizer that needs whole parameters but steps parts.
    pub(crate) fn check_optimizer(&self, optimizer: &Optimizer) -> Result<()> {
        let steps_parts = self.models().iter().any(|model| model.is_stepped_by(optimizer));
        if !steps_parts || optimizer.is_elementwise() {
            return Ok(());
        }
        let (kind, ranks) = match (&self.layers, &self.experts) {
            (None, Some(experts)) => ("expert", experts.size()),
            _ => ("tensor", self.tensor_ranks()),
        };
        Err(Error::invalid_argument(format!(
            "{} needs whole parameters, and each of {ranks} {kind} ranks has a part: use a rule whose steps depend on one \
             element alone, such as AdamW or SGD",
            optimizer.rule_name()
        )))
    }

    /// Compares the gradients of parameters that every rank of a tensor group has whole, in debug mode. All of them take
    /// part.
    pub(crate) fn compare_gradients(&self, optimizer: &Optimizer) -> Result<()> {
        let Some(group) = &self.layers else { return Ok(()) };
        let sums = optimizer.with_parameters(|stepped| {
            let sum = |parameter: &Tensor| -> Result<Option<u64>> {
                let is_whole = self.divided_along(TensorId::of(parameter)).is_none();
                let found = gradient(parameter)?.filter(|_| is_whole);
                let sum = found.map(|it| it.f_sum(Kind::Double)?.f_double_value(&[]));
                Ok(sum.transpose()?.map(f64::to_bits))
            };
            stepped.iter().map(|it| sum(it)).collect::<Result<Vec<_>>>()
        })?;
        let all: Vec<Vec<Option<u64>>> = group.all_gather_object(&sums)?;
        for (rank, theirs) in all.iter().enumerate() {
            let Some(place) = sums.iter().zip(theirs).position(|(own, theirs)| own != theirs)
            else {
                continue;
            };
            let state = optimizer.state_dict()?;
            let name = state.parameters.get(place).map_or("a parameter", |it| it.name.as_str());
            return Err(Error::invalid_argument(format!(
                "the gradient of `{name}`, which every rank has whole, differs between tensor ranks {} and {rank}: a \
                 module between divided layers computes other values on them, such as one that draws \
                 separate random numbers",
                group.rank()
            )));
        }
        Ok(())
    }

    /// Fails for an operation that is not supported with parts.
    pub(crate) fn refuse(&self, what: &str, instead: &str) -> Error {
        let (divided, mesh) = (self.divided(), &self.mesh);
        Error::invalid_argument(format!(
            "{what} does not work where ranks divide {divided} (mesh {mesh}): {instead}"
        ))
    }

    /// Returns the name of what the ranks divide, for messages.
    fn divided(&self) -> &'static str {
        match (&self.layers, &self.experts) {
            (Some(_), Some(_)) => "layers and experts",
            (None, Some(_)) => "experts",
            _ => "layers",
        }
    }
}

impl DividedModel {
    /// Returns this rank's parts of parameters, by all names, if nothing else spreads them.
    pub(crate) fn parts(&self) -> &HashMap<String, Part> {
        &self.parts
    }

    pub(crate) fn is_part(&self, stepped: &Tensor) -> bool {
        self.stepped.contains(&TensorId::of(stepped))
    }

    fn is_stepped_by(&self, optimizer: &Optimizer) -> bool {
        optimizer.with_parameters(|stepped| stepped.iter().any(|tensor| self.is_part(tensor)))
    }
}

/// Returns the names of parameters of which each rank has some experts.
pub(crate) fn expert_parts<M>(model: &Model<M>) -> HashSet<String> {
    let divided = model.divided_parameters().into_iter();
    divided.filter(|it| it.is_expert).map(|it| it.name).collect()
}

impl fmt::Debug for ModelParallelRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelParallelRanks").field("mesh", &self.mesh).finish_non_exhaustive()
    }
}
