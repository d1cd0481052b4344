#include "brigade-torch/src/bridge.rs.h"

#include "activation.h"
#include "linear.h"
#include "kernels/products.h"
#include "native_bf16.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// No activation in front of a product.
constexpr int64_t kNoActivation = -1;

// Where an activation is not one pass, only GELU alone is computed again in the backward. The others are left to
// libtorch's operations, which keep their results and need one pass less.
bool is_gelu_alone(const ActivationInput& input, int64_t activation) {
  return gelu_approximation(activation)[0] != '\0' && !input.is_gated() && !input.bias.defined();
}

// A product in the given type, of an input and for an output of another perhaps, and perhaps of the activation of the
// input, which the backward computes again. The backward consists of operations that are recorded where gradients of
// gradients are wanted.
struct Linear : public torch::autograd::Function<Linear> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& values, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& values_bias,
      const std::optional<at::Tensor>& up, const std::optional<at::Tensor>& up_bias, at::ScalarType type,
      int64_t activation, bool packed) {
    RECORD_FUNCTION("brigade::linear", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto optional = [](const std::optional<at::Tensor>& t) { return t.value_or(at::Tensor()); };
    const ActivationInput input{values, optional(values_bias), optional(up), optional(up_bias), packed};
    context->save_for_backward({input.values, weight, input.bias, input.up, input.up_bias});
    auto& data = context->saved_data;
    data["type"] = static_cast<int64_t>(type);
    data["activation"] = activation;
    data["packed"] = packed;
    if (bias) {
      data["bias"] = static_cast<int64_t>(bias->scalar_type());
    }
    const auto offset = bias ? std::optional(weight_in_type(*bias, type)) : std::nullopt;
    return without_base(at::linear(factor_of(input, activation, type), weight_in_type(weight, type), offset)
                            .to(values.scalar_type()));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::linear_backward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const auto& weight = saved[1];
    const auto& data = context->saved_data;
    const ActivationInput input{saved[0], saved[2], saved[3], saved[4], data.at("packed").toBool()};
    const auto type = static_cast<at::ScalarType>(data.at("type").toInt());
    const auto activation = data.at("activation").toInt();
    const auto bias = data.find("bias");
    // Edges are those of the tensors that are there, in the order of the forward's arguments.
    size_t edge = 0;
    const auto is_needed = [&](bool is_there) { return is_there && context->needs_input_grad(edge++); };
    const bool needs_values = is_needed(true), needs_weight = is_needed(true);
    const bool needs_bias = is_needed(bias != data.end());
    const bool needs_values_bias = is_needed(input.bias.defined()), needs_up = is_needed(input.up.defined());
    const bool needs_up_bias = is_needed(input.up_bias.defined());
    const bool needs_input = needs_values || needs_values_bias || needs_up || needs_up_bias;

    const auto flat = gradients[0].reshape({-1, weight.size(0)}).to(type);
    const auto dfactor = needs_input ? flat.mm(weight_in_type(weight, type)) : at::Tensor();
    const auto own = differentiated(
        input, activation, type, dfactor, needs_weight, needs_values_bias || needs_up_bias);
    variable_list out(9);
    if (needs_values) {
      out[0] = own.values.view(input.values.sizes()).to(input.values.scalar_type());
    }
    const auto bias_type = needs_bias
        ? std::optional(static_cast<at::ScalarType>(bias->second.toInt()))
        : std::nullopt;
    if (needs_weight) {
      auto found = layer_gradients(flat, own.output.reshape({-1, weight.size(1)}), weight, bias_type);
      out[1] = std::move(found.weight);
      out[2] = std::move(found.bias);
    } else if (needs_bias) {
      out[2] = bias_gradient(flat, *bias_type);
    }
    out[3] = needs_values_bias ? own.bias.to(input.bias.scalar_type()) : at::Tensor();
    out[4] = needs_up ? own.up : at::Tensor();
    out[5] = needs_up_bias ? own.up_bias.to(input.up_bias.scalar_type()) : at::Tensor();
    return out;
  }

 private:
  static std::optional<ActivationPass> pass_for(const ActivationInput& input, at::ScalarType type) {
    const ActivationPass pass(input);
    return pass && input.values.scalar_type() == type ? std::optional(pass) : std::nullopt;
  }

  static at::Tensor factor_of(const ActivationInput& input, int64_t activation, at::ScalarType type) {
    if (activation == kNoActivation) {
      return input.values.to(type);
    }
    // In a backward that is recorded the gradient of the weight depends on the values.
    const auto pass = at::GradMode::is_enabled() ? std::nullopt : pass_for(input, type);
    if (pass) {
      return pass->forward(input, activation);
    }
    return activated_by_operations(
        {input.values.to(type), input.bias, input.up, input.up_bias, input.is_packed}, activation);
  }

  // The second factor of the product, if it is wanted, and the gradients of what it is made of for one of it, if that is
  // defined.
  static ActivationGradients differentiated(
      const ActivationInput& input, int64_t activation, at::ScalarType type, const at::Tensor& dfactor,
      bool wants_factor, bool wants_biases) {
    const bool recorded = at::GradMode::is_enabled();
    ActivationGradients out;
    const auto in_shape = [&] {
      auto sizes = input.values.sizes().vec();
      sizes.back() = input.width();
      return dfactor.view(sizes);
    };
    if (!dfactor.defined() || activation == kNoActivation) {
      out.output = wants_factor ? factor_of(input, activation, type) : at::Tensor();
      out.values = dfactor;
      return out;
    }
    const auto pass = recorded ? std::nullopt : pass_for(input, type);
    if (pass) {
      return pass->backward(
          input, activation, in_shape(), /*may_overwrite=*/true, {wants_factor, wants_biases});
    }
    if (is_gelu_alone(input, activation)) {
      const auto x = input.values.to(type);
      out.output = wants_factor ? at::gelu(x, gelu_approximation(activation)) : at::Tensor();
      out.values = at::gelu_backward(in_shape(), x, gelu_approximation(activation));
      return out;
    }
    return differentiated_by_operations(input, activation, in_shape(), recorded);
  }
};

// The product in the type: without a pass of its own where the device can write float32.
at::Tensor product(const at::Tensor& one, const at::Tensor& other, at::ScalarType type) {
  const bool converts = at::GradMode::is_enabled() || type != at::kFloat || one.numel() == 0 ||
      !sums_in_float32(one.scalar_type(), one.device());
  if (converts) {
    return one.mm(other).to(type);
  }
  auto out = at::empty({one.size(0), other.size(1)}, one.options().dtype(type));
  return at::mm_out(out, one, other, type);
}

} // namespace

ProductTypes::ProductTypes(const at::Tensor& x) {
  const auto device = x.device().type();
  input = x.scalar_type();
  casts = at::autocast::is_autocast_enabled(device) && at::isFloatingType(input) && input != at::kDouble;
  if (casts) {
    input = at::autocast::get_autocast_dtype(device);
  }
  product = product_type(input, x.device());
}

bool ProductTypes::improves(const at::Tensor& weight) const {
  const auto rounds = [&] {
    return at::GradMode::is_enabled() && weight.requires_grad() && weight.scalar_type() == at::kFloat &&
        weight.device().is_cuda() && sums_in_float32(product, weight.device());
  };
  return casts && (can_keep_copy(weight, product) || rounds());
}

bool ProductTypes::fit(
    const at::Tensor& x, int64_t width, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const {
  const auto is_matching = [&](const at::Tensor& t) {
    const auto of = t.scalar_type();
    return t.device() == x.device() && t.layout() == at::kStrided && at::isFloatingType(of) &&
        (casts ? of != at::kDouble : of == input);
  };
  return is_matching(x) && is_matching(weight) && weight.dim() == 2 && x.dim() > 0 && width == weight.size(1) &&
      (!bias || (is_matching(*bias) && bias->dim() == 1 && bias->size(0) == weight.size(0)));
}

at::Tensor ProductTypes::factor(const at::Tensor& weight) const {
  const bool copies = casts && product == input && !improves(weight);
  return copies ? at::autocast::cached_cast(input, weight, weight.device().type()) : weight;
}

at::Tensor bias_gradient(const at::Tensor& doutput, at::ScalarType type) {
  // A GPU adds up in float32 and rounds once; a CPU would convert all values first.
  return doutput.is_cuda() ? doutput.sum(0, /*keepdim=*/false, type) : doutput.sum(0).to(type);
}

LayerGradients layer_gradients(
    const at::Tensor& doutput, const at::Tensor& input, const at::Tensor& weight,
    std::optional<at::ScalarType> bias_type) {
  const auto type = weight.scalar_type();
  // In the layout of the weight, so that it is not copied once more.
  const bool is_transposed = weight.stride(0) == 1 && weight.stride(1) == weight.size(0);
  const auto left = is_transposed ? input.t() : doutput.t(), right = is_transposed ? doutput : input;
  const auto apart = [&] {
    return kernels::ProductResult{
        product(left, right, type), bias_type ? bias_gradient(doutput, *bias_type) : at::Tensor()};
  };
  // Sums of an epilogue have the type of its output.
  auto* const products = bias_type == std::optional(type) && !at::GradMode::is_enabled()
      ? kernels::products(doutput.device())
      : nullptr;
  const auto sums = is_transposed ? kernels::Epilogue::kSumsOfRight : kernels::Epilogue::kSumsOfLeft;
  auto found = products == nullptr ? apart() : products->compute({sums, left, right, type, {}}, apart);
  return {
      is_transposed ? found.output.t() : found.output, bias_type ? found.other.to(*bias_type) : at::Tensor()};
}

bool sums_in_float32(at::ScalarType type, const at::Device& device) {
  if (!device.is_cuda() || (type != at::kBFloat16 && type != at::kHalf)) {
    return false;
  }
  static const bool has_kernels = [] {
    const auto has = [](const char* name) {
      const auto op = c10::Dispatcher::singleton().findSchema({name, "dtype_out"});
      return op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    };
    return has("aten::mm") && has("aten::addmm");
  }();
  return has_kernels;
}

std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias) {
  const auto offset = optional_handle(bias);
  const ProductTypes types(input);
  const bool mine = types.product != types.input || types.improves(weight);
  if (mine && types.fit(input, input.dim() > 0 ? input.size(-1) : 0, weight, offset)) {
    return std::make_unique<Tensor>(Linear::apply(
        input.to(types.input), weight, offset, std::nullopt, std::nullopt, std::nullopt, types.product,
        kNoActivation, /*packed=*/false));
  }
  return std::make_unique<Tensor>(at::linear(input, weight, offset));
}

std::unique_ptr<Tensor> activation_linear(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const Tensor& weight, rust::Slice<const TensorRef> weight_bias,
    const ActivationOptions& options) {
  auto input = activation_input(values, bias, up, up_bias, options);
  const auto offset = optional_handle(weight_bias);
  const ProductTypes types(values);
  const int64_t width = values.dim() > 0 ? input.width() : 0;
  const auto in_type = [&](const at::Tensor& t) { return t.defined() ? t.to(types.input) : t; };
  const ActivationInput own{
      in_type(input.values), input.bias, in_type(input.up), input.up_bias, input.is_packed};
  const bool has_pass = types.product == types.input && ActivationPass(own);
  if (!types.fit(values, width, weight, offset) || !(has_pass || is_gelu_alone(input, options.activation))) {
    return linear(activated(input, options.activation), weight, weight_bias);
  }
  const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return std::make_unique<Tensor>(Linear::apply(
      own.values, types.factor(weight), offset, optional(own.bias), optional(own.up), optional(own.up_bias), types.product,
      int64_t{options.activation}, own.is_packed));
}

} // namespace brigade
