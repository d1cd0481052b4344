//! The list of everything that crosses the border, for cxx.
//!
//! Rules:
//! 1. A tensor that C++ only looks at or fills crosses as [`ffi::TensorRef`], a pointer that lives for
//!    the call. C++ copies the handle if it keeps the tensor.
//! 2. A new tensor crosses as a raw pointer that Rust owns at once (`tch::Tensor::from_ptr`).
//! 3. Time limits cross as milliseconds; [`NO_LIMIT_OF_ITS_OWN`] means the group's.
//! 4. Every function that can throw returns `Result`; `cpp/errors.h` marks the kind.

use std::sync::Arc;

use tch::Tensor;

use crate::error::Error;
use crate::hook::Bucket;

/// c10d's `kUnsetTimeout`: the operation uses its group's time limit.
pub(crate) const NO_LIMIT_OF_ITS_OWN: i64 = -1;

/// Memory that a tensor borrows for its whole life: a boxed vector.
pub(crate) struct Blob {
    pub(crate) address: usize,
    /// Dropped with the box, when libtorch frees the tensor's storage.
    pub(crate) _memory: Box<dyn std::any::Any + Send>,
}

fn blob_address(blob: &Blob) -> usize {
    blob.address
}

/// What replaces the reduction of buckets; called from the thread that runs `backward`.
pub(crate) struct Hook {
    pub(crate) run: Box<dyn Fn(Bucket) -> Result<(), Error> + Send + Sync>,
}

fn run_hook(
    hook: &Hook,
    index: usize,
    is_last: bool,
    buffer: ffi::TensorRef,
    gradients: Vec<ffi::TensorRef>,
    parameters: Vec<usize>,
) -> Result<(), Error> {
    let buffer = own(buffer);
    let gradients = gradients.into_iter().map(own).collect();
    let bucket = Bucket { index, is_last, buffer, gradients, parameters };
    // A panic must not cross the border.
    let run = std::panic::AssertUnwindSafe(|| (hook.run)(bucket));
    std::panic::catch_unwind(run)
        .unwrap_or_else(|_| Err(Error::Misuse("a communication hook panicked".into())))
}

/// What a reducer does when a backward pass reaches its model; called from the thread that runs `backward`.
pub(crate) struct Arrival {
    pub(crate) run: Arc<dyn Fn() -> Result<(), Error> + Send + Sync>,
}

fn run_arrival(arrival: &Arrival) -> Result<(), Error> {
    // A panic must not cross the border.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (arrival.run)())).unwrap_or_else(
        |_| Err(Error::Misuse("what a reducer calls in a backward panicked".into())),
    )
}

/// Takes over a handle that C++ made for Rust.
pub(crate) fn own(tensor: ffi::TensorRef) -> Tensor {
    // SAFETY: only called with new handles on the heap, made with the type that tch frees, each once.
    unsafe { Tensor::from_ptr(tensor.tensor.cast_mut().cast()) }
}

#[cxx::bridge(namespace = "brigade")]
// For the generated code.
#[allow(unreachable_pub, unused_qualifications, missing_debug_implementations)]
#[allow(clippy::too_many_arguments)]
pub(crate) mod ffi {
    /// A borrowed tensor.
    #[derive(Clone, Copy)]
    struct TensorRef {
        tensor: *const Tensor,
    }

    /// c10d's reductions, with c10d's numbers.
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

    /// Whether products of matrices on the CPU give the same bits wherever their operands lie in memory.
    #[derive(Debug)]
    #[repr(u8)]
    enum Products {
        /// They do.
        Reproducible = 0,
        /// They may not: `MKL_CBWR` in the environment, or the program, has chosen another mode.
        TurnedOff = 1,
        /// They may not: MKL was used before it could be asked.
        UsedBefore = 2,
        /// They may not: MKL has no such mode for this processor, or libtorch has another library.
        Unsupported = 3,
    }

    struct TcpStoreOptions<'a> {
        host: &'a str,
        port: u16,
        is_server: bool,
        /// 0: the number of clients is not known.
        num_workers: i64,
        wait_workers: bool,
        timeout_ms: i64,
        /// -1: none; else an already bound socket that the server takes over.
        listen_fd: i32,
    }

    struct GlooOptions<'a> {
        name: &'a str,
        address: &'a str,
        interfaces: Vec<String>,
        /// Whether all-reduces go through memory where all ranks are on one host.
        share_memory: bool,
        timeout_ms: i64,
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
        nesterov: bool,
        maximize: bool,
        first: bool,
    }

    /// Of one thread and one type of device.
    struct AutocastState {
        enabled: bool,
        /// c10's `ScalarType`.
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

    // Of a parameter of its own, as in all of `flat.h`: `keep` multiplies the weight before the step
    // (decoupled weight decay), `l2` times the weight is added to the gradient.
    struct RmsPropStep {
        lr: f64,
        alpha: f64,
        eps: f64,
        momentum: f64,
        l2: f64,
        keep: f64,
        centered: bool,
        momentum_of_gradient: bool,
        maximize: bool,
    }

    struct RectifiedStep {
        size: f64,
        root_scale: f64,
        adaptive: bool,
        beta1: f64,
        beta2: f64,
        eps: f64,
        l2: f64,
        keep: f64,
        maximize: bool,
    }

    struct LambStep {
        lr: f64,
        mean_scale: f64,
        root_scale: f64,
        max_trust: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        l2: f64,
        keep: f64,
        maximize: bool,
    }

    struct LarcStep {
        lr: f64,
        trust: f64,
        clip: bool,
        weight_decay: f64,
        momentum: f64,
        eps: f64,
        l2: f64,
        keep: f64,
        maximize: bool,
    }

    struct AdafactorStep {
        rho: f64,
        weight: f64,
        /// Negative: the kind's machine epsilon.
        eps1: f64,
        eps2: f64,
        threshold: f64,
        keep: f64,
        maximize: bool,
    }

    struct MuonStep {
        size: f64,
        momentum: f64,
        nesterov: bool,
        a: f64,
        b: f64,
        c: f64,
        iterations: i64,
        eps: f64,
        keep: f64,
    }

    struct ProfilerOptions {
        cuda: bool,
        shapes: bool,
        memory: bool,
        flops: bool,
    }

    /// One event of the profiler.
    struct ProfiledEvent {
        name: String,
        start_ns: u64,
        duration_ns: u64,
        /// The thread, or the device's stream.
        lane: u64,
        /// Ran on a GPU.
        on_device: bool,
        /// Bytes that a memory event took (or gave back, when negative).
        bytes: i64,
        flops: u64,
        /// `[[64, 1, 28, 28], []]`, empty when shapes are not recorded.
        shapes: String,
    }

    /// Bytes.
    struct DeviceMemory {
        allocated: u64,
        peak: u64,
        reserved: u64,
    }

    extern "Rust" {
        type Blob;
        fn blob_address(blob: &Blob) -> usize;

        type Hook;
        /// Takes over the handles.
        fn run_hook(
            hook: &Hook,
            index: usize,
            is_last: bool,
            buffer: TensorRef,
            gradients: Vec<TensorRef>,
            parameters: Vec<usize>,
        ) -> Result<()>;

        type Arrival;
        fn run_arrival(arrival: &Arrival) -> Result<()>;
    }

    unsafe extern "C++" {
        include!("brigade-torch/cpp/errors.h");
        include!("brigade-torch/cpp/tensors.h");
        include!("brigade-torch/cpp/memory.h");
        include!("brigade-torch/cpp/store.h");
        include!("brigade-torch/cpp/group.h");
        include!("brigade-torch/cpp/reducer.h");
        include!("brigade-torch/cpp/optimizer.h");
        include!("brigade-torch/cpp/precision.h");
        include!("brigade-torch/cpp/reproducible.h");
        include!("brigade-torch/cpp/flat.h");
        include!("brigade-torch/cpp/matrix_step.h");
        include!("brigade-torch/cpp/norm.h");
        include!("brigade-torch/cpp/norm_relu.h");
        include!("brigade-torch/cpp/profiler.h");

        type Tensor;
        /// # Safety
        /// The blob's address must hold `shape`'s product of elements of `kind`.
        unsafe fn tensor_from_blob(blob: Box<Blob>, shape: &[i64], kind: i8)
        -> Result<*mut Tensor>;
        /// # Safety
        /// The pointer comes from a live `tch::Tensor`, as for all functions on `*const Tensor`.
        unsafe fn tensor_data(tensor: *const Tensor) -> Result<usize>;
        /// # Safety
        /// See `tensor_data`.
        unsafe fn tensor_is_plain(tensor: *const Tensor) -> Result<bool>;
        /// # Safety
        /// See `tensor_data`.
        unsafe fn clear_gradient(tensor: *const Tensor) -> Result<()>;
        /// # Safety
        /// See `tensor_data`.
        unsafe fn gradient(tensor: *const Tensor) -> Result<*mut Tensor>;
        /// # Safety
        /// Both pointers are valid for the call.
        unsafe fn set_gradient(tensor: *const Tensor, gradient: *const Tensor) -> Result<()>;
        fn grad_enabled() -> bool;
        /// Calls once when a backward reaches one of the outputs, before it goes further.
        fn call_on_arrival(outputs: &[TensorRef], arrival: Box<Arrival>) -> Result<()>;

        type Fetch;
        /// # Safety
        /// The pointer is that of a live tensor.
        unsafe fn start_fetch(tensor: *const Tensor) -> Result<UniquePtr<Fetch>>;
        fn fetched_number(fetch: &Fetch) -> Result<i64>;
        fn rng_state(cuda_device: i32) -> Result<Vec<u8>>;
        fn set_rng_state(cuda_device: i32, state: &[u8]) -> Result<()>;
        fn keep_freed_memory() -> bool;
        fn shift_allocations(bytes: usize) -> Result<()>;

        fn libtorch_version() -> String;
        fn cuda_compiled() -> bool;

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
            store: &Store,
            rank: i32,
            size: i32,
            name: &str,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Group>>;
        fn fake_group(store: &Store, rank: i32, size: i32, name: &str) -> Result<UniquePtr<Group>>;
        fn group_set_timeout(group: &Group, timeout_ms: i64) -> Result<()>;
        fn group_abort(group: &Group) -> Result<()>;
        fn group_shares_memory(group: &Group) -> bool;

        type Work;
        fn all_reduce(
            group: &Group,
            tensor: &TensorRef,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn broadcast(
            group: &Group,
            tensor: &TensorRef,
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce(
            group: &Group,
            tensor: &TensorRef,
            root: i64,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_gather(
            group: &Group,
            outputs: &[TensorRef],
            input: &TensorRef,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_gather_flat(
            group: &Group,
            output: &TensorRef,
            input: &TensorRef,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn gather(
            group: &Group,
            outputs: &[TensorRef],
            input: &TensorRef,
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn scatter(
            group: &Group,
            output: &TensorRef,
            inputs: &[TensorRef],
            root: i64,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce_scatter(
            group: &Group,
            output: &TensorRef,
            inputs: &[TensorRef],
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn reduce_scatter_flat(
            group: &Group,
            output: &TensorRef,
            input: &TensorRef,
            op: Reduction,
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_to_all(
            group: &Group,
            outputs: &[TensorRef],
            inputs: &[TensorRef],
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn all_to_all_flat(
            group: &Group,
            output: &TensorRef,
            input: &TensorRef,
            output_rows: &[i64],
            input_rows: &[i64],
            timeout_ms: i64,
        ) -> Result<UniquePtr<Work>>;
        fn send(group: &Group, tensor: &TensorRef, to: i32, tag: i32) -> Result<UniquePtr<Work>>;
        fn recv(group: &Group, tensor: &TensorRef, from: i32, tag: i32) -> Result<UniquePtr<Work>>;
        fn recv_any(group: &Group, tensor: &TensorRef, tag: i32) -> Result<UniquePtr<Work>>;
        fn barrier(group: &Group, device: i64, timeout_ms: i64) -> Result<UniquePtr<Work>>;
        fn monitored_barrier(group: &Group, timeout_ms: i64, wait_all: bool) -> Result<()>;
        fn broadcast_coalesced(
            group: &Group,
            tensors: &[TensorRef],
            bytes: usize,
            root: i32,
        ) -> Result<()>;
        fn work_wait(work: &Work, timeout_ms: i64) -> Result<bool>;
        fn work_is_completed(work: &Work) -> Result<bool>;
        fn work_source(work: &Work) -> Result<i32>;

        type Reducer;
        fn new_reducer(
            group: &Group,
            parameters: &[TensorRef],
            names: &[String],
            options: &ReducerOptions,
        ) -> Result<UniquePtr<Reducer>>;
        fn reducer_prepare_for_forward(reducer: &Reducer) -> Result<()>;
        fn reducer_rebuild_buckets(reducer: &Reducer) -> Result<bool>;
        fn reducer_prepare_for_backward(reducer: &Reducer, outputs: &[TensorRef]) -> Result<()>;
        fn reducer_sink(
            reducer: &Reducer,
            outputs: &[TensorRef],
            delay: bool,
        ) -> Result<Vec<TensorRef>>;
        fn reducer_bucket_bytes(reducer: &Reducer) -> Result<Vec<usize>>;
        fn reducer_compress(reducer: &Reducer, group: &Group, kind: i8) -> Result<()>;
        fn reducer_hook(reducer: &Reducer, hook: Box<Hook>) -> Result<()>;
        fn reducer_divide_by(reducer: &Reducer, ranks: i64) -> Result<()>;
        fn reducer_shadow_backward(reducer: &Reducer) -> Result<()>;
        fn reducer_push_rebuilt(reducer: &Reducer) -> Result<()>;
        fn reducer_used_map(reducer: &Reducer) -> Result<*mut Tensor>;

        /// # Safety
        /// Pointers are null or come from live tensors.
        unsafe fn sync_batch_norm(
            group: &Group,
            input: &TensorRef,
            weight: *const Tensor,
            bias: *const Tensor,
            running_mean: *const Tensor,
            running_var: *const Tensor,
            momentum: f64,
            eps: f64,
        ) -> Result<*mut Tensor>;
        /// # Safety
        /// See `sync_batch_norm`.
        unsafe fn batch_norm_relu(
            input: &TensorRef,
            shortcut: *const Tensor,
            weight: *const Tensor,
            bias: *const Tensor,
            running_mean: *const Tensor,
            running_var: *const Tensor,
            training: bool,
            momentum: f64,
            eps: f64,
        ) -> Result<*mut Tensor>;

        fn profiler_start(options: &ProfilerOptions) -> Result<()>;
        fn profiler_stop(path: &str) -> Result<Vec<ProfiledEvent>>;
        type Scope;
        fn enter_scope(name: &str) -> Result<UniquePtr<Scope>>;

        fn fused_adam(
            parameters: &[TensorRef],
            gradients: &[TensorRef],
            exp_avgs: &[TensorRef],
            exp_avg_sqs: &[TensorRef],
            max_exp_avg_sqs: &[TensorRef],
            steps: &[TensorRef],
            step: &AdamStep,
        ) -> Result<()>;
        fn fused_sgd(
            parameters: &[TensorRef],
            gradients: &[TensorRef],
            momentum_buffers: &[TensorRef],
            step: &SgdStep,
        ) -> Result<()>;

        fn autocast_enter(device: i8, next: &AutocastState) -> Result<AutocastState>;
        fn autocast_leave(device: i8, before: &AutocastState);
        /// # Safety
        /// See `tensor_data`.
        unsafe fn channels_last(tensor: *const Tensor) -> Result<*mut Tensor>;
        /// # Safety
        /// See `tensor_data`.
        unsafe fn is_channels_last(tensor: *const Tensor) -> Result<bool>;
        fn unscale_gradients(gradients: &[TensorRef], inverse_scale: f64) -> Result<*mut Tensor>;
        fn norm_of_all(tensors: &[TensorRef], p: f64) -> Result<*mut Tensor>;
        fn multiply_all(tensors: &[TensorRef], factor: &TensorRef) -> Result<()>;
        fn clamp_all(tensors: &[TensorRef], limit: f64) -> Result<()>;
        fn release_memory(cuda: bool) -> Result<()>;
        fn device_memory(device: i8) -> Result<DeviceMemory>;
        fn has_onednn() -> bool;
        fn make_products_reproducible() -> Products;
        fn cuda_has_bf16() -> Result<bool>;

        fn fused_adagrad(
            parameters: &[TensorRef],
            gradients: &[TensorRef],
            state_sums: &[TensorRef],
            steps: &[TensorRef],
            step: &AdagradStep,
        ) -> Result<()>;
        fn rmsprop(tensors: &[TensorRef], step: &RmsPropStep, operations: bool) -> Result<()>;
        fn rectified(tensors: &[TensorRef], step: &RectifiedStep, operations: bool) -> Result<()>;
        fn lamb(tensors: &[TensorRef], step: &LambStep, operations: bool) -> Result<()>;
        fn larc(tensors: &[TensorRef], step: &LarcStep, operations: bool) -> Result<()>;
        fn look_ahead(tensors: &[TensorRef], alpha: f64, operations: bool) -> Result<()>;
        fn adafactor(tensors: &[TensorRef], step: &AdafactorStep) -> Result<()>;
        fn muon(tensors: &[TensorRef], step: &MuonStep) -> Result<()>;
        /// # Safety
        /// See `tensor_data`.
        unsafe fn same_layout(first: *const Tensor, second: *const Tensor) -> Result<bool>;
    }
}
