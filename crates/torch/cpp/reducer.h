// c10d's gradient reducer: the engine of DistributedDataParallel.
#pragma once

#include "group.h"

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>

namespace brigade {

struct ReducerOptions;

struct Reducer {
  std::shared_ptr<c10d::Reducer> reducer;
  // The reducer only points to it, and follows the pointer unasked when the set of unused parameters
  // changes.
  std::shared_ptr<c10d::Logger> logger;
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
rust::Vec<TensorRef> reducer_sink(
    const Reducer& reducer, rust::Slice<const TensorRef> outputs, bool delay);
// Bytes of each bucket, in the order of reduction.
rust::Vec<size_t> reducer_bucket_bytes(const Reducer& reducer);

} // namespace brigade
