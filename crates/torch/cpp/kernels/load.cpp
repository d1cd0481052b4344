// Needs CUDA's headers.
#include "load.h"
#include "loaded_function.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace brigade::kernels {

namespace {

void check(cudaError_t error, const std::string& operation) {
  if (error != cudaSuccess) {
    // Resets the error, which the next call would report again.
    BRIGADE_LOADED(cudaGetLastError)();
    TORCH_CHECK(false, operation, ": ", BRIGADE_LOADED(cudaGetErrorString)(error));
  }
}

class GpuProgram : public Program {
 public:
  GpuProgram(c10::DeviceIndex device, const void* code)
      : device_(c10::kCUDA, device), processors_(at::cuda::getDeviceProperties(device)->multiProcessorCount) {
    const c10::DeviceGuard guard(device_);
    // Never unloaded: at the end of the process the runtime may be gone first.
    check(
        BRIGADE_LOADED(cudaLibraryLoadData)(&library_, code, nullptr, nullptr, 0, nullptr, nullptr, 0),
        "kernels cannot be loaded");
  }

  int processors() override {
    return processors_;
  }

 private:
  // Largest dynamic shared memory of a block for which a kernel needs no attribute.
  static constexpr size_t kUsualShared = size_t{48} << 10;

  void start(
      const std::string& kernel, Extent blocks, Extent threads, size_t shared, const void* args,
      size_t) override {
    const c10::DeviceGuard guard(device_);
    void* values[] = {const_cast<void*>(args)};
    using Launch = cudaError_t(const void*, dim3, dim3, void**, size_t, cudaStream_t);
    check(
        loaded_function<Launch>("cudaLaunchKernel")(
            handle(kernel, shared), dim3(blocks.x, blocks.y), dim3(threads.x, threads.y), values, shared,
            c10::cuda::getCurrentCUDAStream(device_.index()).stream()),
        kernel);
  }

  const void* handle(const std::string& name, size_t shared) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& found = kernels_[name];
    if (found.kernel == nullptr) {
      check(BRIGADE_LOADED(cudaLibraryGetKernel)(&found.kernel, library_, name.c_str()), name);
    }
    if (shared > std::max(found.shared, kUsualShared)) {
      using SetAttribute = cudaError_t(const void*, cudaFuncAttribute, int);
      check(
          loaded_function<SetAttribute>("cudaFuncSetAttribute")(
              found.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          name);
      found.shared = shared;
    }
    return found.kernel;
  }

  struct Kernel {
    cudaKernel_t kernel = nullptr;
    size_t shared = 0;
  };

  c10::Device device_;
  int processors_;
  cudaLibrary_t library_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, Kernel> kernels_;
};

} // namespace

int32_t capability_of(c10::DeviceIndex device) {
  const auto& properties = *at::cuda::getDeviceProperties(device);
  return properties.major * 10 + properties.minor;
}

std::string nvrtc_library() {
  // libtorch's own library refers to the right NVRTC and knows its folder.
  Dl_info torch{};
  TORCH_CHECK(
      dladdr(reinterpret_cast<void*>(&at::cuda::warp_size), &torch) != 0 && torch.dli_fname != nullptr,
      "the folder of libtorch_cuda is unknown");
  std::string path = torch.dli_fname;
  path.resize(path.find_last_of('/') + 1);
  return path + "libcaffe2_nvrtc.so";
}

std::unique_ptr<Program> load(c10::DeviceIndex device, const void* code) {
  return std::make_unique<GpuProgram>(device, code);
}

} // namespace brigade::kernels
