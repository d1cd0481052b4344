// A linear layer that does not multiply in 16 bits where the processor cannot.
#pragma once

#include "tensors.h"

namespace brigade {

// input weight^T + bias, as libtorch's linear. The bias is one tensor or none. A new tensor.
std::unique_ptr<Tensor> linear(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias);

} // namespace brigade
