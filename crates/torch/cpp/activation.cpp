#include "brigade-torch/src/bridge.rs.h"

#include "activation.h"
#include "linear.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor applied(const at::Tensor& x, int64_t activation) {
  switch (activation) {
    case kActivationGelu:
    case kActivationGeluTanh:
      return at::gelu(x, gelu_approximation(activation));
    case kActivationSilu:
      return at::silu(x);
    case kActivationMish:
      return at::mish(x);
    case kActivationRelu:
      return at::relu(x);
    case kActivationReluSquared:
      return at::relu(x).square();
    default:
      TORCH_CHECK(false, "there is no activation ", activation);
  }
}

at::Tensor defined_or_empty(const std::optional<at::Tensor>& t) {
  return t.value_or(at::Tensor());
}

// The kernels of a GPU.
struct Activated : public torch::autograd::Function<Activated> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& values, const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& up, const std::optional<at::Tensor>& up_bias, int64_t activation, bool packed) {
    RECORD_FUNCTION("brigade::activation", {});
    const ActivationInput input{
        values, defined_or_empty(bias), defined_or_empty(up), defined_or_empty(up_bias), packed};
    context->save_for_backward({input.values, input.bias, input.up, input.up_bias});
    context->saved_data["activation"] = activation;
    context->saved_data["packed"] = packed;
    auto* program = activation_kernels(input);
    TORCH_CHECK(program != nullptr, "the kernels of activations are not there any more");
    return activation_forward_gpu(*program, input, static_cast<int>(activation));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::activation_backward", {});
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const ActivationInput input{saved[0], saved[1], saved[2], saved[3], data.at("packed").toBool()};
    const auto activation = data.at("activation").toInt();
    const bool recorded = at::GradMode::is_enabled();
    auto* program = recorded ? nullptr : activation_kernels(input);
    const auto doutput = gradients[0].to(input.values.scalar_type());
    auto found = program == nullptr
        ? differentiated_by_operations(input, activation, doutput, recorded)
        : activation_backward_gpu(
              *program, input, static_cast<int>(activation), doutput, /*may_overwrite=*/false,
              {/*output=*/false, /*biases=*/input.bias.defined() || input.up_bias.defined()});
    const auto of_bias = [](const at::Tensor& gradient, const at::Tensor& bias) {
      return bias.defined() && gradient.defined() ? gradient.to(bias.scalar_type()) : at::Tensor();
    };
    return {
        found.values, of_bias(found.bias, input.bias), found.up, of_bias(found.up_bias, input.up_bias),
        at::Tensor(), at::Tensor()};
  }
};

} // namespace

const char* gelu_approximation(int64_t activation) {
  return activation == kActivationGelu ? "none" : activation == kActivationGeluTanh ? "tanh" : "";
}

at::Tensor activated_by_operations(const ActivationInput& input, int64_t activation) {
  const auto biased = [](const at::Tensor& t, const at::Tensor& bias) {
    return bias.defined() ? t + bias.to(t.scalar_type()) : t;
  };
  const auto values = biased(input.values, input.bias);
  if (!input.is_gated()) {
    return applied(values, activation);
  }
  const int64_t width = input.width();
  const auto gate = input.is_packed ? values.narrow(-1, 0, width) : values;
  const auto up = input.is_packed ? values.narrow(-1, width, width) : biased(input.up, input.up_bias);
  return applied(gate, activation).mul(up);
}

ActivationGradients differentiated_by_operations(
    const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool recorded) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::AutoGradMode enabled(true);
  const auto leaf = [&](const at::Tensor& t) {
    return recorded || !t.defined() ? t : t.detach().requires_grad_();
  };
  const ActivationInput own{
      leaf(input.values), leaf(input.bias), leaf(input.up), leaf(input.up_bias), input.is_packed};
  ActivationGradients out;
  out.output = activated_by_operations(own, activation);
  variable_list inputs;
  std::vector<at::Tensor*> places;
  const std::pair<const at::Tensor*, at::Tensor*> all[] = {
      {&own.values, &out.values}, {&own.bias, &out.bias}, {&own.up, &out.up}, {&own.up_bias, &out.up_bias}};
  for (const auto& [tensor, place] : all) {
    if (tensor->defined() && tensor->requires_grad()) {
      inputs.push_back(*tensor);
      places.push_back(place);
    }
  }
  if (!inputs.empty()) {
    auto found = torch::autograd::grad(
        {out.output}, inputs, {doutput}, /*retain_graph=*/recorded, /*create_graph=*/recorded,
        /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) {
      *places[i] = std::move(found[i]);
    }
  }
  if (!recorded) {
    out.output = out.output.detach();
  }
  return out;
}

ActivationInput activation_input(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options) {
  ActivationInput input{
      values, defined_or_empty(optional_handle(bias)), defined_or_empty(optional_handle(up)),
      defined_or_empty(optional_handle(up_bias)), options.packed};
  TORCH_CHECK_VALUE(
      !options.packed || (values.dim() > 0 && values.size(-1) % 2 == 0), "the packed pair is ", values.sizes(),
      ", expected an even number of values in the last dimension");
  TORCH_CHECK_VALUE(
      !input.up.defined() || input.up.sizes() == values.sizes(), "the gate is ", values.sizes(),
      " and what it multiplies is ", input.up.defined() ? input.up.sizes() : at::IntArrayRef(),
      ", expected one shape");
  const auto check_bias = [&](const at::Tensor& offset) {
    TORCH_CHECK_VALUE(
        !offset.defined() ||
            (values.dim() > 0 && offset.dim() == 1 && offset.size(0) == values.size(-1) &&
             offset.device() == values.device()),
        "the bias is ", offset.defined() ? offset.sizes() : at::IntArrayRef(),
        ", expected a value for each of the last dimension of ", values.sizes(), " on ", values.device());
  };
  check_bias(input.bias);
  check_bias(input.up_bias);
  return input;
}

std::unique_ptr<Tensor> activation(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options) {
  const auto input = activation_input(values, bias, up, up_bias, options);
  if (activation_kernels(input) == nullptr) {
    return std::make_unique<Tensor>(activated_by_operations(input, options.activation));
  }
  const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return std::make_unique<Tensor>(Activated::apply(
      input.values, optional(input.bias), optional(input.up), optional(input.up_bias),
      int64_t{options.activation}, input.is_packed));
}

bool activation_adds_bias(const Tensor& input) {
  const auto device = input.device().type();
  auto type = input.scalar_type();
  if (at::autocast::is_autocast_enabled(device) && at::isFloatingType(type) && type != at::kDouble) {
    type = at::autocast::get_autocast_dtype(device);
  }
  return input.is_cuda() && kernels::program("activation", input.device(), type) != nullptr;
}

} // namespace brigade
