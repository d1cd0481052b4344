// Cross-entropy over many classes, with its gradient made in the forward.
#pragma once

#include "tensors.h"

namespace brigade {

struct CrossEntropyOptions;
struct CrossEntropyLoss;

// Of given logits [..., classes] and whole targets of the shape before.
CrossEntropyLoss cross_entropy(
    const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options);

// Of hidden weight^T + bias, in chunks of rows. The bias is one tensor or none.
CrossEntropyLoss linear_cross_entropy(
    const Tensor& hidden,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    const Tensor& targets,
    const CrossEntropyOptions& options);

} // namespace brigade
