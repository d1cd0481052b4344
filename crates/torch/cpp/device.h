// Devices other than the CPU by libtorch's own interfaces, which need no headers of CUDA: the current device,
// streams and events, memory.
#pragma once

#include "rust/cxx.h"
#include "tensors.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

namespace brigade {

struct GpuMath;
struct MemoryInfo;
struct DeviceMemory;

// GPUs by what has registered itself with libtorch; 0 where nothing has.
int32_t registered_gpus() noexcept;
// The device of this thread from now on: streams, allocations and collectives without one take it.
void set_current_gpu(int32_t index);
// Gives this thread a stream of the pool as its current one, once it has done what the current one was given.
void use_pool_stream(int32_t gpu);
// The current streams of this thread on some GPUs, as numbers, and the same streams for another thread.
rust::Vec<int64_t> current_streams(rust::Slice<const int32_t> gpus);
void use_streams(rust::Slice<const int32_t> gpus, rust::Slice<const int64_t> streams);
// Makes a stream that no other thread has, and that is none of those which compute, this thread's.
int64_t enter_side_stream(int32_t gpu);
// Waits for the stream where it has work left, and keeps it for the next thread; this one has the default stream then.
void leave_side_stream(int32_t gpu, int64_t stream);
// Waits for everything that the GPU was given.
void synchronize_gpu(int32_t index);
// As the driver counts them.
MemoryInfo gpu_memory(int32_t index);
// What libtorch's allocator holds of it.
DeviceMemory device_memory(int32_t gpu);
rust::String gpu_hardware(int32_t index);
// Whether its matrix units have bfloat16.
bool gpu_has_bf16(int32_t index);
GpuMath gpu_math();
void set_gpu_math(GpuMath math) noexcept;

// A point in the work of a stream.
struct StreamEvent {
  c10::Event event;
  c10::Device device;
};

// Behind what this thread's current stream was given.
std::unique_ptr<StreamEvent> record_event(int32_t gpu);
// Whether the device has done what comes before it.
bool event_is_done(const StreamEvent& event);
// Has the host wait for what comes before it.
void wait_for_event(const StreamEvent& event);
// Makes this thread's current stream wait for the event, and use the tensors from then on; the host does not wait.
void follow_event(const StreamEvent& event, rust::Slice<const TensorRef> tensors);
// Begins a copy to a GPU through pinned memory, on this thread's current stream.
std::unique_ptr<Tensor> copy_to_gpu(const Tensor& from, int32_t gpu);
// Begins a copy into pinned memory: that of `into`, or new memory.
std::unique_ptr<Tensor> copy_to_host(const Tensor& from, rust::Slice<const TensorRef> into);
// Pinned memory of the host for a tensor of the same shape, strides and type.
std::unique_ptr<Tensor> pinned_like(const Tensor& like);
bool is_pinned(const Tensor& tensor);

} // namespace brigade
