#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Statistics {
  at::Tensor mean;
  at::Tensor variance; // biased
  at::Tensor count; // values per channel, of all ranks: a float64 on their device, which nothing waits for
};

at::ScalarType statistics_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Every rank gathers every rank's mean, variance and count: the variance of the whole follows from
// these without the cancellation of a sum of squares. In float64, for counts beyond 2^24.
Statistics gather(const GroupHandle& group, const at::Tensor& input) {
  const auto channels = input.size(1);
  const auto wide = at::TensorOptions().dtype(at::kDouble).device(input.device());
  auto mine = at::zeros({2 * channels + 1}, wide);
  if (input.numel() > 0) {
    // Not read, and not changed by much: of 16-bit inputs the kernel gives statistics in 32 bits only
    // beside such ones.
    const auto like = mine.narrow(0, 0, channels).to(statistics_type(input));
    auto [mean, variance] = at::batch_norm_update_stats(input, like, like.clone(), 0.0);
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance);
    mine.select(0, 2 * channels).fill_(input.numel() / channels);
  }
  auto all = at::empty({group->getSize() * (2 * channels + 1)}, wide);
  group->_allgather_base(all, mine)->wait();
  all = all.view({group->getSize(), 2 * channels + 1});

  const auto counts = all.narrow(1, 2 * channels, 1);
  Statistics out;
  out.count = counts.sum();
  // A rank with two values knows without looking at the others'.
  TORCH_CHECK_VALUE(
      input.numel() > channels || out.count.item<double>() > 1,
      "BatchNorm in training needs more than one value per channel over all ranks, found ",
      out.count.item<double>());
  const auto shares = counts / out.count;
  const auto means = all.narrow(1, 0, channels);
  const auto mean = (means * shares).sum(0);
  const auto variances = all.narrow(1, channels, channels);
  const auto variance = ((variances + (means - mean).square()) * shares).sum(0);
  out.mean = mean.to(statistics_type(input));
  out.variance = variance.to(statistics_type(input));
  return out;
}

std::optional<at::Tensor> cast(
    const std::optional<at::Tensor>& parameter, const at::Tensor& input) {
  return parameter ? std::optional(parameter->to(statistics_type(input))) : std::nullopt;
}

struct Normalise : public torch::autograd::Function<Normalise> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& input,
      const std::optional<at::Tensor>& weight,
      const std::optional<at::Tensor>& bias,
      const Statistics& statistics,
      double eps,
      const GroupHandle& group) {
    const auto& [mean, variance, count] = statistics;
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance});
    context->saved_data["count"] = count;
    context->saved_data["eps"] = eps;
    context->saved_data["affine"] = weight.has_value();
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    if (input.numel() == 0) {
      return input.clone();
    }
    // libtorch's kernel of the evaluation: any layout, and 16-bit inputs with 32-bit parameters.
    return std::get<0>(at::native_batch_norm(
        input,
        cast(weight, input),
        cast(bias, input),
        mean,
        variance,
        /*training=*/false,
        0.0,
        eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &mean = saved[2], &variance = saved[3];
    const auto count = context->saved_data["count"].toTensor();
    const auto eps = context->saved_data["eps"].toDouble();
    const bool affine = context->saved_data["affine"].toBool();
    check_not_fork("a process group");
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    const auto weight = affine ? saved[1].to(mean.scalar_type()) : at::ones_like(mean);
    const auto& gradient = gradients[0];
    const auto channels = input.size(1);

    // This rank's sums of dy and of dy * (x - mean) / deviation: also its gradients of bias and weight,
    // which are averaged over the ranks like those of any other parameter.
    at::Tensor sum = at::zeros_like(mean), product = at::zeros_like(mean);
    at::Tensor dy;
    if (input.numel() > 0) {
      dy = gradient.contiguous(input.suggest_memory_format());
      // CUDA's kernel takes what an evaluation's forward gives it: saved statistics without numbers.
      const auto none = at::empty({0}, mean.options());
      std::tie(std::ignore, product, sum) = at::native_batch_norm_backward(
          dy, input, weight, mean, variance, none, none, /*train=*/false, eps, {false, true, true});
    }
    variable_list out(6);
    if (affine && context->needs_input_grad(1)) {
      out[1] = product.to(saved[1].scalar_type());
    }
    if (affine && context->needs_input_grad(2)) {
      out[2] = sum.to(saved[1].scalar_type());
    }
    // All ranks take part, also one that needs no gradient of its input here: that is the same on all.
    if (!context->needs_input_grad(0)) {
      return out;
    }
    auto sums = at::cat({sum.to(at::kDouble), product.to(at::kDouble)});
    std::vector<at::Tensor> list{sums};
    group->allreduce(list)->wait();
    sums.div_(count);
    if (input.numel() == 0) {
      out[0] = at::zeros_like(input);
      return out;
    }
    // dx = scale * (dy - mean(dy) - x_hat * mean(dy * x_hat)): what does not hold dy has the form of an
    // evaluation's forward.
    const auto scale = weight.to(at::kDouble) / (variance.to(at::kDouble) + eps).sqrt();
    const auto type = statistics_type(input);
    const auto slope = (-scale * sums.narrow(0, channels, channels)).to(type);
    const auto offset = (-scale * sums.narrow(0, 0, channels)).to(type);
    auto dx = std::get<0>(at::native_batch_norm(
        input.to(type), slope, offset, mean, variance, /*training=*/false, 0.0, eps));
    std::vector<int64_t> shape(input.dim(), 1);
    shape[1] = channels;
    dx.addcmul_(dy.to(type), scale.to(type).view(shape));
    out[0] = dx.to(input.scalar_type());
    return out;
  }
};

// libtorch's kernel takes one value per channel from the address of each, whatever its shape. Before any
// message, so that a rank with such a tensor leaves none of its peers waiting for the rest of them.
void check_per_channel(
    const char* name, rust::Slice<const TensorRef> given, const at::Tensor& input) {
  if (given.empty()) {
    return;
  }
  const at::Tensor& tensor = given[0].tensor;
  TORCH_CHECK_VALUE(tensor.defined(), name, " is undefined, expected [", input.size(1), "]");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided && tensor.is_floating_point() && tensor.dim() == 1 &&
          tensor.size(0) == input.size(1) && tensor.device() == input.device(),
      name,
      " is ",
      tensor.sizes(),
      " of ",
      tensor.scalar_type(),
      " (",
      tensor.layout(),
      ", ",
      tensor.device(),
      "), expected one float for each channel, [",
      input.size(1),
      "] (",
      at::kStrided,
      ", ",
      input.device(),
      ")");
}

} // namespace

std::unique_ptr<Tensor> sync_batch_norm(
    const Group& group,
    const Tensor& input,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    double momentum,
    double eps) {
  check_per_channel("weight", weight, input);
  check_per_channel("bias", bias, input);
  check_per_channel("running_mean", running_mean, input);
  check_per_channel("running_var", running_var, input);
  const auto& live = group.live();
  Statistics statistics;
  {
    at::NoGradGuard no_grad;
    statistics = gather(live, input.detach());
    if (!running_mean.empty() && !running_var.empty()) {
      auto mean = running_mean[0].tensor, variance = running_var[0].tensor;
      mean.lerp_(statistics.mean.to(mean.scalar_type()), momentum);
      const auto unbiased = statistics.variance * (statistics.count / (statistics.count - 1));
      variance.lerp_(unbiased.to(variance.scalar_type()), momentum);
    }
  }
  return std::make_unique<Tensor>(Normalise::apply(
      input, optional_handle(weight), optional_handle(bias), statistics, eps, live));
}

} // namespace brigade
