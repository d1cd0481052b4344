// Embeddings whose weight is also that of a head, and sums of embeddings.
#pragma once

#include "tensors.h"

namespace brigade {

struct TiedEmbedding;

// The weight's rows of the ids, and an alias of the weight for the head. A negative `padding` is none.
TiedEmbedding tied_embedding(const Tensor& weight, const Tensor& ids, int64_t padding);

// dropout(sum of the rows of several weights), and an alias of the first weight for the head. The ids of the other
// weights are broadcast to those of the first one.
TiedEmbedding embedding_sum(
    rust::Slice<const TensorRef> weights, rust::Slice<const TensorRef> ids, rust::Slice<const int64_t> paddings,
    double dropout);

} // namespace brigade
