#include "norm_relu.h"

#include "norm_relu.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace brigade {

namespace {

// With fewer rows, what a thread does before its first and after its last one costs as much as they do.
constexpr int64_t kFewestNormRows = 4;
// Threads along the channels, of the kernels that finish sums.
constexpr unsigned kNormColumns = 32;

struct NormGrid {
  kernels::Extent blocks;
  kernels::Extent threads;
};

NormGrid grid_of(const NormArguments& a, int processors) {
  const int64_t vectors = a.channels / kNormVector;
  NormGrid grid{};
  // A warp along the channels reads whole lines; of fewer channels, whole rows.
  grid.blocks.x = kernels::quotient_up(vectors, 32);
  grid.threads.x = kernels::quotient_up(vectors, grid.blocks.x);
  grid.threads.y = kNormThreads / grid.threads.x;
  const int64_t busy = int64_t{processors} * kNormBlocks / grid.blocks.x;
  const int64_t useful = kernels::quotient_up(a.rows, grid.threads.y * kFewestNormRows);
  grid.blocks.y = static_cast<unsigned>(std::max<int64_t>(1, std::min(busy, useful)));
  return grid;
}

NormGrid finishing_grid(const NormArguments& a) {
  return {{kernels::quotient_up(a.channels, kNormColumns), 1}, {kNormColumns, kNormThreads / kNormColumns}};
}

void launch(
    kernels::Program& program, const std::string& kernel, const NormGrid& grid, const NormArguments& a) {
  program.launch(kernel, grid.blocks, grid.threads, /*shared=*/0, a);
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
  a.parts = static_cast<int>(grid.blocks.y);
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

kernels::Program* norm_kernels(const at::Tensor& x) {
  return kernels::program("norm_relu", x);
}

bool fits_norm_kernels(const at::Tensor& t) {
  const bool is_short = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
  return is_short && t.layout() == at::kStrided && t.dim() == 4 && t.numel() > 0 &&
      t.size(1) % kNormVector == 0 && t.size(1) <= INT32_MAX && !t.is_neg() &&
      t.is_contiguous(at::MemoryFormat::ChannelsLast) && is_aligned(t);
}

std::tuple<at::Tensor, at::Tensor> norm_relu_forward_gpu(
    kernels::Program& program, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
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
  const auto grid = grid_of(a, program.processors());
  const auto room = room_for_sums(x, grid, a);
  launch(program, "statistics", grid, a);
  launch(program, "finish_statistics", finishing_grid(a), a);
  launch(program, "activate" + mode_of(shortcut.has_value(), relu), grid, a);
  return {y, statistics};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_relu_backward_gpu(
    kernels::Program& program, const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& y,
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
  const auto grid = grid_of(a, program.processors());
  const auto room = room_for_sums(x, grid, a);
  launch(program, "gradient_sums" + mode_of(shortcut, relu), grid, a);
  launch(program, "finish_gradients", finishing_grid(a), a);
  if (wants_x) {
    dx = at::empty_like(x);
    a.dx = dx.mutable_data_ptr();
    launch(program, "gradient_rows" + mode_of(shortcut, relu), grid, a);
  }
  return {dx, dweight, dbias, through};
}

} // namespace brigade
