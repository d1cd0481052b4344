// A backend that answers at once, for simulation: the arithmetic of a program with N ranks, memory and
// bucket layouts included, on one process. Results hold what the tensors held before.
#include "brigade-torch/src/bridge.rs.h"

namespace brigade {

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

class FakeBackend : public c10d::Backend {
 public:
  using Backend::Backend;

  const std::string getBackendName() const override {
    return "fake";
  }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override {}

  Answer broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return done(tensors);
  }
  Answer allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done(tensors);
  }
  Answer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return done(tensors);
  }
  Answer reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return done(tensors);
  }
  // As if every other rank had sent what this one sends.
  Answer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return done(fill(outputs, inputs));
  }
  Answer _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    for (auto& chunk : output.chunk(getSize())) {
      chunk.copy_(input.view_as(chunk));
    }
    return done({output});
  }
  Answer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions&) override {
    return done(fill(outputs, inputs));
  }
  Answer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions&) override {
    if (!inputs.empty()) {
      outputs.at(0).copy_(inputs.at(0).at(getRank()));
    }
    return done(outputs);
  }
  Answer reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions&) override {
    outputs.at(0).copy_(inputs.at(0).at(getRank()));
    return done(outputs);
  }
  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions&) override {
    output.copy_(input.chunk(getSize()).at(getRank()).view_as(output));
    return done({output});
  }
  Answer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    // The piece that this rank keeps for itself; what others would send stays as it was.
    outputs.at(getRank()).copy_(inputs.at(getRank()));
    return done(outputs);
  }
  Answer alltoall_base(
      at::Tensor& output,
      at::Tensor&,
      std::vector<int64_t>&,
      std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return done({output});
  }
  Answer send(Tensors& tensors, int, int) override {
    return done(tensors);
  }
  Answer recv(Tensors& tensors, int from, int) override {
    return done(tensors, from);
  }
  Answer recvAnysource(Tensors& tensors, int) override {
    return done(tensors, getRank() == 0 ? getSize() - 1 : 0);
  }
  Answer barrier(const c10d::BarrierOptions&) override {
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
};

} // namespace

std::unique_ptr<Group> fake_group(const Store& store, int32_t rank, int32_t size, rust::Str name) {
  constexpr auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  const auto backend = c10::make_intrusive<FakeBackend>(rank, size);
  return wrap_backend(
      store,
      rank,
      size,
      name,
      {{c10::DeviceType::CPU, type, backend}, {c10::DeviceType::CUDA, type, backend}});
}

} // namespace brigade
