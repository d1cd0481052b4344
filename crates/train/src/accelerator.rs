//! The Accelerator: one process's view of the job.

mod banner;
mod batch_size;
mod builder;
mod capture;
mod checkpoints;
mod data;
mod gradients;
mod metrics;
mod model_setting;
mod parallelism;
mod pipeline;
mod precision;
mod prepare;
mod processes;
mod sharding;
mod watching;
mod weights;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use brigade_torch::Result;
pub use builder::AcceleratorBuilder;
pub use model_setting::ModelSetting;
pub use parallelism::{MemoryReport, MemoryRow, Parallelism};
pub use prepare::Prepare;

use crate::checkpoint::Checkpoints;
use crate::gradients::backward::Gradients;
use crate::gradients::join::EvenBatches;
use crate::loader::source::DataLoaderConfiguration;
use crate::model::ModelOptions;
use crate::precision::Numerics;
use crate::processes::{Processes, set_seed};
use crate::watch::Watch;

/// The distributed setup of a process: its rank and world size, its device, and the operations of a training loop that
/// involve the other ranks. `brigade launch` (or torchrun) sets the environment that it is made from.
///
/// A program that is started without a launcher has one rank, and every collective is the identity, so the loop is the
/// same.
///
/// The methods of this type are those of a training loop. All else is in the objects that these methods return, which
/// programs can also use without an Accelerator:
///
/// - [`processes`](Accelerator::processes): rank and world size, collectives, execution order among the ranks, and
///   splitting of inputs;
/// - [`checkpoints`](Accelerator::checkpoints): numbered checkpoints, waiting for a save, registering further objects,
///   weights in several files;
/// - [`parallel`](Accelerator::parallel): models whose layers are divided among ranks, the mesh, stages, memory;
/// - [`trackers`](Accelerator::trackers): the trackers to which values are logged;
/// - [`logging`](Accelerator::logging): log lines with the rank and the step;
/// - [`gradient_accumulator`](Accelerator::gradient_accumulator), [`grad_scaler`](Accelerator::grad_scaler): the
///   state of accumulation and of loss scaling.
///
/// ```
/// use brigade_optim::Adam;
/// use brigade_train::Accelerator;
/// # use brigade_data::DataLoader;
/// # use brigade_datasets::Digits;
/// # use brigade_models::Cnn;
/// # use brigade_nn::Model;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let accelerator = Accelerator::new()?;
/// let model = Model::new(Cnn::new)?;
/// let optimizer = Adam::default().lr(5e-3).build(&model)?;
/// let train = DataLoader::new(Digits::train()?.resize(28, 28)?).batch_size(64).shuffle(true);
/// let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
///
/// model.train();
/// for batch in &train {
///     let (images, labels) = batch?.into_data();
///     let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
///     optimizer.zero_grad()?;
///     accelerator.backward(&loss)?;
///     optimizer.step()?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Accelerator {
    processes: Processes,
    /// The ranks that read other samples.
    data: Processes,
    gradients: Gradients,
    /// `true` if the ranks of a pipeline agree on losses that are not finite.
    checks_step_losses: bool,
    options: Arc<Options>,
    numerics: Arc<Numerics>,
    /// `true` if the banner has been printed.
    banner_printed: Arc<AtomicBool>,
    /// `true` if the line about sharding has been printed.
    plan_printed: Arc<AtomicBool>,
    /// A join's rule for prepared loaders.
    even_batches: Arc<EvenBatches>,
    watch: Arc<Watch>,
    checkpoints: Checkpoints,
}

/// Options set by the builder.
#[derive(Debug)]
struct Options {
    models: Arc<ModelOptions>,
    loader: DataLoaderConfiguration,
    quiet: bool,
}

impl Accelerator {
    /// Joins the other ranks with default settings, and returns when all are connected.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Environment`] for contradicting variables;
    /// [`brigade_torch::ErrorKind::Communication`] when the ranks do not find each other within the time limit.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Returns a builder with default settings.
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::new()
    }

    /// Prepares models, optimizers, loaders and schedulers for distributed training. Takes one of them or a tuple in
    /// any order and returns the same shape.
    ///
    /// Every rank must call it with the same objects: models are compared and get rank 0's weights, loaders get rank
    /// 0's seed.
    ///
    /// # Errors
    /// Fails when models or data sets differ between ranks, or a peer is gone.
    pub fn prepare<P: Prepare>(&self, objects: P) -> Result<P::Prepared> {
        objects.prepare(self)
    }

    /// Prints a warning on the first process of each host, unless the Accelerator is quiet.
    fn warn(&self, what: &str) {
        if !self.options.quiet {
            self.processes.warn(what);
        }
    }

    /// Seeds the random generators of this rank with `seed`, the same on every rank: libtorch's generators, for weights
    /// and dropout, and the seeds of loaders that this thread makes afterwards without a seed of their own
    /// ([`brigade_data::draw_seed`]).
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let order = || {
    ///     accelerator.set_seed(42);
    ///     let data = TensorDataset::new(Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.]))?;
    ///     let loader = accelerator.prepare(DataLoader::new(data).batch_size(6).shuffle(true))?;
    ///     let batch = loader.iter().next().expect("one batch")?;
    ///     Ok::<_, brigade_torch::Error>(batch.into_data())
    /// };
    /// assert_eq!(order()?, order()?);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn set_seed(&self, seed: i64) {
        set_seed(seed);
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accelerator")
            .field("processes", &self.processes)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
