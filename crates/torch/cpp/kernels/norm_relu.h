// Batch normalisation, the addition of a shortcut, ReLU and max pooling by the kernels in kernels/norm_relu.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

namespace brigade {

// Returns the kernels for the tensor, or null.
kernels::Program* norm_kernels(const at::Tensor& x);

// The kernels can read the tensor: 16-bit values [n, c, h, w] in channels_last, eight channels or a multiple.
bool fits_norm_kernels(const at::Tensor& t);
// The kernels can pool the normalised tensor, which they can read.
bool fits_norm_pooling(const at::Tensor& t);

// What follows a normalisation.
enum class NormEnd : int64_t { kNothing, kRelu, kReluAndMaxPool };

// Windows of max pooling, each height and width.
struct PoolWindows {
  std::array<int64_t, 2> kernel;
  std::array<int64_t, 2> stride;
  std::array<int64_t, 2> padding;
};

// Returns the windows that the kernels have.
PoolWindows norm_pool_windows();

// Weight, bias and running statistics, float32 [channels].
struct NormParameters {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  double momentum;
  double eps;
};

struct NormForward {
  at::Tensor y;
  // Mean, 1 / sqrt(variance + eps), slope and offset: [4, channels].
  at::Tensor statistics;
  // Bytes for the backward. With a shortcut a bit for each value of y, set where it is not 0 or less: [n, h, w,
  // channels / 8]. With pooling the place of each value's maximum in its window, or 255 where ReLU lets no gradient
  // through: [n, h', w', channels]. Else undefined.
  at::Tensor kept;
};

// A shortcut is only added in front of a ReLU without pooling.
NormForward norm_relu_forward_gpu(
    kernels::Program& program, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
    const NormParameters& parameters, NormEnd end);

// What the backward of a normalisation is given: gradients of its output by one use or two (`second` is undefined or
// dense, as x is), its input, and results of the forward.
struct NormGradient {
  at::Tensor dy;
  at::Tensor second;
  at::Tensor x;
  at::Tensor statistics;
  at::Tensor kept;
  bool shortcut;
  NormEnd end;
};

// Gradients of x (undefined unless wanted), weight, bias, and the shortcut (undefined where there is none).
struct NormBackward {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor shortcut;
};

NormBackward norm_relu_backward_gpu(kernels::Program& program, const NormGradient& given, bool wants_x);

// Returns, for each value of a tensor like x, whether its bit of `signs` is set.
at::Tensor unpacked_signs(const at::Tensor& signs);

} // namespace brigade
