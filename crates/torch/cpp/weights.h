// Copies of weights in 16 bits for products, kept as long as nothing writes to the weights.
//
// A copy belongs to a parameter and is freed with it. A storage of which there is a copy is copy-on-write, with one
// reference: libtorch makes it an ordinary one, without copying, as soon as anything asks for its memory to write to
// it, by whichever tensor, and so shows that the copy is stale. The version counter alone would miss what is written
// through `data()`, as libtorch's own optimizers do.
#pragma once

#include "tensors.h"

namespace brigade {

// Whether a copy of the weight in the type is kept: of parameters in float32 that have their memory to themselves, and
// their views, where autocast has a cache.
bool keeps_copy(const at::Tensor& weight, at::ScalarType type);
// The same without regard to a graph that is recorded.
bool can_keep_copy(const at::Tensor& weight, at::ScalarType type);
// The same of a whole parameter.
bool keeps_whole_copy(const at::Tensor& weight, at::ScalarType type);
// The weight in the type, from the copy. Only where `keeps_copy` is true. Callers read it at once, and do not save it.
at::Tensor kept_copy(const at::Tensor& weight, at::ScalarType type);
// The same with rows of zeros behind it up to `rows`. Only where `keeps_whole_copy` is true.
at::Tensor kept_copy_with_rows(const at::Tensor& weight, at::ScalarType type, int64_t rows);

// Memory of a copy for a step that writes the parameter's elements there as well, in their order; undefined without a
// copy that is up to date, and while a graph is recorded. Called before the step asks for the parameter's memory.
at::Tensor copy_for_step(const at::Tensor& parameter);
// The step has written both.
void copy_was_stepped(const at::Tensor& parameter);

// Of a tensor whose memory comes and goes no copy is kept.
void refuse_copies(const Tensor& tensor);
// What a recorded graph does is the same in each replay, and no function of libtorch sees what it writes: nothing takes
// or makes copies while one is recorded, and a replay makes all stale.
void suspend_copies(bool suspend) noexcept;
void forget_copies() noexcept;

} // namespace brigade
