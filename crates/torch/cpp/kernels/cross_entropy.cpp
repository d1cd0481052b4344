#include "cross_entropy.h"

#include "cross_entropy.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace brigade {

kernels::Program* cross_entropy_kernels(const at::Tensor& logits) {
  return kernels::program("cross_entropy", logits);
}

bool fits_cross_entropy_kernels(const at::Tensor& t) {
  const auto type = t.scalar_type();
  return (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat) &&
      t.layout() == at::kStrided && t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1) &&
      !t.is_neg() && t.size(0) <= std::numeric_limits<int>::max() && t.size(1) > 0 &&
      // Numbers of columns, a depth of vectors beyond the last included, are 32 bits.
      t.size(1) <= std::numeric_limits<int>::max() / 2;
}

at::Tensor cross_entropy_rows_gpu(
    kernels::Program& program, const at::Tensor& logits, int64_t classes, const at::Tensor& targets,
    const at::Tensor& count, const RowLossOptions& options, const at::Tensor& gradient) {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  TORCH_CHECK(
      fits_cross_entropy_kernels(logits), "the kernels do not take logits of ", logits.sizes(), " and ",
      logits.scalar_type());
  TORCH_CHECK(classes > 0 && classes <= columns, classes, " classes in ", columns, " columns");
  TORCH_CHECK(
      targets.scalar_type() == at::kLong && targets.is_contiguous() && targets.numel() == rows,
      "targets are ", targets.sizes(), " of ", targets.scalar_type(), ", expected int64 [", rows, "]");
  TORCH_CHECK(
      !count.defined() || (count.scalar_type() == at::kLong && count.numel() == 1),
      "the count is not one int64");
  TORCH_CHECK(
      !gradient.defined() ||
          (gradient.sizes() == logits.sizes() && gradient.scalar_type() == logits.scalar_type() &&
           fits_cross_entropy_kernels(gradient)),
      "the gradient does not have the logits' shape and type");
  auto losses = at::empty({rows}, logits.options().dtype(at::kFloat));
  if (rows == 0) {
    return losses;
  }
  CrossEntropyArguments a{};
  a.logits = logits.const_data_ptr();
  a.gradient = gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  a.targets = reinterpret_cast<const long long*>(targets.const_data_ptr<int64_t>());
  a.losses = losses.mutable_data_ptr<float>();
  a.count = count.defined() ? reinterpret_cast<const long long*>(count.const_data_ptr<int64_t>()) : nullptr;
  a.ignored = options.ignore_index;
  a.stride = logits.stride(0);
  a.gradient_stride = gradient.defined() ? gradient.stride(0) : 0;
  a.classes = static_cast<int>(classes);
  a.columns = static_cast<int>(columns);
  a.smoothing = static_cast<float>(options.label_smoothing);
  a.z_loss = static_cast<float>(options.z_loss);
  a.scale = static_cast<float>(options.scale);
  const bool is_aligned =
      kernels::has_aligned_rows(logits) && (!gradient.defined() || kernels::has_aligned_rows(gradient));
  constexpr int64_t kWarp = 32;
  const int64_t vector = 16 / static_cast<int64_t>(logits.element_size());
  const int64_t warps = kernels::quotient_up(kernels::quotient_up(columns, vector), kWarp);
  const auto threads = static_cast<unsigned>(std::min<int64_t>(kCrossEntropyThreads, warps * kWarp));
  program.launch(
      is_aligned ? "cross_entropy" : "cross_entropy_unaligned", {static_cast<unsigned>(rows), 1},
      {threads, 1}, /*shared=*/0, a);
  return losses;
}

} // namespace brigade
