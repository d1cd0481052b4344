// The Gloo backend. The only file that sees the declarations in cpp/gloo_declarations.
#define USE_C10D_GLOO 1

#include "brigade-torch/src/bridge.rs.h"
#include "combine.h"
#include "shared_memory.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11 || TORCH_VERSION_MINOR > 13
#error "cpp/gloo.cpp uses protected members of c10d's ProcessGroupGloo, and was tried with libtorch 2.11 to 2.13"
#endif

namespace brigade {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long the destructor lets operations in flight go on that nothing has waited for.
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

// An all-reduce of our own, on one of Gloo's threads.
class OwnAllReduce : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  OwnAllReduce(
      const Contexts& contexts,
      int rank,
      int size,
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
        rank_(rank),
        size_(size),
        tensors_(tensors),
        op_(op),
        limit_(limit) {}

  void run() override {
    at::NoGradGuard no_grad;
    // One tensor as it lies in memory, whatever the order of its dimensions; several as one.
    const bool in_place = tensors_.size() == 1 && tensors_[0].is_non_overlapping_and_dense();
    auto flat = in_place ? tensors_[0] : joined();
    try {
      reduce(
          static_cast<char*>(flat.data_ptr()),
          {flat.numel(), flat.scalar_type(), op_.op_},
          limit_);
    } catch (const std::exception& error) {
      // As after a failure of Gloo's own: nothing that this group does later can end well.
      close_connections(contexts_, rank_, size_, error.what());
      throw;
    }
    if (!in_place) {
      int64_t start = 0;
      for (auto& tensor : tensors_) {
        tensor.copy_(flat.narrow(0, start, tensor.numel()).view_as(tensor));
        start += tensor.numel();
      }
    }
  }

  const std::vector<at::Tensor> getInputTensors() override {
    return tensors_;
  }
  const std::vector<at::Tensor> getOutputTensors() override {
    return tensors_;
  }

 protected:
  // Leaves the result in `data`, on all ranks.
  virtual void reduce(char* data, const Request& request, milliseconds limit) = 0;

  const Contexts contexts_;
  const int rank_;
  const int size_;

 private:
  at::Tensor joined() const {
    std::vector<at::Tensor> flat;
    for (const auto& tensor : tensors_) {
      flat.push_back(tensor.reshape({-1}));
    }
    return at::cat(flat);
  }

  std::vector<at::Tensor> tensors_;
  const c10d::ReduceOp op_;
  const milliseconds limit_;
};

// In the memory of the host.
class SharedAllReduce final : public OwnAllReduce {
 public:
  SharedAllReduce(
      const Contexts& contexts,
      const std::shared_ptr<SharedMemory>& memory,
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOp& op,
      uint64_t sequence,
      milliseconds limit)
      : OwnAllReduce(contexts, memory->rank(), memory->size(), tensors, op, sequence, limit),
        memory_(memory),
        ticket_(memory_->take_ticket()) {}

 private:
  void reduce(char* data, const Request& request, milliseconds limit) override {
    memory_->all_reduce(data, request, ticket_, limit);
  }

  const std::shared_ptr<SharedMemory> memory_;
  const uint64_t ticket_;
};

// Over the network, each element combined in the order of the ranks: every rank gets its part of all others,
// combines it, and sends the result to all. As many bytes as in Gloo's ring, whose order depends on where an
// element lies among the others; and a reducer lays gradients out anew after its first backward, so that a
// run that is resumed would have other last digits than one that was not stopped.
class OrderedAllReduce final : public OwnAllReduce {
 public:
  OrderedAllReduce(
      c10d::ProcessGroupGloo& group,
      const Contexts& contexts,
      int rank,
      int size,
      uint64_t number,
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOp& op,
      uint64_t sequence,
      milliseconds limit)
      : OwnAllReduce(contexts, rank, size, tensors, op, sequence, limit),
        group_(group),
        // Above those of messages between two ranks; a number comes again after 2^27 all-reduces.
        tag_(static_cast<int>(0x40000000 | (number << 2 & 0x1FFFFFFC))) {}

 private:
  // Fewer bytes cost their message, not their length: all go to all at once.
  static constexpr size_t kSmall = 16 << 10;
  static constexpr size_t kLine = 64;
  static_assert(sizeof(Request) <= kLine);

  void reduce(char* data, const Request& request, milliseconds limit) override {
    const auto end = steady_clock::now() + std::min(limit, milliseconds(std::chrono::hours(24 * 365)));
    const size_t width = c10::elementSize(request.kind);
    const auto count = static_cast<size_t>(request.numel);
    const bool small = count * width <= kSmall;
    const auto own = static_cast<size_t>(rank_);

    // First what each rank asks for, since data of another length would end Gloo's thread, and few data
    // with it.
    const size_t stride = kLine + kSmall;
    auto letters = at::empty({static_cast<int64_t>(stride) * size_}, at::kByte);
    auto* const in = static_cast<char*>(letters.data_ptr());
    char* const letter = in + stride * own;
    std::memcpy(letter, &request, sizeof(request));
    if (small) {
      std::memcpy(letter + kLine, data, count * width);
    }
    Messages first(*this, tag_);
    for (int peer : others()) {
      first.recv(in + stride * static_cast<size_t>(peer), stride, peer);
    }
    for (int peer : others()) {
      first.send(letter, kLine + (small ? count * width : 0), peer);
    }
    first.wait(end);
    for (int peer : others()) {
      Request other;
      std::memcpy(&other, in + stride * static_cast<size_t>(peer), sizeof(other));
      check_same(rank_, request, peer, other);
    }
    if (small) {
      combine(request, data, in + kLine, stride, size_, count);
    } else {
      reduce_parts(data, request, width, count, end);
    }
  }

  void reduce_parts(
      char* data,
      const Request& request,
      size_t width,
      size_t count,
      steady_clock::time_point end) {
    const auto begin_of = [&](int rank) { return count * static_cast<size_t>(rank) / size_; };
    const auto length_of = [&](int rank) { return begin_of(rank + 1) - begin_of(rank); };
    char* const own = data + begin_of(rank_) * width;
    const size_t bytes = length_of(rank_) * width;
    const size_t stride = (bytes + kLine - 1) / kLine * kLine;
    auto operands = at::empty({static_cast<int64_t>(stride) * size_}, at::kByte);
    auto* const in = static_cast<char*>(operands.data_ptr());
    Messages operands_in(*this, tag_ + 1);
    for (int peer : others()) {
      operands_in.recv(in + stride * static_cast<size_t>(peer), bytes, peer);
    }
    for (int peer : others()) {
      operands_in.send(data + begin_of(peer) * width, length_of(peer) * width, peer);
    }
    std::memcpy(in + stride * static_cast<size_t>(rank_), own, bytes);
    operands_in.wait(end);
    combine(request, own, in, stride, size_, length_of(rank_));
    Messages results(*this, tag_ + 2);
    for (int peer : others()) {
      results.recv(data + begin_of(peer) * width, length_of(peer) * width, peer);
    }
    for (int peer : others()) {
      results.send(own, bytes, peer);
    }
    results.wait(end);
  }

  // From the next rank on, so that not all send to the same one first.
  std::vector<int> others() const {
    std::vector<int> peers;
    for (int step = 1; step < size_; ++step) {
      peers.push_back((rank_ + step) % size_);
    }
    return peers;
  }

  // Messages under way at once. Gloo's threads move them, so that none here is waited for.
  class Messages {
   public:
    Messages(OrderedAllReduce& work, int tag) : work_(work), tag_(tag) {}

    void send(char* data, size_t bytes, int peer) {
      if (bytes > 0) {
        auto list = tensor(data, bytes);
        pending_.push_back(work_.group_.send(list, peer, tag_));
      }
    }
    void recv(char* data, size_t bytes, int peer) {
      if (bytes > 0) {
        auto list = tensor(data, bytes);
        pending_.push_back(work_.group_.recv(list, peer, tag_));
      }
    }
    void wait(steady_clock::time_point end) {
      for (const auto& message : pending_) {
        const auto left = std::chrono::ceil<milliseconds>(end - steady_clock::now());
        message->wait(std::max(left, milliseconds(1)));
      }
    }

   private:
    static std::vector<at::Tensor> tensor(char* data, size_t bytes) {
      return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
    }

    OrderedAllReduce& work_;
    const int tag_;
    std::vector<c10::intrusive_ptr<c10d::Work>> pending_;
  };

  // It owns the thread that this runs on.
  c10d::ProcessGroupGloo& group_;
  const int tag_;
};

// ProcessGroupGloo plus abort(), and a destructor with a bounded wait: c10d's destructor waits for all
// operations in flight, up to their time limit, even when their peers are gone.
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

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    std::lock_guard<std::mutex> lock(starting_);
    if (tensors.size() == 1) {
      if (auto work = own_all_reduce(tensors, options)) {
        return work;
      }
    }
    return ProcessGroupGloo::allreduce(tensors, options);
  }

  // Tensors of one type, in one message.
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& options) override {
    std::lock_guard<std::mutex> lock(starting_);
    if (auto work = own_all_reduce(tensors, options)) {
      return work;
    }
    return ProcessGroupGloo::allreduce_coalesced(tensors, options);
  }

  // All ranks are Brigade's, so that all-reduces can be other than Gloo's. Of two operands the order does not
  // matter.
  void ranks_are_ours() {
    ordered_ = getSize() > 2;
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
  // None where it is Gloo's to do. All ranks agree on type and operation, and so on the way. Under the lock: number and
  // place in the queue go together.
  c10::intrusive_ptr<AsyncWork> own_all_reduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
    const auto& op = options.reduceOp;
    const auto limit =
        options.timeout == c10d::kUnsetTimeout ? options_->timeout : options.timeout;
    const auto ours = [&](const at::Tensor& tensor) {
      return tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
          tensor.scalar_type() == tensors[0].scalar_type() && can_combine(tensor.scalar_type(), op.op_);
    };
    if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), ours)) {
      return {};
    }
    c10::intrusive_ptr<AsyncWork> work;
    if (shared_) {
      work = c10::make_intrusive<SharedAllReduce>(
          contexts_, shared_, tensors, op, ++seq_, limit);
    } else if (ordered_ && depends_on_order(tensors[0].scalar_type(), op.op_)) {
      work = c10::make_intrusive<OrderedAllReduce>(
          *this, contexts_, getRank(), getSize(), ordered_count_++, tensors, op, ++seq_, limit);
    } else {
      return {};
    }
    enqueue(work);
    return work;
  }

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
      shared_->close(std::make_exception_ptr(Aborted(why)));
    }
    close_connections(contexts_, getRank(), getSize(), why);
  }

  std::shared_ptr<SharedMemory> shared_;
  bool ordered_ = false;
  std::mutex starting_;
  uint64_t ordered_count_ = 0;
};

// Has the ranks of one host share memory. A rank that is not ours (Python on c10d's own Gloo) has no key,
// and then all use Gloo alone. The keys tell it for certain: each rank sets its own before it connects,
// and each looks when all have connected.
class Rendezvous {
 public:
  Rendezvous(const Store& store, int rank, int size, bool share)
      : store_(store.live()), rank_(rank), size_(size), share_(share && size > 1) {
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
    gloo.ranks_are_ours();
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

GlooBackend gloo_backend(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  // The abort speaks to pairs of Gloo's TCP transports, of which TLS is one.
  if (const char* transport = std::getenv("GLOO_DEVICE_TRANSPORT")) {
    const std::string name(transport);
    TORCH_CHECK(
        name.empty() || name == "TCP" || name == "TCP_TLS",
        "GLOO_DEVICE_TRANSPORT is ", name, ", but Brigade works with Gloo's TCP and TCP_TLS only; unset it");
  }
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
  Rendezvous rendezvous(store, rank, size, options.share_memory);
  auto backend = c10::make_intrusive<AbortableGloo>(store.live(), rank, size, opts);
  rendezvous.after_connecting(*backend);
  return {backend, backend->shares()};
}

std::unique_ptr<Group> gloo_group(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options) {
  using Type = c10d::ProcessGroup::BackendType;
  const auto [backend, shares_memory] = gloo_backend(store, rank, size, options);
  auto group = wrap_backend(
      store,
      rank,
      size,
      options.name,
      // A c10d group has one backend of each type.
      {{c10::DeviceType::CPU, Type::GLOO, backend},
       {c10::DeviceType::CUDA, Type::CUSTOM, through_host(backend)}});
  group->shares_memory = shares_memory;
  return group;
}

} // namespace brigade
