// Copies of weights in 16 bits for products, kept as long as nothing writes to the weights.
//
// A copy belongs to a parameter and is freed with it. A storage of which there is a copy is copy-on-write, with one
// reference: libtorch makes it an ordinary one, without copying, as soon as anything asks for its memory to write to
// it, by whichever tensor, and so shows that the copy is stale. The version counter alone would miss what is written
// through `data()`, as libtorch's own optimizers do.
#pragma once

#include "tensors.h"

#include <cstdint>
#include <memory>

namespace brigade {

// Whether a copy of the weight in the type is kept: of parameters in float32 that have their memory to themselves, and
// their views, where autocast has a cache.
bool can_keep_copy(const at::Tensor& weight, at::ScalarType type);
// The weight in the type, from the copy. Undefined where none is kept, and where a graph is recorded and the weight has
// no copy that is up to date. Callers read it at once, and do not save it.
at::Tensor kept_copy(const at::Tensor& weight, at::ScalarType type);
// The same, or a cast: where gradients of gradients are wanted one that is recorded.
at::Tensor weight_in_type(const at::Tensor& weight, at::ScalarType type);
// The copy of a whole parameter, with rows of zeros behind it up to `rows`.
at::Tensor kept_copy_with_rows(const at::Tensor& weight, at::ScalarType type, int64_t rows);

// Memory of a copy for a step that writes the parameter's elements there as well, in their order: one row. Undefined
// without a copy that is up to date. Called before the step asks for the parameter's memory.
at::Tensor copy_for_step(const at::Tensor& parameter);
// The step has written both.
void copy_was_stepped(const at::Tensor& parameter);

// Of a tensor whose memory comes and goes no copy is kept.
void refuse_copies(const Tensor& tensor);

struct CopiesState;

// The copies that a recorded graph reads and writes. No function of libtorch sees what a replay writes, but each replay
// does the same: a copy that is up to date when the recording ends is so after a replay that began with copies that
// were, and all others are stale.
struct GraphCopies {
  explicit GraphCopies(std::unique_ptr<CopiesState> state);
  ~GraphCopies();
  GraphCopies(const GraphCopies&) = delete;
  GraphCopies& operator=(const GraphCopies&) = delete;

  // Ends the recording, before what it has not run is taken back.
  void end() noexcept;
  // Casts the weights that were written since their copies were, and takes note of what the replay writes.
  void before_replay() const;

  std::unique_ptr<CopiesState> state;
};

// Begins, before a GPU's operations are recorded: stale copies are cast, since a cast that is recorded is one in each
// replay.
std::unique_ptr<GraphCopies> copies_of_graph(int32_t gpu);

} // namespace brigade
