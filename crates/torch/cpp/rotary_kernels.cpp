#include "rotary_kernels.h"

#include "every_cpu.h"

#include <bit>
#include <cmath>
#include <type_traits>

namespace brigade {

namespace {

// Computes in 32 bits at least.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
BRIGADE_INLINE Wide<T> wide(T value) {
  return value;
}
BRIGADE_INLINE float wide(c10::BFloat16 value) {
  return std::bit_cast<float>(uint32_t{value.x} << 16);
}

// What an operation of T stores. Of bfloat16 that is c10's rounding, without the branch that keeps loops from being
// vectors.
template <typename T>
BRIGADE_INLINE T narrow(Wide<T> value) {
  if constexpr (sizeof(T) == 2) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return c10::BFloat16(
        static_cast<uint16_t>(value != value ? 0x7fc0 : even), c10::BFloat16::from_bits());
  } else {
    return value;
  }
}

template <typename T>
BRIGADE_INLINE Wide<T> rounded(Wide<T> value) {
  return wide(narrow<T>(value));
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

// The halves of all have pointers of their own, so that the compiler sees that they do not overlap.
template <bool back, typename T>
BRIGADE_INLINE void rotate_head(
    const T* __restrict first, const T* __restrict second, const T* __restrict first_cos,
    const T* __restrict second_cos, const T* __restrict first_sin, const T* __restrict second_sin,
    T* __restrict to_first, T* __restrict to_second, int64_t half) {
  using C = Wide<T>;
  for (int64_t i = 0; i < half; ++i) {
    const C one = wide(first[i]), two = wide(second[i]);
    const C sin_one = wide(first_sin[i]), sin_two = wide(second_sin[i]);
    const C own_one = rounded<T>(one * wide(first_cos[i]));
    const C own_two = rounded<T>(two * wide(second_cos[i]));
    if constexpr (back) {
      to_first[i] = narrow<T>(own_one + rounded<T>(two * sin_two));
      to_second[i] = narrow<T>(own_two - rounded<T>(one * sin_one));
    } else {
      to_first[i] = narrow<T>(fused<T>(-two, sin_one, own_one));
      to_second[i] = narrow<T>(fused<T>(one, sin_two, own_two));
    }
  }
}

template <bool back, typename T>
BRIGADE_INLINE void rotate_heads(const RotaryHeads<T>& heads) {
  const int64_t half = heads.half;
  for (int64_t head = 0; head < heads.count; ++head) {
    const T* from = heads.from + head * heads.from_step;
    const T* cos = heads.cos + head * heads.cos_step;
    const T* sin = heads.sin + head * heads.sin_step;
    T* to = heads.to + head * heads.to_step;
    rotate_head<back>(from, from + half, cos, cos + half, sin, sin + half, to, to + half, half);
  }
}

} // namespace

// Attributes choose the CPU for a function, not for a template.
#define BRIGADE_ROTATIONS(T)                                           \
  BRIGADE_EVERY_CPU void rotate(const RotaryHeads<T>& heads) {         \
    rotate_heads<false>(heads);                                        \
  }                                                                    \
  BRIGADE_EVERY_CPU void rotate_back(const RotaryHeads<T>& heads) {    \
    rotate_heads<true>(heads);                                         \
  }
BRIGADE_ROTATIONS(float)
BRIGADE_ROTATIONS(double)
BRIGADE_ROTATIONS(c10::BFloat16)
#undef BRIGADE_ROTATIONS

} // namespace brigade
