#include "brigade-torch/src/bridge.rs.h"
#include "native_bf16.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <map>

namespace brigade {

AutocastState autocast_enter(int8_t device, const AutocastState& next) {
  const auto type = static_cast<at::DeviceType>(device);
  AutocastState before;
  before.enabled = at::autocast::is_autocast_enabled(type);
  before.dtype = static_cast<int8_t>(at::autocast::get_autocast_dtype(type));
  before.cache = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(type, next.enabled);
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(next.dtype));
  at::autocast::set_autocast_cache_enabled(next.cache);
  at::autocast::increment_nesting();
  return before;
}

void autocast_leave(int8_t device, const AutocastState& before) noexcept {
  const auto type = static_cast<at::DeviceType>(device);
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(type, before.enabled);
  at::autocast::set_autocast_dtype(type, static_cast<at::ScalarType>(before.dtype));
  at::autocast::set_autocast_cache_enabled(before.cache);
}

int8_t emulated_type(const Tensor& operand) {
  const at::Device device = operand.device();
  at::ScalarType wanted = operand.scalar_type();
  if (at::autocast::is_autocast_enabled(device.type()) && at::isFloatingType(wanted) && wanted != at::kDouble) {
    wanted = at::autocast::get_autocast_dtype(device.type());
  }
  return product_type(wanted, device) == wanted ? -1 : static_cast<int8_t>(wanted);
}

bool is_channels_last(const Tensor& tensor) {
  // Not `is_contiguous`: with one channel, or one pixel, that is true of both orders, and the kernels
  // go by what the strides suggest.
  return tensor.dim() == 4 && tensor.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

std::unique_ptr<Tensor> channels_last(const Tensor& tensor) {
  if (is_channels_last(tensor)) {
    return std::make_unique<Tensor>(tensor);
  }
  return std::make_unique<Tensor>(tensor.to(
      tensor.options().memory_format(at::MemoryFormat::ChannelsLast),
      /*non_blocking=*/false,
      /*copy=*/true));
}

std::unique_ptr<Tensor> unscale_gradients(
    rust::Slice<const TensorRef> gradients, double inverse_scale) {
  at::NoGradGuard no_grad;
  const auto handles = copy_handles(gradients);
  TORCH_CHECK(!handles.empty(), "no gradient to unscale");
  return unscale_gradients_by(
      gradients, at::full({}, inverse_scale, handles[0].options().dtype(at::kFloat)));
}

std::unique_ptr<Tensor> unscale_gradients_by(
    rust::Slice<const TensorRef> gradients, const Tensor& inverse_scale) {
  at::NoGradGuard no_grad;
  const auto handles = copy_handles(gradients);
  TORCH_CHECK(!handles.empty(), "no gradient to unscale");
  const auto inverse = inverse_scale.reshape({});
  auto found = at::zeros({1}, handles[0].options().dtype(at::kFloat));
  // One kernel for all tensors of a type.
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const auto& gradient : handles) {
    by_type[gradient.scalar_type()].push_back(gradient);
  }
  for (auto& [type, list] : by_type) {
    if (list[0].device().is_privateuseone()) {
      // TorchTPU lacks the kernel.
      for (auto& gradient : list) {
        found.logical_or_(at::isfinite(gradient).all().logical_not());
        gradient.mul_(inverse);
      }
      continue;
    }
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, inverse);
  }
  return std::make_unique<Tensor>(std::move(found));
}

std::unique_ptr<Tensor> norm_of_all(rust::Slice<const TensorRef> tensors, double p) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> handles;
  auto widest = at::kFloat;
  for (auto& handle : copy_handles(tensors)) {
    if (handle.numel() > 0) {
      widest = at::promoteTypes(widest, handle.scalar_type());
      handles.push_back(std::move(handle));
    }
  }
  if (handles.empty()) {
    return std::make_unique<Tensor>(at::zeros({}));
  }
  auto norms = at::_foreach_norm(handles, p);
  for (auto& norm : norms) {
    norm = norm.to(widest);
  }
  return std::make_unique<Tensor>(at::linalg_vector_norm(at::stack(norms), p));
}

void multiply_all(rust::Slice<const TensorRef> tensors, const Tensor& factor) {
  at::NoGradGuard no_grad;
  if (!tensors.empty()) {
    at::_foreach_mul_(copy_handles(tensors), factor);
  }
}

void clamp_all(rust::Slice<const TensorRef> tensors, double limit) {
  at::NoGradGuard no_grad;
  for (auto& tensor : copy_handles(tensors)) {
    tensor.clamp_(-limit, limit);
  }
}

void release_memory(bool cuda) {
  if (cuda) {
    at::getDeviceAllocator(at::kCUDA)->emptyCache();
    at::getHostAllocator(at::kCUDA)->empty_cache();
  }
  release_freed_memory();
}

bool has_onednn() {
  return at::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
}

} // namespace brigade
