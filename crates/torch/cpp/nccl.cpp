// The NCCL backend: feature cuda. ProcessGroupNCCL.hpp needs the CUDA and NCCL headers.
#define USE_C10D_NCCL 1

#include "brigade-torch/src/bridge.rs.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>
#include <string_view>

namespace brigade {

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
  return group;
}

} // namespace brigade
