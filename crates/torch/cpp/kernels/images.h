// Normalisation of images of bytes by the kernel in kernels/images.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

namespace brigade {

// Returns the kernel for images [n, c, h, w] of bytes and a result of a type, or null.
kernels::Program* image_kernels(const at::Tensor& images, c10::ScalarType type);

// Returns the images in channels_last. `mean` and `deviation` have a value for each channel.
at::Tensor normalized_images_gpu(
    kernels::Program& program, const at::Tensor& images, c10::ArrayRef<float> mean, c10::ArrayRef<float> deviation,
    c10::ScalarType type);

} // namespace brigade
