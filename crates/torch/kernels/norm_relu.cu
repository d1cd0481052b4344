// Batch normalisation of 16-bit images in channels_last, the addition of a shortcut and ReLU, for NVIDIA GPUs from
// compute capability 8.0 on. crates/torch/cpp/kernels/norm_relu.cpp launches these kernels.
//
// Registers of a thread: at most 128.
//
// An image is rows of channels. A thread has kNormVector channels of every so many-th row; a block of up to 256 threads is
// threadIdx.x along the channels and threadIdx.y along the rows; blockIdx.y are the parts of the rows whose sums a
// second kernel adds up. The order of all additions depends on the shape and on the number of the GPU's processors
// alone, so that results are the same bits in each run.

// What the kernels are given, each a part of it.
struct NormArguments {
  // [rows, channels] of 16 bits.
  const void* x;
  const void* shortcut;
  void* y;
  const void* dy;
  void* through;
  void* dx;
  // [channels].
  const float* weight;
  const float* bias;
  float* running_mean;
  float* running_var;
  // Of the forward: mean, 1 / sqrt(variance + eps), and y before ReLU as x * slope + offset.
  float* mean;
  float* inverse;
  float* slope;
  float* offset;
  // dx is what ReLU lets through of dy * slope, less x * dx_slope, plus dx_offset.
  float* dx_slope;
  float* dx_offset;
  float* dweight;
  float* dbias;
  // The parts' sums: 2 of [parts, channels]; and how many rows each part has.
  float* sums;
  float* counts;
  long long rows;
  int channels;
  int parts;
  float momentum;
  float eps;
};

// Maximum number of threads in a block, and the channels of a thread: 16 bytes, the most that it reads at once.
constexpr int kNormThreads = 256;
constexpr int kNormVector = 8;
// Blocks for each of the GPU's multiprocessors. ResNet-50's step on an H200, at batch 256: 41.4 ms with one, 37.5 with
// two, 38.6 with four, 40.6 with eight, which leave more parts to add up.
constexpr int kNormBlocks = 2;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// Where a thread works.
struct Place {
  int channel;
  long long first;
  long long step;
  long long rows;
  long long vectors;

  __device__ __forceinline__ explicit Place(const NormArguments& a)
      : channel((blockIdx.x * blockDim.x + threadIdx.x) * kNormVector),
        first(static_cast<long long>(blockIdx.y) * blockDim.y + threadIdx.y),
        step(static_cast<long long>(gridDim.y) * blockDim.y),
        // Threads beyond the last channel have no rows.
        rows(channel < a.channels ? a.rows : 0),
        vectors(a.channels / kNormVector) {}

  // The place of a row's vector among those of a tensor.
  __device__ __forceinline__ long long at(long long row) const {
    return row * vectors + channel / kNormVector;
  }
};

// Calls `load(slot, at)` for `depth` rows, whose reads are under way together, then `use(slot, at)` for each: with few
// rows at a time there are too few reads to keep memory busy.
template <int depth, typename Load, typename Use>
__device__ __forceinline__ void each_row(const Place& place, const Load& load, const Use& use) {
  for (long long row = place.first; row < place.rows; row += depth * place.step) {
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      if (row + slot * place.step < place.rows) {
        load(slot, place.at(row + slot * place.step));
      }
    }
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      if (row + slot * place.step < place.rows) {
        use(slot, place.at(row + slot * place.step));
      }
    }
  }
}

// The mean of `count` values, and the sum of their squared distances from it.
struct Moments {
  float mean;
  float squares;
  float count;

  __device__ __forceinline__ Moments merged(const Moments& other) const {
    const float both = count + other.count;
    if (both == 0) {
      return *this;
    }
    const float apart = other.mean - mean;
    const float share = other.count / both;
    return {mean + apart * share, squares + other.squares + apart * apart * count * share, both};
  }
};

// Calls `add(to, from)` for the threads of a block, by number, until the first one of each column has everything.
template <typename Add>
__device__ __forceinline__ void over_columns(const Add& add) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int rows = blockDim.y; rows > 1; rows = (rows + 1) / 2) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (static_cast<int>(threadIdx.y) + half < rows) {
      add(thread, thread + half * static_cast<int>(blockDim.x));
    }
  }
}

// Where the sums of a part and a channel lie: the first ones, and behind those of all parts the second ones.
struct PartPlace {
  long long first;
  long long second;

  __device__ __forceinline__ PartPlace(const NormArguments& a, int part, int channel)
      : first(static_cast<long long>(part) * a.channels + channel),
        second(first + static_cast<long long>(a.parts) * a.channels) {}
};

// Keeps the sums of a block, which the first thread of each column has.
__device__ __forceinline__ void keep_part(
    const NormArguments& a, const Place& place, const float* first, const float* second) {
  if (threadIdx.y == 0 && place.rows > 0) {
    const PartPlace at(a, blockIdx.y, place.channel);
    for (int v = 0; v < kNormVector; ++v) {
      a.sums[at.first + v] = first[v * kNormThreads + threadIdx.x];
      a.sums[at.second + v] = second[v * kNormThreads + threadIdx.x];
    }
  }
}

enum Mode { kPlain, kRelu, kShortcut };

template <Mode mode>
__device__ __forceinline__ void activate(const NormArguments& a) {
  constexpr int depth = mode == kShortcut ? 4 : 8;
  const Place place(a);
  if (place.rows == 0) {
    return;
  }
  const auto* x = static_cast<const uint4*>(a.x);
  const auto* shortcut = static_cast<const uint4*>(a.shortcut);
  auto* y = static_cast<uint4*>(a.y);
  const Values slope(a.slope + place.channel), offset(a.offset + place.channel);
  uint4 values[depth], beside[depth];
  each_row<depth>(
      place,
      [&](int slot, long long at) {
        values[slot] = x[at];
        if (mode == kShortcut) {
          beside[slot] = shortcut[at];
        }
      },
      [&](int slot, long long at) {
        Values value(values[slot]);
        for (int v = 0; v < kNormVector; ++v) {
          value.of[v] = fmaf(value.of[v], slope.of[v], offset.of[v]);
        }
        if (mode == kShortcut) {
          const Values more(beside[slot]);
          for (int v = 0; v < kNormVector; ++v) {
            value.of[v] += more.of[v];
          }
        }
        if (mode != kPlain) {
          // NaN stays NaN.
          for (int v = 0; v < kNormVector; ++v) {
            value.of[v] = value.of[v] < 0 ? 0 : value.of[v];
          }
        }
        y[at] = value.narrowed();
      });
}

// What ReLU lets through, without a shortcut: the output follows from the input, as `activate` made it.
template <Mode mode>
__device__ __forceinline__ void let_through(
    Values& dy, const Values& x, const Values& slope, const Values& offset) {
  if (mode == kRelu) {
    for (int v = 0; v < kNormVector; ++v) {
      dy.of[v] = fmaf(x.of[v], slope.of[v], offset.of[v]) <= 0 ? 0 : dy.of[v];
    }
  }
}

// With a shortcut it keeps what ReLU lets through of the gradient, for the shortcut and for `gradient_rows`.
template <Mode mode>
__device__ __forceinline__ void gradient_sums(const NormArguments& a) {
  constexpr int depth = 4;
  __shared__ float sums[kNormVector * kNormThreads];
  __shared__ float products[kNormVector * kNormThreads];
  const Place place(a);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float sum[kNormVector] = {}, product[kNormVector] = {};
  if (place.rows > 0) {
    const auto* x = static_cast<const uint4*>(a.x);
    const auto* y = static_cast<const uint4*>(a.y);
    const auto* dy = static_cast<const uint4*>(a.dy);
    auto* through = static_cast<uint4*>(a.through);
    const Values mean(a.mean + place.channel);
    const Values slope(a.slope + place.channel), offset(a.offset + place.channel);
    uint4 inputs[depth], outputs[depth], gradients[depth];
    each_row<depth>(
        place,
        [&](int slot, long long at) {
          inputs[slot] = x[at];
          gradients[slot] = dy[at];
          if (mode == kShortcut) {
            outputs[slot] = y[at];
          }
        },
        [&](int slot, long long at) {
          const Values input(inputs[slot]);
          Values gradient(gradients[slot]);
          if (mode == kShortcut) {
            const Values output(outputs[slot]);
            for (int v = 0; v < kNormVector; ++v) {
              gradient.of[v] = output.of[v] <= 0 ? 0 : gradient.of[v];
            }
            through[at] = gradient.narrowed();
          }
          let_through<mode>(gradient, input, slope, offset);
          for (int v = 0; v < kNormVector; ++v) {
            sum[v] += gradient.of[v];
            product[v] = fmaf(gradient.of[v], input.of[v] - mean.of[v], product[v]);
          }
        });
  }
  for (int v = 0; v < kNormVector; ++v) {
    sums[v * kNormThreads + thread] = sum[v];
    products[v * kNormThreads + thread] = product[v];
  }
  over_columns([&](int to, int from) {
    for (int v = 0; v < kNormVector * kNormThreads; v += kNormThreads) {
      sums[v + to] += sums[v + from];
      products[v + to] += products[v + from];
    }
  });
  keep_part(a, place, sums, products);
}

template <Mode mode>
__device__ __forceinline__ void gradient_rows(const NormArguments& a) {
  constexpr int depth = 4;
  const Place place(a);
  if (place.rows == 0) {
    return;
  }
  const auto* x = static_cast<const uint4*>(a.x);
  const auto* dy = static_cast<const uint4*>(mode == kShortcut ? a.through : a.dy);
  auto* dx = static_cast<uint4*>(a.dx);
  const Values slope(a.slope + place.channel), offset(a.offset + place.channel);
  const Values dx_slope(a.dx_slope + place.channel), dx_offset(a.dx_offset + place.channel);
  uint4 inputs[depth], gradients[depth];
  each_row<depth>(
      place,
      [&](int slot, long long at) {
        inputs[slot] = x[at];
        gradients[slot] = dy[at];
      },
      [&](int slot, long long at) {
        const Values input(inputs[slot]);
        Values gradient(gradients[slot]);
        let_through<mode>(gradient, input, slope, offset);
        for (int v = 0; v < kNormVector; ++v) {
          const float rest = fmaf(-input.of[v], dx_slope.of[v], dx_offset.of[v]);
          gradient.of[v] = fmaf(gradient.of[v], slope.of[v], rest);
        }
        dx[at] = gradient.narrowed();
      });
}

}  // namespace

BRIGADE_KERNEL(kNormThreads, kNormBlocks) statistics(NormArguments a) {
  constexpr int depth = 8;
  __shared__ float means[kNormVector * kNormThreads];
  __shared__ float squares[kNormVector * kNormThreads];
  __shared__ float counts[kNormThreads];
  const Place place(a);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float sum[kNormVector] = {}, square[kNormVector] = {}, shift[kNormVector] = {};
  float count = 0;
  if (place.first < place.rows) {
    const auto* x = static_cast<const uint4*>(a.x);
    // Distances from one of the values: squares of values far from zero would lose the digits that count.
    const Values near(x[place.at(place.first)]);
    for (int v = 0; v < kNormVector; ++v) {
      shift[v] = near.of[v];
    }
    uint4 values[depth];
    each_row<depth>(
        place,
        [&](int slot, long long at) { values[slot] = x[at]; },
        [&](int slot, long long) {
          const Values value(values[slot]);
          for (int v = 0; v < kNormVector; ++v) {
            const float apart = value.of[v] - shift[v];
            sum[v] += apart;
            square[v] = fmaf(apart, apart, square[v]);
          }
        });
    count = static_cast<float>((place.rows - place.first + place.step - 1) / place.step);
  }
  const float invert = count > 0 ? 1 / count : 0;
  for (int v = 0; v < kNormVector; ++v) {
    const float mean = sum[v] * invert;
    means[v * kNormThreads + thread] = shift[v] + mean;
    squares[v * kNormThreads + thread] = square[v] - sum[v] * mean;
  }
  counts[thread] = count;
  over_columns([&](int to, int from) {
    Moments all{0, 0, 0};
    for (int v = 0; v < kNormVector * kNormThreads; v += kNormThreads) {
      all = Moments{means[v + to], squares[v + to], counts[to]}.merged(
          {means[v + from], squares[v + from], counts[from]});
      means[v + to] = all.mean;
      squares[v + to] = all.squares;
    }
    counts[to] = all.count;
  });
  keep_part(a, place, means, squares);
  if (threadIdx.y == 0 && place.channel == 0) {
    a.counts[blockIdx.y] = counts[thread];
  }
}

// Of the parts, one channel a column of the block.
BRIGADE_KERNEL(kNormThreads, kNormBlocks) finish_statistics(NormArguments a) {
  __shared__ Moments found[kNormThreads];
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Moments all{0, 0, 0};
  if (channel < a.channels) {
    for (int part = threadIdx.y; part < a.parts; part += blockDim.y) {
      const PartPlace at(a, part, channel);
      all = all.merged({a.sums[at.first], a.sums[at.second], a.counts[part]});
    }
  }
  found[thread] = all;
  over_columns([&](int to, int from) { found[to] = found[to].merged(found[from]); });
  if (threadIdx.y == 0 && channel < a.channels) {
    const Moments whole = found[thread];
    const float inverse = 1 / sqrtf(whole.squares / whole.count + a.eps);
    const float slope = a.weight[channel] * inverse;
    a.mean[channel] = whole.mean;
    a.inverse[channel] = inverse;
    a.slope[channel] = slope;
    // With the slope as it was rounded: else its error, times the mean, would stay.
    a.offset[channel] = fmaf(-whole.mean, slope, a.bias[channel]);
    const float kept = 1 - a.momentum;
    a.running_mean[channel] = kept * a.running_mean[channel] + a.momentum * whole.mean;
    a.running_var[channel] =
        kept * a.running_var[channel] + a.momentum * whole.squares / (whole.count - 1);
  }
}

BRIGADE_KERNEL(kNormThreads, kNormBlocks) finish_gradients(NormArguments a) {
  __shared__ float sums[kNormThreads];
  __shared__ float products[kNormThreads];
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float sum = 0, product = 0;
  if (channel < a.channels) {
    for (int part = threadIdx.y; part < a.parts; part += blockDim.y) {
      const PartPlace at(a, part, channel);
      sum += a.sums[at.first];
      product += a.sums[at.second];
    }
  }
  sums[thread] = sum;
  products[thread] = product;
  over_columns([&](int to, int from) {
    sums[to] += sums[from];
    products[to] += products[from];
  });
  if (threadIdx.y == 0 && channel < a.channels) {
    const float count = static_cast<float>(a.rows);
    const float inverse = a.inverse[channel], slope = a.slope[channel];
    a.dbias[channel] = sums[thread];
    a.dweight[channel] = products[thread] * inverse;
    const float dx_slope = products[thread] * inverse * inverse / count * slope;
    a.dx_slope[channel] = dx_slope;
    a.dx_offset[channel] = fmaf(a.mean[channel], dx_slope, -sums[thread] / count * slope);
  }
}

#define BRIGADE_MODES(name)                                                                    \
  BRIGADE_KERNEL(kNormThreads, kNormBlocks) name##_plain(NormArguments a) { name<kPlain>(a); } \
  BRIGADE_KERNEL(kNormThreads, kNormBlocks) name##_relu(NormArguments a) { name<kRelu>(a); }   \
  BRIGADE_KERNEL(kNormThreads, kNormBlocks) name##_shortcut(NormArguments a) { name<kShortcut>(a); }

BRIGADE_MODES(activate)
BRIGADE_MODES(gradient_sums)
BRIGADE_MODES(gradient_rows)

#undef BRIGADE_MODES

#endif
