// Activations of linear layers and their gated pairs, with the layers' biases, for NVIDIA GPUs from compute capability
// 8.0 on. crates/torch/cpp/kernels/activation.cpp launches these kernels.
//
// Registers of a thread: at most 128.
//
// A thread has a vector of 16 bytes of each of its rows, and reads the biases once for all of them. The biases are
// added, and everything is computed, in float32. The backward computes the activation again from its input, and can
// write it once more beside the gradients, so that the layer behind the activation need not keep it. Column sums, for
// the gradients of the biases, are made by each block over its rows and then added up in the order of the blocks,
// without atomics, so that results are the same bits in each run.

struct ActivationArguments {
  // [rows, width], each row `input_stride` elements after the one before. Of a gated pair it is the gate.
  const void* input;
  // The other half of a gated pair, which is multiplied by the activation. Not used by the other kernels.
  const void* up;
  // [width], added to `input` and to `up`. Null for 0.
  const float* bias;
  const float* up_bias;
  // [rows, width], without a gap between rows: activation(input + bias), times (up + up_bias) of a gated pair. Null
  // if the backward need not write it again.
  void* output;
  // Gradient of the output, without a gap between rows, and the gradients that the backward writes. One of them, or
  // `output`, may be in place of `doutput`.
  const void* doutput;
  void* dinput;
  void* dup;
  // Sums of each block, [parts, biases, width], and of all blocks, [biases, width]: one bias, or two of a gated pair.
  // Null if they are not wanted.
  float* part_sums;
  float* column_sums;
  long long rows;
  long long input_stride;
  long long up_stride;
  long long dinput_stride;
  long long dup_stride;
  int width;
  int parts;
  int biases;
  // An ActivationNumber.
  int activation;
};

// Numbers of the activations, in the order of `Activation` in crates/torch/src/activation.rs.
enum ActivationNumber {
  kActivationGelu = 0,
  kActivationGeluTanh = 1,
  kActivationSilu = 2,
  kActivationMish = 3,
  kActivationRelu = 4,
  kActivationReluSquared = 5,
};

// Threads of a block: along the columns, each with a vector, and along the rows.
constexpr int kActivationColumns = 32;
constexpr int kActivationRows = 8;
// Sums of different columns, in the kernel that adds up parts.
constexpr int kActivationSums = 32;
constexpr int kActivationStripes = 16;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// A value of an activation with its derivative.
struct ValueAndSlope {
  float value;
  float slope;
};

// Each activation with PyTorch's formulas, and the gradient of its input.
struct Smooth {
  static __device__ __forceinline__ float times_slope(float gradient, float slope) {
    return gradient * slope;
  }
};

// Below 0 the gradient is 0, whatever that of the output is.
struct Rectified {
  static __device__ __forceinline__ float times_slope(float gradient, float slope) {
    return slope == 0 ? 0 : gradient * slope;
  }
};

struct Gelu : Smooth {
  static __device__ __forceinline__ float cumulative(float x) {
    return 0.5f * (1 + erff(x * 0.70710678118654752f));
  }
  static __device__ __forceinline__ float value(float x) {
    return x * cumulative(x);
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    const float below = cumulative(x);
    const float density = expf(-0.5f * x * x) * 0.39894228040143268f;
    return {x * below, below + x * density};
  }
};

struct GeluTanh : Smooth {
  static constexpr float kBeta = 0.79788456080286536f;
  static constexpr float kKappa = 0.044715f;
  static __device__ __forceinline__ float inner(float x) {
    return kBeta * (x + kKappa * x * x * x);
  }
  static __device__ __forceinline__ float value(float x) {
    return 0.5f * x * (1 + tanhf(inner(x)));
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    const float t = tanhf(inner(x));
    const float of_inner = kBeta * (1 + 3 * kKappa * x * x);
    return {0.5f * x * (1 + t), 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * of_inner};
  }
};

struct Silu : Smooth {
  static __device__ __forceinline__ float value(float x) {
    return x / (1 + expf(-x));
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    const float sigmoid = 1 / (1 + expf(-x));
    return {x / (1 + expf(-x)), sigmoid * (1 + x * (1 - sigmoid))};
  }
};

struct Mish : Smooth {
  static __device__ __forceinline__ float value(float x) {
    return x * tanhf(log1pf(expf(x)));
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    const float sigmoid = 1 / (1 + expf(-x)), t = tanhf(log1pf(expf(x)));
    return {x * t, t + x * sigmoid * (1 - t * t)};
  }
};

// NaN stays NaN.
struct Relu : Rectified {
  static __device__ __forceinline__ float value(float x) {
    return x <= 0 ? 0 : x;
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    return {value(x), x <= 0 ? 0.0f : 1.0f};
  }
};

struct ReluSquared : Rectified {
  static __device__ __forceinline__ float value(float x) {
    return x <= 0 ? 0 : x * x;
  }
  static __device__ __forceinline__ ValueAndSlope with_slope(float x) {
    return {value(x), x <= 0 ? 0 : 2 * x};
  }
};

// Calls `use` with the activation. All threads have the same one.
template <typename Use>
__device__ __forceinline__ void with_activation(int activation, const Use& use) {
  switch (activation) {
    case kActivationGelu:
      return use(Gelu());
    case kActivationGeluTanh:
      return use(GeluTanh());
    case kActivationSilu:
      return use(Silu());
    case kActivationMish:
      return use(Mish());
    case kActivationRelu:
      return use(Relu());
    default:
      return use(ReluSquared());
  }
}

// The vectors of a matrix. Those of rows at any address are read and written value by value.
template <bool aligned>
struct Matrix {
  Element* at;
  long long stride;
  int width;

  __device__ __forceinline__ Matrix(const void* values, long long stride, int width)
      : at(static_cast<Element*>(const_cast<void*>(values))), stride(stride), width(width) {}

  __device__ __forceinline__ Values load(long long row, int column) const {
    return load_vector<aligned>(at + row * stride + column, width - column);
  }

  __device__ __forceinline__ void store(long long row, int column, const Values& values) const {
    store_vector<aligned>(at + row * stride + column, width - column, values);
  }
};

// The values of a bias, or 0 where there is none.
__device__ __forceinline__ Values bias_at(const float* bias, int column, int width) {
  Values values;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    values.of[v] = bias != nullptr && column + v < width ? bias[column + v] : 0;
  }
  return values;
}

__device__ __forceinline__ int column_of_thread() {
  return static_cast<int>(blockIdx.x * kActivationColumns + threadIdx.x) * kVector;
}

// Turns a vector of the input into the output. What an activation is applied by is a struct: NVRTC takes a lambda with
// an `auto` parameter for a function of the host.
template <bool gated>
struct ActivateVector {
  Values& x;
  const Values& factor;
  const Values& bias;
  const Values& up_bias;

  template <typename Function>
  __device__ __forceinline__ void operator()(Function) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      x.of[v] = Function::value(x.of[v] + bias.of[v]);
      if constexpr (gated) {
        x.of[v] *= factor.of[v] + up_bias.of[v];
      }
    }
  }
};

// Turns a vector of the input into the output, the gradient of the output into that of the input, and a vector of `up`
// into its gradient, and adds the gradients to the sums.
template <bool gated>
struct DifferentiateVector {
  Values& x;
  Values& g;
  Values& factor;
  const Values& bias;
  const Values& up_bias;
  Values& sums;
  Values& up_sums;

  template <typename Function>
  __device__ __forceinline__ void operator()(Function) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const ValueAndSlope found = Function::with_slope(x.of[v] + bias.of[v]);
      if constexpr (gated) {
        const float other = factor.of[v] + up_bias.of[v];
        x.of[v] = found.value * other;
        factor.of[v] = g.of[v] * found.value;
        g.of[v] = Function::times_slope(g.of[v] * other, found.slope);
        up_sums.of[v] += factor.of[v];
      } else {
        x.of[v] = found.value;
        g.of[v] = Function::times_slope(g.of[v], found.slope);
      }
      sums.of[v] += g.of[v];
    }
  }
};

template <bool gated, bool aligned>
__device__ __forceinline__ void activate(const ActivationArguments& a) {
  const int column = column_of_thread(), width = a.width;
  if (column >= width) {
    return;
  }
  const Matrix<aligned> input(a.input, a.input_stride, width), up(a.up, a.up_stride, width);
  const Matrix<aligned> output(a.output, width, width);
  const Values bias = bias_at(a.bias, column, width);
  const Values up_bias = bias_at(gated ? a.up_bias : nullptr, column, width);
  const long long step = static_cast<long long>(gridDim.y) * kActivationRows;
  for (long long row = blockIdx.y * kActivationRows + threadIdx.y; row < a.rows; row += step) {
    Values x = input.load(row, column);
    Values factor;
    if constexpr (gated) {
      factor = up.load(row, column);
    }
    with_activation(a.activation, ActivateVector<gated>{x, factor, bias, up_bias});
    output.store(row, column, x);
  }
}

// Adds up the sums of a block's rows for each of its columns, and leaves them at `to`, [width]. All threads take part.
__device__ __forceinline__ void leave_sums(const Values& sums, float* to, int width) {
  __shared__ float shared[kActivationRows][kVector * kActivationColumns];
  const int lane = static_cast<int>(threadIdx.x), stripe = static_cast<int>(threadIdx.y);
  // An earlier call may still read the places.
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    shared[stripe][v * kActivationColumns + lane] = sums.of[v];
  }
  __syncthreads();
  // Each thread has one value of the vectors of its lane.
  for (int v = stripe; v < kVector; v += kActivationRows) {
    const int column = column_of_thread() + v;
    float sum = 0;
    for (int other = 0; other < kActivationRows; ++other) {
      sum += shared[other][v * kActivationColumns + lane];
    }
    if (column < width) {
      to[column] = sum;
    }
  }
}

template <bool gated, bool aligned>
__device__ __forceinline__ void activate_backward(const ActivationArguments& a) {
  const int column = column_of_thread(), width = a.width;
  const Matrix<aligned> input(a.input, a.input_stride, width), up(a.up, a.up_stride, width);
  const Matrix<aligned> output(a.output, width, width), doutput(a.doutput, width, width);
  const Matrix<aligned> dinput(a.dinput, a.dinput_stride, width), dup(a.dup, a.dup_stride, width);
  const Values bias = bias_at(a.bias, column, width);
  const Values up_bias = bias_at(gated ? a.up_bias : nullptr, column, width);
  Values sums, up_sums;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    sums.of[v] = 0;
    up_sums.of[v] = 0;
  }
  const long long step = static_cast<long long>(gridDim.y) * kActivationRows;
  const long long rows = column < width ? a.rows : 0;
  for (long long row = blockIdx.y * kActivationRows + threadIdx.y; row < rows; row += step) {
    Values x = input.load(row, column), g = doutput.load(row, column);
    Values factor;
    if constexpr (gated) {
      factor = up.load(row, column);
    }
    with_activation(a.activation, DifferentiateVector<gated>{x, g, factor, bias, up_bias, sums, up_sums});
    if (a.output != nullptr) {
      output.store(row, column, x);
    }
    dinput.store(row, column, g);
    if constexpr (gated) {
      dup.store(row, column, factor);
    }
  }
  if (a.part_sums != nullptr) {
    float* to = a.part_sums + static_cast<long long>(blockIdx.y) * a.biases * width;
    leave_sums(sums, to, width);
    if constexpr (gated) {
      leave_sums(up_sums, to + width, width);
    }
  }
}

}  // namespace

#define BRIGADE_ACTIVATION(name, gated, aligned)                                                        \
  BRIGADE_KERNEL(kActivationColumns* kActivationRows, 2) name(ActivationArguments a) {                  \
    activate<gated, aligned>(a);                                                                        \
  }                                                                                                     \
  BRIGADE_KERNEL(kActivationColumns* kActivationRows, 2) name##_backward(ActivationArguments a) {       \
    activate_backward<gated, aligned>(a);                                                               \
  }

BRIGADE_ACTIVATION(activation, false, true)
BRIGADE_ACTIVATION(activation_unaligned, false, false)
BRIGADE_ACTIVATION(activation_gated, true, true)
BRIGADE_ACTIVATION(activation_gated_unaligned, true, false)

#undef BRIGADE_ACTIVATION

// Adds up the sums of the blocks: 32 columns in a block, 16 stripes of parts.
BRIGADE_KERNEL(kActivationSums* kActivationStripes, 1) activation_sums(ActivationArguments a) {
  __shared__ float shared[kActivationStripes][kActivationSums];
  add_parts<kActivationSums, kActivationStripes>(
      a.part_sums, a.column_sums, a.parts, a.biases * a.width, shared);
}

#endif
