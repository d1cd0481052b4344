// What GPU programs need of CUDA's runtime. The feature cuda.
#pragma once

#include "products.h"
#include "program.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>

namespace brigade::kernels {

#ifdef BRIGADE_CUDA
constexpr bool kHasKernels = true;
#else
constexpr bool kHasKernels = false;
#endif

// Number of an element's type, as in kernels/common.cuh; -1 for a type that no kernel takes.
inline int32_t element_of(c10::ScalarType type) {
  switch (type) {
    case c10::kBFloat16:
      return 0;
    case c10::kHalf:
      return 1;
    case c10::kFloat:
      return 2;
    default:
      return -1;
  }
}

// Compute capability of the GPU, such as 90.
int32_t capability_of(c10::DeviceIndex device);
// Path of the library of libtorch that refers to NVRTC.
std::string nvrtc_library();
// Loads compiled code on a device.
std::unique_ptr<Program> load(c10::DeviceIndex device, const void* code);
// Returns the products of cuBLASLt on a device.
std::unique_ptr<Products> library_products(c10::DeviceIndex device);

} // namespace brigade::kernels
