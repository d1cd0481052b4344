//! Models whose layers the ranks of a tensor group compute together.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};

use brigade_checkpoint::layout::Placement;
use brigade_nn::{Model, TensorParallel};
use brigade_optim::Optimizer;
use brigade_sharding::{Axis, Mesh, TensorPart, TensorPlan};
use brigade_torch::{Error, NamedTensor, ProcessGroup, Result, TensorId, gradient};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

use crate::processes::Processes;
use crate::sharding::{Part, Writers, parts_of_state};

/// The ranks that divide layers between them, and the models of which they have parts.
pub(crate) struct TensorModels {
    mesh: Mesh,
    /// The ranks that have the other parts of what this one has, and read the same samples.
    group: ProcessGroup,
    /// Whether each has a part of the sequence between divided layers.
    has_sequence_regions: bool,
    /// All ranks of the job.
    everyone: Processes,
    models: Mutex<Vec<Weak<TensorModel>>>,
}

/// A model of which each rank of a tensor group has a part.
#[derive(Debug)]
pub(crate) struct TensorModel {
    /// The tensors that an optimizer steps, parts of parameters or shards of such parts.
    stepped: HashSet<TensorId>,
    /// What this rank has of them, by all names, where nothing else spreads them.
    parts: HashMap<String, Part>,
}

impl TensorModels {
    /// `group` are the ranks that have the other parts of what this one has, and `everyone` all ranks of the job.
    pub(crate) fn new(
        mesh: Mesh,
        group: ProcessGroup,
        everyone: &Processes,
        has_sequence_regions: bool,
    ) -> Self {
        let (everyone, models) = (everyone.clone(), Mutex::default());
        Self { mesh, group, has_sequence_regions, everyone, models }
    }

    /// Returns the options of models with a plan, whose layers these ranks divide.
    pub(crate) fn of_models(&self, plan: TensorPlan) -> TensorParallel {
        let has_regions = self.has_sequence_regions || plan.has_sequence_regions();
        TensorParallel { group: Some(self.group.clone()), plan: plan.sequence_regions(has_regions) }
    }

    /// Returns the mesh of all ranks, of which `averaged` is the mesh of those over which gradients are averaged.
    pub(crate) fn mesh_with(&self, averaged: &Mesh) -> Result<Mesh> {
        let ranks = averaged.world_size() * self.group.size();
        let builder = Mesh::builder().replicate(averaged.size(Axis::Replicate));
        Ok(builder.shard(averaged.size(Axis::Shard)).tensor(self.group.size()).build(ranks)?)
    }

    /// Returns the mesh of all ranks, where models are sharded as on the mesh `sharded`, or not at all.
    pub(crate) fn mesh_over(&self, sharded: Option<&Mesh>) -> Result<Mesh> {
        let averaged = self.mesh.size(Axis::DataContext);
        match sharded {
            Some(sharded) => self.mesh_with(sharded),
            None => self.mesh_with(&Mesh::builder().replicate(averaged).build(averaged)?),
        }
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    pub(crate) fn everyone(&self) -> &Processes {
        &self.everyone
    }

    /// Checks a model that is prepared: that it was built for these ranks, and alike on all of them. Tensors that all ranks
    /// have whole are replaced by those of the group's first rank. All ranks take part.
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
        let ranks = model.tensor_parallel().map(TensorParallel::ranks);
        let all: Vec<(Option<usize>, Vec<String>)> = self.group.all_gather_object(&(ranks, own))?;
        let (ranks, own) = &all[self.group.rank()];
        let Some(ranks) = ranks else {
            return Err(Error::invalid_argument(format!(
                "the ranks divide layers (mesh {}), and the model was built whole: build it by \
                 `Accelerator::parallel_model`, or by `parallel_builder` with an empty plan where every rank of a tensor \
                 group is to have all of it",
                self.mesh
            )));
        };
        if *ranks != self.group.size() {
            return Err(Error::invalid_argument(format!(
                "the model was built for {ranks} tensor ranks, and this job has {}: build it by \
                 `Accelerator::parallel_model` of this Accelerator",
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
                    format!("built for {ranks} tensor ranks here and for {theirs} there")
                }
                (None, None) => "built for tensor ranks here and whole there".to_owned(),
                (None, Some(_)) => {
                    format!("{} parameters here and {} there", own.len(), theirs.len())
                }
            };
            return Err(Error::invalid_argument(format!(
                "the models of tensor ranks {} and {rank} differ, and nothing was prepared: {difference}; build the same \
                 model with the same plan on every rank",
                self.group.rank()
            )));
        }
        Ok(())
    }

    /// Notes what optimizers of a prepared model step: `stepped`, of all parameters; shards where the model is sharded.
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
            let mesh = self.mesh_over(None)?;
            let rank = self.everyone.process_index();
            let writers = Writers::new(&mesh, rank - rank % mesh.world_size())?;
            let averaged_axes = usize::from(mesh.size(Axis::Data) > 1);
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

    /// Returns whether this rank has a part of a tensor that an optimizer steps, and the others of its group other parts.
    pub(crate) fn is_part(&self, stepped: TensorId) -> bool {
        self.models().iter().any(|model| model.stepped.contains(&stepped))
    }

    /// Returns what this rank has of an optimizer's states, by their places in its state, where nothing else spreads them.
    pub(crate) fn parts_of(&self, optimizer: &Optimizer) -> HashMap<String, Part> {
        let models = self.models();
        let concerned = models.iter().filter(|model| model.is_stepped_by(optimizer));
        let parts = concerned.flat_map(|model| model.parts.clone());
        parts_of_state(optimizer, parts)
    }

    /// Fails for an optimizer that needs whole parameters and steps parts.
    pub(crate) fn check_optimizer(&self, optimizer: &Optimizer) -> Result<()> {
        let steps_parts = self.models().iter().any(|model| model.is_stepped_by(optimizer));
        if !steps_parts || optimizer.is_elementwise() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{} needs whole parameters, and each of {} tensor ranks has a part: use a rule whose steps depend on one \
             element alone, such as AdamW or SGD",
            optimizer.rule_name(),
            self.group.size()
        )))
    }

    /// Compares the gradients of parameters that every rank of the group has whole, in debug mode. All of them take part.
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
                 module between divided layers computes other values on them, such as one that draws random numbers of \
                 its own",
                self.group.rank()
            )));
        }
        Ok(())
    }

    /// Fails for what does not work with tensor parallelism.
    pub(crate) fn refuse(&self, what: &str, instead: &str) -> Error {
        Error::invalid_argument(format!(
            "{what} does not work where ranks divide layers (mesh {}): {instead}",
            self.mesh
        ))
    }
}

impl TensorModel {
    /// Returns what this rank has of parameters, by all names, where nothing else spreads them.
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

impl fmt::Debug for TensorModels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorModels").field("mesh", &self.mesh).finish_non_exhaustive()
    }
}
