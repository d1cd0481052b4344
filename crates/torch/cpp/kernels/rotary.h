// Rotary position embeddings by the kernels in kernels/rotary.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace brigade {

// Heads [batch, heads, tokens, width] whose values are adjacent, and where their rotation goes.
struct RotaryPart {
  at::Tensor from;
  // Of the same shape. It may be `from`, but must not overlap it otherwise.
  at::Tensor to;
  // Number of the heads that are rotated; the others are copied.
  int64_t rotated;
};

// Returns the kernels that can rotate the heads by the tables, [batch or 1, 1, tokens, width] of the heads' type or
// float32, or null.
kernels::Program* rotary_kernels(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin);

// Rotates the heads of one tensor or of two, in one launch. `back` is the gradient: the rotation by the opposite
// angles.
void rotary_gpu(
    kernels::Program& program, const RotaryPart& part, const std::optional<RotaryPart>& other,
    const at::Tensor& cos, const at::Tensor& sin, bool back);

} // namespace brigade
