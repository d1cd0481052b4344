// An embedding whose weight is also that of a head.
#pragma once

#include "tensors.h"

namespace brigade {

struct TiedEmbedding;

// The weight's rows of the ids, and an alias of the weight for the head. A negative `padding` is none.
TiedEmbedding tied_embedding(const Tensor& weight, const Tensor& ids, int64_t padding);

} // namespace brigade
