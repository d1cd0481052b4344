#include "brigade-torch/src/bridge.rs.h"

#include "../foreach.h"
#include "optimizer.h"

#include "optimizer.cu"

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace brigade {

namespace {

// Arguments of kernels have 4 KiB on every GPU.
static_assert(sizeof(AdamArguments) <= 4096 && sizeof(SgdArguments) <= 4096);
static_assert(kOptimizerChunk % (8 * kOptimizerThreads) == 0);

OptimizerNumbers optimizer_numbers(double weight_decay, bool is_decoupled, bool maximize, const StepNumbers& now) {
  OptimizerNumbers out{};
  if (now.lr.on_host()) {
    out.lr = now.lr.host();
  } else {
    out.lr_on_device = now.lr.device().const_data_ptr<double>();
  }
  out.inverse_scale = now.inverse_scale.defined() ? now.inverse_scale.const_data_ptr<double>() : nullptr;
  out.skip = now.can_skip() ? now.skip.const_data_ptr<bool>() : nullptr;
  out.weight_decay = weight_decay;
  out.is_decoupled = is_decoupled;
  out.maximize = maximize;
  return out;
}

OptimizerTensor optimizer_tensor(const OptimizerRow& row, size_t states) {
  const int64_t count = row.parameter.numel();
  const auto is_row = [&](const at::Tensor& t) {
    return t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() == count &&
        t.device() == row.parameter.device();
  };
  TORCH_CHECK(
      row.parameter.is_cuda() && is_row(row.parameter) && is_row(row.gradient) && row.states.size() == states,
      "the kernels do not take a parameter of ", row.parameter.sizes(), " and ", row.parameter.scalar_type());
  OptimizerTensor out{};
  out.parameter = row.parameter.mutable_data_ptr<float>();
  out.gradient = row.gradient.const_data_ptr<float>();
  for (size_t i = 0; i < states; ++i) {
    TORCH_CHECK(is_row(row.states[i]), "the kernels do not take a state of ", row.states[i].sizes());
    out.states[i] = row.states[i].mutable_data_ptr<float>();
  }
  if (row.steps.defined()) {
    out.steps = row.steps.const_data_ptr<float>();
  }
  if (row.copy.defined()) {
    TORCH_CHECK(
        row.copy.is_contiguous() && row.copy.numel() >= count && row.copy.device() == row.parameter.device(),
        "the kernels do not take a copy of ", row.copy.sizes(), " for ", count, " values");
    out.copy = row.copy.mutable_data_ptr();
  }
  out.count = count;
  return out;
}

// Launches the kernel for all rows. `a` has the numbers.
template <typename Arguments>
void launch_steps(
    kernels::Program& program, const std::string& kernel, const std::vector<OptimizerRow>& rows, size_t states,
    Arguments& a) {
  auto& tensors = a.tensors;
  unsigned blocks = 0;
  const auto launch = [&] {
    if (blocks > 0) {
      program.launch(kernel, {blocks, 1}, {kOptimizerThreads, 1}, /*shared=*/0, a);
    }
    tensors = {};
    blocks = 0;
  };
  for (const auto& row : rows) {
    if (row.parameter.numel() == 0) {
      continue;
    }
    blocks += kernels::quotient_up(row.parameter.numel(), kOptimizerChunk);
    tensors.of[tensors.count] = optimizer_tensor(row, states);
    tensors.ends[tensors.count] = blocks;
    if (++tensors.count == kOptimizerTensors) {
      launch();
    }
  }
  launch();
}

} // namespace

void adam_gpu(
    kernels::Program& program, const std::vector<OptimizerRow>& rows, const AdamStep& step, const StepNumbers& now) {
  AdamArguments a{};
  a.numbers = optimizer_numbers(step.weight_decay, step.decoupled, step.maximize, now);
  a.beta1 = step.beta1;
  a.beta2 = step.beta2;
  a.eps = step.eps;
  launch_steps(program, step.amsgrad ? "optimizer_adam_amsgrad" : "optimizer_adam", rows, step.amsgrad ? 3 : 2, a);
}

void sgd_gpu(
    kernels::Program& program, const std::vector<OptimizerRow>& rows, const SgdStep& step, const StepNumbers& now) {
  SgdArguments a{};
  a.numbers = optimizer_numbers(step.weight_decay, step.decoupled, step.maximize, now);
  a.momentum = step.momentum;
  a.dampening = step.dampening;
  a.nesterov = step.nesterov;
  a.is_first = step.first;
  const bool has_buffer = step.momentum != 0;
  launch_steps(program, has_buffer ? "optimizer_sgd_momentum" : "optimizer_sgd", rows, has_buffer ? 1 : 0, a);
}

} // namespace brigade
