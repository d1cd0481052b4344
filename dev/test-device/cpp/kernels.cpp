// The kernels of brigade-torch's norm_relu.cu on the CPU: a thread for each one of a block, and block after block. It
// shows what they compute, and that no thread reads what another has not written yet; not how fast they are.
#include "fake_gpu.h"

#include "norm_relu.cu"
#include "norm_relu_gpu.h"

#include <c10/core/GradMode.h>

#include <array>
#include <barrier>
#include <cmath>
#include <cstring>
#include <map>
#include <thread>

namespace brigade::fake_gpu {
namespace {

struct Index {
  unsigned x, y;
};

struct uint4 {
  unsigned x, y, z, w;
};

thread_local Index threadIdx, blockIdx, blockDim, gridDim;
thread_local std::barrier<>* block_barrier;

void __syncthreads() {
  block_barrier->arrive_and_wait();
}

// The pair of 16-bit values that lies in a word, and back.
template <typename T>
void widen_pair(unsigned pair, float& low, float& high) {
  std::array<T, 2> values;
  std::memcpy(values.data(), &pair, sizeof(pair));
  low = static_cast<float>(values[0]);
  high = static_cast<float>(values[1]);
}

template <typename T>
unsigned narrow_pair(float low, float high) {
  const std::array<T, 2> values{static_cast<T>(low), static_cast<T>(high)};
  unsigned pair;
  std::memcpy(&pair, values.data(), sizeof(pair));
  return pair;
}

#define BRIGADE_EMULATED_GPU
#define BRIGADE_KERNEL inline void
#define __device__
#define __forceinline__
// One block runs at a time.
#define __shared__ static

namespace bfloat16 {
const auto widen = widen_pair<c10::BFloat16>;
const auto narrow = narrow_pair<c10::BFloat16>;
#include "norm_relu.cu"
} // namespace bfloat16

namespace float16 {
const auto widen = widen_pair<c10::Half>;
const auto narrow = narrow_pair<c10::Half>;
#include "norm_relu.cu"
} // namespace float16

#undef __shared__
#undef __forceinline__
#undef __device__

using Kernel = void (*)(const ::NormArguments&);

template <typename Arguments, void (*kernel)(Arguments)>
void run(const ::NormArguments& arguments) {
  Arguments same;
  static_assert(sizeof(same) == sizeof(arguments));
  std::memcpy(&same, &arguments, sizeof(same));
  kernel(same);
}

#define BRIGADE_NAMED(type, name) {#name, run<type::NormArguments, type::name>}
#define BRIGADE_KERNELS(type)                                                                      \
  {BRIGADE_NAMED(type, statistics),            BRIGADE_NAMED(type, finish_statistics),             \
   BRIGADE_NAMED(type, activate_plain),        BRIGADE_NAMED(type, activate_relu),                 \
   BRIGADE_NAMED(type, activate_shortcut),     BRIGADE_NAMED(type, gradient_sums_plain),           \
   BRIGADE_NAMED(type, gradient_sums_relu),    BRIGADE_NAMED(type, gradient_sums_shortcut),        \
   BRIGADE_NAMED(type, finish_gradients),      BRIGADE_NAMED(type, gradient_rows_plain),           \
   BRIGADE_NAMED(type, gradient_rows_relu),    BRIGADE_NAMED(type, gradient_rows_shortcut)}

class Emulated : public NormKernels {
 public:
  explicit Emulated(at::ScalarType type)
      : kernels_(type == at::kHalf ? Kernels BRIGADE_KERNELS(float16) : Kernels BRIGADE_KERNELS(bfloat16)) {}

  // So that there are several parts, the last of them shorter.
  int processors() override {
    return 2;
  }

  void launch(const std::string& name, const NormGrid& grid, const ::NormArguments& arguments) override {
    const Kernel kernel = kernels_.at(name);
    const unsigned count = grid.threads_x * grid.threads_y;
    TORCH_CHECK(count > 0 && count <= kNormThreads, name, ": ", count, " threads in a block");
    std::barrier<> barrier(count);
    std::vector<std::jthread> threads;
    for (unsigned thread = 0; thread < count; ++thread) {
      threads.emplace_back([&, thread] {
        block_barrier = &barrier;
        threadIdx = {thread % grid.threads_x, thread / grid.threads_x};
        blockDim = {grid.threads_x, grid.threads_y};
        gridDim = {grid.blocks_x, grid.blocks_y};
        for (unsigned block = 0; block < grid.blocks_x * grid.blocks_y; ++block) {
          blockIdx = {block % grid.blocks_x, block / grid.blocks_x};
          kernel(arguments);
          __syncthreads();
        }
      });
    }
  }

 private:
  using Kernels = std::map<std::string, Kernel>;
  Kernels kernels_;
};

} // namespace

extern "C" {

// `in`: input, shortcut (null where there is none), weight, bias, running mean and variance, gradient of the output.
// `out`: output, and the gradients of input, weight, bias and shortcut.
char* fake_gpu_norm_relu(
    const at::Tensor* const* in, at::Tensor* const* out, double momentum, double eps, bool relu) {
  return caught([&] {
    c10::NoGradGuard no_grad;
    const auto& x = *in[0];
    TORCH_CHECK(fits_norm_kernels(x), "the kernels do not take such an input");
    Emulated kernels(x.scalar_type());
    const auto shortcut = in[1] == nullptr ? std::nullopt : std::optional(*in[1]);
    at::Tensor statistics;
    std::tie(*out[0], statistics) = norm_relu_forward_gpu(
        kernels, x, shortcut, *in[2], *in[3], *in[4], *in[5], momentum, eps, relu);
    std::tie(*out[1], *out[2], *out[3], *out[4]) = norm_relu_backward_gpu(
        kernels, *in[6], x, *out[0], statistics, shortcut.has_value(), relu, /*wants_x=*/true);
  });
}

} // extern "C"

} // namespace brigade::fake_gpu
