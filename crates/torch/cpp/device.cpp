#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

namespace brigade {

namespace {

c10::Device gpu(int32_t index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA);
}

} // namespace

int32_t registered_gpus() noexcept {
  const auto* registered =
      c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].load();
  return registered == nullptr ? 0 : registered->deviceCount();
}

void set_current_gpu(int32_t index) {
  guard().setDevice(gpu(index));
}

void use_pool_stream(int32_t index) {
  const auto implementation = guard();
  // What was computed on the default stream so far is used on the other one from now on.
  implementation.synchronizeDevice(static_cast<c10::DeviceIndex>(index));
  implementation.exchangeStream(implementation.getStreamFromGlobalPool(gpu(index)));
}

rust::Vec<int64_t> current_streams(rust::Slice<const int32_t> gpus) {
  rust::Vec<int64_t> out;
  for (const auto index : gpus) {
    out.push_back(guard().getStream(gpu(index)).id());
  }
  return out;
}

void use_streams(rust::Slice<const int32_t> gpus, rust::Slice<const int64_t> streams) {
  TORCH_CHECK(gpus.size() == streams.size(), gpus.size(), " GPUs and ", streams.size(), " streams");
  for (size_t i = 0; i < gpus.size(); ++i) {
    guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, gpu(gpus[i]), streams[i]));
  }
}

namespace {

// Side streams that nothing uses, by GPU. An allocator gives a stream's memory to that stream alone: threads that took a
// new stream for each epoch would leave as much unused memory behind for each of libtorch's 32.
struct UnusedStreams {
  std::mutex mutex;
  std::map<int32_t, std::vector<int64_t>> of;
};

UnusedStreams& unused_streams() {
  static UnusedStreams streams;
  return streams;
}

} // namespace

int64_t enter_side_stream(int32_t index) {
  auto& unused = unused_streams();
  const std::lock_guard lock(unused.mutex);
  auto& of_gpu = unused.of[index];
  // From libtorch's pool, whose streams live as long as the process. From that of high priority, which is another one
  // than those that compute are from: a stream that is recorded in a graph may not get work of another thread.
  const auto stream = of_gpu.empty()
      ? guard().getStreamFromGlobalPool(gpu(index), /*isHighPriority=*/true)
      : c10::Stream(c10::Stream::UNSAFE, gpu(index), of_gpu.back());
  guard().exchangeStream(stream);
  if (!of_gpu.empty()) {
    of_gpu.pop_back();
  }
  return stream.id();
}

void leave_side_stream(int32_t index, int64_t id) {
  const c10::Stream stream(c10::Stream::UNSAFE, gpu(index), id);
  // Asked first: the question does not wait, and most often there is nothing to wait for.
  if (!guard().queryStream(stream)) {
    // By an event: libtorch refuses to wait for a stream while a thread has waits forbidden, which are the waits of
    // those that train.
    c10::Event done(c10::kCUDA);
    done.record(stream);
    done.synchronize();
  }
  if (guard().getStream(gpu(index)) == stream) {
    guard().exchangeStream(guard().getDefaultStream(gpu(index)));
  }
  auto& unused = unused_streams();
  const std::lock_guard lock(unused.mutex);
  unused.of[index].push_back(id);
}

std::unique_ptr<StreamEvent> record_event(int32_t index) {
  c10::Event event(c10::kCUDA);
  event.record(guard().getStream(gpu(index)));
  return std::make_unique<StreamEvent>(StreamEvent{std::move(event), gpu(index)});
}

bool event_is_done(const StreamEvent& event) {
  return event.event.query();
}

void wait_for_event(const StreamEvent& event) {
  event.event.synchronize();
}

void follow_event(const StreamEvent& event, rust::Slice<const TensorRef> tensors) {
  const auto current = guard().getStream(event.device);
  event.event.block(current);
  for (const auto& reference : tensors) {
    // The memory may be that of the other stream, which may not give it away before this one has done with it.
    if (reference.tensor.device() == event.device && reference.tensor.has_storage()) {
      at::Tensor(reference.tensor).record_stream(current);
    }
  }
}

std::unique_ptr<Tensor> copy_to_gpu(const Tensor& from, int32_t index) {
  at::NoGradGuard no_grad;
  // A copy from ordinary memory makes the host wait. libtorch keeps pinned memory until the copies from it are done,
  // and for the next one.
  const auto source = from.is_cpu() && !from.is_pinned() ? from.pin_memory() : from;
  return std::make_unique<Tensor>(source.to(gpu(index), /*non_blocking=*/true));
}

void synchronize_gpu(int32_t index) {
  guard().synchronizeDevice(static_cast<c10::DeviceIndex>(index));
}

MemoryInfo gpu_memory(int32_t index) {
  const auto [free, total] =
      at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(static_cast<c10::DeviceIndex>(index));
  return MemoryInfo{static_cast<uint64_t>(free), static_cast<uint64_t>(total)};
}

DeviceMemory device_memory(int32_t gpu) {
  const auto stats =
      at::getDeviceAllocator(at::kCUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(gpu));
  // Of the small and the large pool together.
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return DeviceMemory{
      static_cast<uint64_t>(stats.allocated_bytes[all].current),
      static_cast<uint64_t>(stats.allocated_bytes[all].peak),
      static_cast<uint64_t>(stats.reserved_bytes[all].current)};
}

GpuMath gpu_math() {
  const auto& context = at::globalContext();
  return {
      context.allowTF32CuBLAS() && context.allowTF32CuDNN(), context.benchmarkCuDNN(), context.deterministicAlgorithms()};
}

void set_gpu_math(GpuMath math) noexcept {
  auto& context = at::globalContext();
  context.setAllowTF32CuBLAS(math.tf32);
  context.setAllowTF32CuDNN(math.tf32);
  context.setBenchmarkCuDNN(math.benchmark);
  context.setDeterministicCuDNN(math.deterministic);
  context.setDeterministicAlgorithms(math.deterministic, /*warn_only=*/false);
  if (math.deterministic) {
    // cuBLAS and libtorch read it at the first product on a GPU.
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  }
}

#ifndef BRIGADE_CUDA
// Of devices that something else has registered with libtorch.
rust::String gpu_hardware(int32_t index) {
  return gpu(index).str();
}

bool gpu_has_bf16(int32_t) {
  return true;
}
#endif

std::unique_ptr<Tensor> copy_to_host(const Tensor& from, rust::Slice<const TensorRef> into) {
  at::NoGradGuard no_grad;
  const auto given = optional_handle(into);
  if (given) {
    given->copy_(from, /*non_blocking=*/!from.device().is_privateuseone());
    return std::make_unique<Tensor>(*given);
  }
  // Into pinned memory, since it does not wait; where there is none, it waits.
  const bool non_blocking = !from.device().is_privateuseone();
  return std::make_unique<Tensor>(from.to(at::kCPU, from.scalar_type(), non_blocking, /*copy=*/true));
}

std::unique_ptr<Tensor> pinned_like(const Tensor& like) {
  const auto options = like.options().device(at::kCPU).pinned_memory(true);
  return std::make_unique<Tensor>(at::empty_strided(like.sizes(), like.strides(), options));
}

bool is_pinned(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_pinned();
}

} // namespace brigade
