#include "brigade-torch/src/bridge.rs.h"

#include "native_bf16.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A product in the given type, of an input and for an output of another perhaps, and of gelu(input) perhaps,
// which the backward computes again. The backward consists of operations that are recorded where gradients of
// gradients are wanted.
struct Linear : public torch::autograd::Function<Linear> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, at::ScalarType type, const std::string& gelu) {
    RECORD_FUNCTION("brigade::linear", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    context->save_for_backward({input, weight});
    auto& data = context->saved_data;
    data["type"] = static_cast<int64_t>(type);
    data["gelu"] = gelu;
    if (bias) {
      data["bias"] = static_cast<int64_t>(bias->scalar_type());
    }
    const auto offset = bias ? std::optional(bias->to(type)) : std::nullopt;
    return at::linear(activated(input.to(type), gelu), in_type(weight, type), offset)
        .to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::linear_backward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto& data = context->saved_data;
    const auto type = static_cast<at::ScalarType>(data.at("type").toInt());
    const auto gelu = data.at("gelu").toStringRef();
    const auto flat = gradients[0].reshape({-1, weight.size(0)}).to(type);
    const auto rows = input.reshape({-1, weight.size(1)}).to(type);
    variable_list out(5);
    if (context->needs_input_grad(1)) {
      const auto factor = activated(rows, gelu);
      // In the layout of the weight, so that it is not copied once more.
      const bool is_transposed = weight.stride(0) == 1 && weight.stride(1) == weight.size(0);
      out[1] = (is_transposed ? factor.t().mm(flat).t() : flat.t().mm(factor)).to(weight.scalar_type());
    }
    if (context->needs_input_grad(0)) {
      auto dx = flat.mm(in_type(weight, type));
      if (!gelu.empty()) {
        dx = at::gelu_backward(dx, rows, gelu);
      }
      out[0] = dx.to(input.scalar_type()).view(input.sizes());
    }
    const auto bias = data.find("bias");
    if (bias != data.end() && context->needs_input_grad(2)) {
      out[2] = flat.sum(0).to(static_cast<at::ScalarType>(bias->second.toInt()));
    }
    return out;
  }

 private:
  static at::Tensor activated(const at::Tensor& input, const std::string& gelu) {
    return gelu.empty() ? input : at::gelu(input, gelu);
  }

  // A conversion is recorded where gradients of gradients are wanted.
  static at::Tensor in_type(const at::Tensor& weight, at::ScalarType type) {
    return !at::GradMode::is_enabled() && keeps_copy(weight, type) ? kept_copy(weight, type) : weight.to(type);
  }
};

// The types of input and product where this file can compute them; outside of autocast all are of one type.
struct Types {
  bool casts;
  at::ScalarType input, product;

  explicit Types(const at::Tensor& x) {
    const auto device = x.device().type();
    input = x.scalar_type();
    casts = at::autocast::is_autocast_enabled(device) && at::isFloatingType(input) &&
        input != at::kDouble;
    if (casts) {
      input = at::autocast::get_autocast_dtype(device);
    }
    product = product_type(input, x.device());
  }

  bool fit(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const {
    const auto is_matching = [&](const at::Tensor& t) {
      const auto of = t.scalar_type();
      return t.device() == x.device() && t.layout() == at::kStrided && at::isFloatingType(of) &&
          (casts ? of != at::kDouble : of == input);
    };
    return is_matching(x) && is_matching(weight) && weight.dim() == 2 && x.dim() > 0 &&
        x.size(-1) == weight.size(1) &&
        (!bias || (is_matching(*bias) && bias->dim() == 1 && bias->size(0) == weight.size(0)));
  }
};

} // namespace

std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias) {
  const auto offset = optional_handle(bias);
  const Types types(input);
  // libtorch's own would cast the weight in each call.
  const bool mine =
      types.product != types.input || (types.casts && keeps_copy(weight, types.product));
  if (mine && types.fit(input, weight, offset)) {
    return std::make_unique<Tensor>(
        Linear::apply(input.to(types.input), weight, offset, types.product, std::string()));
  }
  return std::make_unique<Tensor>(at::linear(input, weight, offset));
}

std::unique_ptr<Tensor> gelu_linear(
    const Tensor& input,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    rust::Str approximate) {
  const std::string gelu(approximate);
  TORCH_CHECK_VALUE(
      gelu == "none" || gelu == "tanh", "the approximation is ", gelu, ", expected none or tanh");
  const auto offset = optional_handle(bias);
  const Types types(input);
  if (!types.fit(input, weight, offset)) {
    return std::make_unique<Tensor>(at::linear(at::gelu(input, gelu), weight, offset));
  }
  // A product in the type of autocast takes its copy of the weight where the weight has none of its own.
  const bool copies = types.casts && types.product == types.input && !keeps_copy(weight, types.product);
  const auto factor =
      copies ? at::autocast::cached_cast(types.input, weight, input.device().type()) : weight;
  return std::make_unique<Tensor>(
      Linear::apply(input.to(types.input), factor, offset, types.product, gelu));
}

} // namespace brigade
