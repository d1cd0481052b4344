// Rotary position embeddings of queries and keys, for NVIDIA GPUs from compute capability 8.0 on.
// crates/torch/cpp/kernels/rotary.cpp launches these kernels.
//
// Registers of a thread: at most 80.
//
// A block has a token: all of its heads, of one tensor or of two, whose tables of cosines and sines stay in the
// first-level cache. A thread rotates a vector of 16 bytes of a head's first half with that of the second one, and has read both
// before it writes, so that the result may take the place of the heads. The backward is the rotation back.

// Heads of one tensor. Strides are in elements; the values of a head are adjacent.
struct RotaryHeadsArguments {
  const void* from;
  // It may be `from`, with the same strides.
  void* to;
  long long from_batch;
  long long from_token;
  long long from_head;
  long long to_batch;
  long long to_token;
  long long to_head;
  // The heads that are rotated, and those behind them that are copied.
  int heads;
  int copied;
};

struct RotaryArguments {
  // Of the second one no heads are there where there is one tensor.
  RotaryHeadsArguments parts[2];
  // Tables of twice `half` values for each token: of the heads' type, or float32.
  const void* cos;
  const void* sin;
  // 0 if all texts have the same positions.
  long long cos_batch;
  long long sin_batch;
  long long cos_token;
  long long sin_token;
  int tokens;
  // Pairs of features of a head.
  int half;
  bool has_float_tables;
  // Rotates by the opposite angles: the gradient of the heads for one of the result.
  bool is_back;
};

// Maximum number of threads in a block.
constexpr int kRotaryThreads = 256;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// Values of a table's row from `at` on.
template <bool aligned>
__device__ __forceinline__ Values load_table(const void* table, bool has_floats, long long at, int count) {
  if (!has_floats) {
    return load_vector<aligned>(static_cast<const Element*>(table) + at, count);
  }
  const float* from = static_cast<const float*>(table) + at;
  Values values;
  if constexpr (aligned) {
#pragma unroll
    for (int word = 0; word < kVector / 4; ++word) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[word];
      values.of[word * 4] = __uint_as_float(four.x);
      values.of[word * 4 + 1] = __uint_as_float(four.y);
      values.of[word * 4 + 2] = __uint_as_float(four.z);
      values.of[word * 4 + 3] = __uint_as_float(four.w);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      values.of[v] = v < count ? from[v] : 0;
    }
  }
  return values;
}

template <bool aligned>
__device__ __forceinline__ void rotate(const RotaryArguments& a) {
  const int half = a.half, vectors = (half + kVector - 1) / kVector;
  const long long text = blockIdx.x / static_cast<unsigned>(a.tokens);
  const long long token = blockIdx.x % static_cast<unsigned>(a.tokens);
  const long long cos_row = text * a.cos_batch + token * a.cos_token;
  const long long sin_row = text * a.sin_batch + token * a.sin_token;
  const int first_heads = a.parts[0].heads + a.parts[0].copied;
  const int items = (first_heads + a.parts[1].heads + a.parts[1].copied) * vectors;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += static_cast<int>(blockDim.x)) {
    const int of_all = item / vectors, begin = item % vectors * kVector, count = half - begin;
    const bool is_second = of_all >= first_heads;
    const RotaryHeadsArguments& part = is_second ? a.parts[1] : a.parts[0];
    const int head = is_second ? of_all - first_heads : of_all;
    const Element* from = static_cast<const Element*>(part.from) + text * part.from_batch +
        token * part.from_token + head * part.from_head + begin;
    Element* to = static_cast<Element*>(part.to) + text * part.to_batch + token * part.to_token +
        head * part.to_head + begin;
    Values one = load_vector<aligned>(from, count), two = load_vector<aligned>(from + half, count);
    if (head < part.heads) {
      const Values cos_one = load_table<aligned>(a.cos, a.has_float_tables, cos_row + begin, count);
      const Values cos_two = load_table<aligned>(a.cos, a.has_float_tables, cos_row + half + begin, count);
      const Values sin_one = load_table<aligned>(a.sin, a.has_float_tables, sin_row + begin, count);
      const Values sin_two = load_table<aligned>(a.sin, a.has_float_tables, sin_row + half + begin, count);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const float x = one.of[v], y = two.of[v];
        if (a.is_back) {
          one.of[v] = fmaf(y, sin_two.of[v], x * cos_one.of[v]);
          two.of[v] = fmaf(-x, sin_one.of[v], y * cos_two.of[v]);
        } else {
          one.of[v] = fmaf(-y, sin_one.of[v], x * cos_one.of[v]);
          two.of[v] = fmaf(x, sin_two.of[v], y * cos_two.of[v]);
        }
      }
    }
    store_vector<aligned>(to, count, one);
    store_vector<aligned>(to + half, count, two);
  }
}

}  // namespace

BRIGADE_KERNEL(kRotaryThreads, 3) rotary(RotaryArguments a) {
  rotate<true>(a);
}

BRIGADE_KERNEL(kRotaryThreads, 3) rotary_unaligned(RotaryArguments a) {
  rotate<false>(a);
}

#endif
