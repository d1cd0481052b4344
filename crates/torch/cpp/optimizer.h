// libtorch's fused optimizer kernels: one pass over all parameters.
#pragma once

#include "tensors.h"

namespace brigade {

struct AdamStep;
struct SgdStep;

void fused_adam(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> exp_avgs,
    rust::Slice<const TensorRef> exp_avg_sqs,
    rust::Slice<const TensorRef> max_exp_avg_sqs,
    rust::Slice<const TensorRef> steps,
    const AdamStep& step);
void fused_sgd(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> momentum_buffers,
    const SgdStep& step);

} // namespace brigade
