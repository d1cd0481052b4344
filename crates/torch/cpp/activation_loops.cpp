#include "activation_loops.h"

#include "activation.cu"
#include "exponential.h"

#include <cmath>

namespace brigade {

namespace {

// A value of an activation with its derivative.
struct ValueAndSlope {
  float value;
  float slope;
};

// 1 / (1 + e^-x), and its derivative, without the difference of two numbers near 1.
BRIGADE_INLINE ValueAndSlope sigmoid(float x) {
  const float power = exponential(-std::fabs(x));
  const float part = 1 / (1 + power);
  return {x < 0 ? power * part : part, power * part * part};
}

// Each activation with PyTorch's formula, and the gradient of its input.
struct Smooth {
  static BRIGADE_INLINE float times_slope(float gradient, float slope) {
    return gradient * slope;
  }
};

// Below 0 the gradient is 0, whatever that of the output is.
struct Rectified {
  static BRIGADE_INLINE float times_slope(float gradient, float slope) {
    return slope == 0 ? 0 : gradient * slope;
  }
};

struct Gelu : Smooth {
  // The distribution function of the normal distribution at -|x| is e^(-x^2 / 2) times a polynomial of
  // |x| / (|x| + 2.5), fitted by weighted least squares: the error of the product, times 1 + |x|, is at most 2.3e-9. The
  // first term is exact, so that rounding errors of the others are small near 0.
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    // The quotient of two infinities would be NaN.
    const float size = std::fabs(x) > 1e30f ? 1e30f : std::fabs(x);
    const float share = size / (size + 2.5f), power = exponential(-0.5f * x * x);
    float sum = 0.0234501921f;
    sum = sum * share + 0.0112065263f;
    sum = sum * share - 0.0494639017f;
    sum = sum * share - 0.100758187f;
    sum = sum * share + 0.0496392809f;
    sum = sum * share + 0.565156937f;
    sum = sum * share - 0.997355998f;
    sum = sum * share + 0.5f;
    const float tail = power * sum, below = x < 0 ? tail : 1 - tail;
    return {x * below, below + x * (power * 0.39894228040143268f)};
  }
};

struct GeluTanh : Smooth {
  // (1 + tanh(y)) / 2 is the sigmoid of 2 y.
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    constexpr float kTwiceBeta = 1.5957691216057308f, kKappa = 0.044715f;
    const auto below = sigmoid(kTwiceBeta * (x + kKappa * x * x * x));
    return {x * below.value, below.value + x * below.slope * (kTwiceBeta * (1 + 3 * kKappa * x * x))};
  }
};

struct Silu : Smooth {
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    const auto below = sigmoid(x);
    return {x * below.value, below.value + x * below.slope};
  }
};

struct Mish : Smooth {
  // tanh(ln(1 + e^x)) is a quotient of polynomials of e^x, or of e^-x where that is smaller.
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    const float power = exponential(-std::fabs(x));
    const bool is_negative = x < 0;
    const float above = is_negative ? power * (power + 2) : 1 + 2 * power;
    const float below = 1 / (above + (is_negative ? 2 : 2 * power * power));
    const float factor = is_negative ? power : power * power;
    const float part = above * below;
    return {x * part, part + x * (4 * factor * (1 + power) * below * below)};
  }
};

// NaN stays NaN.
struct Relu : Rectified {
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    return {x <= 0 ? 0 : x, x <= 0 ? 0.0f : 1.0f};
  }
};

struct ReluSquared : Rectified {
  static BRIGADE_INLINE ValueAndSlope with_slope(float x) {
    return {x <= 0 ? 0 : x * x, x <= 0 ? 0 : 2 * x};
  }
};

template <typename Function>
BRIGADE_INLINE void activate(
    const float* __restrict gate, const float* __restrict up, float* __restrict output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    output[i] = Function::with_slope(gate[i]).value * up[i];
  }
}

template <typename Function, bool wants_output>
BRIGADE_INLINE void differentiate_range(
    const float* __restrict gate, const float* __restrict up, const float* __restrict doutput,
    float* __restrict dgate, float* __restrict dup, float* __restrict output, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto found = Function::with_slope(gate[i]);
    const float gradient = doutput[i], factor = up[i];
    dgate[i] = Function::times_slope(gradient * factor, found.slope);
    dup[i] = gradient * found.value;
    if constexpr (wants_output) {
      output[i] = found.value * factor;
    }
  }
}

template <typename Function>
BRIGADE_INLINE void differentiate(
    const float* gate, const float* up, const float* doutput, float* dgate, float* dup, float* output, int64_t count) {
  output == nullptr ? differentiate_range<Function, false>(gate, up, doutput, dgate, dup, output, count)
                    : differentiate_range<Function, true>(gate, up, doutput, dgate, dup, output, count);
}

} // namespace

BRIGADE_EVERY_CPU void activate_pairs(
    int activation, const float* gate, const float* up, float* output, int64_t count) {
  switch (activation) {
    case kActivationGelu:
      return activate<Gelu>(gate, up, output, count);
    case kActivationGeluTanh:
      return activate<GeluTanh>(gate, up, output, count);
    case kActivationSilu:
      return activate<Silu>(gate, up, output, count);
    case kActivationMish:
      return activate<Mish>(gate, up, output, count);
    case kActivationRelu:
      return activate<Relu>(gate, up, output, count);
    default:
      return activate<ReluSquared>(gate, up, output, count);
  }
}

BRIGADE_EVERY_CPU void differentiate_pairs(
    int activation, const float* gate, const float* up, const float* doutput, float* dgate, float* dup, float* output,
    int64_t count) {
  switch (activation) {
    case kActivationGelu:
      return differentiate<Gelu>(gate, up, doutput, dgate, dup, output, count);
    case kActivationGeluTanh:
      return differentiate<GeluTanh>(gate, up, doutput, dgate, dup, output, count);
    case kActivationSilu:
      return differentiate<Silu>(gate, up, doutput, dgate, dup, output, count);
    case kActivationMish:
      return differentiate<Mish>(gate, up, doutput, dgate, dup, output, count);
    case kActivationRelu:
      return differentiate<Relu>(gate, up, doutput, dgate, dup, output, count);
    default:
      return differentiate<ReluSquared>(gate, up, doutput, dgate, dup, output, count);
  }
}

} // namespace brigade
