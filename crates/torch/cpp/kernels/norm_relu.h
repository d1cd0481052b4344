// Batch normalisation, the addition of a shortcut and ReLU by the kernels in kernels/norm_relu.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace brigade {

// Returns the kernels for the tensor, or null.
kernels::Program* norm_kernels(const at::Tensor& x);

// The kernels can read the tensor: 16-bit values [n, c, h, w] in channels_last, eight channels or a multiple.
bool fits_norm_kernels(const at::Tensor& t);

// The output, and mean, 1 / sqrt(variance + eps), slope and offset: [4, channels].
std::tuple<at::Tensor, at::Tensor> norm_relu_forward_gpu(
    kernels::Program& program, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& running_mean,
    const at::Tensor& running_var, double momentum, double eps, bool relu);

// The gradients of x (undefined unless wanted), weight, bias and shortcut (undefined where there is none).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_relu_backward_gpu(
    kernels::Program& program, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& y,
    const at::Tensor& statistics, bool shortcut, bool relu, bool wants_x);

} // namespace brigade
