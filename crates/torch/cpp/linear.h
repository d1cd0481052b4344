// Linear layers that do not multiply in 16 bits where the processor cannot, and keep no activations.
#pragma once

#include "tensors.h"

namespace brigade {

// input weight^T + bias, as libtorch's linear. The bias is one tensor or none. A new tensor.
std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias);

// gelu(input) weight^T + bias, which keeps the input alone. libtorch's name of the approximation.
std::unique_ptr<Tensor> gelu_linear(
    const Tensor& input,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    rust::Str approximate);

} // namespace brigade
