#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

namespace brigade {

namespace {

// The CPU kernels take every tensor for a row of numbers. Some do not compare strides; others copy what is
// not contiguous in its dimensions' order (channels_last) and back, which takes longer than the step. So
// they are given rows. A gradient that lies otherwise than its parameter (set by hand) is copied, and so
// is a parameter with gaps (a view), which gets its values back at the end.
class Rows {
 public:
  Rows(
      rust::Slice<const TensorRef> parameters,
      rust::Slice<const TensorRef> gradients,
      std::initializer_list<std::vector<at::Tensor>*> states)
      : parameters(copy_handles(parameters)), gradients(copy_handles(gradients)) {
    TORCH_CHECK(
        this->parameters.size() == this->gradients.size(),
        this->parameters.size(), " parameters have ", this->gradients.size(), " gradients");
    for (size_t i = 0; i < this->parameters.size(); ++i) {
      auto& parameter = this->parameters[i];
      auto& gradient = this->gradients[i];
      TORCH_CHECK(
          gradient.layout() == at::kStrided,
          "this optimizer takes dense gradients only; found one of layout ", gradient.layout());
      TORCH_CHECK(
          gradient.sizes() == parameter.sizes(),
          "a parameter of shape ", parameter.sizes(), " has a gradient of shape ", gradient.sizes());
      if (!parameter.is_non_overlapping_and_dense()) {
        auto copy = at::empty_like(parameter).copy_(parameter);
        with_gaps_.emplace_back(std::exchange(parameter, copy), copy);
      }
      if (gradient.strides() != parameter.strides()) {
        gradient = at::empty_like(parameter).copy_(gradient);
      }
      if (parameter.is_contiguous() && gradient.is_contiguous()) {
        continue;
      }
      const bool alike = std::all_of(states.begin(), states.end(), [&](const auto* state) {
        return state->empty() ||
            (i < state->size() && (*state)[i].strides() == parameter.strides());
      });
      if (alike) {
        as_row(parameter);
        as_row(gradient);
        for (auto* state : states) {
          if (!state->empty()) {
            as_row((*state)[i]);
          }
        }
      }
    }
  }

  void write_back() const {
    for (const auto& [parameter, copy] : with_gaps_) {
      parameter.copy_(copy);
    }
  }

  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;

 private:
  static void as_row(at::Tensor& tensor) {
    tensor = tensor.as_strided({tensor.numel()}, {1});
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;
};

} // namespace

void fused_adam(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> exp_avgs,
    rust::Slice<const TensorRef> exp_avg_sqs,
    rust::Slice<const TensorRef> max_exp_avg_sqs,
    rust::Slice<const TensorRef> steps,
    const AdamStep& step) {
  at::NoGradGuard no_grad;
  auto m = copy_handles(exp_avgs);
  auto v = copy_handles(exp_avg_sqs);
  auto vmax = copy_handles(max_exp_avg_sqs);
  const Rows rows(parameters, gradients, {&m, &v, &vmax});
  const auto t = copy_handles(steps);
  if (step.decoupled) {
    at::_fused_adamw_(
        rows.parameters, rows.gradients, m, v, vmax, t, step.lr, step.beta1, step.beta2,
        step.weight_decay, step.eps, step.amsgrad, step.maximize);
  } else {
    at::_fused_adam_(
        rows.parameters, rows.gradients, m, v, vmax, t, step.lr, step.beta1, step.beta2,
        step.weight_decay, step.eps, step.amsgrad, step.maximize);
  }
  rows.write_back();
}

void fused_sgd(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> momentum_buffers,
    const SgdStep& step) {
  at::NoGradGuard no_grad;
  auto momentum = copy_handles(momentum_buffers);
  const Rows rows(parameters, gradients, {&momentum});
  at::_fused_sgd_(
      rows.parameters, rows.gradients, momentum, step.weight_decay,
      step.momentum, step.lr, step.dampening, step.nesterov, step.maximize, step.first);
  rows.write_back();
}

void fused_adagrad(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> state_sums,
    rust::Slice<const TensorRef> steps,
    const AdagradStep& step) {
  at::NoGradGuard no_grad;
  auto sums = copy_handles(state_sums);
  const Rows rows(parameters, gradients, {&sums});
  at::_fused_adagrad_(
      rows.parameters, rows.gradients, sums, copy_handles(steps), step.lr,
      step.lr_decay, step.weight_decay, step.eps, step.maximize);
  rows.write_back();
}

} // namespace brigade
