// Optimizer steps that treat a parameter as a matrix, by tensor operations.
#pragma once

#include "tensors.h"

namespace brigade {

struct AdafactorStep;
struct MuonStep;

// parameter, gradient, then row_var and col_var, or variance for less than two dimensions
void adafactor(rust::Slice<const TensorRef> tensors, const AdafactorStep& step);
// parameter, gradient, momentum_buffer, all matrices
void muon(rust::Slice<const TensorRef> tensors, const MuonStep& step);

} // namespace brigade
