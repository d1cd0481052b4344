// Rotary position embeddings in one pass.
#pragma once

#include "tensors.h"

namespace brigade {

// x cos + turned(x) sin, where turned(x) is the negated second half of the last dimension and the first one. A new
// tensor.
std::unique_ptr<Tensor> rotary(const Tensor& x, const Tensor& cos, const Tensor& sin);

} // namespace brigade
