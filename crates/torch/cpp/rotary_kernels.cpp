#include "rotary_kernels.h"

#include "every_cpu.h"

#include <cmath>
#include <type_traits>

namespace brigade {

namespace {

// Computes in 32 bits at least; `rounded` is what an operation of T would have stored.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
BRIGADE_INLINE Wide<T> rounded(Wide<T> value) {
  return static_cast<Wide<T>>(static_cast<T>(value));
}

// A product and a sum in one rounding, as libtorch's `addcmul` computes them where the processor can. A product of two
// numbers of 16 bits is exact in 32.
template <typename T>
BRIGADE_INLINE Wide<T> fused(Wide<T> one, Wide<T> other, Wide<T> sum) {
  if constexpr (sizeof(T) == 2) {
    return one * other + sum;
  } else {
    return std::fma(one, other, sum);
  }
}

template <typename T>
BRIGADE_INLINE void rotate_heads(
    const TokenHeads<T>& heads, const T* __restrict cos, const T* __restrict sin) {
  using C = Wide<T>;
  const int64_t half = heads.half;
  for (int64_t head = 0; head < heads.count; ++head) {
    const T* __restrict from = heads.from + head * heads.from_step;
    T* __restrict to = heads.to + head * heads.to_step;
    for (int64_t i = 0; i < half; ++i) {
      const C first = static_cast<C>(from[i]), second = static_cast<C>(from[half + i]);
      const C own_first = rounded<T>(first * static_cast<C>(cos[i]));
      const C own_second = rounded<T>(second * static_cast<C>(cos[half + i]));
      to[i] = static_cast<T>(fused<T>(-second, static_cast<C>(sin[i]), own_first));
      to[half + i] = static_cast<T>(fused<T>(first, static_cast<C>(sin[half + i]), own_second));
    }
  }
}

template <typename T>
BRIGADE_INLINE void rotate_heads_back(
    const TokenHeads<T>& heads, const T* __restrict cos, const T* __restrict sin) {
  using C = Wide<T>;
  const int64_t half = heads.half;
  for (int64_t head = 0; head < heads.count; ++head) {
    const T* __restrict from = heads.from + head * heads.from_step;
    T* __restrict to = heads.to + head * heads.to_step;
    for (int64_t i = 0; i < half; ++i) {
      const C first = static_cast<C>(from[i]), second = static_cast<C>(from[half + i]);
      to[i] = static_cast<T>(
          rounded<T>(first * static_cast<C>(cos[i])) + rounded<T>(second * static_cast<C>(sin[half + i])));
      to[half + i] = static_cast<T>(
          rounded<T>(second * static_cast<C>(cos[half + i])) - rounded<T>(first * static_cast<C>(sin[i])));
    }
  }
}

} // namespace

BRIGADE_EVERY_CPU void rotate(const TokenHeads<float>& heads, const float* cos, const float* sin) {
  rotate_heads(heads, cos, sin);
}
BRIGADE_EVERY_CPU void rotate(const TokenHeads<double>& heads, const double* cos, const double* sin) {
  rotate_heads(heads, cos, sin);
}
BRIGADE_EVERY_CPU void rotate(
    const TokenHeads<c10::BFloat16>& heads, const c10::BFloat16* cos, const c10::BFloat16* sin) {
  rotate_heads(heads, cos, sin);
}
BRIGADE_EVERY_CPU void rotate_back(const TokenHeads<float>& heads, const float* cos, const float* sin) {
  rotate_heads_back(heads, cos, sin);
}
BRIGADE_EVERY_CPU void rotate_back(const TokenHeads<double>& heads, const double* cos, const double* sin) {
  rotate_heads_back(heads, cos, sin);
}
BRIGADE_EVERY_CPU void rotate_back(
    const TokenHeads<c10::BFloat16>& heads, const c10::BFloat16* cos, const c10::BFloat16* sin) {
  rotate_heads_back(heads, cos, sin);
}

} // namespace brigade
