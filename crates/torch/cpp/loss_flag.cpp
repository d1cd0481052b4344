#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cmath>
#include <mutex>

namespace brigade {

namespace {

// In row-major order, which is also first in memory wherever strides are not negative. Undefined for a tensor
// without elements.
at::Tensor first_element(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0) {
    return {};
  }
  auto first = tensor.detach();
  while (first.dim() > 0) {
    first = first.select(0, 0);
  }
  return first;
}

} // namespace

struct LossFlag::State {
  std::atomic<bool> reached{false};
  std::atomic<bool> raised{false};
  std::mutex mutex;
  at::Tensor value;

  void on_gradient(const at::Tensor& gradient) {
    reached = true;
    if (!raised) {
      return;
    }
    at::NoGradGuard no_grad;
    std::lock_guard<std::mutex> lock(mutex);
    auto first = first_element(gradient);
    if (first.defined() && value.defined()) {
      first.add_(value);
      value.reset();
      raised = false;
    }
  }
};

std::unique_ptr<LossFlag> new_loss_flag(rust::Slice<const TensorRef> parameters) {
  auto out = std::make_unique<LossFlag>();
  out->state = std::make_shared<LossFlag::State>();
  for (const auto& parameter : copy_handles(parameters)) {
    // Before the gradient is added to the parameter's, and so before the reducer sees it.
    parameter.register_hook(
        [state = out->state](const at::Tensor& gradient) { state->on_gradient(gradient); });
  }
  return out;
}

void loss_flag_raise(const LossFlag& flag, const Tensor& value) {
  std::lock_guard<std::mutex> lock(flag.state->mutex);
  flag.state->value = value;
  flag.state->raised = true;
}

bool loss_flag_lower(const LossFlag& flag) {
  std::lock_guard<std::mutex> lock(flag.state->mutex);
  flag.state->value.reset();
  flag.state->raised = false;
  return flag.state->reached.exchange(false);
}

bool first_elements_are_finite(rust::Slice<const TensorRef> tensors) {
  at::NoGradGuard no_grad;
  for (const auto& tensor : tensors) {
    const auto first = first_element(tensor.tensor);
    if (!first.defined()) {
      continue;
    }
    // Complex numbers, too.
    const auto finite = first.is_complex()
        ? at::isfinite(first).item<bool>()
        : std::isfinite(first.item<double>());
    if (!finite) {
      return false;
    }
  }
  return true;
}

std::unique_ptr<Tensor> first_elements_not_finite(rust::Slice<const TensorRef> tensors) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> found;
  for (const auto& tensor : tensors) {
    auto first = first_element(tensor.tensor);
    if (first.defined()) {
      found.push_back(at::isfinite(first).reshape({1}));
    }
  }
  if (found.empty()) {
    return std::make_unique<Tensor>(at::zeros({1}, at::kLong));
  }
  const auto finite = at::cat(found).all();
  return std::make_unique<Tensor>(finite.logical_not().to(at::kLong).reshape({1}));
}

} // namespace brigade
