// LayerNorm and RMSNorm of a residual stream, with the addition of a branch and its dropout in the same pass, for NVIDIA
// GPUs from compute capability 8.0 on. crates/torch/cpp/kernels/norm_residual.cpp launches these kernels.
//
// Registers of a thread: at most 128.
//
// A block has a row of float32 values in registers, up to two vectors of eight for each thread; longer rows are read
// again. Dropout keeps no mask: the backward draws the same numbers from the seed and a value's place. Column sums, for
// the gradients of the parameters, are made by each block over its rows and then added up in the order of the blocks,
// without atomics, so that results are the same bits in each run.

struct NormResidualArguments {
  // [rows, width] of 16 bits. Null if there is no branch.
  const void* branch;
  // [width], added to the branch in front of its dropout. Null for 0.
  const float* branch_bias;
  // [rows, width].
  const float* stream;
  // stream + dropout(branch + branch_bias), which `stream` is without a branch.
  float* sum;
  // The normalised values in 16 bits and in float32. Either may be null.
  void* normed;
  float* normed_float;
  // [rows]. `mean` is null for RMSNorm, which subtracts none.
  float* mean;
  float* inverse;
  // [width]. Null for 1 and for 0.
  const float* weight;
  const float* bias;
  // Gradients of `normed`, `normed_float` and `sum`. Each may be null for 0.
  const void* dnormed;
  const float* dnormed_float;
  const float* dsum;
  // Gradient of `stream`. It may be `dsum`.
  float* dstream;
  // Gradient of `branch`, or null.
  void* dbranch;
  // Sums of each block, [parts, 3, width], and of all blocks, [3, width]: of `weight`, `bias` and `branch_bias`.
  float* part_sums;
  float* column_sums;
  // Seed of dropout, in the memory of the device.
  const long long* seed;
  long long rows;
  int width;
  int parts;
  float eps;
  // Factor of the values of the branch that are kept, and the numbers of 16 bits that drop one: those below.
  float keep;
  unsigned below;
};

// Maximum number of threads in a block of a row, and the values of a thread's vector.
constexpr int kNormResidualThreads = 512;
constexpr int kNormResidualVector = 8;
// Sums of different vectors, in the kernel that adds up parts.
constexpr int kNormResidualColumns = 32;
constexpr int kNormResidualStripes = 16;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

__device__ __forceinline__ Values load_floats(const float* from) {
  const uint4* words = reinterpret_cast<const uint4*>(from);
  const uint4 low = words[0], high = words[1];
  Values to;
  to.of[0] = __uint_as_float(low.x);
  to.of[1] = __uint_as_float(low.y);
  to.of[2] = __uint_as_float(low.z);
  to.of[3] = __uint_as_float(low.w);
  to.of[4] = __uint_as_float(high.x);
  to.of[5] = __uint_as_float(high.y);
  to.of[6] = __uint_as_float(high.z);
  to.of[7] = __uint_as_float(high.w);
  return to;
}

__device__ __forceinline__ void store_floats(float* to, const Values& from) {
  uint4 low, high;
  low.x = __float_as_uint(from.of[0]);
  low.y = __float_as_uint(from.of[1]);
  low.z = __float_as_uint(from.of[2]);
  low.w = __float_as_uint(from.of[3]);
  high.x = __float_as_uint(from.of[4]);
  high.y = __float_as_uint(from.of[5]);
  high.z = __float_as_uint(from.of[6]);
  high.w = __float_as_uint(from.of[7]);
  uint4* words = reinterpret_cast<uint4*>(to);
  words[0] = low;
  words[1] = high;
}

__device__ __forceinline__ Values filled(float value) {
  Values values;
  for (int v = 0; v < kNormResidualVector; ++v) {
    values.of[v] = value;
  }
  return values;
}

// The values of a row of parameters, or `otherwise` for each where there is none.
__device__ __forceinline__ Values parameters(const float* from, int vector, float otherwise) {
  return from == nullptr ? filled(otherwise) : load_floats(from + vector * kNormResidualVector);
}

// Calls `load(slot, vector)` and then `use(slot, vector)` for the vectors of a thread. With a depth, all loads come
// first, so that they are under way together. All threads of a block call both as often; `vector` may lie beyond the row.
template <int depth, typename Load, typename Use>
__device__ __forceinline__ void each_slot(int vectors, const Load& load, const Use& use) {
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  if constexpr (depth == 0) {
    for (int first = 0; first < vectors; first += threads) {
      load(0, first + thread);
      use(0, first + thread);
    }
  } else {
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      load(slot, slot * threads + thread);
    }
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      use(slot, slot * threads + thread);
    }
  }
}

// Bit v: whether dropout keeps value v of a vector of the branch. All threads of a warp take part.
__device__ __forceinline__ unsigned kept_of_branch(
    const NormResidualArguments& a, u64 seed, long long row, int vector) {
  const u64 place = static_cast<u64>(row) * static_cast<u64>(a.width) + static_cast<u64>(vector) * kNormResidualVector;
  // Each row begins with a tile.
  return kept_bits(seed, place, a.width % 128 == 0, a.below);
}

// `depth` is the number of vectors of a thread, all of which stay in registers; 0 for rows of any width.
template <int depth>
__device__ __forceinline__ void normalize(const NormResidualArguments& a) {
  constexpr int slots = depth == 0 ? 1 : depth;
  __shared__ float shared[32];
  const long long row = blockIdx.x, begin = row * a.width;
  const int vectors = a.width / kNormResidualVector;
  const bool has_branch = a.branch != nullptr;
  const u64 seed = has_branch && a.below > 0 ? static_cast<u64>(*a.seed) : 0;
  const uint4* branch = reinterpret_cast<const uint4*>(static_cast<const Element*>(a.branch) + begin);
  const float* stream = a.stream + begin;
  float* sum = has_branch ? a.sum + begin : nullptr;

  Values x[slots];
  uint4 packed[slots];
  float total = 0;
  each_slot<depth>(
      vectors,
      [&](int slot, int vector) {
        if (vector < vectors) {
          x[slot] = load_floats(stream + vector * kNormResidualVector);
          if (has_branch) {
            packed[slot] = branch[vector];
          }
        }
      },
      [&](int slot, int vector) {
        const unsigned bits = has_branch ? kept_of_branch(a, seed, row, vector) : 0;
        if (vector < vectors) {
          if (has_branch) {
            const Values added(packed[slot]), offset = parameters(a.branch_bias, vector, 0);
            for (int v = 0; v < kNormResidualVector; ++v) {
              x[slot].of[v] += bits >> v & 1 ? (added.of[v] + offset.of[v]) * a.keep : 0;
            }
            store_floats(sum + vector * kNormResidualVector, x[slot]);
          }
          for (int v = 0; v < kNormResidualVector; ++v) {
            total += x[slot].of[v];
          }
        }
      });

  // A thread reads what it has written itself.
  const float* again = has_branch ? sum : stream;
  const auto load_again = [&](int slot, int vector) {
    if (depth == 0 && vector < vectors) {
      x[slot] = load_floats(again + vector * kNormResidualVector);
    }
  };
  const float width = static_cast<float>(a.width);
  const float mean = a.mean == nullptr ? 0 : over_block<Sum>(total, shared) / width;
  float squares = 0;
  each_slot<depth>(vectors, load_again, [&](int slot, int vector) {
    if (vector < vectors) {
      for (int v = 0; v < kNormResidualVector; ++v) {
        const float apart = x[slot].of[v] - mean;
        squares = fmaf(apart, apart, squares);
      }
    }
  });
  const float inverse = 1 / sqrtf(over_block<Sum>(squares, shared) / width + a.eps);
  if (threadIdx.x == 0) {
    if (a.mean != nullptr) {
      a.mean[row] = mean;
    }
    a.inverse[row] = inverse;
  }
  uint4* normed = reinterpret_cast<uint4*>(static_cast<Element*>(a.normed) + begin);
  each_slot<depth>(vectors, load_again, [&](int slot, int vector) {
    if (vector < vectors) {
      const Values weight = parameters(a.weight, vector, 1), bias = parameters(a.bias, vector, 0);
      Values y;
      for (int v = 0; v < kNormResidualVector; ++v) {
        y.of[v] = fmaf((x[slot].of[v] - mean) * inverse, weight.of[v], bias.of[v]);
      }
      if (a.normed != nullptr) {
        normed[vector] = y.narrowed();
      }
      if (a.normed_float != nullptr) {
        store_floats(a.normed_float + begin + vector * kNormResidualVector, y);
      }
    }
  });
}

// What a block adds up of its rows, for a vector of columns.
struct ColumnSums {
  Values weight;
  Values bias;
  Values branch_bias;
};

template <int depth>
__device__ __forceinline__ void normalize_backward(const NormResidualArguments& a) {
  constexpr int slots = depth == 0 ? 1 : depth;
  __shared__ float shared[32];
  const int vectors = a.width / kNormResidualVector;
  const bool has_branch = a.dbranch != nullptr, has_mean = a.mean != nullptr;
  const u64 seed = has_branch && a.below > 0 ? static_cast<u64>(*a.seed) : 0;
  const float width = static_cast<float>(a.width);
  float* parts = a.part_sums + static_cast<long long>(blockIdx.x) * 3 * a.width;

  ColumnSums sums[slots];
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    sums[slot] = {filled(0), filled(0), filled(0)};
  }
  // Sums of rows that do not fit the registers lie where a block leaves them at the end.
  const auto load_sums = [&](int vector, bool is_first) {
    if (depth == 0) {
      const float* at = parts + vector * kNormResidualVector;
      sums[0].weight = is_first ? filled(0) : load_floats(at);
      sums[0].bias = is_first ? filled(0) : load_floats(at + a.width);
      sums[0].branch_bias = is_first ? filled(0) : load_floats(at + 2 * a.width);
    }
  };
  const auto store_sums = [&](int slot, int vector) {
    float* at = parts + vector * kNormResidualVector;
    store_floats(at, sums[slot].weight);
    store_floats(at + a.width, sums[slot].bias);
    store_floats(at + 2 * a.width, sums[slot].branch_bias);
  };

  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const long long begin = row * a.width;
    const float inverse = a.inverse[row], mean = has_mean ? a.mean[row] : 0;
    const uint4* dnormed = reinterpret_cast<const uint4*>(static_cast<const Element*>(a.dnormed) + begin);
    uint4* dbranch = reinterpret_cast<uint4*>(static_cast<Element*>(a.dbranch) + begin);
    // Gradients of the outputs and then of the normalised values; and these values.
    Values g[slots], x[slots];
    const auto load = [&](int slot, int vector) {
      if (vector < vectors) {
        const long long at = begin + vector * kNormResidualVector;
        g[slot] = a.dnormed == nullptr ? filled(0) : Values(dnormed[vector]);
        x[slot] = load_floats(a.sum + at);
        if (a.dnormed_float != nullptr) {
          const Values more = load_floats(a.dnormed_float + at);
          for (int v = 0; v < kNormResidualVector; ++v) {
            g[slot].of[v] += more.of[v];
          }
        }
      }
    };
    float total = 0, product = 0;
    each_slot<depth>(vectors, load, [&](int slot, int vector) {
      if (vector < vectors) {
        load_sums(vector, row == blockIdx.x);
        const Values weight = parameters(a.weight, vector, 1);
        for (int v = 0; v < kNormResidualVector; ++v) {
          x[slot].of[v] = (x[slot].of[v] - mean) * inverse;
          sums[slot].weight.of[v] = fmaf(g[slot].of[v], x[slot].of[v], sums[slot].weight.of[v]);
          sums[slot].bias.of[v] += g[slot].of[v];
          g[slot].of[v] *= weight.of[v];
          total += g[slot].of[v];
          product = fmaf(g[slot].of[v], x[slot].of[v], product);
        }
        if (depth == 0) {
          store_sums(slot, vector);
        }
      }
    });
    product = over_block<Sum>(product, shared) / width;
    total = has_mean ? over_block<Sum>(total, shared) / width : 0;
    const auto load_again = [&](int slot, int vector) {
      if (depth == 0) {
        load(slot, vector);
      }
    };
    each_slot<depth>(vectors, load_again, [&](int slot, int vector) {
      const unsigned bits = has_branch ? kept_of_branch(a, seed, row, vector) : 0;
      if (vector < vectors) {
        const long long at = begin + vector * kNormResidualVector;
        if (depth == 0) {
          load_sums(vector, false);
          const Values weight = parameters(a.weight, vector, 1);
          for (int v = 0; v < kNormResidualVector; ++v) {
            x[slot].of[v] = (x[slot].of[v] - mean) * inverse;
            g[slot].of[v] *= weight.of[v];
          }
        }
        Values d = a.dsum == nullptr ? filled(0) : load_floats(a.dsum + at);
        for (int v = 0; v < kNormResidualVector; ++v) {
          d.of[v] = fmaf(inverse, g[slot].of[v] - total - x[slot].of[v] * product, d.of[v]);
        }
        store_floats(a.dstream + at, d);
        if (has_branch) {
          for (int v = 0; v < kNormResidualVector; ++v) {
            d.of[v] = bits >> v & 1 ? d.of[v] * a.keep : 0;
            sums[slot].branch_bias.of[v] += d.of[v];
          }
          dbranch[vector] = d.narrowed();
        }
        if (depth == 0) {
          store_sums(slot, vector);
        }
      }
    });
  }
  if (depth > 0) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const int vector = slot * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
      if (vector < vectors) {
        store_sums(slot, vector);
      }
    }
  }
}

}  // namespace

#define BRIGADE_NORM_RESIDUAL(name, depth)                                                             \
  BRIGADE_KERNEL(kNormResidualThreads, 1) name(NormResidualArguments a) { normalize<depth>(a); }       \
  BRIGADE_KERNEL(kNormResidualThreads, 1) name##_backward(NormResidualArguments a) {                   \
    normalize_backward<depth>(a);                                                                      \
  }

BRIGADE_NORM_RESIDUAL(norm_residual_1, 1)
BRIGADE_NORM_RESIDUAL(norm_residual_2, 2)
BRIGADE_NORM_RESIDUAL(norm_residual_any, 0)

#undef BRIGADE_NORM_RESIDUAL

// Adds up the sums of the blocks: 32 columns in a block, 16 stripes of parts.
BRIGADE_KERNEL(kNormResidualColumns * kNormResidualStripes, 1) norm_residual_sums(NormResidualArguments a) {
  __shared__ float shared[kNormResidualStripes][kNormResidualColumns];
  add_parts<kNormResidualColumns, kNormResidualStripes>(
      a.part_sums, a.column_sums, a.parts, 3 * a.width, shared);
}

#endif
