// Steps in one pass over all parameters of a device and kind: the loops of `step_kernels.h` on the CPU; on a GPU, for Adam
// and SGD in float32, the kernels of `kernels/optimizer.h`; libtorch's fused kernels elsewhere. `device` is what `StepNumbers` takes. Adagrad off the CPU or with numbers on a device, and
// SGD with dampening whose count of steps is on a device, are made of foreach operations.
#pragma once

#include "tensors.h"

namespace brigade {

struct AdamStep;
struct SgdStep;
struct AdagradStep;

void fused_adam(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> exp_avgs,
    rust::Slice<const TensorRef> exp_avg_sqs,
    rust::Slice<const TensorRef> max_exp_avg_sqs,
    rust::Slice<const TensorRef> steps,
    const AdamStep& step,
    rust::Slice<const TensorRef> device);
void fused_sgd(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> momentum_buffers,
    const SgdStep& step,
    rust::Slice<const TensorRef> device);
void fused_adagrad(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> state_sums,
    rust::Slice<const TensorRef> steps,
    const AdagradStep& step,
    rust::Slice<const TensorRef> device);

} // namespace brigade
