#include "images.h"

#include "images.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

namespace brigade {

namespace {

// Blocks for each of the GPU's multiprocessors: as many as can be there at once.
constexpr int64_t kImageBlocks = 8;

} // namespace

kernels::Program* image_kernels(const at::Tensor& images, c10::ScalarType type) {
  const bool fits = images.is_cuda() && images.layout() == at::kStrided && images.scalar_type() == at::kByte &&
      images.dim() == 4 && images.numel() > 0 && images.size(1) <= kImageChannels &&
      (images.is_contiguous() || images.is_contiguous(at::MemoryFormat::ChannelsLast));
  return fits ? kernels::program("images", images.device(), type) : nullptr;
}

at::Tensor normalized_images_gpu(
    kernels::Program& program, const at::Tensor& images, c10::ArrayRef<float> mean, c10::ArrayRef<float> deviation,
    c10::ScalarType type) {
  auto out = at::empty(
      images.sizes(), images.options().dtype(type).memory_format(at::MemoryFormat::ChannelsLast));
  ImagesArguments a{};
  a.from = images.const_data_ptr<uint8_t>();
  a.to = out.mutable_data_ptr();
  a.values = images.numel();
  a.channels = static_cast<int>(images.size(1));
  a.pixels = images.size(2) * images.size(3);
  a.is_last = !images.is_contiguous();
  std::copy(mean.begin(), mean.end(), a.mean);
  std::copy(deviation.begin(), deviation.end(), a.deviation);
  const int64_t vector = 16 / static_cast<int64_t>(out.element_size());
  const int64_t blocks = std::min<int64_t>(
      kernels::quotient_up(a.values, vector * kImageThreads), int64_t{program.processors()} * kImageBlocks);
  program.launch(
      "normalize_images", {static_cast<unsigned>(blocks), 1}, {kImageThreads, 1}, /*shared=*/0, a);
  return out;
}

} // namespace brigade
