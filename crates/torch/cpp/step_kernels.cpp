#include "step_kernels.h"

#include "every_cpu.h"

#include <algorithm>
#include <cmath>
#ifdef BRIGADE_X86_V3
#include <immintrin.h>
#endif

namespace brigade {

namespace {

// Elements whose update waits in the first-level cache for its norm.
constexpr int64_t kStrip = 1024;
constexpr int64_t kLanes = 8;

// `DecayNumbers` in the type of the computation.
template <typename T>
struct Decay {
  BRIGADE_INLINE explicit Decay(const DecayNumbers& numbers)
      : factor(numbers.factor), added(numbers.added), keep(numbers.keep), adds(numbers.added != 0) {}

  BRIGADE_INLINE T weight(T parameter) const {
    return parameter * keep;
  }
  // Without weight decay an infinite weight must not become a NaN in the gradient.
  BRIGADE_INLINE T slope(T gradient, T weight) const {
    const T own = gradient * factor;
    return adds ? own + weight * added : own;
  }

  T factor, added, keep;
  bool adds;
};

// ---- libtorch's fused rules: its constants and its order of operations

template <bool amsgrad, typename T>
BRIGADE_INLINE void adam_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    T* __restrict largest, int64_t count, const AdamNumbers& step) {
  const Decay<T> decay(step.decay);
  const T first = 1 - step.beta1, beta2 = step.beta2, second = 1 - step.beta2, size = step.size,
          root_bias = step.root_bias, eps = step.eps;
  // The interpolation of the means begins at the nearer end: with a beta of 0 the mean is the gradient exactly.
  const bool near_mean = std::abs(first) < T(0.5);
  const T part = near_mean ? first : first - 1;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T before = mean[i];
    const T moved = (near_mean ? before : slope) + part * (slope - before);
    const T squared = square[i] * beta2 + second * slope * slope;
    mean[i] = moved;
    square[i] = squared;
    T spread = squared;
    if constexpr (amsgrad) {
      const T known = largest[i];
      // NaNs stay, as in torch.maximum.
      spread = squared > known || squared != squared ? squared : known;
      largest[i] = spread;
    }
    const T denominator = std::sqrt(spread) / root_bias + eps;
    parameter[i] = weight - size * moved / denominator;
  }
}

template <bool buffered, typename T>
BRIGADE_INLINE void sgd_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict buffer, int64_t count,
    const SgdNumbers& step) {
  const Decay<T> decay(step.decay);
  const T lr = step.lr, momentum = step.momentum, damped = 1 - step.dampening;
  const bool nesterov = step.nesterov, first = step.first;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    T move = slope;
    if constexpr (buffered) {
      const T moved = first ? slope : buffer[i] * momentum + slope * damped;
      buffer[i] = moved;
      move = nesterov ? slope + moved * momentum : moved;
    }
    parameter[i] = weight - move * lr;
  }
}

template <typename T>
BRIGADE_INLINE void adagrad_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict sum, int64_t count,
    const AdagradNumbers& step) {
  const Decay<T> decay(step.decay);
  const T lr = step.lr, eps = step.eps;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T squares = sum[i] + slope * slope;
    sum[i] = squares;
    parameter[i] = weight - lr * slope / (std::sqrt(squares) + eps);
  }
}

// ---- RMSprop

template <bool centered, bool buffered, typename T>
BRIGADE_INLINE void rmsprop_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict square, T* __restrict mean,
    T* __restrict buffer, int64_t count, const RmsPropNumbers& step) {
  const Decay<T> decay(step.decay);
  const T lr = step.lr, rest = 1 - step.alpha, alpha = step.alpha, eps = step.eps, momentum = step.momentum;
  const bool buffers_gradient = step.momentum_of_gradient;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T squared = alpha * square[i] + rest * (slope * slope);
    square[i] = squared;
    T spread = squared;
    if constexpr (centered) {
      const T before = mean[i];
      const T moved = before + rest * (slope - before);
      mean[i] = moved;
      // Rounding must not make it negative.
      spread = std::max(squared - moved * moved, T(0));
    }
    const T denominator = std::sqrt(spread) + eps;
    T move = slope / denominator;
    if constexpr (buffered) {
      const T moved = momentum * buffer[i] + (buffers_gradient ? slope : move);
      buffer[i] = moved;
      move = buffers_gradient ? moved / denominator : moved;
    }
    parameter[i] = weight - lr * move;
  }
}

// ---- moments, for RAdam, QHAdam and LAMB

// The running means of the slope and of its square.
template <typename T>
struct Moments {
  BRIGADE_INLINE Moments(double beta1, double beta2) : first(1 - beta1), beta2(beta2), second(1 - beta2) {}

  BRIGADE_INLINE T mean(T before, T slope) const {
    return before + first * (slope - before);
  }
  BRIGADE_INLINE T square(T before, T slope) const {
    return beta2 * before + second * (slope * slope);
  }

  T first, beta2, second;
};

template <typename T>
BRIGADE_INLINE void rectified_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    int64_t count, const RectifiedNumbers& step) {
  const Decay<T> decay(step.decay);
  const Moments<T> moments(step.beta1, step.beta2);
  const T size = step.size, root_scale = step.root_scale, eps = step.eps;
  const bool adaptive = step.adaptive;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T moved = moments.mean(mean[i], slope), squared = moments.square(square[i], slope);
    mean[i] = moved;
    square[i] = squared;
    const T denominator = adaptive ? std::sqrt(squared) * root_scale + eps : T(1);
    parameter[i] = weight - size * (moved / denominator);
  }
}

template <typename T>
BRIGADE_INLINE void qhadam_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict mean, T* __restrict square,
    int64_t count, const QhAdamNumbers& step) {
  const Decay<T> decay(step.decay);
  const Moments<T> moments(step.beta1, step.beta2);
  const T lr = step.lr, eps = step.eps, mean_scale = step.mean_scale, square_scale = step.square_scale,
          slope_part = 1 - step.nu1, square_part = 1 - step.nu2;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T moved = moments.mean(mean[i], slope), squared = moments.square(square[i], slope);
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
    T* __restrict update, int64_t count, const LambNumbers& step) {
  const Decay<T> decay(step.decay);
  const Moments<T> moments(step.beta1, step.beta2);
  const T mean_scale = step.mean_scale, root_scale = step.root_scale, eps = step.eps;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    const T slope = decay.slope(gradient[i], weight);
    const T moved = moments.mean(mean[i], slope), squared = moments.square(square[i], slope);
    parameter[i] = weight;
    mean[i] = moved;
    square[i] = squared;
    update[i] = (moved * mean_scale) / (std::sqrt(squared) * root_scale + eps);
  }
}

template <typename T>
BRIGADE_INLINE void lamb_update_range(
    T* __restrict parameter, const T* __restrict mean, const T* __restrict square, int64_t count,
    const LambNumbers& step, double rate) {
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
    const T* __restrict parameter, const T* __restrict gradient, T* __restrict weight, T* __restrict slope,
    int64_t count, const LarcNumbers& step) {
  const Decay<T> decay(step.decay);
  for (int64_t i = 0; i < count; ++i) {
    weight[i] = decay.weight(parameter[i]);
    slope[i] = decay.slope(gradient[i], weight[i]);
  }
}

template <bool buffered, typename T>
BRIGADE_INLINE void larc_range(
    T* __restrict parameter, const T* __restrict gradient, T* __restrict buffer, int64_t count,
    const LarcNumbers& step, double rate) {
  const Decay<T> decay(step.decay);
  const T lr = rate, momentum = step.momentum;
  for (int64_t i = 0; i < count; ++i) {
    const T weight = decay.weight(parameter[i]);
    T move = decay.slope(gradient[i], weight);
    if constexpr (buffered) {
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
    const T before = slow[i];
    const T moved = before + alpha * (fast[i] - before);
    slow[i] = moved;
    fast[i] = moved;
  }
}

// ---- 16 bits

template <typename T>
BRIGADE_INLINE void widen_range(const T* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

template <typename T>
BRIGADE_INLINE void narrow_range(const float* __restrict from, T* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<T>(from[i]);
  }
}

#ifdef BRIGADE_X86_V3
// The conversions of half precision by instructions take a quarter of the time of those by arithmetic.
BRIGADE_ANY_X86 void widen_half(const c10::Half* from, float* to, int64_t count) {
  widen_range(from, to, count);
}

BRIGADE_X86_V3 void widen_half(const c10::Half* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) {
    to[i] = _cvtsh_ss(from[i].x);
  }
}

BRIGADE_ANY_X86 void narrow_half(const float* from, c10::Half* to, int64_t count) {
  narrow_range(from, to, count);
}

BRIGADE_X86_V3 void narrow_half(const float* from, c10::Half* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) {
    to[i].x = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  }
}
#else
void widen_half(const c10::Half* from, float* to, int64_t count) {
  widen_range(from, to, count);
}

void narrow_half(const float* from, c10::Half* to, int64_t count) {
  narrow_range(from, to, count);
}
#endif

} // namespace

// The same for both types: attributes choose the CPU for a function, not for a template. What is null is decided here,
// so that no loop has a branch.
#define BRIGADE_STEP_LOOPS(T)                                                                           \
  BRIGADE_EVERY_CPU void adam_loop(                                                                     \
      T* p, const T* g, T* m, T* s, T* l, int64_t n, const AdamNumbers& step) {                         \
    l ? adam_range<true>(p, g, m, s, l, n, step) : adam_range<false>(p, g, m, s, l, n, step);           \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void sgd_loop(T* p, const T* g, T* b, int64_t n, const SgdNumbers& step) {          \
    b ? sgd_range<true>(p, g, b, n, step) : sgd_range<false>(p, g, b, n, step);                         \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void adagrad_loop(T* p, const T* g, T* s, int64_t n, const AdagradNumbers& step) {  \
    adagrad_range(p, g, s, n, step);                                                                    \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void rmsprop_loop(                                                                  \
      T* p, const T* g, T* s, T* m, T* b, int64_t n, const RmsPropNumbers& step) {                      \
    if (m) {                                                                                            \
      b ? rmsprop_range<true, true>(p, g, s, m, b, n, step)                                             \
        : rmsprop_range<true, false>(p, g, s, m, b, n, step);                                           \
    } else {                                                                                            \
      b ? rmsprop_range<false, true>(p, g, s, m, b, n, step)                                            \
        : rmsprop_range<false, false>(p, g, s, m, b, n, step);                                          \
    }                                                                                                   \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void rectified_loop(                                                                \
      T* p, const T* g, T* m, T* s, int64_t n, const RectifiedNumbers& step) {                          \
    rectified_range(p, g, m, s, n, step);                                                               \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void qhadam_loop(                                                                   \
      T* p, const T* g, T* m, T* s, int64_t n, const QhAdamNumbers& step) {                             \
    qhadam_range(p, g, m, s, n, step);                                                                  \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void look_ahead_loop(T* fast, T* slow, int64_t n, double alpha) {                   \
    look_ahead_range(fast, slow, n, alpha);                                                             \
  }                                                                                                     \
  BRIGADE_EVERY_CPU Norms lamb_moments_loop(                                                            \
      T* p, const T* g, T* m, T* s, int64_t n, const LambNumbers& step) {                               \
    T update[kStrip];                                                                                   \
    Norms norms;                                                                                        \
    for (int64_t i = 0; i < n; i += kStrip) {                                                           \
      const int64_t count = std::min(kStrip, n - i);                                                    \
      lamb_moments_range(p + i, g + i, m + i, s + i, update, count, step);                              \
      norms.first += squares_range(p + i, count);                                                       \
      norms.second += squares_range(update, count);                                                     \
    }                                                                                                   \
    return norms;                                                                                       \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void lamb_update_loop(                                                              \
      T* p, const T* m, const T* s, int64_t n, const LambNumbers& step, double rate) {                  \
    lamb_update_range(p, m, s, n, step, rate);                                                          \
  }                                                                                                     \
  BRIGADE_EVERY_CPU Norms larc_norms_loop(const T* p, const T* g, int64_t n, const LarcNumbers& step) { \
    T weight[kStrip], slope[kStrip];                                                                    \
    Norms norms;                                                                                        \
    for (int64_t i = 0; i < n; i += kStrip) {                                                           \
      const int64_t count = std::min(kStrip, n - i);                                                    \
      slope_range(p + i, g + i, weight, slope, count, step);                                            \
      norms.first += squares_range(weight, count);                                                      \
      norms.second += squares_range(slope, count);                                                      \
    }                                                                                                   \
    return norms;                                                                                       \
  }                                                                                                     \
  BRIGADE_EVERY_CPU void larc_loop(                                                                     \
      T* p, const T* g, T* b, int64_t n, const LarcNumbers& step, double rate) {                        \
    b ? larc_range<true>(p, g, b, n, step, rate) : larc_range<false>(p, g, b, n, step, rate);           \
  }

BRIGADE_STEP_LOOPS(float)
BRIGADE_STEP_LOOPS(double)

BRIGADE_EVERY_CPU void widen(const c10::BFloat16* from, float* to, int64_t count) {
  widen_range(from, to, count);
}

BRIGADE_EVERY_CPU void narrow(const float* from, c10::BFloat16* to, int64_t count) {
  narrow_range(from, to, count);
}

void widen(const c10::Half* from, float* to, int64_t count) {
  widen_half(from, to, count);
}

void narrow(const float* from, c10::Half* to, int64_t count) {
  narrow_half(from, to, count);
}

} // namespace brigade
