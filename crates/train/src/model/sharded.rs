//! The forward of a model whose parameters are spread over ranks, and its whole weights for a scope.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use brigade_nn::{Model, Module};
use brigade_sharding::{Axis, Mesh, Offload, Sharding, ShardingPlan, Strategy, Workload};
use brigade_torch::{Result, TensorTree, grad_enabled, has_memory};
use tch::no_grad;

use super::{ModelContext, PreparedModel, broadcast_all};
use crate::error::MemoryPlan;
use crate::processes::Processes;
use crate::sharding::{Layout, ShardedModel, ShardedModels, Writers};

impl ModelContext {
    /// Shards a model with rank 0's values over the ranks, and makes optimizers that were prepared before step its
    /// shards. All ranks take part.
    pub(super) fn shard<M>(
        &self,
        model: &mut Model<M>,
        models: &ShardedModels,
    ) -> Result<Arc<ShardedModel>> {
        let plan = models.plan(model, &self.job)?;
        *self.job.memory_plan.lock() = Some(memory_plan(model, &plan)?);
        if let Some(group) = self.job.group() {
            let mut known = model.parameters();
            known.retain(|parameter| has_memory(&parameter.tensor));
            self.broadcast_values(model, &known, &group)?;
        }
        let data = models.mesh();
        let tensor = self.tensor.as_ref();
        let all = tensor.map_or(Ok(data.clone()), |tensor| tensor.mesh_with(data))?;
        let rank = self.everyone().process_index();
        let writers = Writers::new(&all, rank - rank % all.world_size())?;
        let experts = tensor.map_or(Ok(None), |tensor| tensor.expert_layout(Some(data)))?;
        let sharded = models.shard(model, plan, &self.job, &Layout { writers, experts })?;
        sharded.set_deferred_values(model, &Processes::of(Arc::clone(&self.job)))?;
        if let Some(group) = self.job.group() {
            broadcast_all(&group, &model.buffers())?;
        }
        for optimizer in self.registry.optimizers() {
            models.take_over(&optimizer)?;
        }
        Ok(sharded)
    }
}

impl<M> PreparedModel<M> {
    pub(super) fn sharded_forward<Input>(
        &self,
        sharded: &ShardedModel,
        input: Input,
    ) -> Result<M::Output>
    where
        M: Module<Input>,
        M::Output: TensorTree<Owned = M::Output>,
    {
        let sync = self.inner.sync.load(Ordering::Relaxed);
        if grad_enabled() {
            sharded.sharder().set_sync(sync || sharded.reduces_each_batch(), sync)?;
        }
        self.send_buffers()?;
        let output = sharded.sharder().run_root(|| self.computed(input))?;
        if self.model.is_training() {
            self.inner.buffers_differ.store(true, Ordering::Relaxed);
        }
        Ok(output)
    }

    /// Replaces the buffers by rank 0's, if they may differ.
    pub(super) fn send_buffers(&self) -> Result<()> {
        if self.inner.buffers_differ.swap(false, Ordering::Relaxed)
            && let Some(group) = self.context.job.group()
        {
            broadcast_all(&group, &self.model.buffers())?;
        }
        Ok(())
    }

    /// Computes something other than the module's forward without gradients, such as the logits of the next token with a
    /// key-value cache (PyTorch's `register_fsdp_forward_method`), with the Accelerator's mixed precision. The units of a
    /// sharded model are gathered one after the other, as in [`PreparedModel::forward`], so that a rank does not need
    /// memory for the whole model. Every rank must call it, as many times as the others.
    ///
    /// ```
    /// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options, StagedModel};
    /// use brigade_nn::Model;
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator =
    ///     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 2, ..Default::default() };
    /// let mut model = accelerator.prepare(Model::new(|path| Gpt2LmHead::new(path, &options))?)?;
    /// model.eval();
    /// let sharded = StagedModel::new(|batch, next| Ok(vec![model.run(|model| next(model, batch))?]));
    /// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
    /// assert_eq!(GenerationOptions::default().generate(&sharded, &ids, None)?.size(), [1, 22]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of `compute`; [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn run<T>(&self, compute: impl FnOnce(&Model<M>) -> Result<T>) -> Result<T>
    where
        T: TensorTree<Owned = T>,
    {
        let compute = || self.computed_by(|| compute(&self.model));
        no_grad(|| match self.sharded.as_ref().filter(|_| self.context.pipeline.is_none()) {
            Some(sharded) => {
                self.send_buffers()?;
                sharded.sharder().run_root(compute)
            }
            None => compute(),
        })
    }

    /// Runs `read` with the whole parameters of a sharded model, on every rank; without sharding the model is passed
    /// unchanged. Within the scope a rank needs memory for the whole model.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_sharding::Sharding;
    /// use brigade_train::Accelerator;
    /// use tch::Kind;
    ///
    /// let accelerator =
    ///     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let model = accelerator.prepare(Model::new(|path| Linear::new(path, 4, 2))?)?;
    /// let norm = model.gathered(|model| Ok(model.parameters()[0].tensor.f_norm()?))?;
    /// assert!(norm.double_value(&[]) > 0.0);
    /// let outside = model.inner().parameters()[0].tensor.f_sum(Kind::Float);
    /// assert!(outside.unwrap_err().to_string().contains("gathered"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of `read`; [`brigade_torch::ErrorKind::Communication`] when a peer is gone; an error if it is
    /// called inside of another `gathered`.
    pub fn gathered<T>(&self, read: impl FnOnce(&Model<M>) -> Result<T>) -> Result<T> {
        match &self.sharded {
            Some(sharded) => sharded.sharder().gathered(|| read(&self.model)),
            None => read(&self.model),
        }
    }

    /// Runs `write` with the whole parameters of a sharded model, on every rank, and copies this rank's rows of the
    /// result into the shards. Every rank writes the same values.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedModel::gathered`]; after an error of `write` the shards are as before.
    pub fn gathered_mut<T>(&mut self, write: impl FnOnce(&mut Model<M>) -> Result<T>) -> Result<T> {
        let Self { model, sharded, .. } = self;
        match sharded {
            Some(sharded) => sharded.sharder().gathered_mut(|| write(model)),
            None => write(model),
        }
    }
}

/// Returns the planned memory of a model, and the smallest change that reduces the memory on the device.
fn memory_plan<M>(model: &Model<M>, plan: &ShardingPlan) -> Result<MemoryPlan> {
    let workload = Workload { states: 2, ..Workload::default() };
    let (sharding, bytes) = (plan.sharding(), plan.memory(workload).total());
    let offloaded = sharding.clone().offload(Offload::Cpu { pin: true });
    let strategies = [Strategy::Zero2, Strategy::Zero3]
        .map(|strategy| (strategy.to_string(), Sharding { strategy, ..sharding.clone() }));
    let changes = strategies.into_iter().chain([("offload to the CPU".to_owned(), offloaded)]);
    let parameters = model.sharding_parameters()?;
    let mut smaller = None;
    for (name, changed) in changes {
        // A hybrid mesh shards over fewer ranks than zero3 would.
        let Ok(mesh) = changed.mesh(plan.mesh().world_size()) else { continue };
        let (replicate, shard) = (mesh.size(Axis::Replicate), mesh.size(Axis::Shard));
        let experts = plan.mesh().size(Axis::Expert);
        let mesh = Mesh::builder().replicate(replicate).shard(shard).expert(experts);
        let Ok(mesh) = mesh.build(plan.mesh().world_size()) else { continue };
        let Ok(plan) = ShardingPlan::new(&parameters, &changed, &mesh) else { continue };
        let less = plan.memory(workload).total();
        if less < bytes {
            smaller = Some((name, less));
            break;
        }
    }
    Ok(MemoryPlan { strategy: sharding.strategy.to_string(), bytes, smaller })
}
