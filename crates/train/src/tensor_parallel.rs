//! Models of which the ranks of a group have parts: of layers that they compute together, or some of the experts.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};

use brigade_checkpoint::layout::{MeshAxis, Placement};
use brigade_nn::{ExpertParallel, Model, ModelBuilder, TensorParallel};
use brigade_optim::Optimizer;
use brigade_sharding::{Axis, Mesh, TensorPart, TensorPlan};
use brigade_torch::{Error, NamedTensor, ProcessGroup, Result, TensorId, gradient};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

use crate::processes::Processes;
use crate::sharding::{ExpertLayout, Part, Writers, parts_of_state};

/// Ranks that divide layers or experts, and the models of which they have parts.
pub(crate) struct TensorModels {
    mesh: Mesh,
    /// [`Axis::Tensor`], whose ranks have parts of layers and read the same samples, or [`Axis::Expert`], whose ranks
    /// have some of the experts and read other samples.
    axis: Axis,
    /// Group of the ranks that have the other parts.
    group: ProcessGroup,
    /// Ranks with the same experts, if there are several.
    copies: Option<ProcessGroup>,
    /// `true` if each rank has a part of the sequence between divided layers.
    has_sequence_regions: bool,
    /// All ranks of the job.
    everyone: Processes,
    models: Mutex<Vec<Weak<TensorModel>>>,
}

/// A model of which each rank of a group has a part.
#[derive(Debug)]
pub(crate) struct TensorModel {
    /// The tensors that an optimizer steps, parts of parameters or shards of such parts.
    stepped: HashSet<TensorId>,
    /// Parts of this rank by all names of the tensors, if nothing else shards them.
    parts: HashMap<String, Part>,
}

impl TensorModels {
    /// Makes the models of ranks that divide layers. `group` are the ranks that have the other parts, `everyone` all
    /// ranks of the job.
    pub(crate) fn of_layers(
        mesh: Mesh,
        group: ProcessGroup,
        everyone: &Processes,
        has_sequence_regions: bool,
    ) -> Self {
        let (everyone, models) = (everyone.clone(), Mutex::default());
        let axis = Axis::Tensor;
        Self { mesh, axis, group, copies: None, has_sequence_regions, everyone, models }
    }

    /// Makes the models of ranks that divide experts along a mesh of all ranks. All ranks take part.
    pub(crate) fn of_experts(mesh: Mesh, everyone: &Processes) -> Result<Self> {
        let group = everyone.job.group_along(&mesh, Axis::Expert)?;
        let copies = match mesh.size(Axis::ExpertData) {
            1 => None,
            _ => Some(everyone.job.group_along(&mesh, Axis::ExpertData)?),
        };
        let (everyone, models) = (everyone.clone(), Mutex::default());
        let axis = Axis::Expert;
        Ok(Self { mesh, axis, group, copies, has_sequence_regions: false, everyone, models })
    }

    /// Returns the builder of a model that these ranks divide by a plan.
    pub(crate) fn of_models(&self, plan: TensorPlan) -> ModelBuilder {
        let group = Some(self.group.clone());
        if self.divides_experts() {
            let tensor = TensorParallel { group: None, plan };
            let experts = ExpertParallel { group };
            return Model::builder().tensor_parallel(tensor).expert_parallel(experts);
        }
        let has_regions = self.has_sequence_regions || plan.has_sequence_regions();
        let plan = plan.sequence_regions(has_regions);
        Model::builder().tensor_parallel(TensorParallel { group, plan })
    }

    /// Returns `true` if each rank has some of the experts, and reads other samples.
    pub(crate) fn divides_experts(&self) -> bool {
        self.axis == Axis::Expert
    }

    /// Returns the number of ranks that divide the experts; 1 if ranks divide layers.
    pub(crate) fn expert_ranks(&self) -> usize {
        if self.divides_experts() { self.group.size() } else { 1 }
    }

    /// Returns the ranks with the same experts. `None` if there are no others.
    pub(crate) fn copies(&self) -> Option<&ProcessGroup> {
        self.copies.as_ref()
    }

    /// Returns the mesh of all ranks.
    pub(crate) fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the mesh of all ranks, given the mesh of those over which gradients are averaged.
    pub(crate) fn mesh_with(&self, averaged: &Mesh) -> Result<Mesh> {
        let ranks = averaged.world_size() * self.group.size();
        let builder = Mesh::builder().replicate(averaged.size(Axis::Replicate));
        Ok(builder.shard(averaged.size(Axis::Shard)).tensor(self.group.size()).build(ranks)?)
    }

    /// Returns the mesh of all ranks in which the innermost axis, `tp`, has the parts, and the other axes have copies.
    /// Models are sharded as on the mesh `sharded`, or not at all.
    fn grid(&self, sharded: Option<&Mesh>) -> Result<Mesh> {
        let copies = if self.divides_experts() { Axis::ExpertData } else { Axis::DataContext };
        let copies = self.mesh.size(copies);
        match sharded {
            Some(sharded) if self.divides_experts() => {
                let parts = self.group.size();
                let builder = Mesh::builder().replicate(sharded.size(Axis::Replicate));
                let builder = builder.shard(sharded.size(Axis::Shard) / parts).tensor(parts);
                Ok(builder.build(sharded.world_size())?)
            }
            Some(sharded) => self.mesh_with(sharded),
            None => self.mesh_with(&Mesh::builder().replicate(copies).build(copies)?),
        }
    }

    /// Returns the writers of the parts of models that nothing else spreads, among the ranks of this rank's stage.
    fn writers(&self) -> Result<Arc<Writers>> {
        let (mesh, rank) = (self.grid(None)?, self.everyone.process_index());
        Writers::new(&mesh, rank - rank % mesh.world_size())
    }

    /// Returns the assignment of experts to ranks, and to writers of checkpoints, for models that are sharded on a
    /// mesh. `None` if ranks divide layers.
    pub(crate) fn expert_layout(&self, sharded: &Mesh) -> Result<Option<ExpertLayout>> {
        if !self.divides_experts() {
            return Ok(None);
        }
        let writers = self.writers()?;
        Ok(Some(ExpertLayout { writers, outer_axes: self.axes(Some(sharded))?.len() - 1 }))
    }

    /// Returns the mesh axes on which checkpoints place the ranks' parts.
    pub(crate) fn axes(&self, sharded: Option<&Mesh>) -> Result<Vec<MeshAxis>> {
        let mut axes = self.grid(sharded)?.axes();
        if let Some(parts) = axes.iter_mut().find(|axis| axis.name == Axis::Tensor.name()) {
            self.axis.name().clone_into(&mut parts.name);
        }
        Ok(axes)
    }

    /// Returns the name of the kind of parallelism, for messages.
    fn kind(&self) -> &'static str {
        if self.divides_experts() { "expert" } else { "tensor" }
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
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
        let ranks = if self.divides_experts() {
            model.expert_parallel().map(ExpertParallel::ranks)
        } else {
            model.tensor_parallel().map(TensorParallel::ranks)
        };
        let kind = self.kind();
        let all: Vec<(Option<usize>, Vec<String>)> = self.group.all_gather_object(&(ranks, own))?;
        let (ranks, own) = &all[self.group.rank()];
        let Some(ranks) = ranks else {
            return Err(Error::invalid_argument(format!(
                "the ranks divide {} (mesh {}), and the model was built whole: build it by \
                 `Accelerator::parallel().model`, or by `parallel().model_builder` with an empty plan where every rank of the \
                 group is to have all of it",
                self.divided(),
                self.mesh
            )));
        };
        if *ranks != self.group.size() {
            return Err(Error::invalid_argument(format!(
                "the model was built for {ranks} {kind} ranks, and this job has {}: build it by \
                 `Accelerator::parallel().model` of this Accelerator",
                self.group.size()
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
                self.group.rank()
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
    ) -> Result<Arc<TensorModel>> {
        let divided = model.divided_parameters().into_iter();
        let divided: HashMap<String, TensorPart> = divided.map(|it| (it.name, it.part)).collect();
        let mut parts = HashMap::new();
        if !is_sharded {
            let writers = self.writers()?;
            let averaged_axes = usize::from(self.grid(None)?.size(Axis::Data) > 1);
            for (name, _) in model.state_dict() {
                let first = model.parameter_name(&name).unwrap_or_default();
                let Some(part) = divided.get(first) else { continue };
                let placements = vec![Placement::Replicate; averaged_axes];
                let (own, part) = (part.own_shape(), Some(part.clone()));
                parts.insert(name, Part::new(own, part, 0, &writers, placements));
            }
        }
        let is_part = |it: &&NamedTensor| divided.contains_key(&it.name);
        let stepped = stepped.iter().filter(is_part).map(|it| TensorId::of(&it.tensor)).collect();
        let model = Arc::new(TensorModel { stepped, parts });
        let mut models = self.models.lock();
        models.retain(|known| known.strong_count() > 0);
        models.push(Arc::downgrade(&model));
        Ok(model)
    }

    fn models(&self) -> Vec<Arc<TensorModel>> {
        self.models.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns `true` if this rank has a part of a tensor that an optimizer steps, and the other ranks of its group
    /// have other parts.
    pub(crate) fn is_part(&self, stepped: TensorId) -> bool {
        self.models().iter().any(|model| model.stepped.contains(&stepped))
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
        Err(Error::invalid_argument(format!(
            "{} needs whole parameters, and each of {} {} ranks has a part: use a rule whose steps depend on one \
             element alone, such as AdamW or SGD",
            optimizer.rule_name(),
            self.group.size(),
            self.kind()
        )))
    }

    /// Compares the gradients of parameters that every rank of the group has whole, in debug mode. All of them take
    /// part.
    pub(crate) fn compare_gradients(&self, optimizer: &Optimizer) -> Result<()> {
        let sums = optimizer.with_parameters(|stepped| {
            let sum = |parameter: &Tensor| -> Result<Option<u64>> {
                let is_whole = !self.is_part(TensorId::of(parameter));
                let found = gradient(parameter)?.filter(|_| is_whole);
                let sum = found.map(|it| it.f_sum(Kind::Double)?.f_double_value(&[]));
                Ok(sum.transpose()?.map(f64::to_bits))
            };
            stepped.iter().map(|it| sum(it)).collect::<Result<Vec<_>>>()
        })?;
        let all: Vec<Vec<Option<u64>>> = self.group.all_gather_object(&sums)?;
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
                self.group.rank()
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
        if self.divides_experts() { "experts" } else { "layers" }
    }
}

impl TensorModel {
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

impl fmt::Debug for TensorModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorModels").field("mesh", &self.mesh).finish_non_exhaustive()
    }
}
