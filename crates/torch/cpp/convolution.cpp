#include "brigade-torch/src/bridge.rs.h"

#include "convolution.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

namespace brigade {

namespace {

struct ConvolutionOptions {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;
};

// What autocast computes, with its operators: an input that is in the type, and a weight and a bias that are cast. The
// weight is saved as it is, and its copy is taken again in the backward.
struct Convolution : public torch::autograd::Function<Convolution> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, const ConvolutionOptions& options) {
    RECORD_FUNCTION("brigade::convolution", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    context->save_for_backward({input, weight});
    auto& data = context->saved_data;
    data["stride"] = options.stride;
    data["padding"] = options.padding;
    data["dilation"] = options.dilation;
    data["groups"] = options.groups;
    const auto type = input.scalar_type();
    if (bias) {
      data["bias"] = static_cast<int64_t>(bias->scalar_type());
    }
    const auto offset = bias ? std::optional(weight_in_type(*bias, type)) : std::nullopt;
    return at::convolution(
        input, weight_in_type(weight, type), offset, options.stride, options.padding, options.dilation,
        /*transposed=*/false, std::vector<int64_t>{0, 0}, options.groups);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& gradients) {
    RECORD_FUNCTION("brigade::convolution_backward", {});
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1];
    const auto& data = context->saved_data;
    const auto bias = data.find("bias");
    const bool has_bias = bias != data.end();
    const std::vector<int64_t> bias_size{weight.size(0)};
    auto [of_input, of_weight, of_bias] = at::convolution_backward(
        gradients[0], input, weight_in_type(weight, input.scalar_type()),
        has_bias ? at::OptionalIntArrayRef(bias_size) : std::nullopt, data.at("stride").toIntVector(),
        data.at("padding").toIntVector(), data.at("dilation").toIntVector(), /*transposed=*/false,
        std::vector<int64_t>{0, 0}, data.at("groups").toInt(),
        {context->needs_input_grad(0), context->needs_input_grad(1), has_bias && context->needs_input_grad(2)});
    if (of_weight.defined()) {
      of_weight = of_weight.to(weight.scalar_type());
    }
    if (of_bias.defined()) {
      of_bias = of_bias.to(static_cast<at::ScalarType>(bias->second.toInt()));
    }
    return {of_input, of_weight, of_bias, at::Tensor()};
  }
};

} // namespace

std::unique_ptr<Tensor> convolution2d(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias, const std::array<int64_t, 2>& stride,
    const std::array<int64_t, 2>& padding, const std::array<int64_t, 2>& dilation, int64_t groups) {
  const auto offset = optional_handle(bias);
  const auto device = input.device();
  const auto is_cast = [&](const at::Tensor& tensor) {
    return tensor.device() == device && tensor.layout() == at::kStrided && at::isFloatingType(tensor.scalar_type()) &&
        tensor.scalar_type() != at::kDouble;
  };
  if (at::autocast::is_autocast_enabled(device.type()) && is_cast(input) && input.dim() == 4 && weight.dim() == 4 &&
      (!offset || is_cast(*offset))) {
    const auto type = at::autocast::get_autocast_dtype(device.type());
    if (weight.device() == device && can_keep_copy(weight, type)) {
      ConvolutionOptions options{
          {stride.begin(), stride.end()}, {padding.begin(), padding.end()}, {dilation.begin(), dilation.end()}, groups};
      return std::make_unique<Tensor>(Convolution::apply(input.to(type), weight, offset, options));
    }
  }
  return std::make_unique<Tensor>(at::conv2d(input, weight, offset, stride, padding, dilation, groups));
}

} // namespace brigade
