#include "brigade-torch/src/bridge.rs.h"

#include "native_bf16.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A product in float32 of an input and for an output of 16 bits. The backward consists of operations that
// are recorded where gradients of gradients are wanted.
struct WideLinear : public torch::autograd::Function<WideLinear> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias) {
    RECORD_FUNCTION("brigade::linear", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    context->save_for_backward({input, weight});
    if (bias) {
      context->saved_data["bias"] = static_cast<int64_t>(bias->scalar_type());
    }
    const auto offset = bias ? std::optional(bias->to(at::kFloat)) : std::nullopt;
    return at::linear(input.to(at::kFloat), weight.to(at::kFloat), offset).to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::linear_backward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto flat = gradients[0].reshape({-1, weight.size(0)}).to(at::kFloat);
    variable_list out(3);
    if (context->needs_input_grad(0)) {
      out[0] = flat.mm(weight.to(at::kFloat)).to(input.scalar_type()).view(input.sizes());
    }
    if (context->needs_input_grad(1)) {
      const auto rows = input.reshape({-1, weight.size(1)}).to(at::kFloat);
      out[1] = flat.t().mm(rows).to(weight.scalar_type());
    }
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end() && context->needs_input_grad(2)) {
      out[2] = flat.sum(0).to(static_cast<at::ScalarType>(bias->second.toInt()));
    }
    return out;
  }
};

} // namespace

std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias) {
  const auto offset = optional_handle(bias);
  const auto device = input.device();
  auto type = input.scalar_type();
  const bool casts = at::autocast::is_autocast_enabled(device.type()) &&
      at::isFloatingType(type) && type != at::kDouble;
  if (casts) {
    type = at::autocast::get_autocast_dtype(device.type());
  }
  const bool fits = weight.dim() == 2 && weight.device() == device && input.dim() > 0 &&
      input.size(-1) == weight.size(1) && input.layout() == at::kStrided &&
      weight.layout() == at::kStrided && at::isFloatingType(weight.scalar_type()) &&
      (casts ? weight.scalar_type() != at::kDouble : weight.scalar_type() == type) &&
      (!offset ||
       (offset->dim() == 1 && offset->size(0) == weight.size(0) &&
        (casts || offset->scalar_type() == type)));
  if (fits && product_type(type, device) != type) {
    return std::make_unique<Tensor>(WideLinear::apply(input.to(type), weight, offset));
  }
  return std::make_unique<Tensor>(at::linear(input, weight, offset));
}

} // namespace brigade
