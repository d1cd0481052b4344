// Batch normalisation, the addition of a shortcut and ReLU, as one operation.
#pragma once

#include "tensors.h"

namespace brigade {

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

} // namespace brigade
