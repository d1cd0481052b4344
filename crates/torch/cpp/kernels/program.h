// GPU programs: the kernels of one file of the folder kernels/, compiled for a device and a type of elements.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace brigade::kernels {

// Blocks of a launch and the threads of a block, each along x and y.
struct Extent {
  unsigned x = 1;
  unsigned y = 1;
};

// Launches the kernels of a file: on a GPU, or on the CPU in tests.
class Program {
 public:
  virtual ~Program() = default;

  // Number of the GPU's multiprocessors.
  virtual int processors() = 0;

  // Starts a kernel on the current stream. `args` is the struct that the kernel takes by value; `shared` is the number of
  // bytes of dynamic shared memory, up to what the GPU has for a block.
  template <typename Args>
  void launch(const std::string& kernel, Extent blocks, Extent threads, size_t shared, const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>, "a kernel takes a plain struct");
    start(kernel, blocks, threads, shared, &args, sizeof(Args));
  }

 private:
  virtual void start(
      const std::string& kernel, Extent blocks, Extent threads, size_t shared, const void* args,
      size_t bytes) = 0;
};

// Returns the kernels of a file ("norm_relu") for a tensor's device and type of elements: compiled at the first call, or
// read from the user's cache. Null on a CPU, without the feature cuda, and where such kernels cannot run or are turned off
// (BRIGADE_FUSED). The first call that returns null for a reason the user may not expect warns.
Program* program(const char* file, const at::Tensor& like);
// The same for a device and a type of elements.
Program* program(const char* file, c10::Device device, c10::ScalarType type);
// The same for kernels of a file that do not depend on the type: those of a type for which they are there already, or
// else of float32.
Program* program_of_any_type(const char* file, c10::Device device);

// Source of a file's kernels for a type of elements; null where there are none.
using ProgramSource = Program* (*)(const char* file, c10::ScalarType type);
// Replaces the kernels of all GPUs by those of the source, for tests. Null restores them.
void set_program_source(ProgramSource source);

// Number of blocks of `by` that hold `of` items.
inline unsigned quotient_up(int64_t of, int64_t by) {
  return static_cast<unsigned>((of + by - 1) / by);
}

// Rows of a matrix begin at multiples of 16 bytes, and so do the ends of their columns.
inline bool has_aligned_rows(const at::Tensor& t) {
  const int64_t vector = 16 / static_cast<int64_t>(t.element_size());
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.size(1) % vector == 0 &&
      (t.stride(0) % vector == 0 || t.size(0) == 1);
}

} // namespace brigade::kernels
