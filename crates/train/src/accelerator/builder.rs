//! Settings of an Accelerator, and the joining of the other ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use brigade_rank_env::World;
use brigade_sharding::{ContextMethod, Mesh, Sharding};
use brigade_torch::{Backend, Error, GlooDevice, ReducerOptions, Result, Store, keep_freed_memory};
use brigade_track::Tracker;
use tch::Device;

use super::sharding::refuse_hook;
use super::{Accelerator, Options};
use crate::arrangement::{Arrangement, ArrangementOptions};
use crate::checkpoint::{Checkpoints, ProjectConfiguration, Together};
use crate::gradients::accumulate::{GradientAccumulationOptions, GradientAccumulator};
use crate::gradients::backward::Gradients;
use crate::gradients::hook::CommHook;
use crate::gradients::loss_check::{LossCheck, LossCheckOptions};
use crate::job::connect::{self, ConnectOptions, debug_is_asked_for};
use crate::loader::source::DataLoaderConfiguration;
use crate::model::ModelOptions;
use crate::pipeline::PipelineOptions;
use crate::precision::scaler::GradScalerOptions;
use crate::precision::{NumericsOptions, Precision};
use crate::processes::Processes;
use crate::sharding::ShardedModels;
use crate::watch::{Watch, WatchOptions};

/// Settings of an [`Accelerator`]. Every one has a default.
#[derive(Debug)]
#[must_use]
pub struct AcceleratorBuilder {
    connection: ConnectOptions,
    /// `None`: yes.
    keep_memory: Option<bool>,
    /// `None`: as the environment says.
    accumulation: Option<GradientAccumulationOptions>,
    numerics: NumericsOptions,
    loss_check: LossCheckOptions,
    sharing: Option<Accelerator>,
    processes: Option<Processes>,
    debug: Option<bool>,
    models: ModelOptions,
    loader: DataLoaderConfiguration,
    quiet: bool,
    watch: WatchOptions,
    project: ProjectConfiguration,
    /// `None`: as the environment says.
    sharding: Option<Option<Sharding>>,
    arrangement: ArrangementOptions,
}

impl AcceleratorBuilder {
    pub(super) fn new() -> Self {
        Self {
            connection: ConnectOptions::default(),
            keep_memory: None,
            accumulation: None,
            numerics: NumericsOptions::default(),
            loss_check: LossCheckOptions::default(),
            sharing: None,
            processes: None,
            debug: None,
            models: ModelOptions {
                reducer: ReducerOptions::default(),
                comm_hook: CommHook::None,
                sync_batch_norm: false,
            },
            loader: DataLoaderConfiguration::default(),
            quiet: false,
            watch: WatchOptions::default(),
            project: ProjectConfiguration::default(),
            sharding: None,
            arrangement: ArrangementOptions::default(),
        }
    }

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
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
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
    ///                 let mine = Tensor::from(accelerator.processes().process_index() as i64 + 1);
    ///                 Ok(accelerator.processes().reduce(&mine, ReduceOp::Sum)?.int64_value(&[]))
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
        self.quiet = quiet;
        self
    }

    /// Spreads the parameters, gradients and optimizer states of the models that are prepared over the ranks (ZeRO,
    /// PyTorch's FSDP). Unless set it is what the environment says (`BRIGADE_SHARDING`, which
    /// `brigade launch --sharding` sets), else every rank has whole models; `None` says so whatever the environment.
    ///
    /// The loop stays the same. An optimizer that was built with whole parameters steps this rank's shards from
    /// `prepare` on. Outside of the model's forward the parameters have no memory: read them within
    /// [`PreparedModel::gathered`](crate::PreparedModel::gathered). With [`AcceleratorBuilder::mixed_precision`] parameters
    /// are gathered in that type unless [`Sharding::mixed`] names one.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_optim::AdamW;
    /// use brigade_sharding::{ContextMethod, Mesh, Sharding};
    /// use brigade_train::Accelerator;
    /// use tch::{Kind, Tensor};
    ///
    /// let accelerator =
    ///     Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build()?;
    /// let model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// let optimizer = AdamW::default().build(&model)?;
    /// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let inputs = Tensor::ones([8, 4], (Kind::Float, accelerator.device()));
    /// let loss = model.forward(&inputs)?.f_mean(Kind::Float)?;
    /// accelerator.backward(&loss)?;
    /// accelerator.clip_grad_norm(&model, 1.0)?;
    /// optimizer.step()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn sharding(mut self, sharding: impl Into<Option<Sharding>>) -> Self {
        self.sharding = Some(sharding.into());
        self
    }

    /// Arranges the ranks in a mesh, whose axis `tp` divides layers (tensor parallelism): the ranks of a tensor group read the
    /// same samples and compute each divided layer together. Unless set, the environment says how many those are
    /// (`BRIGADE_TENSOR`, which `brigade launch --tensor` sets), and all others read other samples. Along `dp_shard` parameters
    /// are spread as [`AcceleratorBuilder::sharding`] says; along `dp_replicate` every rank has a copy. Models are built by
    /// [`Accelerator::parallel_model`].
    ///
    /// ```
    /// use brigade_models::{Gpt2LmHead, Gpt2Options};
    /// use brigade_sharding::Mesh;
    /// use brigade_train::Accelerator;
    ///
    /// // With 8 ranks `Mesh::builder().replicate(4).tensor(2).build(8)?`.
    /// let mesh = Mesh::builder().build(1)?;
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).mesh(mesh).build()?;
    /// let options = Gpt2Options { vocab_size: 50, n_embd: 16, n_layer: 1, n_head: 2, ..Default::default() };
    /// let model = accelerator.parallel_model(|path| Gpt2LmHead::new(path, &options))?;
    /// let model = accelerator.prepare(model)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mesh(mut self, mesh: Mesh) -> Self {
        self.arrangement.mesh = Some(mesh);
        self
    }

    /// Has so many neighbouring ranks divide each layer between them, whatever the number of ranks is that they divide: the
    /// mesh follows from it and from [`AcceleratorBuilder::sharding`].
    ///
    /// ```
    /// use brigade_train::Accelerator;
    ///
    /// let error = Accelerator::builder().cpu(true).tensor_parallel(2).build().unwrap_err();
    /// assert!(error.to_string().contains("tp 2"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.arrangement.tensor_ranks = Some(ranks);
        self
    }

    /// Has the ranks of a tensor group compute a part of the sequence each between divided layers (Megatron-LM's
    /// `sequence_parallelism`): the activations of normalisations, dropout and residuals are divided too, for as many bytes in
    /// messages. The number of tokens has to be a multiple of the ranks. Off unless set, or a plan
    /// [says so](brigade_sharding::TensorPlan::sequence_regions).
    ///
    /// ```
    /// use brigade_train::Accelerator;
    ///
    /// // With one rank nothing is divided.
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).sequence_regions(true).build()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn sequence_regions(mut self, on: bool) -> Self {
        self.arrangement.sequence_regions = Some(on);
        self
    }

    /// Has so many neighbouring ranks compute a part of every sequence (context parallelism): for sequences whose activations
    /// do not fit one device. They read the same samples, and each of them computes some of the tokens. The mesh follows from
    /// it, [`AcceleratorBuilder::tensor_parallel`] and [`AcceleratorBuilder::sharding`]. Unless set, the environment says how
    /// many those are (`BRIGADE_CONTEXT`, which `brigade launch --context` sets).
    ///
    /// ```
    /// use brigade_sharding::ContextMethod;
    /// use brigade_train::Accelerator;
    ///
    /// let builder = Accelerator::builder().cpu(true).context_parallel(4);
    /// let error = builder.context_method(ContextMethod::Ring).build().unwrap_err();
    /// assert!(error.to_string().contains("cp 4"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn context_parallel(mut self, ranks: usize) -> Self {
        self.arrangement.context_ranks = Some(ranks);
        self
    }

    /// Has so many ranks have the stages of each model (pipeline parallelism): for models that do not fit a device, over slow
    /// networks. They read the same samples, and the loop is that of [`Accelerator::forward_backward`]. The mesh follows from
    /// it and the other axes. Unless set, the environment says how many those are (`BRIGADE_PIPELINE`, which
    /// `brigade launch --pipeline` sets).
    ///
    /// ```
    /// use brigade_train::Accelerator;
    ///
    /// let error = Accelerator::builder().cpu(true).pipeline_parallel(4).build().unwrap_err();
    /// assert!(error.to_string().contains("pp 4"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn pipeline_parallel(mut self, ranks: usize) -> Self {
        self.arrangement.pipeline_ranks = Some(ranks);
        self
    }

    /// Has so many neighbouring ranks have the experts of each mixture between them (expert parallelism): for mixtures that do
    /// not fit a device. They read other samples, and send tokens to the ranks of their experts. The mesh follows from it.
    /// Models are built by [`Accelerator::parallel_model`]. Unless set, the environment says how many those are
    /// (`BRIGADE_EXPERT`, which `brigade launch --expert` sets).
    ///
    /// ```
    /// use brigade_train::Accelerator;
    ///
    /// let error = Accelerator::builder().cpu(true).expert_parallel(4).build().unwrap_err();
    /// assert!(error.to_string().contains("ep 4"));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn expert_parallel(mut self, ranks: usize) -> Self {
        self.arrangement.expert_ranks = Some(ranks);
        self
    }

    /// Sets how pipelines divide a batch and order its passes. Defaults to 1F1B with four micro-batches for each rank of a
    /// pipeline.
    pub fn pipeline_options(mut self, options: PipelineOptions) -> Self {
        self.arrangement.pipeline = Some(options);
        self
    }

    /// Sets how attention gets the keys and values of tokens that other ranks have. Defaults to
    /// [`ContextMethod::Gather`], or to what the environment says (`BRIGADE_CONTEXT_METHOD`).
    pub fn context_method(mut self, method: ContextMethod) -> Self {
        self.arrangement.context_method = Some(method);
        self
    }

    /// How gradients are reduced.
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        self.models.reducer = options;
        self
    }

    /// What goes over the wire when gradients are averaged: all of it, unless set.
    pub fn comm_hook(mut self, hook: CommHook) -> Self {
        self.models.comm_hook = hook;
        self
    }

    /// Batch normalisations of the models that are prepared use the statistics of all ranks; see
    /// [`brigade_nn::Model::convert_sync_batch_norm`]. Off unless set.
    pub fn sync_batch_norm(mut self, on: bool) -> Self {
        self.models.sync_batch_norm = on;
        self
    }

    /// A loader's batch size is that of all ranks together: each takes its part of every batch.
    pub fn split_batches(mut self, split: bool) -> Self {
        self.loader.split_batches = split;
        self
    }

    /// All ranks get the same number of equally large batches, completed with duplicates that metrics
    /// leave out. On unless set.
    pub fn even_batches(mut self, even: bool) -> Self {
        self.loader.even_batches = even;
        self
    }

    /// Rank 0 reads the data and sends every rank its part. Off unless set.
    pub fn dispatch_batches(mut self, dispatch: bool) -> Self {
        self.loader.dispatch_batches = dispatch;
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

    /// The type in which prepared models compute. Unless set it is what the environment says
    /// (`ACCELERATE_MIXED_PRECISION`, which `brigade launch --mixed-precision` sets), else `no`.
    pub fn mixed_precision(mut self, precision: Precision) -> Self {
        self.numerics.precision = Some(precision);
        self
    }

    /// Whether a forward casts a weight once only, however many operations use it. On unless set.
    pub fn autocast_cache(mut self, cache: bool) -> Self {
        self.numerics.cache = cache;
        self
    }

    /// Whether a prepared model's outputs of 16 bits are converted to 32, so that losses are computed
    /// in 32. On unless set.
    pub fn float32_outputs(mut self, convert: bool) -> Self {
        self.numerics.float32_outputs = convert;
        self
    }

    /// How the loss is scaled with fp16.
    pub fn grad_scaler(mut self, options: GradScalerOptions) -> Self {
        self.numerics.scaler = options;
        self
    }

    /// Whether convolutional models, and the images they get, have their channels last in memory.
    /// Unless set, where that is faster: on a CPU with oneDNN, on a GPU with 16 bits. Results are equal
    /// to rounding.
    pub fn channels_last(mut self, on: bool) -> Self {
        self.numerics.channels_last = Some(on);
        self
    }
}

/// Settings of the whole process, which libtorch and cuBLAS have once: the last Accelerator's count. One that shares
/// another's place changes those that it names.
impl AcceleratorBuilder {
    /// Whether GPUs round the operands of float32 products and convolutions to TF32, whose 10 bits are those of
    /// fp16 and whose range is that of float32: several times faster from Ampere on. On unless set; PyTorch has
    /// it on for convolutions and off for products. Other types are not changed.
    pub fn tf32(mut self, on: bool) -> Self {
        self.numerics.math.tf32 = Some(on);
        self
    }

    /// Whether cuDNN tries its kernels at the first convolution of each shape and keeps the fastest
    /// (`torch.backends.cudnn.benchmark`): for inputs whose shapes repeat. Runs may differ in last digits then.
    /// Off unless set.
    pub fn benchmark_kernels(mut self, on: bool) -> Self {
        self.numerics.math.benchmark = Some(on);
        self
    }

    /// Whether only kernels are used that give the same bits in every run
    /// (`torch.use_deterministic_algorithms`). An operation without such a kernel is an error that names it. On a
    /// GPU a resumed run has the bits of one that was not stopped only with this. Off unless set.
    ///
    /// ```
    /// use brigade_train::Accelerator;
    /// let accelerator = Accelerator::builder().cpu(true).deterministic(true).tf32(false).build()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn deterministic(mut self, on: bool) -> Self {
        self.numerics.math.deterministic = Some(on);
        self
    }

    /// Whether a non-finite loss (infinite or NaN) is an error ([`crate::TrainError::LossNotFinite`]), the same on
    /// every rank, instead of weights that are NaN afterwards. On by default; with fp16 the loss scaler skips
    /// such a step instead.
    ///
    /// [`crate::Accelerator::backward`] returns it, before a weight changes: with one process before the gradients
    /// are computed, with several when they are reduced, which with accumulation is the last backward of the
    /// window. On a GPU, which is not synchronised, the next step returns it.
    ///
    /// It costs no message: the rank puts NaN into a gradient, which the reduction carries to the others. A
    /// rank of another program, such as PyTorch's DistributedDataParallel, can take part.
    ///
    /// A program can leave such a batch out: all ranks get the error in the same backward, so it calls
    /// [`crate::PreparedOptimizer::zero_grad`] and goes on. With accumulation the window's other batches are
    /// left out, too, where there are several processes.
    ///
    /// ```
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_optim::Sgd;
    /// # use brigade_train::Accelerator;
    /// # use tch::Tensor;
    /// use brigade_train::TrainError;
    ///
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = Model::new(|p| Linear::new(p, 4, 2))?;
    /// # let optimizer = Sgd::new(0.1).build(&model)?;
    /// # let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// # let labels = Tensor::from_slice(&[0_i64, 1]);
    /// let inputs = Tensor::full([2, 4], f64::INFINITY, (tch::Kind::Float, tch::Device::Cpu));
    /// let loss = model.forward(&inputs)?.cross_entropy_for_logits(&labels);
    /// match accelerator.backward(&loss).and_then(|()| optimizer.step()) {
    ///     Ok(()) => {}
    ///     Err(error) => match error.downcast_ref() {
    ///         Some(TrainError::LossNotFinite { weights_corrupted: false, .. }) => {
    ///             accelerator.println(format!("batch left out: {error}"));
    ///         }
    ///         _ => return Err(error),
    ///     },
    /// }
    /// optimizer.zero_grad()?;
    /// assert!(accelerator.optimizer_step_was_skipped());
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// Under LocalSGD, and where no prepared model takes part, the error is that of the rank alone.
    pub fn check_loss(mut self, on: bool) -> Self {
        self.loss_check.on = on;
        self
    }

    /// Reads the result at the next step on a CPU too, as on a GPU: for tests.
    #[doc(hidden)]
    pub fn check_loss_later(mut self, later: bool) -> Self {
        self.loss_check.later = later;
        self
    }

    /// Adds a tracker; several may be added. Without any it is
    /// [`JsonLines`](brigade_track::JsonLines) in the [logging folder](Self::logging_dir).
    pub fn log_with(mut self, tracker: impl Tracker) -> Self {
        self.watch.trackers.push(Box::new(tracker));
        self
    }

    /// Where the default tracker writes: `runs` unless set.
    pub fn logging_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.watch.logging_dir = Some(folder.into());
        self
    }

    /// Joins the other ranks.
    ///
    /// # Errors
    /// As [`Accelerator::new`]; [`brigade_torch::ErrorKind::InvalidArgument`] for zero accumulation steps, and for
    /// options that contradict each other or [`AcceleratorBuilder::sharing`].
    pub fn build(self) -> Result<Accelerator> {
        self.models.comm_hook.check()?;
        let settings = self.accumulation.map_or_else(GradientAccumulationOptions::from_env, Ok)?;
        let accumulator = GradientAccumulator::new(settings)?;
        match (&self.processes, &self.sharing) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid_argument(
                    "the options `processes` and `sharing` contradict each other",
                ));
            }
            (Some(processes), None) => self.check_joined("processes", processes)?,
            (None, Some(other)) => self.check_joined("sharing", &other.processes)?,
            (None, None) => {}
        }
        let shared = self.sharing.as_ref().filter(|_| self.watch.is_default());
        let shared = shared.map(|other| Arc::clone(&other.watch));
        let joins = self.processes.is_none() && self.sharing.is_none();
        let arranged = self.sharing.as_ref().map(Accelerator::arrangement);
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
        let mut numerics = self.numerics;
        let mut sharding = self.sharding.map_or_else(Sharding::from_env, Ok)?;
        let arrangement = match (arranged, self.arrangement.first_set()) {
            (Some(arranged), None) => arranged,
            (Some(_), Some(option)) => {
                return Err(Error::invalid_argument(format!(
                    "the option `{option}` contradicts `sharing`: the other Accelerator has arranged the ranks; set it there"
                )));
            }
            (None, _) => self.arrangement.arrange(&mut sharding, &processes)?,
        };
        let Arrangement { averaged, data, tensor, context, pipeline } = arrangement;
        let job = &averaged.job;
        let sharded = match sharding {
            Some(sharding) => {
                let sharding = numerics.with_sharding(sharding)?;
                let experts = tensor.as_ref().map_or(1, |tensor| tensor.expert_ranks());
                Some(Arc::new(ShardedModels::new(sharding, job.size(), experts)?))
            }
            None => None,
        };
        if let Some(sharded) = &sharded {
            refuse_hook(sharded, &self.models.comm_hook)?;
        }
        let experts = tensor.as_ref().filter(|it| it.divides_experts());
        if let Some(experts) = experts.filter(|_| !self.models.comm_hook.is_none()) {
            return Err(experts.refuse("a communication hook", "leave it out"));
        }
        let tf32 = numerics.math.apply(joins, job.device)?;
        // Ranks that divide layers overflow apart from each other.
        let (numerics, scaler) = numerics.decide(&processes.job, tf32)?;
        let checks_step_losses = pipeline.is_some() && scaler.is_none() && self.loss_check.on;
        let checks = self.loss_check.on && scaler.is_none() && pipeline.is_none();
        let loss_check =
            checks.then(|| Arc::new(LossCheck::new(job, self.loss_check, sharded.clone())));
        let watch = shared.unwrap_or_else(|| Arc::new(Watch::new(self.watch, &processes)));
        let together = Together {
            loss_check: loss_check.clone(),
            sharded: sharded.clone(),
            tensor: tensor.clone(),
            pipeline: pipeline.clone(),
            data_ranks: Some(data.num_processes()),
        };
        let checkpoints =
            Checkpoints::checked(&processes, self.project, &accumulator, together, self.quiet);
        if let Some(scaler) = &scaler {
            checkpoints.register(scaler);
        }
        let options =
            Options { models: Arc::new(self.models), loader: self.loader, quiet: self.quiet };
        Ok(Accelerator {
            data,
            gradients: Gradients {
                processes: averaged,
                accumulator,
                scaler,
                loss_check,
                sharded,
                tensor,
                context,
                pipeline,
            },
            checks_step_losses,
            processes,
            options: Arc::new(options),
            numerics: Arc::new(numerics),
            banner_printed: Arc::default(),
            plan_printed: Arc::default(),
            even_batches: Arc::default(),
            watch,
            checkpoints,
        })
    }

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
            Some((option, _)) => Err(Error::invalid_argument(format!(
                "the option `{option}` contradicts `{source}`: it was decided when the job was joined; set \
                 it there"
            ))),
        }
    }
}
