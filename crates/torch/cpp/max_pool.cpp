#include "brigade-torch/src/bridge.rs.h"

#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Pair = std::array<int64_t, 2>;

// A place in a window is kept in a byte, where libtorch keeps a place in the image in eight.
constexpr int64_t kMostPlaces = 256;
// Channels that are looked at together: what is kept of them stays in the first-level cache.
constexpr int64_t kTile = 64;
// Values of a parallel task, at least.
constexpr int64_t kGrain = 32768;

struct Windows {
  Pair kernel, stride, padding;
  int64_t images, channels;
  Pair input, output;

  Windows(const at::Tensor& x, const Pair& kernel, const Pair& stride, const Pair& padding)
      : kernel(kernel),
        stride(stride),
        padding(padding),
        images(x.size(0)),
        channels(x.size(1)),
        input{x.size(2), x.size(3)},
        output{outputs(0), outputs(1)} {}

  int64_t outputs(int axis) const {
    return (input[axis] + 2 * padding[axis] - kernel[axis]) / stride[axis] + 1;
  }

  // Values of an image, and of a row of it.
  int64_t of_image(const Pair& size) const {
    return size[0] * of_row(size);
  }
  int64_t of_row(const Pair& size) const {
    return size[1] * channels;
  }

  // Calls it with the image, its row, and where the row begins among all values: for each row of all images
  // of this size.
  template <typename F>
  void each_row(const Pair& size, const F& run) const {
    const int64_t grain = std::max<int64_t>(1, kGrain / of_row(size));
    at::parallel_for(0, images * size[0], grain, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        run(at / size[0], at % size[0], at * of_row(size));
      }
    });
  }

  // Rows of the output that a row of the input is in, or columns: from the first to before the last.
  std::pair<int64_t, int64_t> around(int axis, int64_t at) const {
    const int64_t last = (at + padding[axis]) / stride[axis];
    const int64_t before = at + padding[axis] - kernel[axis];
    const int64_t first = before < 0 ? 0 : before / stride[axis] + 1;
    return {first, std::min(last + 1, output[axis])};
  }

  // Rows of the input that a row of the output looks at, or columns.
  std::pair<int64_t, int64_t> inside(int axis, int64_t at) const {
    const int64_t begin = at * stride[axis] - padding[axis];
    return {std::max<int64_t>(begin, 0), std::min(begin + kernel[axis], input[axis])};
  }

  int64_t place(Pair input_at, Pair output_at) const {
    const int64_t row = input_at[0] + padding[0] - output_at[0] * stride[0];
    const int64_t column = input_at[1] + padding[1] - output_at[1] * stride[1];
    return row * kernel[1] + column;
  }
};

// One row of the output. Of equal values the first is taken, and of NaNs the last, as libtorch does.
template <typename T>
BRIGADE_EVERY_CPU void pool_row(
    const Windows& windows, const T* __restrict image, int64_t row, T* __restrict y,
    uint8_t* __restrict places) {
  const int64_t channels = windows.channels;
  const auto rows = windows.inside(0, row);
  for (int64_t column = 0; column < windows.output[1]; ++column) {
    const auto columns = windows.inside(1, column);
    for (int64_t from = 0; from < channels; from += kTile) {
      const int64_t count = std::min(kTile, channels - from);
      float best[kTile];
      int32_t found[kTile];
      const auto first = windows.place({rows.first, columns.first}, {row, column});
      for (int64_t c = 0; c < count; ++c) {
        best[c] = -std::numeric_limits<float>::infinity();
        found[c] = static_cast<int32_t>(first);
      }
      for (int64_t h = rows.first; h < rows.second; ++h) {
        for (int64_t w = columns.first; w < columns.second; ++w) {
          const auto place = static_cast<int32_t>(windows.place({h, w}, {row, column}));
          const T* x = image + (h * windows.input[1] + w) * channels + from;
          for (int64_t c = 0; c < count; ++c) {
            const float value = wide(x[c]);
            const bool is_better = (value > best[c]) | (value != value);
            best[c] = is_better ? value : best[c];
            found[c] = is_better ? place : found[c];
          }
        }
      }
      T* to = y + column * channels + from;
      for (int64_t c = 0; c < count; ++c) {
        to[c] = static_cast<T>(best[c]);
      }
      if (places != nullptr) {
        uint8_t* kept = places + column * channels + from;
        for (int64_t c = 0; c < count; ++c) {
          kept[c] = static_cast<uint8_t>(found[c]);
        }
      }
    }
  }
}

// One row of the input's gradient: the sum over the windows that a value is the largest of, in their order.
template <typename T>
BRIGADE_EVERY_CPU void gradient_row(
    const Windows& windows, const T* __restrict dy, const uint8_t* __restrict places, int64_t row,
    T* __restrict dx) {
  const int64_t channels = windows.channels;
  const auto rows = windows.around(0, row);
  for (int64_t column = 0; column < windows.input[1]; ++column) {
    const auto columns = windows.around(1, column);
    for (int64_t from = 0; from < channels; from += kTile) {
      const int64_t count = std::min(kTile, channels - from);
      float sum[kTile] = {};
      for (int64_t h = rows.first; h < rows.second; ++h) {
        for (int64_t w = columns.first; w < columns.second; ++w) {
          const auto place = static_cast<uint8_t>(windows.place({row, column}, {h, w}));
          const int64_t at = (h * windows.output[1] + w) * channels + from;
          for (int64_t c = 0; c < count; ++c) {
            const float gradient = wide(dy[at + c]);
            sum[c] += places[at + c] == place ? gradient : 0.0f;
          }
        }
      }
      T* to = dx + column * channels + from;
      for (int64_t c = 0; c < count; ++c) {
        to[c] = static_cast<T>(sum[c]);
      }
    }
  }
}

at::Tensor by_libtorch(
    const at::Tensor& x, const Pair& kernel, const Pair& stride, const Pair& padding) {
  return at::max_pool2d(x, kernel, stride, padding, /*dilation=*/1, /*ceil_mode=*/false);
}

template <typename T>
struct MaxPool : public torch::autograd::Function<MaxPool<T>> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& x, const Pair& kernel, const Pair& stride,
      const Pair& padding) {
    RECORD_FUNCTION("brigade::max_pool2d", {});
    const Windows windows(x, kernel, stride, padding);
    const auto in_rows = x.options().memory_format(at::MemoryFormat::ChannelsLast);
    auto y = at::empty(
        {windows.images, windows.channels, windows.output[0], windows.output[1]}, in_rows);
    // Nothing asks for the places where no gradient flows.
    const auto places =
        x.requires_grad() ? at::empty_like(y, in_rows.dtype(at::kByte)) : at::Tensor();
    const T* from = x.const_data_ptr<T>();
    T* to = y.template mutable_data_ptr<T>();
    uint8_t* kept = places.defined() ? places.template mutable_data_ptr<uint8_t>() : nullptr;
    windows.each_row(windows.output, [&](int64_t image, int64_t row, int64_t at) {
      pool_row(
          windows, from + image * windows.of_image(windows.input), row, to + at,
          kept == nullptr ? nullptr : kept + at);
    });
    context->save_for_backward({x, places});
    context->saved_data["kernel"] = std::vector<int64_t>(kernel.begin(), kernel.end());
    context->saved_data["stride"] = std::vector<int64_t>(stride.begin(), stride.end());
    context->saved_data["padding"] = std::vector<int64_t>(padding.begin(), padding.end());
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::max_pool2d_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &places = saved[1];
    const auto pair = [&](const char* name) {
      const auto values = context->saved_data[name].toIntVector();
      return Pair{values[0], values[1]};
    };
    const Windows windows(x, pair("kernel"), pair("stride"), pair("padding"));
    variable_list out(4);
    if (at::GradMode::is_enabled()) {
      // For gradients of gradients: the same from libtorch's operations, which are recorded.
      const auto y = by_libtorch(x, windows.kernel, windows.stride, windows.padding);
      out[0] = torch::autograd::grad(
          {y}, {x}, {gradients[0]}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      return out;
    }
    const auto dy = gradients[0].contiguous(at::MemoryFormat::ChannelsLast);
    out[0] = at::empty_like(x);
    const T* from = dy.template const_data_ptr<T>();
    const uint8_t* kept = places.template const_data_ptr<uint8_t>();
    T* to = out[0].template mutable_data_ptr<T>();
    windows.each_row(windows.input, [&](int64_t image, int64_t row, int64_t at) {
      const int64_t begin = image * windows.of_image(windows.output);
      gradient_row(windows, from + begin, kept + begin, row, to + at);
    });
    return out;
  }
};

// Everything else is libtorch's, with its messages for what is wrong.
bool has_loops(const at::Tensor& x, const Pair& kernel, const Pair& stride, const Pair& padding) {
  if (!lies_in_rows(x) || x.numel() == 0) {
    return false;
  }
  for (const int axis : {0, 1}) {
    const int64_t size = x.size(2 + axis);
    // Small numbers, so that nothing overflows below.
    if (kernel[axis] < 1 || kernel[axis] > kMostPlaces || stride[axis] < 1 || padding[axis] < 0 ||
        padding[axis] > kernel[axis] / 2 || size + 2 * padding[axis] < kernel[axis]) {
      return false;
    }
  }
  return kernel[0] * kernel[1] <= kMostPlaces;
}

} // namespace

std::unique_ptr<Tensor> max_pool2d(
    const Tensor& input, const Pair& kernel, const Pair& stride, const Pair& padding) {
  const auto& x = input;
  if (!has_loops(x, kernel, stride, padding)) {
    return std::make_unique<Tensor>(by_libtorch(x, kernel, stride, padding));
  }
  return std::make_unique<Tensor>(
      x.scalar_type() == at::kFloat ? MaxPool<float>::apply(x, kernel, stride, padding)
                                    : MaxPool<at::BFloat16>::apply(x, kernel, stride, padding));
}

} // namespace brigade
