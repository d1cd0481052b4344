//! Model parallelism of an Accelerator: the division of models among the ranks, and its memory.

use std::fmt;

use brigade_nn::{Model, ModelBuilder, ParamPath, TensorParallel, TensorParallelPlan};
use brigade_sharding::{Mesh, Offload, Sharding, TensorPlan, Workload};
use brigade_torch::{Result, TensorTree, gradient};
use tch::Tensor;

use super::Accelerator;
use crate::arrangement::Arrangement;
use crate::model::PreparedModel;
use crate::sharding::ShardedModel;

/// Parallelism of an Accelerator's models: builds models that are divided among the ranks, and describes their mesh,
/// sharding, stages and memory. Returned by [`Accelerator::parallel`].
#[derive(Debug, Clone, Copy)]
pub struct Parallelism<'a> {
    accelerator: &'a Accelerator,
}

/// The memory of this rank's sharded models in bytes, by kind: planned, and measured so far. Made by
/// [`Parallelism::memory_report`] and displayed as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryReport {
    /// Rows of the report, one for each kind of memory.
    pub rows: Vec<MemoryRow>,
}

/// A row of a [`MemoryReport`]: one kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRow {
    /// Name of the kind: `parameters`, `gradients`, `optimizer`, `gathered`, `reduced`, or `offloaded`, which is in the
    /// host's memory.
    pub kind: &'static str,
    /// Planned bytes of the rank that needs the most.
    pub planned: u64,
    /// Measured bytes of this rank: the current number, or the peak for `gathered` and `reduced`.
    pub measured: u64,
}

impl Accelerator {
    /// Returns how models are divided among the ranks, which also builds models whose layers are divided.
    #[must_use]
    pub fn parallel(&self) -> Parallelism<'_> {
        Parallelism { accelerator: self }
    }

    /// Returns how the ranks are arranged.
    pub(super) fn arrangement(&self) -> Arrangement {
        Arrangement {
            averaged: self.gradients.processes.clone(),
            data: self.data.clone(),
            tensor: self.gradients.tensor.clone(),
            context: self.gradients.context.clone(),
            pipeline: self.gradients.pipeline.clone(),
        }
    }
}

impl<'a> Parallelism<'a> {
    /// Returns how prepared models are sharded. `None` if every rank has whole models.
    #[must_use]
    pub fn sharding(&self) -> Option<&'a Sharding> {
        self.accelerator.gradients.sharded.as_ref().map(|sharded| sharded.sharding())
    }

    /// Returns the ranks as the mesh in which models are sharded and replicated. Without sharding all ranks are along
    /// `dp_replicate`, since each has the whole model.
    ///
    /// ```
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    /// let accelerator = Accelerator::builder().cpu(true).sharding(Sharding::zero3()).build()?;
    /// assert_eq!(accelerator.parallel().mesh()?.to_string(), "dp_shard 1");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a world without ranks.
    pub fn mesh(&self) -> Result<Mesh> {
        let averaged = match &self.accelerator.gradients.sharded {
            Some(sharded) => sharded.mesh().clone(),
            None => {
                let ranks = self.accelerator.gradients.processes.num_processes();
                Mesh::builder().replicate(ranks).build(ranks)?
            }
        };
        self.accelerator.arrangement().mesh_with(&averaged)
    }

    /// Builds a model for model parallelism, by the plan of its architecture: its layers are divided over the tensor
    /// group of this rank, its experts over the expert group, and its sequences over the context group. In a pipeline
    /// the model has only this rank's stages. If all these groups have one rank, the model is the one that
    /// [`Model::new`] builds.
    ///
    /// ```
    /// use brigade_models::{LlamaForCausalLm, LlamaOptions};
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let options = LlamaOptions {
    ///     vocab_size: 50, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
    ///     num_attention_heads: 4, ..Default::default()
    /// };
    /// let model = accelerator.parallel().model(|path| LlamaForCausalLm::new(path, &options))?;
    /// assert_eq!(model.tensor("lm_head.weight").unwrap().size(), [50, 32]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`brigade_nn::ModelBuilder::build`], such as a number of heads or a size that is not
    /// divisible by the number of ranks.
    pub fn model<M: TensorParallelPlan>(
        &self,
        constructor: impl FnOnce(&ParamPath<'_>) -> M,
    ) -> Result<Model<M>> {
        self.model_builder(M::tensor_plan()).build(constructor)
    }

    /// Returns the builder of a model whose layers the ranks of this rank's tensor group divide by `plan`: for a custom
    /// model, for weights that are read from a file, and for a model whose memory is allocated in
    /// [`Accelerator::prepare`].
    ///
    /// ```
    /// use brigade_nn::{Linear, ParamPath, Relu, Sequential};
    /// use brigade_sharding::TensorPlan;
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let plan = TensorPlan::new().column("*.up.weight").row("*.down.weight");
    /// let model = accelerator.parallel().model_builder(plan).deferred().build(|path: &ParamPath| {
    ///     let path = path / "block";
    ///     Sequential::new().add(Linear::new(&path / "up", 4, 8)).add(Relu).add(Linear::new(&path / "down", 8, 4))
    /// })?;
    /// let model = accelerator.prepare(model)?;
    ///
    /// let plan = TensorPlan::new().column("*.upp.weight");
    /// let model = accelerator.parallel().model_builder(plan).build(|path| Linear::new(path / "up", 4, 8));
    /// let error = model.unwrap_err().to_string();
    /// assert!(error.contains("the tensor plan's `*.upp.weight` match no parameter; the model has up.weight, up.bias"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use = "build the model with a constructor"]
    pub fn model_builder(&self, plan: TensorPlan) -> ModelBuilder {
        let builder = match &self.accelerator.gradients.tensor {
            Some(tensor) => tensor.of_models(plan),
            None => Model::builder().tensor_parallel(TensorParallel { group: None, plan }),
        };
        let builder = match &self.accelerator.gradients.context {
            Some(context) => builder.context_parallel(context.of_models()),
            None => builder,
        };
        match &self.accelerator.gradients.pipeline {
            Some(pipeline) => builder.pipeline(pipeline.of_models()),
            None => builder,
        }
    }

    /// Returns the number of micro-batches into which [`Accelerator::forward_backward`] cuts a batch. Always 1 without
    /// a pipeline.
    ///
    /// ```
    /// let accelerator = brigade_train::Accelerator::builder().cpu(true).quiet(true).build()?;
    /// assert_eq!(accelerator.parallel().micro_batches(), 1);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn micro_batches(&self) -> usize {
        let pipeline = self.accelerator.gradients.pipeline.as_ref();
        pipeline.map_or(1, |it| it.pipeline().options().micro_batches)
    }

    /// Computes a value of a batch without gradients, in the micro-batches of a pipeline if there is one, and returns
    /// the values of all micro-batches on all ranks of the pipeline: losses, logits, or other results of the closure.
    /// Without a pipeline it is one value, of the whole batch.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_train::Accelerator;
    /// use tch::{Kind, Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let mut model = accelerator.prepare(Model::new(|path| Linear::new(path, 4, 2))?)?;
    /// model.eval();
    /// let batch = Tensor::zeros([3, 4], (Kind::Float, accelerator.device()));
    /// let logits = accelerator.parallel().forward_stages(&model, &batch, |model, micro| model.forward(micro))?;
    /// assert_eq!(Tensor::cat(&logits, 0).size(), [3, 2]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`crate::Pipeline::forward`].
    #[track_caller]
    pub fn forward_stages<M, B, T>(
        &self,
        model: &PreparedModel<M>,
        batch: &B,
        mut value: impl FnMut(&PreparedModel<M>, &B::Owned) -> Result<T>,
    ) -> Result<Vec<T::Owned>>
    where
        B: TensorTree,
        T: TensorTree,
    {
        match &self.accelerator.gradients.pipeline {
            Some(pipeline) => model.gathered(|inner| {
                pipeline.pipeline().forward(inner, batch, |micro| value(model, micro))
            }),
            None => tch::no_grad(|| {
                let value = value(model, &batch.narrow_rows(0..batch.rows()?)?)?;
                Ok(vec![value.try_map(&mut |tensor| tensor.f_detach())?])
            }),
        }
    }

    /// Returns the memory of the prepared sharded models, planned and measured so far. `None` if no model is sharded.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_optim::AdamW;
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    /// # let accelerator =
    /// #     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// let optimizer = AdamW::default().build(&model)?;
    /// let (model, optimizer) = accelerator.prepare((model, optimizer))?;
    /// let report = accelerator.parallel().memory_report()?.expect("a sharded model");
    /// assert_eq!(report.rows[0].measured, 4 * (4 * 2 + 2));
    /// println!("{report}");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`brigade_optim::Optimizer::state_dict`].
    pub fn memory_report(&self) -> Result<Option<MemoryReport>> {
        let Some(sharded) = &self.accelerator.gradients.sharded else { return Ok(None) };
        let models = sharded.models();
        if models.is_empty() {
            return Ok(None);
        }
        let mut states = Vec::new();
        for optimizer in self.accelerator.checkpoints.registry().optimizers() {
            states.extend(optimizer.state_dict()?.parameters);
        }
        let tensors = states.iter().flat_map(|it| &it.tensors).map(|(_, tensor)| tensor);
        let optimizer: u64 = tensors.map(bytes_of).sum();
        // The parameter with the most states counts: elementwise rules keep the same number for all.
        let slots =
            states.iter().map(|it| it.tensors.iter().filter(|(_, it)| it.dim() > 0).count());
        let workload = Workload { states: slots.max().unwrap_or(0) as u64, ..Workload::default() };
        let mut rows = ["parameters", "gradients", "optimizer", "gathered", "reduced"]
            .map(|kind| MemoryRow { kind, planned: 0, measured: 0 });
        let mut offloaded = 0;
        for model in &models {
            let planned = model.plan().memory(workload);
            let measured = measure(model)?;
            let [parameters, gradients, states, gathered, reduced] = &mut rows;
            parameters.planned += planned.parameters;
            gradients.planned += planned.gradients;
            states.planned += planned.optimizer;
            gathered.planned += planned.gathered;
            reduced.planned += planned.reduce;
            offloaded += measured.offloaded;
            parameters.measured += measured.parameters;
            gradients.measured += measured.gradients;
            gathered.measured += measured.gathered;
            reduced.measured += measured.reduced;
        }
        rows[2].measured = optimizer;
        let mut rows = Vec::from(rows);
        if sharded.sharding().offload != Offload::None {
            let planned = models.iter().map(|model| model.plan().memory(workload).offloaded).sum();
            // Shards, their gradients and the optimizer's states are in the host's memory.
            let measured = offloaded + optimizer;
            rows[2].measured = 0;
            rows.push(MemoryRow { kind: "offloaded", planned, measured });
        }
        Ok(Some(MemoryReport { rows }))
    }
}

#[derive(Debug, Default)]
struct Measured {
    offloaded: u64,
    parameters: u64,
    gradients: u64,
    gathered: u64,
    reduced: u64,
}

fn measure(model: &ShardedModel) -> Result<Measured> {
    let is_whole = model.plan().sharding().strategy.keeps_parameters_whole();
    let offloads = model.plan().sharding().offload != Offload::None;
    let meter = model.sharder().meter()?;
    let storages: u64 = model.plan().units().iter().map(|unit| unit.storage_bytes()).sum();
    let mut measured = Measured {
        parameters: if is_whole { storages } else { 0 },
        gathered: if is_whole { 0 } else { meter.peak_gathered_bytes },
        reduced: meter.peak_reduced_bytes,
        ..Measured::default()
    };
    model.with_parameters(|parameters| -> Result<()> {
        for parameter in parameters {
            let of_shard = gradient(&parameter.shard)?.as_ref().map_or(0, bytes_of);
            if offloads {
                measured.offloaded += bytes_of(&parameter.shard) + of_shard;
            } else {
                // The rows of a whole parameter are the shard, where both have one type.
                if !is_whole || parameter.shard.f_kind()? != parameter.whole.f_kind()? {
                    measured.parameters += bytes_of(&parameter.shard);
                }
                measured.gradients += of_shard;
            }
            measured.gradients += gradient(&parameter.whole)?.as_ref().map_or(0, bytes_of);
        }
        Ok(())
    })?;
    Ok(measured)
}

fn bytes_of(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

impl MemoryReport {
    /// Returns the total of the planned bytes of a rank.
    #[must_use]
    pub fn planned(&self) -> u64 {
        self.rows.iter().map(|row| row.planned).sum()
    }

    /// Returns the total of the measured bytes of this rank.
    #[must_use]
    pub fn measured(&self) -> u64 {
        self.rows.iter().map(|row| row.measured).sum()
    }
}

impl fmt::Display for MemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<12}{:>12}{:>12}", "", "planned MB", "measured MB")?;
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        for MemoryRow { kind, planned, measured } in &self.rows {
            writeln!(f, "{kind:<12}{:>12.1}{:>12.1}", megabytes(*planned), megabytes(*measured))?;
        }
        let (planned, measured) = (megabytes(self.planned()), megabytes(self.measured()));
        write!(f, "{:<12}{planned:>12.1}{measured:>12.1}", "all")
    }
}
