//! Objects that [`Accelerator::prepare`] takes.

use std::sync::Arc;

use brigade_data::{BatchedDataset, Collate, DataLoader, IterableDataset, StreamLoader};
use brigade_nn::Model;
use brigade_optim::{Optimizer, Scheduler};
use brigade_torch::{Result, TensorTree};

use super::Accelerator;
use crate::loader::PreparedLoader;
use crate::loader::source::Loader;
use crate::model::{ModelContext, PreparedModel};
use crate::optimizer::PreparedOptimizer;
use crate::scheduler::PreparedScheduler;

/// An object that can be prepared for distributed training: a model, an optimizer, a loader, a scheduler, or a tuple of
/// up to eight of them.
pub trait Prepare {
    /// Type of the prepared object.
    type Prepared;

    /// Prepares the object for the ranks of an Accelerator. Called by [`Accelerator::prepare`].
    ///
    /// # Errors
    /// Fails when the ranks disagree or one of them has ended.
    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared>;
}

/// Prepares the elements of a tuple in order, on every rank, since preparing sends messages. Any order is valid:
/// optimizers share their model's tensors, and schedulers their optimizer's learning rate.
macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Prepare),+> Prepare for ($($name,)+) {
            type Prepared = ($($name::Prepared,)+);

            fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
                Ok(($(self.$index.prepare(accelerator)?,)+))
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

impl<T: Prepare> Prepare for Vec<T> {
    type Prepared = Vec<T::Prepared>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        self.into_iter().map(|object| object.prepare(accelerator)).collect()
    }
}

impl<M> Prepare for Model<M> {
    type Prepared = PreparedModel<M>;

    fn prepare(mut self, accelerator: &Accelerator) -> Result<PreparedModel<M>> {
        self.check_not_quantized("prepare")?;
        let context = ModelContext {
            job: Arc::clone(&accelerator.gradients.processes.job),
            options: Arc::clone(&accelerator.options.models),
            numerics: Arc::clone(&accelerator.numerics),
            registry: Arc::clone(accelerator.checkpoints.registry()),
            loss_check: accelerator.gradients.loss_check.clone(),
            accumulator: accelerator.gradients.accumulator.clone(),
            sharded: accelerator.gradients.sharded.clone(),
            tensor: accelerator.gradients.tensor.clone(),
            context: accelerator.gradients.context.clone(),
            pipeline: accelerator.gradients.pipeline.clone(),
        };
        let channels_last = context.place(&mut self)?;
        accelerator.print_banner(channels_last);
        let prepared = PreparedModel::new(self, context)?;
        accelerator.print_plan(&prepared);
        Ok(prepared)
    }
}

impl Prepare for Optimizer {
    type Prepared = PreparedOptimizer;

    fn prepare(self, accelerator: &Accelerator) -> Result<PreparedOptimizer> {
        let Accelerator { gradients, checkpoints, .. } = accelerator;
        PreparedOptimizer::new(self, gradients, checkpoints.registry())
    }
}

impl Prepare for Scheduler {
    type Prepared = PreparedScheduler;

    fn prepare(self, accelerator: &Accelerator) -> Result<PreparedScheduler> {
        let splits = accelerator.options.loader.split_batches;
        let processes = if splits { 1 } else { accelerator.data_processes().num_processes() };
        let Accelerator { gradients, checkpoints, .. } = accelerator;
        Ok(PreparedScheduler::new(self, gradients, checkpoints.registry(), processes))
    }
}

impl<D> Prepare for DataLoader<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    type Prepared = PreparedLoader<Self>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_loader(self)
    }
}

impl<I> Prepare for StreamLoader<I>
where
    I: IterableDataset + 'static,
    <I::Sample as Collate>::Batch: TensorTree<Owned = <I::Sample as Collate>::Batch>,
{
    type Prepared = PreparedLoader<Self>;

    fn prepare(self, accelerator: &Accelerator) -> Result<Self::Prepared> {
        accelerator.prepare_loader(self)
    }
}

impl Accelerator {
    fn prepare_loader<L: Loader + 'static>(&self, loader: L) -> Result<PreparedLoader<L>> {
        let Self { even_batches, checkpoints, .. } = self;
        let processes = self.data_processes();
        let configuration = self.options.loader;
        let registry = checkpoints.registry();
        PreparedLoader::registered(loader, processes, configuration, even_batches, registry)
    }
}
