// Dropout without a stored mask, and with an addition.
#pragma once

#include "tensors.h"

namespace brigade {

// dropout(input) + residual in training. The residual is one tensor or none. A new tensor.
std::unique_ptr<Tensor> dropout(
    const Tensor& input, rust::Slice<const TensorRef> residual, double probability);

} // namespace brigade
