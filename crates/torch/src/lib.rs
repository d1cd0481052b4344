//! Bindings to the parts of libtorch that tch does not have: process groups, collectives, the gradient reducer,
//! autocast and fused kernels.
//!
//! The crate also contains stores, loops for optimizer steps, and tensors that share memory with Rust vectors. The
//! public interface is safe. All C++ and all `unsafe` code of Brigade's libraries is in this crate, and `src/bridge.rs`
//! lists all functions and types that are shared with C++. (Two crates outside of the libraries have such code, too:
//! `brigade-dylib-call`, which calls functions of a notebook's library and of NVRTC, and `brigade-test-device`, a device
//! for tests in C++.)
//!
//! ```
//! use brigade_torch::{Backend, GroupOptions, ProcessGroup, ReduceOp, Store};
//! use tch::Tensor;
//!
//! let store = Store::hash()?;
//! let group = ProcessGroup::new(&store, 0, 1, Backend::Gloo(Default::default()), GroupOptions::default())?;
//! let mut t = Tensor::from_slice(&[1.0, 2.0]);
//! group.all_reduce(&mut t, ReduceOp::Sum)?;
//! # Ok::<(), brigade_torch::Error>(())
//! ```
//!
//! # Collectives over Gloo
//!
//! Sums are computed in the order of the ranks, so that a resumed job has the same bits. In Gloo's own algorithms the
//! order depends on the neighbours in a ring, and so on ports. With three or more ranks over TCP, this crate implements
//! the all-reduce (`cpp/ordered.cpp`): each rank receives its part of the buffer from all others, adds the parts, and
//! sends the sum to all. A reduce-scatter is the first half of that and an all-gather the second, also with two ranks,
//! so that data parallelism and sharded training have the same bits. Each rank first sends the name of the collective
//! that it has begun: if they differ, both ranks get an error with both names.
//!
//! If all ranks of a group run on one host, all-reduces, reduce-scatters and all-gathers use shared memory
//! (`cpp/shared_memory.cpp`). A rank copies a chunk of 1 MB into its slot; the other ranks add it to theirs, in the
//! order of the ranks, or copy it directly to the output. A list of tensors is one operation, and a tensor that is
//! already in place is not copied. Operations, order, time limits, aborts and errors are the same as with Gloo. Each
//! rank holds a lock on one byte of the memory's unnamed file, by which the others detect that it was killed. A rank
//! sends its process id and file descriptor as numbers; the others open `/proc/PID/fd/FD` and map it only if it is an
//! unnamed memory file of the same user, sealed against a change of its size.
//!
//! Several tensors of one call are one operation (`all_reduce_coalesced` and similar, `cpp/group.cpp`): one launch of
//! NCCL; one all-reduce of Gloo for each type; one gather or reduce-scatter for all types, if all ranks are Brigade's.
//! Each element has the same result as in an all-reduce of its tensor alone.
//!
//! On Linux with glibc a program that links this crate has a `pthread_mutex_trylock` of its own (`cpp/gloo_loop.cpp`), by
//! which Gloo's threads yield their processor when a connection is locked. For all other threads it calls the next one.
//!
//! # Devices
//!
//! `cpp/device.cpp` uses devices through libtorch's own interfaces (`DeviceGuardImplInterface`, `DeviceAllocator`), for
//! which CUDA's headers are not needed. Code that needs them is in `cpp/cuda.cpp`, `cpp/graph.cpp` and `cpp/nccl.cpp`.
//! `src/device.rs` contains the trait of device kinds.
//!
//! With the feature `tpu`, TorchTPU is loaded when a TPU is first asked for (`src/device/tpu.rs`, `cpp/tpu.cpp`): its
//! libraries, a plug-in, and one that the program contains as bytes (`cpp/tpu/compat.c`), which stands for Python. Its
//! devices are libtorch's PrivateUse1 and tch's `Device::Mps`.
//!
//! With NCCL, a c10d group has two backends, NCCL and Gloo, of which one is chosen by a tensor's device; the group's
//! own messages are CPU tensors. A group of Gloo alone copies tensors of GPUs and TPUs through the host
//! (`cpp/through_host.cpp`). That backend has c10d's type CUSTOM, because c10d would reuse a group's backend of the
//! same type.
//!
//! By default c10d's watchdog ends the process at a time limit. This crate sets `TORCH_NCCL_ASYNC_ERROR_HANDLING` to 2
//! unless it is 0 or 3 (launchers set 1), so that the watchdog aborts the communicator instead and the next operation
//! is an error. It also turns off the dump of c10d's state before that, which takes a minute. A group that is dropped
//! waits for its operations in flight, at most 5 s, because the destructor of c10d's backend aborts them.

mod activation;
mod attention;
mod autocast;
mod autograd;
mod backend;
mod bridge;
mod bucket;
mod check;
mod collective;
mod convolution;
mod cross_entropy;
mod device;
mod device_numbers;
mod dropout;
mod dtype;
mod embedding;
mod error;
mod fetch;
pub mod flat;
pub mod fused;
pub mod gradients;
mod graph;
mod group;
mod hook;
mod images;
mod kernel_choices;
mod kernel_code;
mod kernels;
mod linear;
mod loss_flag;
pub mod matrix_step;
mod max_pool;
mod memory;
mod memory_format;
mod missing_ranks;
mod norm;
mod norm_residual;
mod object;
mod parameters;
mod profiler;
mod quantized;
mod random;
mod read_tensor;
mod recompute;
mod reducer;
pub mod regions;
mod reproducible;
mod rotary;
mod script;
mod sharder;
mod split;
mod store;
mod streams;
mod tensor_file;
mod tensor_id;
mod tensor_tree;
mod unallocated;
mod vocabulary_parallel;
mod warnings;
mod weight_ring;
mod work;
mod work_handle;

pub use activation::{
    Activation, Biased, GatedPair, activation, activation_adds_bias, activation_linear,
    gated_activation, gated_linear,
};
pub use attention::{AttentionOptions, attention, context_attention};
pub use autocast::{Autocast, emulated_kind};
pub use autograd::{
    BackwardOptions, GradOptions, backward, backward_from, backward_with, clear_gradient, grad,
    grad_enabled, gradient, set_gradient,
};
pub use backend::{Backend, GlooDevice};
pub use bucket::Bucket;
pub use check::Desync;
pub use collective::ReduceOp;
pub use convolution::convolution2d;
pub use cross_entropy::{
    CrossEntropyLoss, CrossEntropyOptions, cross_entropy, linear_cross_entropy,
};
#[doc(hidden)]
pub use device::forbid_waiting;
pub use device::{
    Cuda, CudaUnavailable, DEVICE_KINDS, DeviceExt, DeviceKind, DeviceMemory, DeviceUnavailable,
    GpuMath, MemoryInfo, TPU, Tpu, TpuUnavailable, begin_copy, copy_to_device, copy_to_host,
    cuda_compiled, cuda_devices, is_pinned, join_tpu_slice, pinned_like, tpu_compiled,
};
pub use device_numbers::DeviceNumbers;
pub use dropout::dropout;
pub use dtype::{dtype_of, kind_of, loaded_kind, tensor_from_bytes};
pub use embedding::{EmbeddingRows, embedding_sum, tied_embedding};
pub use error::{
    CollectiveError, Error, ErrorKind, Fault, Result, TorchError, is_out_of_memory_message,
};
pub use fetch::Fetch;
pub use graph::{Graph, GraphRecording, records_graphs};
#[doc(hidden)]
pub use graph::{GraphRecorder, RecordedGraph, record_graphs_with};
pub use group::{DEFAULT_GROUP_TIMEOUT, GroupOptions, ProcessGroup, Traffic};
pub use hook::{Compression, GradientHook};
pub use images::normalized_images;
pub use kernels::{KernelState, check_fused, prepare_kernels};
pub use linear::{LinearParameters, feed_forward, gelu_linear, linear};
pub use loss_flag::{LossFlag, first_elements_are_finite, first_elements_not_finite};
pub use max_pool::max_pool2d;
pub use memory::{
    Element, Elements, bytes, elements, from_vec, keep_freed_memory, release_memory,
    shift_allocations,
};
pub use memory_format::{channels_last, has_onednn, is_channels_last};
pub use norm::{
    BatchNormState, batch_norm, batch_norm_relu, batch_norm_relu_max_pool, residual_inputs,
    sync_batch_norm,
};
pub use norm_residual::{
    NormResidualOptions, ResidualBranch, ResidualNorm, norm_residual, norm_residual_adds_bias,
    norm_residual_seeds,
};
pub use parameters::{NamedTensor, Trainable};
pub use profiler::{ProfiledEvent, ProfilerOptions, Recording, Scope};
pub use quantized::QuantizedWeight;
pub use random::{rng_state, set_rng_state};
pub use read_tensor::{TensorRead, read_tensors};
pub use recompute::{is_recomputing, recomputed, try_recomputed};
pub use reducer::{BROADCAST_BYTES, JoinOptions, Reducer, ReducerOptions, Shadowed};
pub use reproducible::{Products, cpu_kernels, make_products_reproducible};
pub use rotary::{rotary, rotary_packed, rotary_pair};
pub use script::{Script, ScriptValue};
pub use sharder::{ExpertGroups, ExpertShardGroups, Sharder, SharderMeter, ShardingGroups};
pub use split::Split;
pub use store::{DEFAULT_STORE_TIMEOUT, Store, StoreServer, TcpStore, inherited_socket};
pub use streams::{SideStream, StreamEvent, Streams};
pub use tensor_file::TensorFile;
pub use tensor_id::TensorId;
pub use tensor_tree::{TensorTree, TreeSpec};
pub use unallocated::{has_memory, set_data, unallocated};
pub use vocabulary_parallel::{
    VocabularyPart, linear_vocabulary_parallel_cross_entropy, region_argmax, region_top_k,
    vocabulary_parallel_cross_entropy, vocabulary_parallel_embedding,
};
pub use warnings::WarningFilter;
pub use weight_ring::{HeldWeights, RingPart, WeightRing, WeightRingMeter, WeightSource};
pub use work::Work;

/// Returns the version of the libtorch that this program was built with, such as `2.13.0`.
#[must_use]
pub fn libtorch_version() -> String {
    bridge::ffi::libtorch_version()
}
