// Gradients on request, and recomputation of a part of a forward (gradient checkpointing).
#pragma once

#include "tensors.h"

#include <memory>
#include <vector>

namespace brigade {

struct Recompute;
struct RecomputeFrame;

// One part of a forward that is computed again in the backward.
struct RecomputePart {
  std::shared_ptr<RecomputeFrame> frame;
};

// The gradients of `inputs` alone; null tensors for inputs that the outputs do not depend on.
std::unique_ptr<std::vector<Tensor>> gradients_of(
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    rust::Slice<const TensorRef> output_gradients,
    bool retain_graph,
    bool create_graph,
    bool allow_unused);

// Adds the gradients of `leaves` to theirs; of all leaves where none is given.
void backward_from(
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> output_gradients,
    rust::Slice<const TensorRef> leaves,
    bool retain_graph,
    bool create_graph);

// Keeps the inputs, the random number generators' states and the autocast state.
std::unique_ptr<RecomputePart> recompute_begin(rust::Slice<const TensorRef> inputs);
// From here to `recompute_leave`, what this thread's operations save for the backward is left out.
void recompute_enter(const RecomputePart& part);
void recompute_leave() noexcept;
// What computes the part again.
void recompute_finish(const RecomputePart& part, rust::Box<Recompute> recompute);
// Whether this thread computes a part again.
bool is_recomputing();

} // namespace brigade
