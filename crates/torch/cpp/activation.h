// Activations of linear layers, and gated pairs of them.
#pragma once

#include "tensors.h"

#include "kernels/activation.h"

#include <cstdint>

namespace brigade {

struct ActivationOptions;

// activation(values + bias), times (up + up_bias) of a gated pair. Lists have one tensor or none. A new tensor.
std::unique_ptr<Tensor> activation(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options);

// Returns `true` if kernels of the device add a bias in the pass of the activation, for the output of a linear layer with
// this input.
bool activation_adds_bias(const Tensor& input);

// What computes an activation, or all gradients of it, in one pass: the kernels of a GPU, or loops of a CPU, for pairs
// without biases. The pass keeps nothing but the input.
class ActivationPass {
 public:
  explicit ActivationPass(const ActivationInput& input);

  // Returns `false` if the input is left to libtorch's operations.
  explicit operator bool() const {
    return program_ != nullptr || has_loops_;
  }
  at::Tensor forward(const ActivationInput& input, int64_t activation) const;
  // May overwrite `doutput` if `may_overwrite` is set.
  ActivationGradients backward(
      const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool may_overwrite,
      ActivationWishes wishes) const;

 private:
  kernels::Program* program_;
  bool has_loops_;
};

// What `activation` takes, checked.
ActivationInput activation_input(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options);
// Returns the activation, in one pass where there is one.
at::Tensor activated(const ActivationInput& input, int64_t activation);
// The same by libtorch's operations, one after the other.
at::Tensor activated_by_operations(const ActivationInput& input, int64_t activation);
// The output, and the gradients of all tensors of the input for one of the output, by libtorch's operations. With
// `recorded` they can be differentiated once more. Gradients of biases have their types.
ActivationGradients differentiated_by_operations(
    const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool recorded);
// libtorch's name of the approximation where the activation is GELU, or an empty text.
const char* gelu_approximation(int64_t activation);

} // namespace brigade
