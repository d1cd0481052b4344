// Collectives of tensors on a GPU or TPU by a backend for the CPU: ranks that share a GPU, which NCCL refuses, TPUs, and
// machines without NCCL. Each operation copies to the host, which waits for what the GPU was given before, and
// copies the result back.
#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <mutex>

namespace brigade {

namespace {

using Tensors = std::vector<at::Tensor>;

// Tensors on the GPU and their copies on the host.
struct Pairs {
  Tensors device;
  Tensors host;

  // `filled`: whether the operation reads them.
  Tensors add(const Tensors& tensors, bool filled) {
    Tensors out;
    for (const auto& tensor : tensors) {
      auto copy = filled ? tensor.to(at::kCPU) : at::empty_like(tensor, tensor.options().device(at::kCPU));
      device.push_back(tensor);
      host.push_back(copy);
      out.push_back(std::move(copy));
    }
    return out;
  }

  void copy_back() {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < device.size(); ++i) {
      device[i].copy_(host[i]);
    }
  }
};

class HostWork : public c10d::Work {
 public:
  HostWork(c10::intrusive_ptr<c10d::Work> inner, Pairs results)
      : inner_(std::move(inner)), results_(std::make_shared<Results>(std::move(results))) {}

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool good = inner_->wait(timeout);
    if (good) {
      results_->take();
    }
    return good;
  }
  void abort() override {
    inner_->abort();
  }
  Tensors result() override {
    return results_->pairs.device;
  }
  // The reducer waits for this one.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner_->getFuture()->then(
        [results = results_](c10::ivalue::Future& inner) {
          inner.value(); // throws what the operation has thrown
          results->take();
          return c10::IValue(results->pairs.device);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  struct Results {
    explicit Results(Pairs pairs) : pairs(std::move(pairs)) {}

    void take() {
      std::lock_guard<std::mutex> lock(mutex);
      if (!taken) {
        taken = true;
        pairs.copy_back();
      }
    }

    std::mutex mutex;
    bool taken = false;
    Pairs pairs;
  };

  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Results> results_;
};

using Answer = c10::intrusive_ptr<c10d::Work>;

class ThroughHost : public c10d::Backend {
 public:
  explicit ThroughHost(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "gloo through host memory";
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_->setTimeout(timeout);
  }
  void abort() override {
    inner_->abort();
  }
  void shutdown() override {
    inner_->shutdown();
  }

  Answer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Pairs results;
    auto host = results.add(tensors, true);
    return answer(inner_->allreduce(host, options), std::move(results));
  }
  Answer allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Pairs results;
    auto host = results.add(tensors, true);
    return answer(inner_->allreduce_coalesced(host, options), std::move(results));
  }
  Answer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Pairs results;
    auto host = results.add(tensors, true);
    return answer(inner_->broadcast(host, options), std::move(results));
  }
  Answer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Pairs results;
    auto host = results.add(tensors, true);
    return answer(inner_->reduce(host, options), std::move(results));
  }
  Answer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Pairs results, read;
    auto out = lists(results, outputs);
    auto in = read.add(inputs, true);
    return answer(inner_->allgather(out, in, options), std::move(results));
  }
  Answer _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Pairs results;
    auto out = results.add({output}, false);
    auto in = input.to(at::kCPU);
    return answer(inner_->_allgather_base(out[0], in, options), std::move(results));
  }
  Answer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Pairs results, read;
    auto out = results.add(outputs, false);
    auto in = read.add(inputs, true);
    return answer(
        inner_->allgather_into_tensor_coalesced(out, in, options), std::move(results));
  }
  Answer gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Pairs results, read;
    auto out = lists(results, outputs);
    auto in = read.add(inputs, true);
    return answer(inner_->gather(out, in, options), std::move(results));
  }
  Answer scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Pairs results;
    auto out = results.add(outputs, false);
    auto in = copies(inputs);
    return answer(inner_->scatter(out, in, options), std::move(results));
  }
  Answer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options)
      override {
    Pairs results;
    auto out = results.add(outputs, false);
    auto in = copies(inputs);
    return answer(inner_->reduce_scatter(out, in, options), std::move(results));
  }
  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Pairs results;
    auto out = results.add({output}, false);
    auto in = input.to(at::kCPU);
    return answer(inner_->_reduce_scatter_base(out[0], in, options), std::move(results));
  }
  Answer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Pairs results, read;
    auto out = results.add(outputs, false);
    auto in = read.add(inputs, true);
    return answer(
        inner_->reduce_scatter_tensor_coalesced(out, in, options), std::move(results));
  }
  Answer alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    Pairs results, read;
    auto out = results.add(outputs, false);
    auto in = read.add(inputs, true);
    return answer(inner_->alltoall(out, in, options), std::move(results));
  }
  Answer alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_rows,
      std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& options) override {
    Pairs results;
    auto out = results.add({output}, false);
    auto in = input.to(at::kCPU);
    return answer(
        inner_->alltoall_base(out[0], in, output_rows, input_rows, options), std::move(results));
  }
  Answer send(Tensors& tensors, int to, int tag) override {
    Pairs read;
    auto host = read.add(tensors, true);
    // Gloo does not keep what it sends.
    return answer(inner_->send(host, to, tag), {}, host);
  }
  Answer recv(Tensors& tensors, int from, int tag) override {
    Pairs results;
    auto host = results.add(tensors, false);
    return answer(inner_->recv(host, from, tag), std::move(results));
  }
  Answer recvAnysource(Tensors& tensors, int tag) override {
    Pairs results;
    auto host = results.add(tensors, false);
    return answer(inner_->recvAnysource(host, tag), std::move(results));
  }
  Answer barrier(const c10d::BarrierOptions& options) override {
    return inner_->barrier(options);
  }

 private:
  static Answer answer(Answer inner, Pairs results) {
    return c10::make_intrusive<HostWork>(std::move(inner), std::move(results));
  }
  static Answer answer(Answer inner, Pairs results, Tensors kept) {
    struct Keeping final : HostWork {
      Keeping(Answer inner, Pairs results, Tensors kept)
          : HostWork(std::move(inner), std::move(results)), kept(std::move(kept)) {}
      const Tensors kept;
    };
    return c10::make_intrusive<Keeping>(std::move(inner), std::move(results), std::move(kept));
  }
  static std::vector<Tensors> lists(Pairs& pairs, const std::vector<Tensors>& of) {
    std::vector<Tensors> out;
    for (const auto& list : of) {
      out.push_back(pairs.add(list, false));
    }
    return out;
  }
  static std::vector<Tensors> copies(const std::vector<Tensors>& of) {
    std::vector<Tensors> out;
    for (const auto& list : of) {
      Pairs read;
      out.push_back(read.add(list, true));
    }
    return out;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> through_host(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return c10::make_intrusive<ThroughHost>(backend);
}

} // namespace brigade
