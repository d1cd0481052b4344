#include "brigade-torch/src/bridge.rs.h"

#include "kernels/norm_relu.h"
#include "max_pool.h"
#include "rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <string>
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
// operations, which are recorded. `pool` is for a ReLU and max pooling behind it, of whose output `dy` is the gradient.
void recorded_gradients(
    AutogradContext* context, const variable_list& candidates, const at::Tensor& dy, bool pool, variable_list& out) {
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
  auto output = at::batch_norm(
      candidates[0], candidates[1], candidates[2], {}, {}, /*training=*/true, 0.0,
      context->saved_data["eps"].toDouble(), /*cudnn_enabled=*/true);
  if (pool) {
    const auto windows = norm_pool_windows();
    output = at::max_pool2d(output.relu(), windows.kernel, windows.stride, windows.padding);
  }
  const auto found = torch::autograd::grad(
      {output}, inputs, {dy}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0; i < places.size(); ++i) {
    out[places[i]] = found[i];
  }
}

template <typename T>
NormForward forward_rows(
    const at::Tensor& x, const std::optional<at::Tensor>& shortcut, const NormParameters& parameters) {
  const auto& weight = parameters.weight;
  const double momentum = parameters.momentum, eps = parameters.eps;
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
  float* running_mean = parameters.running_mean.mutable_data_ptr<float>();
  float* running_var = parameters.running_var.mutable_data_ptr<float>();
  const float* weights = weight.const_data_ptr<float>();
  const float* biases = parameters.bias.const_data_ptr<float>();
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
  return {y, statistics, {}};
}

template <typename T>
NormBackward backward_rows(
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

// Key, in the context of a normalisation, of the gradient of its output's second use in the pass that runs: see
// TwoUses. Passes over one graph may alternate, so each has a key of its own.
std::string second_use_key() {
  return "second use in pass " + std::to_string(torch::autograd::get_current_graph_task_id());
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
      NormEnd end) {
    RECORD_FUNCTION("brigade::batch_norm_relu", {});
    const NormParameters parameters{weight, bias, running_mean, running_var, momentum, eps};
    NormForward out;
    if (x.is_cpu()) {
      const auto rows =
          x.scalar_type() == at::kFloat ? &forward_rows<float> : &forward_rows<at::BFloat16>;
      out = rows(x, shortcut, parameters);
    } else {
      out = norm_relu_forward_gpu(program_of(x), x, shortcut, parameters, end);
    }
    running_mean.unsafeGetTensorImpl()->bump_version();
    running_var.unsafeGetTensorImpl()->bump_version();
    // Without ReLU nothing needs the output, and with bytes that say what ReLU lets through neither.
    const bool needs_output = end == NormEnd::kRelu && !out.kept.defined();
    context->save_for_backward(
        {x, needs_output ? out.y : at::Tensor(), weight, bias, out.statistics, out.kept});
    context->saved_data["shortcut"] = shortcut.has_value();
    context->saved_data["end"] = static_cast<int64_t>(end);
    context->saved_data["eps"] = eps;
    return out.y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::batch_norm_relu_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &y = saved[1], &weight = saved[2], &statistics = saved[4], &kept = saved[5];
    const bool shortcut = context->saved_data["shortcut"].toBool();
    const auto end = static_cast<NormEnd>(context->saved_data["end"].toInt());
    const bool wants_x = context->needs_input_grad(0);
    const bool wants_shortcut = shortcut && context->needs_input_grad(3);
    variable_list out(9);
    if (at::GradMode::is_enabled()) {
      // For gradients of gradients: the same from libtorch's operations, which are recorded.
      auto through = gradients[0];
      if (end == NormEnd::kRelu) {
        through = kept.defined() ? at::where(unpacked_signs(kept), through, 0)
                                 : at::threshold_backward(through, y, 0);
      }
      if (wants_shortcut) {
        out[3] = through;
      }
      recorded_gradients(context, {x, weight, saved[3]}, through, end == NormEnd::kReluAndMaxPool, out);
      return out;
    }
    NormBackward found;
    if (x.is_cpu()) {
      const auto rows =
          x.scalar_type() == at::kFloat ? &backward_rows<float> : &backward_rows<at::BFloat16>;
      found = rows(gradients[0], x, y, weight, statistics, shortcut, wants_x);
    } else {
      const NormGradient given{gradients[0], second_use(*context), x, statistics, kept, shortcut, end};
      found = norm_relu_backward_gpu(program_of(x), given, wants_x);
    }
    out[0] = found.x;
    out[1] = found.weight;
    out[2] = found.bias;
    if (wants_shortcut) {
      out[3] = found.shortcut;
    }
    return out;
  }

 private:
  static kernels::Program& program_of(const at::Tensor& x) {
    auto* program = norm_kernels(x);
    TORCH_CHECK(program != nullptr, "the kernels of norm_relu are not there any more");
    return *program;
  }

  // Takes the gradient of the second use, if there is one. What a failed pass has left stays until the graph is freed.
  static at::Tensor second_use(AutogradContext& context) {
    const auto found = context.saved_data.find(second_use_key());
    if (found == context.saved_data.end()) {
      return {};
    }
    auto gradient = found->second.toTensor();
    context.saved_data.erase(found);
    return gradient;
  }
};

// The two uses of a residual block's input, which a normalisation with a shortcut has computed. Their gradients are not
// added to each other in a pass of their own: the backward of that normalisation is given the second one beside its own
// gradient, and adds both while it reads them. A third use is added to the first one by the engine.
struct TwoUses : public torch::autograd::Function<TwoUses> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x) {
    context->set_materialize_grads(false);
    return {x, x};
  }

  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::residual_inputs_backward", {});
    const auto &first = gradients[0], &second = gradients[1];
    if (!first.defined() || !second.defined()) {
      return {first.defined() ? first : second};
    }
    return {hand_over(first, second) ? first : first + second};
  }

  // The normalisation that has computed a tensor, if its backward can be given two gradients. Null if it cannot.
  static torch::autograd::CppNode<NormRelu>* normalisation(torch::autograd::Node* node) {
    auto* norm = dynamic_cast<torch::autograd::CppNode<NormRelu>*>(node);
    return norm != nullptr && norm->ctx_.saved_data.at("shortcut").toBool() ? norm : nullptr;
  }

 private:
  // Gives the second gradient to the normalisation, unless anybody but its backward sees the gradient of its output, or
  // it has no backward in this pass. All of it is on the thread of the device, which runs one node at a time.
  static bool hand_over(const at::Tensor& first, const at::Tensor& second) {
    if (at::GradMode::is_enabled()) {
      return false;
    }
    const auto self = torch::autograd::get_current_node();
    auto* node = self->next_edge(0).function.get();
    auto* norm = normalisation(node);
    if (norm == nullptr || node->stream() != self->stream() || !node->pre_hooks().empty() ||
        !node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty()) {
      return false;
    }
    const auto fits = [&](const at::Tensor& t) {
      return t.is_cuda() && fits_norm_kernels(t) && t.sizes() == first.sizes() &&
          t.scalar_type() == first.scalar_type() && t.device() == first.device();
    };
    if (!fits(first) || !fits(second)) {
      return false;
    }
    const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
    if (chosen != nullptr && !chosen->empty()) {
      const auto info = chosen->find(node);
      if (info == chosen->end() || !info->second.needed_ || info->second.captures_ != nullptr) {
        return false;
      }
    }
    // False if another pair of uses of the same output has come first.
    return norm->ctx_.saved_data.emplace(second_use_key(), second).second;
  }
};

// On the CPU without ReLU libtorch's is as fast, and pooling is an operation of its own.
bool is_one_pass(const at::Tensor& x, NormEnd end) {
  if (x.is_cpu()) {
    return end == NormEnd::kRelu && lies_in_rows(x);
  }
  return fits_norm_kernels(x) && norm_kernels(x) != nullptr &&
      (end != NormEnd::kReluAndMaxPool || fits_norm_pooling(x));
}

// Returns the output where it can be one operation, and null elsewhere.
std::unique_ptr<Tensor> one_pass(
    const at::Tensor& x,
    rust::Slice<const TensorRef> shortcut,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    double momentum,
    double eps,
    NormEnd end) {
  const auto is_mine = [&](rust::Slice<const TensorRef> t) {
    return !t.empty() && is_vector(t[0].tensor, x);
  };
  const bool fits = is_one_pass(x, end) && x.numel() > x.size(1) && is_mine(weight) && is_mine(bias) &&
      is_mine(running_mean) && is_mine(running_var) &&
      (shortcut.empty() || lies_as(shortcut[0].tensor, x));
  if (!fits) {
    return nullptr;
  }
  return std::make_unique<Tensor>(NormRelu::apply(
      x, weight[0].tensor, bias[0].tensor, optional_handle(shortcut), running_mean[0].tensor,
      running_var[0].tensor, momentum, eps, end));
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
  if (training) {
    auto y = one_pass(
        x, shortcut, weight, bias, running_mean, running_var, momentum, eps,
        relu ? NormEnd::kRelu : NormEnd::kNothing);
    if (y != nullptr) {
      return y;
    }
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

std::unique_ptr<Tensor> batch_norm_relu_max_pool(
    const Tensor& input,
    rust::Slice<const TensorRef> weight,
    rust::Slice<const TensorRef> bias,
    rust::Slice<const TensorRef> running_mean,
    rust::Slice<const TensorRef> running_var,
    bool training,
    double momentum,
    double eps) {
  if (training) {
    auto y = one_pass(
        input, {}, weight, bias, running_mean, running_var, momentum, eps, NormEnd::kReluAndMaxPool);
    if (y != nullptr) {
      return y;
    }
  }
  const auto maps = batch_norm_relu(
      input, {}, weight, bias, running_mean, running_var, training, momentum, eps, /*relu=*/true);
  const auto windows = norm_pool_windows();
  return brigade::max_pool2d(*maps, windows.kernel, windows.stride, windows.padding);
}

ResidualInputs residual_inputs(const Tensor& input) {
  const bool is_recorded = at::GradMode::is_enabled() && input.is_cuda() && input.requires_grad();
  if (is_recorded && TwoUses::normalisation(input.grad_fn().get()) != nullptr) {
    auto uses = TwoUses::apply(input);
    return {std::make_unique<Tensor>(std::move(uses[0])), std::make_unique<Tensor>(std::move(uses[1]))};
  }
  return {std::make_unique<Tensor>(input), std::make_unique<Tensor>(input)};
}

} // namespace brigade
