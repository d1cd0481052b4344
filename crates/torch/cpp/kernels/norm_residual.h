// LayerNorm and RMSNorm of a residual stream with the addition of a branch, by the kernels in kernels/norm_residual.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <optional>

namespace brigade {

// The parameters of a normalisation and of the branch that is added before it. Undefined tensors stand for none.
struct NormResidualRule {
  // float32 [width].
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor branch_bias;
  // RMSNorm in place of LayerNorm.
  bool rms = false;
  double eps = 0;
  // Probability of dropout of the branch. `seed` is its seed, an int64 on the device; undefined without dropout.
  double dropout = 0;
  at::Tensor seed;
};

struct NormResidualOutputs {
  // stream + dropout(branch + branch_bias), float32; the stream where there is no branch.
  at::Tensor sum;
  // Normalised values in 16 bits, and in float32 if they are wanted.
  at::Tensor normed;
  at::Tensor normed_float;
  // float32 [rows]. RMSNorm has no mean.
  at::Tensor mean;
  at::Tensor inverse;
};

struct NormResidualGradients {
  at::Tensor stream;
  at::Tensor branch;
  // float32 [3, width]: of weight, bias and branch_bias.
  at::Tensor columns;
};

// Returns the kernels for a stream whose normalised values have the type, or null.
kernels::Program* norm_residual_kernels(const at::Tensor& stream, at::ScalarType type);

// Returns `true` if the kernels can read the stream and the branch: float32 and a 16-bit type, of one shape, whose last
// dimension is a multiple of eight.
bool fits_norm_residual_kernels(
    const at::Tensor& stream, const std::optional<at::Tensor>& branch, at::ScalarType type);
// Returns `true` if the kernels can read parameters of the last dimension: one float32 for each column.
bool fits_norm_residual_kernels(const at::Tensor& stream, const at::Tensor& parameter);

NormResidualOutputs norm_residual_forward_gpu(
    kernels::Program& program, const at::Tensor& stream, const std::optional<at::Tensor>& branch,
    const NormResidualRule& rule, at::ScalarType type, bool wants_float);

// `outputs` are those of the forward, of which sum, mean and inverse are used. Gradients of outputs may be undefined for
// 0. `branch_type` is empty if there is no branch.
NormResidualGradients norm_residual_backward_gpu(
    kernels::Program& program, const NormResidualOutputs& outputs, const at::Tensor& dsum,
    const at::Tensor& dnormed, const at::Tensor& dnormed_float, const NormResidualRule& rule,
    std::optional<at::ScalarType> branch_type);

} // namespace brigade
