// Whether 16-bit products are worth computing in 16 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <string>

namespace brigade {

// Whether oneDNN may use the processor's instructions for bfloat16: `ONEDNN_MAX_CPU_ISA` limits it to older ones, with
// which it has no LSTM for bfloat16 at all. libtorch does not export oneDNN's own answer.
inline bool onednn_has_bfloat16() {
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (limit == nullptr) {
    limit = std::getenv("DNNL_MAX_CPU_ISA");
  }
  std::string name = limit == nullptr ? "" : limit;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char it) { return std::toupper(it); });
  constexpr std::array<const char*, 7> older{
      "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"};
  return std::find(older.begin(), older.end(), name) == older.end();
}

// The type to multiply matrices in where `wanted` is asked for. A processor without 16-bit products computes
// them five times slower than those of float32, and less exactly.
inline at::ScalarType product_type(at::ScalarType wanted, const at::Device& device) {
  if (!device.is_cpu() || (wanted != at::kBFloat16 && wanted != at::kHalf)) {
    return wanted;
  }
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  static const bool has_bfloat16 = __builtin_cpu_supports("avx512bf16") && onednn_has_bfloat16();
  return wanted == at::kBFloat16 && has_bfloat16 ? wanted : at::kFloat;
#else
  return wanted;
#endif
}

} // namespace brigade
