// Batch normalisation with the statistics of all ranks.
#pragma once

#include "group.h"

namespace brigade {

// In training only. `weight` and `bias` may be null, and so may both running statistics, which are
// changed in place. A new tensor.
Tensor* sync_batch_norm(
    const Group& group,
    const TensorRef& input,
    const Tensor* weight,
    const Tensor* bias,
    const Tensor* running_mean,
    const Tensor* running_var,
    double momentum,
    double eps);

} // namespace brigade
