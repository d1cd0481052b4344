// Cross-entropy of rows of logits with its gradient, which may take the place of the logits, for NVIDIA GPUs from compute
// capability 8.0 on. crates/torch/cpp/kernels/cross_entropy.cpp launches these kernels.
//
// Registers of a thread: at most 64.
//
// A block has a row. It reads the row twice: for the largest logit and the sum of exponentials together, and for the
// gradient. The second read comes from the L2 cache: 50,257 values of 16 bits are 100 KB, and with two blocks on each
// multiprocessor one computes exponentials while the other waits for memory. All sums are float32, in an order that
// depends on the number of classes alone, so that results are the same bits in each run.

struct CrossEntropyArguments {
  // [rows, columns], each row `stride` elements after the one before. The first `classes` columns are logits; the others
  // are padding, which is not used.
  const void* logits;
  // The same shape, or null; it may be `logits`. Zero in padding and in rows that do not count.
  void* gradient;
  // [rows].
  const long long* targets;
  float* losses;
  // Number that divides the gradient, if it is not null; 0 counts as 1.
  const long long* count;
  // Target of rows that do not count.
  long long ignored;
  long long stride;
  long long gradient_stride;
  int classes;
  int columns;
  // Label smoothing, and the factor of the squared logarithm of the sum of exponentials.
  float smoothing;
  float z_loss;
  // Factor of the gradient.
  float scale;
};

// Maximum number of threads in a block.
constexpr int kCrossEntropyThreads = 512;
// Blocks on a multiprocessor.
constexpr int kCrossEntropyBlocks = 2;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// A thread reads or writes this many vectors before it uses the first: with fewer, too few reads are under way to keep
// memory busy.
constexpr int kRowDepth = 4;

// The vectors of a row. Those of rows at any address are read and written value by value.
template <bool aligned>
struct Row {
  Element* at;

  // `count` values are there.
  __device__ __forceinline__ uint4 load(int vector, int count) const {
    if constexpr (aligned) {
      return reinterpret_cast<const uint4*>(at)[vector];
    } else {
      // Exact: the values are of this type.
      return load_vector<aligned>(at + vector * kVector, count).narrowed();
    }
  }

  __device__ __forceinline__ void store(int vector, int count, const Values& values) const {
    store_vector<aligned>(at + vector * kVector, count, values);
  }
};

// The largest logit where it can be subtracted from all: minus infinity from itself would be NaN.
__device__ __forceinline__ float subtracted(float largest) {
  return largest == Max::none() ? 0 : largest;
}

// Calls `use(vector, packed)` for this thread's vectors of a row, of which `columns` values are there.
template <bool aligned, typename Use>
__device__ __forceinline__ void each_vector(const Row<aligned>& row, int columns, const Use& use) {
  const int vectors = (columns + kVector - 1) / kVector, threads = static_cast<int>(blockDim.x);
  for (int first = threadIdx.x; first < vectors; first += kRowDepth * threads) {
    uint4 packed[kRowDepth];
#pragma unroll
    for (int slot = 0; slot < kRowDepth; ++slot) {
      const int vector = first + slot * threads;
      if (vector < vectors) {
        packed[slot] = row.load(vector, columns - vector * kVector);
      }
    }
#pragma unroll
    for (int slot = 0; slot < kRowDepth; ++slot) {
      const int vector = first + slot * threads;
      if (vector < vectors) {
        use(vector, packed[slot]);
      }
    }
  }
}

template <bool aligned>
__device__ __forceinline__ void loss_of_row(const CrossEntropyArguments& a) {
  __shared__ float shared[32];
  // The last rows first: a product that has just written them has left them in the L2 cache.
  const long long place = static_cast<long long>(gridDim.x) - 1 - blockIdx.x;
  const Row<aligned> logits{static_cast<Element*>(const_cast<void*>(a.logits)) + place * a.stride};
  const Row<aligned> gradient{static_cast<Element*>(a.gradient) + place * a.gradient_stride};
  const int columns = a.columns, classes = a.classes;
  const int vectors = (columns + kVector - 1) / kVector;
  const long long target = a.targets[place];
  if (target == a.ignored) {
    if (threadIdx.x == 0) {
      a.losses[place] = 0;
    }
    if (a.gradient != nullptr) {
      Values zeros;
      for (int v = 0; v < kVector; ++v) {
        zeros.of[v] = 0;
      }
      for (int vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
        gradient.store(vector, columns - vector * kVector, zeros);
      }
    }
    return;
  }
  if (target < 0 || target >= classes) {
    assert_failed("the target is one of the classes or ignore_index");
    return;
  }
  const float at_target = to_float(logits.at[target]);
  // The mean of all logits, for smoothing, as a distance: of logits far from zero a sum would lose digits.
  const float shift = fabsf(at_target) < -Max::none() ? at_target : 0;

  float largest = Max::none(), sum = 0, apart = 0;
  each_vector(logits, classes, [&](int vector, const uint4& packed) {
    const Values x(packed);
    const int left = classes - vector * kVector;
    float most = largest;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      most = v < left ? fmaxf(most, x.of[v]) : most;
    }
    const float less = subtracted(most);
    sum *= expf(largest - less);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      sum += v < left ? expf(x.of[v] - less) : 0;
      apart += v < left ? x.of[v] - shift : 0;
    }
    largest = most;
  });
  const float most = over_block<Max>(largest, shared), less = subtracted(most);
  sum = over_block<Sum>(sum * expf(largest - less), shared);
  apart = over_block<Sum>(apart, shared);

  const float rest = logf(sum), log_sum = most + rest;
  if (threadIdx.x == 0) {
    float loss = (1 - a.smoothing) * (most - at_target) + rest;
    if (a.smoothing > 0) {
      loss += a.smoothing * (most - shift - apart / classes);
    }
    if (a.z_loss > 0) {
      loss += a.z_loss * log_sum * log_sum;
    }
    a.losses[place] = loss;
  }
  if (a.gradient == nullptr) {
    return;
  }
  const float scale =
      a.count == nullptr ? a.scale : a.scale / static_cast<float>(*a.count > 1 ? *a.count : 1);
  const float slope = a.z_loss > 0 ? 1 + 2 * a.z_loss * log_sum : 1;
  const float even = a.smoothing / classes, inverse = 1 / sum;
  each_vector(logits, columns, [&](int vector, const uint4& packed) {
    Values x(packed);
    const int left = classes - vector * kVector;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const float exponential = expf(x.of[v] - less);
      // 16 bits do not have the digit that a division keeps.
      const float share = kIsFloat32 ? exponential / sum : exponential * inverse;
      x.of[v] = v < left ? (share * slope - even) * scale : 0;
    }
    gradient.store(vector, columns - vector * kVector, x);
  });
  // Behind the store of the thread that has the target's vector.
  __syncthreads();
  if (threadIdx.x == 0) {
    const float share = expf(at_target - less) / sum * slope;
    gradient.at[target] = to_element((share - even - (1 - a.smoothing)) * scale);
  }
}

}  // namespace

BRIGADE_KERNEL(kCrossEntropyThreads, kCrossEntropyBlocks) cross_entropy(CrossEntropyArguments a) {
  loss_of_row<true>(a);
}

BRIGADE_KERNEL(kCrossEntropyThreads, kCrossEntropyBlocks) cross_entropy_unaligned(CrossEntropyArguments a) {
  loss_of_row<false>(a);
}

#endif
