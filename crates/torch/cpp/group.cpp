#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"
#include "several_works.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>

namespace brigade {

namespace {

using std::chrono::milliseconds;

// `on` is a tensor of the operation.
std::unique_ptr<Work> handle(
    const Group& group, const at::Tensor& on, c10::intrusive_ptr<c10d::Work> work) {
  auto out = std::make_unique<Work>();
  out->work = std::move(work);
  out->on_stream = group.has_nccl && on.defined() && !on.is_cpu();
  return out;
}

std::unique_ptr<Work> message(
    const Group& group, const at::Tensor& on, c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard<std::mutex> lock(group.mutex);
  auto& messages = group.messages;
  messages.erase(
      std::remove_if(
          messages.begin(), messages.end(), [](const auto& old) { return old.expired(); }),
      messages.end());
  messages.emplace_back(work);
  return handle(group, on, std::move(work));
}

c10d::ReduceOp reduce_op(Reduction op) {
  // The values of the shared enum are those of c10d's.
  return c10d::ReduceOp(static_cast<c10d::ReduceOp::RedOpType>(op));
}

using Answer = c10::intrusive_ptr<c10d::Work>;

// Whether NCCL moves these, which are on one device.
bool go_by_nccl(const Group& group, const std::vector<at::Tensor>& tensors) {
  return group.has_nccl && !tensors.empty() && !tensors[0].is_cpu();
}

// Starts `count` operations on tensors of one device: as one where NCCL does it, which launches one kernel for all;
// several in flight elsewhere.
template <typename Start>
std::unique_ptr<Work> start_together(
    const Group& group, const std::vector<at::Tensor>& tensors, size_t count, Start start) {
  const auto on = tensors.empty() ? at::Tensor() : tensors[0];
  if (!go_by_nccl(group, tensors)) {
    std::vector<Answer> works;
    for (size_t i = 0; i < count; ++i) {
      works.push_back(start(i));
    }
    return handle(group, on, c10::make_intrusive<SeveralWorks>(std::move(works)));
  }
  const auto device = on.device().type();
  group.live()->startCoalescing(device);
  try {
    for (size_t i = 0; i < count; ++i) {
      start(i);
    }
  } catch (...) {
    // Left open, it would hold back all that this thread gives to NCCL later.
    try {
      group.live()->endCoalescing(device);
    } catch (const std::exception&) {
      // The first error says why.
    }
    throw;
  }
  return handle(group, on, group.live()->endCoalescing(device));
}

// Gives a list of tensors of one device to the backend itself: c10d's own way to it loses the time limit of an
// all-gather.
template <typename Start>
std::unique_ptr<Work> start_list(
    const Group& group, const std::vector<at::Tensor>& tensors, Start start) {
  if (tensors.empty()) {
    return handle(group, at::Tensor(), c10::make_intrusive<SeveralWorks>(std::vector<Answer>()));
  }
  const auto backend = group.live()->getBackend(tensors[0].device().type());
  return handle(group, tensors[0], start(*backend));
}

} // namespace

Group::~Group() {
  if (is_fork()) {
    group.release();
    for (auto& message : messages) {
      message.release();
    }
  }
}

const c10::intrusive_ptr<c10d::ProcessGroup>& Group::live() const {
  check_not_fork("a process group");
  return group;
}

std::unique_ptr<Group> wrap_backend(
    const Store& store,
    int32_t rank,
    int32_t size,
    rust::Str name,
    std::initializer_list<ServedDevice> served) {
  watch_forks();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store.live(), rank, size);
  for (const auto& [device, type, backend] : served) {
    group->setBackend(device, type, backend);
  }
  group->setDefaultBackend(served.begin()->type);
  group->setGroupName(std::string(name));
  return std::make_unique<Group>(std::move(group));
}

#ifndef BRIGADE_CUDA
std::unique_ptr<Group> nccl_group(
    const Store&, const Store&, int32_t, int32_t, const GlooOptions&) {
  C10_THROW_ERROR(
      NotImplementedError, "this program was built without the feature cuda, which brings NCCL");
}
#endif

void group_set_timeout(const Group& group, int64_t timeout_ms) {
  group.live()->setTimeout(milliseconds(timeout_ms));
}

void group_abort(const Group& group) {
  if (is_fork()) {
    return;
  }
  group.live()->abort();
  std::lock_guard<std::mutex> lock(group.mutex);
  for (const auto& message : group.messages) {
    if (auto work = message.lock()) {
      work->abort();
    }
  }
}

void group_finish(const Group& group) {
  if (group.finish && !is_fork()) {
    group.finish();
  }
}

void group_backward(const Group& group, const Tensor& loss, bool retain_graph, bool create_graph) {
  group.live();
  backward(loss, retain_graph, create_graph);
}

bool group_shares_memory(const Group& group) {
  return group.shares_memory;
}

std::unique_ptr<Work> all_reduce(
    const Group& group, const Tensor& tensor, Reduction op, int64_t timeout_ms) {
  c10d::AllreduceOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.timeout = milliseconds(timeout_ms);
  std::vector<at::Tensor> list{tensor};
  return handle(group, tensor, group.live()->allreduce(list, opts));
}

std::unique_ptr<Work> all_reduce_coalesced(
    const Group& group, rust::Slice<const TensorRef> tensors, Reduction op, int64_t timeout_ms) {
  c10d::AllreduceCoalescedOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.timeout = milliseconds(timeout_ms);
  auto all = copy_handles(tensors);
  const bool one_by_one = !group.reduces_lists && !all.empty() && !all[0].is_cpu();
  if (one_by_one || go_by_nccl(group, all)) {
    return start_together(group, all, all.size(), [&](size_t i) {
      std::vector<at::Tensor> list{all[i]};
      return group.live()->allreduce(list, opts);
    });
  }
  // Other backends send one message for each type.
  std::vector<std::vector<at::Tensor>> lists;
  for (auto& tensor : all) {
    const auto list = std::find_if(lists.begin(), lists.end(), [&](const auto& it) {
      return it[0].scalar_type() == tensor.scalar_type();
    });
    if (list == lists.end()) {
      lists.push_back({tensor});
    } else {
      list->push_back(tensor);
    }
  }
  return start_together(group, all, lists.size(), [&](size_t i) {
    return group.live()->allreduce_coalesced(lists[i], opts);
  });
}

std::unique_ptr<Work> broadcast(
    const Group& group, const Tensor& tensor, int64_t root, int64_t timeout_ms) {
  c10d::BroadcastOptions opts;
  opts.rootRank = root;
  opts.timeout = milliseconds(timeout_ms);
  std::vector<at::Tensor> list{tensor};
  return handle(group, tensor, group.live()->broadcast(list, opts));
}

std::unique_ptr<Work> reduce(
    const Group& group, const Tensor& tensor, int64_t root, Reduction op, int64_t timeout_ms) {
  c10d::ReduceOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.rootRank = root;
  opts.timeout = milliseconds(timeout_ms);
  std::vector<at::Tensor> list{tensor};
  return handle(group, tensor, group.live()->reduce(list, opts));
}

std::unique_ptr<Work> all_gather(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    const Tensor& input,
    int64_t timeout_ms) {
  c10d::AllgatherOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  std::vector<std::vector<at::Tensor>> out{copy_handles(outputs)};
  std::vector<at::Tensor> in{input};
  return handle(group, input, group.live()->allgather(out, in, opts));
}

std::unique_ptr<Work> all_gather_flat(
    const Group& group, const Tensor& output, const Tensor& input, int64_t timeout_ms) {
  c10d::AllgatherOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  at::Tensor out = output;
  at::Tensor in = input;
  return handle(group, input, group.live()->_allgather_base(out, in, opts));
}

std::unique_ptr<Work> all_gather_flat_coalesced(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    int64_t timeout_ms) {
  c10d::AllgatherOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  auto out = copy_handles(outputs);
  auto in = copy_handles(inputs);
  if (go_by_nccl(group, in)) {
    return start_together(group, in, in.size(), [&](size_t i) {
      return group.live()->_allgather_base(out[i], in[i], opts);
    });
  }
  return start_list(group, in, [&](c10d::Backend& backend) {
    return backend.allgather_into_tensor_coalesced(out, in, opts);
  });
}

std::unique_ptr<Work> gather(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    const Tensor& input,
    int64_t root,
    int64_t timeout_ms) {
  c10d::GatherOptions opts;
  opts.rootRank = root;
  opts.timeout = milliseconds(timeout_ms);
  std::vector<std::vector<at::Tensor>> out;
  if (group.live()->getRank() == root) {
    out.push_back(copy_handles(outputs));
  }
  std::vector<at::Tensor> in{input};
  return handle(group, input, group.live()->gather(out, in, opts));
}

std::unique_ptr<Work> scatter(
    const Group& group,
    const Tensor& output,
    rust::Slice<const TensorRef> inputs,
    int64_t root,
    int64_t timeout_ms) {
  c10d::ScatterOptions opts;
  opts.rootRank = root;
  opts.timeout = milliseconds(timeout_ms);
  std::vector<at::Tensor> out{output};
  std::vector<std::vector<at::Tensor>> in;
  if (group.live()->getRank() == root) {
    in.push_back(copy_handles(inputs));
  }
  return handle(group, output, group.live()->scatter(out, in, opts));
}

std::unique_ptr<Work> reduce_scatter(
    const Group& group,
    const Tensor& output,
    rust::Slice<const TensorRef> inputs,
    Reduction op,
    int64_t timeout_ms) {
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.timeout = milliseconds(timeout_ms);
  std::vector<at::Tensor> out{output};
  std::vector<std::vector<at::Tensor>> in{copy_handles(inputs)};
  return handle(group, output, group.live()->reduce_scatter(out, in, opts));
}

std::unique_ptr<Work> reduce_scatter_flat(
    const Group& group,
    const Tensor& output,
    const Tensor& input,
    Reduction op,
    int64_t timeout_ms) {
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.timeout = milliseconds(timeout_ms);
  at::Tensor out = output;
  at::Tensor in = input;
  return handle(group, input, group.live()->_reduce_scatter_base(out, in, opts));
}

std::unique_ptr<Work> reduce_scatter_flat_coalesced(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    Reduction op,
    int64_t timeout_ms) {
  c10d::ReduceScatterOptions opts;
  opts.reduceOp = reduce_op(op);
  opts.timeout = milliseconds(timeout_ms);
  auto out = copy_handles(outputs);
  auto in = copy_handles(inputs);
  if (go_by_nccl(group, in)) {
    return start_together(group, in, in.size(), [&](size_t i) {
      return group.live()->_reduce_scatter_base(out[i], in[i], opts);
    });
  }
  return start_list(group, in, [&](c10d::Backend& backend) {
    return backend.reduce_scatter_tensor_coalesced(out, in, opts);
  });
}

std::unique_ptr<Work> all_to_all(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    int64_t timeout_ms) {
  c10d::AllToAllOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  auto out = copy_handles(outputs);
  auto in = copy_handles(inputs);
  return handle(group, in.empty() ? at::Tensor() : in[0], group.live()->alltoall(out, in, opts));
}

std::unique_ptr<Work> all_to_all_flat(
    const Group& group,
    const Tensor& output,
    const Tensor& input,
    rust::Slice<const int64_t> output_rows,
    rust::Slice<const int64_t> input_rows,
    int64_t timeout_ms) {
  c10d::AllToAllOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  at::Tensor out = output;
  at::Tensor in = input;
  std::vector<int64_t> out_rows(output_rows.begin(), output_rows.end());
  std::vector<int64_t> in_rows(input_rows.begin(), input_rows.end());
  return handle(group, input, group.live()->alltoall_base(out, in, out_rows, in_rows, opts));
}

std::unique_ptr<Work> send(const Group& group, const Tensor& tensor, int32_t to, int32_t tag) {
  std::vector<at::Tensor> list{tensor};
  return message(group, tensor, group.live()->send(list, to, tag));
}

std::unique_ptr<Work> recv(const Group& group, const Tensor& tensor, int32_t from, int32_t tag) {
  std::vector<at::Tensor> list{tensor};
  return message(group, tensor, group.live()->recv(list, from, tag));
}

std::unique_ptr<Work> recv_any(const Group& group, const Tensor& tensor, int32_t tag) {
  std::vector<at::Tensor> list{tensor};
  return message(group, tensor, group.live()->recvAnysource(list, tag));
}

std::unique_ptr<Work> barrier(const Group& group, int64_t device, int64_t timeout_ms) {
  c10d::BarrierOptions opts;
  if (device >= 0) {
    opts.device_ids = {device};
  } else {
    // Over Gloo, also where NCCL serves the GPUs of the group.
    opts.device = at::Device(at::kCPU);
  }
  opts.timeout = milliseconds(timeout_ms);
  return handle(group, at::Tensor(), group.live()->barrier(opts));
}

void monitored_barrier(const Group& group, int64_t timeout_ms, bool wait_all) {
  c10d::BarrierOptions opts;
  opts.timeout = milliseconds(timeout_ms);
  group.live()->monitoredBarrier(opts, wait_all);
}

void broadcast_coalesced(
    const Group& group, rust::Slice<const TensorRef> tensors, size_t bytes, int32_t root) {
  at::NoGradGuard no_grad;
  c10d::broadcast_coalesced(group.live(), copy_handles(tensors), bytes, root);
}

bool work_wait(const Work& work, int64_t timeout_ms) {
  check_not_fork("a started operation");
  return work.work->wait(milliseconds(timeout_ms));
}

bool work_is_on_stream(const Work& work) {
  return work.on_stream;
}

bool work_is_completed(const Work& work) {
  return work.work->isCompleted();
}

int32_t work_source(const Work& work) {
  return work.work->sourceRank();
}

} // namespace brigade
