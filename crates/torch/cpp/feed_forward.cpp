#include "brigade-torch/src/bridge.rs.h"

#include "activation.h"
#include "feed_forward.h"
#include "kernels/products.h"
#include "linear.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace brigade {

namespace {

using kernels::Epilogue;
using kernels::ProductResult;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The activation of which products have epilogues.
constexpr int64_t kActivationOfEpilogues = kActivationGeluTanh;

at::Tensor activated_hidden(const at::Tensor& hidden) {
  const ActivationInput input{hidden};
  const ActivationPass pass(input);
  return pass ? pass.forward(input, kActivationOfEpilogues) : activated_by_operations(input, kActivationOfEpilogues);
}

// Both layers with tanh's GELU, in a type of 16 bits. The backward consists of operations that are recorded where
// gradients of gradients are wanted.
struct FeedForward : public torch::autograd::Function<FeedForward> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
      const at::Tensor& second_weight, const std::optional<at::Tensor>& second_bias) {
    RECORD_FUNCTION("brigade::feed_forward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto type = input.scalar_type();
    const auto own_weight = weight_in_type(weight, type), own_bias = weight_in_type(bias, type);
    const auto rows = input.reshape({-1, input.size(-1)});
    const auto apart = [&] {
      const auto hidden = at::linear(rows, own_weight, own_bias);
      return ProductResult{activated_hidden(hidden), hidden};
    };
    auto* const products = kernels::products(input.device());
    // The activation is not kept: the backward computes it again of what went into it.
    const auto [activation, hidden] = products == nullptr
        ? apart()
        : products->compute({Epilogue::kGeluBias, rows, own_weight.t(), type, own_bias}, apart);
    context->save_for_backward({input, weight, bias, hidden, second_weight});
    auto& data = context->saved_data;
    if (second_bias) {
      data["second_bias"] = static_cast<int64_t>(second_bias->scalar_type());
    }
    const auto offset = second_bias ? std::optional(weight_in_type(*second_bias, type)) : std::nullopt;
    auto sizes = input.sizes().vec();
    sizes.back() = second_weight.size(0);
    return without_base(at::linear(activation, weight_in_type(second_weight, type), offset).view(sizes));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::feed_forward_backward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &bias = saved[2], &hidden = saved[3], &second_weight = saved[4];
    const auto& data = context->saved_data;
    const auto second_bias = data.find("second_bias");
    const bool has_second_bias = second_bias != data.end();
    std::array<bool, 5> needs{};
    for (size_t i = 0; i < needs.size(); ++i) {
      needs[i] = (i < 4 || has_second_bias) && context->needs_input_grad(i);
    }
    const auto type = input.scalar_type();
    const auto doutput = gradients[0].reshape({-1, second_weight.size(0)}).to(type);
    const auto second_type = needs[4]
        ? std::optional(static_cast<at::ScalarType>(second_bias->second.toInt()))
        : std::nullopt;
    variable_list out(5);
    if (at::GradMode::is_enabled()) {
      recorded(saved, needs, doutput, out);
      out[4] = second_type ? bias_gradient(doutput, *second_type) : at::Tensor();
      return out;
    }
    at::Tensor dhidden, activation;
    if (needs[0] || needs[1] || needs[2]) {
      auto found = differentiated(doutput, weight_in_type(second_weight, type), hidden, needs[3], activation);
      dhidden = std::move(found.output);
      out[2] = needs[2] ? found.other.to(bias.scalar_type()) : at::Tensor();
    } else if (needs[3]) {
      activation = activated_hidden(hidden);
    }
    if (needs[3]) {
      auto found = layer_gradients(doutput, activation, second_weight, second_type);
      out[3] = std::move(found.weight);
      out[4] = std::move(found.bias);
    } else if (second_type) {
      out[4] = bias_gradient(doutput, *second_type);
    }
    // Before the next products need memory.
    activation.reset();
    if (needs[1]) {
      const auto rows = input.reshape({-1, input.size(-1)});
      out[1] = layer_gradients(dhidden, rows, weight, /*bias_type=*/std::nullopt).weight;
    }
    if (needs[0]) {
      out[0] = dhidden.mm(weight_in_type(weight, type)).view(input.sizes());
    }
    return out;
  }

 private:
  // The gradients of what goes into the activation and of the first bias, and the activation once more if it is wanted.
  static ProductResult differentiated(
      const at::Tensor& doutput, const at::Tensor& weight, const at::Tensor& hidden, bool wants_activation,
      at::Tensor& activation) {
    const auto apart = [&] {
      auto dactivation = doutput.mm(weight);
      const ActivationInput values{hidden};
      if (const ActivationPass pass(values); pass) {
        auto found = pass.backward(
            values, kActivationOfEpilogues, dactivation, /*may_overwrite=*/true,
            {wants_activation, /*biases=*/true});
        activation = std::move(found.output);
        return ProductResult{std::move(found.values), std::move(found.bias)};
      }
      activation = wants_activation ? activated_hidden(hidden) : at::Tensor();
      auto dhidden = at::gelu_backward(dactivation, hidden, gelu_approximation(kActivationOfEpilogues));
      auto sums = dhidden.sum(0);
      return ProductResult{std::move(dhidden), std::move(sums)};
    };
    auto* const products = kernels::products(doutput.device());
    if (products == nullptr) {
      return apart();
    }
    return products->compute(
        {Epilogue::kGeluGradient, doutput, weight, doutput.scalar_type(), hidden}, apart,
        [&](const ProductResult&) { activation = wants_activation ? activated_hidden(hidden) : at::Tensor(); });
  }

  // The same by operations that can be differentiated once more. What was kept of the forward depends on the inputs and
  // is computed again.
  static void recorded(
      const variable_list& saved, const std::array<bool, 5>& needs, const at::Tensor& doutput, variable_list& out) {
    const auto &input = saved[0], &weight = saved[1], &bias = saved[2], &second_weight = saved[4];
    const auto type = input.scalar_type();
    const auto hidden = at::linear(
        input.reshape({-1, input.size(-1)}), weight_in_type(weight, type), weight_in_type(bias, type));
    const auto output = at::linear(
        activated_by_operations({hidden}, kActivationOfEpilogues), weight_in_type(second_weight, type));
    const std::array<const at::Tensor*, 4> all{&input, &weight, &bias, &second_weight};
    variable_list inputs;
    std::vector<size_t> places;
    for (size_t i = 0; i < all.size(); ++i) {
      if (needs[i]) {
        inputs.push_back(*all[i]);
        places.push_back(i);
      }
    }
    if (inputs.empty()) {
      return;
    }
    auto found = torch::autograd::grad({output}, inputs, {doutput}, /*retain_graph=*/true, /*create_graph=*/true);
    for (size_t i = 0; i < found.size(); ++i) {
      out[places[i]] = std::move(found[i]);
    }
  }
};

} // namespace

std::unique_ptr<Tensor> feed_forward(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias, const Tensor& second_weight,
    rust::Slice<const TensorRef> second_bias, const ActivationOptions& options) {
  const auto offset = optional_handle(bias), second_offset = optional_handle(second_bias);
  const ProductTypes types(input);
  const auto is_vectors = [](const at::Tensor& factor) {
    return factor.size(0) % kernels::kVector == 0 && factor.size(1) % kernels::kVector == 0;
  };
  // Without gradients nothing is kept for a backward, and an epilogue would write it in vain.
  const bool may_fuse = at::GradMode::is_enabled() && options.activation == kActivationOfEpilogues && offset &&
      kernels::products(input.device()) != nullptr && types.product == types.input &&
      (types.input == at::kBFloat16 || types.input == at::kHalf) && input.dim() > 0 && input.numel() > 0 &&
      types.fit(input, input.size(-1), weight, offset) &&
      types.fit(input, weight.size(0), second_weight, second_offset) && is_vectors(weight) &&
      is_vectors(second_weight);
  if (may_fuse) {
    return std::make_unique<Tensor>(FeedForward::apply(
        input.to(types.input), types.factor(weight), *offset, types.factor(second_weight), second_offset));
  }
  const bool leaves_bias = offset && activation_adds_bias(input);
  const auto hidden = linear(input, weight, leaves_bias ? rust::Slice<const TensorRef>() : bias);
  return activation_linear(
      *hidden, leaves_bias ? bias : rust::Slice<const TensorRef>(), {}, {}, second_weight, second_bias, options);
}

} // namespace brigade
