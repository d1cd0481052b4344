// Parameters of units, gathered while they compute.
#include "brigade-torch/src/bridge.rs.h"

#include "sharding_engine.h"
#include "storage.h"

#include <algorithm>

namespace brigade {

void ShardingEngine::wait_for_copies() const {
  if (to_device_) {
    to_device_->synchronize();
  }
}

void ShardingEngine::start_gather(Unit& unit) {
  if (unit.parameters.empty()) {
    return;
  }
  const bool stale = unit.version != unit.changes;
  if (unit.state == State::Gathering || (unit.state == State::Whole && !stale)) {
    return;
  }
  at::NoGradGuard no_grad;
  if (unit.state == State::Sharded) {
    unit.borrows = unit.shard_storage && !writes_;
    if (unit.borrows) {
      borrow(unit.storage, *unit.shard_storage);
    } else {
      allocate(unit.storage, unit.bytes);
    }
    ++whole_;
    most_whole_ = std::max(most_whole_, whole_);
    count_gathered(extra_bytes(unit));
  }
  unit.state = State::Gathering;
  unit.version = unit.changes;
  ++gathers_;
  if (unit.borrows) {
    return; // the shards are the whole parameters
  }
  if (to_device_) {
    // The memory is new to the current stream, whose work until here may still use what was there before.
    unit.copied.emplace(to_device_->behind_current([&] { copy_and_gather(unit); }));
  } else {
    copy_and_gather(unit);
  }
}

void ShardingEngine::keep_part(Unit& unit) {
  at::NoGradGuard no_grad;
  drop_part(unit);
  for (auto& parameter : unit.parameters) {
    if (!parameter.replicated()) {
      parameter.part = part_of(parameter).clone();
      unit.part_bytes += static_cast<int64_t>(parameter.part.nbytes());
    }
  }
  unit.part_version = unit.changes;
  count_gathered(unit.part_bytes);
}

void ShardingEngine::put_away(Unit& unit) {
  if (unit.keeps_part && unit.state == State::Whole) {
    keep_part(unit);
  }
  free(unit);
}

void ShardingEngine::drop_part(Unit& unit) {
  for (auto& parameter : unit.parameters) {
    parameter.part.reset();
  }
  gathered_ -= unit.part_bytes;
  unit.part_bytes = 0;
}

at::Tensor ShardingEngine::part_of(const Parameter& parameter) const {
  const auto live = parts_->live();
  const auto count = parameter.flat.numel() / live->getSize();
  return parameter.flat.narrow(0, live->getRank() * count, count);
}

void ShardingEngine::count_gathered(int64_t bytes) {
  gathered_ += bytes;
  most_gathered_ = std::max(most_gathered_, gathered_);
}

void ShardingEngine::gather_parts(Unit& unit) {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (auto& parameter : unit.parameters) {
    if (parameter.replicated()) {
      own_rows(parameter).copy_(parameter.shard.detach(), /*non_blocking=*/pins_);
      continue;
    }
    if (parameter.flat.numel() > 0) {
      outputs.push_back(parameter.flat);
      inputs.push_back(part_of(parameter));
      inputs.back().copy_(parameter.part);
    }
  }
  drop_part(unit);
  start(unit, *parts_, outputs, inputs);
}

void ShardingEngine::copy_and_gather(Unit& unit) {
  if (unit.part_bytes > 0 && unit.part_version == unit.changes) {
    gather_parts(unit);
    return;
  }
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (auto& parameter : unit.parameters) {
    auto rows = own_rows(parameter);
    if (!parameter.shard.is_alias_of(rows)) {
      rows.copy_(parameter.shard.detach(), /*non_blocking=*/pins_);
    }
    if (!parameter.replicated() && parameter.flat.numel() > 0) {
      const auto count = parameter.flat.numel() / ranks_;
      outputs.push_back(parameter.flat);
      inputs.push_back(parameter.flat.narrow(0, rank_ * count, count));
    }
  }
  if (ranks_ > 1) {
    start(unit, gather_, outputs, inputs);
  }
}

void ShardingEngine::start(
    Unit& unit,
    const Group& group,
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs) {
  if (outputs.empty()) {
    return;
  }
  named("gather", unit.name, [&] {
    const auto out = references(outputs);
    const auto in = references(inputs);
    unit.gather =
        all_gather_flat_coalesced(group, {out.data(), out.size()}, {in.data(), in.size()}, kGroupsLimit);
  });
}

void ShardingEngine::make_whole(Unit& unit) {
  start_gather(unit);
  finish_gather(unit);
}

void ShardingEngine::finish_gather(Unit& unit) {
  if (unit.state != State::Gathering) {
    return;
  }
  auto work = std::move(unit.gather);
  unit.state = State::Whole;
  if (unit.copied) {
    to_device_->follow(*unit.copied);
    unit.copied.reset();
  }
  if (work) {
    named("gather", unit.name, [&] { work_wait(*work, kNoLimit); });
  }
}

void ShardingEngine::free(Unit& unit) {
  if (whole_at_rest_ || held_ || unit.state == State::Sharded) {
    return;
  }
  if (unit.state == State::Gathering) {
    finish_gather(unit);
  }
  release(unit.storage, unit.bytes, unit.why);
  unit.state = State::Sharded;
  --whole_;
  gathered_ -= extra_bytes(unit);
}

} // namespace brigade
