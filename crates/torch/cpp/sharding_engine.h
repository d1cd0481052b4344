// The engine behind sharder.h: its state, and what it is made of. Units are cut and entered in sharder.cpp, gathered in
// sharder_gather.cpp; their gradients are reduced in sharder_reduce.cpp.
#pragma once

#include "copy_stream.h"
#include "group.h"
#include "sharder.h"

#include <gloo/common/error.h>

#include <array>
#include <deque>
#include <mutex>
#include <optional>

namespace brigade {

class ShardingEngine : public std::enable_shared_from_this<ShardingEngine> {
 public:
  ShardingEngine(
      const Group& gather,
      const Group& reduce,
      const Group* replicas,
      const Group* parts,
      const Group* experts,
      const Group* expert_gather,
      const Group* expert_reduce,
      const SharderOptions& options)
      : gather_(gather),
        reduce_(reduce),
        replicas_(replicas),
        parts_(parts),
        experts_(experts),
        expert_gather_(expert_gather),
        expert_reduce_(expert_reduce),
        rank_(gather.live()->getRank()),
        ranks_(gather.live()->getSize()),
        expert_rank_(expert_gather == nullptr ? 0 : expert_gather->live()->getRank()),
        expert_ranks_(expert_gather == nullptr ? 1 : expert_gather->live()->getSize()),
        whole_at_rest_(options.whole_at_rest),
        offloads_(options.offload),
        pins_(options.pin),
        divisor_(options.divisor),
        expert_divisor_(options.expert_divisor) {}

  std::vector<at::Tensor> add_unit(
      std::string name,
      bool reshards,
      bool keeps_part,
      const std::vector<at::Tensor>& parameters,
      rust::Slice<const rust::String> names,
      rust::Slice<const ShardedSlot> slots,
      size_t bytes);

  void enter(size_t index);

  void leave(size_t index, const std::vector<at::Tensor>& outputs);

  void set_sync(bool sync, bool window_ends);

  void unit_changed(size_t index);

  void shards_changed();

  void scale_unreduced(const at::Tensor& factor);

  void reduce_unreduced();

  void clear_unreduced();

  void update_trained();

  void reset_after_error();

  void hold_all(bool write);

  void release_all(bool write);

  SharderMeter meter();

 private:
  // For starts of operations: the group's limit. For waits: the operation's own.
  static constexpr int64_t kGroupsLimit = -1;
  static constexpr int64_t kNoLimit = 0;

  struct Parameter {
    std::string name;
    // The layers' own tensor.
    at::Tensor whole;
    // This rank's rows, for the optimizer; all of it where each rank has it.
    at::Tensor shard;
    // The slot in the unit's storage: with the padding behind the parameter, as rows and flat. Rows are along `dim`,
    // which is the first one here.
    at::Tensor rows_of_all;
    at::Tensor flat;
    int64_t dim = 0;
    // Rows of each rank, the last ones' padding included; 0 where each rank has the whole.
    int64_t rows = 0;
    // The first of this rank's own rows, and how many it has.
    int64_t first = 0;
    int64_t own = 0;
    // The type in which gradients are added up.
    at::ScalarType sum_kind = at::kFloat;
    bool trained = false;
    // Some of a mixture's experts, which ranks of `experts_` alone have as well: each of them whole, or rows of them.
    bool is_expert = false;
    // This rank's part of the whole parameter, from a forward to its backward, where neighbouring ranks keep one together.
    at::Tensor part;
    // Whether this backward's gradient is complete.
    bool ready = false;
    // Bytes of this backward's gradient, where it takes memory besides the gradients of the batches before.
    int64_t made = 0;
    // Gradients of batches that were not reduced, in the type of the reduction.
    at::Tensor kept;
    // Reduced over the shards, not yet over the replicas.
    at::Tensor partial;
    std::shared_ptr<void> hook;

    bool replicated() const {
      return rows == 0;
    }

    // A tensor of the layers with the dimension of the rows first, or the other way round.
    at::Tensor by_rows(const at::Tensor& tensor) const {
      return dim == 0 ? tensor : tensor.transpose(0, dim);
    }
  };

  enum class State { Sharded, Gathering, Whole };

  // A reduction in flight.
  struct InFlight {
    std::unique_ptr<Work> scatter;
    std::unique_ptr<Work> expert_scatter;
    std::unique_ptr<Work> all;
    std::unique_ptr<Work> experts;
    std::vector<at::Tensor> inputs;
    // Of what is scattered, and of what each rank has whole, in the order of the unit's parameters.
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> whole;
    // Of inputs and outputs, without what the batches before have left.
    int64_t bytes = 0;

    std::array<Work*, 4> works() const {
      return {scatter.get(), expert_scatter.get(), all.get(), experts.get()};
    }
  };

  struct Unit {
    std::string name;
    std::string why;
    c10::Storage storage;
    size_t bytes = 0;
    // The shards' memory, laid out as that of the whole parameters, where one rank has all rows: the whole parameters
    // borrow it while they are used, and nothing is copied.
    std::optional<c10::Storage> shard_storage;
    bool borrows = false;
    bool reshards = true;
    // Whether neighbouring ranks keep the whole parameters together from forward to backward; and those that this rank
    // keeps now, of these shards.
    bool keeps_part = false;
    int64_t part_bytes = 0;
    uint64_t part_version = 0;
    std::vector<Parameter> parameters;
    State state = State::Sharded;
    // The count of changes of the shards, and that which the whole parameters are from.
    uint64_t changes = 0;
    uint64_t version = 0;
    // Forwards of it that have begun and not ended.
    int running = 0;
    std::unique_ptr<Work> gather;
    std::unique_ptr<Work> expert_gather;
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

  // Has an error say of which unit it is, and keeps its type, which tells its kind.
  template <typename Run>
  static auto named(const char* operation, const std::string& unit, Run run) {
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

  static std::vector<TensorRef> references(const std::vector<at::Tensor>& tensors) {
    std::vector<TensorRef> out;
    out.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      out.push_back(TensorRef{tensor});
    }
    return out;
  }

  // Whether a unit runs outside of a forward of the model, while all parameters are held whole.
  bool is_apart(size_t index) const;

  at::Tensor own_rows(const Parameter& parameter) const;

  // The number of ranks that share one copy of a parameter, and this rank's place among them.
  int64_t ranks_of(bool is_expert) const {
    return is_expert ? expert_ranks_ : ranks_;
  }

  int64_t rank_of(bool is_expert) const {
    return is_expert ? expert_rank_ : rank_;
  }

  Parameter cut(
      const Unit& unit, const at::Tensor& tensor, std::string name, const ShardedSlot& slot);

  // Memory for a shard or its gradient: the host's, where they are offloaded.
  at::Tensor new_shard(const at::Tensor& like, std::optional<at::IntArrayRef> strides = std::nullopt) const;

  // Whether shards may be the whole parameters: one rank, on the device, without another type to compute in.
  bool holds_all_rows(
      const Unit& unit, const std::vector<at::Tensor>& parameters, rust::Slice<const ShardedSlot> slots) const;

  // Bytes that a unit's whole parameters take besides its shards.
  static int64_t extra_bytes(const Unit& unit);

  // Counts a change of all shards.
  void count_changes();

  // Before the host may write into offloaded shards: copies may still read them.
  void wait_for_copies() const;

  // sharder_reduce.cpp: hooks into the gradients of the parameters that are trained.
  void watch(size_t index);

  // Whether a backward can come through one of the outputs.
  bool watch_outputs(size_t place, const std::vector<at::Tensor>& outputs);

  // The gradient of an output of a unit is there, so the nodes of all that began after the unit had ended are done:
  // autograd runs the nodes of a device from the latest to the earliest.
  void before_backward(const Pass& pass, size_t place);

  void backward_begins();

  void gradient_arrived(size_t index, size_t place);

  // Adds a gradient that is not reduced yet to those of the batches before, in the type of the reduction.
  void keep(Parameter& parameter);

  // From the last unit to the first, on every rank: gradients that come in another order on one rank cannot put the
  // messages out of step. With `all` also units that lack gradients, as at the end of a backward.
  void reduce_in_order(bool all);

  void reduce(Unit& unit);

  // A parameter's gradient as each rank's rows one after the other, flat, in the type of the reduction.
  at::Tensor input_of(Parameter& parameter, InFlight& flight);

  void finish_reduction(Unit& unit);

  void divide_and_add(Parameter& parameter, at::Tensor rows, std::vector<Leaving>& leaving);

  // Begins to copy gradients to the host, and takes in those of the units before, so that the device holds the gradients
  // of two units.
  void send_home(std::vector<Leaving> leaving);

  void take_in();

  void count_reduced(int64_t bytes);

  // Bytes of `partial`, without those that are counted as the gradient it becomes.
  int64_t waiting_bytes(const Parameter& parameter) const;

  static void add_to_gradient(Parameter& parameter, const at::Tensor& rows);

  void reduce_over_replicas();

  void backward_ends();
  // Reduces all units that were not reduced yet, and waits for it. With the mutex held.
  void reduce_rest(bool window_ends);

  void begin_count();

  // sharder_gather.cpp
  void start_gather(Unit& unit);

  // Keeps this rank's part of the whole parameters for the backward.
  void keep_part(Unit& unit);

  // Frees a unit that its forward has left and a backward will need again.
  void put_away(Unit& unit);

  void drop_part(Unit& unit);

  at::Tensor part_of(const Parameter& parameter) const;

  void count_gathered(int64_t bytes);

  void gather_parts(Unit& unit);

  void copy_and_gather(Unit& unit);

  // What is gathered, and this rank's part of it.
  struct Rows {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
  };

  // Copies this rank's rows to their place in the storage, and adds them to those that a group gathers.
  void place_rows(const Parameter& parameter, Rows& rows) const;

  std::unique_ptr<Work> start(const Unit& unit, const Group& group, const Rows& rows);

  void make_whole(Unit& unit);

  void finish_gather(Unit& unit);

  void free(Unit& unit);

  void reset();

  const Group& gather_;
  const Group& reduce_;
  const Group* replicas_;
  // Neighbouring ranks that keep whole parameters together from forward to backward.
  const Group* parts_;
  // The ranks that have the same experts, where there are several.
  const Group* experts_;
  // The ranks that share one copy of the same experts, where there are several.
  const Group* expert_gather_;
  const Group* expert_reduce_;
  const int64_t rank_;
  const int64_t ranks_;
  const int64_t expert_rank_;
  const int64_t expert_ranks_;
  const bool whole_at_rest_;
  // Whether shards, their gradients and the optimizer's states lie in the host's memory, and whether that is pinned.
  const bool offloads_;
  const bool pins_;
  const int64_t divisor_;
  const int64_t expert_divisor_;
  // There where shards are offloaded: on the CPU they would lie in the same memory.
  std::optional<CopyStream> to_device_;
  std::optional<CopyStream> to_host_;
  std::deque<Homeward> homeward_;

  // Autograd's threads call hooks, while the thread that called `backward` waits.
  std::mutex mutex_;
  std::vector<Unit> units_;
  std::shared_ptr<Pass> pass_;
  // A unit that was left and stays whole until another one runs: the backward begins with the last.
  std::optional<size_t> kept_;
  // The order of the last forward.
  std::vector<size_t> learnt_;
  bool sync_ = true;
  // Whether what replicas have summed goes to the others in the next backward.
  bool window_ends_ = true;
  bool held_ = false;
  // Whether what holds the whole parameters writes into them: an error of it leaves the shards as they were.
  bool writes_ = false;
  bool in_backward_ = false;
  // Whether there are gradients of batches that were not reduced.
  bool unreduced_ = false;
  // Units from this one on have been reduced in this backward.
  size_t next_ = 0;

  int64_t whole_ = 0;
  int64_t most_whole_ = 0;
  int64_t gathered_ = 0;
  int64_t most_gathered_ = 0;
  // Whole gradients of this backward, what is summed, and what is on its way to the host.
  int64_t reduced_ = 0;
  int64_t most_reduced_ = 0;
  uint64_t gathers_ = 0;
  uint64_t reductions_ = 0;
};

} // namespace brigade
