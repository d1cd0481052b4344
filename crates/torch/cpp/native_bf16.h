// Whether 16-bit products are worth computing in 16 bits.
#pragma once

#include <ATen/core/Tensor.h>

namespace brigade {

// The type to multiply matrices in where `wanted` is asked for. A processor without 16-bit products computes
// them five times slower than those of float32, and less exactly.
inline at::ScalarType product_type(at::ScalarType wanted, const at::Device& device) {
  if (!device.is_cpu() || (wanted != at::kBFloat16 && wanted != at::kHalf)) {
    return wanted;
  }
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  static const bool has_bfloat16 = __builtin_cpu_supports("avx512bf16");
  return wanted == at::kBFloat16 && has_bfloat16 ? wanted : at::kFloat;
#else
  return wanted;
#endif
}

} // namespace brigade
