#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace brigade {

namespace {

double machine_epsilon(at::ScalarType kind) {
  switch (kind) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// The mean of squares along one dimension.
at::Tensor mean_square(const at::Tensor& values, int64_t dimension) {
  return at::linalg_vector_norm(values, 2, dimension, /*keepdim=*/true)
      .square_()
      .div_(values.size(dimension));
}

double root_mean_square(const at::Tensor& values) {
  return values.norm().item<double>() / std::sqrt(static_cast<double>(values.numel()));
}

// Nearly the orthogonal matrix that is closest to `matrix`, by iterations of an odd polynomial of degree
// five on its singular values (Jordan et al., 2024), in bfloat16.
at::Tensor orthogonalized(const at::Tensor& matrix, const MuonStep& step) {
  const bool tall = matrix.size(0) > matrix.size(1);
  auto x = matrix.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (tall) {
    x = x.t();
  }
  x.div_(x.norm().clamp_min(step.eps));
  for (int64_t i = 0; i < step.iterations; ++i) {
    const auto gram = x.mm(x.t());
    const auto polynomial = at::addmm(gram, gram, gram, step.b, step.c);
    x = at::addmm(x, polynomial, x, step.a, 1);
  }
  return tall ? x.t() : x;
}

} // namespace

void adafactor(rust::Slice<const TensorRef> tensors, const AdafactorStep& step) {
  at::NoGradGuard no_grad;
  const auto t = copy_handles(tensors);
  const bool factored = t.at(0).dim() > 1;
  TORCH_CHECK(
      t.size() == (factored ? 4u : 3u), "an Adafactor step was given ", t.size(), " tensors");
  const auto& parameter = t[0];
  const auto gradient = step.maximize ? t[1].neg() : t[1];
  const double eps = step.eps1 >= 0 ? step.eps1 : machine_epsilon(parameter.scalar_type());
  const double rate = std::max(step.eps2, root_mean_square(parameter)) * step.rho;
  if (step.keep != 1) {
    parameter.mul_(step.keep);
  }
  at::Tensor variance;
  if (factored) {
    const auto &rows = t[2], &columns = t[3];
    rows.lerp_(mean_square(gradient, -1), step.weight);
    columns.lerp_(mean_square(gradient, -2), step.weight);
    variance = rows.matmul(columns).div_(rows.mean(-2, /*keepdim=*/true).clamp_min_(eps));
  } else {
    t[2].lerp_(gradient * gradient, step.weight);
    variance = t[2].clone();
  }
  const auto update = variance.clamp_min_(eps * eps).rsqrt_().mul_(gradient);
  const double excess = std::max(1.0, root_mean_square(update) / step.threshold);
  parameter.add_(update, -rate / excess);
}

void muon(rust::Slice<const TensorRef> tensors, const MuonStep& step) {
  at::NoGradGuard no_grad;
  const auto t = copy_handles(tensors);
  TORCH_CHECK(t.size() == 3, "a Muon step was given ", t.size(), " tensors");
  const auto &parameter = t[0], &gradient = t[1], &buffer = t[2];
  TORCH_CHECK(
      parameter.dim() == 2, "Muon steps matrices; this parameter has shape ", parameter.sizes());
  buffer.lerp_(gradient, 1 - step.momentum);
  const auto direction = step.nesterov ? gradient.lerp(buffer, step.momentum) : buffer;
  const auto update = orthogonalized(direction, step);
  if (step.keep != 1) {
    parameter.mul_(step.keep);
  }
  parameter.add_(update, -step.size);
}

} // namespace brigade
