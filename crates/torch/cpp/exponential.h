// e^x that a compiler turns into vector instructions.
#pragma once

#include "every_cpu.h"

#include <bit>
#include <cmath>
#include <cstdint>

namespace brigade {

// To one unit in the last place, for x of at most 0: what a softmax asks for. Below -87.3 the result is 0,
// where e^x has no normal float any more; NaN stays NaN.
BRIGADE_INLINE float exponential(float x) {
  constexpr float kLog2OfE = 1.44269504088896341f;
  // ln 2 in two parts: the first has few digits, so that its product with a whole number is exact.
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // Adding it rounds a small number to the nearest whole one, which then stands in the last bits.
  constexpr float kRound = 12582912.0f;
  const float bounded = x < -87.3f ? -87.3f : x;
  const float shifted = bounded * kLog2OfE + kRound;
  const float whole = shifted - kRound;
  const float rest = bounded - whole * kLn2High - whole * kLn2Low;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127u) << 23;
  const float result = sum * std::bit_cast<float>(exponent);
  return x < -87.3f ? 0.0f : result;
}

BRIGADE_INLINE double exponential(double x) {
  return std::exp(x);
}

} // namespace brigade
