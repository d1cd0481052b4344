// LayerNorm and RMSNorm of a residual stream, with the addition of a branch in the same pass.
#pragma once

#include "tensors.h"

namespace brigade {

struct NormResidualOptions;
struct ResidualNorm;

// Adds dropout(branch + branch_bias) to the stream and normalises the sum over the dimensions of `shape`, its last ones.
// Lists have one tensor or none.
ResidualNorm norm_residual(
    const Tensor& stream, rust::Slice<const TensorRef> branch, rust::Slice<const TensorRef> branch_bias,
    rust::Slice<const TensorRef> weight, rust::Slice<const TensorRef> bias, rust::Slice<const int64_t> shape,
    const NormResidualOptions& options);

} // namespace brigade
