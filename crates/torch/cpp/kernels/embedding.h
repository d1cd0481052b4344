// Sums of rows of embedding tables with dropout, by the kernels in kernels/embedding.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace brigade {

struct EmbeddingLookup {
  // float32 [vocabulary, width].
  at::Tensor weight;
  // int64 [period], contiguous: place p of the sum has the row ids[p % period].
  at::Tensor ids;
};

struct EmbeddingDropout {
  double probability = 0;
  // int64 on the device; undefined without dropout.
  at::Tensor seed;
};

struct EmbeddingGradients {
  // Gradient of the sum in front of dropout, if it is wanted and there is dropout.
  at::Tensor rows;
  at::Tensor weight;
};

// Number of tables that the kernels can add up.
constexpr size_t kMostEmbeddings = 3;

// Returns the kernels for the weight's device, where autocast's type is `type`, or null.
kernels::Program* embedding_kernels(const at::Tensor& weight, at::ScalarType type);

// Returns `true` if the kernels can read the weight: float32 [vocabulary, width] of a GPU.
bool fits_embedding_kernels(const at::Tensor& weight);

// Returns dropout(sum of the rows), [places, width]. An id without a row fails on the device.
at::Tensor embedding_forward_gpu(
    kernels::Program& program, const std::vector<EmbeddingLookup>& lookups, int64_t places,
    const EmbeddingDropout& dropout);

// Returns dropout(values) of float32 [places, width].
at::Tensor embedding_dropout_gpu(
    kernels::Program& program, const at::Tensor& values, const EmbeddingDropout& dropout);

// Returns `true` if it takes few comparisons to find the places of each of the table's rows.
bool fits_embedding_backward(int64_t vocabulary, int64_t period);

// Returns the gradient of a table [vocabulary, width] of which the sum, whose gradient is `dsum` [places, width], has
// the rows ids[place % period]. The row `padding`, unless it is negative, gets none.
EmbeddingGradients embedding_backward_gpu(
    kernels::Program& program, const at::Tensor& dsum, int64_t vocabulary, const at::Tensor& ids, int64_t padding,
    const EmbeddingDropout& dropout, bool wants_rows);

} // namespace brigade
