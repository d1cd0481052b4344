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
    // Experts are gathered again: the neighbouring ranks have other ones.
    if (!parameter.replicated() && !parameter.is_expert) {
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

void ShardingEngine::place_rows(const Parameter& parameter, Rows& rows) const {
  auto own = own_rows(parameter);
  if (!parameter.shard.is_alias_of(own)) {
    own.copy_(parameter.shard.detach(), /*non_blocking=*/pins_);
  }
  if (!parameter.replicated() && parameter.flat.numel() > 0) {
    const auto count = parameter.flat.numel() / ranks_of(parameter.is_expert);
    rows.outputs.push_back(parameter.flat);
    rows.inputs.push_back(parameter.flat.narrow(0, rank_of(parameter.is_expert) * count, count));
  }
}

void ShardingEngine::gather_parts(Unit& unit) {
  Rows parts;
  Rows experts;
  for (auto& parameter : unit.parameters) {
    if (parameter.replicated() || parameter.is_expert) {
      place_rows(parameter, experts);
    } else if (parameter.flat.numel() > 0) {
      parts.outputs.push_back(parameter.flat);
      parts.inputs.push_back(part_of(parameter));
      parts.inputs.back().copy_(parameter.part);
    }
  }
  drop_part(unit);
  unit.gather = start(unit, *parts_, parts);
  if (expert_gather_ != nullptr) {
    unit.expert_gather = start(unit, *expert_gather_, experts);
  }
}

void ShardingEngine::copy_and_gather(Unit& unit) {
  if (unit.part_bytes > 0 && unit.part_version == unit.changes) {
    gather_parts(unit);
    return;
  }
  Rows others;
  Rows experts;
  for (auto& parameter : unit.parameters) {
    place_rows(parameter, parameter.is_expert ? experts : others);
  }
  if (ranks_ > 1) {
    unit.gather = start(unit, gather_, others);
  }
  if (expert_gather_ != nullptr) {
    unit.expert_gather = start(unit, *expert_gather_, experts);
  }
}

std::unique_ptr<Work> ShardingEngine::start(const Unit& unit, const Group& group, const Rows& rows) {
  if (rows.outputs.empty()) {
    return nullptr;
  }
  return named("gather", unit.name, [&] {
    const auto out = references(rows.outputs);
    const auto in = references(rows.inputs);
    return all_gather_flat_coalesced(
        group, {out.data(), out.size()}, {in.data(), in.size()}, kGroupsLimit);
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
  const std::array<std::unique_ptr<Work>, 2> works = {
      std::move(unit.gather), std::move(unit.expert_gather)};
  unit.state = State::Whole;
  if (unit.copied) {
    to_device_->follow(*unit.copied);
    unit.copied.reset();
  }
  for (const auto& work : works) {
    if (work) {
      named("gather", unit.name, [&] { work_wait(*work, kNoLimit); });
    }
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
