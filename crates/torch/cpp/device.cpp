#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>

namespace brigade {

namespace {

c10::Device gpu(int32_t index) {
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA);
}

c10::Stream side_stream(int32_t index) {
  // From libtorch's pool, whose streams live as long as the process: a new one for each epoch costs nothing. From
  // that of high priority, which is another one than those that compute are from: a stream that is recorded in a
  // graph may not get work of another thread.
  return guard().getStreamFromGlobalPool(gpu(index), /*isHighPriority=*/true);
}

void finish(const c10::Stream& stream) {
  // Asked first: the question does not wait, and most often there is nothing to wait for.
  if (!guard().queryStream(stream)) {
    guard().synchronizeStream(stream);
  }
}

at::Tensor through_pinned_memory(const at::Tensor& tensor, c10::Device device) {
  // A copy from ordinary memory makes the host wait. libtorch keeps pinned memory until the copies from it are done,
  // and for the next one.
  const auto pinned = tensor.is_pinned() ? tensor : tensor.pin_memory();
  return pinned.to(device, /*non_blocking=*/true);
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

rust::Vec<int64_t> side_streams(rust::Slice<const int32_t> gpus) {
  rust::Vec<int64_t> out;
  for (const auto index : gpus) {
    out.push_back(side_stream(index).id());
  }
  return out;
}

void finish_streams(rust::Slice<const int32_t> gpus, rust::Slice<const int64_t> streams) {
  TORCH_CHECK(gpus.size() == streams.size(), gpus.size(), " GPUs and ", streams.size(), " streams");
  for (size_t i = 0; i < gpus.size(); ++i) {
    finish(c10::Stream(c10::Stream::UNSAFE, gpu(gpus[i]), streams[i]));
  }
}

std::unique_ptr<StreamEvent> record_event(int32_t index) {
  c10::Event event(c10::kCUDA);
  event.record(guard().getStream(gpu(index)));
  return std::make_unique<StreamEvent>(StreamEvent{std::move(event), gpu(index)});
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
  return std::make_unique<Tensor>(
      from.is_cpu() ? through_pinned_memory(from, gpu(index)) : from.to(gpu(index), /*non_blocking=*/true));
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

void set_gpu_math(bool tf32, bool benchmark, bool deterministic) noexcept {
  auto& context = at::globalContext();
  context.setAllowTF32CuBLAS(tf32);
  context.setAllowTF32CuDNN(tf32);
  context.setBenchmarkCuDNN(benchmark);
  context.setDeterministicCuDNN(deterministic);
  context.setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
  if (deterministic) {
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
    given->copy_(from, /*non_blocking=*/true);
    return std::make_unique<Tensor>(*given);
  }
  // Into pinned memory, since it does not wait.
  return std::make_unique<Tensor>(from.to(at::kCPU, from.scalar_type(), /*non_blocking=*/true, /*copy=*/true));
}

bool is_pinned(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_pinned();
}

std::unique_ptr<CopyStream> new_copy_stream(int32_t index) {
  return std::make_unique<CopyStream>(CopyStream{side_stream(index)});
}

void enter_copy_stream(const CopyStream& stream) {
  guard().exchangeStream(stream.stream);
}

void finish_copy_stream(const CopyStream& stream) {
  finish(stream.stream);
}

std::unique_ptr<StagedCopy> stage(
    const CopyStream& stream, rust::Slice<const TensorRef> tensors) {
  at::NoGradGuard no_grad;
  const auto device = stream.stream.device();
  const auto current = guard().getStream(device);
  if (current != stream.stream) {
    // What lies on the device already was computed by this thread: the copies, and their event, come behind it.
    c10::Event computed(device.type());
    computed.record(current);
    computed.block(stream.stream);
  }
  // Memory that is allocated here belongs to this stream: it can be written at once, since nothing that
  // computes has ever used it without an event in between.
  c10::StreamGuard on(stream.stream);
  std::vector<at::Tensor> out;
  out.reserve(tensors.size());
  for (const auto& reference : tensors) {
    const at::Tensor& tensor = reference.tensor;
    if (tensor.is_cpu()) {
      out.push_back(through_pinned_memory(tensor, device));
    } else {
      out.push_back(tensor.device() == device ? tensor : tensor.to(device));
    }
  }
  c10::Event copied(device.type());
  copied.record(stream.stream);
  return std::make_unique<StagedCopy>(StagedCopy{std::move(out), std::move(copied)});
}

std::unique_ptr<std::vector<Tensor>> staged_tensors(const StagedCopy& copy) {
  auto out = std::make_unique<std::vector<Tensor>>(copy.tensors);
  for (const auto& tensor : copy.tensors) {
    const auto implementation = c10::impl::VirtualGuardImpl(tensor.device().type());
    const auto current = implementation.getStream(tensor.device());
    copy.copied.block(current);
    // The memory is the copying stream's, which may not give it to the next batch before this stream has done
    // with it.
    tensor.record_stream(current);
  }
  return out;
}

} // namespace brigade
