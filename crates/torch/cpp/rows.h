// Images in channels_last as rows of channels, for loops of our own.
#pragma once

#include "every_cpu.h"

#include <ATen/core/Tensor.h>

namespace brigade {

// With fewer, the inner loops are shorter than a few vectors.
constexpr int64_t kFewestChannels = 16;

// An element as the type in which it is computed with.
template <typename T>
BRIGADE_INLINE float wide(T value) {
  return static_cast<float>(value);
}

// The loops can read the tensor: float32 or bfloat16 on the CPU, [n, c, h, w] in channels_last.
inline bool lies_in_rows(const at::Tensor& t) {
  const bool has_loops = t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16;
  return t.layout() == at::kStrided && t.device().is_cpu() && has_loops && t.dim() == 4 &&
      t.size(1) >= kFewestChannels && !t.is_neg() && t.is_contiguous(at::MemoryFormat::ChannelsLast);
}

} // namespace brigade
