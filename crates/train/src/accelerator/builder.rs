//! Settings of an Accelerator, and the joining of the other ranks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use brigade_rank_env::World;
use brigade_sharding::{ContextMethod, Mesh, Sharding};
use brigade_torch::{
    Backend, Error, GlooDevice, ReducerOptions, Result, Store, check_fused, keep_freed_memory,
};
use brigade_track::Tracker;
use tch::Device;

use super::sharding::{refuse_device, refuse_hook};
use super::{Accelerator, Options};
use crate::arrangement::{Arrangement, ArrangementOptions};
use crate::checkpoint::{Checkpoints, ProjectConfiguration, Together};
use crate::gradients::accumulate::{GradientAccumulationOptions, GradientAccumulator};
use crate::gradients::backward::Gradients;
use crate::gradients::hook::CommHook;
use crate::gradients::loss_check::{LossCheck, LossCheckOptions};
use crate::job::connect::{self, ConnectOptions, debug_is_requested};
use crate::loader::source::DataLoaderConfiguration;
use crate::model::ModelOptions;
use crate::pipeline::PipelineOptions;
use crate::precision::scaler::GradScalerOptions;
use crate::precision::{NumericsOptions, Precision};
use crate::processes::Processes;
use crate::sharding::ShardedModels;
use crate::watch::{Watch, WatchOptions};

/// Settings of an [`Accelerator`], each of which has a default.
#[derive(Debug)]
#[must_use]
pub struct AcceleratorBuilder {
    connection: ConnectOptions,
    /// `true` if freed CPU memory is kept. `None` means `true`.
    keep_memory: Option<bool>,
    /// Options of gradient accumulation. `None` reads the environment.
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
    /// Sharding of models. `None` reads the environment.
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

    /// Sets whether the CPU is used even if there is a GPU. Defaults to `false`, unless the environment variable
    /// `ACCELERATE_USE_CPU` is true, which `brigade launch --cpu` sets.
    pub fn cpu(mut self, cpu: bool) -> Self {
        self.connection.cpu = cpu;
        self
    }

    /// Sets whether the process keeps the CPU memory that tensors free, for the tensors of the next step
    /// ([`brigade_torch::keep_freed_memory`]). Defaults to `true`, unless `BRIGADE_KEEP_MEMORY=0` turns it off.
    ///
    /// It is a setting of the whole process: libtorch's allocator of the CPU is replaced by one that keeps
    /// tensors of 1 MB and more in huge pages, and the C library keeps freed memory.
    /// A program that does more than train, or has an allocator of its own, should consider turning it off; a
    /// step of a small network then takes up to a third longer.
    pub fn keep_memory(mut self, keep: bool) -> Self {
        self.keep_memory = Some(keep);
        self
    }

    /// Sets the time limit of joining and of every collective. Defaults to 30 minutes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.connection.timeout = Some(timeout);
        self
    }

    /// Sets the network interface or address that Gloo listens on. Defaults to the loopback address if all ranks are on
    /// one host and `GLOO_SOCKET_IFNAME` is not set, else to [`GlooDevice::Default`].
    pub fn gloo_device(mut self, device: GlooDevice) -> Self {
        self.connection.gloo = Some(device);
        self
    }

    /// Sets rank, world size and hosts of the job. Defaults to the values of the environment.
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
    /// Threads share libtorch's random generator: random values (dropout, initial weights) differ from run to run.
    pub fn world(mut self, world: World) -> Self {
        self.connection.world = Some(world);
        self
    }

    /// Sets the store where the ranks rendezvous. Defaults to the store whose address the world has. All ranks need
    /// handles of one store, such as clones of [`Store::hash`] between threads.
    pub fn store(mut self, store: Store) -> Self {
        self.connection.store = Some(store);
        self
    }

    /// Sets the device of this rank. Defaults to the GPU whose index is the local rank modulo the number of GPUs, or to
    /// the CPU if there is no GPU.
    pub fn device(mut self, device: Device) -> Self {
        self.connection.device = Some(device);
        self
    }

    /// Sets the backend of the collectives. Defaults to NCCL for GPUs and Gloo for CPUs. With [`Backend::Fake`] a
    /// process simulates one rank of a world of any size, and every collective returns as if all ranks had sent the
    /// same.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.connection.backend = Some(backend);
        self
    }

    /// Sets the number of batches whose gradients are added up before each optimizer step; see
    /// [`Accelerator::accumulate`]. Defaults to the value of `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`, else 1.
    pub fn gradient_accumulation_steps(self, steps: usize) -> Self {
        let before = self.accumulation.unwrap_or_default();
        self.gradient_accumulation(GradientAccumulationOptions { steps, ..before })
    }

    /// Sets all options of gradient accumulation. [`AcceleratorBuilder::gradient_accumulation_steps`] sets only the
    /// number of batches.
    pub fn gradient_accumulation(mut self, settings: GradientAccumulationOptions) -> Self {
        self.accumulation = Some(settings);
        self
    }

    /// Sets whether to omit the summary line (processes, device, precision, memory format) that the main process writes
    /// to standard error when the first model is prepared. Defaults to `false`.
    pub fn quiet(mut self, quiet: bool) -> Self {
        self.quiet = quiet;
        self
    }

    /// Shards the parameters, gradients and optimizer states of prepared models over the ranks (ZeRO, PyTorch's FSDP).
    /// Defaults to the value of `BRIGADE_SHARDING`, which `brigade launch --sharding` sets, else every rank has whole
    /// models; `None` turns sharding off whatever the environment.
    ///
    /// The loop stays the same. An optimizer that was built with whole parameters steps this rank's shards from
    /// `prepare` on. Outside of the model's forward the parameters have no memory: read them within
    /// [`PreparedModel::gathered`](crate::PreparedModel::gathered). With [`AcceleratorBuilder::mixed_precision`]
    /// parameters are gathered in that type unless [`Sharding::mixed`] sets another one.
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

    /// Arranges the ranks in a mesh, whose axis `tp` divides layers (tensor parallelism): the ranks of a tensor group
    /// read the same samples and compute each divided layer together. Defaults to tensor groups of `BRIGADE_TENSOR`
    /// ranks, which `brigade launch --tensor` sets. Along `dp_shard` parameters are sharded as set by
    /// [`AcceleratorBuilder::sharding`]; along `dp_replicate` every rank has a copy. Models are built by
    /// [`Parallelism::model`](crate::Parallelism::model).
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
    /// let model = accelerator.parallel().model(|path| Gpt2LmHead::new(path, &options))?;
    /// let model = accelerator.prepare(model)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn mesh(mut self, mesh: Mesh) -> Self {
        self.arrangement.mesh = Some(mesh);
        self
    }

    /// Sets the size of tensor groups: this many neighbouring ranks divide each layer between them. The mesh is derived
    /// from this size, the world size and [`AcceleratorBuilder::sharding`]. Defaults to the value of `BRIGADE_TENSOR`,
    /// which `brigade launch --tensor` sets.
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

    /// Sets whether each rank of a tensor group computes a part of the sequence between divided layers (Megatron-LM's
    /// `sequence_parallelism`): the activations of normalisations, dropout and residual branches are divided too, and
    /// the ranks send the same number of bytes. The number of tokens must be a multiple of the number of ranks.
    /// Defaults to `false`, unless the [plan](brigade_sharding::TensorPlan::sequence_regions) turns it on.
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

    /// Sets the size of context groups: this many neighbouring ranks compute a part of every sequence each (context
    /// parallelism), for sequences whose activations do not fit one device. They read the same samples, and each of
    /// them computes some of the tokens. The mesh is derived from this size, [`AcceleratorBuilder::tensor_parallel`]
    /// and [`AcceleratorBuilder::sharding`]. Defaults to the value of `BRIGADE_CONTEXT`, which
    /// `brigade launch --context` sets.
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

    /// Sets the number of ranks that hold the stages of each model (pipeline parallelism): for models that do not fit a
    /// device, over slow networks. They read the same samples, and the loop calls [`Accelerator::forward_backward`].
    /// The mesh is derived from this number and the other axes. Defaults to the value of `BRIGADE_PIPELINE`, which
    /// `brigade launch --pipeline` sets.
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

    /// Sets the size of expert groups: this many neighbouring ranks divide the experts of each mixture between them
    /// (expert parallelism), for mixtures that do not fit a device. They read different samples, and send tokens to the
    /// ranks of their experts. With tensor ranks, which read the same samples, it is a multiple of their number. The
    /// mesh is derived from this size. Models are built by [`Parallelism::model`](crate::Parallelism::model). Defaults to
    /// the value of `BRIGADE_EXPERT`, which `brigade launch --expert` sets.
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

    /// Sets how pipelines divide a batch and order its passes. Defaults to the values of `BRIGADE_MICRO_BATCHES`,
    /// `BRIGADE_PIPELINE_SCHEDULE` and `BRIGADE_PIPELINE_CHUNKS`, which `brigade launch` sets by `--micro-batches`,
    /// `--pipeline-schedule` and `--pipeline-chunks`, else to 1F1B with four micro-batches for each rank of a pipeline.
    /// With these options, none of the variables is read.
    pub fn pipeline_options(mut self, options: PipelineOptions) -> Self {
        self.arrangement.pipeline = Some(options);
        self
    }

    /// Sets how attention gets the keys and values of tokens that other ranks have. Defaults to the value of
    /// `BRIGADE_CONTEXT_METHOD`, else [`ContextMethod::Gather`].
    pub fn context_method(mut self, method: ContextMethod) -> Self {
        self.arrangement.context_method = Some(method);
        self
    }

    /// Sets the options of the gradient reducer, such as the size of its buckets. Defaults to
    /// [`ReducerOptions::default`].
    pub fn reducer(mut self, options: ReducerOptions) -> Self {
        self.models.reducer = options;
        self
    }

    /// Sets the communication hook that compresses gradients when they are averaged. Defaults to no compression.
    pub fn comm_hook(mut self, hook: CommHook) -> Self {
        self.models.comm_hook = hook;
        self
    }

    /// Sets whether batch normalisations of prepared models use the statistics of all ranks; see
    /// [`brigade_nn::Model::convert_sync_batch_norm`]. Defaults to `false`.
    pub fn sync_batch_norm(mut self, on: bool) -> Self {
        self.models.sync_batch_norm = on;
        self
    }

    /// Sets whether a loader's batch size is that of all ranks together, so that each rank takes its part of every
    /// batch. Defaults to `false`.
    pub fn split_batches(mut self, split: bool) -> Self {
        self.loader.split_batches = split;
        self
    }

    /// Sets whether all ranks get the same number of equally large batches, completed with duplicates that metrics
    /// leave out. Defaults to `true`.
    pub fn even_batches(mut self, even: bool) -> Self {
        self.loader.even_batches = even;
        self
    }

    /// Sets whether rank 0 reads the data and sends every rank its part. Defaults to `false`.
    pub fn dispatch_batches(mut self, dispatch: bool) -> Self {
        self.loader.dispatch_batches = dispatch;
        self
    }

    /// Sets whether operation, shape, type and place in the program are compared between ranks before each collective,
    /// and before each forward and backward that sends anything. If a rank makes a different call, or none within the
    /// time limit, every other rank returns an error that names it ([`brigade_torch::Desync`]). The comparison is slow.
    /// Defaults to `false`, or to the value of `ACCELERATE_DEBUG_MODE`, which `brigade launch --debug-collectives`
    /// sets. With `sharing` it is the other Accelerator's setting.
    pub fn debug(mut self, on: bool) -> Self {
        self.debug = Some(on);
        self
    }

    /// Sets the folder of numbered checkpoints, and how checkpoints are written.
    pub fn project(mut self, project: ProjectConfiguration) -> Self {
        self.project = project;
        self
    }

    /// Uses another Accelerator's ranks, connections and device: a process joins its job once. `build` returns an error
    /// if an option contradicts them (`cpu`, `device`, `backend`, `world`, `store`, `timeout`, `gloo_device`,
    /// `keep_memory`, another `debug`). Its trackers are used as well, unless `log_with` or `logging_dir` sets others.
    pub fn sharing(mut self, other: &Accelerator) -> Self {
        self.sharing = Some(other.clone());
        self
    }

    /// Uses the ranks and the device of a program that has joined its job without an Accelerator. `build` returns an
    /// error if an option contradicts them, as with [`AcceleratorBuilder::sharing`].
    pub fn processes(mut self, processes: &Processes) -> Self {
        self.processes = Some(processes.clone());
        self
    }

    /// Sets the floating-point type in which prepared models compute. Defaults to the value of
    /// `ACCELERATE_MIXED_PRECISION`, which `brigade launch --mixed-precision` sets, else `no`.
    pub fn mixed_precision(mut self, precision: Precision) -> Self {
        self.numerics.precision = Some(precision);
        self
    }

    /// Sets whether a forward casts a weight only once, however many operations use it. Defaults to `true`.
    pub fn autocast_cache(mut self, cache: bool) -> Self {
        self.numerics.cache = cache;
        self
    }

    /// Sets whether a prepared model's outputs of 16 bits are converted to float32, so that losses are computed in
    /// float32. Defaults to `true`.
    pub fn float32_outputs(mut self, convert: bool) -> Self {
        self.numerics.float32_outputs = convert;
        self
    }

    /// Sets the options of the loss scaler for fp16. Defaults to [`GradScalerOptions::default`], which are PyTorch's.
    pub fn grad_scaler(mut self, options: GradScalerOptions) -> Self {
        self.numerics.scaler = options;
        self
    }

    /// Sets whether convolutional models and their input images have their channels last in memory. Defaults to the
    /// faster format: channels last on a CPU with oneDNN, and on a GPU with 16 bits. Results are equal up to rounding.
    pub fn channels_last(mut self, on: bool) -> Self {
        self.numerics.channels_last = Some(on);
        self
    }
}

/// Settings of the whole process, which libtorch and cuBLAS have only once: those of the last Accelerator are in
/// effect. An Accelerator that shares the ranks of another one changes only the settings that it names.
impl AcceleratorBuilder {
    /// Sets whether GPUs round the operands of float32 matrix products and convolutions to TF32, which has the 10
    /// mantissa bits of fp16 and the range of float32: several times faster from Ampere on. Defaults to `true`; PyTorch
    /// turns it on for convolutions and off for matrix products. Other types are not changed.
    pub fn tf32(mut self, on: bool) -> Self {
        self.numerics.math.tf32 = Some(on);
        self
    }

    /// Sets whether cuDNN benchmarks its kernels at the first convolution of each shape and keeps the fastest
    /// (`torch.backends.cudnn.benchmark`): for inputs whose shapes repeat. Runs may then differ in the last digits.
    /// Defaults to `false`.
    pub fn benchmark_kernels(mut self, on: bool) -> Self {
        self.numerics.math.benchmark = Some(on);
        self
    }

    /// Sets whether only kernels are used that give the same bits in every run (`torch.use_deterministic_algorithms`).
    /// An operation without such a kernel is an error that names it. On a GPU, a resumed run has the bits of an
    /// uninterrupted one only with this setting. Defaults to `false`.
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

    /// Sets whether a non-finite loss (infinite or NaN) is an error ([`crate::TrainError::LossNotFinite`]), the same on
    /// every rank, instead of weights that are NaN afterwards. Defaults to `true`. With fp16 the loss scaler skips such
    /// a step instead.
    ///
    /// [`crate::Accelerator::backward`] returns it, before a weight changes: with one process before the gradients
    /// are computed, with several when they are reduced, which with accumulation is the last backward of the
    /// window. On a GPU, which is not synchronised, the next step returns it.
    ///
    /// It costs no message: the rank puts NaN into a gradient, which the reduction carries to the others. A
    /// rank of another program, such as PyTorch's DistributedDataParallel, can take part.
    ///
    /// A program can leave such a batch out: all ranks get the error in the same backward, so it calls
    /// [`crate::PreparedOptimizer::zero_grad`] and continues. With accumulation the window's other batches are
    /// left out, too, if there are several processes.
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
    /// Under LocalSGD, and if no prepared model takes part, only the rank with the loss returns the error.
    pub fn check_loss(mut self, on: bool) -> Self {
        self.loss_check.on = on;
        self
    }

    /// Sets whether the result of the loss check is read at the next step on a CPU too, as on a GPU: for tests.
    #[doc(hidden)]
    pub fn check_loss_later(mut self, later: bool) -> Self {
        self.loss_check.later = later;
        self
    }

    /// Adds a tracker; several may be added. Without any it is [`JsonLines`](brigade_track::JsonLines) in the [logging
    /// folder](Self::logging_dir).
    pub fn log_with(mut self, tracker: impl Tracker) -> Self {
        self.watch.trackers.push(Box::new(tracker));
        self
    }

    /// Sets the folder in which the default tracker writes. Defaults to `runs`.
    pub fn logging_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.watch.logging_dir = Some(folder.into());
        self
    }

    /// Builds the Accelerator: joins the other ranks.
    ///
    /// # Errors
    /// Returns the same errors as [`Accelerator::new`], and [`brigade_torch::ErrorKind::InvalidArgument`] for zero
    /// accumulation steps, and for options that contradict each other or [`AcceleratorBuilder::sharing`].
    pub fn build(self) -> Result<Accelerator> {
        self.models.comm_hook.check()?;
        check_fused()?;
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
                let debug = self.debug.unwrap_or_else(debug_is_requested);
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
                refuse_device(&sharding, job.device)?;
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
        // Ranks that divide layers detect overflows independently of each other.
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
