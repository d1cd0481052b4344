//! Assignment of a job's ranks to parts of the computation: the axes of its mesh as groups of ranks.
//!
//! The axes of a mesh give groups of ranks (`Job::along`). The ranks over which gradients are averaged are a `Job` of
//! their own, on which reducers and sharding run as they do on all ranks elsewhere (`Gradients::processes`). So are
//! the ranks that read different samples, for loaders and metrics. Norms (`gradients/norm.rs`), the overflow of fp16,
//! whole states (`model/spread.rs`) and checkpoints cover all ranks.

use std::env;
use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use brigade_rank_env::env::{
    BRIGADE_CONTEXT, BRIGADE_CONTEXT_METHOD, BRIGADE_EXPERT, BRIGADE_MICRO_BATCHES,
    BRIGADE_PIPELINE, BRIGADE_PIPELINE_CHUNKS, BRIGADE_PIPELINE_SCHEDULE,
    BRIGADE_SEQUENCE_PARALLEL, BRIGADE_TENSOR,
};
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Axis, ContextMethod, Mesh, Sharding, Strategy};
use brigade_torch::{Error, Result};

use crate::context_parallel::ContextRanks;
use crate::model_parallel::ModelParallelRanks;
use crate::pipeline::{PipelineOptions, PipelineRanks};
use crate::processes::Processes;

/// Options of the mesh that the program has set. The environment supplies those that are not set.
#[derive(Debug, Default)]
pub(crate) struct ArrangementOptions {
    pub(crate) mesh: Option<Mesh>,
    pub(crate) tensor_ranks: Option<usize>,
    pub(crate) sequence_regions: Option<bool>,
    pub(crate) context_ranks: Option<usize>,
    pub(crate) expert_ranks: Option<usize>,
    pub(crate) context_method: Option<ContextMethod>,
    pub(crate) pipeline_ranks: Option<usize>,
    /// Pipeline options: number of micro-batches and schedule.
    pub(crate) pipeline: Option<PipelineOptions>,
}

/// The ranks of a job, grouped by the parts of the computation that they share.
#[derive(Clone)]
pub(crate) struct Arrangement {
    /// Ranks over which gradients are averaged and parameters are sharded or replicated. They read different samples,
    /// or different parts of a sequence.
    pub(crate) averaged: Processes,
    /// Ranks that read different samples.
    pub(crate) data: Processes,
    /// Ranks of tensor and expert groups, if ranks divide layers or experts.
    pub(crate) tensor: Option<Arc<ModelParallelRanks>>,
    /// Ranks of context groups, if ranks have parts of each sequence.
    pub(crate) context: Option<Arc<ContextRanks>>,
    /// Ranks of pipelines, if ranks have stages of models.
    pub(crate) pipeline: Option<Arc<PipelineRanks>>,
}

impl ArrangementOptions {
    /// Returns the first option that is set, for a program whose ranks have been arranged already.
    pub(crate) fn first_set(&self) -> Option<&'static str> {
        let set = [
            ("mesh", self.mesh.is_some()),
            ("tensor_parallel", self.tensor_ranks.is_some()),
            ("sequence_regions", self.sequence_regions.is_some()),
            ("context_parallel", self.context_ranks.is_some()),
            ("context_method", self.context_method.is_some()),
            ("expert_parallel", self.expert_ranks.is_some()),
            ("pipeline_parallel", self.pipeline_ranks.is_some()),
            ("pipeline_options", self.pipeline.is_some()),
        ];
        set.into_iter().find(|(_, is_set)| *is_set).map(|(name, _)| name)
    }

    /// Arranges the ranks. Afterwards, sharding applies to the ranks over which gradients are averaged. All ranks take
    /// part.
    pub(crate) fn arrange(
        self,
        sharding: &mut Option<Sharding>,
        everyone: &Processes,
    ) -> Result<Arrangement> {
        let others = [
            ("tensor_parallel", self.tensor_ranks),
            ("context_parallel", self.context_ranks),
            ("expert_parallel", self.expert_ranks),
            ("pipeline_parallel", self.pipeline_ranks),
        ];
        if let (Some(mesh), Some((name, Some(ranks)))) =
            (&self.mesh, others.into_iter().find(|(_, ranks)| ranks.is_some()))
        {
            return Err(Error::invalid_argument(format!(
                "the options `mesh({mesh})` and `{name}({ranks})` contradict each other: set one of them"
            )));
        }
        let given = from_env(BRIGADE_CONTEXT_METHOD)?;
        let (mesh, method) = match self.mesh {
            Some(mesh) => {
                let method = self.context_method.or(given);
                let method = method_of(&mesh, method)?;
                (mesh, method)
            }
            None => {
                let tensor = ranks(self.tensor_ranks, BRIGADE_TENSOR, "tensor ranks")?;
                let context = ranks(self.context_ranks, BRIGADE_CONTEXT, "context ranks")?;
                let method = self.context_method.or(given).unwrap_or_default();
                let stages = ranks(self.pipeline_ranks, BRIGADE_PIPELINE, "pipeline ranks")?;
                let expert = ranks(self.expert_ranks, BRIGADE_EXPERT, "expert ranks")?;
                let sizes = Sizes { tensor, stages, context, expert };
                (mesh_of(sizes, method, sharding.as_ref(), everyone)?, method)
            }
        };
        let has_regions = self.sequence_regions.or(from_env(BRIGADE_SEQUENCE_PARALLEL)?);
        arrange(&mesh, method, has_regions.unwrap_or(false), self.pipeline, sharding, everyone)
    }
}

impl Arrangement {
    /// Returns the mesh of all ranks, given the mesh of the ranks over which gradients are averaged.
    pub(crate) fn mesh_with(&self, averaged: &Mesh) -> Result<Mesh> {
        if let Some(experts) = self.tensor.as_ref().filter(|it| it.divides_experts()) {
            return Ok(experts.mesh().clone());
        }
        let tensor = self.tensor.as_ref().map_or(1, |tensor| tensor.tensor_ranks());
        if let Some(pipeline) = &self.pipeline {
            return Ok(pipeline.mesh().clone());
        }
        let Some(context) = &self.context else {
            return self.tensor.as_ref().map_or(Ok(averaged.clone()), |it| it.mesh_with(averaged));
        };
        let parts = context.group().size();
        let (mut replicate, mut shard) =
            (averaged.size(Axis::Replicate), averaged.size(Axis::Shard));
        // The innermost axis divides sequences.
        let inner = if shard > 1 { &mut shard } else { &mut replicate };
        *inner /= parts;
        let builder = Mesh::builder().replicate(replicate).shard(shard).tensor(tensor);
        let builder = match context.method() {
            ContextMethod::Ulysses => builder.sequence(parts),
            _ => builder.context(parts),
        };
        Ok(builder.build(averaged.world_size() * tensor)?)
    }
}

/// Returns the number of ranks that the program or else the environment sets. Defaults to 1.
fn ranks(set: Option<usize>, variable: &str, what: &str) -> Result<usize> {
    if let Some(ranks) = set {
        return Ok(ranks);
    }
    Ok(count(variable, what)?.unwrap_or(1))
}

/// Returns the number that an environment variable sets.
fn count(variable: &str, what: &str) -> Result<Option<usize>> {
    let Ok(text) = env::var(variable) else { return Ok(None) };
    match text.trim().parse::<usize>() {
        Ok(count) if count > 0 => Ok(Some(count)),
        _ => Err(Error::invalid_argument(format!(
            "{variable}: {text:?} is not a number of {what}: write 1 or more"
        ))),
    }
}

/// Returns the options of a pipeline of `ranks` ranks that the environment sets.
fn pipeline_options(ranks: usize) -> Result<PipelineOptions> {
    let micro_batches = count(BRIGADE_MICRO_BATCHES, "micro-batches")?;
    let options = PipelineOptions::new(
        micro_batches.unwrap_or_else(|| Schedule::default_micro_batches(ranks)),
    );
    let schedule = from_env(BRIGADE_PIPELINE_SCHEDULE)?.unwrap_or(options.schedule);
    let chunks = count(BRIGADE_PIPELINE_CHUNKS, "stages per rank")?;
    Ok(PipelineOptions { schedule, chunks, ..options })
}

fn from_env<T: FromStr<Err: Display>>(variable: &str) -> Result<Option<T>> {
    let Ok(text) = env::var(variable) else { return Ok(None) };
    let parsed =
        text.parse().map_err(|error| Error::invalid_argument(format!("{variable}: {error}")));
    parsed.map(Some)
}

/// Returns the context method of a mesh: its axis determines whether sequences are exchanged for heads.
fn method_of(mesh: &Mesh, method: Option<ContextMethod>) -> Result<ContextMethod> {
    let (context, sequence) = (mesh.size(Axis::Context), mesh.size(Axis::Sequence));
    match method {
        Some(ContextMethod::Ulysses) if context > 1 => Err(Error::invalid_argument(format!(
            "the mesh {mesh} has {context} ranks along cp, and Ulysses exchanges sequences for heads along sp: use \
             `Mesh::builder().sequence({context})`, or the method `gather` or `ring`"
        ))),
        Some(method) if method != ContextMethod::Ulysses && sequence > 1 => {
            Err(Error::invalid_argument(format!(
                "the mesh {mesh} has {sequence} ranks along sp, where Ulysses exchanges sequences for heads, and the method \
                 is {method}: use `Mesh::builder().context({sequence})`, or the method `ulysses`"
            )))
        }
        Some(method) => Ok(method),
        None if sequence > 1 => Ok(ContextMethod::Ulysses),
        None => Ok(ContextMethod::default()),
    }
}

/// Numbers of ranks along the axes that divide models.
#[derive(Clone, Copy)]
struct Sizes {
    tensor: usize,
    stages: usize,
    context: usize,
    expert: usize,
}

/// Returns the mesh with these numbers of ranks. Its other axes come from the sharding settings.
fn mesh_of(
    sizes: Sizes,
    method: ContextMethod,
    sharding: Option<&Sharding>,
    everyone: &Processes,
) -> Result<Mesh> {
    let Sizes { tensor, stages, context, expert } = sizes;
    let all = everyone.num_processes();
    let others = (all / tensor.max(1) / stages.max(1) / context.max(1)).max(1);
    let data = match sharding {
        Some(sharding) => sharding.mesh(others)?,
        // Experts are divided within a replica.
        None if expert > 1 => Mesh::builder().shard(others).build(others)?,
        None => Mesh::builder().replicate(others).build(others)?,
    };
    let builder =
        Mesh::builder().replicate(data.size(Axis::Replicate)).shard(data.size(Axis::Shard));
    let builder = match method {
        ContextMethod::Ulysses => builder.sequence(context),
        _ => builder.context(context),
    };
    // If it does not divide the number of ranks, the mesh returns an error with both numbers.
    Ok(builder.pipeline(stages).tensor(tensor).expert(expert).build(all)?)
}

fn arrange(
    mesh: &Mesh,
    method: ContextMethod,
    has_sequence_regions: bool,
    pipeline: Option<PipelineOptions>,
    sharding: &mut Option<Sharding>,
    everyone: &Processes,
) -> Result<Arrangement> {
    let ranks = everyone.num_processes();
    if mesh.world_size() != ranks {
        return Err(Error::invalid_argument(format!(
            "the mesh {mesh} has {} ranks and the job has {ranks}: change a size, or start {} ranks",
            mesh.world_size(),
            mesh.world_size()
        )));
    }
    check_experts(mesh)?;
    if mesh.size(Axis::Context) > 1 && mesh.size(Axis::Sequence) > 1 {
        return Err(Error::invalid_argument(format!(
            "the mesh {mesh} divides sequences along both cp and sp: use one of them, with {} ranks",
            mesh.size(Axis::Context) * mesh.size(Axis::Sequence)
        )));
    }
    let stages = mesh.size(Axis::Pipeline);
    agree(sharding, mesh)?;
    let job = &everyone.job;
    let pipeline = match stages {
        1 => None,
        _ => {
            let group = job.group_along(mesh, Axis::Pipeline)?;
            let options = pipeline.map_or_else(|| pipeline_options(stages), Ok)?;
            Some(Arc::new(PipelineRanks::new(mesh.clone(), &group, options, everyone)?))
        }
    };
    let parts = mesh.size(Axis::Context) * mesh.size(Axis::Sequence);
    let axis = if mesh.size(Axis::Sequence) > 1 { Axis::Sequence } else { Axis::Context };
    let context = match parts {
        1 => None,
        _ => Some(Arc::new(ContextRanks::new(mesh.clone(), job.group_along(mesh, axis)?, method))),
    };
    let tensor = ModelParallelRanks::new(mesh, everyone, has_sequence_regions)?.map(Arc::new);
    let averaged = match mesh.size(Axis::DataContext) {
        all if all == ranks => everyone.clone(),
        _ => Processes::of(Arc::new(job.along(mesh, Axis::DataContext)?)),
    };
    let data = match parts {
        1 => averaged.clone(),
        _ => Processes::of(Arc::new(job.along(mesh, Axis::Data)?)),
    };
    Ok(Arrangement { averaged, data, tensor, context, pipeline })
}

/// Fails for experts that are not divided over whole tensor groups.
fn check_experts(mesh: &Mesh) -> Result<()> {
    let (experts, tensor) = (mesh.size(Axis::Expert), mesh.size(Axis::Tensor));
    if experts == 1 || experts.is_multiple_of(tensor) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "the mesh {mesh} divides experts over {experts} ranks, and they are divided over whole groups of tensor ranks: take a \
         multiple of {tensor} along {}",
        Axis::Expert
    )))
}

/// Adapts a sharding strategy to a mesh, whose axes determine how many ranks share a copy of the parameters.
fn agree(sharding: &mut Option<Sharding>, mesh: &Mesh) -> Result<()> {
    // Ranks with different parts of a sequence share a copy of the parameters, as ranks with different samples do.
    let (replicate, shard) = (mesh.size(Axis::Replicate), mesh.size(Axis::ShardContext));
    let Some(sharding) = sharding else {
        return match mesh.size(Axis::Shard) {
            1 => Ok(()),
            // Only experts are divided along this axis.
            _ if mesh.size(Axis::Expert) > 1 => Ok(()),
            shard => Err(Error::invalid_argument(format!(
                "the mesh {mesh} spreads parameters over {shard} ranks and no sharding was chosen: set \
                 `sharding(Sharding::zero3())`, or use `replicate({shard})` in the place of `shard({shard})`"
            ))),
        };
    };
    let own = sharding.mesh(replicate * shard)?;
    if own.size(Axis::Shard) == shard {
        return Ok(());
    }
    // Ranks of one shard, which now read different parts of sequences.
    let is_inside = sharding.strategy == Strategy::Hybrid(mesh.size(Axis::Shard));
    if (sharding.strategy == Strategy::Zero3 || is_inside) && shard > 1 {
        sharding.strategy = Strategy::Hybrid(shard);
        return Ok(());
    }
    Err(Error::invalid_argument(format!(
        "the mesh {mesh} spreads parameters over {shard} ranks, and {} over {}: give the mesh `shard({})`, or use zero3",
        sharding.strategy,
        own.size(Axis::Shard),
        own.size(Axis::Shard)
    )))
}
