// Steps of Adam, AdamW and SGD over many float32 parameters, with their copies in 16 bits, for NVIDIA GPUs from compute
// capability 8.0 on. crates/torch/cpp/kernels/optimizer.cpp launches these kernels.
//
// Registers of a thread: at most 128.
//
// A launch steps as many parameters as fit into its argument; a block steps a chunk of one of them. A thread has eight
// values, which it reads and writes as vectors of 16 bytes where all of the parameter's memory begins at a multiple of
// 16 bytes. The type of the elements is that of the copies; without copies the kernels are the same for all types.
//
// The formulas are those of libtorch's fused kernels. Those compute most of a step in float64, for which GPUs without
// fast float64 take longer than for the memory. Here a factor is a float64 number split into two of float32, whose
// product with a value is rounded once, and sums keep what their roundings lose. All roundings are explicit, so that a
// value's bits do not depend on its place.

// What a parameter's step reads and writes: float32 in memory without gaps, in the same order of elements.
struct OptimizerTensor {
  float* parameter;
  const float* gradient;
  // Adam: the running means of the gradient and of its square, and the largest of the latter (AMSGrad). SGD: the
  // momentum buffer. Null for those that a rule does not have.
  float* states[3];
  // Copy of the parameter in the type of the elements. Null for none.
  void* copy;
  // Number of steps including this one, for Adam.
  const float* steps;
  long long count;
};

// Most parameters of a launch: the argument of a kernel has at most 4096 bytes.
constexpr int kOptimizerTensors = 56;

struct OptimizerTensors {
  OptimizerTensor of[kOptimizerTensors];
  // Number of the blocks of each parameter and of those before it.
  unsigned ends[kOptimizerTensors];
  int count;
};

// Numbers that all rules have.
struct OptimizerNumbers {
  // Learning rate, and the place in memory of one that takes its place, or null.
  double lr;
  const double* lr_on_device;
  // What gradients are multiplied by. Null for 1.
  const double* inverse_scale;
  // True where the step is left out. Null if it never is.
  const bool* skip;
  // Added to the gradient, or, if decoupled, subtracted from the parameter after a product with the learning rate.
  double weight_decay;
  bool is_decoupled;
  bool maximize;
};

struct AdamArguments {
  OptimizerTensors tensors;
  OptimizerNumbers numbers;
  double beta1;
  double beta2;
  double eps;
};

struct SgdArguments {
  OptimizerTensors tensors;
  OptimizerNumbers numbers;
  double momentum;
  double dampening;
  bool nesterov;
  // The momentum buffer is not read: it becomes the gradient.
  bool is_first;
};

// Threads of a block, and values of a chunk: a multiple of eight for each thread.
constexpr int kOptimizerThreads = 256;
constexpr int kOptimizerChunk = 16384;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// Values that a thread steps at once.
constexpr int kEight = 8;

__device__ __forceinline__ bool is_finite(float value) {
  return value - value == 0;
}

// A float64 number as the sum of two float32 numbers.
struct Factor {
  float high, low;
};

__device__ __forceinline__ Factor factor(double value) {
  const float high = static_cast<float>(value);
  return {high, static_cast<float>(value - static_cast<double>(high))};
}

__device__ __forceinline__ float times(Factor by, float x) {
  const float product = fmaf(by.high, x, __fmul_rn(by.low, x));
  return is_finite(product) ? product : __fmul_rn(by.high, x);
}

// one * x + two * (y + rest), where `rest` is much smaller than `y`, with an error of half a unit in the last place,
// also where the terms cancel: what products and sum lose is added at the end. NaN where a term is not finite.
__device__ __forceinline__ float finite_sum(Factor one, float x, Factor two, float y, float rest) {
  const float first = __fmul_rn(one.high, x), second = __fmul_rn(two.high, y);
  const float sum = __fadd_rn(first, second);
  const float added = __fsub_rn(sum, first);
  const float of_sum = __fadd_rn(__fsub_rn(first, __fsub_rn(sum, added)), __fsub_rn(second, added));
  const float of_products = __fadd_rn(fmaf(one.high, x, -first), fmaf(two.high, y, -second));
  const float of_factors = fmaf(one.low, x, fmaf(two.low, y, __fmul_rn(two.high, rest)));
  return __fadd_rn(sum, __fadd_rn(of_sum, __fadd_rn(of_products, of_factors)));
}

// one * x + two * y
__device__ __forceinline__ float sum_of(Factor one, float x, Factor two, float y) {
  const float sum = finite_sum(one, x, two, y, 0);
  return is_finite(sum) ? sum : __fadd_rn(__fmul_rn(one.high, x), __fmul_rn(two.high, y));
}

// one * x + two * y * y. The square may be infinite where the result is not.
__device__ __forceinline__ float sum_of_square(Factor one, float x, Factor two, float y) {
  const float square = __fmul_rn(y, y);
  const float sum = finite_sum(one, x, two, square, fmaf(y, y, -square));
  return is_finite(sum)
      ? sum
      : __fadd_rn(__fmul_rn(one.high, x), __fmul_rn(__fmul_rn(two.high, y), y));
}

// Factors that all rules have.
struct SharedFactors {
  double lr;
  // What the gradient is multiplied by: its sign, and what undoes a loss scale.
  Factor gradient;
  // Times the parameter, added to the gradient, and subtracted from the parameter.
  Factor added;
  Factor shrink;
  bool adds;
  bool shrinks;

  __device__ __forceinline__ void fill(const OptimizerNumbers& a) {
    lr = a.lr_on_device == nullptr ? a.lr : *a.lr_on_device;
    const double scale = a.inverse_scale == nullptr ? 1.0 : *a.inverse_scale;
    gradient = factor(a.maximize ? -scale : scale);
    adds = a.weight_decay != 0 && !a.is_decoupled;
    shrinks = a.weight_decay != 0 && a.is_decoupled;
    added = factor(a.weight_decay);
    shrink = factor(lr * a.weight_decay);
  }

  // Without weight decay an infinite parameter must not become a NaN of the slope, or of the result.
  __device__ __forceinline__ float slope(float own, float parameter) const {
    return adds ? sum_of(added, parameter, gradient, own) : times(gradient, own);
  }

  // The parameter after a move by `by` times (move + rest), where `rest` is much smaller than `move`, or not finite.
  __device__ __forceinline__ float moved(float parameter, Factor by, float move, float rest) const {
    const float exact = shrinks ? finite_sum(shrink, parameter, by, move, rest)
                                : fmaf(by.high, move, fmaf(by.low, move, __fmul_rn(by.high, rest)));
    if (is_finite(exact)) {
      return __fsub_rn(parameter, exact);
    }
    return __fsub_rn(parameter, shrinks ? sum_of(shrink, parameter, by, move) : times(by, move));
  }
};

struct AdamFactors {
  SharedFactors shared;
  Factor beta1, first, beta2, second;
  // The learning rate without the bias of the mean, and the reciprocal of the root of the bias of the squares' mean.
  Factor size;
  Factor inverse_root;
  float eps;

  __device__ __forceinline__ void fill(const AdamArguments& a, const OptimizerTensor& t) {
    shared.fill(a.numbers);
    const double steps = static_cast<double>(*t.steps);
    beta1 = factor(a.beta1);
    first = factor(1.0 - a.beta1);
    beta2 = factor(a.beta2);
    second = factor(1.0 - a.beta2);
    size = factor(shared.lr / (1.0 - pow(a.beta1, steps)));
    inverse_root = factor(1.0 / sqrt(1.0 - pow(a.beta2, steps)));
    eps = static_cast<float>(a.eps);
  }
};

struct SgdFactors {
  SharedFactors shared;
  Factor rate, momentum, undamped;
  bool nesterov;
  bool is_first;

  __device__ __forceinline__ void fill(const SgdArguments& a, const OptimizerTensor&) {
    shared.fill(a.numbers);
    rate = factor(shared.lr);
    momentum = factor(a.momentum);
    undamped = factor(1.0 - a.dampening);
    nesterov = a.nesterov;
    is_first = a.is_first;
  }
};

// The values of one element.
template <int states>
struct Stepped {
  float parameter;
  float gradient;
  float of[states];
};

template <bool amsgrad>
struct Adam {
  typedef AdamArguments Arguments;
  typedef AdamFactors Factors;
  static constexpr int kStates = amsgrad ? 3 : 2;
  // Whether states are read before they are written.
  static __device__ __forceinline__ bool reads_states(const Factors&) {
    return true;
  }

  static __device__ __forceinline__ void step(const Factors& f, Stepped<kStates>& it) {
    const float slope = f.shared.slope(it.gradient, it.parameter);
    const float mean = sum_of(f.beta1, it.of[0], f.first, slope);
    const float square = sum_of_square(f.beta2, it.of[1], f.second, slope);
    it.of[0] = mean;
    it.of[1] = square;
    float spread = square;
    if constexpr (amsgrad) {
      const float known = it.of[2];
      // NaNs stay, as in torch.maximum.
      spread = square > known || square != square ? square : known;
      it.of[2] = spread;
    }
    const float root = sqrtf(spread);
    const float scaled = __fmul_rn(f.inverse_root.high, root);
    const float denominator = __fadd_rn(scaled, f.eps);
    const float quotient = mean / denominator;
    // What root, denominator and quotient lose by their roundings, together several units in the last place of the
    // move. NaN, and ignored, for a root of 0.
    const float of_root = fmaf(-root, root, spread);
    const float added = __fsub_rn(denominator, scaled);
    const float of_sum = __fadd_rn(__fsub_rn(scaled, __fsub_rn(denominator, added)), __fsub_rn(f.eps, added));
    const float of_product = fmaf(f.inverse_root.low, root, fmaf(f.inverse_root.high, root, -scaled));
    const float of_quotient = fmaf(-quotient, denominator, mean);
    const float twice = __fadd_rn(root, root);
    const float rest = fmaf(twice, fmaf(-quotient, __fadd_rn(of_sum, of_product), of_quotient),
                            -__fmul_rn(__fmul_rn(quotient, f.inverse_root.high), of_root)) /
        __fmul_rn(twice, denominator);
    it.parameter = f.shared.moved(it.parameter, f.size, quotient, rest);
  }
};

template <bool buffered>
struct Sgd {
  typedef SgdArguments Arguments;
  typedef SgdFactors Factors;
  static constexpr int kStates = buffered ? 1 : 0;
  static __device__ __forceinline__ bool reads_states(const Factors& f) {
    return !f.is_first;
  }

  static __device__ __forceinline__ void step(const Factors& f, Stepped<1>& it) {
    float move = f.shared.slope(it.gradient, it.parameter);
    if constexpr (buffered) {
      const float sum = f.is_first ? move : sum_of(f.momentum, it.of[0], f.undamped, move);
      it.of[0] = sum;
      move = f.nesterov ? sum_of(f.momentum, sum, Factor{1, 0}, move) : sum;
    }
    it.parameter = f.shared.moved(it.parameter, f.rate, move, 0);
  }
};

__device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<u64>(address) % 16 == 0;
}

// Eight values of float32, of which `count` are there if they are not a vector. The others are 0.
struct Eight {
  float of[kEight];

  __device__ __forceinline__ void load(const float* from, bool is_vector, int count) {
    if (is_vector) {
#pragma unroll
      for (int word = 0; word < kEight / 4; ++word) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[word];
        of[word * 4] = __uint_as_float(four.x);
        of[word * 4 + 1] = __uint_as_float(four.y);
        of[word * 4 + 2] = __uint_as_float(four.z);
        of[word * 4 + 3] = __uint_as_float(four.w);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kEight; ++v) {
        of[v] = v < count ? from[v] : 0;
      }
    }
  }

  __device__ __forceinline__ void store(float* to, bool is_vector, int count) const {
    if (is_vector) {
#pragma unroll
      for (int word = 0; word < kEight / 4; ++word) {
        uint4 four;
        four.x = __float_as_uint(of[word * 4]);
        four.y = __float_as_uint(of[word * 4 + 1]);
        four.z = __float_as_uint(of[word * 4 + 2]);
        four.w = __float_as_uint(of[word * 4 + 3]);
        reinterpret_cast<uint4*>(to)[word] = four;
      }
    } else {
#pragma unroll
      for (int v = 0; v < kEight; ++v) {
        if (v < count) {
          to[v] = of[v];
        }
      }
    }
  }

  // In the type of the elements.
  __device__ __forceinline__ void store_copy(Element* to, bool is_vector, int count) const {
    if constexpr (!kIsFloat32) {
      const Values values(of);
      if (is_vector) {
        store_vector<true>(to, count, values);
      } else {
        store_vector<false>(to, count, values);
      }
    }
  }
};

// Index of the parameter that a block belongs to.
__device__ __forceinline__ int tensor_of(const OptimizerTensors& tensors, unsigned block) {
  int low = 0, high = tensors.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tensors.ends[middle] <= block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Steps the chunk of this block.
template <typename Rule>
__device__ __forceinline__ void step_chunk(const typename Rule::Arguments& a) {
  if (a.numbers.skip != nullptr && *a.numbers.skip) {
    return;
  }
  const int index = tensor_of(a.tensors, blockIdx.x);
  const OptimizerTensor& t = a.tensors.of[index];
  const unsigned first_block = index == 0 ? 0 : a.tensors.ends[index - 1];
  // Powers of float64 take long: once for all threads.
  __shared__ typename Rule::Factors factors;
  if (threadIdx.x == 0) {
    factors.fill(a, t);
  }
  __syncthreads();
  const typename Rule::Factors f = factors;
  constexpr int kStates = Rule::kStates;
  const bool reads_states = Rule::reads_states(f);
  float* const parameter = t.parameter;
  const float* const gradient = t.gradient;
  Element* const copy = static_cast<Element*>(t.copy);
  bool aligned = is_aligned(parameter) && is_aligned(gradient) && is_aligned(copy);
#pragma unroll
  for (int s = 0; s < kStates; ++s) {
    aligned = aligned && is_aligned(t.states[s]);
  }
  const long long begin = static_cast<long long>(blockIdx.x - first_block) * kOptimizerChunk;
  const long long end = begin + kOptimizerChunk < t.count ? begin + kOptimizerChunk : t.count;
  for (long long at = begin + threadIdx.x * kEight; at < end; at += kOptimizerThreads * kEight) {
    const int count = static_cast<int>(end - at < kEight ? end - at : kEight);
    const bool is_vector = aligned && count == kEight;
    Eight parameters, gradients, states[kStates > 0 ? kStates : 1];
    parameters.load(parameter + at, is_vector, count);
    gradients.load(gradient + at, is_vector, count);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (reads_states) {
        states[s].load(t.states[s] + at, is_vector, count);
      } else {
        states[s] = Eight{};
      }
    }
#pragma unroll
    for (int v = 0; v < kEight; ++v) {
      Stepped<(kStates > 0 ? kStates : 1)> it;
      it.parameter = parameters.of[v];
      it.gradient = gradients.of[v];
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        it.of[s] = states[s].of[v];
      }
      Rule::step(f, it);
      parameters.of[v] = it.parameter;
#pragma unroll
      for (int s = 0; s < kStates; ++s) {
        states[s].of[v] = it.of[s];
      }
    }
    parameters.store(parameter + at, is_vector, count);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      states[s].store(t.states[s] + at, is_vector, count);
    }
    if (copy != nullptr) {
      parameters.store_copy(copy + at, is_vector, count);
    }
  }
}

}  // namespace

BRIGADE_KERNEL(kOptimizerThreads, 2) optimizer_adam(AdamArguments a) {
  step_chunk<Adam<false>>(a);
}

BRIGADE_KERNEL(kOptimizerThreads, 2) optimizer_adam_amsgrad(AdamArguments a) {
  step_chunk<Adam<true>>(a);
}

BRIGADE_KERNEL(kOptimizerThreads, 3) optimizer_sgd(SgdArguments a) {
  step_chunk<Sgd<false>>(a);
}

BRIGADE_KERNEL(kOptimizerThreads, 3) optimizer_sgd_momentum(SgdArguments a) {
  step_chunk<Sgd<true>>(a);
}

#endif
