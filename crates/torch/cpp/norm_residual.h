// LayerNorm and RMSNorm of a residual stream, with the addition of a branch in the same pass.
#pragma once

#include "tensors.h"

namespace brigade {

struct NormResidualOptions;
struct ResidualNorm;

// Adds dropout(branch + branch_bias) to the stream and normalises the sum over the dimensions of `shape`, its last ones.
// The kernels drop by the seed, int64 [1] on the stream's device, or draw one. Lists have one tensor or none.
ResidualNorm norm_residual(
    const Tensor& stream, rust::Slice<const TensorRef> branch, rust::Slice<const TensorRef> branch_bias,
    rust::Slice<const TensorRef> branch_seed, rust::Slice<const TensorRef> weight, rust::Slice<const TensorRef> bias,
    rust::Slice<const int64_t> shape, const NormResidualOptions& options);

// Seeds [count] for the dropout of a stream's branches, or null where none of the kernels would read them.
std::unique_ptr<Tensor> norm_residual_seeds(const Tensor& stream, int64_t count);

// Whether the kernels add the bias of a linear layer with this input to its output, a branch of a residual stream.
bool norm_residual_adds_bias(const Tensor& input, const Tensor& bias);

} // namespace brigade
