#include "brigade-torch/src/bridge.rs.h"

#include "images.h"
#include "kernels/images.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace brigade {

std::unique_ptr<Tensor> normalized_images(
    const Tensor& images, rust::Slice<const float> mean, rust::Slice<const float> deviation, int8_t kind) {
  const auto type = static_cast<at::ScalarType>(kind);
  TORCH_CHECK_VALUE(
      images.scalar_type() == at::kByte && images.dim() == 4, "images are ", images.sizes(), " and ",
      images.scalar_type(), ", expected [n, c, h, w] and uint8");
  const auto channels = static_cast<size_t>(images.size(1));
  TORCH_CHECK_VALUE(
      mean.size() == channels && deviation.size() == channels, mean.size(), " means and ", deviation.size(),
      " standard deviations for ", channels, " channels");
  TORCH_CHECK_VALUE(at::isFloatingType(type), "images are normalised as floating-point values, not as ", type);
  if (auto* kernels = image_kernels(images, type)) {
    return std::make_unique<Tensor>(normalized_images_gpu(
        *kernels, images, {mean.data(), mean.size()}, {deviation.data(), deviation.size()}, type));
  }
  // Written by kernels: a copy from the host would be waited for, and a recorded step would not repeat it.
  const auto constant = [&](rust::Slice<const float> values) {
    auto out = at::empty({1, images.size(1), 1, 1}, images.options().dtype(at::kFloat).memory_format(std::nullopt));
    for (size_t channel = 0; channel < channels; ++channel) {
      out.narrow(1, static_cast<int64_t>(channel), 1).fill_(values[channel]);
    }
    return out;
  };
  const auto values = images.to(at::kFloat).div(255).sub(constant(mean)).div(constant(deviation));
  return std::make_unique<Tensor>(values.to(type).contiguous(at::MemoryFormat::ChannelsLast));
}

} // namespace brigade
