// Convolutions that take copies of their weights in 16 bits.
#pragma once

#include "tensors.h"

#include <array>

namespace brigade {

// As libtorch's convolution of images; stride, padding and dilation have height and width. The bias is one tensor or
// none. A new tensor.
std::unique_ptr<Tensor> convolution2d(
    const Tensor& input, const Tensor& weight, rust::Slice<const TensorRef> bias, const std::array<int64_t, 2>& stride,
    const std::array<int64_t, 2>& padding, const std::array<int64_t, 2>& dilation, int64_t groups);

} // namespace brigade
