// Attention with dropout that keeps no weights.
#pragma once

#include "tensors.h"

namespace brigade {

struct AttentionOptions;
struct AttentionCall;
enum class AttentionKernel : std::uint8_t;

// The kernel of a GPU for a call: the one that libtorch chooses, but not cuDNN's for a probability of dropout that is not
// a multiple of 1/16. Some of cuDNN's kernels round the probability to sixteenths, and libtorch 2.11 chooses them
// nevertheless.
AttentionKernel attention_kernel(const AttentionCall& call) noexcept;

// softmax(queries keys^T scale + mask) values, of [batch, heads, length, width]. The mask is one tensor or
// none. A new tensor.
std::unique_ptr<Tensor> attention(
    const Tensor& queries,
    const Tensor& keys,
    const Tensor& values,
    rust::Slice<const TensorRef> mask,
    const AttentionOptions& options);

} // namespace brigade
