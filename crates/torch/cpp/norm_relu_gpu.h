// The host's side of the kernels in norm_relu.cu.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

struct NormArguments;

namespace brigade {

// Blocks of threads, along the channels (x) and along the rows (y).
struct NormGrid {
  unsigned blocks_x;
  unsigned blocks_y;
  unsigned threads_x;
  unsigned threads_y;
};

// Runs the kernels: a GPU, or what stands for one in tests.
class NormKernels {
 public:
  virtual ~NormKernels() = default;
  // Of the GPU; so many blocks are made that all are busy.
  virtual int processors() = 0;
  virtual void launch(const std::string& kernel, const NormGrid& grid, const NormArguments& arguments) = 0;
};

// Those for a tensor's device and type; null on a CPU, and where the GPU or the installation cannot have them.
NormKernels* norm_kernels(const at::Tensor& x);

// The kernels can read the tensor: 16-bit values [n, c, h, w] in channels_last, eight channels or a multiple.
bool fits_norm_kernels(const at::Tensor& t);

// The output, and mean, 1 / sqrt(variance + eps), slope and offset: [4, channels].
std::tuple<at::Tensor, at::Tensor> norm_relu_forward_gpu(
    NormKernels& kernels, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& running_mean,
    const at::Tensor& running_var, double momentum, double eps, bool relu);

// The gradients of x (undefined unless wanted), weight, bias and shortcut (undefined where there is none).
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_relu_backward_gpu(
    NormKernels& kernels, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& y,
    const at::Tensor& statistics, bool shortcut, bool relu, bool wants_x);

} // namespace brigade
