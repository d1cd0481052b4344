// Optimizer steps that libtorch has no fused kernel for: one pass over the memory of a parameter, its
// gradient and its state.
//
// Each function takes the tensors of one parameter in the order that it names. On the CPU, in float32 and
// float64, dense and all of one layout, they are read once, in parallel; elsewhere (CUDA, half precision)
// tensor operations do the same. `operations` asks for the latter: for tests that compare the two.
#pragma once

#include "tensors.h"

namespace brigade {

struct RmsPropStep;
struct RectifiedStep;
struct LambStep;
struct LarcStep;

// parameter, gradient, square_avg, then grad_avg when centered, then momentum_buffer when it has momentum
void rmsprop(rust::Slice<const TensorRef> tensors, const RmsPropStep& step, bool operations);
// parameter, gradient, exp_avg, exp_avg_sq
void rectified(rust::Slice<const TensorRef> tensors, const RectifiedStep& step, bool operations);
// parameter, gradient, exp_avg, exp_avg_sq
void lamb(rust::Slice<const TensorRef> tensors, const LambStep& step, bool operations);
// parameter, gradient, then momentum_buffer when it has momentum
void larc(rust::Slice<const TensorRef> tensors, const LarcStep& step, bool operations);
// fast, slow: slow goes `alpha` of the way to fast, and fast to slow
void look_ahead(rust::Slice<const TensorRef> tensors, double alpha, bool operations);

// Whether two tensors have the same device, kind, shape and strides.
bool same_layout(const Tensor& first, const Tensor& second);

} // namespace brigade
