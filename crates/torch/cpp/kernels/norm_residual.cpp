#include "norm_residual.h"

#include "norm_residual.cu"
#include "../philox.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

namespace brigade {

namespace {

// Warps for each of the GPU's multiprocessors in the backward, whose blocks each leave sums to add up.
constexpr int64_t kNormResidualWarps = 16;

// How a row's vectors are spread over threads.
struct NormResidualShape {
  std::string kernel;
  unsigned threads;

  explicit NormResidualShape(int64_t width) {
    constexpr int64_t kWarp = 32;
    const int64_t vectors = width / kNormResidualVector;
    const auto whole_warps = [](int64_t count) { return kernels::quotient_up(count, kWarp) * kWarp; };
    if (vectors <= kNormResidualThreads) {
      kernel = "norm_residual_1";
      threads = whole_warps(vectors);
    } else if (vectors <= 2 * kNormResidualThreads) {
      kernel = "norm_residual_2";
      threads = whole_warps(kernels::quotient_up(vectors, 2));
    } else {
      kernel = "norm_residual_any";
      threads = kNormResidualThreads;
    }
  }
};

// The tensor as the kernels read it: contiguous, at a multiple of 16 bytes.
at::Tensor readable(const at::Tensor& t) {
  if (!t.defined()) {
    return t;
  }
  const auto dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

template <typename T>
const T* address(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<T>() : nullptr;
}

// Arguments that both directions have, and the tensors that they point to.
struct NormResidualCall {
  NormResidualArguments args{};
  at::Tensor weight, bias, branch_bias;

  NormResidualCall(const at::Tensor& stream, const NormResidualRule& rule, bool has_branch)
      : weight(readable(rule.weight)), bias(readable(rule.bias)), branch_bias(readable(rule.branch_bias)) {
    args.width = static_cast<int>(stream.size(-1));
    args.rows = stream.numel() / args.width;
    args.weight = address<float>(weight);
    args.bias = address<float>(bias);
    args.branch_bias = address<float>(branch_bias);
    args.eps = static_cast<float>(rule.eps);
    const Dropping dropping(has_branch ? rule.dropout : 0, 0);
    args.below = static_cast<unsigned>(dropping.below);
    args.keep = static_cast<float>(dropping.kept);
    if (dropping.drops()) {
      TORCH_CHECK(
          rule.seed.defined() && rule.seed.scalar_type() == at::kLong && rule.seed.numel() == 1 &&
              rule.seed.device() == stream.device(),
          "dropout has no seed on ", stream.device());
      args.seed = reinterpret_cast<const long long*>(rule.seed.const_data_ptr<int64_t>());
    }
  }
};

} // namespace

kernels::Program* norm_residual_kernels(const at::Tensor& stream, at::ScalarType type) {
  return kernels::program("norm_residual", stream.device(), type);
}

bool fits_norm_residual_kernels(
    const at::Tensor& stream, const std::optional<at::Tensor>& branch, at::ScalarType type) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  const bool is_short = type == at::kBFloat16 || type == at::kHalf;
  const auto is_plain = [&](const at::Tensor& t) {
    return t.layout() == at::kStrided && !t.is_neg() && t.device() == stream.device();
  };
  return is_short && is_plain(stream) && stream.scalar_type() == at::kFloat && stream.dim() > 0 &&
      stream.numel() > 0 && stream.size(-1) % kNormResidualVector == 0 &&
      // Three sums for each column have 32-bit numbers.
      stream.size(-1) <= kMax / 4 && stream.numel() / stream.size(-1) <= kMax &&
      (!branch || (is_plain(*branch) && branch->scalar_type() == type && branch->sizes() == stream.sizes()));
}

bool fits_norm_residual_kernels(const at::Tensor& stream, const at::Tensor& parameter) {
  return parameter.layout() == at::kStrided && !parameter.is_neg() && parameter.device() == stream.device() &&
      parameter.scalar_type() == at::kFloat && parameter.dim() == 1 && parameter.size(0) == stream.size(-1);
}

NormResidualOutputs norm_residual_forward_gpu(
    kernels::Program& program, const at::Tensor& stream, const std::optional<at::Tensor>& branch,
    const NormResidualRule& rule, at::ScalarType type, bool wants_float) {
  TORCH_CHECK(
      fits_norm_residual_kernels(stream, branch, type), "the kernels do not take a stream of ", stream.sizes(),
      " and ", stream.scalar_type());
  const auto x = readable(stream);
  const auto added = branch ? readable(*branch) : at::Tensor();
  NormResidualCall call(x, rule, added.defined());
  auto& a = call.args;
  const auto floats = x.options();
  NormResidualOutputs out;
  out.sum = branch ? at::empty_like(x) : stream;
  out.normed = at::empty_like(x, floats.dtype(type));
  out.normed_float = wants_float ? at::empty_like(x) : at::Tensor();
  out.mean = rule.rms ? at::Tensor() : at::empty({a.rows}, floats);
  out.inverse = at::empty({a.rows}, floats);
  a.stream = address<float>(x);
  a.branch = branch ? added.const_data_ptr() : nullptr;
  a.sum = branch ? out.sum.mutable_data_ptr<float>() : nullptr;
  a.normed = out.normed.mutable_data_ptr();
  a.normed_float = wants_float ? out.normed_float.mutable_data_ptr<float>() : nullptr;
  a.mean = rule.rms ? nullptr : out.mean.mutable_data_ptr<float>();
  a.inverse = out.inverse.mutable_data_ptr<float>();
  const NormResidualShape shape(a.width);
  program.launch(shape.kernel, {static_cast<unsigned>(a.rows), 1}, {shape.threads, 1}, /*shared=*/0, a);
  return out;
}

NormResidualGradients norm_residual_backward_gpu(
    kernels::Program& program, const NormResidualOutputs& outputs, const at::Tensor& dsum,
    const at::Tensor& dnormed, const at::Tensor& dnormed_float, const NormResidualRule& rule,
    std::optional<at::ScalarType> branch_type) {
  const auto sum = readable(outputs.sum);
  const auto of_sum = readable(dsum), of_normed = readable(dnormed), of_float = readable(dnormed_float);
  NormResidualCall call(sum, rule, branch_type.has_value());
  auto& a = call.args;
  NormResidualGradients out;
  out.stream = at::empty_like(sum);
  out.branch = branch_type ? at::empty_like(sum, sum.options().dtype(*branch_type)) : at::Tensor();
  out.columns = at::empty({3, a.width}, sum.options());
  // The kernels only read these.
  a.sum = const_cast<float*>(address<float>(sum));
  a.mean = const_cast<float*>(address<float>(outputs.mean));
  a.inverse = const_cast<float*>(address<float>(outputs.inverse));
  a.dsum = address<float>(of_sum);
  a.dnormed = of_normed.defined() ? of_normed.const_data_ptr() : nullptr;
  a.dnormed_float = address<float>(of_float);
  a.dstream = out.stream.mutable_data_ptr<float>();
  a.dbranch = branch_type ? out.branch.mutable_data_ptr() : nullptr;
  const NormResidualShape shape(a.width);
  const int64_t blocks = std::max<int64_t>(1, kNormResidualWarps * 32 / shape.threads) * program.processors();
  a.parts = static_cast<int>(std::min<int64_t>(a.rows, blocks));
  const auto part_sums = at::empty({a.parts, 3, a.width}, sum.options());
  a.part_sums = part_sums.mutable_data_ptr<float>();
  a.column_sums = out.columns.mutable_data_ptr<float>();
  program.launch(
      shape.kernel + "_backward", {static_cast<unsigned>(a.parts), 1}, {shape.threads, 1}, /*shared=*/0, a);
  program.launch(
      "norm_residual_sums", {kernels::quotient_up(int64_t{3} * a.width, kNormResidualColumns), 1},
      {kNormResidualColumns, kNormResidualStripes}, /*shared=*/0, a);
  return out;
}

} // namespace brigade
