// Batch normalisation, the addition of a shortcut and ReLU, as one operation.
#pragma once

#include "tensors.h"

namespace brigade {

// relu(batch_norm(input) + shortcut). All pointers but the input may be null; the running statistics are
// changed in place by training. A new tensor.
Tensor* batch_norm_relu(
    const TensorRef& input,
    const Tensor* shortcut,
    const Tensor* weight,
    const Tensor* bias,
    const Tensor* running_mean,
    const Tensor* running_var,
    bool training,
    double momentum,
    double eps);

} // namespace brigade
