// Batch normalisation of 16-bit images in channels_last, the addition of a shortcut, ReLU and max pooling, for NVIDIA
// GPUs from compute capability 8.0 on. crates/torch/cpp/kernels/norm_relu.cpp launches these kernels.
//
// Registers of a thread: at most 128.
//
// An image is rows of channels. A thread has kNormVector channels of every so many-th row; a block of up to 256 threads is
// threadIdx.x along the channels and threadIdx.y along the rows; blockIdx.y are the parts of the rows whose sums a
// second kernel adds up. The order of all additions depends on the shape and on the number of the GPU's processors
// alone, so that results are the same bits in each run.
//
// The second pass over an activation goes through the rows from the last one to the first one: the GPU's cache still
// has those that the first pass has read last.

// What the kernels are given, each a part of it.
struct NormArguments {
  // [rows, channels] of 16 bits.
  const void* x;
  const void* shortcut;
  void* y;
  const void* dy;
  // Gradient of the output by its second use, which is added to `dy`, if any.
  const void* dy2;
  void* through;
  void* dx;
  // [rows, channels / 8]: bit v is set where ReLU lets the gradient of channel v of a vector through. With a shortcut.
  unsigned char* signs;
  // With max pooling, [pooled rows, channels] as y and dy: the place of each maximum in its window, or kNoPlace.
  unsigned char* places;
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
  // Of max pooling: sides of an image before and after it, the number of pixels of all images after it, and that of
  // pairs of pixels before it.
  int height;
  int width;
  int pooled_height;
  int pooled_width;
  int pooled_rows;
  int pairs;
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
// Width and height of max pooling's windows, their stride, and the padding on each side.
constexpr int kPoolWindow = 3;
constexpr int kPoolStride = 2;
constexpr int kPoolPadding = 1;
// Place of a maximum whose gradient ReLU does not let through. In a vector of 8 bytes it is ~0.
constexpr unsigned kNoPlace = 255;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

namespace {

// Where a thread works.
struct Place {
  int channel;
  long long first;
  long long step;
  long long rows;
  long long vectors;

  __device__ __forceinline__ explicit Place(const NormArguments& a) : Place(a, a.rows) {}

  __device__ __forceinline__ Place(const NormArguments& a, long long all_rows)
      : channel((blockIdx.x * blockDim.x + threadIdx.x) * kNormVector),
        first(static_cast<long long>(blockIdx.y) * blockDim.y + threadIdx.y),
        step(static_cast<long long>(gridDim.y) * blockDim.y),
        // Threads beyond the last channel have no rows.
        rows(channel < a.channels ? all_rows : 0),
        vectors(a.channels / kNormVector) {}

  // The thread's last row. Negative if it has none.
  __device__ __forceinline__ long long last() const {
    return first < rows ? first + (rows - 1 - first) / step * step : -1;
  }

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

// Does the same from the last row to the first one.
template <int depth, typename Load, typename Use>
__device__ __forceinline__ void each_row_reversed(const Place& place, const Load& load, const Use& use) {
  for (long long row = place.last(); row >= 0; row -= depth * place.step) {
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      if (row - slot * place.step >= 0) {
        load(slot, place.at(row - slot * place.step));
      }
    }
#pragma unroll
    for (int slot = 0; slot < depth; ++slot) {
      if (row - slot * place.step >= 0) {
        use(slot, place.at(row - slot * place.step));
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

// kTwoUses is kShortcut with a second gradient of the output.
enum Mode { kPlain, kRelu, kShortcut, kTwoUses };

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
  each_row_reversed<depth>(
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
        const uint4 narrowed = value.narrowed();
        y[at] = narrowed;
        if (mode == kShortcut) {
          // Of what was rounded, as the gradient of ReLU is defined. NaN lets gradients through.
          const Values output(narrowed);
          unsigned bits = 0;
          for (int v = 0; v < kNormVector; ++v) {
            bits |= (output.of[v] <= 0 ? 0u : 1u) << v;
          }
          a.signs[at] = static_cast<unsigned char>(bits);
        }
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

// Keeps the sums of a block's threads: of the gradient behind ReLU, and of its products with the input's distance from
// the mean.
__device__ __forceinline__ void keep_gradient_sums(
    const NormArguments& a, const Place& place, const float (&sum)[kNormVector],
    const float (&product)[kNormVector]) {
  __shared__ float sums[kNormVector * kNormThreads];
  __shared__ float products[kNormVector * kNormThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
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

// Adds the gradient of a vector of inputs to a thread's sums.
__device__ __forceinline__ void add_gradient(
    float (&sum)[kNormVector], float (&product)[kNormVector], const Values& gradient,
    const Values& input, const Values& mean) {
  for (int v = 0; v < kNormVector; ++v) {
    sum[v] += gradient.of[v];
    product[v] = fmaf(gradient.of[v], input.of[v] - mean.of[v], product[v]);
  }
}

// With a shortcut it keeps what ReLU lets through of the gradient, for the shortcut and for `gradient_rows`.
template <Mode mode>
__device__ __forceinline__ void gradient_sums(const NormArguments& a) {
  constexpr int depth = 4;
  constexpr bool has_shortcut = mode == kShortcut || mode == kTwoUses;
  const Place place(a);
  float sum[kNormVector] = {}, product[kNormVector] = {};
  if (place.rows > 0) {
    const auto* x = static_cast<const uint4*>(a.x);
    const auto* dy = static_cast<const uint4*>(a.dy);
    const auto* dy2 = static_cast<const uint4*>(a.dy2);
    auto* through = static_cast<uint4*>(a.through);
    const Values mean(a.mean + place.channel);
    const Values slope(a.slope + place.channel), offset(a.offset + place.channel);
    uint4 inputs[depth], gradients[depth], more[depth];
    unsigned signs[depth];
    each_row<depth>(
        place,
        [&](int slot, long long at) {
          inputs[slot] = x[at];
          gradients[slot] = dy[at];
          if (mode == kTwoUses) {
            more[slot] = dy2[at];
          }
          if (has_shortcut) {
            signs[slot] = a.signs[at];
          }
        },
        [&](int slot, long long at) {
          const Values input(inputs[slot]);
          Values gradient(gradients[slot]);
          if (mode == kTwoUses) {
            const Values beside(more[slot]);
            for (int v = 0; v < kNormVector; ++v) {
              gradient.of[v] += beside.of[v];
            }
            // Rounded as a sum of its own would be, so that the sums below are those of what is kept.
            gradient = Values(gradient.narrowed());
          }
          if (has_shortcut) {
            for (int v = 0; v < kNormVector; ++v) {
              gradient.of[v] = signs[slot] >> v & 1 ? gradient.of[v] : 0;
            }
            through[at] = gradient.narrowed();
          }
          let_through<mode>(gradient, input, slope, offset);
          add_gradient(sum, product, gradient, input, mean);
        });
  }
  keep_gradient_sums(a, place, sum, product);
}

// Writes the gradient of a vector of inputs.
__device__ __forceinline__ uint4 input_gradient(
    Values gradient, const Values& input, const Values& slope, const Values& dx_slope,
    const Values& dx_offset) {
  for (int v = 0; v < kNormVector; ++v) {
    const float rest = fmaf(-input.of[v], dx_slope.of[v], dx_offset.of[v]);
    gradient.of[v] = fmaf(gradient.of[v], slope.of[v], rest);
  }
  return gradient.narrowed();
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
  each_row_reversed<depth>(
      place,
      [&](int slot, long long at) {
        inputs[slot] = x[at];
        gradients[slot] = dy[at];
      },
      [&](int slot, long long at) {
        const Values input(inputs[slot]);
        Values gradient(gradients[slot]);
        let_through<mode>(gradient, input, slope, offset);
        dx[at] = input_gradient(gradient, input, slope, dx_slope, dx_offset);
      });
}

// Two neighbouring inputs of max pooling in row r of an image, at columns 2c and 2c + 1. They are in windows of row
// r / 2 and, for an odd r, of the next row, at columns c and c + 1. Pairs are numbered by image, row and c.
struct PixelPair {
  static constexpr int kPixels = 2;
  static constexpr int kWindows = 4;
  uint4 inputs[kPixels];
  uint4 gradients[kWindows];
  u64 places[kWindows];
  // The place of the left pixel's vector among the inputs, and the distance to that of the right one.
  long long left;
  int step;
  bool has_right;
  // The row that the pixels have in windows of row r / 2.
  unsigned window_row;

  __device__ __forceinline__ PixelPair(const NormArguments& a, const Place& place, long long number) {
    const auto all = static_cast<unsigned>(number);
    const unsigned line = all / static_cast<unsigned>(a.pooled_width);
    const int column = static_cast<int>(all - line * static_cast<unsigned>(a.pooled_width));
    const unsigned image = line / static_cast<unsigned>(a.height);
    const int row = static_cast<int>(line - image * static_cast<unsigned>(a.height));
    const int window = row / kPoolStride, is_odd = row % kPoolStride;
    left = place.at(static_cast<long long>(line) * a.width + kPoolStride * column);
    step = static_cast<int>(place.vectors);
    has_right = kPoolStride * column + 1 < a.width;
    window_row = static_cast<unsigned>(is_odd + kPoolPadding);
    const auto* x = static_cast<const uint4*>(a.x);
    inputs[0] = x[left];
    inputs[1] = has_right ? x[left + step] : inputs[0];
    const auto* dy = static_cast<const uint4*>(a.dy);
    const auto* kept = reinterpret_cast<const u64*>(a.places);
    const long long first =
        (static_cast<long long>(image) * a.pooled_height + window) * a.pooled_width + column;
#pragma unroll
    for (int at = 0; at < kWindows; ++at) {
      const int down = at / 2, right = at % 2;
      places[at] = ~u64{0};
      gradients[at] = uint4{0, 0, 0, 0};
      if (column + right < a.pooled_width &&
          (down == 0 || (is_odd == 1 && window + 1 < a.pooled_height))) {
        const long long from = place.at(first + down * a.pooled_width + right);
        places[at] = kept[from];
        gradients[at] = dy[from];
      }
    }
  }

  // Returns the sum of the gradients of the windows whose maximum a pixel is, in their order, and rounded.
  __device__ __forceinline__ Values unpooled(int pixel) const {
    Values sum;
    for (int v = 0; v < kNormVector; ++v) {
      sum.of[v] = 0;
    }
#pragma unroll
    for (int at = 0; at < kWindows; ++at) {
      const int column = pixel + kPoolPadding - kPoolStride * (at % 2);
      if (column >= 0) {
        const unsigned wanted = (at < 2 ? window_row * kPoolWindow : 0u) + static_cast<unsigned>(column);
        const Values gradient(gradients[at]);
        for (int v = 0; v < kNormVector; ++v) {
          const unsigned found = static_cast<unsigned>(places[at] >> (8 * v)) & 255;
          sum.of[v] += found == wanted ? gradient.of[v] : 0;
        }
      }
    }
    return Values(sum.narrowed());
  }

  // Calls `use(at, input, gradient)` for each pixel: with the place of its vector among the inputs, the inputs, and the
  // gradient in front of ReLU.
  template <typename Use>
  __device__ __forceinline__ void each(const Use& use) const {
    use(left, Values(inputs[0]), unpooled(0));
    if (has_right) {
      use(left + step, Values(inputs[1]), unpooled(1));
    }
  }
};

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

// Normalisation, ReLU and the maximum of each window. Of equal values the first one is taken, and of NaNs the last one,
// as libtorch does. The values that are compared are rounded.
BRIGADE_KERNEL(kNormThreads, kNormBlocks) activate_pool(NormArguments a) {
  constexpr int pixels = kPoolWindow * kPoolWindow;
  const Place place(a, a.pooled_rows);
  if (place.rows == 0) {
    return;
  }
  const auto* x = static_cast<const uint4*>(a.x);
  auto* y = static_cast<uint4*>(a.y);
  auto* places = reinterpret_cast<u64*>(a.places);
  const Values slope(a.slope + place.channel), offset(a.offset + place.channel);
  for (long long number = place.last(); number >= 0; number -= place.step) {
    const auto all = static_cast<unsigned>(number);
    const unsigned line = all / static_cast<unsigned>(a.pooled_width);
    const unsigned image = line / static_cast<unsigned>(a.pooled_height);
    const int top = kPoolStride * static_cast<int>(line - image * a.pooled_height) - kPoolPadding;
    const int left = kPoolStride * static_cast<int>(all - line * a.pooled_width) - kPoolPadding;
    const long long first = static_cast<long long>(image) * a.height * a.width;
    uint4 inputs[pixels];
    bool inside[pixels];
#pragma unroll
    for (int at = 0; at < pixels; ++at) {
      const int row = top + at / kPoolWindow, column = left + at % kPoolWindow;
      inside[at] = row >= 0 && row < a.height && column >= 0 && column < a.width;
      if (inside[at]) {
        inputs[at] = x[place.at(first + static_cast<long long>(row) * a.width + column)];
      }
    }
    Values best;
    unsigned found[kNormVector] = {};
    for (int v = 0; v < kNormVector; ++v) {
      // Below all that ReLU returns.
      best.of[v] = -1;
    }
#pragma unroll
    for (int at = 0; at < pixels; ++at) {
      if (inside[at]) {
        Values value(inputs[at]);
        for (int v = 0; v < kNormVector; ++v) {
          value.of[v] = fmaf(value.of[v], slope.of[v], offset.of[v]);
          value.of[v] = value.of[v] < 0 ? 0 : value.of[v];
        }
        value = Values(value.narrowed());
        for (int v = 0; v < kNormVector; ++v) {
          const bool is_better = value.of[v] > best.of[v] || value.of[v] != value.of[v];
          best.of[v] = is_better ? value.of[v] : best.of[v];
          found[v] = is_better ? static_cast<unsigned>(at) : found[v];
        }
      }
    }
    u64 kept = 0;
    for (int v = 0; v < kNormVector; ++v) {
      kept |= static_cast<u64>(best.of[v] <= 0 ? kNoPlace : found[v]) << (8 * v);
    }
    const long long to = place.at(number);
    y[to] = best.narrowed();
    places[to] = kept;
  }
}

BRIGADE_KERNEL(kNormThreads, kNormBlocks) gradient_sums_pool(NormArguments a) {
  const Place place(a, a.pairs);
  float sum[kNormVector] = {}, product[kNormVector] = {};
  if (place.rows > 0) {
    const Values mean(a.mean + place.channel);
    for (long long number = place.first; number < place.rows; number += place.step) {
      PixelPair(a, place, number).each([&](long long, const Values& input, const Values& gradient) {
        add_gradient(sum, product, gradient, input, mean);
      });
    }
  }
  keep_gradient_sums(a, place, sum, product);
}

BRIGADE_KERNEL(kNormThreads, kNormBlocks) gradient_rows_pool(NormArguments a) {
  const Place place(a, a.pairs);
  if (place.rows == 0) {
    return;
  }
  auto* dx = static_cast<uint4*>(a.dx);
  const Values slope(a.slope + place.channel);
  const Values dx_slope(a.dx_slope + place.channel), dx_offset(a.dx_offset + place.channel);
  for (long long number = place.last(); number >= 0; number -= place.step) {
    PixelPair(a, place, number).each([&](long long at, const Values& input, const Values& gradient) {
      dx[at] = input_gradient(gradient, input, slope, dx_slope, dx_offset);
    });
  }
}

BRIGADE_KERNEL(kNormThreads, kNormBlocks) gradient_sums_two_uses(NormArguments a) {
  gradient_sums<kTwoUses>(a);
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
