// Attention to the tokens of all ranks of a group, of which each has a part.
#pragma once

#include "regions.h"

namespace brigade {

struct AttentionOptions;

// Of [batch, heads, own tokens, size]; under a causal mask a rank has an early and a late half. Keys and values are gathered,
// or travel from rank to rank.
std::unique_ptr<Tensor> context_attention(
    const Group& group,
    const Tensor& queries,
    const Tensor& keys,
    const Tensor& values,
    bool ring,
    const AttentionOptions& options);

} // namespace brigade
