#include "norm_relu_gpu.h"

#include "gpu_program.h"
#include "norm_relu.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace brigade {

namespace {

// Of 256 threads each, for each of the GPU's processors. ResNet-50's step on an H200, at batch 256: 41.4 ms with one,
// 37.5 with two, 38.6 with four, 40.6 with eight, which leave more parts to add up.
constexpr int64_t kNormBlocks = 2;
// With fewer rows, what a thread does before its first and after its last one costs as much as they do.
constexpr int64_t kFewestNormRows = 4;
// Threads along the channels, of the kernels that finish sums.
constexpr unsigned kNormColumns = 32;

unsigned quotient_up(int64_t of, int64_t by) {
  return static_cast<unsigned>((of + by - 1) / by);
}

NormGrid grid_of(const NormArguments& a, int processors) {
  const int64_t vectors = a.channels / kNormVector;
  NormGrid grid{};
  // A warp along the channels reads whole lines; of fewer channels, whole rows.
  grid.blocks_x = quotient_up(vectors, 32);
  grid.threads_x = quotient_up(vectors, grid.blocks_x);
  grid.threads_y = kNormThreads / grid.threads_x;
  const int64_t busy = processors * kNormBlocks / grid.blocks_x;
  const int64_t useful = quotient_up(a.rows, grid.threads_y * kFewestNormRows);
  grid.blocks_y = static_cast<unsigned>(std::max<int64_t>(1, std::min(busy, useful)));
  return grid;
}

NormGrid finishing_grid(const NormArguments& a) {
  return {quotient_up(a.channels, kNormColumns), 1, kNormColumns, kNormThreads / kNormColumns};
}

NormArguments arguments_of(const at::Tensor& x, const at::Tensor& statistics) {
  NormArguments a{};
  a.channels = static_cast<int>(x.size(1));
  a.rows = x.numel() / a.channels;
  a.x = x.const_data_ptr();
  auto* floats = statistics.mutable_data_ptr<float>();
  a.mean = floats;
  a.inverse = floats + a.channels;
  a.slope = floats + 2 * a.channels;
  a.offset = floats + 3 * a.channels;
  return a;
}

at::Tensor floats_like(const at::Tensor& t, int64_t count) {
  return at::empty({count}, t.options().memory_format(std::nullopt).dtype(at::kFloat));
}

// Memory for the sums of the parts, while kernels read it: the allocator gives it to none but later ones.
at::Tensor room_for_sums(const at::Tensor& like, const NormGrid& grid, NormArguments& a) {
  a.parts = static_cast<int>(grid.blocks_y);
  const int64_t sums = int64_t(2) * a.parts * a.channels;
  auto room = floats_like(like, sums + a.parts);
  a.sums = room.mutable_data_ptr<float>();
  a.counts = a.sums + sums;
  return room;
}

std::string mode_of(bool shortcut, bool relu) {
  return shortcut ? "_shortcut" : relu ? "_relu" : "_plain";
}

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % (kNormVector * 2) == 0;
}

} // namespace

NormKernels* norm_kernels(const at::Tensor& x) {
#ifdef BRIGADE_CUDA
  return x.is_cuda() ? gpu_program(x.device().index(), x.scalar_type()) : nullptr;
#else
  return nullptr;
#endif
}

bool fits_norm_kernels(const at::Tensor& t) {
  const bool is_short = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
  return is_short && t.layout() == at::kStrided && t.dim() == 4 && t.numel() > 0 &&
      t.size(1) % kNormVector == 0 && t.size(1) <= INT32_MAX && !t.is_neg() &&
      t.is_contiguous(at::MemoryFormat::ChannelsLast) && is_aligned(t);
}

std::tuple<at::Tensor, at::Tensor> norm_relu_forward_gpu(
    NormKernels& kernels, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& running_mean,
    const at::Tensor& running_var, double momentum, double eps, bool relu) {
  auto statistics = floats_like(x, 4 * x.size(1)).view({4, x.size(1)});
  auto y = at::empty_like(x);
  auto a = arguments_of(x, statistics);
  a.shortcut = shortcut ? shortcut->const_data_ptr() : nullptr;
  a.y = y.mutable_data_ptr();
  a.weight = weight.const_data_ptr<float>();
  a.bias = bias.const_data_ptr<float>();
  a.running_mean = running_mean.mutable_data_ptr<float>();
  a.running_var = running_var.mutable_data_ptr<float>();
  a.momentum = static_cast<float>(momentum);
  a.eps = static_cast<float>(eps);
  const auto grid = grid_of(a, kernels.processors());
  const auto room = room_for_sums(x, grid, a);
  kernels.launch("statistics", grid, a);
  kernels.launch("finish_statistics", finishing_grid(a), a);
  kernels.launch("activate" + mode_of(shortcut.has_value(), relu), grid, a);
  return {y, statistics};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_relu_backward_gpu(
    NormKernels& kernels, const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& y,
    const at::Tensor& statistics, bool shortcut, bool relu, bool wants_x) {
  TORCH_CHECK(
      gradient.sizes() == x.sizes() && gradient.scalar_type() == x.scalar_type(),
      "a gradient of ", gradient.sizes(), " and ", gradient.scalar_type(), " for an output of ",
      x.sizes(), " and ", x.scalar_type());
  auto dy = gradient.contiguous(at::MemoryFormat::ChannelsLast);
  if (!is_aligned(dy)) {
    dy = dy.clone();
  }
  auto a = arguments_of(x, statistics);
  const auto dweight = floats_like(x, a.channels), dbias = floats_like(x, a.channels);
  const auto factors = floats_like(x, 2 * x.size(1));
  a.dweight = dweight.mutable_data_ptr<float>();
  a.dbias = dbias.mutable_data_ptr<float>();
  a.dx_slope = factors.mutable_data_ptr<float>();
  a.dx_offset = a.dx_slope + a.channels;
  a.dy = dy.const_data_ptr();
  at::Tensor through, dx;
  if (shortcut) {
    through = at::empty_like(x);
    a.y = const_cast<void*>(y.const_data_ptr());
    a.through = through.mutable_data_ptr();
  }
  const auto grid = grid_of(a, kernels.processors());
  const auto room = room_for_sums(x, grid, a);
  kernels.launch("gradient_sums" + mode_of(shortcut, relu), grid, a);
  kernels.launch("finish_gradients", finishing_grid(a), a);
  if (wants_x) {
    dx = at::empty_like(x);
    a.dx = dx.mutable_data_ptr();
    kernels.launch("gradient_rows" + mode_of(shortcut, relu), grid, a);
  }
  return {dx, dweight, dbias, through};
}

} // namespace brigade
