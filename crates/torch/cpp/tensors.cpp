#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <algorithm>
#include <iterator>
#include <mutex>

namespace brigade {

std::vector<at::Tensor> copy_handles(rust::Slice<const TensorRef> tensors) {
  std::vector<at::Tensor> out;
  out.reserve(tensors.size());
  for (const auto& t : tensors) {
    out.push_back(t.tensor);
  }
  return out;
}

std::optional<at::Tensor> optional_handle(rust::Slice<const TensorRef> tensor) {
  return tensor.empty() ? std::nullopt : std::optional<at::Tensor>(tensor[0].tensor);
}

std::unique_ptr<Tensor> tensor_from_blob(
    rust::Box<Blob> blob, rust::Slice<const int64_t> shape, int8_t kind) {
  auto* address = reinterpret_cast<void*>(blob_address(*blob));
  // Shared, since a deleter must be copyable; dropped with the last copy, also when from_blob throws.
  auto owner = std::make_shared<rust::Box<Blob>>(std::move(blob));
  auto release = [owner](void*) mutable { owner.reset(); };
  return std::make_unique<Tensor>(at::from_blob(
      address,
      at::IntArrayRef(shape.data(), shape.size()),
      release,
      at::TensorOptions().dtype(static_cast<at::ScalarType>(kind))));
}

std::unique_ptr<Tensor> copy_handle(const Tensor& tensor) {
  return std::make_unique<Tensor>(tensor);
}

size_t tensor_data(const Tensor& tensor) {
  return reinterpret_cast<size_t>(tensor.const_data_ptr());
}

size_t tensor_mutable_data(const Tensor& tensor) {
  return reinterpret_cast<size_t>(tensor.mutable_data_ptr());
}

bool tensor_is_plain(const Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
      tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj();
}

bool tensor_is_shared(const Tensor& tensor) {
  return !tensor.defined() || tensor.use_count() > 1 || !tensor.has_storage() ||
      tensor.storage().use_count() > 1;
}

void backward(const Tensor& loss, bool retain_graph, bool create_graph) {
  loss.backward({}, retain_graph, create_graph);
}

size_t tensor_identity(const Tensor& tensor) {
  return reinterpret_cast<size_t>(tensor.unsafeGetTensorImpl());
}

void clear_gradient(const Tensor& tensor) {
  auto handle = tensor;
  handle.mutable_grad().reset();
}

std::unique_ptr<Tensor> gradient(const Tensor& tensor) {
  const auto& grad = tensor.grad();
  return grad.defined() ? std::make_unique<Tensor>(grad) : nullptr;
}

void set_gradient(const Tensor& tensor, const Tensor& gradient) {
  auto handle = tensor;
  handle.mutable_grad() = gradient;
}

namespace {

// The generator that every random operation of a device takes when it is given none: -1 is the CPU, -2 the TPU.
at::Generator default_generator(int32_t number) {
  const auto device = number == -1 ? at::Device(at::kCPU)
      : number == -2               ? at::Device(at::kPrivateUse1, 0)
                                   : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(number));
  return at::globalContext().defaultGenerator(device);
}

} // namespace

rust::Vec<uint8_t> rng_state(int32_t device) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  const auto state = generator.get_state();
  const auto* bytes = state.const_data_ptr<uint8_t>();
  rust::Vec<uint8_t> out;
  out.reserve(state.numel());
  std::copy(bytes, bytes + state.numel(), std::back_inserter(out));
  return out;
}

void set_rng_state(int32_t device, rust::Slice<const uint8_t> state) {
  auto tensor = at::empty({static_cast<int64_t>(state.size())}, at::kByte);
  std::copy(state.begin(), state.end(), tensor.mutable_data_ptr<uint8_t>());
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(tensor);
}

bool grad_enabled() {
  return at::GradMode::is_enabled();
}

std::unique_ptr<Fetch> start_fetch(const Tensor& tensor) {
  at::NoGradGuard no_grad;
  auto fetch = std::make_unique<Fetch>();
  if (tensor.is_cpu()) {
    fetch->host = tensor.clone();
    return fetch;
  }
  if (tensor.device().is_privateuseone()) {
    // Without pinned memory and events.
    fetch->host = tensor.to(at::kCPU);
    return fetch;
  }
  // Into pinned memory, which a copy that does not wait needs.
  fetch->host = tensor.to(at::kCPU, /*non_blocking=*/true);
  const auto device = tensor.device();
  fetch->copied.emplace(device.type());
  fetch->copied->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return fetch;
}

int64_t fetched_number(const Fetch& fetch) {
  if (fetch.copied && !fetch.copied->query()) {
    fetch.copied->synchronize();
  }
  return fetch.host.item<int64_t>();
}

rust::String libtorch_version() {
  return TORCH_VERSION;
}

} // namespace brigade
