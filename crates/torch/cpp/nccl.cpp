// The NCCL backend: feature cuda. ProcessGroupNCCL.hpp needs the CUDA and NCCL headers.
#define USE_C10D_NCCL 1

#include "brigade-torch/src/bridge.rs.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace brigade {

std::unique_ptr<Group> nccl_group(
    const Store& store, int32_t rank, int32_t size, rust::Str name, int64_t timeout_ms) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::milliseconds(timeout_ms);
  options->group_name = std::string(name);
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store.live(), rank, size, std::move(options));
  return wrap_backend(
      store,
      rank,
      size,
      name,
      c10d::ProcessGroup::BackendType::NCCL,
      backend,
      {c10::DeviceType::CUDA});
}

} // namespace brigade
