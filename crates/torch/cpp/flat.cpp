#include "brigade-torch/src/bridge.rs.h"

#include "every_cpu.h"
#include "foreach.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace brigade {

namespace {

// Elements of a parallel task, and of a partial sum: sums do not depend on the number of threads.
constexpr int64_t kFlatBlock = 16384;
// Elements whose update waits in the first-level cache for its norm.
constexpr int64_t kStrip = 1024;
constexpr int64_t kLanes = 8;
// Of all rules: parameter, gradient, up to three states.
constexpr size_t kMostRoles = 5;

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

// The numbers of a step that the loops use: the rule's, and what follows from them.
template <typename Step>
struct Host {
  explicit Host(const Step& step)
      : of(step),
        l2(step.decoupled ? 0 : step.weight_decay),
        keep(step.decoupled ? 1 - step.lr * step.weight_decay : 1) {}

  const Step& of;
  double l2;
  double keep;
  double size = 0;
  double mean_scale = 1;
  double square_scale = 1;
  double root_scale = 1;
  bool adaptive = false;
};

// ---- RMSprop

template <typename T>
BRIGADE_INLINE void rmsprop_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict square, T* __restrict mean,
    T* __restrict buffer, int64_t count, const Host<RmsPropStep>& step) {
  const T lr = step.of.lr, rest = 1 - step.of.alpha, alpha = step.of.alpha, eps = step.of.eps,
          momentum = step.of.momentum, decay = step.l2, keep = step.keep,
          sign = step.of.maximize ? -1 : 1;
  const bool buffers_gradient = step.of.momentum_of_gradient;
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

// ---- moments, for RAdam, QHAdam and LAMB

template <typename T>
BRIGADE_INLINE void rectified_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    int64_t count, const Host<RectifiedStep>& step) {
  const T first = 1 - step.of.beta1, beta2 = step.of.beta2, second = 1 - step.of.beta2, size = step.size,
          root_scale = step.root_scale, eps = step.of.eps, decay = step.l2, keep = step.keep,
          sign = step.of.maximize ? -1 : 1;
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
BRIGADE_INLINE void qhadam_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    int64_t count, const Host<QhAdamStep>& step) {
  const T first = 1 - step.of.beta1, beta2 = step.of.beta2, second = 1 - step.of.beta2,
          mean_scale = step.mean_scale, square_scale = step.square_scale, eps = step.of.eps,
          slope_part = 1 - step.of.nu1, square_part = 1 - step.of.nu2, lr = step.of.lr,
          decay = step.l2, keep = step.keep, sign = step.of.maximize ? -1 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = parameter[i] * keep;
    const T slope = sign * gradient[i] + decay * weight;
    const T moved = mean[i] + first * (slope - mean[i]);
    const T squared = beta2 * square[i] + second * (slope * slope);
    mean[i] = moved;
    square[i] = squared;
    const T numerator = slope_part * slope + moved * mean_scale;
    const T denominator = std::sqrt(square_part * (slope * slope) + squared * square_scale) + eps;
    parameter[i] = weight - lr * (numerator / denominator);
  }
}

template <typename T>
BRIGADE_INLINE void lamb_moments_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    T* __restrict update, int64_t count, const Host<LambStep>& step) {
  const T first = 1 - step.of.beta1, beta2 = step.of.beta2, second = 1 - step.of.beta2,
          mean_scale = step.mean_scale, root_scale = step.root_scale, eps = step.of.eps,
          decay = step.l2, keep = step.keep, sign = step.of.maximize ? -1 : 1;
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
    const Host<LambStep>& step, double rate) {
  const T mean_scale = step.mean_scale, root_scale = step.root_scale, eps = step.of.eps, lr = rate;
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
    T* __restrict slope, int64_t count, const Host<LarcStep>& step) {
  const T decay = step.l2, keep = step.keep, sign = step.of.maximize ? -1 : 1;
  for (int64_t i = 0; i < count; ++i) {
    weight[i] = parameter[i] * keep;
    slope[i] = sign * gradient[i] + decay * weight[i];
  }
}

template <typename T>
BRIGADE_INLINE void larc_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict buffer, int64_t count,
    const Host<LarcStep>& step, double rate) {
  const T lr = rate, momentum = step.of.momentum, decay = step.l2, keep = step.keep,
          sign = step.of.maximize ? -1 : 1;
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
      T* p, const T* g, T* s, T* m, T* b, int64_t n, const Host<RmsPropStep>& step) {                    \
    rmsprop_range<T>(p, g, s, m, b, n, step);                                                      \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_rectified(                                                            \
      T* p, const T* g, T* m, T* s, int64_t n, const Host<RectifiedStep>& step) {                        \
    rectified_range<T>(p, g, m, s, n, step);                                                       \
  }                                                                                                \
  BRIGADE_EVERY_CPU void run_qhadam(                                                               \
      T* p, const T* g, T* m, T* s, int64_t n, const Host<QhAdamStep>& step) {                     \
    qhadam_range<T>(p, g, m, s, n, step);                                                          \
  }                                                                                                \
  BRIGADE_EVERY_CPU Norms run_lamb_moments(                                                        \
      T* p, const T* g, T* m, T* s, int64_t n, const Host<LambStep>& step) {                             \
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
      T* p, const T* m, const T* s, int64_t n, const Host<LambStep>& step, double rate) {                \
    lamb_update_range<T>(p, m, s, n, step, rate);                                                  \
  }                                                                                                \
  BRIGADE_EVERY_CPU Norms run_larc_norms(const T* p, const T* g, int64_t n, const Host<LarcStep>& step) { \
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
      T* p, const T* g, T* b, int64_t n, const Host<LarcStep>& step, double rate) {                      \
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

// Which parameters have their gradient and states in memory as the loops read it. Others, and all where
// numbers of the step are on a device, are stepped by operations.
struct Split {
  std::vector<size_t> loops;
  std::vector<size_t> operations;
};

Split split(Roles& roles, rust::Slice<const TensorRef> device, bool operations) {
  Split out;
  for (size_t i = 0; i < roles[0].size(); ++i) {
    std::vector<at::Tensor> of;
    for (const auto& role : roles) {
      of.push_back(role[i]);
    }
    const bool loops = !operations && device.empty() && [&] {
      if (roles.size() > 1 && of[0].is_cpu()) {
        lay_out_as_parameter(of);
        roles[kGradient][i] = of[kGradient];
      }
      return is_flat(of);
    }();
    (loops ? out.loops : out.operations).push_back(i);
  }
  return out;
}

// Calls `run` with the memory of each role of one parameter, and its number of elements.
template <typename Run>
void loop(const Roles& roles, const std::vector<size_t>& indices, const Run& run) {
  for (const size_t i : indices) {
    const auto& parameter = roles[0][i];
    by_type(parameter, [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      std::array<T*, kMostRoles> memory{};
      for (size_t role = 0; role < roles.size(); ++role) {
        memory[role] = roles[role][i].template mutable_data_ptr<T>();
      }
      run(memory, parameter.numel());
    });
    changed(parameter);
  }
}

// How RAdam divides its step, from the count of steps.
struct Rectification {
  Number size;
  Number root_scale;
  // Above 0 where the step is divided.
  Number adaptive;
};

Rectification rectification(const RectifiedStep& step, const Number& lr, const Number& steps) {
  const Number bias1 = 1 - power(step.beta1, steps);
  const Number power2 = power(step.beta2, steps);
  const Number bias2 = 1 - power2;
  const double longest = 2 / (1 - step.beta2) - 1;
  // The approximated length of the average of squares.
  const Number length = longest - 2 * steps * power2 / bias2;
  const Number factor =
      root((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
  const Number size = lr / bias1 * where_above(length, 5, factor, 1);
  // The same quotient, but for where eps stands in it.
  if (step.eps_of_unbiased) {
    return {size, where_above(length, 5, 1 / root(bias2), 1), length - 5};
  }
  return {size * where_above(length, 5, root(bias2), 1), 1, length - 5};
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

void rmsprop(
    rust::Slice<const TensorRef> tensors, size_t count, const RmsPropStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  const size_t wanted = 3 + step.centered + buffered;
  auto roles = roles_of(tensors, count, wanted, wanted, "RMSprop");
  const auto ways = split(roles, device, operations);
  const size_t mean_at = step.centered ? 3 : kNone, buffer_at = buffered ? wanted - 1 : kNone;
  const Host<RmsPropStep> numbers(step);
  loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
    auto *m = step.centered ? t[mean_at] : nullptr, *b = buffered ? t[buffer_at] : nullptr;
    each_block(numel, [&](int64_t, int64_t i, int64_t end) {
      run_rmsprop(
          t[0] + i, t[1] + i, t[2] + i, m ? m + i : m, b ? b + i : b, end - i, numbers);
    });
  });
  each_piece(chosen(roles, ways.operations), kGradient, [&](Piece& piece) {
    const StepNumbers now(device, piece.device, step.lr, 0);
    const auto &p = piece.roles[0], &squares = piece.roles[2];
    auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_squares(squares, slopes.list, step.alpha, now);
    Scratch denominators(p, p[0].scalar_type());
    denominators.copy(squares);
    if (step.centered) {
      const auto& means = piece.roles[mean_at];
      move_means(means, slopes.list, 1 - step.alpha, now);
      at::_foreach_addcmul_(denominators.views, means, means, -1);
      // Rounding must not make it negative.
      denominators.block.clamp_min_(0);
    }
    denominators.block.sqrt_().add_(step.eps);
    if (!buffered) {
      descend_quotients(p, slopes.list, std::move(denominators), now.lr, now);
      return;
    }
    const auto& buffers = piece.roles[buffer_at];
    if (step.momentum_of_gradient) {
      accumulate(buffers, slopes.list, step.momentum, now);
      descend_quotients(p, buffers, std::move(denominators), now.lr, now);
    } else if (!now.can_skip()) {
      multiply_list(buffers, step.momentum);
      at::_foreach_addcdiv_(buffers, slopes.list, denominators.views);
      descend(p, buffers, now.lr, now);
    } else {
      auto& quotients = *slopes.own;
      quotients.block.div_(denominators.block);
      quotients.clear_if_skipped(now);
      accumulate(buffers, quotients.views, step.momentum, now);
      descend(p, buffers, now.lr, now);
    }
  });
}

void rectified(
    rust::Slice<const TensorRef> tensors, size_t count, const RectifiedStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "RAdam");
  const auto ways = split(roles, device, operations);
  if (!ways.loops.empty()) {
    const auto how = rectification(step, step.lr, step.steps);
    Host<RectifiedStep> numbers(step);
    numbers.size = how.size.host();
    numbers.root_scale = how.root_scale.host();
    numbers.adaptive = how.adaptive.host() > 0;
    loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
      each_block(numel, [&](int64_t, int64_t i, int64_t end) {
        run_rectified(t[0] + i, t[1] + i, t[2] + i, t[3] + i, end - i, numbers);
      });
    });
  }
  each_piece(chosen(roles, ways.operations), kGradient, [&](Piece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    const auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_means(means, slopes.list, 1 - step.beta1, now);
    move_squares(squares, slopes.list, step.beta2, now);
    const auto how = rectification(step, now.lr, now.steps);
    if (how.adaptive.on_host() && !(how.adaptive.host() > 0)) {
      descend(p, means, how.size, now);
      return;
    }
    // Where the step is not divided, by 0 x root + 1.
    auto denominators = roots(
        squares, where_above(how.adaptive, 0, how.root_scale, 0),
        where_above(how.adaptive, 0, step.eps, 1));
    descend_quotients(p, means, std::move(denominators), how.size, now);
  });
}

void qhadam(
    rust::Slice<const TensorRef> tensors, size_t count, const QhAdamStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "QHAdam");
  const auto ways = split(roles, device, operations);
  const auto mean_scale = [&](const Number& steps) {
    return step.nu1 / (1 - power(step.beta1, steps));
  };
  const auto square_scale = [&](const Number& steps) {
    return step.nu2 / (1 - power(step.beta2, steps));
  };
  Host<QhAdamStep> numbers(step);
  numbers.mean_scale = mean_scale(step.steps).host();
  numbers.square_scale = square_scale(step.steps).host();
  loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
    each_block(numel, [&](int64_t, int64_t i, int64_t end) {
      run_qhadam(t[0] + i, t[1] + i, t[2] + i, t[3] + i, end - i, numbers);
    });
  });
  each_piece(chosen(roles, ways.operations), kGradient, [&](Piece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    const auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_means(means, slopes.list, 1 - step.beta1, now);
    move_squares(squares, slopes.list, step.beta2, now);
    Scratch numerators(p, p[0].scalar_type()), denominators(p, p[0].scalar_type());
    numerators.copy(means);
    numerators.multiply(mean_scale(now.steps));
    at::_foreach_add_(numerators.views, slopes.list, 1 - step.nu1);
    denominators.copy(squares);
    denominators.multiply(square_scale(now.steps));
    at::_foreach_addcmul_(denominators.views, slopes.list, slopes.list, 1 - step.nu2);
    denominators.block.sqrt_().add_(step.eps);
    descend_quotients(p, numerators.views, std::move(denominators), now.lr, now);
  });
}

void lamb(
    rust::Slice<const TensorRef> tensors, size_t count, const LambStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "LAMB");
  const auto ways = split(roles, device, operations);
  const auto mean_scale = [&](const Number& steps) { return 1 / (1 - power(step.beta1, steps)); };
  const auto root_scale = [&](const Number& steps) {
    return 1 / root(1 - power(step.beta2, steps));
  };
  Host<LambStep> numbers(step);
  numbers.mean_scale = mean_scale(step.steps).host();
  numbers.root_scale = root_scale(step.steps).host();
  loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
    const auto sums = sum_of_squares(numel, [&](int64_t i, int64_t end) {
      return run_lamb_moments(t[0] + i, t[1] + i, t[2] + i, t[3] + i, end - i, numbers);
    });
    const double rate = lamb_rate(step, std::sqrt(sums.first), std::sqrt(sums.second));
    each_block(numel, [&](int64_t, int64_t i, int64_t end) {
      run_lamb_update(t[0] + i, t[2] + i, t[3] + i, end - i, numbers, rate);
    });
  });
  each_piece(chosen(roles, ways.operations), kGradient, [&](Piece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    {
      const auto slopes = decay_and_slopes(
          p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
      move_means(means, slopes.list, 1 - step.beta1, now);
      move_squares(squares, slopes.list, step.beta2, now);
    }
    Scratch updates(p, p[0].scalar_type());
    updates.copy(means);
    updates.multiply(mean_scale(now.steps));
    updates.block.div_(roots(squares, root_scale(now.steps), step.eps).block);
    const auto weight_norms = norms(p), update_norms = norms(updates.views);
    const auto either_is_zero = weight_norms.eq(0).logical_or_(update_norms.eq(0));
    const auto trust = weight_norms.div(update_norms)
                           .clamp_max_(step.max_trust)
                           .masked_fill_(either_is_zero, 1);
    descend_each(p, std::move(updates), scaled(trust, now.lr), now);
  });
}

void larc(
    rust::Slice<const TensorRef> tensors, size_t count, const LarcStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  auto roles = roles_of(tensors, count, 2 + buffered, 2 + buffered, "LARC");
  const auto ways = split(roles, device, operations);
  const Host<LarcStep> numbers(step);
  loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
    auto* b = buffered ? t[2] : nullptr;
    const auto sums = sum_of_squares(numel, [&](int64_t i, int64_t end) {
      return run_larc_norms(t[0] + i, t[1] + i, end - i, numbers);
    });
    const double rate = larc_rate(step, std::sqrt(sums.first), std::sqrt(sums.second));
    each_block(numel, [&](int64_t, int64_t i, int64_t end) {
      run_larc(t[0] + i, t[1] + i, b ? b + i : b, end - i, numbers, rate);
    });
  });
  each_piece(chosen(roles, ways.operations), kGradient, [&](Piece& piece) {
    const StepNumbers now(device, piece.device, step.lr, 0);
    const auto& p = piece.roles[0];
    auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    const auto weight_norms = norms(p);
    const auto below =
        norms(slopes.list).add_(weight_norms, step.weight_decay).add_(step.eps);
    auto rates = scaled(weight_norms.mul(step.trust), now.lr).div_(below);
    if (step.clip) {
      rates = now.lr.on_host() ? rates.clamp_max(now.lr.host())
                               : at::minimum(rates, now.lr.device());
    }
    Scratch updates(p, p[0].scalar_type());
    if (buffered) {
      accumulate(piece.roles[2], slopes.list, step.momentum, now);
      updates.copy(piece.roles[2]);
    } else {
      updates.copy(slopes.list);
    }
    descend_each(p, std::move(updates), rates, now);
  });
}

void look_ahead(
    rust::Slice<const TensorRef> tensors, size_t count, const LookAheadStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 2, 2, "Lookahead");
  Split ways;
  for (size_t i = 0; i < count; ++i) {
    const bool loops = !operations && device.empty() && is_flat({roles[0][i], roles[1][i]});
    (loops ? ways.loops : ways.operations).push_back(i);
  }
  loop(roles, ways.loops, [&](const auto& t, int64_t numel) {
    each_block(numel, [&](int64_t, int64_t i, int64_t end) {
      run_look_ahead(t[0] + i, t[1] + i, end - i, step.alpha);
    });
  });
  each_piece(chosen(roles, ways.operations), kNone, [&](Piece& piece) {
    const auto &fast = piece.roles[0], &slow = piece.roles[1];
    const StepNumbers now(device, piece.device, 0, 0);
    if (now.steps.on_host()) {
      at::_foreach_lerp_(slow, fast, step.alpha);
      at::_foreach_copy_(fast, slow);
      return;
    }
    auto rests = now.steps.device().fmod(static_cast<double>(step.every)).ne(0);
    if (now.can_skip()) {
      rests.logical_or_(now.skip);
    }
    Scratch way(fast, fast[0].scalar_type());
    way.copy(fast);
    at::_foreach_sub_(way.views, slow);
    way.block.mul_(step.alpha).masked_fill_(rests, -0.0);
    at::_foreach_add_(slow, way.views);
    way.copy(fast);
    Scratch new_fast(slow, slow[0].scalar_type());
    new_fast.copy(slow);
    at::where_out(new_fast.block, rests, way.block, new_fast.block);
    at::_foreach_copy_(fast, new_fast.views);
  });
}

bool same_layout(const Tensor& first, const Tensor& second) {
  return first.device() == second.device() && first.scalar_type() == second.scalar_type() &&
      first.sizes() == second.sizes() && first.strides() == second.strides();
}

} // namespace brigade
