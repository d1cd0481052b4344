// Needs CUDA's headers.
#include "gpu_program.h"

#include "norm_relu.cu"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace brigade {

// The text of norm_relu.cu; the build script writes it.
extern const char* const kNormReluSource;

namespace {

// Of a library that libtorch has loaded: looked up, so that programs need not be linked with it.
template <typename Function>
Function* function_of(void* library, const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(library, name));
  TORCH_CHECK(found != nullptr, "there is no ", name, " in the CUDA libraries");
  return found;
}

#define BRIGADE_RUNTIME(name) function_of<decltype(name)>(RTLD_DEFAULT, #name)

void check(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) {
    // The runtime keeps it for the next one to ask.
    BRIGADE_RUNTIME(cudaGetLastError)();
    TORCH_CHECK(false, what, ": ", BRIGADE_RUNTIME(cudaGetErrorString)(error));
  }
}

// The compiler. Its header comes with a toolkit only; these are the functions' types.
class Nvrtc {
 public:
  Nvrtc() : library_(open()) {}

  std::vector<char> compile(const char* source, std::vector<std::string> options) const {
    void* program = nullptr;
    const auto create = function_of<int(void**, const char*, const char*, int, void*, void*)>(
        library_, "nvrtcCreateProgram");
    TORCH_CHECK(create(&program, source, "norm_relu.cu", 0, nullptr, nullptr) == 0, "NVRTC does not start");
    const auto free = function_of<int(void**)>(library_, "nvrtcDestroyProgram");
    const std::unique_ptr<void*, int (*)(void**)> owner(&program, free);
    std::vector<const char*> texts;
    for (const auto& option : options) {
      texts.push_back(option.c_str());
    }
    const auto compile = function_of<int(void*, int, const char* const*)>(library_, "nvrtcCompileProgram");
    const int failed = compile(program, static_cast<int>(texts.size()), texts.data());
    TORCH_CHECK(
        failed == 0, "NVRTC error ", failed, " with ", options.at(0), ": ",
        text_of(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").data());
    return text_of(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN");
  }

 private:
  // libtorch's own library refers to the right NVRTC and knows where it lies.
  static void* open() {
    Dl_info torch{};
    TORCH_CHECK(
        dladdr(reinterpret_cast<void*>(&at::cuda::warp_size), &torch) != 0 && torch.dli_fname != nullptr,
        "libtorch_cuda does not say where it lies");
    std::string path = torch.dli_fname;
    path.resize(path.find_last_of('/') + 1);
    path += "libcaffe2_nvrtc.so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, dlerror());
    return library;
  }

  std::vector<char> text_of(void* program, const char* size_of, const char* get) const {
    size_t size = 0;
    function_of<int(void*, size_t*)>(library_, size_of)(program, &size);
    std::vector<char> text(size + 1);
    function_of<int(void*, char*)>(library_, get)(program, text.data());
    return text;
  }

  void* library_;
};

class GpuProgram : public NormKernels {
 public:
  GpuProgram(c10::DeviceIndex device, c10::ScalarType type)
      : device_(c10::kCUDA, device), properties_(*at::cuda::getDeviceProperties(device)) {
    const auto capability = std::to_string(properties_.major * 10 + properties_.minor);
    const auto code = Nvrtc().compile(
        kNormReluSource,
        {"--gpu-architecture=sm_" + capability, "--std=c++17",
         type == c10::kHalf ? "-DBRIGADE_HALF=1" : "-DBRIGADE_HALF=0"});
    const c10::DeviceGuard guard(device_);
    // Never unloaded: at the end of the program the runtime may be gone first.
    check(
        BRIGADE_RUNTIME(cudaLibraryLoadData)(
            &library_, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "kernels cannot be loaded");
  }

  int processors() override {
    return properties_.multiProcessorCount;
  }

  void launch(const std::string& kernel, const NormGrid& grid, const NormArguments& arguments) override {
    const c10::DeviceGuard guard(device_);
    NormArguments copy = arguments;
    void* values[] = {&copy};
    using Launch = cudaError_t(const void*, dim3, dim3, void**, size_t, cudaStream_t);
    check(
        function_of<Launch>(RTLD_DEFAULT, "cudaLaunchKernel")(
            handle(kernel), dim3(grid.blocks_x, grid.blocks_y), dim3(grid.threads_x, grid.threads_y),
            values, 0, c10::cuda::getCurrentCUDAStream(device_.index()).stream()),
        kernel);
  }

 private:
  const void* handle(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& found = kernels_[name];
    if (found == nullptr) {
      check(BRIGADE_RUNTIME(cudaLibraryGetKernel)(&found, library_, name.c_str()), name);
    }
    return found;
  }

  c10::Device device_;
  const cudaDeviceProp& properties_;
  cudaLibrary_t library_ = nullptr;
  std::mutex mutex_;
  std::map<std::string, cudaKernel_t> kernels_;
};

} // namespace

NormKernels* gpu_program(c10::DeviceIndex device, c10::ScalarType type) {
  if (type != c10::kBFloat16 && type != c10::kHalf) {
    return nullptr;
  }
  // Never freed: tensors in static variables may outlive any order of destructors.
  static auto* const mutex = new std::mutex();
  static auto* const programs =
      new std::map<std::pair<c10::DeviceIndex, c10::ScalarType>, std::unique_ptr<GpuProgram>>();
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto [place, is_new] = programs->try_emplace({device, type});
  if (is_new && at::cuda::getDeviceProperties(device)->major >= 8) {
    try {
      place->second = std::make_unique<GpuProgram>(device, type);
    } catch (const c10::Error& error) {
      TORCH_WARN(
          "batch normalisations of ", type, " use libtorch's kernels, which are slower than Brigade's: ",
          error.what_without_backtrace());
    }
  }
  return place->second.get();
}

} // namespace brigade
