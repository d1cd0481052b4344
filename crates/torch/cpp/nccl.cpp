// The NCCL backend: feature cuda. ProcessGroupNCCL.hpp needs the CUDA and NCCL headers.
#define USE_C10D_NCCL 1

#include "brigade-torch/src/bridge.rs.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <string_view>
#include <thread>

namespace brigade {

namespace {

// What a group that is dropped has in flight gets these seconds, as with Gloo.
constexpr std::chrono::seconds kFinish{5};

// A wait for an operation has the stream wait, and the host goes on; then the destructor of the backend would abort
// what has not run yet, such as the last step's all-reduce. The backend's own wait has no limit: a thread takes it, which
// ends when the abort has ended the operations.
void finish(const c10::intrusive_ptr<c10d::ProcessGroupNCCL>& nccl) {
  auto done = std::make_shared<std::promise<void>>();
  auto finished = done->get_future();
  std::thread([nccl, done] {
    try {
      nccl->waitForPendingWorks();
    } catch (const std::exception&) {
      // Of an operation that has failed: there is nothing left to wait for.
    }
    done->set_value();
  }).detach();
  finished.wait_for(kFinish);
  // Either nothing of this rank is in flight any more, or what is has had its time. The destructor would abort the
  // communicators, too, but with a warning that destroy_process_group() was not called. shutdown() would wait for the
  // other ranks of the host, of which one may still be writing a checkpoint.
  nccl->abort();
}

} // namespace

std::unique_ptr<Group> nccl_group(
    const Store& nccl_store,
    const Store& gloo_store,
    int32_t rank,
    int32_t size,
    const GlooOptions& options) {
  using Nccl = c10d::ProcessGroupNCCL;
  using Type = c10d::ProcessGroup::BackendType;
  // By default c10d's watchdog ends the process when a collective has passed its time limit. CleanUpOnly aborts
  // the communicator instead: the GPU goes on, and the next operation throws what the watchdog has found. Launchers
  // set 1, torchrun's default, which ends the process, too: it is no choice of the user's.
  constexpr const char* kHandling = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
  const char* chosen = std::getenv(kHandling);
  if (chosen == nullptr || std::string_view(chosen) == "1") {
    setenv(kHandling, "2", /*overwrite=*/1);
  }
  // And before it aborts, it waits a minute for a dump of what every rank was doing; its monitor ends the process some
  // minutes later. The error that comes of the abort names the call.
  setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250", /*overwrite=*/0);
  // Connects all ranks, which NCCL does at its first collective only: who is missing is known by now.
  const auto [gloo, shares_memory] = gloo_backend(gloo_store, rank, size, options);
  auto opts = Nccl::Options::create();
  opts->timeout = std::chrono::milliseconds(options.timeout_ms);
  opts->group_name = std::string(options.name);
  const auto nccl = c10::make_intrusive<Nccl>(nccl_store.live(), rank, size, std::move(opts));
  auto group = wrap_backend(
      nccl_store,
      rank,
      size,
      options.name,
      {{c10::DeviceType::CUDA, Type::NCCL, nccl}, {c10::DeviceType::CPU, Type::GLOO, gloo}});
  group->shares_memory = shares_memory;
  group->has_nccl = true;
  group->finish = [nccl] { finish(nccl); };
  return group;
}

} // namespace brigade
