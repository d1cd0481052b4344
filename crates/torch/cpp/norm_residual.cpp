#include "brigade-torch/src/bridge.rs.h"

#include "dropout.h"
#include "kernels/norm_residual.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor normalised(
    const at::Tensor& x, at::IntArrayRef shape, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, bool rms, double eps) {
  return rms ? at::rms_norm(x, shape, weight, eps) : at::layer_norm(x, shape, weight, bias, eps);
}

kernels::Program& program_of(const at::Tensor& stream, at::ScalarType type) {
  auto* program = norm_residual_kernels(stream, type);
  TORCH_CHECK(program != nullptr, "the kernels of norm_residual are not there any more");
  return *program;
}

// The kernels of a GPU. Outputs: the sum, the normalised values, and the same in float32 if they are wanted.
struct NormResidual : public torch::autograd::Function<NormResidual> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& stream, const std::optional<at::Tensor>& branch,
      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& branch_bias, const std::optional<at::Tensor>& seed, double dropout, bool rms, double eps,
      at::ScalarType type, bool wants_float) {
    RECORD_FUNCTION("brigade::norm_residual", {});
    const auto optional = [](const std::optional<at::Tensor>& t) { return t.value_or(at::Tensor()); };
    const NormResidualRule rule{optional(weight), optional(bias), optional(branch_bias), rms, eps, dropout, optional(seed)};
    auto out = norm_residual_forward_gpu(program_of(stream, type), stream, branch, rule, type, wants_float);
    context->set_materialize_grads(false);
    context->save_for_backward(
        {out.sum, out.mean, out.inverse, rule.weight, rule.bias, rule.branch_bias, rule.seed});
    auto& data = context->saved_data;
    data["type"] = static_cast<int64_t>(type);
    data["branch"] = branch.has_value();
    data["dropout"] = dropout;
    data["rms"] = rms;
    data["eps"] = eps;
    variable_list outputs{out.sum, out.normed};
    if (wants_float) {
      outputs.push_back(out.normed_float);
    }
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& given) {
    RECORD_FUNCTION("brigade::norm_residual_backward", {});
    auto gradients = given;
    gradients.resize(3);
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto type = static_cast<at::ScalarType>(data.at("type").toInt());
    const bool has_branch = data.at("branch").toBool();
    const NormResidualRule rule{saved[3], saved[4], saved[5], data.at("rms").toBool(), data.at("eps").toDouble(),
                                data.at("dropout").toDouble(), saved[6]};
    const auto& sum = saved[0];
    if (at::GradMode::is_enabled()) {
      return recorded(sum, gradients, rule, type, has_branch);
    }
    variable_list out(kInputs);
    const bool has_none = !gradients[1].defined() && !gradients[2].defined();
    if (has_none && !gradients[0].defined()) {
      return out;
    }
    const auto found = norm_residual_backward_gpu(
        program_of(sum, type), {sum, {}, {}, saved[1], saved[2]}, gradients[0], gradients[1], gradients[2], rule,
        has_branch ? std::optional(type) : std::nullopt);
    out[0] = found.stream;
    out[1] = found.branch;
    const at::Tensor* const parameters[] = {&rule.weight, &rule.bias, &rule.branch_bias};
    for (int64_t i = 0; i < 3; ++i) {
      if (parameters[i]->defined()) {
        out[2 + i] = found.columns[i];
      }
    }
    return out;
  }

 private:
  static constexpr size_t kInputs = 11;

  // For gradients of gradients: the same by libtorch's operations, which are recorded. The sum knows how it depends on
  // stream and branch.
  static variable_list recorded(
      const at::Tensor& sum, const variable_list& gradients, const NormResidualRule& rule, at::ScalarType type,
      bool has_branch) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    variable_list out(kInputs);
    auto g = at::zeros_like(sum);
    for (size_t i : {1, 2}) {
      g = gradients[i].defined() ? g + gradients[i] : g;
    }
    const auto row_mean = [](const at::Tensor& t) { return t.mean(-1, /*keepdim=*/true); };
    const auto of_columns = [&](const at::Tensor& t) { return t.reshape({-1, sum.size(-1)}).sum(0); };
    const auto apart = rule.rms ? sum : sum - row_mean(sum);
    const auto inverse = (row_mean(apart.square()) + rule.eps).rsqrt();
    const auto x = apart * inverse;
    if (rule.weight.defined()) {
      out[2] = of_columns(g * x);
    }
    if (rule.bias.defined()) {
      out[3] = of_columns(g);
    }
    if (rule.weight.defined()) {
      g = g * rule.weight;
    }
    auto d = g - x * row_mean(g * x);
    d = (rule.rms ? d : d - row_mean(g)) * inverse;
    out[0] = gradients[0].defined() ? d + gradients[0] : d;
    if (has_branch) {
      const auto dropped = rule.dropout > 0 ? out[0] * factors(sum, rule, type) : out[0];
      out[1] = dropped.to(type);
      if (rule.branch_bias.defined()) {
        out[4] = of_columns(dropped);
      }
    }
    return out;
  }

  // The factors of dropout, by the kernel: its sum of a stream of zeros and a branch of ones.
  static at::Tensor factors(const at::Tensor& sum, const NormResidualRule& rule, at::ScalarType type) {
    const at::NoGradGuard no_grad;
    NormResidualRule plain;
    plain.dropout = rule.dropout;
    plain.seed = rule.seed;
    const auto ones = at::ones_like(sum, sum.options().dtype(type));
    return norm_residual_forward_gpu(
               program_of(sum, type), at::zeros_like(sum), ones, plain, type, /*wants_float=*/false)
        .sum;
  }
};

// The type of the normalised values if the kernels of a GPU can compute them: that of autocast.
std::optional<at::ScalarType> kernel_type(
    const at::Tensor& stream, const std::optional<at::Tensor>& branch, at::IntArrayRef shape,
    std::initializer_list<const std::optional<at::Tensor>*> parameters) {
  const auto device = stream.device().type();
  if (!stream.is_cuda() || shape.size() != 1 || !at::autocast::is_autocast_enabled(device)) {
    return std::nullopt;
  }
  const auto type = at::autocast::get_autocast_dtype(device);
  bool fits = fits_norm_residual_kernels(stream, branch, type) && shape[0] == stream.size(-1);
  for (const auto* parameter : parameters) {
    fits = fits && (!*parameter || fits_norm_residual_kernels(stream, **parameter));
  }
  return fits && norm_residual_kernels(stream, type) != nullptr ? std::optional(type) : std::nullopt;
}

} // namespace

ResidualNorm norm_residual(
    const Tensor& stream, rust::Slice<const TensorRef> branch, rust::Slice<const TensorRef> branch_bias,
    rust::Slice<const TensorRef> branch_seed, rust::Slice<const TensorRef> weight, rust::Slice<const TensorRef> bias,
    rust::Slice<const int64_t> shape, const NormResidualOptions& options) {
  const double probability = options.dropout;
  TORCH_CHECK_VALUE(
      probability >= 0 && probability <= 1, "the probability of dropout is ", probability, ", expected 0 to 1");
  const auto added = optional_handle(branch), added_bias = optional_handle(branch_bias);
  auto given_seed = optional_handle(branch_seed);
  TORCH_CHECK_VALUE(
      !added || (added->sizes() == stream.sizes() && added->device() == stream.device()), "the branch is ",
      added ? added->sizes() : at::IntArrayRef(), ", expected the shape of the stream, ", stream.sizes(), " on ",
      stream.device());
  const auto scale = optional_handle(weight), offset = optional_handle(bias);
  const at::IntArrayRef dims(shape.data(), shape.size());
  const auto result = [](at::Tensor sum, at::Tensor normed) {
    return ResidualNorm{std::make_unique<Tensor>(std::move(sum)), std::make_unique<Tensor>(std::move(normed))};
  };
  if (const auto type = kernel_type(stream, added, dims, {&scale, &offset, &added_bias})) {
    std::optional<at::Tensor> seed;
    if (added && probability > 0) {
      seed = given_seed ? std::move(given_seed) : seeds_from_gpu(stream.device(), 1);
    }
    auto out = NormResidual::apply(
        stream, added, scale, offset, added_bias, seed, added ? probability : 0.0, options.rms, options.eps, *type,
        options.post);
    return result(std::move(out[options.post ? 2 : 0]), std::move(out[1]));
  }
  auto sum = stream;
  if (added) {
    auto whole = added_bias ? *added + added_bias->to(added->scalar_type()) : *added;
    if (probability > 0) {
      whole = std::move(*brigade::dropout(whole, rust::Slice<const TensorRef>(), probability));
    }
    // In place where the values are this function's own: one tensor less to write.
    const bool is_own =
        (added_bias || probability > 0) && whole.numel() > 0 && whole.scalar_type() == stream.scalar_type();
    sum = is_own ? whole.add_(stream) : whole + stream;
  }
  auto normed = normalised(sum, dims, scale, offset, options.rms, options.eps);
  return options.post ? result(normed, normed) : result(std::move(sum), std::move(normed));
}

std::unique_ptr<Tensor> norm_residual_seeds(const Tensor& stream, int64_t count) {
  const auto device = stream.device().type();
  const bool draws = stream.is_cuda() && count > 0 && at::autocast::is_autocast_enabled(device) &&
      norm_residual_kernels(stream, at::autocast::get_autocast_dtype(device)) != nullptr;
  return draws ? std::make_unique<Tensor>(seeds_from_gpu(stream.device(), count)) : nullptr;
}

bool norm_residual_adds_bias(const Tensor& input, const Tensor& bias) {
  const auto device = input.device().type();
  if (!input.is_cuda() || !at::autocast::is_autocast_enabled(device)) {
    return false;
  }
  const auto type = at::autocast::get_autocast_dtype(device);
  // A row of the stream has as many values as the bias.
  return fits_norm_residual_kernels(bias, std::nullopt, type) && fits_norm_residual_kernels(bias, bias) &&
      bias.device() == input.device() && norm_residual_kernels(bias, type) != nullptr;
}

} // namespace brigade
