#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"
#include "sharding_engine.h"
#include "storage.h"
#include "weights.h"

#include <algorithm>

namespace brigade {

namespace {

// A dense tensor whose rows follow each other in memory, as they do in contiguous and in channels-last tensors.
bool has_rows_in_order(const at::Tensor& tensor) {
  return tensor.dim() > 0 && tensor.numel() > 0 && tensor.is_non_overlapping_and_dense() &&
      (tensor.size(0) == 1 || tensor.stride(0) == tensor.numel() / tensor.size(0));
}

c10::DimVector strides_by_rows(const at::Tensor& tensor) {
  if (!has_rows_in_order(tensor)) {
    return c10::contiguous_strides(tensor.sizes());
  }
  c10::DimVector strides(tensor.strides());
  strides[0] = tensor.numel() / tensor.size(0);
  return strides;
}

// The names of a unit's parameters, of which an error is: one storage has all of them.
std::string listed(rust::Slice<const rust::String> names) {
  constexpr size_t kMost = 16;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) {
    text += (i == 0 ? "`" : ", `") + std::string(names[i]) + "`";
  }
  if (names.size() > kMost) {
    text += " and " + std::to_string(names.size() - kMost) + " more";
  }
  return text;
}

} // namespace

std::vector<at::Tensor> ShardingEngine::add_unit(
    std::string name,
    bool reshards,
    bool keeps_part,
    const std::vector<at::Tensor>& parameters,
    rust::Slice<const rust::String> names,
    rust::Slice<const ShardedSlot> slots,
    size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  at::NoGradGuard no_grad;
  Unit unit;
  unit.name = std::move(name);
  unit.why = "other ranks have the rest of " + listed(names) + ", sharded in unit `" + unit.name +
      "`. Read parameters inside of `gathered`, or in the unit's own forward";
  unit.bytes = bytes;
  unit.reshards = reshards;
  unit.keeps_part = keeps_part && !whole_at_rest_;
  const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
  unit.storage = empty_storage(device);
  if (offloads_ && !device.is_cpu() && !to_device_) {
    to_device_.emplace(device);
    to_host_.emplace(device);
  }
  if (whole_at_rest_) {
    allocate(unit.storage, bytes);
  } else if (holds_all_rows(unit, parameters, slots)) {
    unit.shard_storage = empty_storage(device);
    allocate(*unit.shard_storage, bytes);
  }
  std::vector<at::Tensor> shards;
  for (size_t i = 0; i < parameters.size(); ++i) {
    unit.parameters.push_back(cut(unit, parameters[i], std::string(names[i]), slots[i]));
    shards.push_back(unit.parameters.back().shard);
  }
  if (whole_at_rest_) {
    unit.state = State::Whole;
  } else {
    release(unit.storage, unit.bytes, unit.why);
  }
  units_.push_back(std::move(unit));
  watch(units_.size() - 1);
  begin_count();
  return shards;
}

void ShardingEngine::enter(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& unit = units_.at(index);
  if (is_recomputing()) {
    make_whole(unit);
    return;
  }
  if (index == 0) {
    if (in_backward_ || units_[0].running > 0) {
      reset(); // what was before ended with an error
    }
    pass_ = std::make_shared<Pass>();
  }
  if (is_apart(index)) {
    return;
  }
  TORCH_CHECK(
      pass_ && (index == 0 || !pass_->open.empty()),
      "unit `", unit.name, "` runs outside of its prepared model's forward: call the prepared model, or read the ",
      "parameters inside of `gathered`");
  if (kept_ && *kept_ != index) {
    put_away(units_[*kept_]); // it was not the last
  }
  kept_.reset();
  ++unit.running;
  const auto place = pass_->runs.size();
  pass_->runs.push_back({index, place + 1});
  pass_->open.push_back(place);
  make_whole(unit);
  if (place + 1 < learnt_.size() && learnt_[place] == index) {
    start_gather(units_[learnt_[place + 1]]);
  }
}

void ShardingEngine::leave(size_t index, const std::vector<at::Tensor>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& unit = units_.at(index);
  if (is_recomputing()) {
    return;
  }
  if (is_apart(index)) {
    return;
  }
  TORCH_CHECK(
      pass_ && !pass_->open.empty() && pass_->runs[pass_->open.back()].unit == index,
      "unit `", unit.name, "` is left, but another one is running");
  const auto place = pass_->open.back();
  pass_->open.pop_back();
  pass_->runs[place].end = pass_->runs.size();
  --unit.running;
  const bool differentiable = at::GradMode::is_enabled() && watch_outputs(place, outputs);
  if (!differentiable) {
    if (unit.running == 0) {
      free(unit);
    }
  } else if (index != 0 && unit.reshards && unit.running == 0) {
    if (pass_->runs.back().unit == index) {
      kept_ = index;
    } else {
      put_away(unit);
    }
  }
  if (index == 0) {
    kept_.reset();
    wait_for_copies();
    learnt_.clear();
    for (const auto& run : pass_->runs) {
      learnt_.push_back(run.unit);
    }
    for (auto& other : units_) {
      // Gathered ahead, and then not run: the forward took another way than the last one.
      if (other.state == State::Gathering && !whole_at_rest_) {
        make_whole(other);
        free(other);
      }
    }
  }
}

void ShardingEngine::set_sync(bool sync, bool window_ends) {
  std::lock_guard<std::mutex> lock(mutex_);
  sync_ = sync;
  window_ends_ = window_ends;
}

void ShardingEngine::unit_changed(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& unit = units_.at(index);
  ++unit.changes;
  if (whole_at_rest_) {
    // A gather that is in flight may have read the rows as they were.
    finish_gather(unit);
    start_gather(unit);
  }
}

void ShardingEngine::shards_changed() {
  std::lock_guard<std::mutex> lock(mutex_);
  count_changes();
  if (whole_at_rest_) {
    for (auto& unit : units_) {
      // As above.
      finish_gather(unit);
    }
    // Each is waited for where it runs next.
    for (auto& unit : units_) {
      start_gather(unit);
    }
  }
}

void ShardingEngine::count_changes() {
  for (auto& unit : units_) {
    ++unit.changes;
  }
}

void ShardingEngine::scale_unreduced(const at::Tensor& factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  at::NoGradGuard no_grad;
  for (auto& unit : units_) {
    for (auto& parameter : unit.parameters) {
      for (auto* sum : {&parameter.kept, &parameter.partial, &parameter.whole.mutable_grad()}) {
        if (sum->defined()) {
          sum->mul_(factor.to(sum->device()));
        }
      }
    }
  }
}

void ShardingEngine::clear_unreduced() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& unit : units_) {
    for (auto& parameter : unit.parameters) {
      parameter.kept.reset();
      if (parameter.partial.defined()) {
        reduced_ -= waiting_bytes(parameter);
        parameter.partial.reset();
      }
      parameter.whole.mutable_grad().reset();
    }
  }
  unreduced_ = false;
}

void ShardingEngine::update_trained() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < units_.size(); ++i) {
    watch(i);
  }
  begin_count();
}

void ShardingEngine::reset_after_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  reset();
}

void ShardingEngine::hold_all(bool write) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!held_, "the parameters are whole already: `gathered` inside of `gathered`");
  writes_ = write;
  for (auto& unit : units_) {
    if (write && unit.borrows && unit.running == 0) {
      free(unit); // whole since a forward without a backward: it gets memory of its own
    }
    start_gather(unit);
  }
  for (auto& unit : units_) {
    make_whole(unit);
  }
  held_ = true;
}

void ShardingEngine::release_all(bool write) {
  std::lock_guard<std::mutex> lock(mutex_);
  at::NoGradGuard no_grad;
  held_ = false;
  writes_ = false;
  wait_for_copies();
  for (auto& unit : units_) {
    if (write) {
      for (auto& parameter : unit.parameters) {
        auto from = own_rows(parameter);
        if (!unit.borrows && !parameter.shard.is_alias_of(from)) {
          parameter.shard.detach().copy_(from);
        }
      }
    }
    free(unit);
  }
  if (write) {
    count_changes();
  }
}

SharderMeter ShardingEngine::meter() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {
      static_cast<uint64_t>(gathered_),
      static_cast<uint64_t>(most_gathered_),
      static_cast<uint64_t>(most_reduced_),
      gathers_,
      reductions_,
      static_cast<uint64_t>(most_whole_)};
}

bool ShardingEngine::is_apart(size_t index) const {
  return held_ && index != 0 && (!pass_ || pass_->open.empty());
}

at::Tensor ShardingEngine::own_rows(const Parameter& parameter) const {
  if (parameter.replicated()) {
    return parameter.whole.variable_data();
  }
  return parameter.by_rows(parameter.rows_of_all.narrow(0, parameter.first, parameter.own));
}

ShardingEngine::Parameter ShardingEngine::cut(
    const Unit& unit, const at::Tensor& tensor, std::string name, const ShardedSlot& slot) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.whole = tensor;
  refuse_copies(tensor);
  parameter.rows = slot.rows;
  const auto kind = static_cast<at::ScalarType>(slot.kind);
  parameter.sum_kind = static_cast<at::ScalarType>(slot.reduce_kind);
  parameter.is_expert = slot.is_expert;
  parameter.dim = slot.dim;
  const auto values = tensor.detach();
  // Parameters of a deferred model get their values as shards.
  const bool known = has_memory(tensor);
  if (slot.keeps_memory) {
    // Outside of the unit's storage, which is freed between uses: the optimizer's step writes into the parameter.
    const auto own = known ? values : at::zeros_like(tensor.variable_data());
    parameter.rows_of_all = own;
    parameter.shard = own.variable_data();
    const bool trained = tensor.requires_grad();
    if (!known) {
      parameter.whole.set_data(own);
    }
    parameter.shard.set_requires_grad(trained);
    return parameter;
  }
  const auto by_rows = parameter.by_rows(values);
  const auto strides = strides_by_rows(by_rows);
  // Not a view of the rows: the storage has no memory yet.
  auto strides_of_whole = strides;
  if (parameter.dim > 0) {
    std::swap(strides_of_whole[0], strides_of_whole[parameter.dim]);
  }
  const auto whole = tensor_of(unit.storage, kind, slot.offset, tensor.sizes(), strides_of_whole);
  if (parameter.replicated()) {
    parameter.rows_of_all = whole;
    parameter.flat = tensor_of(unit.storage, kind, slot.offset, {tensor.numel()}, {1});
    parameter.shard = unit.shard_storage
        ? tensor_of(*unit.shard_storage, kind, slot.offset, tensor.sizes(), strides)
        : new_shard(values);
    if (known) {
      parameter.shard.copy_(values);
    } else {
      parameter.shard.zero_();
    }
  } else {
    auto sizes = by_rows.sizes().vec();
    parameter.first = std::min(rank_of(slot.is_expert) * slot.rows, sizes[0]);
    parameter.own = std::min(slot.rows, sizes[0] - parameter.first);
    const auto width = sizes[0] == 0 ? 0 : tensor.numel() / sizes[0];
    sizes[0] = ranks_of(slot.is_expert) * slot.rows;
    parameter.rows_of_all = tensor_of(unit.storage, kind, slot.offset, sizes, strides);
    parameter.flat = tensor_of(unit.storage, kind, slot.offset, {sizes[0] * width}, {1});
    const auto rows = by_rows.narrow(0, parameter.first, parameter.own);
    at::Tensor shard;
    if (whole_at_rest_ && !to_device_ && kind == tensor.scalar_type()) {
      // The same memory: the optimizer's step writes into the whole parameter.
      const auto offset = slot.offset + parameter.first * strides[0];
      shard = tensor_of(unit.storage, kind, offset, rows.sizes(), strides);
    } else {
      shard = unit.shard_storage
          ? tensor_of(*unit.shard_storage, kind, slot.offset, rows.sizes(), strides)
          : new_shard(rows, strides);
      if (known) {
        shard.copy_(rows);
      }
    }
    parameter.shard = parameter.dim == 0 ? shard : parameter.by_rows(shard).variable_data();
  }
  if (whole_at_rest_ && known) {
    whole.copy_(values);
  }
  // The same tensor with other memory: what holds it goes on with it.
  const bool trained = tensor.requires_grad();
  parameter.whole.set_data(whole);
  parameter.shard.set_requires_grad(trained);
  return parameter;
}

bool ShardingEngine::holds_all_rows(
    const Unit& unit, const std::vector<at::Tensor>& parameters, rust::Slice<const ShardedSlot> slots) const {
  if (ranks_ != 1 || expert_ranks_ != 1 || to_device_ || unit.keeps_part) {
    return false;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& slot = slots[i];
    if (!slot.keeps_memory && static_cast<at::ScalarType>(slot.kind) != parameters[i].scalar_type()) {
      return false;
    }
  }
  return unit.bytes > 0;
}

int64_t ShardingEngine::extra_bytes(const Unit& unit) {
  return unit.borrows ? 0 : static_cast<int64_t>(unit.bytes);
}

at::Tensor ShardingEngine::new_shard(const at::Tensor& like, std::optional<at::IntArrayRef> strides) const {
  auto options = at::TensorOptions().dtype(like.scalar_type()).device(like.device());
  if (to_device_) {
    options = options.device(at::kCPU).pinned_memory(pins_);
  }
  return at::empty_strided(like.sizes(), strides.value_or(like.strides()), options);
}

void ShardingEngine::reset() {
  at::NoGradGuard no_grad;
  pass_.reset();
  kept_.reset();
  for (auto& unit : units_) {
    unit.running = 0;
    try {
      finish_gather(unit);
      if (unit.reduction) {
        auto flight = std::move(*unit.reduction);
        unit.reduction.reset();
        for (auto* work : flight.works()) {
          if (work != nullptr) {
            work_wait(*work, kNoLimit);
          }
        }
      }
    } catch (const std::exception&) {
      // The error that led here has been told.
    }
    // A backward that ended in the middle has left gradients of some parameters alone. Those of the batches before an
    // error in a forward are whole.
    if (in_backward_) {
      for (auto& parameter : unit.parameters) {
        parameter.kept.reset();
        parameter.partial.reset();
        parameter.whole.mutable_grad().reset();
        parameter.made = 0;
      }
    }
    drop_part(unit);
    free(unit);
  }
  // What has not come home is of a backward that failed.
  homeward_.clear();
  reduced_ = 0;
  for (const auto& unit : units_) {
    for (const auto& parameter : unit.parameters) {
      if (parameter.partial.defined()) {
        reduced_ += waiting_bytes(parameter);
      }
    }
  }
  begin_count();
  unreduced_ = unreduced_ && !in_backward_;
  in_backward_ = false;
}

std::unique_ptr<Sharder> new_sharder(
    const Group& gather,
    const Group& reduce,
    rust::Slice<const GroupRef> replicas,
    rust::Slice<const GroupRef> parts,
    rust::Slice<const GroupRef> experts,
    rust::Slice<const GroupRef> expert_shards,
    const SharderOptions& options) {
  check_not_fork("a sharder");
  auto out = std::make_unique<Sharder>();
  out->engine = std::make_shared<ShardingEngine>(
      gather,
      reduce,
      replicas.empty() ? nullptr : &replicas[0].group,
      parts.empty() ? nullptr : &parts[0].group,
      experts.empty() ? nullptr : &experts[0].group,
      expert_shards.empty() ? nullptr : &expert_shards[0].group,
      expert_shards.empty() ? nullptr : &expert_shards[1].group,
      options);
  return out;
}

std::unique_ptr<std::vector<Tensor>> sharder_add_unit(
    const Sharder& sharder,
    rust::Str name,
    bool reshards,
    bool keeps_part,
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const rust::String> names,
    rust::Slice<const ShardedSlot> slots,
    size_t bytes) {
  return std::make_unique<std::vector<Tensor>>(sharder.engine->add_unit(
      std::string(name), reshards, keeps_part, copy_handles(parameters), names, slots, bytes));
}

void sharder_enter(const Sharder& sharder, size_t unit) {
  sharder.engine->enter(unit);
}

void sharder_leave(const Sharder& sharder, size_t unit, rust::Slice<const TensorRef> outputs) {
  sharder.engine->leave(unit, copy_handles(outputs));
}

void sharder_set_sync(const Sharder& sharder, bool sync, bool window_ends) {
  sharder.engine->set_sync(sync, window_ends);
}

void sharder_unit_changed(const Sharder& sharder, size_t unit) {
  sharder.engine->unit_changed(unit);
}

void sharder_shards_changed(const Sharder& sharder) {
  sharder.engine->shards_changed();
}

void sharder_scale_unreduced(const Sharder& sharder, const Tensor& factor) {
  sharder.engine->scale_unreduced(factor);
}

void sharder_reduce_unreduced(const Sharder& sharder) {
  sharder.engine->reduce_unreduced();
}

void sharder_clear_unreduced(const Sharder& sharder) {
  sharder.engine->clear_unreduced();
}

void sharder_update_trained(const Sharder& sharder) {
  sharder.engine->update_trained();
}

void sharder_reset(const Sharder& sharder) noexcept {
  sharder.engine->reset_after_error();
}

void sharder_hold_all(const Sharder& sharder, bool will_write) {
  sharder.engine->hold_all(will_write);
}

void sharder_release_all(const Sharder& sharder, bool write) {
  sharder.engine->release_all(write);
}

SharderMeter sharder_meter(const Sharder& sharder) {
  return sharder.engine->meter();
}

} // namespace brigade
