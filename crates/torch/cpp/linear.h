// Linear layers that do not multiply in 16 bits where the processor cannot, and keep no activations.
#pragma once

#include "tensors.h"

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

// Whether the device's products of 16 bits can add to sums of 32 bits.
bool sums_in_float32(at::ScalarType type, const at::Device& device);

} // namespace brigade
