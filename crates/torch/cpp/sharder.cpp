#include "brigade-torch/src/bridge.rs.h"

#include "copy_stream.h"
#include "forks.h"
#include "storage.h"

#include <gloo/common/error.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>

namespace brigade {

namespace {

using torch::autograd::variable_list;

// For starts of operations: the group's limit. For waits: the operation's own.
constexpr int64_t kGroupsLimit = -1;
constexpr int64_t kNoLimit = 0;

// Has an error say of which unit it is, and keeps its type, which tells its kind.
template <typename Run>
auto named(const char* operation, const std::string& unit, Run run) {
  const auto text = [&](const char* what) {
    return std::string(operation) + " of unit `" + unit + "`: " + what;
  };
  try {
    return run();
  } catch (c10::Error& error) {
    error.add_context(std::string(operation) + " of unit `" + unit + "`");
    throw;
  } catch (const TimeLimit& error) {
    throw TimeLimit(text(error.what()));
  } catch (const PeerLost& error) {
    throw PeerLost(text(error.what()));
  } catch (const Aborted& error) {
    throw Aborted(text(error.what()));
  } catch (const gloo::IoException& error) {
    throw gloo::IoException(text(error.what()));
  }
}

std::vector<TensorRef> references(const std::vector<at::Tensor>& tensors) {
  std::vector<TensorRef> out;
  out.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    out.push_back(TensorRef{tensor});
  }
  return out;
}

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

struct Parameter {
  std::string name;
  // The layers' own tensor.
  at::Tensor whole;
  // This rank's rows, for the optimizer; all of it where each rank has it.
  at::Tensor shard;
  // The slot in the unit's storage: with the padding behind the parameter, as rows and flat.
  at::Tensor rows_of_all;
  at::Tensor flat;
  // Rows of each rank, the last ones' padding included; 0 where each rank has the whole.
  int64_t rows = 0;
  // The first of this rank's own rows, and how many it has.
  int64_t first = 0;
  int64_t own = 0;
  // The type in which gradients are added up.
  at::ScalarType sum_kind = at::kFloat;
  bool trained = false;
  // This rank's part of the whole parameter, from a forward to its backward, where neighbouring ranks keep one together.
  at::Tensor part;
  // Whether this backward's gradient is complete.
  bool ready = false;
  // Gradients of batches that were not reduced, in the type of the reduction.
  at::Tensor kept;
  // Reduced over the shards, not yet over the replicas.
  at::Tensor partial;
  std::shared_ptr<void> hook;

  bool replicated() const {
    return rows == 0;
  }
};

enum class State { Sharded, Gathering, Whole };

// A reduction in flight.
struct InFlight {
  std::unique_ptr<Work> scatter;
  std::unique_ptr<Work> all;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  int64_t bytes = 0;
};

struct Unit {
  std::string name;
  std::string why;
  c10::Storage storage;
  size_t bytes = 0;
  bool reshards = true;
  // Whether neighbouring ranks keep the whole parameters together from forward to backward; and those that this rank
  // keeps now, of these shards.
  bool keeps_part = false;
  int64_t part_bytes = 0;
  uint64_t part_version = 0;
  std::vector<Parameter> parameters;
  State state = State::Sharded;
  // The count of changes of the shards that the whole parameters are from.
  uint64_t version = 0;
  // Forwards of it that have begun and not ended.
  int running = 0;
  std::unique_ptr<Work> gather;
  // Behind the copies of offloaded rows to the device.
  std::optional<c10::Event> copied;
  size_t trained = 0;
  size_t missing = 0;
  bool reduced = false;
  std::optional<InFlight> reduction;
};

// A reduced gradient on its way to the host's memory.
struct Leaving {
  Parameter* parameter;
  at::Tensor on_device;
  at::Tensor on_host;
};

struct Homeward {
  std::vector<Leaving> gradients;
  c10::Event arrived;
};

// The units in the order in which one forward entered them, and the place behind what ran inside of each. Hooks of
// the forward's graph hold it.
struct Pass {
  struct Run {
    size_t unit;
    size_t end;
  };
  std::vector<Run> runs;
  // Places of those that have not been left.
  std::vector<size_t> open;
};

} // namespace

class ShardingEngine : public std::enable_shared_from_this<ShardingEngine> {
 public:
  ShardingEngine(
      const Group& gather,
      const Group& reduce,
      const Group* replicas,
      const Group* parts,
      const SharderOptions& options)
      : gather_(gather),
        reduce_(reduce),
        replicas_(replicas),
        parts_(parts),
        rank_(gather.live()->getRank()),
        ranks_(gather.live()->getSize()),
        whole_at_rest_(options.whole_at_rest),
        offloads_(options.offload),
        pins_(options.pin),
        divisor_(options.divisor) {}

  std::vector<at::Tensor> add_unit(
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
    unit.why = "a parameter of unit `" + unit.name +
        "` is sharded: other ranks have the rest of it. Read it inside of `gathered`, or in the unit's own forward";
    unit.bytes = bytes;
    unit.reshards = reshards;
    unit.keeps_part = keeps_part;
    const auto device = parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
    unit.storage = empty_storage(device);
    if (offloads_ && !device.is_cpu() && !to_device_) {
      to_device_.emplace(device);
      to_host_.emplace(device);
    }
    if (whole_at_rest_) {
      allocate(unit.storage, bytes);
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

  void enter(size_t index) {
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
    ++unit.running;
    const auto place = pass_->runs.size();
    pass_->runs.push_back({index, place + 1});
    pass_->open.push_back(place);
    make_whole(unit);
    if (place + 1 < learnt_.size() && learnt_[place] == index) {
      start_gather(units_[learnt_[place + 1]]);
    }
  }

  void leave(size_t index, const std::vector<at::Tensor>& outputs) {
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
    const bool last = !learnt_.empty() && learnt_.back() == index;
    const bool stays = differentiable && (index == 0 || last || !unit.reshards);
    if (!stays && unit.running == 0) {
      if (differentiable && unit.keeps_part) {
        keep_part(unit);
      }
      free(unit);
    }
    if (index == 0) {
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

  void set_sync(bool sync, bool window_ends) {
    std::lock_guard<std::mutex> lock(mutex_);
    sync_ = sync;
    window_ends_ = window_ends;
  }

  void shards_changed() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++version_;
    if (whole_at_rest_) {
      for (auto& unit : units_) {
        // A gather that is in flight may have read the rows as they were.
        finish_gather(unit);
      }
      // Each is waited for where it runs next.
      for (auto& unit : units_) {
        start_gather(unit);
      }
    }
  }

  void scale_unreduced(const at::Tensor& factor) {
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

  void clear_unreduced() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& unit : units_) {
      for (auto& parameter : unit.parameters) {
        parameter.kept.reset();
        parameter.partial.reset();
        parameter.whole.mutable_grad().reset();
      }
    }
  }

  void update_trained() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < units_.size(); ++i) {
      watch(i);
    }
    begin_count();
  }

  void reset_after_error() {
    std::lock_guard<std::mutex> lock(mutex_);
    reset();
  }

  void hold_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!held_, "the parameters are whole already: `gathered` inside of `gathered`");
    for (auto& unit : units_) {
      start_gather(unit);
    }
    for (auto& unit : units_) {
      make_whole(unit);
    }
    held_ = true;
  }

  void release_all(bool write) {
    std::lock_guard<std::mutex> lock(mutex_);
    at::NoGradGuard no_grad;
    held_ = false;
    wait_for_copies();
    for (auto& unit : units_) {
      if (write) {
        for (auto& parameter : unit.parameters) {
          auto from = own_rows(parameter);
          if (!parameter.shard.is_alias_of(from)) {
            parameter.shard.detach().copy_(from);
          }
        }
      }
      free(unit);
    }
    if (write) {
      ++version_;
    }
  }

  SharderMeter meter() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {
        static_cast<uint64_t>(gathered_),
        static_cast<uint64_t>(most_gathered_),
        static_cast<uint64_t>(most_reduced_),
        gathers_,
        reductions_,
        static_cast<uint64_t>(most_whole_)};
  }

 private:
  // Whether a unit runs outside of a forward of the model, while all parameters are held whole.
  bool is_apart(size_t index) const {
    return held_ && index != 0 && (!pass_ || pass_->open.empty());
  }

  at::Tensor own_rows(const Parameter& parameter) const {
    if (parameter.replicated()) {
      return parameter.whole.variable_data();
    }
    return parameter.rows_of_all.narrow(0, parameter.first, parameter.own);
  }

  Parameter cut(
      const Unit& unit, const at::Tensor& tensor, std::string name, const ShardedSlot& slot) {
    Parameter parameter;
    parameter.name = std::move(name);
    parameter.whole = tensor;
    parameter.rows = slot.rows;
    const auto kind = static_cast<at::ScalarType>(slot.kind);
    parameter.sum_kind = static_cast<at::ScalarType>(slot.reduce_kind);
    const auto values = tensor.detach();
    // Parameters of a deferred model get their values as shards.
    const bool known = has_memory(tensor);
    const auto strides = strides_by_rows(tensor);
    const auto whole = tensor_of(unit.storage, kind, slot.offset, tensor.sizes(), strides);
    if (parameter.replicated()) {
      parameter.rows_of_all = whole;
      parameter.flat = tensor_of(unit.storage, kind, slot.offset, {tensor.numel()}, {1});
      parameter.shard = new_shard(values);
      if (known) {
        parameter.shard.copy_(values);
      } else {
        parameter.shard.zero_();
      }
    } else {
      auto sizes = tensor.sizes().vec();
      parameter.first = std::min(rank_ * slot.rows, sizes[0]);
      parameter.own = std::min(slot.rows, sizes[0] - parameter.first);
      const auto width = sizes[0] == 0 ? 0 : tensor.numel() / sizes[0];
      sizes[0] = ranks_ * slot.rows;
      parameter.rows_of_all = tensor_of(unit.storage, kind, slot.offset, sizes, strides);
      parameter.flat = tensor_of(unit.storage, kind, slot.offset, {sizes[0] * width}, {1});
      auto rows = values.narrow(0, parameter.first, parameter.own);
      if (whole_at_rest_ && !to_device_ && kind == tensor.scalar_type()) {
        // The same memory: the optimizer's step writes into the whole parameter.
        const auto offset = slot.offset + parameter.first * strides[0];
        parameter.shard = tensor_of(unit.storage, kind, offset, rows.sizes(), strides);
      } else {
        parameter.shard = new_shard(rows, strides);
        if (known) {
          parameter.shard.copy_(rows);
        }
      }
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

  // Memory for a shard or its gradient: the host's, where they are offloaded.
  at::Tensor new_shard(const at::Tensor& like, std::optional<at::IntArrayRef> strides = std::nullopt) const {
    auto options = at::TensorOptions().dtype(like.scalar_type()).device(like.device());
    if (to_device_) {
      options = options.device(at::kCPU).pinned_memory(pins_);
    }
    return at::empty_strided(like.sizes(), strides.value_or(like.strides()), options);
  }

  // Before the host may write into offloaded shards: copies may still read them.
  void wait_for_copies() const {
    if (to_device_) {
      to_device_->synchronize();
    }
  }

  // Hooks into the gradients of the parameters that are trained.
  void watch(size_t index) {
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

  // Whether a backward can come through one of the outputs.
  bool watch_outputs(size_t place, const std::vector<at::Tensor>& outputs) {
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

  // The gradient of an output of a unit is there, so the nodes of all that began after the unit had ended are done:
  // autograd runs the nodes of a device from the latest to the earliest.
  void before_backward(const Pass& pass, size_t place) {
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

  void backward_begins() {
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

  void gradient_arrived(size_t index, size_t place) {
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
      if (--unit.missing == 0) {
        reduce_in_order(false);
      }
    }
  }

  // Adds a gradient that is not reduced yet to those of the batches before, in the type of the reduction.
  void keep(Parameter& parameter) {
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

  // From the last unit to the first, on every rank: gradients that come in another order on one rank cannot put the
  // messages out of step. With `all` also units that lack gradients, as at the end of a backward.
  void reduce_in_order(bool all) {
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

  void reduce(Unit& unit) {
    // One input of a reduction at a time, besides the one that is made.
    for (auto& other : units_) {
      finish_reduction(other);
    }
    at::NoGradGuard no_grad;
    InFlight flight;
    std::vector<at::Tensor> shared;
    for (auto& parameter : unit.parameters) {
      if (!parameter.trained) {
        continue;
      }
      if (parameter.replicated()) {
        shared.push_back(input_of(parameter));
      } else {
        flight.inputs.push_back(input_of(parameter));
        const auto& input = flight.inputs.back();
        // One rank's rows are all rows.
        flight.outputs.push_back(
            ranks_ == 1 ? input : at::empty({input.numel() / ranks_}, input.options()));
        flight.bytes += static_cast<int64_t>(
            ranks_ == 1 ? input.nbytes() : input.nbytes() + flight.outputs.back().nbytes());
      }
    }
    ++reductions_;
    reduced_ += flight.bytes;
    most_reduced_ = std::max(most_reduced_, reduced_);
    named("reduction of the gradients", unit.name, [&] {
      if (!flight.inputs.empty() && ranks_ > 1) {
        const auto outputs = references(flight.outputs);
        const auto inputs = references(flight.inputs);
        flight.scatter = reduce_scatter_flat_coalesced(
            reduce_,
            {outputs.data(), outputs.size()},
            {inputs.data(), inputs.size()},
            Reduction::Sum,
            kGroupsLimit);
      }
      if (!shared.empty() && ranks_ > 1) {
        const auto tensors = references(shared);
        flight.all =
            all_reduce_coalesced(reduce_, {tensors.data(), tensors.size()}, Reduction::Sum, kGroupsLimit);
      }
    });
    flight.outputs.insert(flight.outputs.end(), shared.begin(), shared.end());
    unit.reduction = std::move(flight);
  }

  // A parameter's gradient as each rank's rows one after the other, flat, in the type of the reduction.
  at::Tensor input_of(Parameter& parameter) {
    const auto kind = parameter.sum_kind;
    auto& gradient = parameter.whole.mutable_grad();
    at::Tensor sum;
    if (parameter.kept.defined()) {
      sum = gradient.defined() ? parameter.kept.add_(gradient) : parameter.kept;
    } else {
      sum = gradient;
    }
    const auto count = parameter.replicated() ? parameter.whole.numel() : parameter.flat.numel();
    at::Tensor flat;
    const bool as_it_lies = sum.defined() && sum.scalar_type() == kind && sum.numel() == count &&
        sum.layout() == at::kStrided && sum.is_non_overlapping_and_dense() &&
        sum.strides() == parameter.rows_of_all.strides() && count > 0;
    if (as_it_lies) {
      flat = sum.as_strided({count}, {1});
    } else {
      const auto options = at::TensorOptions().dtype(kind).device(parameter.whole.device());
      flat = sum.defined() ? at::empty({count}, options) : at::zeros({count}, options);
      if (sum.defined()) {
        auto rows = flat.as_strided(parameter.rows_of_all.sizes(), parameter.rows_of_all.strides());
        if (parameter.replicated()) {
          rows.copy_(sum);
        } else {
          const auto size = parameter.whole.size(0);
          rows.narrow(0, 0, size).copy_(sum);
          // What stands in the padding is added up, and read by no rank.
          rows.narrow(0, size, rows.size(0) - size).zero_();
        }
      }
    }
    parameter.kept.reset();
    gradient.reset();
    return flat;
  }

  void finish_reduction(Unit& unit) {
    if (!unit.reduction) {
      return;
    }
    at::NoGradGuard no_grad;
    // Taken out first: an error leaves nothing half done.
    auto flight = std::move(*unit.reduction);
    unit.reduction.reset();
    named("reduction of the gradients", unit.name, [&] {
      for (auto* work : {flight.scatter.get(), flight.all.get()}) {
        if (work != nullptr) {
          work_wait(*work, kNoLimit);
        }
      }
    });
    reduced_ -= flight.bytes;
    size_t scattered = 0;
    size_t shared = flight.inputs.size();
    std::vector<Leaving> leaving;
    for (auto& parameter : unit.parameters) {
      if (!parameter.trained) {
        continue;
      }
      auto output = flight.outputs[parameter.replicated() ? shared++ : scattered++];
      auto rows = output.as_strided(parameter.shard.sizes(), parameter.shard.strides());
      if (replicas_ != nullptr) {
        if (parameter.partial.defined()) {
          parameter.partial.add_(rows);
        } else {
          parameter.partial = rows;
        }
      } else {
        divide_and_add(parameter, rows, leaving);
      }
    }
    send_home(std::move(leaving));
  }

  void divide_and_add(Parameter& parameter, at::Tensor rows, std::vector<Leaving>& leaving) {
    // One division, after the sum.
    rows.div_(divisor_);
    rows = rows.to(parameter.shard.scalar_type());
    if (to_host_) {
      leaving.push_back({&parameter, rows, new_shard(rows)});
    } else {
      add_to_gradient(parameter, rows);
    }
  }

  // Begins to copy gradients to the host, and takes in those of the units before, so that the device holds the gradients
  // of two units.
  void send_home(std::vector<Leaving> leaving) {
    if (leaving.empty()) {
      return;
    }
    auto arrived = to_host_->behind_current([&] {
      for (auto& gradient : leaving) {
        gradient.on_host.copy_(gradient.on_device, /*non_blocking=*/pins_);
      }
    });
    homeward_.push_back({std::move(leaving), std::move(arrived)});
    while (homeward_.size() > 1) {
      take_in();
    }
  }

  void take_in() {
    auto flight = std::move(homeward_.front());
    homeward_.pop_front();
    flight.arrived.synchronize();
    for (auto& gradient : flight.gradients) {
      add_to_gradient(*gradient.parameter, gradient.on_host);
    }
  }

  static void add_to_gradient(Parameter& parameter, const at::Tensor& rows) {
    auto& gradient = parameter.shard.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(rows);
    } else {
      gradient = rows;
    }
  }

  void reduce_over_replicas() {
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
          divide_and_add(parameter, parameter.partial, leaving);
          parameter.partial.reset();
        }
      }
      send_home(std::move(leaving));
    }
  }

  void backward_ends() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (sync_) {
      // Parameters that this backward did not reach count as zeros: other ranks may have reached them.
      reduce_in_order(true);
      for (auto& unit : units_) {
        finish_reduction(unit);
      }
      if (window_ends_) {
        reduce_over_replicas();
      }
      while (!homeward_.empty()) {
        take_in();
      }
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

  void begin_count() {
    next_ = units_.size();
    for (auto& unit : units_) {
      unit.missing = unit.trained;
      for (auto& parameter : unit.parameters) {
        parameter.ready = false;
      }
    }
  }

  void start_gather(Unit& unit) {
    if (unit.parameters.empty()) {
      return;
    }
    const bool stale = unit.version != version_;
    if (unit.state == State::Gathering || (unit.state == State::Whole && !stale)) {
      return;
    }
    at::NoGradGuard no_grad;
    if (unit.state == State::Sharded) {
      allocate(unit.storage, unit.bytes);
      ++whole_;
      most_whole_ = std::max(most_whole_, whole_);
      count_gathered(static_cast<int64_t>(unit.bytes));
    }
    unit.state = State::Gathering;
    unit.version = version_;
    ++gathers_;
    if (to_device_) {
      // The memory is new to the current stream, whose work until here may still use what was there before.
      unit.copied.emplace(to_device_->behind_current([&] { copy_and_gather(unit); }));
    } else {
      copy_and_gather(unit);
    }
  }

  // Keeps this rank's part of the whole parameters for the backward.
  void keep_part(Unit& unit) {
    at::NoGradGuard no_grad;
    drop_part(unit);
    for (auto& parameter : unit.parameters) {
      if (!parameter.replicated()) {
        parameter.part = part_of(parameter).clone();
        unit.part_bytes += static_cast<int64_t>(parameter.part.nbytes());
      }
    }
    unit.part_version = version_;
    count_gathered(unit.part_bytes);
  }

  void drop_part(Unit& unit) {
    for (auto& parameter : unit.parameters) {
      parameter.part.reset();
    }
    gathered_ -= unit.part_bytes;
    unit.part_bytes = 0;
  }

  at::Tensor part_of(const Parameter& parameter) const {
    const auto live = parts_->live();
    const auto count = parameter.flat.numel() / live->getSize();
    return parameter.flat.narrow(0, live->getRank() * count, count);
  }

  void count_gathered(int64_t bytes) {
    gathered_ += bytes;
    most_gathered_ = std::max(most_gathered_, gathered_);
  }

  void gather_parts(Unit& unit) {
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

  void copy_and_gather(Unit& unit) {
    if (unit.part_bytes > 0 && unit.part_version == version_) {
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

  void start(
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

  void make_whole(Unit& unit) {
    start_gather(unit);
    finish_gather(unit);
  }

  void finish_gather(Unit& unit) {
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

  void free(Unit& unit) {
    if (whole_at_rest_ || held_ || unit.state == State::Sharded) {
      return;
    }
    if (unit.state == State::Gathering) {
      finish_gather(unit);
    }
    release(unit.storage, unit.bytes, unit.why);
    unit.state = State::Sharded;
    --whole_;
    gathered_ -= static_cast<int64_t>(unit.bytes);
  }

  void reset() {
    at::NoGradGuard no_grad;
    pass_.reset();
    for (auto& unit : units_) {
      unit.running = 0;
      try {
        finish_gather(unit);
        if (unit.reduction) {
          auto flight = std::move(*unit.reduction);
          unit.reduction.reset();
          reduced_ -= flight.bytes;
          for (auto* work : {flight.scatter.get(), flight.all.get()}) {
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
        }
      }
      drop_part(unit);
      free(unit);
    }
    // What has not come home is of a backward that failed.
    homeward_.clear();
    begin_count();
    in_backward_ = false;
  }

  const Group& gather_;
  const Group& reduce_;
  const Group* replicas_;
  // Neighbouring ranks that keep whole parameters together from forward to backward.
  const Group* parts_;
  const int64_t rank_;
  const int64_t ranks_;
  const bool whole_at_rest_;
  // Whether shards, their gradients and the optimizer's states lie in the host's memory, and whether that is pinned.
  const bool offloads_;
  const bool pins_;
  const int64_t divisor_;
  // There where shards are offloaded: on the CPU they would lie in the same memory.
  std::optional<CopyStream> to_device_;
  std::optional<CopyStream> to_host_;
  std::deque<Homeward> homeward_;

  // Autograd's threads call hooks, while the thread that called `backward` waits.
  std::mutex mutex_;
  std::vector<Unit> units_;
  std::shared_ptr<Pass> pass_;
  // The order of the last forward.
  std::vector<size_t> learnt_;
  bool sync_ = true;
  // Whether what replicas have summed goes to the others in the next backward.
  bool window_ends_ = true;
  bool held_ = false;
  bool in_backward_ = false;
  uint64_t version_ = 0;
  // Units from this one on have been reduced in this backward.
  size_t next_ = 0;

  int64_t whole_ = 0;
  int64_t most_whole_ = 0;
  int64_t gathered_ = 0;
  int64_t most_gathered_ = 0;
  int64_t reduced_ = 0;
  int64_t most_reduced_ = 0;
  uint64_t gathers_ = 0;
  uint64_t reductions_ = 0;
};


std::unique_ptr<Sharder> new_sharder(
    const Group& gather,
    const Group& reduce,
    rust::Slice<const GroupRef> replicas,
    rust::Slice<const GroupRef> parts,
    const SharderOptions& options) {
  check_not_fork("a sharder");
  auto out = std::make_unique<Sharder>();
  out->engine = std::make_shared<ShardingEngine>(
      gather,
      reduce,
      replicas.empty() ? nullptr : &replicas[0].group,
      parts.empty() ? nullptr : &parts[0].group,
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

void sharder_shards_changed(const Sharder& sharder) {
  sharder.engine->shards_changed();
}

void sharder_scale_unreduced(const Sharder& sharder, const Tensor& factor) {
  sharder.engine->scale_unreduced(factor);
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

void sharder_hold_all(const Sharder& sharder) {
  sharder.engine->hold_all();
}

void sharder_release_all(const Sharder& sharder, bool write) {
  sharder.engine->release_all(write);
}

SharderMeter sharder_meter(const Sharder& sharder) {
  return sharder.engine->meter();
}

} // namespace brigade
