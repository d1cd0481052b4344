#include "brigade-torch/src/bridge.rs.h"

#include "kernels/norm_relu.h"
#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements of a parallel task: three inputs of it fit the second-level cache. Sums are made task by task
// and added up in their order, so that they do not depend on the number of threads.
constexpr int64_t kNormBlock = 16384;

// Loops over a block of channels_last rows, each of `channels` values of type T, float or bfloat16.
// Statistics, parameters and everything in between are float.

// Mean and sum of squared deviations of each channel: two passes, the second one in the cache.
template <typename T>
BRIGADE_EVERY_CPU void row_statistics(
    const T* __restrict x, int64_t rows, int64_t channels, float* __restrict mean,
    float* __restrict squares) {
  std::fill(mean, mean + channels, 0.0f);
  std::fill(squares, squares + channels, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      mean[c] += wide(from[c]);
    }
  }
  for (int64_t c = 0; c < channels; ++c) {
    mean[c] /= static_cast<float>(rows);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float deviation = wide(from[c]) - mean[c];
      squares[c] += deviation * deviation;
    }
  }
}

// NaN stays NaN, as in libtorch's relu.
template <typename T>
BRIGADE_EVERY_CPU void activate_rows(
    const T* __restrict x, const T* __restrict shortcut, const float* __restrict slope,
    const float* __restrict offset, int64_t rows, int64_t channels, T* __restrict y) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    if (shortcut != nullptr) {
      for (int64_t c = 0; c < channels; ++c) {
        const float value = wide(x[at + c]) * slope[c] + offset[c] + wide(shortcut[at + c]);
        y[at + c] = static_cast<T>(value < 0 ? 0 : value);
      }
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        const float value = wide(x[at + c]) * slope[c] + offset[c];
        y[at + c] = static_cast<T>(value < 0 ? 0 : value);
      }
    }
  }
}

// What ReLU lets through of the gradient, kept for the shortcut and the second pass, and its sums.
template <typename T>
BRIGADE_EVERY_CPU void shortcut_gradient_sums(
    const T* __restrict dy, const T* __restrict y, const T* __restrict x,
    const float* __restrict mean, int64_t rows, int64_t channels, T* __restrict through,
    float* __restrict sum, float* __restrict product) {
  std::fill(sum, sum + channels, 0.0f);
  std::fill(product, product + channels, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float gradient = wide(y[at + c]) <= 0 ? 0 : wide(dy[at + c]);
      through[at + c] = static_cast<T>(gradient);
      sum[c] += gradient;
      product[c] += gradient * (wide(x[at + c]) - mean[c]);
    }
  }
}

// Of what the pass above has kept.
template <typename T>
BRIGADE_EVERY_CPU void shortcut_gradient_rows(
    const T* __restrict through, const T* __restrict x, const float* __restrict mean,
    const float* __restrict scale, const float* __restrict slope, const float* __restrict offset,
    int64_t rows, int64_t channels, T* __restrict dx) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float apart = wide(x[at + c]) - mean[c];
      dx[at + c] =
          static_cast<T>((wide(through[at + c]) - offset[c] - apart * slope[c]) * scale[c]);
    }
  }
}

// Without a shortcut the output follows from the input, as `activate_rows` made it: one tensor less to
// read, twice.
template <typename T>
BRIGADE_EVERY_CPU void gradient_sums(
    const T* __restrict dy, const T* __restrict x, const float* __restrict mean,
    const float* __restrict y_slope, const float* __restrict y_offset, int64_t rows,
    int64_t channels, float* __restrict sum, float* __restrict product) {
  std::fill(sum, sum + channels, 0.0f);
  std::fill(product, product + channels, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float value = wide(x[at + c]) * y_slope[c] + y_offset[c];
      const float gradient = value <= 0 ? 0 : wide(dy[at + c]);
      sum[c] += gradient;
      product[c] += gradient * (wide(x[at + c]) - mean[c]);
    }
  }
}

template <typename T>
BRIGADE_EVERY_CPU void gradient_rows(
    const T* __restrict dy, const T* __restrict x, const float* __restrict mean,
    const float* __restrict y_slope, const float* __restrict y_offset,
    const float* __restrict scale, const float* __restrict slope, const float* __restrict offset,
    int64_t rows, int64_t channels, T* __restrict dx) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * channels;
    for (int64_t c = 0; c < channels; ++c) {
      const float value = wide(x[at + c]) * y_slope[c] + y_offset[c];
      const float gradient = value <= 0 ? 0 : wide(dy[at + c]);
      const float apart = wide(x[at + c]) - mean[c];
      dx[at + c] = static_cast<T>((gradient - offset[c] - apart * slope[c]) * scale[c]);
    }
  }
}

struct RowBlocks {
  int64_t rows;
  int64_t channels;
  int64_t rows_of_block;
  int64_t blocks;

  explicit RowBlocks(const at::Tensor& x)
      : rows(x.numel() / x.size(1)),
        channels(x.size(1)),
        rows_of_block(std::max<int64_t>(1, kNormBlock / channels)),
        blocks((rows + rows_of_block - 1) / rows_of_block) {}

  int64_t rows_in(int64_t block) const {
    return std::min(rows_of_block, rows - block * rows_of_block);
  }

  // What each block has of each channel: block after block, so that memory is read as it lies.
  template <typename F>
  void in_order(const F& add, const std::vector<float>& parts) const {
    for (int64_t block = 0; block < blocks; ++block) {
      const auto rows_here = static_cast<double>(rows_in(block));
      for (int64_t c = 0; c < channels; ++c) {
        add(rows_here, &parts[block * channels], c);
      }
    }
  }

  template <typename F>
  void each_block(const F& run) const {
    at::parallel_for(0, blocks, 2, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        run(block, block * rows_of_block * channels, rows_in(block));
      }
    });
  }
};

bool is_vector(const at::Tensor& t, const at::Tensor& x) {
  return t.defined() && t.device() == x.device() && t.scalar_type() == at::kFloat && t.dim() == 1 &&
      t.size(0) == x.size(1) && t.is_contiguous() && !t.is_neg();
}

// Of another tensor, so that the same loops read both.
bool lies_as(const at::Tensor& t, const at::Tensor& x) {
  return t.scalar_type() == x.scalar_type() && t.device() == x.device() && t.sizes() == x.sizes() &&
      (x.is_cpu() ? lies_in_rows(t) : fits_norm_kernels(t));
}

// The gradients of a batch normalisation's input, weight and bias, the context's first three inputs, from libtorch's
// operations, which are recorded.
void recorded_gradients(
    AutogradContext* context, const variable_list& candidates, const at::Tensor& dy, variable_list& out) {
  variable_list inputs;
  std::vector<size_t> places;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (context->needs_input_grad(i) && candidates[i].requires_grad()) {
      inputs.push_back(candidates[i]);
      places.push_back(i);
    }
  }
  if (inputs.empty()) {
    return;
  }
  const auto normal = at::batch_norm(
      candidates[0], candidates[1], candidates[2], {}, {}, /*training=*/true, 0.0,
      context->saved_data["eps"].toDouble(), /*cudnn_enabled=*/true);
  const auto found = torch::autograd::grad(
      {normal}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0; i < places.size(); ++i) {
    out[places[i]] = found[i];
  }
}

using Forward = std::tuple<at::Tensor, at::Tensor>;
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename T>
Forward forward_rows(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const std::optional<at::Tensor>& shortcut,
    const at::Tensor& running_mean_tensor, const at::Tensor& running_var_tensor, double momentum, double eps) {
  const RowBlocks all(x);
  const auto channels = all.channels;
  const T* from = x.const_data_ptr<T>();
  std::vector<float> means(all.blocks * channels), squares(all.blocks * channels);
  all.each_block([&](int64_t block, int64_t at, int64_t rows) {
    row_statistics(from + at, rows, channels, &means[block * channels], &squares[block * channels]);
  });

  auto statistics = at::empty({4, channels}, weight.options().memory_format(std::nullopt));
  float* mean_out = statistics.mutable_data_ptr<float>();
  float* inverse_out = mean_out + channels;
  float* slope = mean_out + 2 * channels;
  float* offset = mean_out + 3 * channels;
  float* running_mean = running_mean_tensor.mutable_data_ptr<float>();
  float* running_var = running_var_tensor.mutable_data_ptr<float>();
  const float* weights = weight.const_data_ptr<float>();
  const float* biases = bias.const_data_ptr<float>();
  const auto count = static_cast<double>(all.rows);
  std::vector<double> middles(channels), spreads(channels);
  all.in_order([&](double rows, const float* of_block, int64_t c) {
    middles[c] += of_block[c] * rows;
  }, means);
  for (auto& middle : middles) {
    middle /= count;
  }
  all.in_order([&](double rows, const float* of_block, int64_t c) {
    const double apart = of_block[c] - middles[c];
    spreads[c] += apart * apart * rows;
  }, means);
  all.in_order([&](double, const float* of_block, int64_t c) {
    spreads[c] += of_block[c];
  }, squares);
  for (int64_t c = 0; c < channels; ++c) {
    const double middle = middles[c], spread = spreads[c];
    const double invert = 1 / std::sqrt(spread / count + eps);
    mean_out[c] = static_cast<float>(middle);
    inverse_out[c] = static_cast<float>(invert);
    slope[c] = static_cast<float>(weights[c] * invert);
    // With the slope as it was rounded: else its error, times the mean, would stay.
    offset[c] = static_cast<float>(biases[c] - middle * slope[c]);
    running_mean[c] = static_cast<float>((1 - momentum) * running_mean[c] + momentum * middle);
    running_var[c] = static_cast<float>(
        (1 - momentum) * running_var[c] + momentum * spread / (count - 1));
  }

  auto y = at::empty_like(x);
  T* to = y.mutable_data_ptr<T>();
  const T* beside = shortcut ? shortcut->const_data_ptr<T>() : nullptr;
  all.each_block([&](int64_t, int64_t at, int64_t rows) {
    activate_rows(
        from + at, beside == nullptr ? nullptr : beside + at, slope, offset, rows, channels,
        to + at);
  });
  return {y, statistics};
}

template <typename T>
Backward backward_rows(
    const at::Tensor& gradients, const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight,
    const at::Tensor& statistics, bool shortcut, bool wants_x) {
  const auto dy = gradients.contiguous(at::MemoryFormat::ChannelsLast);
  const RowBlocks all(x);
  const auto channels = all.channels;
  const T* gradient = dy.const_data_ptr<T>();
  const T* inputs = x.const_data_ptr<T>();
  const T* outputs = y.const_data_ptr<T>();
  const float* mean = statistics.const_data_ptr<float>();
  const float* inverse = mean + channels;
  const float* y_slope = mean + 2 * channels;
  const float* y_offset = mean + 3 * channels;
  const float* weights = weight.const_data_ptr<float>();
  const auto let_through = shortcut ? at::empty_like(y) : at::Tensor();
  T* through = shortcut ? let_through.mutable_data_ptr<T>() : nullptr;
  std::vector<float> sums(all.blocks * channels), products(all.blocks * channels);
  all.each_block([&](int64_t block, int64_t at, int64_t rows) {
    float* sum = &sums[block * channels];
    float* product = &products[block * channels];
    if (shortcut) {
      shortcut_gradient_sums(
          gradient + at, outputs + at, inputs + at, mean, rows, channels, through + at, sum, product);
    } else {
      gradient_sums(
          gradient + at, inputs + at, mean, y_slope, y_offset, rows, channels, sum, product);
    }
  });

  auto dweight = at::empty_like(weight), dbias = at::empty_like(weight);
  float* of_weight = dweight.mutable_data_ptr<float>();
  float* of_bias = dbias.mutable_data_ptr<float>();
  std::vector<float> scale(channels), slope(channels), offset(channels);
  const auto count = static_cast<double>(all.rows);
  std::vector<double> whole_sums(channels), whole_products(channels);
  all.in_order([&](double, const float* of_block, int64_t c) {
    whole_sums[c] += of_block[c];
  }, sums);
  all.in_order([&](double, const float* of_block, int64_t c) {
    whole_products[c] += of_block[c];
  }, products);
  for (int64_t c = 0; c < channels; ++c) {
    const double sum = whole_sums[c], product = whole_products[c];
    const double invert = inverse[c];
    of_weight[c] = static_cast<float>(product * invert);
    of_bias[c] = static_cast<float>(sum);
    scale[c] = static_cast<float>(weights[c] * invert);
    slope[c] = static_cast<float>(product * invert * invert / count);
    offset[c] = static_cast<float>(sum / count);
  }
  at::Tensor dx_tensor;
  if (wants_x) {
    dx_tensor = at::empty_like(x);
    T* dx = dx_tensor.mutable_data_ptr<T>();
    all.each_block([&](int64_t, int64_t at, int64_t rows) {
      if (shortcut) {
        shortcut_gradient_rows(
            through + at, inputs + at, mean, scale.data(), slope.data(), offset.data(), rows,
            channels, dx + at);
      } else {
        gradient_rows(
            gradient + at, inputs + at, mean, y_slope, y_offset, scale.data(), slope.data(),
            offset.data(), rows, channels, dx + at);
      }
    });
  }
  return {dx_tensor, dweight, dbias, let_through};
}

struct NormRelu : public torch::autograd::Function<NormRelu> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& x,
      const at::Tensor& weight,
      const at::Tensor& bias,
      const std::optional<at::Tensor>& shortcut,
      const at::Tensor& running_mean,
      const at::Tensor& running_var,
      double momentum,
      double eps,
      bool relu) {
    RECORD_FUNCTION("brigade::batch_norm_relu", {});
    at::Tensor y, statistics;
    if (auto* kernels = norm_kernels(x)) {
      std::tie(y, statistics) = norm_relu_forward_gpu(
          *kernels, x, shortcut, weight, bias, running_mean, running_var, momentum, eps, relu);
    } else {
      const auto rows =
          x.scalar_type() == at::kFloat ? &forward_rows<float> : &forward_rows<at::BFloat16>;
      std::tie(y, statistics) =
          rows(x, weight, bias, shortcut, running_mean, running_var, momentum, eps);
    }
    running_mean.unsafeGetTensorImpl()->bump_version();
    running_var.unsafeGetTensorImpl()->bump_version();
    // Without ReLU nothing needs the output.
    context->save_for_backward({x, relu ? y : at::Tensor(), weight, bias, statistics});
    context->saved_data["shortcut"] = shortcut.has_value();
    context->saved_data["relu"] = relu;
    context->saved_data["eps"] = eps;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::batch_norm_relu_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &y = saved[1], &weight = saved[2], &statistics = saved[4];
    const bool shortcut = context->saved_data["shortcut"].toBool();
    const bool relu = context->saved_data["relu"].toBool();
    const bool wants_x = context->needs_input_grad(0);
    const bool wants_shortcut = shortcut && context->needs_input_grad(3);
    variable_list out(9);
    if (at::GradMode::is_enabled()) {
      // For gradients of gradients: the same from libtorch's operations, which are recorded.
      const auto through = relu ? at::threshold_backward(gradients[0], y, 0) : gradients[0];
      if (wants_shortcut) {
        out[3] = through;
      }
      recorded_gradients(context, {x, weight, saved[3]}, through, out);
      return out;
    }
    at::Tensor through;
    if (auto* kernels = norm_kernels(x)) {
      std::tie(out[0], out[1], out[2], through) = norm_relu_backward_gpu(
          *kernels, gradients[0], x, y, statistics, shortcut, relu, wants_x);
    } else {
      const auto rows =
          x.scalar_type() == at::kFloat ? &backward_rows<float> : &backward_rows<at::BFloat16>;
      std::tie(out[0], out[1], out[2], through) =
          rows(gradients[0], x, y, weight, statistics, shortcut, wants_x);
    }
    if (wants_shortcut) {
      out[3] = through;
    }
    return out;
  }
};

// On the CPU without ReLU libtorch's is as fast.
bool is_one_pass(const at::Tensor& x, bool relu) {
  return x.is_cpu() ? relu && lies_in_rows(x) : fits_norm_kernels(x) && norm_kernels(x) != nullptr;
}

} // namespace

std::unique_ptr<Tensor> batch_norm_relu(
    const Tensor& input,
    rust::Slice<const TensorRef> shortcut,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    bool training,
    double momentum,
    double eps,
    bool relu) {
  const auto& x = input;
  const auto is_mine = [&](rust::Slice<const TensorRef> t) {
    return !t.empty() && is_vector(t[0].tensor, x);
  };
  const bool one_pass = training && is_one_pass(x, relu) && x.numel() > x.size(1) &&
      is_mine(weight) && is_mine(bias) && is_mine(running_mean) && is_mine(running_var) &&
      (shortcut.empty() || lies_as(shortcut[0].tensor, x));
  if (one_pass) {
    return std::make_unique<Tensor>(NormRelu::apply(
        x, weight[0].tensor, bias[0].tensor, optional_handle(shortcut), running_mean[0].tensor,
        running_var[0].tensor, momentum, eps, relu));
  }
  auto y = at::batch_norm(
      x, optional_handle(weight), optional_handle(bias), optional_handle(running_mean), optional_handle(running_var), training,
      momentum, eps, /*cudnn_enabled=*/true);
  if (!relu) {
    return std::make_unique<Tensor>(std::move(y));
  }
  // In place: nothing else holds y, and the normalisation's backward does not look at it.
  if (!shortcut.empty()) {
    y.add_(shortcut[0].tensor);
  }
  return std::make_unique<Tensor>(y.relu_());
}

} // namespace brigade
