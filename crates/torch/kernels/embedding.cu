// Sums of rows of embedding tables with dropout, for NVIDIA GPUs from compute capability 8.0 on.
// crates/torch/cpp/kernels/embedding.cpp launches these kernels.
//
// Registers of a thread: at most 96.
//
// Tables and sums are float32, whatever the type of elements, which is that of autocast. Dropout keeps no mask: the
// backward draws the same numbers from the seed and a value's place. The gradient of a table with few rows is made by a
// block for each row, which adds up the places that have it in their order, without atomics, so that results are the
// same bits in each run.

struct EmbeddingTableArguments {
  // [vocabulary, width].
  const float* weight;
  // [period]: place p has the id ids[p % period]. Null if the id of a place is the place itself.
  const long long* ids;
  long long vocabulary;
  long long period;
};

constexpr int kEmbeddingTables = 3;

struct EmbeddingArguments {
  // The sum has the rows of the first `count` tables. The gradient is that of the first one.
  EmbeddingTableArguments tables[kEmbeddingTables];
  // dropout(sum of the rows), [places, width].
  float* sum;
  // Gradient of `sum`.
  const float* dsum;
  // Gradient of the sum in front of dropout, or null.
  float* drows;
  // Gradient of the table, [vocabulary, width].
  float* dweight;
  // Seed of dropout, in the memory of the device.
  const long long* seed;
  long long places;
  // Row of the table that gets no gradient. Negative for none.
  long long padding;
  int count;
  int width;
  // Factor of the values that are kept, and the numbers of 16 bits that drop one: those below.
  float keep;
  unsigned below;
};

// Maximum number of threads in a block, and the values of a thread's vector.
constexpr int kEmbeddingThreads = 256;
constexpr int kEmbeddingVector = 8;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

struct Floats {
  float of[kEmbeddingVector];
};

// Reads a vector, of which `count` values are there if it is not aligned. The others are 0.
template <bool aligned>
__device__ __forceinline__ Floats load_row(const float* from, int count) {
  Floats to;
  if constexpr (aligned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[half];
      to.of[4 * half] = __uint_as_float(words.x);
      to.of[4 * half + 1] = __uint_as_float(words.y);
      to.of[4 * half + 2] = __uint_as_float(words.z);
      to.of[4 * half + 3] = __uint_as_float(words.w);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kEmbeddingVector; ++v) {
      to.of[v] = v < count ? from[v] : 0;
    }
  }
  return to;
}

template <bool aligned>
__device__ __forceinline__ void store_row(float* to, int count, const Floats& from) {
  if constexpr (aligned) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words;
      words.x = __float_as_uint(from.of[4 * half]);
      words.y = __float_as_uint(from.of[4 * half + 1]);
      words.z = __float_as_uint(from.of[4 * half + 2]);
      words.w = __float_as_uint(from.of[4 * half + 3]);
      reinterpret_cast<uint4*>(to)[half] = words;
    }
  } else {
#pragma unroll
    for (int v = 0; v < kEmbeddingVector; ++v) {
      if (v < count) {
        to[v] = from.of[v];
      }
    }
  }
}

// Returns the table's row for a place. Null if the table has no such row: then the device fails.
__device__ __forceinline__ const float* row_of(const EmbeddingTableArguments& table, long long place, int width) {
  long long id = place;
  if (table.ids != nullptr) {
    id = table.ids[place < table.period ? place : place % table.period];
  }
  if (id < 0 || id >= table.vocabulary) {
    assert_failed("each id is the number of a row of the embedding");
    return nullptr;
  }
  return table.weight + id * width;
}

// Adds the `count` values of the tables that begin at a column of a place. Returns `false` if a table has no such row.
template <bool aligned>
__device__ __forceinline__ bool add_rows(
    const EmbeddingArguments& a, long long place, int column, int count, Floats& sum) {
#pragma unroll
  for (int table = 0; table < kEmbeddingTables; ++table) {
    if (table < a.count) {
      const float* row = row_of(a.tables[table], place, a.width);
      if (row == nullptr) {
        return false;
      }
      const Floats more = load_row<aligned>(row + column, count);
#pragma unroll
      for (int v = 0; v < kEmbeddingVector; ++v) {
        sum.of[v] = table == 0 ? more.of[v] : sum.of[v] + more.of[v];
      }
    }
  }
  return true;
}

// Values that dropout drops become 0, and the others are multiplied.
__device__ __forceinline__ void drop(const EmbeddingArguments& a, unsigned bits, Floats& values) {
#pragma unroll
  for (int v = 0; v < kEmbeddingVector; ++v) {
    values.of[v] = bits >> v & 1 ? values.of[v] * a.keep : 0;
  }
}

// A thread has eight adjacent values of the flattened sum.
template <bool aligned>
__device__ __forceinline__ void embed(const EmbeddingArguments& a) {
  const long long vector = static_cast<long long>(blockIdx.x) * kEmbeddingThreads + threadIdx.x;
  const long long first = vector * kEmbeddingVector, left = a.places * a.width - first;
  const u64 seed = a.below > 0 ? static_cast<u64>(*a.seed) : 0;
  const unsigned bits = kept_bits(seed, static_cast<u64>(first), /*in_tiles=*/true, a.below);
  if (left <= 0) {
    return;
  }
  long long place = first / a.width;
  int column = static_cast<int>(first - place * a.width);
  Floats sum;
  if constexpr (aligned) {
    // Each vector is part of one row.
    if (add_rows<true>(a, place, column, kEmbeddingVector, sum)) {
      drop(a, bits, sum);
      store_row<true>(a.sum + first, kEmbeddingVector, sum);
    }
  } else {
#pragma unroll 1
    for (int v = 0; v < kEmbeddingVector && v < left; ++v) {
      if (!add_rows<false>(a, place, column, 1, sum)) {
        return;
      }
      drop(a, bits >> v, sum);
      store_row<false>(a.sum + first + v, 1, sum);
      if (++column == a.width) {
        column = 0;
        ++place;
      }
    }
  }
}

// A block has a row of the table along x and a part of its columns along y, eight for each thread. It looks for the
// places of its row, and each place is that of one row.
template <bool aligned>
__device__ __forceinline__ void embed_backward(const EmbeddingArguments& a) {
  __shared__ uint4 shared[kEmbeddingThreads / 4];
  unsigned* found = reinterpret_cast<unsigned*>(shared);
  const EmbeddingTableArguments& table = a.tables[0];
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int column = (static_cast<int>(blockIdx.y) * threads + thread) * kEmbeddingVector;
  const int count = a.width - column;
  const long long row = blockIdx.x;
  const u64 seed = a.below > 0 ? static_cast<u64>(*a.seed) : 0;
  const bool in_tiles = a.width % 128 == 0;
  Floats sum;
#pragma unroll
  for (int v = 0; v < kEmbeddingVector; ++v) {
    sum.of[v] = 0;
  }
  const auto add_place = [&](long long place) {
    const long long first = place * a.width + column;
    const unsigned bits = kept_bits(seed, static_cast<u64>(first), in_tiles, a.below);
    if (count > 0) {
      Floats gradient = load_row<aligned>(a.dsum + first, count);
      drop(a, bits, gradient);
#pragma unroll
      for (int v = 0; v < kEmbeddingVector; ++v) {
        sum.of[v] += gradient.of[v];
      }
      if (a.drows != nullptr) {
        store_row<aligned>(a.drows + first, count, gradient);
      }
    }
  };
  for (long long begin = 0; begin < table.period; begin += threads) {
    // Another thread may still read the last ones.
    __syncthreads();
    found[thread] = begin + thread < table.period && table.ids[begin + thread] == row ? 1 : 0;
    __syncthreads();
    for (int at = 0; at < threads; at += 4) {
      const uint4 four = shared[at / 4];
      if ((four.x | four.y | four.z | four.w) == 0) {
        continue;
      }
      for (int one = at; one < at + 4; ++one) {
        if (found[one] != 0) {
          for (long long place = begin + one; place < a.places; place += table.period) {
            add_place(place);
          }
        }
      }
    }
  }
  if (count > 0) {
    if (row == a.padding) {
#pragma unroll
      for (int v = 0; v < kEmbeddingVector; ++v) {
        sum.of[v] = 0;
      }
    }
    store_row<aligned>(a.dweight + row * a.width + column, count, sum);
  }
}

}  // namespace

BRIGADE_KERNEL(kEmbeddingThreads, 2) embedding(EmbeddingArguments a) {
  embed<true>(a);
}

BRIGADE_KERNEL(kEmbeddingThreads, 2) embedding_unaligned(EmbeddingArguments a) {
  embed<false>(a);
}

BRIGADE_KERNEL(kEmbeddingThreads, 2) embedding_backward(EmbeddingArguments a) {
  embed_backward<true>(a);
}

BRIGADE_KERNEL(kEmbeddingThreads, 2) embedding_unaligned_backward(EmbeddingArguments a) {
  embed_backward<false>(a);
}

#endif
