// The engine of sharded training: parameters whose rows are spread over the ranks of a group, gathered while a unit of
// the model computes, and gradients that go to the rank that has the rows.
#pragma once

#include "group.h"

#include <memory>

namespace brigade {

struct SharderOptions;
struct SharderMeter;
struct ShardedSlot;
class ShardingEngine;

struct Sharder {
  std::shared_ptr<ShardingEngine> engine;
};

// `gather` moves parameters, `reduce` gradients; ranks of both are the same. `replicas`: the ranks that have the same
// rows, in a slice of one or none. `parts`: neighbouring ranks that keep whole parameters together from forward to
// backward, in another. `experts`: the ranks that have the same experts of a mixture, in a third.
struct GroupRef;
std::unique_ptr<Sharder> new_sharder(
    const Group& gather,
    const Group& reduce,
    rust::Slice<const GroupRef> replicas,
    rust::Slice<const GroupRef> parts,
    rust::Slice<const GroupRef> experts,
    rust::Slice<const GroupRef> expert_shards,
    const SharderOptions& options);
// Cuts the parameters of a unit and gives back this rank's shards, in the same order. The first unit is the root, which
// holds all others.
std::unique_ptr<std::vector<Tensor>> sharder_add_unit(
    const Sharder& sharder,
    rust::Str name,
    bool reshards,
    bool keeps_part,
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const rust::String> names,
    rust::Slice<const ShardedSlot> slots,
    size_t bytes);
// Around a unit's part of a forward.
void sharder_enter(const Sharder& sharder, size_t unit);
void sharder_leave(const Sharder& sharder, size_t unit, rust::Slice<const TensorRef> outputs);
// Whether the next backward reduces; without, whole gradients add up on each rank. What a rank's replicas have summed
// goes to the others where `window_ends`.
void sharder_set_sync(const Sharder& sharder, bool sync, bool window_ends);
// Multiplies the gradients that add up on this rank, not reduced yet, by one number.
void sharder_scale_unreduced(const Sharder& sharder, const Tensor& factor);
// Reduces them into the shards' gradients, also over the replicas; what a parameter has not got counts as zeros.
void sharder_reduce_unreduced(const Sharder& sharder);
// Drops them.
void sharder_clear_unreduced(const Sharder& sharder);
// The shards have changed: the optimizer has stepped, or weights were loaded.
void sharder_shards_changed(const Sharder& sharder);
// Those of a unit have changed.
void sharder_unit_changed(const Sharder& sharder, size_t unit);
// Looks anew at which parameters are trained.
void sharder_update_trained(const Sharder& sharder);
// After an error: waits for what is in flight, and gives up whole parameters and gradients.
void sharder_reset(const Sharder& sharder) noexcept;
// Keeps all parameters whole until `sharder_release_all`, which takes this rank's rows back where `write`. Where
// `will_write` the shards stay as they are until then.
void sharder_hold_all(const Sharder& sharder, bool will_write);
void sharder_release_all(const Sharder& sharder, bool write);
SharderMeter sharder_meter(const Sharder& sharder);

} // namespace brigade
