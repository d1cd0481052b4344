// The feature cuda. Needs CUDA's headers.
#include "brigade-torch/src/bridge.rs.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>

#include <dlfcn.h>

namespace brigade {

namespace {

// Linkers leave libraries out that nothing refers to, and the kernels in libtorch_cuda register themselves
// when it is loaded: so every program refers to it, whether it uses NCCL or not.
__attribute__((used, retain)) int (*const keep_libtorch_cuda)() = &at::cuda::warp_size;

// The newest CUDA that the driver can serve, such as 13000; 0 where there is no driver. A function of the
// runtime that libtorch has loaded: looked up, so that programs need not be linked with it.
int driver_version() {
  using Function = cudaError_t (*)(int*);
  auto* function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "cudaDriverGetVersion"));
  int version = 0;
  return function != nullptr && function(&version) == cudaSuccess ? version : 0;
}

std::string text_of(cudaError_t error) {
  using Function = const char* (*)(cudaError_t);
  auto* function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "cudaGetErrorString"));
  return function != nullptr ? function(error) : "unknown error";
}

} // namespace

CudaState cuda_state() {
  int devices = 0;
  // Unlike c10::cuda::device_count, it prints nothing.
  const auto error = c10::cuda::GetDeviceCount(&devices);
  const bool good = error == cudaSuccess;
  return CudaState{
      good ? devices : 0,
      static_cast<int32_t>(error),
      good ? std::string() : text_of(error),
      driver_version(),
      CUDART_VERSION};
}

void forbid_waiting(bool on) noexcept {
  using c10::cuda::SyncDebugMode;
  c10::cuda::warning_state().set_sync_debug_mode(
      on ? SyncDebugMode::L_ERROR : SyncDebugMode::L_DISABLED);
}

rust::String gpu_hardware(int32_t index) {
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->name;
}

bool gpu_has_bf16(int32_t index) {
  // From Ampere on.
  return at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->major >= 8;
}

} // namespace brigade
