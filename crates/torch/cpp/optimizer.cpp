#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/core/grad_mode.h>

namespace brigade {

void fused_adam(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> exp_avgs,
    rust::Slice<const TensorRef> exp_avg_sqs,
    rust::Slice<const TensorRef> max_exp_avg_sqs,
    rust::Slice<const TensorRef> steps,
    const AdamStep& step) {
  at::NoGradGuard no_grad;
  auto kernel = [&](auto run) {
    run(copy_handles(parameters),
        copy_handles(gradients),
        copy_handles(exp_avgs),
        copy_handles(exp_avg_sqs),
        copy_handles(max_exp_avg_sqs),
        copy_handles(steps));
  };
  kernel([&](const std::vector<at::Tensor>& p,
             const std::vector<at::Tensor>& g,
             const std::vector<at::Tensor>& m,
             const std::vector<at::Tensor>& v,
             const std::vector<at::Tensor>& vmax,
             const std::vector<at::Tensor>& t) {
    if (step.decoupled) {
      at::_fused_adamw_(
          p, g, m, v, vmax, t, step.lr, step.beta1, step.beta2, step.weight_decay, step.eps,
          step.amsgrad, step.maximize);
    } else {
      at::_fused_adam_(
          p, g, m, v, vmax, t, step.lr, step.beta1, step.beta2, step.weight_decay, step.eps,
          step.amsgrad, step.maximize);
    }
  });
}

void fused_sgd(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> momentum_buffers,
    const SgdStep& step) {
  at::NoGradGuard no_grad;
  at::_fused_sgd_(
      copy_handles(parameters),
      copy_handles(gradients),
      copy_handles(momentum_buffers),
      step.weight_decay,
      step.momentum,
      step.lr,
      step.dampening,
      step.nesterov,
      step.maximize,
      step.first);
}

} // namespace brigade
