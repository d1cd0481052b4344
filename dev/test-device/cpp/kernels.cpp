// Brigade's GPU kernels (crates/torch/kernels) on the CPU: a thread for each one of a block, and block after block. It
// shows what they compute, and that no thread reads what another has not written yet; not how fast they are.
#include "fake_gpu.h"

#include "kernels/activation.h"
#include "kernels/cross_entropy.h"
#include "kernels/norm_residual.h"
#include "kernels/rotary.h"
#include "philox.h"

#include <c10/core/GradMode.h>

#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace brigade::fake_gpu {
namespace {

struct Index {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// The block that runs: its barriers, and what the lanes of its warps exchange.
struct Block {
  explicit Block(unsigned threads) : barrier(threads), exchanged(threads) {
    for (unsigned first = 0; first < threads; first += kWarp) {
      warps.push_back(std::make_unique<std::barrier<>>(std::min(kWarp, threads - first)));
    }
  }

  static constexpr unsigned kWarp = 32;

  std::barrier<> barrier;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<uint32_t> exchanged;
  std::atomic<const char*> failure = nullptr;
};

thread_local Index threadIdx, blockIdx, blockDim, gridDim;
thread_local Block* block;

void __syncthreads() {
  block->barrier.arrive_and_wait();
}

unsigned warp_shuffle(unsigned value, int lane) {
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / Block::kWarp;
  block->exchanged[thread] = value;
  block->warps[warp]->arrive_and_wait();
  value = block->exchanged.at(warp * Block::kWarp + lane);
  block->warps[warp]->arrive_and_wait();
  return value;
}

float warp_shuffle(float value, int lane) {
  return std::bit_cast<float>(warp_shuffle(std::bit_cast<unsigned>(value), lane));
}

// Unlike on a GPU, the kernel goes on; the launch fails.
void assert_failed(const char* message) {
  block->failure = message;
}

float __uint_as_float(unsigned value) {
  return std::bit_cast<float>(value);
}

unsigned __float_as_uint(float value) {
  return std::bit_cast<unsigned>(value);
}

// build.rs has them compiled without contractions.
float __fadd_rn(float a, float b) {
  return a + b;
}

float __fsub_rn(float a, float b) {
  return a - b;
}

float __fmul_rn(float a, float b) {
  return a * b;
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
#define BRIGADE_KERNEL(threads, blocks) inline void
#define __device__
#define __forceinline__ inline
// One block runs at a time.
#define __shared__ static

namespace bfloat16 {
const auto widen = widen_pair<c10::BFloat16>;
const auto narrow = narrow_pair<c10::BFloat16>;
#define BRIGADE_ELEMENT BRIGADE_BFLOAT16
#include "common.cuh"
namespace norm_relu {
#include "norm_relu.cu"
} // namespace norm_relu
namespace norm_residual {
#include "norm_residual.cu"
} // namespace norm_residual
namespace cross_entropy {
#include "cross_entropy.cu"
} // namespace cross_entropy
namespace activation {
#include "activation.cu"
} // namespace activation
namespace rotary {
#include "rotary.cu"
} // namespace rotary
namespace embedding {
#include "embedding.cu"
} // namespace embedding
namespace images {
#include "images.cu"
} // namespace images
namespace optimizer {
#include "optimizer.cu"
} // namespace optimizer
#undef BRIGADE_ELEMENT
} // namespace bfloat16

namespace float16 {
const auto widen = widen_pair<c10::Half>;
const auto narrow = narrow_pair<c10::Half>;
#define BRIGADE_ELEMENT BRIGADE_FLOAT16
#include "common.cuh"
namespace norm_relu {
#include "norm_relu.cu"
} // namespace norm_relu
namespace norm_residual {
#include "norm_residual.cu"
} // namespace norm_residual
namespace cross_entropy {
#include "cross_entropy.cu"
} // namespace cross_entropy
namespace activation {
#include "activation.cu"
} // namespace activation
namespace rotary {
#include "rotary.cu"
} // namespace rotary
namespace embedding {
#include "embedding.cu"
} // namespace embedding
namespace images {
#include "images.cu"
} // namespace images
namespace optimizer {
#include "optimizer.cu"
} // namespace optimizer
#undef BRIGADE_ELEMENT
} // namespace float16

namespace float32 {
#define BRIGADE_ELEMENT BRIGADE_FLOAT32
#include "common.cuh"
namespace cross_entropy {
#include "cross_entropy.cu"
} // namespace cross_entropy
namespace activation {
#include "activation.cu"
} // namespace activation
namespace rotary {
#include "rotary.cu"
} // namespace rotary
namespace embedding {
#include "embedding.cu"
} // namespace embedding
namespace images {
#include "images.cu"
} // namespace images
namespace optimizer {
#include "optimizer.cu"
} // namespace optimizer
#undef BRIGADE_ELEMENT
} // namespace float32

#undef __shared__
#undef __forceinline__
#undef __device__
#undef BRIGADE_KERNEL
#undef BRIGADE_EMULATED_GPU

// A kernel for the emulation: it takes the bytes of its struct.
struct Kernel {
  void (*run)(const void* args);
  size_t bytes;
};

template <typename Args, void (*kernel)(Args)>
constexpr Kernel emulated() {
  return {
      [](const void* args) {
        Args same;
        std::memcpy(&same, args, sizeof(same));
        kernel(same);
      },
      sizeof(Args)};
}

using Kernels = std::map<std::string, Kernel>;

#define BRIGADE_NAMED(file, Args, name) {#name, emulated<file::Args, file::name>()}
#define BRIGADE_NORM(type, name) BRIGADE_NAMED(type::norm_relu, NormArguments, name)
#define BRIGADE_NORM_RELU(type)                                                            \
  {BRIGADE_NORM(type, statistics),            BRIGADE_NORM(type, finish_statistics),       \
   BRIGADE_NORM(type, activate_plain),        BRIGADE_NORM(type, activate_relu),           \
   BRIGADE_NORM(type, activate_shortcut),     BRIGADE_NORM(type, gradient_sums_plain),     \
   BRIGADE_NORM(type, gradient_sums_relu),    BRIGADE_NORM(type, gradient_sums_shortcut),  \
   BRIGADE_NORM(type, finish_gradients),      BRIGADE_NORM(type, gradient_rows_plain),     \
   BRIGADE_NORM(type, gradient_rows_relu),    BRIGADE_NORM(type, gradient_rows_shortcut),  \
   BRIGADE_NORM(type, gradient_sums_two_uses), BRIGADE_NORM(type, activate_pool),          \
   BRIGADE_NORM(type, gradient_sums_pool),    BRIGADE_NORM(type, gradient_rows_pool)}

#define BRIGADE_CROSS_ENTROPY(type)                                                        \
  {BRIGADE_NAMED(type::cross_entropy, CrossEntropyArguments, cross_entropy),               \
   BRIGADE_NAMED(type::cross_entropy, CrossEntropyArguments, cross_entropy_unaligned)}

#define BRIGADE_NORMED(type, name) BRIGADE_NAMED(type::norm_residual, NormResidualArguments, name)
#define BRIGADE_NORM_RESIDUAL(type)                                                                      \
  {BRIGADE_NORMED(type, norm_residual_1),            BRIGADE_NORMED(type, norm_residual_1_backward),     \
   BRIGADE_NORMED(type, norm_residual_2),            BRIGADE_NORMED(type, norm_residual_2_backward),     \
   BRIGADE_NORMED(type, norm_residual_any),          BRIGADE_NORMED(type, norm_residual_any_backward),   \
   BRIGADE_NORMED(type, norm_residual_sums)}

#define BRIGADE_ACTIVATED(type, name) BRIGADE_NAMED(type::activation, ActivationArguments, name)
#define BRIGADE_ACTIVATION(type)                                                                             \
  {BRIGADE_ACTIVATED(type, activation),                 BRIGADE_ACTIVATED(type, activation_backward),        \
   BRIGADE_ACTIVATED(type, activation_unaligned),       BRIGADE_ACTIVATED(type, activation_unaligned_backward), \
   BRIGADE_ACTIVATED(type, activation_gated),           BRIGADE_ACTIVATED(type, activation_gated_backward),  \
   BRIGADE_ACTIVATED(type, activation_gated_unaligned), BRIGADE_ACTIVATED(type, activation_gated_unaligned_backward), \
   BRIGADE_ACTIVATED(type, activation_sums)}

#define BRIGADE_ROTARY(type)                                          \
  {BRIGADE_NAMED(type::rotary, RotaryArguments, rotary),              \
   BRIGADE_NAMED(type::rotary, RotaryArguments, rotary_unaligned)}

#define BRIGADE_EMBEDDED(type, name) BRIGADE_NAMED(type::embedding, EmbeddingArguments, name)
#define BRIGADE_EMBEDDING(type)                                                                       \
  {BRIGADE_EMBEDDED(type, embedding),           BRIGADE_EMBEDDED(type, embedding_backward),           \
   BRIGADE_EMBEDDED(type, embedding_unaligned), BRIGADE_EMBEDDED(type, embedding_unaligned_backward)}

#define BRIGADE_IMAGES(type) {BRIGADE_NAMED(type::images, ImagesArguments, normalize_images)}

#define BRIGADE_OPTIMIZER(type)                                                  \
  {BRIGADE_NAMED(type::optimizer, AdamArguments, optimizer_adam),                \
   BRIGADE_NAMED(type::optimizer, AdamArguments, optimizer_adam_amsgrad),        \
   BRIGADE_NAMED(type::optimizer, SgdArguments, optimizer_sgd),                  \
   BRIGADE_NAMED(type::optimizer, SgdArguments, optimizer_sgd_momentum)}

// What dropout keeps of a row, by the function that kernels share: one thread for eight values.
struct DropoutArguments {
  bool* kept;
  uint64_t seed;
  uint64_t row;
  int64_t tiles;
  uint32_t below;
};

void keep_values(const void* args) {
  const auto& a = *static_cast<const DropoutArguments*>(args);
  const unsigned bits = bfloat16::dropout_bits(a.seed, a.row, threadIdx.x / 16, a.below);
  for (unsigned v = 0; v < 8 && threadIdx.x < a.tiles * 16; ++v) {
    a.kept[threadIdx.x * 8 + v] = bits >> v & 1;
  }
}

using AllKernels = std::map<std::pair<std::string, at::ScalarType>, Kernels>;

const AllKernels& all_kernels() {
  static const AllKernels all{
      {{"norm_relu", at::kBFloat16}, BRIGADE_NORM_RELU(bfloat16)},
      {{"norm_relu", at::kHalf}, BRIGADE_NORM_RELU(float16)},
      {{"norm_residual", at::kBFloat16}, BRIGADE_NORM_RESIDUAL(bfloat16)},
      {{"norm_residual", at::kHalf}, BRIGADE_NORM_RESIDUAL(float16)},
      {{"activation", at::kBFloat16}, BRIGADE_ACTIVATION(bfloat16)},
      {{"activation", at::kHalf}, BRIGADE_ACTIVATION(float16)},
      {{"activation", at::kFloat}, BRIGADE_ACTIVATION(float32)},
      {{"rotary", at::kBFloat16}, BRIGADE_ROTARY(bfloat16)},
      {{"rotary", at::kHalf}, BRIGADE_ROTARY(float16)},
      {{"rotary", at::kFloat}, BRIGADE_ROTARY(float32)},
      {{"embedding", at::kBFloat16}, BRIGADE_EMBEDDING(bfloat16)},
      {{"embedding", at::kHalf}, BRIGADE_EMBEDDING(float16)},
      {{"embedding", at::kFloat}, BRIGADE_EMBEDDING(float32)},
      {{"images", at::kBFloat16}, BRIGADE_IMAGES(bfloat16)},
      {{"images", at::kHalf}, BRIGADE_IMAGES(float16)},
      {{"images", at::kFloat}, BRIGADE_IMAGES(float32)},
      {{"optimizer", at::kBFloat16}, BRIGADE_OPTIMIZER(bfloat16)},
      {{"optimizer", at::kHalf}, BRIGADE_OPTIMIZER(float16)},
      {{"optimizer", at::kFloat}, BRIGADE_OPTIMIZER(float32)},
      {{"cross_entropy", at::kBFloat16}, BRIGADE_CROSS_ENTROPY(bfloat16)},
      {{"cross_entropy", at::kHalf}, BRIGADE_CROSS_ENTROPY(float16)},
      {{"cross_entropy", at::kFloat}, BRIGADE_CROSS_ENTROPY(float32)},
  };
  return all;
}

// The kernels of a file for a type of elements.
const Kernels& kernels_of(const std::string& file, at::ScalarType type) {
  return all_kernels().at({file, type});
}

bool has_kernels(const std::string& file, at::ScalarType type) {
  return all_kernels().count({file, type}) > 0;
}

// Launches are entered in the account, and nothing runs.
std::atomic<bool> is_only_counted = false;

class Emulated : public kernels::Program {
 public:
  Emulated(const std::string& file, at::ScalarType type)
      : kernels_(kernels_of(file, type)), element_size_(c10::elementSize(type)) {}
  explicit Emulated(Kernels kernels) : kernels_(std::move(kernels)) {}

  // So that there are several parts, the last of them shorter.
  int processors() override {
    return 2;
  }

 private:
  void start(
      const std::string& name, kernels::Extent blocks, kernels::Extent threads, size_t shared,
      const void* args, size_t bytes) override {
    const Kernel kernel = kernels_.at(name);
    const unsigned count = threads.x * threads.y;
    TORCH_CHECK(count > 0 && count <= 1024, name, ": ", count, " threads in a block");
    TORCH_CHECK(shared == 0, name, ": the emulation has no dynamic shared memory");
    TORCH_CHECK(bytes == kernel.bytes, name, ": ", bytes, " bytes of arguments, takes ", kernel.bytes);
    enter_in_account("brigade::" + name, bytes_of_launch(name, blocks, args));
    if (only_counted()) {
      return;
    }
    const std::string copy(static_cast<const char*>(args), bytes);
    // As on a real GPU, a capture runs nothing: it could not take back what the kernel writes.
    if (!record([name, kernel, blocks, threads, copy] { run(name, kernel, blocks, threads, copy.data()); })) {
      run(name, kernel, blocks, threads, args);
    }
  }

  static void run(
      const std::string& name, const Kernel& kernel, kernels::Extent blocks, kernels::Extent threads,
      const void* args) {
    const unsigned count = threads.x * threads.y;
    Block whole(count);
    {
      std::vector<std::jthread> workers;
      for (unsigned thread = 0; thread < count; ++thread) {
        workers.emplace_back([&, thread] {
          block = &whole;
          threadIdx = {thread % threads.x, thread / threads.x};
          blockDim = {threads.x, threads.y};
          gridDim = {blocks.x, blocks.y};
          for (unsigned i = 0; i < blocks.x * blocks.y; ++i) {
            blockIdx = {i % blocks.x, i / blocks.x};
            kernel.run(args);
            __syncthreads();
          }
        });
      }
    }
    TORCH_CHECK(whole.failure == nullptr, name, ": ", whole.failure.load());
  }

  // For the account: what a launch reads and writes of the tensors whose size depends on the rows.
  uint64_t bytes_of_launch(const std::string& name, kernels::Extent blocks, const void* args) const {
    if (name.starts_with("cross_entropy")) {
      float32::cross_entropy::CrossEntropyArguments a;
      std::memcpy(&a, args, sizeof(a));
      return uint64_t{blocks.x} * static_cast<uint64_t>(a.columns) * element_size_ * (a.gradient == nullptr ? 1 : 2);
    }
    if (name.starts_with("rotary")) {
      float32::rotary::RotaryArguments a;
      std::memcpy(&a, args, sizeof(a));
      uint64_t heads = 0;
      for (const auto& part : a.parts) {
        heads += static_cast<uint64_t>(part.heads + part.copied);
      }
      // Read and written. The tables are those of one head.
      return uint64_t{blocks.x} * heads * 2 * static_cast<uint64_t>(a.half) * element_size_ * 2;
    }
    if (name == "normalize_images") {
      float32::images::ImagesArguments a;
      std::memcpy(&a, args, sizeof(a));
      return static_cast<uint64_t>(a.values) * (1 + element_size_);
    }
    if (name.starts_with("activation")) {
      return bytes_of_activation(name, args);
    }
    if (name.starts_with("embedding")) {
      return bytes_of_embedding(name, args);
    }
    if (name.starts_with("optimizer")) {
      // All rules have the tensors in front.
      static_assert(
          offsetof(float32::optimizer::AdamArguments, tensors) == 0 &&
          offsetof(float32::optimizer::SgdArguments, tensors) == 0);
      float32::optimizer::OptimizerTensors tensors;
      std::memcpy(&tensors, args, sizeof(tensors));
      return bytes_of_optimizer(tensors);
    }
    if (!name.starts_with("norm_residual")) {
      return kernels_.count("activate_relu") > 0 ? bytes_of_norm(name, args) : 0;
    }
    bfloat16::norm_residual::NormResidualArguments a;
    std::memcpy(&a, args, sizeof(a));
    const auto width = static_cast<uint64_t>(a.width), parts = static_cast<uint64_t>(a.parts);
    const uint64_t part_bytes = parts * 3 * width * sizeof(float);
    if (name == "norm_residual_sums") {
      return part_bytes;
    }
    const auto size = [](const void* tensor, uint64_t bytes) { return tensor == nullptr ? 0 : bytes; };
    const bool is_backward = name.ends_with("_backward");
    const uint64_t of_value = is_backward
        ? size(a.dnormed, element_size_) + size(a.dnormed_float, sizeof(float)) + sizeof(float) +
            size(a.dsum, sizeof(float)) + sizeof(float) + size(a.dbranch, element_size_)
        : sizeof(float) + size(a.branch, element_size_ + sizeof(float)) + size(a.normed, element_size_) +
            size(a.normed_float, sizeof(float));
    return static_cast<uint64_t>(a.rows) * width * of_value + (is_backward ? part_bytes : 0);
  }

  // Each place reads a row of each table, and the ids.
  static uint64_t bytes_of_embedding(const std::string& name, const void* args) {
    float32::embedding::EmbeddingArguments a;
    std::memcpy(&a, args, sizeof(a));
    const auto places = static_cast<uint64_t>(a.places), row = static_cast<uint64_t>(a.width) * sizeof(float);
    uint64_t ids = 0;
    for (int table = 0; table < a.count; ++table) {
      ids += a.tables[table].ids == nullptr ? 0 : static_cast<uint64_t>(a.tables[table].period) * sizeof(int64_t);
    }
    const uint64_t rows = name.ends_with("_backward")
        ? places * (a.drows == nullptr ? 1 : 2) + static_cast<uint64_t>(a.tables[0].vocabulary)
        : places * (static_cast<uint64_t>(a.count) + 1);
    return rows * row + ids;
  }

  uint64_t bytes_of_norm(const std::string& name, const void* args) const {
    // Tensors as large as the input and as the output, and the bits that are kept for each value of the output.
    struct Pass {
      uint64_t inputs, outputs, kept_bits;
    };
    static const std::map<std::string, Pass> passes{
        {"statistics", {1, 0, 0}},
        {"activate_plain", {1, 1, 0}},
        {"activate_relu", {1, 1, 0}},
        {"activate_shortcut", {1, 2, 1}},
        {"activate_pool", {1, 1, 8}},
        {"gradient_sums_plain", {1, 1, 0}},
        {"gradient_sums_relu", {1, 1, 0}},
        {"gradient_sums_shortcut", {1, 2, 1}},
        {"gradient_sums_two_uses", {1, 3, 1}},
        {"gradient_sums_pool", {1, 1, 8}},
        {"gradient_rows_plain", {2, 1, 0}},
        {"gradient_rows_relu", {2, 1, 0}},
        {"gradient_rows_shortcut", {2, 1, 0}},
        {"gradient_rows_pool", {2, 1, 8}},
    };
    bfloat16::norm_relu::NormArguments a;
    std::memcpy(&a, args, sizeof(a));
    const auto channels = static_cast<uint64_t>(a.channels);
    const uint64_t part_bytes = static_cast<uint64_t>(a.parts) * 2 * channels * sizeof(float);
    if (name.starts_with("finish")) {
      return part_bytes;
    }
    const Pass& pass = passes.at(name);
    const bool is_sum = name == "statistics" || name.starts_with("gradient_sums");
    const uint64_t inputs = static_cast<uint64_t>(a.rows) * channels;
    const uint64_t outputs = name.ends_with("_pool") ? static_cast<uint64_t>(a.pooled_rows) * channels : inputs;
    return (inputs * pass.inputs + outputs * pass.outputs) * element_size_ + outputs * pass.kept_bits / 8 +
        (is_sum ? part_bytes : 0);
  }

  uint64_t bytes_of_activation(const std::string& name, const void* args) const {
    float32::activation::ActivationArguments a;
    std::memcpy(&a, args, sizeof(a));
    const auto width = static_cast<uint64_t>(a.width);
    const uint64_t sums = static_cast<uint64_t>(a.parts) * static_cast<uint64_t>(a.biases) * width;
    const uint64_t part_bytes = a.part_sums == nullptr ? 0 : sums * sizeof(float);
    if (name == "activation_sums") {
      return part_bytes;
    }
    uint64_t matrices = 0;
    for (const void* matrix : {a.input, a.up, a.doutput, static_cast<const void*>(a.output),
                               static_cast<const void*>(a.dinput), static_cast<const void*>(a.dup)}) {
      matrices += matrix != nullptr;
    }
    return static_cast<uint64_t>(a.rows) * width * element_size_ * matrices + part_bytes;
  }

  // Parameters and states are read and written, gradients are read, copies are written.
  uint64_t bytes_of_optimizer(const float32::optimizer::OptimizerTensors& tensors) const {
    uint64_t bytes = 0;
    for (int i = 0; i < tensors.count; ++i) {
      const auto& t = tensors.of[i];
      uint64_t of_value = 3 * sizeof(float) + (t.copy == nullptr ? 0 : element_size_);
      for (const float* state : t.states) {
        of_value += state == nullptr ? 0 : 2 * sizeof(float);
      }
      bytes += static_cast<uint64_t>(t.count) * of_value;
    }
    return bytes;
  }

  const Kernels kernels_;
  const uint64_t element_size_ = 0;
};

// The kernels that operations on GPUs made of host memory call.
kernels::Program* emulated_program(const char* file, c10::ScalarType type) {
  static std::map<std::pair<std::string, c10::ScalarType>, Emulated> programs;
  static std::mutex mutex;
  const std::pair<std::string, c10::ScalarType> key{file, type};
  if (!has_kernels(file, type)) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  return &programs.try_emplace(key, file, type).first->second;
}

} // namespace

bool only_counted() {
  return is_only_counted;
}

extern "C" {

void fake_gpu_emulate_kernels(bool on, bool count_only) {
  is_only_counted = on && count_only;
  kernels::set_program_source(on ? emulated_program : nullptr);
}

// `in`: logits, targets, count (null where there is none), gradient (null where none is wanted; it may be the logits).
// `out`: the losses.
char* fake_gpu_cross_entropy(
    const at::Tensor* const* in, at::Tensor* out, int64_t classes, int64_t ignore_index,
    double label_smoothing, double z_loss, double scale) {
  return caught([&] {
    c10::NoGradGuard no_grad;
    Emulated program("cross_entropy", in[0]->scalar_type());
    const auto optional = [](const at::Tensor* tensor) { return tensor == nullptr ? at::Tensor() : *tensor; };
    *out = cross_entropy_rows_gpu(
        program, *in[0], classes, *in[1], optional(in[2]),
        {ignore_index, label_smoothing, z_loss, scale}, optional(in[3]));
  });
}

// The values that dropout keeps, of `tiles` times 128: as a kernel finds them, and by philox.h.
char* fake_gpu_dropout(
    at::Tensor* const* out, uint64_t seed, uint64_t row, int64_t tiles, uint32_t below) {
  return caught([&] {
    for (int i = 0; i < 2; ++i) {
      *out[i] = at::empty({tiles * kPhiloxTile}, at::kBool);
    }
    bool* kept = out[0]->mutable_data_ptr<bool>();
    bool* on_cpu = out[1]->mutable_data_ptr<bool>();
    for (int64_t tile = 0; tile < tiles; ++tile) {
      uint16_t random[kPhiloxTile];
      philox(seed, row, static_cast<uint32_t>(tile), random);
      for (int64_t at = 0; at < kPhiloxTile; ++at) {
        on_cpu[tile * kPhiloxTile + at] = random[at] >= below;
      }
    }
    Emulated program(Kernels{{"dropout", {&keep_values, sizeof(DropoutArguments)}}});
    program.launch(
        "dropout", {1, 1}, {kernels::quotient_up(tiles * 16, 32) * 32, 1}, /*shared=*/0,
        DropoutArguments{kept, seed, row, tiles, below});
  });
}

} // extern "C"

} // namespace brigade::fake_gpu
