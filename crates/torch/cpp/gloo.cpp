// The Gloo backend. The only file that sees the declarations in cpp/gloo_declarations.
#define USE_C10D_GLOO 1

#include "brigade-torch/src/bridge.rs.h"
#include "ordered.h"
#include "packed_work.h"
#include "several_works.h"
#include "shared_memory.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <c10/util/hash.h>
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

using Tensors = std::vector<at::Tensor>;
using Answer = c10::intrusive_ptr<c10d::Work>;

// A collective of our own, on one of Gloo's threads.
class OwnWork : public c10d::ProcessGroupGloo::AsyncWork {
 public:
  OwnWork(
      const Contexts& contexts,
      std::unique_ptr<Exchange> exchange,
      c10d::OpType type,
      const char* title,
      uint64_t sequence,
      milliseconds limit,
      const Tensors& inputs,
      const std::vector<Tensors>& outputs)
      : AsyncWork(contexts.front(), outputs, type, sequence, limit, title, inputs),
        contexts_(contexts),
        exchange_(std::move(exchange)),
        limit_(limit),
        inputs_(inputs) {
    for (const auto& list : outputs) {
      outputs_.insert(outputs_.end(), list.begin(), list.end());
    }
  }

  void run() final {
    at::NoGradGuard no_grad;
    try {
      run(*exchange_, limit_);
    } catch (const std::exception& error) {
      exchange_->fail(std::current_exception());
      // As after a failure of Gloo's own: nothing that this group does later can end well.
      close_connections(contexts_, exchange_->rank(), exchange_->size(), error.what());
      throw;
    }
  }

  const Tensors getInputTensors() override {
    return inputs_;
  }
  const Tensors getOutputTensors() override {
    return outputs_;
  }

 protected:
  virtual void run(Exchange& exchange, milliseconds limit) = 0;

 private:
  const Contexts contexts_;
  const std::unique_ptr<Exchange> exchange_;
  const milliseconds limit_;
  const Tensors inputs_;
  Tensors outputs_;
};

class OwnAllReduce final : public OwnWork {
 public:
  OwnAllReduce(
      const Contexts& contexts,
      std::unique_ptr<Exchange> exchange,
      uint64_t sequence,
      milliseconds limit,
      const Tensors& tensors,
      const c10d::ReduceOp& op)
      : OwnWork(
            contexts,
            std::move(exchange),
            c10d::OpType::ALLREDUCE,
            "gloo:all_reduce",
            sequence,
            limit,
            tensors,
            {tensors}),
        tensors_(tensors),
        op_(op) {}

 private:
  void run(Exchange& exchange, milliseconds limit) override {
    // One tensor as it lies in memory, whatever the order of its dimensions; several as one.
    const bool in_place = tensors_.size() == 1 && tensors_[0].is_non_overlapping_and_dense();
    auto flat = in_place ? tensors_[0] : joined();
    const Request request{
        Operation::AllReduce, flat.scalar_type(), op_.op_, 1, flat.numel(), 0};
    exchange.all_reduce(static_cast<char*>(flat.data_ptr()), request, limit);
    if (!in_place) {
      int64_t start = 0;
      for (auto& tensor : tensors_) {
        tensor.copy_(flat.narrow(0, start, tensor.numel()).view_as(tensor));
        start += tensor.numel();
      }
    }
  }

  at::Tensor joined() const {
    Tensors flat;
    for (const auto& tensor : tensors_) {
      flat.push_back(tensor.reshape({-1}));
    }
    return at::cat(flat);
  }

  Tensors tensors_;
  const c10d::ReduceOp op_;
};

// An all-gather or a reduce-scatter of a list. `shards[i]` is this rank's part of `wholes[i]`, which is one tensor of
// equal parts or one tensor for each rank.
struct Lists {
  Tensors shards;
  std::vector<Tensors> wholes;

  Tensors all_wholes() const {
    Tensors all;
    for (const auto& whole : wholes) {
      all.insert(all.end(), whole.begin(), whole.end());
    }
    return all;
  }

  // Throws where this rank can see that a part does not fit.
  Request request(Operation operation, c10d::ReduceOp::RedOpType op, int rank, int size) const {
    Request out{operation, shards[0].scalar_type(), op, static_cast<uint32_t>(shards.size()), 0, 0};
    for (size_t i = 0; i < shards.size(); ++i) {
      const auto kind = shards[i].scalar_type();
      const auto& whole = wholes.at(i);
      const bool flat = whole.size() == 1;
      TORCH_CHECK(
          flat || whole.size() == static_cast<size_t>(size),
          name(operation), " of ", size, " ranks has one tensor for each, found ", whole.size());
      const auto& own = whole[flat ? 0 : static_cast<size_t>(rank)];
      TORCH_CHECK(
          own.numel() == shards[i].numel() * (flat ? size : 1),
          name(operation), " among ", size, " ranks: a tensor of ", own.numel(),
          " numbers does not fit a part of ", shards[i].numel());
      for (const auto& tensor : whole) {
        TORCH_CHECK(
            tensor.scalar_type() == kind,
            name(operation), " has one type, found ", tensor.scalar_type(), " and ", kind);
        out.numel += tensor.numel();
        out.layout = c10::hash_combine(out.layout, static_cast<size_t>(tensor.numel()));
      }
      out.layout = c10::hash_combine(out.layout, static_cast<size_t>(kind));
      if (kind != out.kind) {
        out.kind = c10::ScalarType::Undefined;
      }
    }
    return out;
  }
};

struct Span {
  char* data;
  size_t bytes;

  bool overlaps(const Span& other) const {
    return bytes > 0 && other.bytes > 0 && data < other.data + other.bytes && other.data < data + bytes;
  }
};

Span span_of(const at::Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()), tensor.nbytes()};
}

class OwnListWork final : public OwnWork {
 public:
  OwnListWork(
      const Contexts& contexts,
      std::unique_ptr<Exchange> exchange,
      uint64_t sequence,
      milliseconds limit,
      const Request& request,
      const Lists& lists)
      : OwnWork(
            contexts,
            std::move(exchange),
            gathers(request) ? c10d::OpType::ALLGATHER : c10d::OpType::REDUCE_SCATTER,
            gathers(request) ? "gloo:all_gather" : "gloo:reduce_scatter",
            sequence,
            limit,
            gathers(request) ? lists.shards : lists.all_wholes(),
            {gathers(request) ? lists.all_wholes() : lists.shards}),
        request_(request),
        lists_(lists) {}

 private:
  static bool gathers(const Request& request) {
    return request.operation == Operation::AllGather;
  }

  void run(Exchange& exchange, milliseconds limit) override {
    const bool gathers = OwnListWork::gathers(request_);
    const auto size = static_cast<size_t>(exchange.size());
    const auto own_rank = static_cast<size_t>(exchange.rank());
    // Memory that stands in for tensors whose own does not do.
    Tensors read;
    std::vector<std::pair<at::Tensor, at::Tensor>> written;
    const auto source = [&](const at::Tensor& tensor) {
      read.push_back(tensor.resolve_conj().resolve_neg().contiguous());
      return span_of(read.back());
    };
    const auto stand_in = [&](const at::Tensor& tensor) {
      written.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
      return span_of(written.back().second);
    };
    const auto target = [&](const at::Tensor& tensor) {
      return tensor.is_contiguous() ? span_of(tensor) : stand_in(tensor);
    };

    Pieces own;
    std::vector<Pieces> parts(size);
    for (size_t i = 0; i < lists_.shards.size(); ++i) {
      const auto& tensor = lists_.shards[i];
      auto shard = gathers ? source(tensor) : target(tensor);
      std::vector<Span> spans;
      for (const auto& whole : lists_.wholes[i]) {
        spans.push_back(gathers ? target(whole) : source(whole));
      }
      if (spans.size() == 1) {
        spans.assign(size, {spans[0].data, shard.bytes});
        for (size_t rank = 0; rank < size; ++rank) {
          spans[rank].data += rank * shard.bytes;
        }
      }
      for (size_t rank = 0; rank < size; ++rank) {
        const bool in_place = rank == own_rank && spans[rank].data == shard.data;
        if (spans[rank].overlaps(shard) && !in_place) {
          // Each would be read after it was written in part.
          shard = gathers ? source(tensor.clone()) : stand_in(tensor);
        }
      }
      const auto kind = tensor.scalar_type();
      own.add(shard.data, shard.bytes, kind);
      for (size_t rank = 0; rank < size; ++rank) {
        if (gathers && spans[rank].data == shard.data) {
          parts[rank].skip(spans[rank].bytes);
        } else {
          parts[rank].add(spans[rank].data, spans[rank].bytes, kind);
        }
      }
    }
    if (gathers) {
      exchange.all_gather(own, parts, request_, limit);
    } else {
      exchange.reduce_scatter(parts, own, request_, limit);
    }
    for (auto& [tensor, memory] : written) {
      tensor.copy_(memory);
    }
  }

  const Request request_;
  const Lists lists_;
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

  Answer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (tensors.size() == 1) {
      if (auto work = own_all_reduce(tensors, options)) {
        return work;
      }
    }
    std::lock_guard<std::mutex> lock(starting_);
    return ProcessGroupGloo::allreduce(tensors, options);
  }

  // Tensors of one type, in one message.
  Answer allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (auto work = own_all_reduce(tensors, options)) {
      return work;
    }
    std::lock_guard<std::mutex> lock(starting_);
    return ProcessGroupGloo::allreduce_coalesced(tensors, options);
  }

  Answer _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (auto work = own_all_gather({{input}, {{output}}}, options)) {
      return work;
    }
    return ProcessGroupGloo::_allgather_base(output, input, options);
  }

  // Parts may be of several lengths where it is ours to do.
  Answer allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    if (inputs.size() == 1 && outputs.size() == 1) {
      if (auto work = own_all_gather({inputs, outputs}, options)) {
        return work;
      }
    }
    return ProcessGroupGloo::allgather(outputs, inputs, options);
  }

  Answer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (auto work = own_all_gather(flat(inputs, outputs), options)) {
      return work;
    }
    if (is_one_message(inputs)) {
      const at::NoGradGuard no_grad;
      auto part = joined(inputs, 1).view({-1});
      auto whole = at::empty({part.numel() * getSize()}, part.options());
      auto work = ProcessGroupGloo::_allgather_base(whole, part, options);
      return c10::make_intrusive<PackedWork>(
          work, [=, size = getSize()] { take_apart(outputs, whole.view({size, -1})); });
    }
    // Gloo's own form has one type.
    return one_by_one(inputs.size(), [&](size_t i) {
      return ProcessGroupGloo::_allgather_base(outputs[i], inputs[i], options);
    });
  }

  Answer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (auto work = own_reduce_scatter({{output}, {{input}}}, options)) {
      return work;
    }
    return ProcessGroupGloo::_reduce_scatter_base(output, input, options);
  }

  // Parts may be of several lengths.
  Answer reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    if (inputs.size() == 1 && outputs.size() == 1) {
      if (auto work = own_reduce_scatter({outputs, inputs}, options)) {
        return work;
      }
    }
    return ProcessGroupGloo::reduce_scatter(outputs, inputs, options);
  }

  Answer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    if (auto work = own_reduce_scatter(flat(outputs, inputs), options)) {
      return work;
    }
    if (is_one_message(inputs)) {
      const at::NoGradGuard no_grad;
      Tensors wholes{joined(inputs, getSize()).view({-1})};
      Tensors parts{at::empty({wholes[0].numel() / getSize()}, wholes[0].options())};
      auto work = ProcessGroupGloo::reduce_scatter_tensor_coalesced(parts, wholes, options);
      return c10::make_intrusive<PackedWork>(
          work, [outputs, part = parts[0]] { take_apart(outputs, part.view({1, -1})); });
    }
    // Gloo's form of one tensor calls this one.
    return one_by_one(inputs.size(), [&](size_t i) {
      Tensors output{outputs[i]}, input{inputs[i]};
      return ProcessGroupGloo::reduce_scatter_tensor_coalesced(output, input, options);
    });
  }

  // All ranks are Brigade's, so that collectives can be other than Gloo's.
  void ranks_are_ours() {
    ours_ = true;
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
  using Own = c10::intrusive_ptr<AsyncWork>;

  // None where it is Gloo's to do. All ranks agree on type and operation, and so on the way.
  Own own_all_reduce(const Tensors& tensors, const c10d::AllreduceOptions& options) {
    const auto& op = options.reduceOp;
    const auto ours = [&](const at::Tensor& tensor) {
      return is_plain(tensor) && tensor.scalar_type() == tensors[0].scalar_type() &&
          can_combine(tensor.scalar_type(), op.op_);
    };
    if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), ours)) {
      return {};
    }
    // Of two operands the order does not matter.
    const bool ordered =
        ours_ && getSize() > 2 && depends_on_order(tensors[0].scalar_type(), op.op_);
    if (!shared_ && !ordered) {
      return {};
    }
    return start_own<OwnAllReduce>(options.timeout, tensors, op);
  }

  Own own_all_gather(const Lists& lists, const c10d::AllgatherOptions& options) {
    return own_lists(
        Operation::AllGather, c10d::ReduceOp::UNUSED, lists, options.timeout, [](const at::Tensor&) {
          return true;
        });
  }

  Own own_reduce_scatter(const Lists& lists, const c10d::ReduceScatterOptions& options) {
    const auto op = options.reduceOp.op_;
    return own_lists(
        Operation::ReduceScatter, op, lists, options.timeout, [&](const at::Tensor& tensor) {
          return can_combine(tensor.scalar_type(), op);
        });
  }

  template <typename Fits>
  Own own_lists(
      Operation operation,
      c10d::ReduceOp::RedOpType op,
      const Lists& lists,
      milliseconds limit,
      Fits fits) {
    const auto ours = [&](const at::Tensor& tensor) { return is_plain(tensor) && fits(tensor); };
    const auto wholes = lists.all_wholes();
    if (!(shared_ || ours_) || lists.shards.empty() ||
        !std::all_of(lists.shards.begin(), lists.shards.end(), ours) ||
        !std::all_of(wholes.begin(), wholes.end(), ours)) {
      return {};
    }
    const auto request = lists.request(operation, op, getRank(), getSize());
    return start_own<OwnListWork>(limit, request, lists);
  }

  // Under the lock: number and place in the queue go together.
  template <typename OwnKind, typename... Args>
  Own start_own(milliseconds limit, const Args&... args) {
    std::lock_guard<std::mutex> lock(starting_);
    std::unique_ptr<Exchange> exchange;
    if (shared_) {
      exchange = std::make_unique<SharedExchange>(shared_);
    } else {
      exchange = std::make_unique<OrderedExchange>(*this, ordered_count_++);
    }
    const auto work = c10::make_intrusive<OwnKind>(
        contexts_,
        std::move(exchange),
        ++seq_,
        limit == c10d::kUnsetTimeout ? options_->timeout : limit,
        args...);
    enqueue(work);
    return work;
  }

  static bool is_plain(const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.device().is_cpu();
  }

  static Lists flat(const Tensors& shards, const Tensors& wholes) {
    TORCH_CHECK(
        shards.size() == wholes.size(),
        "a list has ", shards.size(), " parts of ", wholes.size(), " tensors");
    Lists out{shards, {}};
    for (const auto& whole : wholes) {
      out.wholes.push_back({whole});
    }
    return out;
  }

  // Ranks that are not ours send a list as PyTorch's FSDP2 does: as one tensor, which has each rank's part of all tensors
  // one after the other.
  static bool is_one_message(const Tensors& tensors) {
    const auto fits = [&](const at::Tensor& tensor) {
      return is_plain(tensor) && tensor.scalar_type() == tensors[0].scalar_type();
    };
    return tensors.size() > 1 && std::all_of(tensors.begin(), tensors.end(), fits);
  }

  // In rows, of which there is one for each of `rows` equal parts of the tensors.
  static at::Tensor joined(const Tensors& tensors, int64_t rows) {
    Tensors parts;
    for (const auto& tensor : tensors) {
      parts.push_back(tensor.reshape({rows, tensor.numel() / rows}));
    }
    return at::cat(parts, 1);
  }

  static void take_apart(const Tensors& tensors, const at::Tensor& rows) {
    int64_t start = 0;
    for (const auto& tensor : tensors) {
      const auto width = tensor.numel() / rows.size(0);
      tensor.copy_(rows.narrow(1, start, width).reshape(tensor.sizes()));
      start += width;
    }
  }

  template <typename Start>
  static Answer one_by_one(size_t count, Start start) {
    std::vector<Answer> works;
    for (size_t i = 0; i < count; ++i) {
      works.push_back(start(i));
    }
    return c10::make_intrusive<SeveralWorks>(std::move(works));
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
  bool ours_ = false;
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
  const auto host = through_host(backend);
  auto group = wrap_backend(
      store,
      rank,
      size,
      options.name,
      // A c10d group has one backend of each type.
      {{c10::DeviceType::CPU, Type::GLOO, backend},
       {c10::DeviceType::CUDA, Type::CUSTOM, host},
       {c10::DeviceType::PrivateUse1, Type::CUSTOM, host}});
  group->shares_memory = shares_memory;
  return group;
}

} // namespace brigade
