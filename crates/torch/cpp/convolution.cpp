#include "brigade-torch/src/bridge.rs.h"

#include "convolution.h"
#include "kernels/products.h"
#include "linear.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace brigade {

namespace {

bool is_in_last(const at::Tensor& images) {
  return images.is_contiguous(at::MemoryFormat::ChannelsLast);
}

// The pixels of images in channels_last as rows of a matrix, which is a view.
at::Tensor pixels(const at::Tensor& images) {
  return images.permute({0, 2, 3, 1}).reshape({-1, images.size(1)});
}

// The weight of a kernel of one pixel as a matrix, which is a view.
at::Tensor matrix_of(const at::Tensor& weight) {
  return weight.reshape({weight.size(0), weight.size(1)});
}

// Images whose pixels are products of others with a matrix [in, out].
at::Tensor product_of_pixels(
    const at::Tensor& images, const at::Tensor& matrix, const std::optional<at::Tensor>& bias) {
  const auto rows = pixels(images);
  const auto found = bias ? at::addmm(*bias, rows, matrix) : rows.mm(matrix);
  return found.view({images.size(0), images.size(2), images.size(3), matrix.size(1)}).permute({0, 3, 1, 2});
}

struct ConvolutionOptions {
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;

  // Whether each pixel of the output is a product of the weight with the same pixel of the input alone.
  bool is_of_pixels(const at::Tensor& weight) const {
    const auto all = [](at::IntArrayRef numbers, int64_t wanted) {
      return std::all_of(numbers.begin(), numbers.end(), [&](int64_t number) { return number == wanted; });
    };
    return weight.size(2) == 1 && weight.size(3) == 1 && groups == 1 && all(stride, 1) && all(padding, 0);
  }
};

// Calls `product`, which computes a convolution of single pixels as a product of matrices, where a GPU is faster so for
// these shapes; otherwise `convolution`.
void by_the_faster(
    const char* operation, const at::Tensor& input, const at::Tensor& weight, bool is_of_pixels,
    const std::function<void()>& convolution, const std::function<void()>& product) {
  auto* const meter = is_of_pixels && is_in_last(input) && input.numel() > 0 ? kernels::products(input.device())
                                                                            : nullptr;
  kernels::Choice* choice = nullptr;
  if (meter != nullptr) {
    const auto key = std::string(operation) + ' ' + c10::toString(input.scalar_type()) + ' ' +
        c10::str(input.sizes()) + ' ' + std::to_string(weight.size(0));
    choice = meter->choice(key, /*candidates=*/2, /*unmeasured=*/0);
  }
  if (choice == nullptr) {
    convolution();
    return;
  }
  choice->run(*meter, input.device(), [&](int candidate) { candidate == 0 ? convolution() : product(); });
}

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
    const bool is_of_pixels = options.is_of_pixels(weight) && kernels::products(input.device()) != nullptr;
    data["pixels"] = is_of_pixels;
    const auto offset = bias ? std::optional(weight_in_type(*bias, type)) : std::nullopt;
    const auto factor = weight_in_type(weight, type);
    at::Tensor output;
    by_the_faster(
        "convolution", input, weight, is_of_pixels,
        [&] {
          output = at::convolution(
              input, factor, offset, options.stride, options.padding, options.dilation, /*transposed=*/false,
              std::vector<int64_t>{0, 0}, options.groups);
        },
        [&] { output = product_of_pixels(input, matrix_of(factor).t(), offset); });
    return without_base(output);
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
    const bool needs_input = context->needs_input_grad(0), needs_weight = context->needs_input_grad(1);
    const bool needs_bias = has_bias && context->needs_input_grad(2), is_of_pixels = data.at("pixels").toBool();
    const std::vector<int64_t> bias_size{weight.size(0)};
    const auto factor = weight_in_type(weight, input.scalar_type());
    const auto convolved = [&](std::array<bool, 3> wanted) {
      return at::convolution_backward(
          gradients[0], input, factor, has_bias ? at::OptionalIntArrayRef(bias_size) : std::nullopt,
          data.at("stride").toIntVector(), data.at("padding").toIntVector(), data.at("dilation").toIntVector(),
          /*transposed=*/false, std::vector<int64_t>{0, 0}, data.at("groups").toInt(), wanted);
    };
    at::Tensor of_input, of_weight, of_bias;
    if (!is_of_pixels) {
      std::tie(of_input, of_weight, of_bias) = convolved({needs_input, needs_weight, needs_bias});
    } else {
      const auto gradient = [&] { return gradients[0].contiguous(at::MemoryFormat::ChannelsLast); };
      if (needs_input) {
        by_the_faster(
            "convolution's input", input, weight, true, [&] { of_input = std::get<0>(convolved({true, false, false})); },
            [&] { of_input = product_of_pixels(gradient(), matrix_of(factor), std::nullopt); });
      }
      if (needs_weight || needs_bias) {
        by_the_faster(
            "convolution's weight", input, weight, needs_weight,
            [&] { std::tie(std::ignore, of_weight, of_bias) = convolved({false, needs_weight, needs_bias}); },
            [&] {
              const auto rows = pixels(gradient());
              const auto found = layer_gradients(rows, pixels(input), matrix_of(weight), /*bias_type=*/std::nullopt);
              of_weight = found.weight.reshape(weight.sizes());
              if (needs_bias) {
                of_bias = bias_gradient(rows, static_cast<at::ScalarType>(bias->second.toInt()));
              }
            });
      }
    }
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
