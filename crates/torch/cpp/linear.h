// Linear layers that do not multiply in 16 bits where the processor cannot, and keep no activations.
#pragma once

#include "tensors.h"

#include <cstdint>
#include <optional>

namespace brigade {

struct ActivationOptions;

// input weight^T + bias, as libtorch's linear. The bias is one tensor or none. A new tensor.
std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias);

// activation(values + bias) weight^T + weight_bias, of a gated pair times (up + up_bias), as `activation` takes them. Where
// it computes the activation again in the backward, it keeps its inputs alone. A new tensor.
std::unique_ptr<Tensor> activation_linear(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const Tensor& weight, rust::Slice<const TensorRef> weight_bias,
    const ActivationOptions& options);

// The types of a layer's input and product where this file can compute them; outside of autocast all are of one type.
struct ProductTypes {
  bool casts;
  at::ScalarType input, product;

  explicit ProductTypes(const at::Tensor& x);

  // Whether autocast's product would cast the weight in each call, or round its gradient.
  bool improves(const at::Tensor& weight) const;
  // Whether `x`, with `width` features for each row of the weight, and the weights are of these types and shapes.
  bool fit(
      const at::Tensor& x, int64_t width, const at::Tensor& weight, const std::optional<at::Tensor>& bias) const;
  // The weight, or autocast's copy of it where a product in its type has none of its own.
  at::Tensor factor(const at::Tensor& weight) const;
};

// Gradients of a layer's weight, in its type and layout, and of its bias, if `bias_type` is given, for those of its
// output, [rows, out], and its input, [rows, in].
struct LayerGradients {
  at::Tensor weight, bias;
};
LayerGradients layer_gradients(
    const at::Tensor& doutput, const at::Tensor& input, const at::Tensor& weight,
    std::optional<at::ScalarType> bias_type);
// The bias's alone.
at::Tensor bias_gradient(const at::Tensor& doutput, at::ScalarType type);

// Whether the device's products of 16 bits can add to sums of 32 bits.
bool sums_in_float32(at::ScalarType type, const at::Device& device);

} // namespace brigade
