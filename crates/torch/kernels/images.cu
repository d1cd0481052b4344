// Images of bytes as normalised values in channels_last, for NVIDIA GPUs from compute capability 8.0 on.
// crates/torch/cpp/kernels/images.cpp launches this kernel.
//
// Registers of a thread: at most 64.
//
// A thread writes vectors of 16 bytes, whose values are those of neighbouring pixels and their channels. A value is
// byte / 255, less its channel's mean, over its standard deviation, each rounded to float32 as operations of their own
// round them.

// Maximum number of channels.
constexpr int kImageChannels = 4;

struct ImagesArguments {
  const unsigned char* from;
  void* to;
  // Number of values of all images, and of pixels of one image.
  long long values;
  long long pixels;
  int channels;
  // `from` is in channels_last, too.
  bool is_last;
  float mean[kImageChannels];
  float deviation[kImageChannels];
};

// Maximum number of threads in a block.
constexpr int kImageThreads = 256;

#if defined(__CUDACC_RTC__) || defined(BRIGADE_EMULATED_GPU)

BRIGADE_KERNEL(kImageThreads, 4) normalize_images(ImagesArguments a) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x * kVector;
  long long begin = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
  for (; begin < a.values; begin += step) {
    long long image = begin / a.channels / a.pixels;
    long long pixel = begin / a.channels % a.pixels;
    int channel = static_cast<int>(begin % a.channels);
    const long long left = a.values - begin;
    const int count = left < kVector ? static_cast<int>(left) : kVector;
    Values values;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (v < count) {
        const long long from =
            a.is_last ? begin + v : (image * a.channels + channel) * a.pixels + pixel;
        const float value = static_cast<float>(a.from[from]) / 255.0f;
        values.of[v] = (value - a.mean[channel]) / a.deviation[channel];
        if (++channel == a.channels) {
          channel = 0;
          if (++pixel == a.pixels) {
            pixel = 0;
            ++image;
          }
        }
      }
    }
    Element* to = static_cast<Element*>(a.to) + begin;
    if (count == kVector) {
      store_vector<true>(to, count, values);
    } else {
      store_vector<false>(to, count, values);
    }
  }
}

#endif
