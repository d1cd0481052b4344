// Attention with dropout that keeps no weights.
#pragma once

#include "tensors.h"

namespace brigade {

struct AttentionOptions;

// softmax(queries keys^T scale + mask) values, of [batch, heads, length, width]. The mask is one tensor or
// none. A new tensor.
std::unique_ptr<Tensor> attention(
    const Tensor& queries,
    const Tensor& keys,
    const Tensor& values,
    rust::Slice<const TensorRef> mask,
    const AttentionOptions& options);

} // namespace brigade
