// Rotary position embeddings in one pass.
#pragma once

#include "tensors.h"

namespace brigade {

// x cos + turned(x) sin, where turned(x) is the negated second half of the last dimension and the first one. A new
// tensor.
std::unique_ptr<Tensor> rotary(const Tensor& x, const Tensor& cos, const Tensor& sin);

struct RotatedPair;

// The same of queries and keys, of which the number of heads may differ.
RotatedPair rotary_pair(const Tensor& queries, const Tensor& keys, const Tensor& cos, const Tensor& sin);

// Rotates the first `heads` heads of a product [batch, tokens, all heads * width], in place where that is possible. Returns
// the product with the rotated heads.
std::unique_ptr<Tensor> rotary_packed(const Tensor& product, int64_t heads, const Tensor& cos, const Tensor& sin);

} // namespace brigade
