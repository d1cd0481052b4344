// Dropout without a stored mask, and with an addition.
#pragma once

#include "tensors.h"

namespace brigade {

// dropout(input) + residual in training. The residual is one tensor or none. A new tensor.
std::unique_ptr<Tensor> dropout(
    const Tensor& input, rust::Slice<const TensorRef> residual, double probability);

// Seeds of the kernels' dropout from the generator of a GPU, as `dropout` draws one on the CPU: int64 [count] on the
// GPU.
at::Tensor seeds_from_gpu(const at::Device& device, int64_t count);

} // namespace brigade
