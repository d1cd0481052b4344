// The largest value of each window of an image.
#pragma once

#include "tensors.h"

#include <array>

namespace brigade {

// Kernel, stride and padding have height and width. A new tensor.
std::unique_ptr<Tensor> max_pool2d(
    const Tensor& input,
    const std::array<int64_t, 2>& kernel,
    const std::array<int64_t, 2>& stride,
    const std::array<int64_t, 2>& padding);

} // namespace brigade
