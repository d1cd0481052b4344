// Cross-entropy of rows of logits by the kernels in kernels/cross_entropy.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brigade {

struct RowLossOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  // Factor of the gradient.
  double scale = 1;
};

// Returns the kernels for the logits' device and type, or null.
kernels::Program* cross_entropy_kernels(const at::Tensor& logits);

// Returns `true` if the kernels can read the logits: [rows, columns] of bfloat16, float16 or float32 whose columns are
// adjacent. Rows may be any distance apart; multiples of 16 bytes are faster.
bool fits_cross_entropy_kernels(const at::Tensor& logits);

// Returns the losses, float32 [rows]: 0 for rows whose target is `ignore_index`. The first `classes` columns of the logits
// are classes; the others are padding. `targets` is int64 [rows]. A target that is no class fails on the device.
//
// `gradient`, unless undefined, has the logits' shape and type and is filled with the losses' gradient times
// options.scale, divided by `count` (an int64 scalar on the device; undefined for 1; 0 counts as 1). It may be the logits.
// In padding it is zero.
at::Tensor cross_entropy_rows_gpu(
    kernels::Program& program, const at::Tensor& logits, int64_t classes, const at::Tensor& targets,
    const at::Tensor& count, const RowLossOptions& options, const at::Tensor& gradient);

} // namespace brigade
