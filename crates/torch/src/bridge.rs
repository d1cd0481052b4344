//! All functions and types that are shared with C++, for cxx.
//!
//! Rules:
//! 1. A tensor that C++ only reads or fills is passed as a reference ([`borrow`]), in lists as [`ffi::TensorRef`],
//!    which borrows it. C++ copies the handle if it keeps the tensor.
//! 2. A new tensor is passed as a `UniquePtr`, which [`own`] converts to tch's type; null stands for none.
//! 3. Time limits are passed in milliseconds; [`NO_LIMIT_OF_ITS_OWN`] stands for the group's.
//! 4. Every function that can throw returns `Result`; `cpp/errors.h` marks the kind.

use std::borrow::Borrow;

use cxx::{CxxVector, UniquePtr};
use parking_lot::Mutex;
use tch::Tensor;

use crate::bucket::Bucket;
use crate::error::Error;
use crate::kernel_choices;
use crate::kernel_code::{allows_epilogues, compiled_code, kernel_files, kernel_obstacle};

/// Time limit of an operation that uses its group's limit: c10d's `kUnsetTimeout`.
pub(crate) const NO_LIMIT_OF_ITS_OWN: i64 = -1;

/// Memory that a tensor borrows for its whole life: a boxed vector.
pub(crate) struct Blob {
    pub(crate) address: usize,
    /// Dropped with the box, when libtorch frees the tensor's storage.
    pub(crate) _memory: Box<dyn std::any::Any + Send>,
}

fn kernel_code(
    file: &str,
    element: i32,
    capability: i32,
    nvrtc: &str,
) -> Result<ffi::KernelCode, Error> {
    let (code, remark) = compiled_code(file, element, capability, nvrtc)?;
    Ok(ffi::KernelCode { code, remark })
}

fn kept_choices(identity: &str) -> ffi::KeptChoices {
    let (kept, remark) = kernel_choices::kept(identity);
    let row = |(key, candidates, chosen)| ffi::KeptChoice { key, candidates, chosen };
    ffi::KeptChoices { choices: kept.into_iter().map(row).collect(), remark }
}

fn keep_choices(identity: &str, choices: Vec<ffi::KeptChoice>) -> String {
    let row = |ffi::KeptChoice { key, candidates, chosen }| (key, candidates, chosen);
    kernel_choices::keep(identity, choices.into_iter().map(row))
}

fn blob_address(blob: &Blob) -> usize {
    blob.address
}

/// Communication hook: a replacement of the reduction of buckets, called from the thread that runs `backward`.
pub(crate) struct Hook {
    pub(crate) run: Box<dyn Fn(Bucket) -> Result<(), Error> + Send + Sync>,
}

fn run_hook(
    hook: &Hook,
    index: usize,
    is_last: bool,
    buffer: &ffi::Tensor,
    gradients: &CxxVector<ffi::Tensor>,
    parameters: Vec<usize>,
) -> Result<(), Error> {
    let buffer = own(ffi::copy_handle(buffer));
    let gradients = gradients.iter().map(|gradient| own(ffi::copy_handle(gradient))).collect();
    let bucket = Bucket { index, is_last, buffer, gradients, parameters };
    // A panic must not unwind into C++.
    let run = std::panic::AssertUnwindSafe(|| (hook.run)(bucket));
    std::panic::catch_unwind(run)
        .unwrap_or_else(|_| Err(Error::invalid_argument("a communication hook panicked")))
}

/// Function that computes a part of a forward from its inputs.
pub(crate) type Part = Box<dyn Fn(&[Tensor]) -> Result<(), String> + Send>;

/// Part of a forward that is computed again; called from a thread that runs `backward`.
pub(crate) struct Recompute {
    pub(crate) run: Mutex<Part>,
}

fn run_recompute(recompute: &Recompute, inputs: &CxxVector<ffi::Tensor>) -> Result<(), Error> {
    let inputs: Vec<Tensor> = inputs.iter().map(|input| own(ffi::copy_handle(input))).collect();
    let run = recompute.run.lock();
    // A panic must not unwind into C++.
    let run = std::panic::AssertUnwindSafe(|| run(&inputs));
    let done = std::panic::catch_unwind(run).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(text.unwrap_or("it panicked").to_owned())
    });
    done.map_err(|reason| {
        Error::invalid_argument(format!(
            "a recomputed part of the forward failed when it ran again in backward: {reason}"
        ))
    })
}

/// Takes ownership of a handle that C++ has created for Rust, which must not be null.
pub(crate) fn own(tensor: UniquePtr<ffi::Tensor>) -> Tensor {
    // SAFETY: a handle on the heap of the type that tch allocates and frees (`at::Tensor`), which the
    // UniquePtr has owned alone and now gives up. tch takes a null pointer for no tensor at all, and no
    // function that is used with `own` returns one.
    unsafe { Tensor::from_ptr(tensor.into_raw().cast()) }
}

/// Borrows a tensor for C++.
pub(crate) fn borrow(tensor: &Tensor) -> &ffi::Tensor {
    // SAFETY: a live tch tensor points to an `at::Tensor` on the heap, which is `ffi::Tensor`, and keeps it
    // for as long as it is borrowed. The type is opaque: Rust sees no bytes of it.
    unsafe { &*tensor.as_ptr().cast::<ffi::Tensor>() }
}

/// Borrows a list of tensors for C++.
pub(crate) fn borrow_all<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<ffi::TensorRef<'_>> {
    tensors.iter().map(|tensor| ffi::TensorRef { tensor: borrow(tensor.borrow()) }).collect()
}

/// Borrows an optional tensor for C++: as a list of one, or an empty one.
pub(crate) fn borrow_optional(tensor: Option<&Tensor>) -> Vec<ffi::TensorRef<'_>> {
    tensor.map(|tensor| ffi::TensorRef { tensor: borrow(tensor) }).into_iter().collect()
}

#[cxx::bridge(namespace = "brigade")]
// For the generated code.
#[allow(unreachable_pub, unused_qualifications, missing_debug_implementations)]
#[allow(clippy::too_many_arguments)]
pub(crate) mod ffi {
    /// Borrowed handle of a tensor.
    #[derive(Clone, Copy)]
    struct TensorRef<'a> {
        tensor: &'a Tensor,
    }

    /// Reductions of c10d, with its numbers.
    #[repr(u8)]
    enum Reduction {
        Sum = 0,
        Mean = 1,
        Product = 2,
        Min = 3,
        Max = 4,
        BitAnd = 5,
        BitOr = 6,
        BitXor = 7,
    }

    /// Operation at the edge of a region whose layers several ranks compute together.
    #[repr(u8)]
    enum RegionEdge {
        Copy = 0,
        Reduce = 1,
        Scatter = 2,
        Gather = 3,
        GatherSequence = 4,
        ReduceScatterSequence = 5,
        AllToAll = 6,
    }

    /// Reproducibility of matrix products on the CPU: whether their bits are independent of where their operands are in
    /// memory.
    #[derive(Debug)]
    #[repr(u8)]
    enum Products {
        /// Products are bitwise reproducible.
        Reproducible = 0,
        /// Products may not be reproducible: `MKL_CBWR` in the environment, or the program, has chosen another mode.
        TurnedOff = 1,
        /// Products may not be reproducible: MKL was used before the mode could be set.
        UsedBefore = 2,
        /// Products may not be reproducible: MKL has no such mode for this processor, or libtorch uses another library.
        Unsupported = 3,
    }

    /// Type of a TorchScript value.
    #[derive(Debug)]
    #[repr(u8)]
    enum ScriptKind {
        None,
        Tensor,
        Bool,
        Int,
        Float,
        Text,
        Tuple,
        List,
        Dict,
    }

    /// A node of a TorchScript value, in preorder.
    #[derive(Clone)]
    struct ScriptNode {
        kind: ScriptKind,
        /// Number of elements of a container (of pairs for a dictionary), or index of a tensor.
        count: usize,
        integer: i64,
        number: f64,
        text: String,
    }

    struct TcpStoreOptions<'a> {
        host: &'a str,
        port: u16,
        is_server: bool,
        /// Number of clients, or 0 if it is unknown.
        num_workers: i64,
        wait_workers: bool,
        timeout_ms: i64,
        /// Bound socket that the server takes over, or -1 for none.
        listen_fd: i32,
    }

    struct GlooOptions<'a> {
        name: &'a str,
        address: String,
        interfaces: Vec<String>,
        /// `true` if reductions and gathers use shared memory when all ranks are on one host.
        share_memory: bool,
        timeout_ms: i64,
    }

    /// Traffic that a rank of a fake group would have sent.
    struct OperationTraffic {
        operation: String,
        messages: u64,
        bytes: u64,
    }

    struct ReducerOptions {
        bucket_bytes: usize,
        first_bucket_bytes: usize,
        find_unused_parameters: bool,
        gradient_as_bucket_view: bool,
        static_graph: bool,
    }

    struct AdamStep {
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        amsgrad: bool,
        maximize: bool,
        decoupled: bool,
    }

    struct SgdStep {
        lr: f64,
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        decoupled: bool,
        nesterov: bool,
        maximize: bool,
        first: bool,
    }

    /// State of autocast for one thread and one type of device.
    struct AutocastState {
        enabled: bool,
        /// Number of the type in c10's `ScalarType`.
        dtype: i8,
        cache: bool,
    }

    struct AdagradStep {
        lr: f64,
        lr_decay: f64,
        weight_decay: f64,
        eps: f64,
        maximize: bool,
    }

    struct RmsPropStep {
        lr: f64,
        alpha: f64,
        eps: f64,
        momentum: f64,
        weight_decay: f64,
        decoupled: bool,
        centered: bool,
        momentum_of_gradient: bool,
        maximize: bool,
    }

    struct RectifiedStep {
        lr: f64,
        steps: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        eps_of_unbiased: bool,
        weight_decay: f64,
        decoupled: bool,
        maximize: bool,
    }

    struct QhAdamStep {
        lr: f64,
        steps: f64,
        beta1: f64,
        beta2: f64,
        nu1: f64,
        nu2: f64,
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        maximize: bool,
    }

    /// Passes that are made of a rule with norms.
    #[repr(u8)]
    enum StepPart {
        /// Both passes of the update rule.
        Whole,
        /// The first pass, which computes sums of squares.
        Sums,
        /// The second pass, which uses the sums of squares.
        Update,
    }

    struct LambStep {
        lr: f64,
        steps: f64,
        max_trust: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        maximize: bool,
    }

    struct LarcStep {
        lr: f64,
        trust: f64,
        clip: bool,
        weight_decay: f64,
        decoupled: bool,
        momentum: f64,
        eps: f64,
        maximize: bool,
    }

    struct LookAheadStep {
        alpha: f64,
        every: u64,
    }

    struct AdafactorStep {
        lr: f64,
        steps: f64,
        beta2_decay: f64,
        /// First epsilon. A negative value means the machine epsilon of the type.
        eps1: f64,
        eps2: f64,
        threshold: f64,
        weight_decay: f64,
        maximize: bool,
    }

    struct MuonStep {
        lr: f64,
        match_rms_adamw: bool,
        momentum: f64,
        nesterov: bool,
        a: f64,
        b: f64,
        c: f64,
        iterations: i64,
        eps: f64,
        weight_decay: f64,
    }

    struct CrossEntropyOptions {
        ignore_index: i64,
        label_smoothing: f64,
        z_loss: f64,
        mean: bool,
        /// Maximum size of the logits in memory, or 0 for the default.
        logit_bytes: i64,
    }

    /// Classes of which a rank has the logits.
    struct VocabularyPart {
        start: i64,
        size: i64,
        vocabulary: i64,
    }

    struct CrossEntropyLoss {
        loss: UniquePtr<Tensor>,
        count: UniquePtr<Tensor>,
    }

    struct ActivationOptions {
        activation: i32,
        packed: bool,
    }

    struct RotatedPair {
        queries: UniquePtr<Tensor>,
        keys: UniquePtr<Tensor>,
    }

    struct NormResidualOptions {
        rms: bool,
        post: bool,
        eps: f64,
        dropout: f64,
    }

    struct ResidualInputs {
        branch: UniquePtr<Tensor>,
        shortcut: UniquePtr<Tensor>,
    }

    struct ResidualNorm {
        stream: UniquePtr<Tensor>,
        normed: UniquePtr<Tensor>,
    }

    /// The rows of an embedding, and its weight for a tied head.
    struct TiedEmbedding {
        rows: UniquePtr<Tensor>,
        weight: UniquePtr<Tensor>,
    }

    struct GpuMath {
        tf32: bool,
        benchmark: bool,
        deterministic: bool,
    }

    struct AttentionOptions {
        dropout: f64,
        causal: bool,
        /// Scale of the attention scores, or 0 for the default, which depends on the width.
        scale: f64,
    }

    /// Properties of a call of attention on which its kernel on a GPU depends.
    struct AttentionCall {
        /// Probability of dropout.
        dropout: f64,
        /// `true` for float16 and bfloat16.
        sixteen_bits: bool,
        /// Head size of queries and keys.
        head_size: i64,
        /// Head size of the values.
        value_size: i64,
        masked: bool,
        /// `true` if each query sees the keys up to its position, of which there are more or fewer.
        causal_rectangle: bool,
        /// `true` from capability 8.0 on.
        ampere: bool,
    }

    /// Kernel of attention on a GPU.
    #[derive(Debug)]
    enum AttentionKernel {
        /// The one that libtorch chooses, which may be cuDNN's.
        Libtorch,
        Flash,
        Efficient,
    }

    /// Libraries of TorchTPU, as paths.
    #[cfg(feature = "tpu")]
    struct TpuFiles<'a> {
        /// Contents of the library that this program carries (`cpp/tpu/compat.c`).
        carried: &'a [u8],
        base: &'a str,
        glue: &'a str,
        plugin: &'a str,
        /// `true` if TorchTPU gets the plug-in through the carried library.
        wraps_plugin: bool,
        /// `true` if this process becomes a rank of TorchTPU's process group.
        joins_slice: bool,
    }

    /// Version of the C API of a PJRT plug-in.
    #[cfg(feature = "tpu")]
    struct PjrtVersion {
        major: i32,
        minor: i32,
    }

    /// State of the CUDA runtime on this machine.
    #[cfg(feature = "cuda")]
    struct CudaState {
        devices: i32,
        /// Number of a `cudaError_t`.
        error: i32,
        error_text: String,
        /// Newest CUDA version that the driver supports, such as 13000. 0 without a driver.
        driver: i32,
        /// CUDA version of the headers with which this program was built.
        built_for: i32,
    }

    struct ProfilerOptions {
        cuda: bool,
        shapes: bool,
        memory: bool,
        flops: bool,
    }

    /// Event of the profiler.
    struct ProfiledEvent {
        name: String,
        start_ns: u64,
        duration_ns: u64,
        /// Thread, or stream of the device.
        lane: u64,
        /// `true` if the event ran on a GPU.
        on_device: bool,
        /// Number of bytes that a memory event has allocated (negative if freed).
        bytes: i64,
        flops: u64,
        /// Shapes of the inputs, such as `[[64, 1, 28, 28], []]`. Empty if shapes are not recorded.
        shapes: String,
    }

    /// Free and total memory in bytes.
    struct MemoryInfo {
        free: u64,
        total: u64,
    }

    /// Allocated memory in bytes.
    struct DeviceMemory {
        allocated: u64,
        peak: u64,
        reserved: u64,
    }

    /// Borrowed process group.
    #[derive(Clone, Copy)]
    struct GroupRef<'a> {
        group: &'a Group,
    }

    /// Options of a sharder.
    struct SharderOptions {
        /// `true` if whole parameters stay between steps.
        whole_at_rest: bool,
        /// `true` if shards are in the host's memory, and whether that is pinned.
        offload: bool,
        pin: bool,
        /// Divisors of sums of gradients, and of those of experts.
        divisor: i64,
        expert_divisor: i64,
    }

    /// Position of a parameter in its unit's storage.
    struct ShardedSlot {
        /// Offset in elements.
        offset: i64,
        /// Number of rows of each rank. 0 if each rank has all of it.
        rows: i64,
        /// Dimension of the rows: 0, or 1 of experts.
        dim: i64,
        /// Type of the whole parameter.
        kind: i8,
        /// Type in which its gradients are added up.
        reduce_kind: i8,
        /// `true` for a part of a mixture's experts, which only the ranks of the experts' group have in common.
        is_expert: bool,
        /// `true` if it stays outside of the storage, where the optimizer steps it.
        keeps_memory: bool,
    }

    /// Counters of a sharder.
    struct SharderMeter {
        /// Total bytes of gathered parameters.
        gathered: u64,
        most_gathered: u64,
        /// Maximum number of bytes of a backward's gradients, of reductions, and of copies to the host.
        most_reduced: u64,
        gathers: u64,
        reductions: u64,
        /// Maximum number of units that were gathered at the same time.
        most_whole: u64,
    }

    /// Code of a file of GPU kernels.
    struct KernelCode {
        code: Vec<u8>,
        /// Message for the user; empty if there is none.
        remark: String,
    }

    /// Candidate that was chosen for an operation of a GPU.
    struct KeptChoice {
        key: String,
        candidates: i32,
        chosen: i32,
    }

    /// Choices in the user's cache.
    struct KeptChoices {
        choices: Vec<KeptChoice>,
        /// Message for the user; empty if there is none.
        remark: String,
    }

    /// File of GPU kernels.
    struct KernelState {
        file: String,
        /// Reason why the kernels are not used; empty if they are.
        reason: String,
    }

    extern "Rust" {
        type Blob;
        fn blob_address(blob: &Blob) -> usize;

        type Hook;
        /// Copies the handles and runs the hook.
        fn run_hook(
            hook: &Hook,
            index: usize,
            is_last: bool,
            buffer: &Tensor,
            gradients: &CxxVector<Tensor>,
            parameters: Vec<usize>,
        ) -> Result<()>;

        type Recompute;
        /// Copies the handles and runs the part.
        fn run_recompute(recompute: &Recompute, inputs: &CxxVector<Tensor>) -> Result<()>;

        /// Returns the names of the files of GPU kernels.
        fn kernel_files() -> Vec<String>;
        /// Returns the reason why a file's kernels are not used for a type and a compute capability; empty if they are.
        fn kernel_obstacle(file: &str, element: i32, capability: i32) -> Result<String>;
        /// Returns the code of a file's kernels, from the cache or from the compiler in the library.
        fn kernel_code(
            file: &str,
            element: i32,
            capability: i32,
            nvrtc: &str,
        ) -> Result<KernelCode>;
        /// Returns `true` if products may have epilogues.
        fn allows_epilogues() -> Result<bool>;
        /// Returns the choices that were kept for a GPU with versions of libraries.
        fn kept_choices(identity: &str) -> KeptChoices;
        /// Keeps choices in place of all that were kept before. Returns a message for the user, or an empty text.
        fn keep_choices(identity: &str, choices: Vec<KeptChoice>) -> String;
    }

    unsafe extern "C++" {
        include!("brigade-torch/cpp/errors.h");
        include!("brigade-torch/cpp/tensors.h");
        include!("brigade-torch/cpp/memory.h");
        include!("brigade-torch/cpp/device.h");
        include!("brigade-torch/cpp/loss_flag.h");
        include!("brigade-torch/cpp/store.h");
        include!("brigade-torch/cpp/group.h");
        include!("brigade-torch/cpp/reducer.h");
        include!("brigade-torch/cpp/sharder.h");
        include!("brigade-torch/cpp/storage.h");
        include!("brigade-torch/cpp/activation.h");
        include!("brigade-torch/cpp/attention.h");
        include!("brigade-torch/cpp/cross_entropy.h");
        include!("brigade-torch/cpp/dropout.h");
        include!("brigade-torch/cpp/embedding.h");
        include!("brigade-torch/cpp/convolution.h");
        include!("brigade-torch/cpp/linear.h");
        include!("brigade-torch/cpp/feed_forward.h");
        include!("brigade-torch/cpp/optimizer.h");
        include!("brigade-torch/cpp/precision.h");
        include!("brigade-torch/cpp/reproducible.h");
        include!("brigade-torch/cpp/flat.h");
        include!("brigade-torch/cpp/images.h");
        include!("brigade-torch/cpp/matrix_step.h");
        include!("brigade-torch/cpp/max_pool.h");
        include!("brigade-torch/cpp/norm.h");
        include!("brigade-torch/cpp/norm_relu.h");
        include!("brigade-torch/cpp/norm_residual.h");
        include!("brigade-torch/cpp/kernels/prepare.h");
        include!("brigade-torch/cpp/profiler.h");
        include!("brigade-torch/cpp/recompute.h");
        include!("brigade-torch/cpp/rotary.h");
        include!("brigade-torch/cpp/context_attention.h");
        include!("brigade-torch/cpp/regions.h");
        include!("brigade-torch/cpp/script.h");
        #[cfg(feature = "cuda")]
        include!("brigade-torch/cpp/cuda.h");
        #[cfg(feature = "cuda")]
        include!("brigade-torch/cpp/graph.h");
        #[cfg(feature = "tpu")]
        include!("brigade-torch/cpp/tpu.h");
        include!("brigade-torch/cpp/warnings.h");
        include!("brigade-torch/cpp/weights.h");

        type Tensor;
        fn copy_handle(tensor: &Tensor) -> UniquePtr<Tensor>;
        /// # Safety
        /// The blob's address must contain as many elements of `kind` as the product of `shape`.
        unsafe fn tensor_from_blob(
            blob: Box<Blob>,
            shape: &[i64],
            kind: i8,
        ) -> Result<UniquePtr<Tensor>>;
        fn tensor_data(tensor: &Tensor) -> Result<usize>;
        fn tensor_mutable_data(tensor: &Tensor) -> Result<usize>;
        fn tensor_is_plain(tensor: &Tensor) -> Result<bool>;
        fn tensor_is_shared(tensor: &Tensor) -> bool;
        fn backward(loss: &Tensor, retain_graph: bool, create_graph: bool) -> Result<()>;
        fn backward_from(
            outputs: &[TensorRef<'_>],
            output_gradients: &[TensorRef<'_>],
            leaves: &[TensorRef<'_>],
            retain_graph: bool,
            create_graph: bool,
        ) -> Result<()>;
        fn tensor_identity(tensor: &Tensor) -> usize;
        /// Returns gradients, null for inputs that took no part.
        fn gradients_of(
            outputs: &[TensorRef<'_>],
            inputs: &[TensorRef<'_>],
            output_gradients: &[TensorRef<'_>],
            retain_graph: bool,
            create_graph: bool,
            allow_unused: bool,
        ) -> Result<UniquePtr<CxxVector<Tensor>>>;

        type RecomputePart;
        fn recompute_begin(inputs: &[TensorRef<'_>]) -> Result<UniquePtr<RecomputePart>>;
        fn recompute_enter(part: &RecomputePart) -> Result<()>;
        fn recompute_leave();
        fn recompute_finish(part: &RecomputePart, recompute: Box<Recompute>) -> Result<()>;
        fn is_recomputing() -> bool;

        type Script;
        type ScriptOutput;
        fn script_load(path: &str) -> Result<UniquePtr<Script>>;
        fn script_names(script: &Script, buffers: bool) -> Result<Vec<String>>;
        fn script_tensors(script: &Script, buffers: bool) -> Result<UniquePtr<CxxVector<Tensor>>>;
        fn script_train(script: &Script, on: bool) -> Result<()>;
        fn script_forward(
            script: &Script,
            inputs: &[TensorRef<'_>],
            names: &[String],
        ) -> Result<UniquePtr<ScriptOutput>>;
        fn script_nodes(output: &ScriptOutput) -> Result<Vec<ScriptNode>>;
        fn script_output_tensors(output: &ScriptOutput) -> &CxxVector<Tensor>;

        fn clear_gradient(tensor: &Tensor) -> Result<()>;
        /// Returns the gradient, or null if there is none.
        fn gradient(tensor: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn set_gradient(tensor: &Tensor, gradient: &Tensor) -> Result<()>;
        fn grad_enabled() -> bool;

        type Fetch;
        fn start_fetch(tensor: &Tensor) -> Result<UniquePtr<Fetch>>;
        fn fetched_number(fetch: &Fetch) -> Result<i64>;
        fn rng_state(cuda_device: i32) -> Result<Vec<u8>>;
        fn set_rng_state(cuda_device: i32, state: &[u8]) -> Result<()>;
        fn unallocated(
            like: &Tensor,
            sizes: &[i64],
            strides: &[i64],
            why: &str,
        ) -> Result<UniquePtr<Tensor>>;
        fn has_memory(tensor: &Tensor) -> bool;
        fn set_data(tensor: &Tensor, values: &Tensor) -> Result<()>;
        fn keep_freed_memory() -> bool;
        fn shift_allocations(bytes: usize) -> Result<()>;

        fn libtorch_version() -> String;
        #[cfg(feature = "cuda")]
        fn cuda_state() -> CudaState;
        #[cfg(feature = "cuda")]
        fn forbid_waiting(on: bool);

        #[cfg(feature = "tpu")]
        fn pjrt_version(plugin: &str) -> Result<PjrtVersion>;
        #[cfg(feature = "tpu")]
        fn load_tpu(files: &TpuFiles<'_>) -> Result<()>;
        #[cfg(feature = "tpu")]
        fn prepare_tpu_thread() -> Result<()>;
        #[cfg(feature = "tpu")]
        fn tpu_group(
            tpu_store: &Store,
            gloo_store: &Store,
            rank: i32,
            size: i32,
            options: &GlooOptions<'_>,
        ) -> Result<UniquePtr<Group>>;
        #[cfg(feature = "tpu")]
        fn synchronize_tpu() -> Result<()>;

        #[cfg(not(feature = "cuda"))]
        fn registered_gpus() -> i32;
        fn set_current_gpu(index: i32) -> Result<()>;
        fn synchronize_gpu(index: i32) -> Result<()>;
        fn gpu_memory(index: i32) -> Result<MemoryInfo>;
        fn gpu_hardware(index: i32) -> Result<String>;
        fn gpu_has_bf16(index: i32) -> Result<bool>;

        fn use_pool_stream(gpu: i32) -> Result<()>;
        fn current_streams(gpus: &[i32]) -> Result<Vec<i64>>;
        fn use_streams(gpus: &[i32], streams: &[i64]) -> Result<()>;
        fn enter_side_stream(gpu: i32) -> Result<i64>;
        fn leave_side_stream(gpu: i32, stream: i64) -> Result<()>;

        type StreamEvent;
        fn record_event(gpu: i32) -> Result<UniquePtr<StreamEvent>>;
        fn event_is_done(event: &StreamEvent) -> Result<bool>;
        fn wait_for_event(event: &StreamEvent) -> Result<()>;
        fn follow_event(event: &StreamEvent, tensors: &[TensorRef<'_>]) -> Result<()>;

        #[cfg(feature = "cuda")]
        type Graph;
        /// # Safety
        /// `shared` must be null or point to a graph.
        #[cfg(feature = "cuda")]
        unsafe fn graph_begin(gpu: i32, shared: *const Graph) -> Result<UniquePtr<Graph>>;
        #[cfg(feature = "cuda")]
        fn graph_end(graph: Pin<&mut Graph>) -> Result<()>;
        #[cfg(feature = "cuda")]
        fn graph_replay(graph: Pin<&mut Graph>) -> Result<()>;

        fn copy_to_host(from: &Tensor, into: &[TensorRef<'_>]) -> Result<UniquePtr<Tensor>>;
        fn copy_to_gpu(from: &Tensor, gpu: i32) -> Result<UniquePtr<Tensor>>;
        fn pinned_like(like: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn is_pinned(tensor: &Tensor) -> Result<bool>;

        type Store;
        fn tcp_store(options: &TcpStoreOptions<'_>) -> Result<UniquePtr<Store>>;
        fn file_store(path: &str, world_size: i32) -> Result<UniquePtr<Store>>;
        fn hash_store() -> Result<UniquePtr<Store>>;
        fn prefix_store(prefix: &str, store: &Store) -> Result<UniquePtr<Store>>;
        fn tcp_store_port(store: &Store) -> Result<u16>;
        fn store_set(store: &Store, key: &str, value: &[u8]) -> Result<()>;
        fn store_get(store: &Store, key: &str) -> Result<Vec<u8>>;
        fn store_add(store: &Store, key: &str, amount: i64) -> Result<i64>;
        fn store_compare_set(
            store: &Store,
            key: &str,
            expected: &[u8],
            desired: &[u8],
        ) -> Result<Vec<u8>>;
        fn store_delete(store: &Store, key: &str) -> Result<bool>;
        fn store_check(store: &Store, keys: &[&str]) -> Result<bool>;
        fn store_num_keys(store: &Store) -> Result<i64>;
        fn store_wait(store: &Store, keys: &[&str], timeout_ms: i64) -> Result<()>;
        fn store_set_timeout(store: &Store, timeout_ms: i64) -> Result<()>;
        fn store_timeout(store: &Store) -> Result<i64>;

        type Group;
        fn gloo_group(
            store: &Store,
            rank: i32,
            size: i32,
            options: &GlooOptions<'_>,
        ) -> Result<UniquePtr<Group>>;
        fn nccl_group(
            nccl_store: &Store,
            gloo_store: &Store,
            rank: i32,
            size: i32,
            options: &GlooOptions<'_>,
        ) -> Result<UniquePtr<Group>>;
        fn fake_group(store: &Store, rank: i32, size: i32, name: &str) -> Result<UniquePtr<Group>>;
        fn group_traffic(group: &Group) -> Vec<OperationTraffic>;
        fn group_reset_traffic(group: &Group);
        fn group_finish(group: &Group) -> Result<()>;
        fn group_set_timeout(group: &Group, timeout_ms: i64) -> Result<()>;
        fn group_abort(group: &Group) -> Result<()>;
        fn group_backward(
            group: &Group,
            loss: &Tensor,
            retain_graph: bool,
            create_graph: bool,
        ) -> Result<()>;
        fn group_shares_memory(group: &Group) -> bool;

        type Work;
        fn all_reduce(
            group: &Group,
            tensor: &Tensor,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_reduce_coalesced(
            group: &Group,
            tensors: &[TensorRef<'_>],
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_gather_flat_coalesced(
            group: &Group,
            outputs: &[TensorRef<'_>],
            inputs: &[TensorRef<'_>],
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce_scatter_flat_coalesced(
            group: &Group,
            outputs: &[TensorRef<'_>],
            inputs: &[TensorRef<'_>],
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn broadcast(
            group: &Group,
            tensor: &Tensor,
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce(
            group: &Group,
            tensor: &Tensor,
            root: i64,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_gather(
            group: &Group,
            outputs: &[TensorRef<'_>],
            input: &Tensor,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_gather_flat(
            group: &Group,
            output: &Tensor,
            input: &Tensor,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn gather(
            group: &Group,
            outputs: &[TensorRef<'_>],
            input: &Tensor,
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn scatter(
            group: &Group,
            output: &Tensor,
            inputs: &[TensorRef<'_>],
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce_scatter(
            group: &Group,
            output: &Tensor,
            inputs: &[TensorRef<'_>],
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce_scatter_flat(
            group: &Group,
            output: &Tensor,
            input: &Tensor,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_to_all(
            group: &Group,
            outputs: &[TensorRef<'_>],
            inputs: &[TensorRef<'_>],
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_to_all_flat(
            group: &Group,
            output: &Tensor,
            input: &Tensor,
            output_rows: &[i64],
            input_rows: &[i64],
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn send(group: &Group, tensor: &Tensor, to: i32, tag: i32) -> Result<UniquePtr<Work>>;
        fn recv(group: &Group, tensor: &Tensor, from: i32, tag: i32) -> Result<UniquePtr<Work>>;
        fn recv_any(group: &Group, tensor: &Tensor, tag: i32) -> Result<UniquePtr<Work>>;
        fn barrier(group: &Group, device: i64, timeout_ms: i64) -> Result<UniquePtr<Work>>;
        fn monitored_barrier(group: &Group, timeout_ms: i64, wait_all: bool) -> Result<()>;
        fn broadcast_coalesced(
            group: &Group,
            tensors: &[TensorRef<'_>],
            bytes: usize,
            root: i32,
        ) -> Result<()>;
        fn work_wait(work: &Work, timeout_ms: i64) -> Result<bool>;
        fn work_is_completed(work: &Work) -> Result<bool>;
        fn work_is_on_stream(work: &Work) -> bool;
        fn work_source(work: &Work) -> Result<i32>;

        type Reducer;
        fn new_reducer(
            group: &Group,
            parameters: &[TensorRef<'_>],
            names: &[String],
            options: &ReducerOptions,
        ) -> Result<UniquePtr<Reducer>>;
        fn reducer_prepare_for_forward(reducer: &Reducer) -> Result<()>;
        fn reducer_rebuild_buckets(reducer: &Reducer) -> Result<bool>;
        fn reducer_prepare_for_backward(reducer: &Reducer, outputs: &[TensorRef<'_>])
        -> Result<()>;
        fn reducer_sink(
            reducer: &Reducer,
            outputs: &[TensorRef<'_>],
            delay: bool,
        ) -> Result<UniquePtr<CxxVector<Tensor>>>;
        fn reducer_watch(reducer: &Reducer, outputs: &[TensorRef<'_>], refuse: bool) -> Result<()>;
        fn reducer_bucket_bytes(reducer: &Reducer) -> Result<Vec<usize>>;
        fn reducer_compress(reducer: &Reducer, group: &Group, kind: i8) -> Result<()>;
        fn reducer_hook(reducer: &Reducer, hook: Box<Hook>) -> Result<()>;
        fn reducer_divide_by(reducer: &Reducer, ranks: i64) -> Result<()>;
        /// Takes part in a backward of the other ranks. Returns `true` if their gradients were finite in the element
        /// that a loss flag marks.
        fn reducer_shadow_backward(reducer: &Reducer) -> Result<bool>;
        fn reducer_push_rebuilt(reducer: &Reducer) -> Result<()>;
        fn reducer_used_map(reducer: &Reducer) -> Result<UniquePtr<Tensor>>;

        type Sharder;
        fn new_sharder(
            gather: &Group,
            reduce: &Group,
            replicas: &[GroupRef<'_>],
            parts: &[GroupRef<'_>],
            experts: &[GroupRef<'_>],
            expert_shards: &[GroupRef<'_>],
            options: &SharderOptions,
        ) -> Result<UniquePtr<Sharder>>;
        fn sharder_add_unit(
            sharder: &Sharder,
            name: &str,
            reshards: bool,
            keeps_part: bool,
            parameters: &[TensorRef<'_>],
            names: &[String],
            slots: &[ShardedSlot],
            bytes: usize,
        ) -> Result<UniquePtr<CxxVector<Tensor>>>;
        fn sharder_enter(sharder: &Sharder, unit: usize) -> Result<()>;
        fn sharder_leave(sharder: &Sharder, unit: usize, outputs: &[TensorRef<'_>]) -> Result<()>;
        fn sharder_set_sync(sharder: &Sharder, sync: bool, window_ends: bool) -> Result<()>;
        fn sharder_scale_unreduced(sharder: &Sharder, factor: &Tensor) -> Result<()>;
        fn sharder_reduce_unreduced(sharder: &Sharder) -> Result<()>;
        fn sharder_clear_unreduced(sharder: &Sharder) -> Result<()>;
        fn sharder_shards_changed(sharder: &Sharder) -> Result<()>;
        fn sharder_unit_changed(sharder: &Sharder, unit: usize) -> Result<()>;
        fn sharder_update_trained(sharder: &Sharder) -> Result<()>;
        fn sharder_reset(sharder: &Sharder);
        fn sharder_hold_all(sharder: &Sharder, will_write: bool) -> Result<()>;
        fn sharder_release_all(sharder: &Sharder, write: bool) -> Result<()>;
        fn sharder_meter(sharder: &Sharder) -> Result<SharderMeter>;

        fn region_edge(
            group: &Group,
            input: &Tensor,
            edge: RegionEdge,
            dim: i64,
            other: i64,
        ) -> Result<UniquePtr<Tensor>>;
        fn region_exchange_rows(
            group: &Group,
            input: &Tensor,
            send_rows: &[i64],
            receive_rows: &[i64],
        ) -> Result<UniquePtr<Tensor>>;
        fn region_scale_gradient(input: &Tensor, factor: f64) -> Result<UniquePtr<Tensor>>;
        fn context_attention(
            group: &Group,
            queries: &Tensor,
            keys: &Tensor,
            values: &Tensor,
            ring: bool,
            options: &AttentionOptions,
        ) -> Result<UniquePtr<Tensor>>;
        fn sync_batch_norm(
            group: &Group,
            input: &Tensor,
            weight: &[TensorRef<'_>],
            bias: &[TensorRef<'_>],
            running_mean: &[TensorRef<'_>],
            running_var: &[TensorRef<'_>],
            momentum: f64,
            eps: f64,
        ) -> Result<UniquePtr<Tensor>>;
        fn batch_norm_relu(
            input: &Tensor,
            shortcut: &[TensorRef<'_>],
            weight: &[TensorRef<'_>],
            bias: &[TensorRef<'_>],
            running_mean: &[TensorRef<'_>],
            running_var: &[TensorRef<'_>],
            training: bool,
            momentum: f64,
            eps: f64,
            relu: bool,
        ) -> Result<UniquePtr<Tensor>>;
        fn batch_norm_relu_max_pool(
            input: &Tensor,
            weight: &[TensorRef<'_>],
            bias: &[TensorRef<'_>],
            running_mean: &[TensorRef<'_>],
            running_var: &[TensorRef<'_>],
            training: bool,
            momentum: f64,
            eps: f64,
        ) -> Result<UniquePtr<Tensor>>;
        fn residual_inputs(input: &Tensor) -> Result<ResidualInputs>;
        fn normalized_images(
            images: &Tensor,
            mean: &[f32],
            deviation: &[f32],
            kind: i8,
        ) -> Result<UniquePtr<Tensor>>;

        fn norm_residual(
            stream: &Tensor,
            branch: &[TensorRef<'_>],
            branch_bias: &[TensorRef<'_>],
            branch_seed: &[TensorRef<'_>],
            weight: &[TensorRef<'_>],
            bias: &[TensorRef<'_>],
            shape: &[i64],
            options: &NormResidualOptions,
        ) -> Result<ResidualNorm>;
        fn norm_residual_seeds(stream: &Tensor, count: i64) -> Result<UniquePtr<Tensor>>;
        fn norm_residual_adds_bias(input: &Tensor, bias: &Tensor) -> Result<bool>;

        fn prepare_kernels(gpu: i32, kind: i8) -> Result<Vec<KernelState>>;

        fn convolution2d(
            input: &Tensor,
            weight: &Tensor,
            bias: &[TensorRef<'_>],
            stride: &[i64; 2],
            padding: &[i64; 2],
            dilation: &[i64; 2],
            groups: i64,
        ) -> Result<UniquePtr<Tensor>>;
        fn max_pool2d(
            input: &Tensor,
            kernel: &[i64; 2],
            stride: &[i64; 2],
            padding: &[i64; 2],
        ) -> Result<UniquePtr<Tensor>>;

        fn cross_entropy(
            logits: &Tensor,
            targets: &Tensor,
            options: &CrossEntropyOptions,
        ) -> Result<CrossEntropyLoss>;
        fn linear_cross_entropy(
            hidden: &Tensor,
            weight: &Tensor,
            bias: &[TensorRef<'_>],
            targets: &Tensor,
            options: &CrossEntropyOptions,
        ) -> Result<CrossEntropyLoss>;
        fn vocabulary_parallel_cross_entropy(
            group: &Group,
            logits: &Tensor,
            targets: &Tensor,
            part: &VocabularyPart,
            options: &CrossEntropyOptions,
        ) -> Result<CrossEntropyLoss>;
        fn linear_vocabulary_parallel_cross_entropy(
            group: &Group,
            hidden: &Tensor,
            weight: &Tensor,
            bias: &[TensorRef<'_>],
            targets: &Tensor,
            part: &VocabularyPart,
            options: &CrossEntropyOptions,
        ) -> Result<CrossEntropyLoss>;

        fn attention(
            queries: &Tensor,
            keys: &Tensor,
            values: &Tensor,
            mask: &[TensorRef<'_>],
            options: &AttentionOptions,
        ) -> Result<UniquePtr<Tensor>>;
        #[allow(dead_code, reason = "its only caller in Rust is a test")]
        fn attention_kernel(call: &AttentionCall) -> AttentionKernel;
        fn dropout(
            input: &Tensor,
            residual: &[TensorRef<'_>],
            probability: f64,
        ) -> Result<UniquePtr<Tensor>>;
        fn tied_embedding(weight: &Tensor, ids: &Tensor, padding: i64) -> Result<TiedEmbedding>;
        fn embedding_sum(
            weights: &[TensorRef<'_>],
            ids: &[TensorRef<'_>],
            paddings: &[i64],
            dropout: f64,
        ) -> Result<TiedEmbedding>;
        fn refuse_copies(tensor: &Tensor);
        type GraphCopies;
        fn copies_of_graph(gpu: i32) -> Result<UniquePtr<GraphCopies>>;
        fn end(self: Pin<&mut GraphCopies>);
        fn before_replay(self: &GraphCopies) -> Result<()>;
        fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn rotary_pair(
            queries: &Tensor,
            keys: &Tensor,
            cos: &Tensor,
            sin: &Tensor,
        ) -> Result<RotatedPair>;
        fn rotary_packed(
            product: &Tensor,
            heads: i64,
            cos: &Tensor,
            sin: &Tensor,
        ) -> Result<UniquePtr<Tensor>>;
        fn linear(
            input: &Tensor,
            weight: &Tensor,
            bias: &[TensorRef<'_>],
        ) -> Result<UniquePtr<Tensor>>;
        fn activation(
            values: &Tensor,
            bias: &[TensorRef<'_>],
            up: &[TensorRef<'_>],
            up_bias: &[TensorRef<'_>],
            options: &ActivationOptions,
        ) -> Result<UniquePtr<Tensor>>;
        fn activation_adds_bias(input: &Tensor) -> Result<bool>;
        fn feed_forward(
            input: &Tensor,
            weight: &Tensor,
            bias: &[TensorRef<'_>],
            second_weight: &Tensor,
            second_bias: &[TensorRef<'_>],
            options: &ActivationOptions,
        ) -> Result<UniquePtr<Tensor>>;
        fn activation_linear(
            values: &Tensor,
            bias: &[TensorRef<'_>],
            up: &[TensorRef<'_>],
            up_bias: &[TensorRef<'_>],
            weight: &Tensor,
            weight_bias: &[TensorRef<'_>],
            options: &ActivationOptions,
        ) -> Result<UniquePtr<Tensor>>;

        type LossFlag;
        fn new_loss_flag(parameters: &[TensorRef<'_>]) -> Result<UniquePtr<LossFlag>>;
        fn loss_flag_raise(flag: &LossFlag, value: &Tensor);
        fn loss_flag_lower(flag: &LossFlag) -> bool;
        fn first_elements_are_finite(tensors: &[TensorRef<'_>]) -> Result<bool>;
        fn first_elements_not_finite(tensors: &[TensorRef<'_>]) -> Result<UniquePtr<Tensor>>;

        fn profiler_start(options: &ProfilerOptions) -> Result<()>;
        fn profiler_stop(path: &str) -> Result<Vec<ProfiledEvent>>;
        type Scope;
        fn enter_scope(name: &str) -> Result<UniquePtr<Scope>>;

        type WarningFilter;
        fn filter_warnings(text: &str) -> Result<UniquePtr<WarningFilter>>;

        fn fused_adam(
            parameters: &[TensorRef<'_>],
            gradients: &[TensorRef<'_>],
            exp_avgs: &[TensorRef<'_>],
            exp_avg_sqs: &[TensorRef<'_>],
            max_exp_avg_sqs: &[TensorRef<'_>],
            steps: &[TensorRef<'_>],
            step: &AdamStep,
            device: &[TensorRef<'_>],
        ) -> Result<()>;
        fn fused_sgd(
            parameters: &[TensorRef<'_>],
            gradients: &[TensorRef<'_>],
            momentum_buffers: &[TensorRef<'_>],
            step: &SgdStep,
            device: &[TensorRef<'_>],
        ) -> Result<()>;

        fn autocast_enter(device: i8, next: &AutocastState) -> Result<AutocastState>;
        fn autocast_leave(device: i8, before: &AutocastState);
        fn emulated_type(operand: &Tensor) -> Result<i8>;
        fn channels_last(tensor: &Tensor) -> Result<UniquePtr<Tensor>>;
        fn is_channels_last(tensor: &Tensor) -> Result<bool>;
        fn unscale_gradients(
            gradients: &[TensorRef<'_>],
            inverse_scale: f64,
        ) -> Result<UniquePtr<Tensor>>;
        fn unscale_gradients_by(
            gradients: &[TensorRef<'_>],
            inverse_scale: &Tensor,
        ) -> Result<UniquePtr<Tensor>>;
        fn norm_of_all(tensors: &[TensorRef<'_>], p: f64) -> Result<UniquePtr<Tensor>>;
        fn multiply_all(tensors: &[TensorRef<'_>], factor: &Tensor) -> Result<()>;
        fn clamp_all(tensors: &[TensorRef<'_>], limit: f64) -> Result<()>;
        fn release_memory(cuda: bool) -> Result<()>;
        fn device_memory(gpu: i32) -> Result<DeviceMemory>;
        fn has_onednn() -> bool;
        fn make_products_reproducible() -> Products;
        fn cpu_kernels() -> String;
        fn gpu_math() -> Result<GpuMath>;
        fn set_gpu_math(math: GpuMath);

        fn fused_adagrad(
            parameters: &[TensorRef<'_>],
            gradients: &[TensorRef<'_>],
            state_sums: &[TensorRef<'_>],
            steps: &[TensorRef<'_>],
            step: &AdagradStep,
            device: &[TensorRef<'_>],
        ) -> Result<()>;
        fn rmsprop(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &RmsPropStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn rectified(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &RectifiedStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn qhadam(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &QhAdamStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn lamb(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &LambStep,
            part: StepPart,
            sums: &[TensorRef<'_>],
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn larc(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &LarcStep,
            part: StepPart,
            sums: &[TensorRef<'_>],
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn look_ahead(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &LookAheadStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn adafactor(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &AdafactorStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn muon(
            tensors: &[TensorRef<'_>],
            count: usize,
            step: &MuonStep,
            device: &[TensorRef<'_>],
            operations: bool,
        ) -> Result<()>;
        fn same_layout(first: &Tensor, second: &Tensor) -> Result<bool>;
    }
}
