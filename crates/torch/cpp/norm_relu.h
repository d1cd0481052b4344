// Batch normalisation, the addition of a shortcut, ReLU and max pooling, as one operation.
#pragma once

#include "tensors.h"

namespace brigade {

struct ResidualInputs;

// relu(batch_norm(input) + shortcut), or batch_norm(input) without `relu`. Lists have one tensor or none; the running statistics are
// changed in place by training. A new tensor.
std::unique_ptr<Tensor> batch_norm_relu(
    const Tensor& input,
    rust::Slice<const TensorRef> shortcut,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    bool training,
    double momentum,
    double eps,
    bool relu);

// max_pool2d(relu(batch_norm(input))) with windows of 3 x 3, a stride of 2 and a padding of 1. A new tensor.
std::unique_ptr<Tensor> batch_norm_relu_max_pool(
    const Tensor& input,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    bool training,
    double momentum,
    double eps);

// The input of a residual block for its branch and for its shortcut: the same values twice.
ResidualInputs residual_inputs(const Tensor& input);

} // namespace brigade
