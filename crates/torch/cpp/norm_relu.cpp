#include "brigade-torch/src/bridge.rs.h"

#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
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

struct Running {
  at::Tensor mean;
  at::Tensor variance;
  double momentum;
  double eps;
};

bool is_vector(const at::Tensor& t, const at::Tensor& x) {
  return t.defined() && t.device() == x.device() && t.scalar_type() == at::kFloat && t.dim() == 1 &&
      t.size(0) == x.size(1) && t.is_contiguous() && !t.is_neg();
}

// For gradients of gradients: those of a batch normalisation's input, weight and bias, the context's first three inputs,
// from libtorch's operations, which are recorded.
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

template <typename T>
struct NormRelu : public torch::autograd::Function<NormRelu<T>> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& x,
      const at::Tensor& weight,
      const at::Tensor& bias,
      const std::optional<at::Tensor>& shortcut,
      const Running& running) {
    RECORD_FUNCTION("brigade::batch_norm_relu", {});
    const RowBlocks all(x);
    const auto channels = all.channels;
    const T* from = x.const_data_ptr<T>();
    std::vector<float> means(all.blocks * channels), squares(all.blocks * channels);
    all.each_block([&](int64_t block, int64_t at, int64_t rows) {
      row_statistics(
          from + at, rows, channels, &means[block * channels], &squares[block * channels]);
    });

    auto mean = at::empty({channels}, weight.options().memory_format(std::nullopt));
    auto inverse = at::empty_like(mean);
    auto slopes = at::empty_like(mean);
    auto offsets = at::empty_like(mean);
    float* slope = slopes.mutable_data_ptr<float>();
    float* offset = offsets.mutable_data_ptr<float>();
    float* mean_out = mean.mutable_data_ptr<float>();
    float* inverse_out = inverse.mutable_data_ptr<float>();
    float* running_mean = running.mean.mutable_data_ptr<float>();
    float* running_var = running.variance.mutable_data_ptr<float>();
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
      const double invert = 1 / std::sqrt(spread / count + running.eps);
      mean_out[c] = static_cast<float>(middle);
      inverse_out[c] = static_cast<float>(invert);
      slope[c] = static_cast<float>(weights[c] * invert);
      // With the slope as it was rounded: else its error, times the mean, would stay.
      offset[c] = static_cast<float>(biases[c] - middle * slope[c]);
      const double momentum = running.momentum;
      running_mean[c] =
          static_cast<float>((1 - momentum) * running_mean[c] + momentum * middle);
      running_var[c] = static_cast<float>(
          (1 - momentum) * running_var[c] + momentum * spread / (count - 1));
    }
    running.mean.unsafeGetTensorImpl()->bump_version();
    running.variance.unsafeGetTensorImpl()->bump_version();

    auto y = at::empty_like(x);
    T* to = y.mutable_data_ptr<T>();
    const T* beside = shortcut ? shortcut->const_data_ptr<T>() : nullptr;
    all.each_block([&](int64_t, int64_t at, int64_t rows) {
      activate_rows(
          from + at, beside == nullptr ? nullptr : beside + at, slope, offset, rows, channels,
          to + at);
    });
    context->save_for_backward({x, y, weight, bias, mean, inverse, slopes, offsets});
    context->saved_data["shortcut"] = shortcut.has_value();
    context->saved_data["eps"] = running.eps;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::batch_norm_relu_backward", {});
    const auto saved = context->get_saved_variables();
    const bool has_shortcut = context->saved_data["shortcut"].toBool();
    const bool wants_shortcut = has_shortcut && context->needs_input_grad(3);
    variable_list out(5);
    if (at::GradMode::is_enabled()) {
      differentiable(context, saved, gradients[0], wants_shortcut, out);
      return out;
    }
    const auto &x = saved[0], &y = saved[1];
    const auto dy = gradients[0].contiguous(at::MemoryFormat::ChannelsLast);
    const RowBlocks all(x);
    const auto channels = all.channels;
    const T* gradient = dy.const_data_ptr<T>();
    const T* inputs = x.const_data_ptr<T>();
    const T* outputs = y.const_data_ptr<T>();
    const float* mean = saved[4].const_data_ptr<float>();
    const float* inverse = saved[5].const_data_ptr<float>();
    const float* weights = saved[2].const_data_ptr<float>();
    const float* y_slope = saved[6].const_data_ptr<float>();
    const float* y_offset = saved[7].const_data_ptr<float>();
    const auto let_through = has_shortcut ? at::empty_like(y) : at::Tensor();
    T* through = has_shortcut ? let_through.mutable_data_ptr<T>() : nullptr;
    if (wants_shortcut) {
      out[3] = let_through;
    }
    std::vector<float> sums(all.blocks * channels), products(all.blocks * channels);
    all.each_block([&](int64_t block, int64_t at, int64_t rows) {
      float* sum = &sums[block * channels];
      float* product = &products[block * channels];
      if (has_shortcut) {
        shortcut_gradient_sums(
            gradient + at, outputs + at, inputs + at, mean, rows, channels, through + at, sum,
            product);
      } else {
        gradient_sums(
            gradient + at, inputs + at, mean, y_slope, y_offset, rows, channels, sum, product);
      }
    });

    out[1] = at::empty_like(saved[2]);
    out[2] = at::empty_like(saved[3]);
    float* of_weight = out[1].mutable_data_ptr<float>();
    float* of_bias = out[2].mutable_data_ptr<float>();
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
    if (context->needs_input_grad(0)) {
      out[0] = at::empty_like(x);
      T* dx = out[0].mutable_data_ptr<T>();
      all.each_block([&](int64_t, int64_t at, int64_t rows) {
        if (has_shortcut) {
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
    return out;
  }

 private:
  // For gradients of gradients: the same from libtorch's operations, which are recorded.
  static void differentiable(
      AutogradContext* context, const variable_list& saved, const at::Tensor& dy,
      bool wants_shortcut, variable_list& out) {
    const auto through = at::threshold_backward(dy, saved[1], 0);
    if (wants_shortcut) {
      out[3] = through;
    }
    recorded_gradients(context, {saved[0], saved[2], saved[3]}, through, out);
  }
};

// On a GPU, of 16-bit images in channels_last: statistics from the sums of the values and of their squares, two
// reductions that run as fast as memory is read. libtorch's kernel updates a mean and a deviation value by value, which
// takes twice as long, and a sixth of ResNet-50's step. What the subtraction of the squares loses of float32 is less
// than what 16 bits have lost of the values: theirs are 2^-9 or 2^-12 of the mean, and float32's 2^-24 of its square.
struct ShortNorm : public torch::autograd::Function<ShortNorm> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& x,
      const at::Tensor& weight,
      const at::Tensor& bias,
      const Running& running) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    constexpr std::array<int64_t, 3> kPixels{0, 2, 3};
    const auto count = static_cast<double>(x.numel() / x.size(1));
    const auto mean = at::sum(x, kPixels, /*keepdim=*/false, at::kFloat).div_(count);
    const auto length = at::linalg_vector_norm(x, 2, kPixels, /*keepdim=*/false, at::kFloat);
    const auto variance = length.square().div_(count).sub_(mean.square()).clamp_min_(0);
    running.mean.lerp_(mean, running.momentum);
    running.variance.lerp_(variance * (count / (count - 1)), running.momentum);
    context->save_for_backward({x, weight, bias, mean, (variance + running.eps).rsqrt_()});
    context->saved_data["eps"] = running.eps;
    // The kernel of the evaluation.
    return std::get<0>(at::native_batch_norm(
        x, weight, bias, mean, variance, /*training=*/false, 0.0, running.eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    variable_list out(4);
    if (at::GradMode::is_enabled()) {
      recorded_gradients(context, {saved[0], saved[1], saved[2]}, gradients[0], out);
      return out;
    }
    const auto dy = gradients[0].contiguous(at::MemoryFormat::ChannelsLast);
    std::tie(out[0], out[1], out[2]) = at::native_batch_norm_backward(
        dy, saved[0], saved[1], {}, {}, saved[3], saved[4], /*train=*/true,
        context->saved_data["eps"].toDouble(),
        {context->needs_input_grad(0), context->needs_input_grad(1), context->needs_input_grad(2)});
    return out;
  }
};

bool has_short_pixels(const at::Tensor& x) {
  const bool short_values = x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
  return x.is_cuda() && short_values && x.layout() == at::kStrided && x.dim() == 4 &&
      x.is_contiguous(at::MemoryFormat::ChannelsLast);
}

template <typename T>
at::Tensor apply_to(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    const std::optional<at::Tensor>& shortcut, const Running& running) {
  return NormRelu<T>::apply(x, weight, bias, shortcut, running);
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
    double eps) {
  const auto& x = input;
  const auto is_mine = [&](rust::Slice<const TensorRef> t) {
    return !t.empty() && is_vector(t[0].tensor, x);
  };
  const bool plain = training && x.dim() > 1 && x.numel() > x.size(1) && is_mine(weight) &&
      is_mine(bias) && is_mine(running_mean) && is_mine(running_var);
  const auto running = [&] {
    return Running{running_mean[0].tensor, running_var[0].tensor, momentum, eps};
  };
  const bool one_pass = plain && lies_in_rows(x) &&
      (shortcut.empty() ||
       (lies_in_rows(shortcut[0].tensor) && shortcut[0].tensor.sizes() == x.sizes() &&
        shortcut[0].tensor.scalar_type() == x.scalar_type()));
  if (one_pass) {
    const auto apply = x.scalar_type() == at::kFloat ? &apply_to<float> : &apply_to<at::BFloat16>;
    return std::make_unique<Tensor>(apply(
        x, weight[0].tensor, bias[0].tensor, optional_handle(shortcut), running()));
  }
  auto y = plain && has_short_pixels(x)
      ? ShortNorm::apply(x, weight[0].tensor, bias[0].tensor, running())
      : at::batch_norm(
            x, optional_handle(weight), optional_handle(bias), optional_handle(running_mean),
            optional_handle(running_var), training, momentum, eps, /*cudnn_enabled=*/true);
  // In place: nothing else holds y, and the normalisation's backward does not look at it.
  if (!shortcut.empty()) {
    y.add_(shortcut[0].tensor);
  }
  return std::make_unique<Tensor>(y.relu_());
}

} // namespace brigade
