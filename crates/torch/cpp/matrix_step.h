// Optimizer steps that treat a parameter as a matrix, by tensor operations.
//
// Each function takes the tensors of `count` parameters, role after role in the order that it names. On the
// CPU parameters are stepped one by one; elsewhere, where numbers of the step are on a device (`device`, what
// `StepNumbers` takes), and with `operations`, foreach operations step all together.
#pragma once

#include "tensors.h"

namespace brigade {

struct AdafactorStep;
struct MuonStep;

// parameter, gradient, row_var, col_var; or parameter, gradient, variance for less than two dimensions
void adafactor(
    rust::Slice<const TensorRef> tensors, size_t count, const AdafactorStep& step,
    rust::Slice<const TensorRef> device, bool operations);
// parameter, gradient, momentum_buffer, all matrices
void muon(
    rust::Slice<const TensorRef> tensors, size_t count, const MuonStep& step,
    rust::Slice<const TensorRef> device, bool operations);

} // namespace brigade
