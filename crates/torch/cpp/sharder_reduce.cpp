// Gradients of units: noticed in backward, reduced to the rank that has their rows, and brought home where shards are
// offloaded.
#include "brigade-torch/src/bridge.rs.h"

#include "sharding_engine.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace brigade {

using torch::autograd::variable_list;

void ShardingEngine::watch(size_t index) {
  auto& unit = units_[index];
  unit.trained = 0;
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    auto& parameter = unit.parameters[i];
    parameter.trained = parameter.whole.requires_grad();
    parameter.shard.set_requires_grad(parameter.trained);
    if (!parameter.trained) {
      parameter.hook.reset();
      parameter.kept.reset();
      continue;
    }
    ++unit.trained;
    if (parameter.hook) {
      continue;
    }
    // A shared_ptr up to libtorch 2.11, an intrusive_ptr later. The tensor holds it weakly.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter.whole);
    struct Hook : torch::autograd::FunctionPostHook {
      Hook(std::weak_ptr<ShardingEngine> engine, size_t unit, size_t parameter)
          : engine(std::move(engine)), unit(unit), parameter(parameter) {}
      variable_list operator()(const variable_list& outputs, const variable_list&) override {
        if (auto live = engine.lock()) {
          live->gradient_arrived(unit, parameter);
        }
        return outputs;
      }
      std::weak_ptr<ShardingEngine> engine;
      size_t unit;
      size_t parameter;
    };
    accumulator->add_post_hook(std::make_unique<Hook>(weak_from_this(), index, i));
    parameter.hook = std::make_shared<decltype(accumulator)>(std::move(accumulator));
  }
}

bool ShardingEngine::watch_outputs(size_t place, const std::vector<at::Tensor>& outputs) {
  auto last = std::make_shared<int>(-1);
  bool differentiable = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) {
      continue;
    }
    differentiable = true;
    // Weak: the graph may outlive the engine.
    output.register_hook([weak = weak_from_this(), pass = pass_, place, last](const at::Tensor&) {
      const auto task = torch::autograd::get_current_graph_task_id();
      if (*last == task) {
        return;
      }
      *last = task;
      if (auto live = weak.lock()) {
        live->before_backward(*pass, place);
      }
    });
  }
  return differentiable;
}

void ShardingEngine::before_backward(const Pass& pass, size_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  backward_begins();
  const auto [index, end] = pass.runs[place];
  for (size_t later = end; later < pass.runs.size(); ++later) {
    if (pass.runs[later].unit != index) {
      free(units_[pass.runs[later].unit]);
    }
  }
  make_whole(units_[index]);
  // What comes next: the last unit inside of this one, or the one before it.
  const auto next = end > place + 1 ? end : place;
  if (next > 0) {
    start_gather(units_[pass.runs[next - 1].unit]);
  }
}

void ShardingEngine::backward_begins() {
  if (in_backward_) {
    return;
  }
  in_backward_ = true;
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    if (auto live = weak.lock()) {
      live->backward_ends();
    }
  });
}

void ShardingEngine::gradient_arrived(size_t index, size_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& unit = units_[index];
  auto& parameter = unit.parameters[place];
  if (!parameter.trained) {
    return;
  }
  TORCH_CHECK(
      !at::GradMode::is_enabled(),
      "the gradient of sharded parameter `", parameter.name,
      "` would have a graph (`create_graph`): gradients of gradients are not supported with shards; compute them ",
      "inside of `gathered`, or without sharding");
  backward_begins();
  if (!sync_) {
    keep(parameter);
    return;
  }
  if (!parameter.ready) {
    parameter.ready = true;
    // Autograd adds it to those of the batches before, which are counted there, unless `keep` has taken them.
    const bool added = unreduced_ && !parameter.kept.defined();
    if (const auto& gradient = parameter.whole.grad(); gradient.defined() && !added) {
      parameter.made = static_cast<int64_t>(gradient.nbytes());
      count_reduced(parameter.made);
    }
    if (--unit.missing == 0) {
      reduce_in_order(false);
    }
  }
}

void ShardingEngine::keep(Parameter& parameter) {
  unreduced_ = true;
  const auto kind = parameter.sum_kind;
  if (kind == parameter.whole.scalar_type()) {
    return; // autograd adds them up in this type
  }
  at::NoGradGuard no_grad;
  auto& gradient = parameter.whole.mutable_grad();
  if (!gradient.defined()) {
    return;
  }
  if (parameter.kept.defined()) {
    parameter.kept.add_(gradient);
  } else {
    parameter.kept = gradient.to(kind);
  }
  gradient.reset();
}

void ShardingEngine::reduce_in_order(bool all) {
  while (next_ > 0) {
    auto& unit = units_[next_ - 1];
    if (unit.trained > 0 && !all && unit.missing > 0) {
      return;
    }
    --next_;
    if (unit.trained > 0) {
      reduce(unit);
    }
  }
}

void ShardingEngine::reduce(Unit& unit) {
  // One input of a reduction at a time, besides the one that is made.
  for (auto& other : units_) {
    finish_reduction(other);
  }
  at::NoGradGuard no_grad;
  InFlight flight;
  std::vector<at::Tensor> shared;
  std::vector<at::Tensor> experts;
  Rows rows_of_shared;
  Rows rows_of_experts;
  for (auto& parameter : unit.parameters) {
    if (!parameter.trained) {
      continue;
    }
    if (parameter.replicated()) {
      flight.whole.push_back(input_of(parameter, flight));
      (parameter.is_expert ? experts : shared).push_back(flight.whole.back());
    } else {
      flight.inputs.push_back(input_of(parameter, flight));
      const auto& input = flight.inputs.back();
      const auto ranks = ranks_of(parameter.is_expert);
      // One rank's rows are all rows.
      flight.outputs.push_back(ranks == 1 ? input : at::empty({input.numel() / ranks}, input.options()));
      if (ranks > 1) {
        auto& scattered = parameter.is_expert ? rows_of_experts : rows_of_shared;
        scattered.inputs.push_back(input);
        scattered.outputs.push_back(flight.outputs.back());
        const auto rows = static_cast<int64_t>(flight.outputs.back().nbytes());
        flight.bytes += rows;
        count_reduced(rows);
      }
    }
  }
  ++reductions_;
  named("reduction of the gradients", unit.name, [&] {
    const auto scatter = [&](const Group& group, const Rows& rows) {
      const auto outputs = references(rows.outputs);
      const auto inputs = references(rows.inputs);
      return reduce_scatter_flat_coalesced(
          group,
          {outputs.data(), outputs.size()},
          {inputs.data(), inputs.size()},
          Reduction::Sum,
          kGroupsLimit);
    };
    if (!rows_of_shared.inputs.empty()) {
      flight.scatter = scatter(reduce_, rows_of_shared);
    }
    if (!rows_of_experts.inputs.empty()) {
      flight.expert_scatter = scatter(*expert_reduce_, rows_of_experts);
    }
    if (!shared.empty() && ranks_ > 1) {
      const auto tensors = references(shared);
      flight.all =
          all_reduce_coalesced(reduce_, {tensors.data(), tensors.size()}, Reduction::Sum, kGroupsLimit);
    }
    if (!experts.empty() && experts_ != nullptr) {
      const auto tensors = references(experts);
      flight.experts =
          all_reduce_coalesced(*experts_, {tensors.data(), tensors.size()}, Reduction::Sum, kGroupsLimit);
    }
  });
  unit.reduction = std::move(flight);
}

at::Tensor ShardingEngine::input_of(Parameter& parameter, InFlight& flight) {
  const auto kind = parameter.sum_kind;
  auto& gradient = parameter.whole.mutable_grad();
  at::Tensor sum;
  if (parameter.kept.defined()) {
    sum = gradient.defined() ? parameter.kept.add_(gradient) : parameter.kept;
  } else {
    sum = gradient;
  }
  if (sum.defined()) {
    sum = parameter.by_rows(sum);
  }
  const auto count = parameter.replicated() ? parameter.whole.numel() : parameter.flat.numel();
  at::Tensor flat;
  const bool as_it_lies = sum.defined() && sum.scalar_type() == kind && sum.numel() == count &&
      sum.layout() == at::kStrided && sum.is_non_overlapping_and_dense() &&
      sum.strides() == parameter.rows_of_all.strides() && count > 0;
  if (as_it_lies) {
    flat = sum.as_strided({count}, {1});
    if (!parameter.kept.defined()) {
      flight.bytes += std::exchange(parameter.made, 0);
    }
  } else {
    const auto options = at::TensorOptions().dtype(kind).device(parameter.whole.device());
    flat = sum.defined() ? at::empty({count}, options) : at::zeros({count}, options);
    if (sum.defined()) {
      auto rows = flat.as_strided(parameter.rows_of_all.sizes(), parameter.rows_of_all.strides());
      if (parameter.replicated()) {
        rows.copy_(sum);
      } else {
        const auto size = parameter.whole.size(parameter.dim);
        rows.narrow(0, 0, size).copy_(sum);
        // What stands in the padding is added up, and read by no rank.
        rows.narrow(0, size, rows.size(0) - size).zero_();
      }
    }
    flight.bytes += static_cast<int64_t>(flat.nbytes());
    count_reduced(static_cast<int64_t>(flat.nbytes()));
  }
  reduced_ -= std::exchange(parameter.made, 0);
  parameter.kept.reset();
  gradient.reset();
  return flat;
}

void ShardingEngine::finish_reduction(Unit& unit) {
  if (!unit.reduction) {
    return;
  }
  at::NoGradGuard no_grad;
  // Taken out first: an error leaves nothing half done.
  auto flight = std::move(*unit.reduction);
  unit.reduction.reset();
  named("reduction of the gradients", unit.name, [&] {
    for (auto* work : flight.works()) {
      if (work != nullptr) {
        work_wait(*work, kNoLimit);
      }
    }
  });
  reduced_ -= flight.bytes;
  size_t scattered = 0;
  size_t whole = 0;
  std::vector<Leaving> leaving;
  for (auto& parameter : unit.parameters) {
    if (!parameter.trained) {
      continue;
    }
    auto output = parameter.replicated() ? flight.whole[whole++] : flight.outputs[scattered++];
    auto rows = output.as_strided(parameter.shard.sizes(), parameter.shard.strides());
    // The ranks that have the same experts whole are of all replicas.
    if (replicas_ != nullptr && !(parameter.is_expert && parameter.replicated())) {
      if (parameter.partial.defined()) {
        parameter.partial.add_(rows);
      } else {
        parameter.partial = rows;
        count_reduced(waiting_bytes(parameter));
      }
    } else {
      divide_and_add(parameter, rows, leaving);
    }
  }
  send_home(std::move(leaving));
}

void ShardingEngine::divide_and_add(Parameter& parameter, at::Tensor rows, std::vector<Leaving>& leaving) {
  // One division, after the sum.
  if (const auto divisor = parameter.is_expert ? expert_divisor_ : divisor_; divisor != 1) {
    rows.div_(divisor);
  }
  rows = rows.to(parameter.shard.scalar_type());
  if (to_host_) {
    leaving.push_back({&parameter, rows, new_shard(rows)});
  } else {
    add_to_gradient(parameter, rows);
  }
}

void ShardingEngine::send_home(std::vector<Leaving> leaving) {
  if (leaving.empty()) {
    return;
  }
  auto arrived = to_host_->behind_current([&] {
    for (auto& gradient : leaving) {
      count_reduced(static_cast<int64_t>(gradient.on_device.nbytes()));
      gradient.on_host.copy_(gradient.on_device, /*non_blocking=*/pins_);
    }
  });
  homeward_.push_back({std::move(leaving), std::move(arrived)});
  while (homeward_.size() > 1) {
    take_in();
  }
}

void ShardingEngine::take_in() {
  auto flight = std::move(homeward_.front());
  homeward_.pop_front();
  flight.arrived.synchronize();
  for (auto& gradient : flight.gradients) {
    reduced_ -= static_cast<int64_t>(gradient.on_device.nbytes());
    add_to_gradient(*gradient.parameter, gradient.on_host);
  }
}

void ShardingEngine::count_reduced(int64_t bytes) {
  reduced_ += bytes;
  most_reduced_ = std::max(most_reduced_, reduced_);
}

int64_t ShardingEngine::waiting_bytes(const Parameter& parameter) const {
  const auto bytes = static_cast<int64_t>(parameter.partial.nbytes());
  // Without offload, the gradient is on this device, too.
  return to_host_ ? bytes : std::max<int64_t>(0, bytes - static_cast<int64_t>(parameter.shard.nbytes()));
}

void ShardingEngine::add_to_gradient(Parameter& parameter, const at::Tensor& rows) {
  auto& gradient = parameter.shard.mutable_grad();
  if (gradient.defined()) {
    gradient.add_(rows);
  } else {
    gradient = rows;
  }
}

void ShardingEngine::reduce_over_replicas() {
  if (replicas_ == nullptr) {
    return;
  }
  at::NoGradGuard no_grad;
  for (auto& unit : units_) {
    std::vector<at::Tensor> partial;
    for (auto& parameter : unit.parameters) {
      if (parameter.partial.defined()) {
        partial.push_back(parameter.partial);
      }
    }
    if (partial.empty()) {
      continue;
    }
    named("reduction over the replicas", unit.name, [&] {
      const auto tensors = references(partial);
      const auto work =
          all_reduce_coalesced(*replicas_, {tensors.data(), tensors.size()}, Reduction::Sum, kGroupsLimit);
      work_wait(*work, kNoLimit);
    });
    std::vector<Leaving> leaving;
    for (auto& parameter : unit.parameters) {
      if (parameter.partial.defined()) {
        reduced_ -= waiting_bytes(parameter);
        divide_and_add(parameter, std::exchange(parameter.partial, {}), leaving);
      }
    }
    send_home(std::move(leaving));
  }
}

void ShardingEngine::reduce_rest(bool window_ends) {
  // Parameters that no backward reached count as zeros: other ranks may have reached them.
  reduce_in_order(true);
  for (auto& unit : units_) {
    finish_reduction(unit);
  }
  if (window_ends) {
    reduce_over_replicas();
  }
  while (!homeward_.empty()) {
    take_in();
  }
}

void ShardingEngine::reduce_unreduced() {
  std::lock_guard<std::mutex> lock(mutex_);
  begin_count();
  reduce_rest(true);
  unreduced_ = false;
  begin_count();
}

void ShardingEngine::backward_ends() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (sync_) {
    reduce_rest(window_ends_);
    unreduced_ = false;
  }
  wait_for_copies();
  for (auto& unit : units_) {
    // The optimizer may write what a gather of a unit that did not run still reads.
    finish_gather(unit);
    drop_part(unit);
    free(unit);
  }
  begin_count();
  in_backward_ = false;
}

void ShardingEngine::begin_count() {
  next_ = units_.size();
  for (auto& unit : units_) {
    unit.missing = unit.trained;
    for (auto& parameter : unit.parameters) {
      parameter.ready = false;
    }
  }
}

} // namespace brigade
