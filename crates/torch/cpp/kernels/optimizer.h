// Steps of Adam, AdamW and SGD by the kernels in kernels/optimizer.cu.
#pragma once

#include "program.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace brigade {

struct AdamStep;
struct SgdStep;
class StepNumbers;

// A parameter and what its step reads and writes. Undefined tensors stand for none.
struct OptimizerRow {
  // Rows of float32 of one length on one GPU: parameter and gradient, the states that the rule has, in the order of
  // PyTorch's arguments, and one number of float32, the count of steps, for Adam.
  at::Tensor parameter;
  at::Tensor gradient;
  std::vector<at::Tensor> states;
  at::Tensor steps;
  // Contiguous, in the type of the program's elements, with at least as many elements as the parameter: gets a copy of
  // it.
  at::Tensor copy;
};

// Step the rows, which are all on one GPU, in one launch for each 56 of them.
void adam_gpu(
    kernels::Program& program, const std::vector<OptimizerRow>& rows, const AdamStep& step, const StepNumbers& now);
void sgd_gpu(
    kernels::Program& program, const std::vector<OptimizerRow>& rows, const SgdStep& step, const StepNumbers& now);

} // namespace brigade
