// Activations of linear layers and their gated pairs by the kernels in kernels/activation.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace brigade {

// What goes into an activation. Undefined tensors stand for none.
struct ActivationInput {
  // [..., width]; [..., 2 * width] of a packed pair, whose first half is the gate. Of a pair it is the gate.
  at::Tensor values;
  // Of as many values as the last dimension has, in any floating-point type.
  at::Tensor bias;
  // The other half of a pair that is not packed, and its bias.
  at::Tensor up;
  at::Tensor up_bias;
  bool is_packed = false;

  bool is_gated() const {
    return is_packed || up.defined();
  }
  int64_t width() const {
    return values.size(-1) / (is_packed ? 2 : 1);
  }
  std::vector<int64_t> output_sizes() const {
    auto sizes = values.sizes().vec();
    sizes.back() = width();
    return sizes;
  }
};

struct ActivationGradients {
  // The output once more, if it is wanted.
  at::Tensor output;
  at::Tensor values;
  at::Tensor up;
  // float32, if they are wanted: of the biases, each with the values of its input's last dimension.
  at::Tensor bias;
  at::Tensor up_bias;
};

// What a backward returns beside the gradients of its inputs.
struct ActivationWishes {
  bool output = false;
  bool biases = false;
};

// Returns the tensor as a matrix [rows, columns] whose columns are adjacent.
at::Tensor activation_rows(const at::Tensor& t);

// Returns the kernels that can read the input, or null: for bfloat16, float16 and float32 on a GPU.
kernels::Program* activation_kernels(const ActivationInput& input);

// Returns activation(values + bias), times (up + up_bias) of a pair. `activation` is an ActivationNumber.
at::Tensor activation_forward_gpu(kernels::Program& program, const ActivationInput& input, int activation);

// Overwrites `doutput` if it is contiguous and `may_overwrite` is set.
ActivationGradients activation_backward_gpu(
    kernels::Program& program, const ActivationInput& input, int activation, const at::Tensor& doutput,
    bool may_overwrite, ActivationWishes wishes);

} // namespace brigade
