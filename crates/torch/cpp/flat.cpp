#include "brigade-torch/src/bridge.rs.h"

#include "every_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace brigade {

namespace {

// Elements of a parallel task, and of a partial sum: sums do not depend on the number of threads.
constexpr int64_t kFlatBlock = 16384;
// Elements whose update waits in the first-level cache for its norm.
constexpr int64_t kStrip = 1024;
constexpr int64_t kLanes = 8;

std::vector<at::Tensor> checked(rust::Slice<const TensorRef> tensors, size_t count) {
  TORCH_CHECK(
      tensors.size() == count,
      "an optimizer step of ", count, " tensors for each parameter was given ", tensors.size());
  auto out = copy_handles(tensors);
  for (const auto& t : out) {
    TORCH_CHECK(
        t.layout() == at::kStrided,
        "this optimizer takes dense gradients only; found one of layout ", t.layout());
    TORCH_CHECK(
        t.sizes() == out[0].sizes() && t.device() == out[0].device() &&
            t.scalar_type() == out[0].scalar_type(),
        "a parameter of shape ", out[0].sizes(), " on ", out[0].device(), " in ",
        out[0].scalar_type(), " has a gradient or state of shape ", t.sizes(), " on ", t.device(),
        " in ", t.scalar_type());
  }
  return out;
}

// Whether all lie in memory element beside element, in the same order.
bool is_flat(const std::vector<at::Tensor>& tensors) {
  const auto& first = tensors[0];
  const auto kind = first.scalar_type();
  return first.device().is_cpu() && (kind == at::kFloat || kind == at::kDouble) &&
      first.is_non_overlapping_and_dense() &&
      std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) {
           return t.strides() == first.strides() && !t.is_neg();
         });
}

// A gradient may lie otherwise than its parameter when it was set by hand.
void lay_out_as_parameter(std::vector<at::Tensor>& tensors) {
  auto& gradient = tensors[1];
  if (tensors[0].is_non_overlapping_and_dense() && gradient.strides() != tensors[0].strides()) {
    gradient = at::empty_like(tensors[0]).copy_(gradient);
  }
}

void changed(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

template <typename T>
T* memory(const std::vector<at::Tensor>& tensors, size_t index) {
  return index < tensors.size() ? tensors[index].mutable_data_ptr<T>() : nullptr;
}

template <typename F>
void each_block(int64_t numel, const F& run) {
  const int64_t blocks = (numel + kFlatBlock - 1) / kFlatBlock;
  at::parallel_for(0, blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      run(block, block * kFlatBlock, std::min(numel, (block + 1) * kFlatBlock));
    }
  });
}

struct Norms {
  double first = 0;
  double second = 0;
};

template <typename F>
Norms sum_of_squares(int64_t numel, const F& run) {
  std::vector<Norms> partial((numel + kFlatBlock - 1) / kFlatBlock);
  each_block(numel, [&](int64_t block, int64_t begin, int64_t end) {
    partial[block] = run(begin, end);
  });
  Norms sum;
  for (const auto& part : partial) {
    sum.first += part.first;
    sum.second += part.second;
  }
  return sum;
}

// ---- RMSprop

template <typename T>
BRIGADE_INLINE void rmsprop_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict square, T* __restrict mean,
    T* __restrict buffer, int64_t count, const RmsPropStep& step) {
  const T lr = step.lr, rest = 1 - step.alpha, alpha = step.alpha, eps = step.eps,
          momentum = step.momentum, decay = step.l2, keep = step.keep,
          sign = step.maximize ? -1 : 1;
  const bool buffers_gradient = step.momentum_of_gradient;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = parameter[i] * keep;
    const T slope = sign * gradient[i] + decay * weight;
    const T squared = alpha * square[i] + rest * (slope * slope);
    square[i] = squared;
    T spread = squared;
    if (mean) {
      const T moved = mean[i] + rest * (slope - mean[i]);
      mean[i] = moved;
      // Rounding must not make it negative.
      spread = std::max(squared - moved * moved, T(0));
    }
    const T denominator = std::sqrt(spread) + eps;
    T move;
    if (!buffer) {
      move = slope / denominator;
    } else if (buffers_gradient) {
      buffer[i] = momentum * buffer[i] + slope;
      move = buffer[i] / denominator;
    } else {
      buffer[i] = momentum * buffer[i] + slope / denominator;
      move = buffer[i];
    }
    parameter[i] = weight - lr * move;
  }
}

// ---- moments, for RAdam and LAMB

template <typename T>
BRIGADE_INLINE void rectified_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    int64_t count, const RectifiedStep& step) {
  const T first = 1 - step.beta1, beta2 = step.beta2, second = 1 - step.beta2, size = step.size,
          root_scale = step.root_scale, eps = step.eps, decay = step.l2, keep = step.keep,
          sign = step.maximize ? -1 : 1;
  const bool adaptive = step.adaptive;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = parameter[i] * keep;
    const T slope = sign * gradient[i] + decay * weight;
    const T moved = mean[i] + first * (slope - mean[i]);
    const T squared = beta2 * square[i] + second * (slope * slope);
    mean[i] = moved;
    square[i] = squared;
    const T denominator = adaptive ? std::sqrt(squared) * root_scale + eps : T(1);
    parameter[i] = weight - size * (moved / denominator);
  }
}

template <typename T>
BRIGADE_INLINE void lamb_moments_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    T* __restrict update, int64_t count, const LambStep& step) {
  const T first = 1 - step.beta1, beta2 = step.beta2, second = 1 - step.beta2,
          mean_scale = step.mean_scale, root_scale = step.root_scale, eps = step.eps,
          decay = step.l2, keep = step.keep, sign = step.maximize ? -1 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = parameter[i] * keep;
    const T slope = sign * gradient[i] + decay * weight;
    const T moved = mean[i] + first * (slope - mean[i]);
    const T squared = beta2 * square[i] + second * (slope * slope);
    parameter[i] = weight;
    mean[i] = moved;
    square[i] = squared;
    update[i] = (moved * mean_scale) / (std::sqrt(squared) * root_scale + eps);
  }
}

template <typename T>
BRIGADE_INLINE void lamb_update_range(
    T* __restrict parameter, const T* __restrict mean, const T* __restrict square, int64_t count,
    const LambStep& step, double rate) {
  const T mean_scale = step.mean_scale, root_scale = step.root_scale, eps = step.eps, lr = rate;
  for (int64_t i = 0; i < count; ++i) {
    parameter[i] -= lr * ((mean[i] * mean_scale) / (std::sqrt(square[i]) * root_scale + eps));
  }
}

template <typename T>
BRIGADE_INLINE double squares_range(const T* __restrict values, int64_t count) {
  // Lanes let the compiler use vectors without changing the order of additions.
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (; i < count; ++i) {
    sum += double(values[i]) * double(values[i]);
  }
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

// ---- LARS and LARC

template <typename T>
BRIGADE_INLINE void slope_range(
    const T* __restrict parameter, const T* __restrict gradient, T* __restrict weight,
    T* __restrict slope, int64_t count, const LarcStep& step) {
  const T decay = step.l2, keep = step.keep, sign = step.maximize ? -1 : 1;
  for (int64_t i = 0; i < count; ++i) {
    weight[i] = parameter[i] * keep;
    slope[i] = sign * gradient[i] + decay * weight[i];
  }
}

template <typename T>
BRIGADE_INLINE void larc_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict buffer, int64_t count,
    const LarcStep& step, double rate) {
  const T lr = rate, momentum = step.momentum, decay = step.l2, keep = step.keep,
          sign = step.maximize ? -1 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = parameter[i] * keep;
    T move = sign * gradient[i] + decay * weight;
    if (buffer) {
      move += momentum * buffer[i];
      buffer[i] = move;
    }
    parameter[i] = weight - lr * move;
  }
}

template <typename T>
BRIGADE_INLINE void look_ahead_range(T* __restrict fast, T* __restrict slow, int64_t count, double by) {
  const T alpha = by;
  for (int64_t i = 0; i < count; ++i) {
    slow[i] += alpha * (fast[i] - slow[i]);
    fast[i] = slow[i];
  }
}

// The same for both types: attributes choose the CPU for a function, not for a template.
#define BRIGADE_KERNELS(T)                                                                         \
  BRIGADE_EVERY_CPU void run_rmsprop(                                                              \
      T* p, const T* g, T* s, T* m, T* b, int64_t n, const RmsPropStep& step) {                    \
    rmsprop_range<T>(p, g, s, m, b, n, step);                                                      \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_rectified(                                                            \
      T* p, const T* g, T* m, T* s, int64_t n, const RectifiedStep& step) {                        \
    rectified_range<T>(p, g, m, s, n, step);                                                       \
  }                                                                                                \
  BRIGADE_EVERY_CPU Norms run_lamb_moments(                                                        \
      T* p, const T* g, T* m, T* s, int64_t n, const LambStep& step) {                             \
    T update[kStrip];                                                                              \
    Norms norms;                                                                                   \
    for (int64_t i = 0; i < n; i += kStrip) {                                                      \
      const int64_t count = std::min(kStrip, n - i);                                               \
      lamb_moments_range<T>(p + i, g + i, m + i, s + i, update, count, step);                      \
      norms.first += squares_range<T>(p + i, count);                                               \
      norms.second += squares_range<T>(update, count);                                             \
    }                                                                                              \
    return norms;                                                                                  \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_lamb_update(                                                          \
      T* p, const T* m, const T* s, int64_t n, const LambStep& step, double rate) {                \
    lamb_update_range<T>(p, m, s, n, step, rate);                                                  \
  }                                                                                                \
  BRIGADE_EVERY_CPU Norms run_larc_norms(const T* p, const T* g, int64_t n, const LarcStep& step) { \
    T weight[kStrip], slope[kStrip];                                                               \
    Norms norms;                                                                                   \
    for (int64_t i = 0; i < n; i += kStrip) {                                                      \
      const int64_t count = std::min(kStrip, n - i);                                               \
      slope_range<T>(p + i, g + i, weight, slope, count, step);                                    \
      norms.first += squares_range<T>(weight, count);                                              \
      norms.second += squares_range<T>(slope, count);                                              \
    }                                                                                              \
    return norms;                                                                                  \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_larc(                                                                 \
      T* p, const T* g, T* b, int64_t n, const LarcStep& step, double rate) {                      \
    larc_range<T>(p, g, b, n, step, rate);                                                         \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_look_ahead(T* fast, T* slow, int64_t n, double alpha) {               \
    look_ahead_range<T>(fast, slow, n, alpha);                                                     \
  }

BRIGADE_KERNELS(float)
BRIGADE_KERNELS(double)

// Calls `run` with a null pointer of the tensors' type.
template <typename F>
void by_type(const at::Tensor& tensor, const F& run) {
  if (tensor.scalar_type() == at::kFloat) {
    run(static_cast<float*>(nullptr));
  } else {
    run(static_cast<double*>(nullptr));
  }
}

// The gradient with its sign and what weight decay adds, after the weight was shrunk.
template <typename S>
at::Tensor slope_of(const at::Tensor& parameter, const at::Tensor& gradient, const S& step) {
  if (step.keep != 1) {
    parameter.mul_(step.keep);
  }
  auto slope = step.maximize ? gradient.neg() : gradient;
  return step.l2 != 0 ? slope.add(parameter, step.l2) : slope;
}

double lamb_rate(const LambStep& step, double weight_norm, double update_norm) {
  const bool either_is_zero = weight_norm == 0 || update_norm == 0;
  return step.lr * (either_is_zero ? 1 : std::min(weight_norm / update_norm, step.max_trust));
}

double larc_rate(const LarcStep& step, double weight_norm, double gradient_norm) {
  const double local = step.lr * step.trust * weight_norm /
      (gradient_norm + weight_norm * step.weight_decay + step.eps);
  return step.clip ? std::min(step.lr, local) : local;
}

} // namespace

void rmsprop(rust::Slice<const TensorRef> tensors, const RmsPropStep& step, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  auto t = checked(tensors, 3 + step.centered + buffered);
  lay_out_as_parameter(t);
  const size_t buffer_at = buffered ? t.size() - 1 : t.size();
  if (!operations && is_flat(t)) {
    by_type(t[0], [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      auto *p = memory<T>(t, 0), *g = memory<T>(t, 1), *s = memory<T>(t, 2),
           *m = step.centered ? memory<T>(t, 3) : nullptr, *b = memory<T>(t, buffer_at);
      each_block(t[0].numel(), [&](int64_t, int64_t i, int64_t end) {
        run_rmsprop(p + i, g + i, s + i, m ? m + i : m, b ? b + i : b, end - i, step);
      });
    });
    changed(t[0]);
    return;
  }
  const auto slope = slope_of(t[0], t[1], step);
  t[2].mul_(step.alpha).addcmul_(slope, slope, 1 - step.alpha);
  auto spread = t[2];
  if (step.centered) {
    t[3].lerp_(slope, 1 - step.alpha);
    spread = t[2].addcmul(t[3], t[3], -1).clamp_min_(0);
  }
  const auto denominator = spread.sqrt().add_(step.eps);
  if (!buffered) {
    t[0].addcdiv_(slope, denominator, -step.lr);
  } else if (step.momentum_of_gradient) {
    t[buffer_at].mul_(step.momentum).add_(slope);
    t[0].addcdiv_(t[buffer_at], denominator, -step.lr);
  } else {
    t[buffer_at].mul_(step.momentum).addcdiv_(slope, denominator);
    t[0].add_(t[buffer_at], -step.lr);
  }
}

void rectified(rust::Slice<const TensorRef> tensors, const RectifiedStep& step, bool operations) {
  at::NoGradGuard no_grad;
  auto t = checked(tensors, 4);
  lay_out_as_parameter(t);
  if (!operations && is_flat(t)) {
    by_type(t[0], [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      auto *p = memory<T>(t, 0), *g = memory<T>(t, 1), *m = memory<T>(t, 2), *s = memory<T>(t, 3);
      each_block(t[0].numel(), [&](int64_t, int64_t i, int64_t end) {
        run_rectified(p + i, g + i, m + i, s + i, end - i, step);
      });
    });
    changed(t[0]);
    return;
  }
  const auto slope = slope_of(t[0], t[1], step);
  t[2].lerp_(slope, 1 - step.beta1);
  t[3].mul_(step.beta2).addcmul_(slope, slope, 1 - step.beta2);
  if (step.adaptive) {
    t[0].addcdiv_(t[2], t[3].sqrt().mul_(step.root_scale).add_(step.eps), -step.size);
  } else {
    t[0].add_(t[2], -step.size);
  }
}

void lamb(rust::Slice<const TensorRef> tensors, const LambStep& step, bool operations) {
  at::NoGradGuard no_grad;
  auto t = checked(tensors, 4);
  lay_out_as_parameter(t);
  if (!operations && is_flat(t)) {
    by_type(t[0], [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      auto *p = memory<T>(t, 0), *g = memory<T>(t, 1), *m = memory<T>(t, 2), *s = memory<T>(t, 3);
      const auto norms = sum_of_squares(t[0].numel(), [&](int64_t i, int64_t end) {
        return run_lamb_moments(p + i, g + i, m + i, s + i, end - i, step);
      });
      const double rate = lamb_rate(step, std::sqrt(norms.first), std::sqrt(norms.second));
      each_block(t[0].numel(), [&](int64_t, int64_t i, int64_t end) {
        run_lamb_update(p + i, m + i, s + i, end - i, step, rate);
      });
    });
    changed(t[0]);
    return;
  }
  const auto slope = slope_of(t[0], t[1], step);
  t[2].lerp_(slope, 1 - step.beta1);
  t[3].mul_(step.beta2).addcmul_(slope, slope, 1 - step.beta2);
  const auto update =
      t[2].mul(step.mean_scale).div_(t[3].sqrt().mul_(step.root_scale).add_(step.eps));
  const double rate =
      lamb_rate(step, t[0].norm().item<double>(), update.norm().item<double>());
  t[0].add_(update, -rate);
}

void larc(rust::Slice<const TensorRef> tensors, const LarcStep& step, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  auto t = checked(tensors, 2 + buffered);
  lay_out_as_parameter(t);
  if (!operations && is_flat(t)) {
    by_type(t[0], [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      auto *p = memory<T>(t, 0), *g = memory<T>(t, 1), *b = memory<T>(t, 2);
      const auto norms = sum_of_squares(t[0].numel(), [&](int64_t i, int64_t end) {
        return run_larc_norms(p + i, g + i, end - i, step);
      });
      const double rate = larc_rate(step, std::sqrt(norms.first), std::sqrt(norms.second));
      each_block(t[0].numel(), [&](int64_t, int64_t i, int64_t end) {
        run_larc(p + i, g + i, b ? b + i : b, end - i, step, rate);
      });
    });
    changed(t[0]);
    return;
  }
  const auto slope = slope_of(t[0], t[1], step);
  const double rate = larc_rate(step, t[0].norm().item<double>(), slope.norm().item<double>());
  t[0].add_(buffered ? t[2].mul_(step.momentum).add_(slope) : slope, -rate);
}

void look_ahead(rust::Slice<const TensorRef> tensors, double alpha, bool operations) {
  at::NoGradGuard no_grad;
  const auto t = checked(tensors, 2);
  if (!operations && is_flat(t)) {
    by_type(t[0], [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      auto *fast = memory<T>(t, 0), *slow = memory<T>(t, 1);
      each_block(t[0].numel(), [&](int64_t, int64_t i, int64_t end) {
        run_look_ahead(fast + i, slow + i, end - i, alpha);
      });
    });
    changed(t[0]);
    return;
  }
  t[1].add_(t[0].sub(t[1]), alpha);
  t[0].copy_(t[1]);
}

bool same_layout(const Tensor& first, const Tensor& second) {
  return first.device() == second.device() && first.scalar_type() == second.scalar_type() &&
      first.sizes() == second.sizes() && first.strides() == second.strides();
}

} // namespace brigade
