// The Gloo backend. The only file that sees the declarations in cpp/gloo_declarations.
#define USE_C10D_GLOO 1

#include "brigade-torch/src/bridge.rs.h"
#include "shared_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <chrono>

namespace brigade {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long the destructor lets operations in flight go on that nobody has waited for.
constexpr milliseconds kGrace{5000};

using Contexts = std::vector<std::shared_ptr<gloo::Context>>;

void close_connections(
    const Contexts& contexts, int rank, int size, const std::string& why) noexcept {
  for (const auto& context : contexts) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) {
        continue;
      }
      try {
        // Our devices are TCP devices, whose pairs derive from transport::Pair first.
        auto* pair = context->getPair(peer).get();
        if (pair != nullptr) {
          reinterpret_cast<gloo::transport::tcp::Pair*>(pair)->signalExceptionExternal(why);
        }
      } catch (const std::exception&) {
        // It is closed already.
      }
    }
  }
}

// An all-reduce in the memory of the host, on one of Gloo's threads.
class SharedAllReduce final : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  SharedAllReduce(
      const Contexts& contexts,
      std::shared_ptr<SharedMemory> memory,
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOp& op,
      uint64_t sequence,
      milliseconds limit)
      : AsyncWork(
            contexts.front(),
            {tensors},
            c10d::OpType::ALLREDUCE,
            sequence,
            limit,
            "gloo:all_reduce",
            tensors),
        contexts_(contexts),
        memory_(std::move(memory)),
        turn_(memory_->take_turn()),
        tensors_(tensors),
        op_(op),
        limit_(limit) {}

  // Whether all ranks, which agree on type and operation, may go this way.
  static bool serves(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    return tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
        SharedMemory::serves(tensor.scalar_type(), op.op_);
  }

  void run() override {
    at::NoGradGuard no_grad;
    auto& tensor = tensors_[0];
    // As it lies in memory, whatever the order of its dimensions.
    const bool dense = tensor.is_non_overlapping_and_dense();
    auto flat = dense ? tensor : tensor.contiguous();
    try {
      memory_->all_reduce(
          flat.data_ptr(), {flat.numel(), flat.scalar_type(), op_.op_}, turn_, limit_);
    } catch (const std::exception& error) {
      // As after a failure of Gloo's own: nothing that this group does later can end well.
      close_connections(contexts_, memory_->rank(), memory_->size(), error.what());
      throw;
    }
    if (!dense) {
      tensor.copy_(flat);
    }
  }

  const std::vector<at::Tensor> getInputTensors() override {
    return tensors_;
  }
  const std::vector<at::Tensor> getOutputTensors() override {
    return tensors_;
  }

 private:
  const Contexts contexts_;
  const std::shared_ptr<SharedMemory> memory_;
  const uint64_t turn_;
  std::vector<at::Tensor> tensors_;
  const c10d::ReduceOp op_;
  const milliseconds limit_;
};

// Gloo with an abort, which c10d's own class has not, and with a destructor that ends: c10d's waits for
// all operations in flight, up to their time limit, even when their peers are gone.
class AbortableGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  ~AbortableGloo() override {
    const auto end = steady_clock::now() + kGrace;
    try {
      for (const auto& work : in_flight()) {
        const auto left =
            std::chrono::duration_cast<milliseconds>(end - steady_clock::now());
        work->wait(std::max(left, milliseconds(1)));
      }
    } catch (const std::exception&) {
      // It failed, or time is up: no other will end well.
      close("the group was dropped");
    }
  }

  // Every operation in flight, and every later one, fails at once on this rank and on its peers.
  void abort() override {
    close("the group was aborted");
  }
  void shutdown() override {
    abort();
  }

  // Takes the way through the host's memory where it has one.
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    if (!shared_ || tensors.size() != 1 || !SharedAllReduce::serves(tensors[0], options.reduceOp)) {
      return ProcessGroupGloo::allreduce(tensors, options);
    }
    auto work = c10::make_intrusive<SharedAllReduce>(
        contexts_,
        shared_,
        tensors,
        options.reduceOp,
        ++seq_,
        options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout);
    enqueue(work);
    return work;
  }

  // Every rank calls it, with the memory that it has opened, if it has: they use it when all have.
  void share(std::shared_ptr<SharedMemory> memory) {
    std::vector<at::Tensor> all{at::scalar_tensor(memory ? 1 : 0, at::kLong)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MIN;
    ProcessGroupGloo::allreduce(all, options)->wait();
    if (all[0].item<int64_t>() == 1) {
      shared_ = std::move(memory);
    }
  }

  bool shares() const {
    return shared_ != nullptr;
  }

 private:
  std::vector<c10::intrusive_ptr<AsyncWork>> in_flight() {
    std::lock_guard<std::mutex> lock(workMutex_);
    std::vector<c10::intrusive_ptr<AsyncWork>> works(workQueue_.begin(), workQueue_.end());
    for (const auto& work : workInProgress_) {
      if (work) {
        works.push_back(work);
      }
    }
    return works;
  }

  // A closed connection alone wakes only the peer: what waits here must be told.
  void close(const std::string& why) noexcept {
    if (shared_) {
      shared_->close(why);
    }
    close_connections(contexts_, getRank(), getSize(), why);
  }

  std::shared_ptr<SharedMemory> shared_;
};

// Has the ranks of one host share memory. A rank that is not ours (Python on c10d's own Gloo) has no key,
// and then all use Gloo alone. The keys tell it for certain: each rank sets its own before it connects,
// and each looks when all have connected.
class Meeting {
 public:
  Meeting(const Store& store, int rank, int size, bool share)
      : store_(store.store), rank_(rank), size_(size), share_(share && size > 1) {
    if (rank == 0 && share_) {
      memory_ = SharedMemory::make(size);
    }
    if (size > 1) {
      const auto address = memory_ ? memory_->address() : "";
      store_->set(key(rank), std::vector<uint8_t>(address.begin(), address.end()));
    }
  }

  void after_connecting(AbortableGloo& gloo) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; ++rank) {
      keys.push_back(key(rank));
    }
    if (size_ < 2 || !store_->check(keys)) {
      return;
    }
    const auto address = store_->get(key(0));
    if (address.empty()) {
      return;
    }
    if (rank_ != 0 && share_) {
      memory_ = SharedMemory::open(std::string(address.begin(), address.end()), rank_, size_);
    }
    gloo.share(std::move(memory_));
  }

 private:
  static std::string key(int rank) {
    return "shared_memory/" + std::to_string(rank);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const bool share_;
  std::shared_ptr<SharedMemory> memory_;
};

} // namespace

std::unique_ptr<Group> gloo_group(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  auto opts = Gloo::Options::create(std::chrono::milliseconds(options.timeout_ms));
  if (!options.address.empty()) {
    opts->devices.push_back(Gloo::createDeviceForHostname(std::string(options.address)));
  }
  for (const auto& interface : options.interfaces) {
    opts->devices.push_back(Gloo::createDeviceForInterface(std::string(interface)));
  }
  if (opts->devices.empty()) {
    opts->devices.push_back(Gloo::createDefaultDevice());
  }
  opts->threads = static_cast<int>(opts->devices.size()) * 2;
  opts->group_name = std::string(options.name);
  Meeting meeting(store, rank, size, options.share_memory);
  auto backend = c10::make_intrusive<AbortableGloo>(store.store, rank, size, opts);
  meeting.after_connecting(*backend);
  auto group = wrap_backend(
      store,
      rank,
      size,
      options.name,
      c10d::ProcessGroup::BackendType::GLOO,
      backend,
      {c10::DeviceType::CPU});
  group->shares_memory = backend->shares();
  return group;
}

} // namespace brigade
