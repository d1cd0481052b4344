// c10d's gradient reducer: the engine of DistributedDataParallel.
#pragma once

#include "group.h"

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <unordered_map>

namespace brigade {

struct ReducerOptions;
struct Hook;

struct Reducer {
  // For what leads to messages: throws in a child of fork.
  c10d::Reducer& live() const;

  std::shared_ptr<c10d::Reducer> reducer;
  // The reducer only points to it, and follows the pointer unasked when the set of unused parameters
  // changes.
  std::shared_ptr<c10d::Logger> logger;
  // Each parameter's place in the list that the reducer was made with.
  std::unordered_map<const c10::TensorImpl*, size_t> places;
};

std::unique_ptr<Reducer> new_reducer(
    const Group& group,
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const rust::String> names,
    const ReducerOptions& options);
void reducer_prepare_for_forward(const Reducer& reducer);
bool reducer_rebuild_buckets(const Reducer& reducer);
void reducer_prepare_for_backward(const Reducer& reducer, rust::Slice<const TensorRef> outputs);
// The outputs, passed through one autograd node, so that a backward pass through any of them reaches
// every parameter behind all of them. With `delay`, that node also queues the reduction for the end
// of the backward pass: the first iteration of a static graph needs it. Owned by the caller.
std::unique_ptr<std::vector<Tensor>> reducer_sink(
    const Reducer& reducer, rust::Slice<const TensorRef> outputs, bool delay);
// Has a further backward through these outputs reduced as the first, or refused.
void reducer_watch(const Reducer& reducer, rust::Slice<const TensorRef> outputs, bool refuse);
// Bytes of each bucket, in the order of reduction.
rust::Vec<size_t> reducer_bucket_bytes(const Reducer& reducer);

// Communication hooks: hook.cpp. One for a reducer, before the first backward.
// Buckets go over the wire in another type.
void reducer_compress(const Reducer& reducer, const Group& group, int8_t kind);
void reducer_hook(const Reducer& reducer, rust::Box<Hook> hook);

// For ranks that have no more data while others still have (DistributedDataParallel's join).
// What the next backward's sums are divided by; 0 is the number of ranks, as always.
void reducer_divide_by(const Reducer& reducer, int64_t ranks);
// The messages of a backward, with zeros, through the hook if there is one. Whether what the others sent was
// finite where a loss flag leaves its mark.
bool reducer_shadow_backward(const Reducer& reducer);
void reducer_push_rebuilt(const Reducer& reducer);
std::unique_ptr<Tensor> reducer_used_map(const Reducer& reducer);

} // namespace brigade
