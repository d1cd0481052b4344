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

// Whether the elements of two tensors of one shape lie in the same order.
bool same_order(const at::Tensor& one, const at::Tensor& other) {
  for (int64_t dimension = 0; dimension < one.dim(); ++dimension) {
    if (one.size(dimension) > 1 && one.stride(dimension) != other.stride(dimension)) {
      return false;
    }
  }
  return true;
}

// The CPU kernels take every tensor for a row of numbers, as long as the parameter: they compare neither
// sizes nor strides, and copy what is not contiguous in its dimensions' order (channels_last) and back,
// which takes longer than the step. So they are given rows, after everything was compared here. A gradient
// that lies otherwise than its parameter (set by hand) is copied, and so is a parameter with gaps (a
// view), which gets its values back at the end.
class Rows {
 public:
  Rows(
      rust::Slice<const TensorRef> parameters,
      rust::Slice<const TensorRef> gradients,
      std::initializer_list<std::vector<at::Tensor>*> states)
      : parameters(copy_handles(parameters)), gradients(copy_handles(gradients)) {
    const size_t count = this->parameters.size();
    TORCH_CHECK(
        count == this->gradients.size(),
        count, " parameters have ", this->gradients.size(), " gradients");
    for (const auto* state : states) {
      TORCH_CHECK(
          state->empty() || state->size() == count,
          count, " parameters have ", state->size(), " states of a kind");
    }
    for (size_t i = 0; i < count; ++i) {
      auto& parameter = this->parameters[i];
      auto& gradient = this->gradients[i];
      TORCH_CHECK(parameter.defined(), "parameter ", i, " is undefined");
      TORCH_CHECK(
          parameter.layout() == at::kStrided && at::isFloatingType(parameter.scalar_type()) &&
              parameter.device() == this->parameters[0].device(),
          "an optimizer steps dense parameters of floating-point numbers on one device; found one in ",
          parameter.scalar_type(), " on ", parameter.device(), " of layout ", parameter.layout());
      check(parameter, gradient, "gradient");
      if (!parameter.is_non_overlapping_and_dense()) {
        auto copy = at::empty_like(parameter).copy_(parameter);
        with_gaps_.emplace_back(std::exchange(parameter, copy), copy);
      }
      if (!gradient.is_non_overlapping_and_dense() || !same_order(parameter, gradient)) {
        gradient = at::empty_like(parameter).copy_(gradient);
      }
      as_row(parameter);
      as_row(gradient);
      for (auto* state : states) {
        if (state->empty()) {
          continue;
        }
        auto& own = (*state)[i];
        // A parameter is a row by now: its own shape is that of the first handle.
        const auto& shaped = parameters[i].tensor;
        check(shaped, own, "state");
        TORCH_CHECK(
            own.is_non_overlapping_and_dense(),
            "a state of shape ", own.sizes(), " has gaps or overlaps in memory (strides ",
            own.strides(), ")");
        const auto& order = with_gaps_.empty() || !with_gaps_.back().second.is_alias_of(parameter)
            ? shaped
            : with_gaps_.back().second;
        TORCH_CHECK(
            same_order(order, own),
            "the elements of a state of shape ", own.sizes(),
            " lie in another order than the parameter's: strides ", own.strides(), ", not ",
            order.strides());
        as_row(own);
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
  static void check(const at::Tensor& parameter, const at::Tensor& other, const char* what) {
    TORCH_CHECK(other.defined(), "the ", what, " of a parameter is undefined");
    TORCH_CHECK(
        other.layout() == at::kStrided,
        "this optimizer takes dense gradients only; found a ", what, " of layout ", other.layout());
    TORCH_CHECK(
        other.sizes() == parameter.sizes() && other.device() == parameter.device() &&
            other.scalar_type() == parameter.scalar_type() && !other.is_neg(),
        "a parameter of shape ", parameter.sizes(), " on ", parameter.device(), " in ",
        parameter.scalar_type(), " has a ", what, " of shape ", other.sizes(), " on ",
        other.device(), " in ", other.scalar_type());
  }

  static void as_row(at::Tensor& tensor) {
    tensor = tensor.as_strided({tensor.numel()}, {1});
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;
};

// Counts that the kernels read one number of, beside the parameters.
std::vector<at::Tensor> counts(
    rust::Slice<const TensorRef> steps, const std::vector<at::Tensor>& parameters) {
  auto out = copy_handles(steps);
  TORCH_CHECK(
      out.size() == parameters.size(),
      parameters.size(), " parameters have ", out.size(), " counts of steps");
  for (const auto& count : out) {
    TORCH_CHECK(
        count.defined() && count.layout() == at::kStrided && count.scalar_type() == at::kFloat &&
            count.numel() == 1 && count.device() == parameters[0].device(),
        "a count of steps is one number in Float on the parameters' device, not ",
        count.toString(), " of shape ", count.defined() ? count.sizes() : at::IntArrayRef());
  }
  return out;
}

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
  const auto t = counts(steps, rows.parameters);
  TORCH_CHECK(
      m.size() == t.size() && v.size() == t.size() && vmax.size() == (step.amsgrad ? t.size() : 0),
      "Adam wants two means for each parameter, with amsgrad also the largest: found ", m.size(),
      ", ", v.size(), " and ", vmax.size(), " for ", t.size());
  if (t.empty()) {
    return;
  }
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
  TORCH_CHECK(
      step.momentum == 0 || momentum.size() == rows.parameters.size(),
      "SGD with a momentum wants a buffer for each parameter: found ", momentum.size(), " for ",
      rows.parameters.size());
  if (rows.parameters.empty()) {
    return;
  }
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
  const auto t = counts(steps, rows.parameters);
  TORCH_CHECK(
      sums.size() == t.size(),
      "Adagrad wants a sum for each parameter: found ", sums.size(), " for ", t.size());
  if (t.empty()) {
    return;
  }
  at::_fused_adagrad_(
      rows.parameters, rows.gradients, sums, t, step.lr,
      step.lr_decay, step.weight_decay, step.eps, step.maximize);
  rows.write_back();
}

} // namespace brigade
