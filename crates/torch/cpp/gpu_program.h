// The kernels of norm_relu.cu on NVIDIA GPUs, compiled by the NVRTC that libtorch brings. The feature cuda.
#pragma once

#include "norm_relu_gpu.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace brigade {

// The kernels for values of the type on the device, compiled at the first call; null, with one warning, where that fails,
// and where the GPU is older than compute capability 8.0 or the type is another than float16 and bfloat16.
NormKernels* gpu_program(c10::DeviceIndex device, c10::ScalarType type);

} // namespace brigade
