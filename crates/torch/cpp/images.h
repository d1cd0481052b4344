// Images of bytes as normalised values.
#pragma once

#include "tensors.h"

namespace brigade {

// Returns (images / 255 - mean) / deviation in channels_last, in a floating-point type. `images` are bytes [n, c, h, w];
// `mean` and `deviation` have c values.
std::unique_ptr<Tensor> normalized_images(
    const Tensor& images, rust::Slice<const float> mean, rust::Slice<const float> deviation, int8_t kind);

} // namespace brigade
