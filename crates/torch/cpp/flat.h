// Optimizer steps that libtorch has no fused kernel for: one pass over the memory of a parameter, its
// gradient and its state.
//
// Each function takes the tensors of `count` parameters, role after role in the order that it names. On the CPU a
// parameter's are read once, in parallel (`step_kernels.h`); elsewhere (CUDA, 16 bits of LAMB and LARC), and where
// numbers of the step are on a device, foreach operations step all parameters together. `operations` asks for the
// latter: for tests that compare the two. `device` is what `StepNumbers` takes.
#pragma once

#include "tensors.h"

namespace brigade {

struct RmsPropStep;
struct RectifiedStep;
struct QhAdamStep;
enum class StepPart : uint8_t;
struct LambStep;
struct LarcStep;
struct LookAheadStep;

// parameter, gradient, square_avg, then grad_avg when centered, then momentum_buffer when it has momentum
void rmsprop(
    rust::Slice<const TensorRef> tensors, size_t count, const RmsPropStep& step,
    rust::Slice<const TensorRef> device, bool operations);
// parameter, gradient, exp_avg, exp_avg_sq
void rectified(
    rust::Slice<const TensorRef> tensors, size_t count, const RectifiedStep& step,
    rust::Slice<const TensorRef> device, bool operations);
// parameter, gradient, exp_avg, exp_avg_sq
void qhadam(
    rust::Slice<const TensorRef> tensors, size_t count, const QhAdamStep& step,
    rust::Slice<const TensorRef> device, bool operations);
// parameter, gradient, exp_avg, exp_avg_sq
void lamb(
    rust::Slice<const TensorRef> tensors, size_t count, const LambStep& step, StepPart part,
    rust::Slice<const TensorRef> sums, rust::Slice<const TensorRef> device, bool operations);
// parameter, gradient, then momentum_buffer when it has momentum
void larc(
    rust::Slice<const TensorRef> tensors, size_t count, const LarcStep& step, StepPart part,
    rust::Slice<const TensorRef> sums, rust::Slice<const TensorRef> device, bool operations);
// fast, slow: slow goes `alpha` of the way to fast, and fast to slow. With a count of steps on the device only
// where that is a multiple of `every`.
void look_ahead(
    rust::Slice<const TensorRef> tensors, size_t count, const LookAheadStep& step,
    rust::Slice<const TensorRef> device, bool operations);

// Whether two tensors have the same device, kind, shape and strides.
bool same_layout(const Tensor& first, const Tensor& second);

} // namespace brigade
