// Functions that the kernels share. It stands in front of each file of the folder when that is compiled, by NVRTC for a
// GPU, and by the emulation (dev/test-device/cpp/kernels.cpp) for the CPU.
//
// NVRTC has no headers, and none are needed. The emulation defines BRIGADE_EMULATED_GPU, __device__ and its like,
// uint4 and float4, __syncthreads, widen and narrow, warp_shuffle for float and for unsigned, operations that are
// rounded on their own (__fmul_rn and its like), and assert_failed.

// Type of the values, by the macro BRIGADE_ELEMENT.
#define BRIGADE_BFLOAT16 0
#define BRIGADE_FLOAT16 1
#define BRIGADE_FLOAT32 2

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

#ifdef __CUDACC_RTC__

// A kernel with at most `threads` threads in a block, and registers for `blocks` blocks on a multiprocessor.
#define BRIGADE_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)

// The two 16-bit values of a word as float32, and back.
__device__ __forceinline__ void widen(unsigned pair, float& low, float& high) {
#if BRIGADE_ELEMENT == BRIGADE_FLOAT16
  asm("{.reg .f16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#else
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
#endif
}

__device__ __forceinline__ unsigned narrow(float low, float high) {
  unsigned pair;
#if BRIGADE_ELEMENT == BRIGADE_FLOAT16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// Returns the value of another lane of the warp. All lanes take part.
__device__ __forceinline__ float warp_shuffle(float value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ unsigned warp_shuffle(unsigned value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

// Stops the kernel and makes the device fail with the message, as libtorch's kernels do for wrong indices.
#define assert_failed(message) __assertfail(message, __FILE__, __LINE__, __func__, sizeof(char))

#endif

typedef unsigned long long u64;

constexpr bool kIsFloat32 = BRIGADE_ELEMENT == BRIGADE_FLOAT32;
// Number of values of an element's type in 16 bytes, the most that a thread reads at once.
constexpr int kVector = kIsFloat32 ? 4 : 8;

// Values of 16 bytes, as float32.
struct Values {
  float of[kVector];

  __device__ __forceinline__ Values() {}

#if BRIGADE_ELEMENT == BRIGADE_FLOAT32
  __device__ __forceinline__ explicit Values(const uint4& from) {
    of[0] = __uint_as_float(from.x);
    of[1] = __uint_as_float(from.y);
    of[2] = __uint_as_float(from.z);
    of[3] = __uint_as_float(from.w);
  }

  __device__ __forceinline__ uint4 narrowed() const {
    uint4 to;
    to.x = __float_as_uint(of[0]);
    to.y = __float_as_uint(of[1]);
    to.z = __float_as_uint(of[2]);
    to.w = __float_as_uint(of[3]);
    return to;
  }
#else
  __device__ __forceinline__ explicit Values(const uint4& from) {
    widen(from.x, of[0], of[1]);
    widen(from.y, of[2], of[3]);
    widen(from.z, of[4], of[5]);
    widen(from.w, of[6], of[7]);
  }

  __device__ __forceinline__ uint4 narrowed() const {
    uint4 to;
    to.x = narrow(of[0], of[1]);
    to.y = narrow(of[2], of[3]);
    to.z = narrow(of[4], of[5]);
    to.w = narrow(of[6], of[7]);
    return to;
  }
#endif

  __device__ __forceinline__ explicit Values(const float* from) {
    for (int v = 0; v < kVector; ++v) {
      of[v] = from[v];
    }
  }
};

// One value of the element's type in memory.
#if BRIGADE_ELEMENT == BRIGADE_FLOAT32
typedef float Element;

__device__ __forceinline__ float to_float(Element value) {
  return value;
}

__device__ __forceinline__ Element to_element(float value) {
  return value;
}
#else
typedef unsigned short Element;

__device__ __forceinline__ float to_float(Element value) {
  float low, high;
  widen(value, low, high);
  return low;
}

__device__ __forceinline__ Element to_element(float value) {
  return static_cast<Element>(narrow(value, 0));
}
#endif

// Reads a vector, of which `count` values are there if it is not aligned. The others are 0.
template <bool aligned>
__device__ __forceinline__ Values load_vector(const Element* from, int count) {
  if constexpr (aligned) {
    return Values(*reinterpret_cast<const uint4*>(from));
  } else {
    Values values;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      values.of[v] = v < count ? to_float(from[v]) : 0;
    }
    return values;
  }
}

template <bool aligned>
__device__ __forceinline__ void store_vector(Element* to, int count, const Values& values) {
  if constexpr (aligned) {
    *reinterpret_cast<uint4*>(to) = values.narrowed();
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (v < count) {
        to[v] = to_element(values.of[v]);
      }
    }
  }
}

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) {
    return a + b;
  }
  static __device__ __forceinline__ float none() {
    return 0;
  }
};

// Ignores NaN.
struct Max {
  static __device__ __forceinline__ float of(float a, float b) {
    return fmaxf(a, b);
  }
  static __device__ __forceinline__ float none() {
    return -__uint_as_float(0x7f800000u);
  }
};

// Combines the values of a warp. All lanes take part, and get the same bits.
template <typename Op>
__device__ __forceinline__ float over_warp(float value) {
  const int lane = threadIdx.x & 31;
  for (int step = 16; step > 0; step /= 2) {
    value = Op::of(value, warp_shuffle(value, lane ^ step));
  }
  return value;
}

// Combines the values of a block of whole warps, in an order that depends on the number of threads alone. All threads get
// the same bits. `shared` has 32 places of the block's shared memory.
template <typename Op>
__device__ __forceinline__ float over_block(float value, float* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int warps = static_cast<int>(blockDim.x >> 5);
  value = over_warp<Op>(value);
  // Another call may still read the places.
  __syncthreads();
  if (lane == 0) {
    shared[warp] = value;
  }
  __syncthreads();
  return over_warp<Op>(lane < warps ? shared[lane] : Op::none());
}

// Adds up `parts` rows of `columns` sums, each of them in the order of the rows within a stripe and then of the stripes.
// A block has `width` columns along x and `stripes` threads for each of them along y; all of its threads take part.
template <int width, int stripes>
__device__ __forceinline__ void add_parts(
    const float* part_sums, float* sums, int parts, int columns, float (&shared)[stripes][width]) {
  const int column = static_cast<int>(blockIdx.x * width + threadIdx.x);
  const int stripe = static_cast<int>(threadIdx.y);
  float sum = 0;
  if (column < columns) {
    const float* at = part_sums + column;
#pragma unroll 4
    for (int part = stripe; part < parts; part += stripes) {
      sum += at[static_cast<long long>(part) * columns];
    }
  }
  shared[stripe][threadIdx.x] = sum;
  __syncthreads();
  if (stripe == 0 && column < columns) {
    for (int other = 1; other < stripes; ++other) {
      sum += shared[other][threadIdx.x];
    }
    sums[column] = sum;
  }
}

// Four words of Philox4x32 with 7 rounds, as in cpp/philox.h.
struct Random4 {
  unsigned of[4];
};

__device__ __forceinline__ Random4 philox(u64 seed, u64 row, unsigned counter) {
  unsigned a = counter, b = static_cast<unsigned>(row), c = static_cast<unsigned>(row >> 32), d = 0;
  unsigned low = static_cast<unsigned>(seed), high = static_cast<unsigned>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const u64 first = static_cast<u64>(0xD2511F53u) * a;
    const u64 second = static_cast<u64>(0xCD9E8D57u) * c;
    a = static_cast<unsigned>(second >> 32) ^ b ^ low;
    b = static_cast<unsigned>(second);
    c = static_cast<unsigned>(first >> 32) ^ d ^ high;
    d = static_cast<unsigned>(first);
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

// Returns, in bit j, whether dropout keeps value j of the eight of this thread: the values that it keeps on the CPU for
// the same seed. Tile `tile` of row `row` has 128 values, which belong to 16 neighbouring threads, eight to each. In
// philox.h's layout, value i of a tile is in half-word i / 16 of lane i % 16: each thread computes one lane, and eight
// exchanges bring the numbers to their values. All lanes of the warp take part.
__device__ __forceinline__ unsigned dropout_bits(u64 seed, u64 row, unsigned tile, unsigned below) {
  const unsigned thread = threadIdx.x & 31, lane = thread & 15, half = lane >> 1;
  const Random4 mine = philox(seed, row, tile * 16 + lane);
  unsigned bits = 0;
#pragma unroll
  for (unsigned step = 0; step < 8; ++step) {
    // As a source, lane 8 * p + j gives half-word j + step to the thread whose values are in that half-word.
    const unsigned given = (lane + step) & 7;
    const unsigned upper = given & 2 ? mine.of[3] : mine.of[2];
    const unsigned lower = given & 2 ? mine.of[1] : mine.of[0];
    const unsigned pair = given & 4 ? upper : lower;
    const unsigned number = given & 1 ? pair >> 16 : pair & 0xffffu;
    const unsigned value = (half - step) & 7;
    const unsigned received =
        warp_shuffle(number, static_cast<int>((thread & 16) + (lane & 1) * 8 + value));
    bits |= (received >= below ? 1u : 0u) << value;
  }
  return bits;
}

// Returns whether dropout keeps the value at a place of a flattened tensor, as the CPU does for the same seed.
__device__ __forceinline__ bool is_kept(u64 seed, u64 place, unsigned below) {
  const unsigned at = static_cast<unsigned>(place % 128), half = at / 16;
  const Random4 random = philox(seed, place / 128, at % 16);
  const unsigned upper = half & 2 ? random.of[3] : random.of[2];
  const unsigned lower = half & 2 ? random.of[1] : random.of[0];
  const unsigned pair = half & 4 ? upper : lower;
  return (half & 1 ? pair >> 16 : pair & 0xffffu) >= below;
}

// Returns, in bit v, whether dropout keeps value v of the eight that begin at a place of a flattened tensor. `in_tiles`
// states that each 16 neighbouring threads have the 128 values of a tile, which are drawn together. All lanes of the
// warp take part.
__device__ __forceinline__ unsigned kept_bits(u64 seed, u64 place, bool in_tiles, unsigned below) {
  if (below == 0) {
    return 0xff;
  }
  if (in_tiles) {
    return dropout_bits(seed, place / 128, 0, below);
  }
  unsigned bits = 0;
  // Unrolled, it takes half of the registers.
#pragma unroll 1
  for (unsigned v = 0; v < 8; ++v) {
    bits |= (is_kept(seed, place + v, below) ? 1u : 0u) << v;
  }
  return bits;
}

}  // namespace

#endif
