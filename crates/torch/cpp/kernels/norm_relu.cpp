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

// For passes over rows of channels: pixels, or pooled pixels.
NormGrid grid_of(const NormArguments& a, int64_t rows, int processors) {
  const int64_t vectors = a.channels / kNormVector;
  NormGrid grid{};
  // A warp along the channels reads whole lines; of fewer channels, whole rows.
  grid.blocks.x = kernels::quotient_up(vectors, 32);
  grid.threads.x = kernels::quotient_up(vectors, grid.blocks.x);
  grid.threads.y = kNormThreads / grid.threads.x;
  const int64_t busy = int64_t{processors} * kNormBlocks / grid.blocks.x;
  const int64_t useful = kernels::quotient_up(rows, grid.threads.y * kFewestNormRows);
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

// Ending of the kernels' names.
std::string mode_of(bool shortcut, NormEnd end) {
  switch (end) {
    case NormEnd::kNothing:
      return "_plain";
    case NormEnd::kRelu:
      return shortcut ? "_shortcut" : "_relu";
    case NormEnd::kReluAndMaxPool:
      return "_pool";
  }
  TORCH_INTERNAL_ASSERT(false);
}

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % (kNormVector * 2) == 0;
}

int64_t pooled(int64_t size) {
  return (size + 2 * kPoolPadding - kPoolWindow) / kPoolStride + 1;
}

// Describes the images of a pooled output.
void describe_pooling(NormArguments& a, const at::Tensor& x) {
  a.height = static_cast<int>(x.size(2));
  a.width = static_cast<int>(x.size(3));
  a.pooled_height = static_cast<int>(pooled(x.size(2)));
  a.pooled_width = static_cast<int>(pooled(x.size(3)));
  const auto images = static_cast<int>(x.size(0));
  a.pooled_rows = images * a.pooled_height * a.pooled_width;
  a.pairs = images * a.height * a.pooled_width;
}

at::Tensor bytes_like(const at::Tensor& t, at::IntArrayRef size) {
  return at::empty(size, t.options().memory_format(std::nullopt).dtype(at::kByte));
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

bool fits_norm_pooling(const at::Tensor& t) {
  // Pairs of pixels, of which there are more than pooled pixels, have 32-bit numbers.
  return t.size(0) <= INT32_MAX && t.size(2) <= INT32_MAX && t.size(3) <= INT32_MAX &&
      t.size(2) * pooled(t.size(3)) <= INT32_MAX / t.size(0);
}

PoolWindows norm_pool_windows() {
  return {{kPoolWindow, kPoolWindow}, {kPoolStride, kPoolStride}, {kPoolPadding, kPoolPadding}};
}

NormForward norm_relu_forward_gpu(
    kernels::Program& program, const at::Tensor& x, const std::optional<at::Tensor>& shortcut,
    const NormParameters& parameters, NormEnd end) {
  NormForward out;
  out.statistics = floats_like(x, 4 * x.size(1)).view({4, x.size(1)});
  auto a = arguments_of(x, out.statistics);
  int64_t rows = a.rows;
  if (end == NormEnd::kReluAndMaxPool) {
    describe_pooling(a, x);
    rows = a.pooled_rows;
    out.y = at::empty(
        {x.size(0), x.size(1), a.pooled_height, a.pooled_width},
        x.options().memory_format(at::MemoryFormat::ChannelsLast));
    out.kept = bytes_like(x, {x.size(0), a.pooled_height, a.pooled_width, x.size(1)});
    a.places = out.kept.mutable_data_ptr<uint8_t>();
  } else {
    out.y = at::empty_like(x);
  }
  if (shortcut) {
    out.kept = bytes_like(x, {x.size(0), x.size(2), x.size(3), x.size(1) / kNormVector});
    a.signs = out.kept.mutable_data_ptr<uint8_t>();
    a.shortcut = shortcut->const_data_ptr();
  }
  a.y = out.y.mutable_data_ptr();
  a.weight = parameters.weight.const_data_ptr<float>();
  a.bias = parameters.bias.const_data_ptr<float>();
  a.running_mean = parameters.running_mean.mutable_data_ptr<float>();
  a.running_var = parameters.running_var.mutable_data_ptr<float>();
  a.momentum = static_cast<float>(parameters.momentum);
  a.eps = static_cast<float>(parameters.eps);
  const auto grid = grid_of(a, a.rows, program.processors());
  const auto room = room_for_sums(x, grid, a);
  launch(program, "statistics", grid, a);
  launch(program, "finish_statistics", finishing_grid(a), a);
  const auto end_grid = grid_of(a, rows, program.processors());
  launch(program, "activate" + mode_of(shortcut.has_value(), end), end_grid, a);
  return out;
}

NormBackward norm_relu_backward_gpu(kernels::Program& program, const NormGradient& given, bool wants_x) {
  const auto& x = given.x;
  auto a = arguments_of(x, given.statistics);
  int64_t rows = a.rows;
  auto size = x.sizes().vec();
  if (given.end == NormEnd::kReluAndMaxPool) {
    describe_pooling(a, x);
    rows = a.pairs;
    size[2] = a.pooled_height;
    size[3] = a.pooled_width;
  }
  TORCH_CHECK(
      given.dy.sizes() == at::IntArrayRef(size) && given.dy.scalar_type() == x.scalar_type(),
      "a gradient of ", given.dy.sizes(), " and ", given.dy.scalar_type(), " for an output of ",
      at::IntArrayRef(size), " and ", x.scalar_type());
  auto dy = given.dy.contiguous(at::MemoryFormat::ChannelsLast);
  if (!is_aligned(dy)) {
    dy = dy.clone();
  }
  NormBackward out;
  out.weight = floats_like(x, a.channels);
  out.bias = floats_like(x, a.channels);
  const auto factors = floats_like(x, 2 * x.size(1));
  a.dweight = out.weight.mutable_data_ptr<float>();
  a.dbias = out.bias.mutable_data_ptr<float>();
  a.dx_slope = factors.mutable_data_ptr<float>();
  a.dx_offset = a.dx_slope + a.channels;
  a.dy = dy.const_data_ptr();
  const auto mode = mode_of(given.shortcut, given.end);
  bool two_uses = false;
  if (given.end == NormEnd::kReluAndMaxPool) {
    a.places = given.kept.mutable_data_ptr<uint8_t>();
  } else if (given.shortcut) {
    a.signs = given.kept.mutable_data_ptr<uint8_t>();
    out.shortcut = at::empty_like(x);
    a.through = out.shortcut.mutable_data_ptr();
    two_uses = given.second.defined();
    a.dy2 = two_uses ? given.second.const_data_ptr() : nullptr;
  }
  const auto grid = grid_of(a, rows, program.processors());
  const auto room = room_for_sums(x, grid, a);
  launch(program, "gradient_sums" + (two_uses ? "_two_uses" : mode), grid, a);
  launch(program, "finish_gradients", finishing_grid(a), a);
  if (wants_x) {
    out.x = at::empty_like(x);
    a.dx = out.x.mutable_data_ptr();
    launch(program, "gradient_rows" + mode, grid, a);
  }
  return out;
}

at::Tensor unpacked_signs(const at::Tensor& signs) {
  const auto places = at::arange(kNormVector, signs.options());
  const auto bits = at::bitwise_left_shift(at::ones_like(places), places);
  return at::bitwise_and(signs.unsqueeze(-1), bits).ne(0).flatten(-2).permute({0, 3, 1, 2});
}

} // namespace brigade
