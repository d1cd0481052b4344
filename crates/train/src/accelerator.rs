//! The Accelerator: one process's view of the job.

mod banner;
mod batch_size;
mod builder;
mod capture;
mod checkpoints;
mod data;
mod gradients;
mod precision;
mod prepare;
mod processes;
mod watching;
mod weights;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use brigade_nn::Model;

pub use builder::AcceleratorBuilder;
pub use prepare::Prepare;

use crate::checkpoint::Checkpoints;
use crate::error::Result;
use crate::gradients::backward::Gradients;
use crate::gradients::join::EvenBatches;
use crate::loader::source::DataLoaderConfiguration;
use crate::model::{ModelOptions, PreparedModel};
use crate::precision::Numerics;
use crate::processes::Processes;
use crate::watch::Watch;

/// What `brigade launch` (or torchrun) set up, as a value: the process's place among the ranks, its
/// device, and everything that the training loop does with the others.
///
/// Started alone, a program has one rank and every collective is the identity, so the loop is the same.
///
/// By purpose:
///
/// - Preparing: [`prepare`](Accelerator::prepare), [`unwrap_model`](Accelerator::unwrap_model),
///   [`device`](Accelerator::device), [`place_dataset`](Accelerator::place_dataset).
/// - The training step: [`backward`](Accelerator::backward), [`accumulate`](Accelerator::accumulate),
///   [`no_sync`](Accelerator::no_sync), [`sync_gradients`](Accelerator::sync_gradients),
///   [`backward_weighted`](Accelerator::backward_weighted),
///   [`optimizer_step_was_skipped`](Accelerator::optimizer_step_was_skipped),
///   [`clip_grad_norm`](Accelerator::clip_grad_norm),
///   [`clip_grad_norm_with`](Accelerator::clip_grad_norm_with),
///   [`clip_grad_value`](Accelerator::clip_grad_value),
///   [`unscale_gradients`](Accelerator::unscale_gradients).
/// - Unequal work: [`join_uneven_inputs`](Accelerator::join_uneven_inputs),
///   [`local_sgd`](Accelerator::local_sgd),
///   [`find_executable_batch_size`](Accelerator::find_executable_batch_size),
///   [`set_trigger`](Accelerator::set_trigger), [`check_trigger`](Accelerator::check_trigger).
/// - Precision: [`mixed_precision`](Accelerator::mixed_precision), [`autocast`](Accelerator::autocast),
///   [`autocast_with`](Accelerator::autocast_with), [`grad_scaler`](Accelerator::grad_scaler).
/// - Place among the ranks: [`process_index`](Accelerator::process_index),
///   [`local_process_index`](Accelerator::local_process_index),
///   [`num_processes`](Accelerator::num_processes), [`is_main_process`](Accelerator::is_main_process),
///   [`is_local_main_process`](Accelerator::is_local_main_process),
///   [`is_last_process`](Accelerator::is_last_process), [`use_distributed`](Accelerator::use_distributed),
///   [`world`](Accelerator::world), [`group`](Accelerator::group);
///   [`processes`](Accelerator::processes) is all of this and the two below as a value of its own.
/// - Order among the ranks: [`wait_for_everyone`](Accelerator::wait_for_everyone),
///   [`main_process_first`](Accelerator::main_process_first),
///   [`local_main_process_first`](Accelerator::local_main_process_first),
///   [`on_main_process`](Accelerator::on_main_process),
///   [`on_local_main_process`](Accelerator::on_local_main_process),
///   [`on_last_process`](Accelerator::on_last_process), [`on_process`](Accelerator::on_process),
///   [`split_between_processes`](Accelerator::split_between_processes).
/// - Values of all ranks: [`gather`](Accelerator::gather),
///   [`gather_for_metrics`](Accelerator::gather_for_metrics),
///   [`gather_objects_for_metrics`](Accelerator::gather_objects_for_metrics),
///   [`gather_object`](Accelerator::gather_object), [`reduce`](Accelerator::reduce),
///   [`broadcast`](Accelerator::broadcast), [`broadcast_object`](Accelerator::broadcast_object),
///   [`pad_across_processes`](Accelerator::pad_across_processes),
///   [`update_metric`](Accelerator::update_metric), [`compute_metric`](Accelerator::compute_metric).
/// - Checkpoints: [`save_state`](Accelerator::save_state),
///   [`save_state_numbered`](Accelerator::save_state_numbered),
///   [`wait_for_save`](Accelerator::wait_for_save), [`load_state`](Accelerator::load_state),
///   [`load_latest_state`](Accelerator::load_latest_state),
///   [`latest_checkpoint`](Accelerator::latest_checkpoint), [`checkpoints`](Accelerator::checkpoints),
///   [`skip_first_batches`](Accelerator::skip_first_batches),
///   [`register_for_checkpointing`](Accelerator::register_for_checkpointing),
///   [`register_value_for_checkpointing`](Accelerator::register_value_for_checkpointing).
/// - Weights: [`save_model`](Accelerator::save_model), [`load_model`](Accelerator::load_model),
///   [`save`](Accelerator::save).
/// - Watching: [`progress`](Accelerator::progress), [`println`](Accelerator::println),
///   [`log`](Accelerator::log), [`init_trackers`](Accelerator::init_trackers),
///   [`tracker`](Accelerator::tracker), [`trackers`](Accelerator::trackers),
///   [`end_training`](Accelerator::end_training),
///   [`init_logging`](Accelerator::init_logging), [`logger`](Accelerator::logger),
///   [`meter`](Accelerator::meter), [`profile`](Accelerator::profile).
/// - Random numbers: [`set_seed`](Accelerator::set_seed),
///   [`set_seed_per_process`](Accelerator::set_seed_per_process).
///
/// Behind it stand values that a program may use alone: [`processes`](Accelerator::processes),
/// [`gradient_accumulator`](Accelerator::gradient_accumulator), [`grad_scaler`](Accelerator::grad_scaler),
/// [`checkpoints`](Accelerator::checkpoints), [`trackers`](Accelerator::trackers), and
/// [`PreparedLoader`](crate::PreparedLoader) for the data.
///
/// ```
/// use brigade_train::{Accelerator, Adam};
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
    gradients: Gradients,
    options: Arc<Options>,
    numerics: Arc<Numerics>,
    /// Whether the banner has been printed.
    banner_printed: Arc<AtomicBool>,
    /// A join's rule for prepared loaders.
    even_batches: Arc<EvenBatches>,
    watch: Arc<Watch>,
    checkpoints: Checkpoints,
}

/// What the builder was told.
#[derive(Debug)]
struct Options {
    models: Arc<ModelOptions>,
    loader: DataLoaderConfiguration,
    quiet: bool,
}

impl Accelerator {
    /// With defaults. Joins the other ranks; returns when all are connected.
    ///
    /// # Errors
    /// [`crate::Error::World`] for contradicting variables; [`crate::Error::Torch`] when the ranks do
    /// not find each other within the time limit.
    pub fn new() -> Result<Self> {
        Self::builder().build()
    }

    /// Settings to choose.
    pub fn builder() -> AcceleratorBuilder {
        AcceleratorBuilder::new()
    }

    /// Makes models, optimizers, loaders and schedulers work on all ranks. Takes one of them or a tuple
    /// in any order and gives back the same shape.
    ///
    /// Every rank calls it with the same things: models are compared and take rank 0's weights, loaders
    /// take rank 0's seed.
    ///
    /// # Errors
    /// When models or data sets differ between ranks, or a peer is gone.
    pub fn prepare<P: Prepare>(&self, objects: P) -> Result<P::Prepared> {
        objects.prepare(self)
    }

    /// The model under the preparation.
    #[must_use]
    pub fn unwrap_model<'a, M>(&self, model: &'a PreparedModel<M>) -> &'a Model<M> {
        model.inner()
    }

    /// Prints a warning on the first process of each host, unless the program wants none.
    fn warn(&self, what: &str) {
        if !self.options.quiet {
            self.processes.warn(what);
        }
    }

    /// Seeds the random numbers of this rank, the same on every rank: libtorch's, for weights and dropout, and the
    /// seeds of loaders that this thread makes from then on and gives none ([`brigade_data::draw_seed`]).
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_train::{Accelerator, Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let order = || {
    ///     accelerator.set_seed(42);
    ///     let data = TensorDataset::new(Tensor::from_slice(&[1f32, 2., 3., 4., 5., 6.]))?;
    ///     let loader = accelerator.prepare(DataLoader::new(data).batch_size(6).shuffle(true))?;
    ///     let batch = loader.iter().next().expect("one batch")?;
    ///     Ok::<_, brigade_train::Error>(batch.into_data())
    /// };
    /// assert_eq!(order()?, order()?);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn set_seed(&self, seed: i64) {
        tch::manual_seed(seed);
        brigade_data::set_thread_seed(seed as u64);
    }

    /// As [`Accelerator::set_seed`], with `seed + rank`. What a loader draws is rank 0's when it is prepared.
    pub fn set_seed_per_process(&self, seed: i64) {
        self.set_seed(seed.wrapping_add(self.process_index() as i64));
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
