// Batch normalisation with the statistics of all ranks.
#pragma once

#include "group.h"

namespace brigade {

// In training only. Lists have one tensor or none; running statistics are changed in place. A new tensor.
std::unique_ptr<Tensor> sync_batch_norm(
    const Group& group,
    const Tensor& input,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    double momentum,
    double eps);

} // namespace brigade
