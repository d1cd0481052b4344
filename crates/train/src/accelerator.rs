//! The Accelerator: one process's view of the job.

mod attempt;
mod banner;
mod checkpoints;
pub(crate) mod connect;
pub(crate) mod groups;
mod metrics;
mod processes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use brigade_rank_env::World;
use brigade_torch::{
    Backend, CudaUnavailable, Device, GlooDevice, ProcessGroup, Products, ReducerOptions, Store,
    keep_freed_memory,
};

use crate::accelerator::connect::ConnectOptions;
use crate::accelerator::groups::Groups;
use crate::capture::Recorder;
use crate::checkpoint::{Checkpoints, ProjectConfiguration};
use crate::error::{Error, Result};
use crate::gradients::accumulate::{GradientAccumulationOptions, GradientAccumulator};
use crate::gradients::hook::CommHook;
use crate::gradients::join::EvenBatches;
use crate::gradients::loss_check::{LossCheck, LossCheckOptions};
use crate::loader::DataLoaderConfiguration;
use crate::precision::{Numerics, NumericsOptions};
use crate::prepare::Prepare;
use crate::processes::Processes;
use crate::watch::{Watch, WatchOptions};

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
    pub(crate) processes: Processes,
    pub(crate) accumulator: GradientAccumulator,
    pub(crate) options: Arc<Options>,
    pub(crate) numerics: Arc<Numerics>,
    /// `None` when it is off, and with a loss scaler.
    pub(crate) loss_check: Option<Arc<LossCheck>>,
    /// Whether the banner has been printed.
    pub(crate) banner_printed: Arc<AtomicBool>,
    /// A join's rule for prepared loaders.
    pub(crate) even_batches: Arc<EvenBatches>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) checkpoints: Checkpoints,
}

/// The process's place and its connections. Shared by everything that was prepared.
pub(crate) struct Job {
    pub(crate) world: World,
    /// `None` when there is one rank.
    groups: Option<Groups>,
    pub(crate) device: Device,
    /// Why a program that was built for GPUs runs on the CPU, unless it was told to.
    pub(crate) missing_gpu: Option<CudaUnavailable>,
    /// Whether products of matrices on the CPU are reproducible.
    pub(crate) products: Products,
    /// The time limit of joining and of every collective.
    pub(crate) timeout: Duration,
    /// Whether ranks compare their collectives and check losses.
    pub(crate) debug: bool,
    /// Saves begun: the same number on all ranks, which all save together.
    pub(crate) saves: AtomicU64,
    /// Attempts of a batch size: the same number on all ranks.
    pub(crate) tries: AtomicU64,
    /// Accelerators that check losses: the same number on all ranks.
    pub(crate) loss_checks: AtomicU64,
    /// What a step that is being recorded has to do on the host at each replay.
    pub(crate) recorder: Recorder,
}

/// What a builder collects.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) reducer: ReducerOptions,
    pub(crate) loader: DataLoaderConfiguration,
    pub(crate) quiet: bool,
    pub(crate) comm_hook: CommHook,
    pub(crate) sync_batch_norm: bool,
}

/// Settings of an [`Accelerator`]. Every one has a default.
#[derive(Debug)]
#[must_use]
pub struct AcceleratorBuilder {
    connection: ConnectOptions,
    /// `None`: yes.
    keep_memory: Option<bool>,
    /// `None`: as the environment says.
    accumulation: Option<GradientAccumulationOptions>,
    pub(crate) numerics: NumericsOptions,
    pub(crate) loss_check: LossCheckOptions,
    sharing: Option<Accelerator>,
    processes: Option<Processes>,
    debug: Option<bool>,
    options: Options,
    pub(crate) watch: WatchOptions,
    project: ProjectConfiguration,
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
        AcceleratorBuilder {
            connection: ConnectOptions::default(),
            keep_memory: None,
            accumulation: None,
            numerics: NumericsOptions::default(),
            loss_check: LossCheckOptions::default(),
            sharing: None,
            processes: None,
            debug: None,
            project: ProjectConfiguration::default(),
            options: Options {
                reducer: ReducerOptions::default(),
                loader: DataLoaderConfiguration::default(),
                quiet: false,
                comm_hook: CommHook::None,
                sync_batch_norm: false,
            },
            watch: WatchOptions::default(),
        }
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

    /// This process's number in the job, from 0.
    #[must_use]
    pub fn process_index(&self) -> usize {
        self.processes.process_index()
    }

    /// This process's number on its host, from 0.
    #[must_use]
    pub fn local_process_index(&self) -> usize {
        self.processes.local_process_index()
    }

    /// The number of processes in the job.
    #[must_use]
    pub fn num_processes(&self) -> usize {
        self.processes.num_processes()
    }

    /// Whether this is rank 0.
    #[must_use]
    pub fn is_main_process(&self) -> bool {
        self.processes.is_main_process()
    }

    /// Whether this is the first rank of its host.
    #[must_use]
    pub fn is_local_main_process(&self) -> bool {
        self.processes.is_local_main_process()
    }

    /// Whether this is the last rank.
    #[must_use]
    pub fn is_last_process(&self) -> bool {
        self.processes.is_last_process()
    }

    /// Whether there is more than one process.
    #[must_use]
    pub fn use_distributed(&self) -> bool {
        self.processes.use_distributed()
    }

    /// How batches are shared out among the ranks, as the builder's options say: for data sets that depend on it.
    #[must_use]
    pub fn data_loader_configuration(&self) -> DataLoaderConfiguration {
        self.options.loader
    }

    /// The device of this process: models and batches are put there.
    #[must_use]
    pub fn device(&self) -> Device {
        self.processes.device()
    }

    /// Returns rank, world size and hosts as the launcher has set them.
    #[must_use]
    pub fn world(&self) -> &World {
        self.processes.world()
    }

    /// The group of all ranks, for collectives beyond those here; `None` with one process. Another one
    /// after [`Accelerator::find_executable_batch_size`] has tried a size in vain.
    #[must_use]
    pub fn group(&self) -> Option<ProcessGroup> {
        self.processes.group()
    }

    /// The group, whose operations name the caller's place in the user's program.
    #[track_caller]
    pub(crate) fn traced(&self) -> Option<ProcessGroup> {
        self.processes.traced()
    }

    /// Prints a line on the first process of each host, without mixing with other ranks' lines.
    pub fn println(&self, line: impl fmt::Display) {
        if self.is_local_main_process() {
            self.watch.print(format_args!("{line}\n"));
        }
    }

    /// As [`Accelerator::println`], without the end of line.
    pub fn print(&self, text: impl fmt::Display) {
        if self.is_local_main_process() {
            self.watch.print(format_args!("{text}"));
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

impl AcceleratorBuilder {
    /// Stays on the CPU where there is a GPU. So does the environment (`ACCELERATE_USE_CPU`, which
    /// `brigade launch --cpu` sets).
    pub fn cpu(mut self, cpu: bool) -> Self {
        self.connection.cpu = cpu;
        self
    }

    /// Whether the process keeps the CPU memory that tensors free, for the tensors of the next step
    /// ([`brigade_torch::keep_freed_memory`]). On unless set, or turned off by `BRIGADE_KEEP_MEMORY=0`.
    ///
    /// It is a setting of the whole process: libtorch's allocator of the CPU is replaced by one that keeps
    /// tensors of 1 MB and more in huge pages, and the C library keeps freed memory.
    /// A program that does more than train, or has an allocator of its own, may want to turn it off; a
    /// step of a small network then takes up to a third longer.
    pub fn keep_memory(mut self, keep: bool) -> Self {
        self.keep_memory = Some(keep);
        self
    }

    /// The time limit of joining and of every collective; 30 minutes unless set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.connection.timeout = Some(timeout);
        self
    }

    /// The interface or address that Gloo listens on.
    pub fn gloo_device(mut self, device: GlooDevice) -> Self {
        self.connection.gloo = Some(device);
        self
    }

    /// This rank's place in the job; what the environment says, unless set.
    ///
    /// With [`AcceleratorBuilder::store`] ranks need no launcher: threads of one process can be the ranks of
    /// a test or a notebook, each with an Accelerator of its own.
    ///
    /// ```
    /// use brigade_torch::{ReduceOp, Store};
    /// use brigade_train::{Accelerator, Tensor};
    /// use brigade_rank_env::{StoreEndpoint, World, WorldSize};
    ///
    /// let store = Store::hash()?;
    /// let sums = std::thread::scope(|scope| {
    ///     let ranks: Vec<_> = (0..2)
    ///         .map(|rank| {
    ///             let store = store.clone();
    ///             scope.spawn(move || -> Result<i64, Box<dyn std::error::Error + Send + Sync>> {
    ///                 let world = World::on_one_host(rank, WorldSize::new(2)?, StoreEndpoint::alone())?;
    ///                 let builder = Accelerator::builder().world(world).store(store).cpu(true);
    ///                 let accelerator = builder.build()?;
    ///                 let mine = Tensor::from(accelerator.process_index() as i64 + 1);
    ///                 Ok(accelerator.reduce(&mine, ReduceOp::Sum)?.int64_value(&[]))
    ///             })
    ///         })
    ///         .collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>, _>>()
    /// })?;
    /// assert_eq!(sums, [3, 3]);
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    ///
    /// Threads share libtorch's random numbers: what is drawn from them (dropout, first weights) is not the
    /// same from run to run.
    pub fn world(mut self, world: World) -> Self {
        self.connection.world = Some(world);
        self
    }

    /// The store where the ranks meet; the one whose address the world has, unless set. All ranks need handles
    /// of one store, such as clones of [`Store::hash`] between threads.
    pub fn store(mut self, store: Store) -> Self {
        self.connection.store = Some(store);
        self
    }

    /// The device of this rank; unless set, the GPU of its local rank where there is one.
    pub fn device(mut self, device: Device) -> Self {
        self.connection.device = Some(device);
        self
    }

    /// What moves data between ranks; unless set, NCCL for GPUs and Gloo for CPUs. With [`Backend::Fake`] a
    /// process plays one rank of a world of any size, and every collective answers as if all ranks had sent
    /// the same.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.connection.backend = Some(backend);
        self
    }

    /// Batches whose gradients are added up before each optimizer step; see
    /// [`Accelerator::accumulate`]. Unless set it is what the environment says
    /// (`ACCELERATE_GRADIENT_ACCUMULATION_STEPS`), else 1.
    pub fn gradient_accumulation_steps(self, steps: usize) -> Self {
        let before = self.accumulation.unwrap_or_default();
        self.gradient_accumulation(GradientAccumulationOptions { steps, ..before })
    }

    /// [`AcceleratorBuilder::gradient_accumulation_steps`] with all that can be chosen about them.
    pub fn gradient_accumulation(mut self, settings: GradientAccumulationOptions) -> Self {
        self.accumulation = Some(settings);
        self
    }

    /// Leaves out the line that the main process writes to standard error when the first model is
    /// prepared: processes, device, precision, memory format. Off unless set.
    pub fn quiet(mut self, quiet: bool) -> Self {
        self.options.quiet = quiet;
        self
    }

    /// How gradients are reduced.
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        self.options.reducer = options;
        self
    }

    /// What goes over the wire when gradients are averaged: all of it, unless set.
    pub fn comm_hook(mut self, hook: CommHook) -> Self {
        self.options.comm_hook = hook;
        self
    }

    /// Batch normalisations of the models that are prepared use the statistics of all ranks; see
    /// [`brigade_nn::Model::convert_sync_batch_norm`]. Off unless set.
    pub fn sync_batch_norm(mut self, on: bool) -> Self {
        self.options.sync_batch_norm = on;
        self
    }

    /// A loader's batch size is that of all ranks together: each takes its part of every batch.
    pub fn split_batches(mut self, split: bool) -> Self {
        self.options.loader.split_batches = split;
        self
    }

    /// All ranks get the same number of equally large batches, completed with duplicates that metrics
    /// leave out. On unless set.
    pub fn even_batches(mut self, even: bool) -> Self {
        self.options.loader.even_batches = even;
        self
    }

    /// Rank 0 reads the data and sends every rank its part. Off unless set.
    pub fn dispatch_batches(mut self, dispatch: bool) -> Self {
        self.options.loader.dispatch_batches = dispatch;
        self
    }

    /// Compares operation, shape, type and place in the program between ranks before each collective,
    /// and before each forward and backward that sends anything. A rank that does something else, or
    /// comes to nothing within the time limit, is named by an error on every other
    /// ([`brigade_torch::Desync`]). Slow. Off unless set, or asked for by
    /// the variable `ACCELERATE_DEBUG_MODE`, which `brigade launch --debug-collectives` sets. With `sharing` it is
    /// the other's.
    pub fn debug(mut self, on: bool) -> Self {
        self.debug = Some(on);
        self
    }

    /// Where numbered checkpoints go, and how checkpoints are written.
    pub fn project(mut self, project: ProjectConfiguration) -> Self {
        self.project = project;
        self
    }

    /// Uses another Accelerator's place, connections and device: a process joins its job once. Options that say
    /// otherwise (`cpu`, `device`, `backend`, `world`, `store`, `timeout`, `gloo_device`, `keep_memory`, another
    /// `debug`) are errors of `build` then. Its trackers are used as well, unless `log_with` or `logging_dir` says
    /// otherwise.
    pub fn sharing(mut self, other: &Accelerator) -> Self {
        self.sharing = Some(other.clone());
        self
    }

    /// Uses ranks that a program has joined without an Accelerator, with their device. Options that say
    /// otherwise are errors of `build`, as with [`AcceleratorBuilder::sharing`].
    pub fn processes(mut self, processes: &Processes) -> Self {
        self.processes = Some(processes.clone());
        self
    }

    /// Joins the other ranks.
    ///
    /// # Errors
    /// As [`Accelerator::new`]; [`crate::Error::InvalidArgument`] for zero accumulation steps, and for options that
    /// contradict each other or [`AcceleratorBuilder::sharing`].
    pub fn build(self) -> Result<Accelerator> {
        self.options.comm_hook.check()?;
        let settings = self.accumulation.map_or_else(GradientAccumulationOptions::from_env, Ok)?;
        let accumulator = GradientAccumulator::new(settings)?;
        match (&self.processes, &self.sharing) {
            (Some(_), Some(_)) => {
                return Err(Error::InvalidArgument(
                    "the options `processes` and `sharing` contradict each other".into(),
                ));
            }
            (Some(processes), None) => self.check_joined("processes", processes)?,
            (None, Some(other)) => self.check_joined("sharing", &other.processes)?,
            (None, None) => {}
        }
        let shared = self.sharing.as_ref().filter(|_| self.watch.is_default());
        let shared = shared.map(|other| Arc::clone(&other.watch));
        let joins = self.processes.is_none() && self.sharing.is_none();
        let processes = match (self.processes, self.sharing) {
            (Some(processes), _) => processes,
            (None, Some(other)) => Processes::of(other.processes.job),
            (None, None) => {
                if self.keep_memory.unwrap_or(true) {
                    keep_freed_memory();
                }
                let debug = self.debug.unwrap_or_else(debug_is_asked_for);
                Processes::of(Arc::new(connect::join(self.connection, debug)?))
            }
        };
        let job = &processes.job;
        let tf32 = self.numerics.math.apply(joins, job.device)?;
        let numerics = Arc::new(self.numerics.decide(job, tf32)?);
        let checks = self.loss_check.on && numerics.scaler.is_none();
        let check = || Arc::new(LossCheck::new(job, self.loss_check));
        let loss_check = checks.then(check);
        let watch = shared.unwrap_or_else(|| Arc::new(Watch::new(self.watch, &processes)));
        let checkpoints =
            Checkpoints::checked(&processes, self.project, &accumulator, loss_check.clone());
        if let Some(scaler) = &numerics.scaler {
            checkpoints.register(scaler);
        }
        Ok(Accelerator {
            processes,
            accumulator,
            options: Arc::new(self.options),
            numerics,
            loss_check,
            banner_printed: Arc::default(),
            even_batches: Arc::default(),
            watch,
            checkpoints,
        })
    }
}

impl AcceleratorBuilder {
    /// Refuses options that were decided when the job was joined.
    fn check_joined(&self, source: &str, other: &Processes) -> Result<()> {
        let ConnectOptions { cpu, world, store, device, backend, timeout, gloo } = &self.connection;
        let set = [
            ("cpu", *cpu && other.device() != Device::Cpu),
            ("world", world.is_some()),
            ("store", store.is_some()),
            ("device", device.is_some_and(|device| device != other.device())),
            ("backend", backend.is_some()),
            ("timeout", timeout.is_some_and(|timeout| timeout != other.job.timeout)),
            ("gloo_device", gloo.is_some()),
            ("keep_memory", self.keep_memory.is_some()),
            ("debug", self.debug.is_some_and(|debug| debug != other.job.debug)),
        ];
        match set.iter().find(|(_, contradicts)| *contradicts) {
            None => Ok(()),
            Some((option, _)) => Err(Error::InvalidArgument(format!(
                "the option `{option}` contradicts `{source}`: it was decided when the job was joined; set \
                 it there"
            ))),
        }
    }
}

/// The launcher's `--debug-collectives`.
pub(crate) fn debug_is_asked_for() -> bool {
    std::env::var("ACCELERATE_DEBUG_MODE").is_ok_and(|value| {
        ["1", "true", "yes", "on", "y", "t"].contains(&value.to_ascii_lowercase().as_str())
    })
}

impl Job {
    /// The group of all ranks; `None` when there is one.
    pub(crate) fn group(&self) -> Option<ProcessGroup> {
        self.groups.as_ref().map(Groups::world)
    }

    /// The ranks of this host, when there are several hosts.
    pub(crate) fn host_group(&self) -> Option<ProcessGroup> {
        self.groups.as_ref().and_then(Groups::host)
    }

    /// For messages beside the collectives; `None` when there is one rank.
    pub(crate) fn store(&self) -> Option<&Store> {
        self.groups.as_ref().map(|groups| &groups.store)
    }

    /// Makes a new group of all ranks: the old one is unusable.
    pub(crate) fn reconnect(&self, number: u64) -> Result<()> {
        match &self.groups {
            Some(groups) => groups.reconnect(&self.world, number),
            None => Ok(()),
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.world.rank.as_usize()
    }

    pub(crate) fn size(&self) -> usize {
        self.world.world_size.as_usize()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("world", &self.world).finish_non_exhaustive()
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
