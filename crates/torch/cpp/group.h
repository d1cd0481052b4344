// Process groups and their collectives.
#pragma once

#include "rust/cxx.h"
#include "store.h"
#include "tensors.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace brigade {

struct Traffic;

struct Group {
  explicit Group(c10::intrusive_ptr<c10d::ProcessGroup> group) : group(std::move(group)) {}
  // A child of fork leaves it as it is: its destructor would wait for threads that stayed in the parent.
  ~Group();

  // Throws in a child of fork: the only way to the group.
  const c10::intrusive_ptr<c10d::ProcessGroup>& live() const;

  // Sends and receives in flight: Gloo's wait on their own, so an abort must reach each.
  mutable std::mutex mutex;
  mutable std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages;
  // Whether reductions and gathers go through the memory of the one host.
  bool shares_memory = false;
  // Whether tensors on GPUs go by NCCL: on a stream, without the host.
  bool has_nccl = false;
  // Whether the backend of the group's devices all-reduces several tensors as one operation.
  bool reduces_lists = true;
  // Ends what NCCL has in flight; undefined for other groups.
  std::function<void()> finish;
  // What a fake group would have sent; null for other groups.
  std::shared_ptr<Traffic> traffic;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

// A started operation. c10d keeps handles of its tensors until it has completed.
struct Work {
  c10::intrusive_ptr<c10d::Work> work;
  // Whether waiting for it has the current stream wait, not the host.
  bool on_stream = false;
};

struct GlooOptions;
struct OperationTraffic;
enum class Reduction : uint8_t;

std::unique_ptr<Group> gloo_group(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options);
// NCCL for tensors on GPUs, Gloo for those on the CPU.
std::unique_ptr<Group> nccl_group(
    const Store& nccl_store,
    const Store& gloo_store,
    int32_t rank,
    int32_t size,
    const GlooOptions& options);
// Before it is dropped: waits some seconds for what is in flight on a GPU. Nothing for other groups.
void group_finish(const Group& group);
std::unique_ptr<Group> fake_group(const Store& store, int32_t rank, int32_t size, rust::Str name);

// By operation; empty for groups that are not fake.
rust::Vec<OperationTraffic> group_traffic(const Group& group);
void group_reset_traffic(const Group& group);

struct ServedDevice {
  c10::DeviceType device;
  c10d::ProcessGroup::BackendType type;
  c10::intrusive_ptr<c10d::Backend> backend;
};

struct GlooBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  bool shares_memory;
};
GlooBackend gloo_backend(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options);
// The same backend for tensors on GPUs, by copies to the host and back.
c10::intrusive_ptr<c10d::Backend> through_host(const c10::intrusive_ptr<c10d::Backend>& backend);

// A c10d::ProcessGroup with a backend for each kind of device, the default one first.
std::unique_ptr<Group> wrap_backend(
    const Store& store,
    int32_t rank,
    int32_t size,
    rust::Str name,
    std::initializer_list<ServedDevice> served);

void group_set_timeout(const Group& group, int64_t timeout_ms);
void group_abort(const Group& group);
// The backward of a loss whose gradients a reducer of this group reduces.
void group_backward(const Group& group, const Tensor& loss, bool retain_graph, bool create_graph);
bool group_shares_memory(const Group& group);

std::unique_ptr<Work> all_reduce(
    const Group& group, const Tensor& tensor, Reduction op, int64_t timeout_ms);
std::unique_ptr<Work> all_reduce_coalesced(
    const Group& group, rust::Slice<const TensorRef> tensors, Reduction op, int64_t timeout_ms);
std::unique_ptr<Work> broadcast(
    const Group& group, const Tensor& tensor, int64_t root, int64_t timeout_ms);
std::unique_ptr<Work> reduce(
    const Group& group, const Tensor& tensor, int64_t root, Reduction op, int64_t timeout_ms);
std::unique_ptr<Work> all_gather(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    const Tensor& input,
    int64_t timeout_ms);
std::unique_ptr<Work> all_gather_flat(
    const Group& group, const Tensor& output, const Tensor& input, int64_t timeout_ms);
std::unique_ptr<Work> all_gather_flat_coalesced(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    int64_t timeout_ms);
std::unique_ptr<Work> gather(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    const Tensor& input,
    int64_t root,
    int64_t timeout_ms);
std::unique_ptr<Work> scatter(
    const Group& group,
    const Tensor& output,
    rust::Slice<const TensorRef> inputs,
    int64_t root,
    int64_t timeout_ms);
std::unique_ptr<Work> reduce_scatter(
    const Group& group,
    const Tensor& output,
    rust::Slice<const TensorRef> inputs,
    Reduction op,
    int64_t timeout_ms);
std::unique_ptr<Work> reduce_scatter_flat(
    const Group& group,
    const Tensor& output,
    const Tensor& input,
    Reduction op,
    int64_t timeout_ms);
std::unique_ptr<Work> reduce_scatter_flat_coalesced(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    Reduction op,
    int64_t timeout_ms);
std::unique_ptr<Work> all_to_all(
    const Group& group,
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    int64_t timeout_ms);
std::unique_ptr<Work> all_to_all_flat(
    const Group& group,
    const Tensor& output,
    const Tensor& input,
    rust::Slice<const int64_t> output_rows,
    rust::Slice<const int64_t> input_rows,
    int64_t timeout_ms);
std::unique_ptr<Work> send(const Group& group, const Tensor& tensor, int32_t to, int32_t tag);
std::unique_ptr<Work> recv(const Group& group, const Tensor& tensor, int32_t from, int32_t tag);
std::unique_ptr<Work> recv_any(const Group& group, const Tensor& tensor, int32_t tag);
// `device`: the CUDA device that waits, or -1.
std::unique_ptr<Work> barrier(const Group& group, int64_t device, int64_t timeout_ms);
void monitored_barrier(const Group& group, int64_t timeout_ms, bool wait_all);
void broadcast_coalesced(
    const Group& group, rust::Slice<const TensorRef> tensors, size_t bytes, int32_t root);

bool work_wait(const Work& work, int64_t timeout_ms);
bool work_is_completed(const Work& work);
bool work_is_on_stream(const Work& work);
int32_t work_source(const Work& work);

} // namespace brigade
