// A backend that answers at once, for simulation: the arithmetic of a program with N ranks, memory and
// bucket layouts included, on one process. Results hold what the tensors held before.
#include "brigade-torch/src/bridge.rs.h"

#include <map>
#include <mutex>
#include <string>

namespace brigade {

// What a rank would have sent, by the name of the operation.
struct Traffic {
  struct Sent {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  std::mutex mutex;
  std::map<std::string, Sent> sent;

  void add(const char* operation, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    auto& of = sent[operation];
    ++of.messages;
    of.bytes += bytes;
  }
};

namespace {

class FakeWork : public c10d::Work {
 public:
  explicit FakeWork(std::vector<at::Tensor> result, int source = -1)
      : result_(std::move(result)), source_(source) {}
  bool isCompleted() override {
    return true;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    return true;
  }
  void abort() override {}
  int sourceRank() const override {
    return source_;
  }
  std::vector<at::Tensor> result() override {
    return result_;
  }
  // The reducer waits for this one.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result_));
    return future;
  }

 private:
  std::vector<at::Tensor> result_;
  int source_;
};

using Answer = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

Answer done(Tensors result = {}, int source = -1) {
  return c10::make_intrusive<FakeWork>(std::move(result), source);
}

uint64_t bytes_of(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += tensor.nbytes();
  }
  return bytes;
}

class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, std::shared_ptr<Traffic> traffic)
      : Backend(rank, size), traffic_(std::move(traffic)) {}

  const std::string getBackendName() const override {
    return "fake";
  }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override {}

  Answer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    // The last rank of the ring does not pass it on.
    const bool last = (getRank() + 1) % getSize() == options.rootRank;
    traffic_->add("broadcast", last ? 0 : bytes_of(tensors));
    return done(tensors);
  }
  Answer allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    traffic_->add("all_reduce", in_ring(2 * bytes_of(tensors)));
    return done(tensors);
  }
  Answer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    traffic_->add("all_reduce", in_ring(2 * bytes_of(tensors)));
    return done(tensors);
  }
  Answer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    traffic_->add("reduce", getRank() == options.rootRank ? 0 : bytes_of(tensors));
    return done(tensors);
  }
  // As if every other rank had sent what this one sends.
  Answer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    uint64_t bytes = 0;
    for (const auto& list : outputs) {
      bytes += bytes_of(list);
    }
    traffic_->add("all_gather", in_ring(bytes));
    return done(fill(outputs, inputs));
  }
  Answer _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Answer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    traffic_->add("all_gather", in_ring(bytes_of(outputs)));
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (auto& chunk : outputs[i].chunk(getSize())) {
        chunk.copy_(inputs.at(i).view_as(chunk));
      }
    }
    return done(outputs);
  }
  Answer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    traffic_->add("gather", getRank() == options.rootRank ? 0 : bytes_of(inputs));
    return done(fill(outputs, inputs));
  }
  Answer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions&) override {
    traffic_->add("scatter", inputs.empty() ? 0 : bytes_of(inputs.at(0)) - bytes_of(outputs));
    if (!inputs.empty()) {
      outputs.at(0).copy_(inputs.at(0).at(getRank()));
    }
    return done(outputs);
  }
  Answer reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions&) override {
    traffic_->add("reduce_scatter", in_ring(bytes_of(inputs.at(0))));
    outputs.at(0).copy_(inputs.at(0).at(getRank()));
    return done(outputs);
  }
  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Answer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions&) override {
    traffic_->add("reduce_scatter", in_ring(bytes_of(inputs)));
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i].copy_(inputs.at(i).chunk(getSize()).at(getRank()).view_as(outputs[i]));
    }
    return done(outputs);
  }
  Answer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    traffic_->add("all_to_all", bytes_of(inputs) - inputs.at(getRank()).nbytes());
    // The piece that this rank keeps for itself; what others would send stays as it was.
    outputs.at(getRank()).copy_(inputs.at(getRank()));
    return done(outputs);
  }
  Answer alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>&,
      std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions&) override {
    const uint64_t rows = input.dim() == 0 ? 1 : std::max<int64_t>(input.size(0), 1);
    const uint64_t kept = input_rows.empty()
        ? input.nbytes() / getSize()
        : input.nbytes() / rows * input_rows.at(getRank());
    traffic_->add("all_to_all", input.nbytes() - kept);
    // Peers send what they get, as far as there is room: numbers of rows that are exchanged first are then possible ones.
    if (output.sizes() == input.sizes()) {
      output.copy_(input);
    } else {
      output.zero_();
    }
    return done({output});
  }
  Answer send(Tensors& tensors, int, int) override {
    traffic_->add("send", bytes_of(tensors));
    return done(tensors);
  }
  Answer recv(Tensors& tensors, int from, int) override {
    return done(tensors, from);
  }
  Answer recvAnysource(Tensors& tensors, int) override {
    return done(tensors, getRank() == 0 ? getSize() - 1 : 0);
  }
  Answer barrier(const c10d::BarrierOptions&) override {
    traffic_->add("barrier", 0);
    return done();
  }

 private:
  static Tensors fill(TensorLists& outputs, Tensors& inputs) {
    Tensors all;
    for (auto& list : outputs) {
      for (auto& output : list) {
        output.copy_(inputs.at(0));
        all.push_back(output);
      }
    }
    return all;
  }

  // What a rank sends where every rank's part goes once around the ring.
  uint64_t in_ring(uint64_t bytes) const {
    return bytes * static_cast<uint64_t>(getSize() - 1) / static_cast<uint64_t>(getSize());
  }

  const std::shared_ptr<Traffic> traffic_;
};

} // namespace

std::unique_ptr<Group> fake_group(const Store& store, int32_t rank, int32_t size, rust::Str name) {
  constexpr auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto traffic = std::make_shared<Traffic>();
  const auto backend = c10::make_intrusive<FakeBackend>(rank, size, traffic);
  auto group = wrap_backend(
      store,
      rank,
      size,
      name,
      {{c10::DeviceType::CPU, type, backend}, {c10::DeviceType::CUDA, type, backend}});
  group->traffic = traffic;
  return group;
}

rust::Vec<OperationTraffic> group_traffic(const Group& group) {
  rust::Vec<OperationTraffic> out;
  if (group.traffic) {
    std::lock_guard<std::mutex> lock(group.traffic->mutex);
    for (const auto& [operation, sent] : group.traffic->sent) {
      out.push_back({operation, sent.messages, sent.bytes});
    }
  }
  return out;
}

void group_reset_traffic(const Group& group) {
  if (group.traffic) {
    std::lock_guard<std::mutex> lock(group.traffic->mutex);
    group.traffic->sent.clear();
  }
}

} // namespace brigade
