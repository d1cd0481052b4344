// Feed-forward layers: two linear layers with an activation between them, as one operation where products of the GPU
// have epilogues for it.
#pragma once

#include "tensors.h"

namespace brigade {

struct ActivationOptions;

// activation(input weight^T + bias) second_weight^T + second_bias. Lists have one tensor or none. A new tensor.
std::unique_ptr<Tensor> feed_forward(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias, const Tensor& second_weight,
    rust::Slice<const TensorRef> second_bias, const ActivationOptions& options);

} // namespace brigade
