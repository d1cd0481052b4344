// Cross-entropy over many classes, with its gradient made in the forward.
#pragma once

#include "group.h"

namespace brigade {

struct CrossEntropyOptions;
struct CrossEntropyLoss;
struct VocabularyPart;

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

// The same two where each rank of a group has the logits, or the weight's rows, of a part of the classes. Sums over a
// row are one message for each chunk of rows. The gradient of `hidden` is this rank's part of its sum.
CrossEntropyLoss vocabulary_parallel_cross_entropy(
    const Group& group,
    const Tensor& logits,
    const Tensor& targets,
    const VocabularyPart& part,
    const CrossEntropyOptions& options);
CrossEntropyLoss linear_vocabulary_parallel_cross_entropy(
    const Group& group,
    const Tensor& hidden,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    const Tensor& targets,
    const VocabularyPart& part,
    const CrossEntropyOptions& options);

} // namespace brigade
