#include "brigade-torch/src/bridge.rs.h"

#include "foreach.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

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

// The relative size of Adafactor's step, and the part of the newest squares in their mean.
std::pair<Number, Number> adafactor_numbers(
    const AdafactorStep& step, const Number& lr, const Number& steps) {
  return {lower(lr, 1 / root(steps)), power(steps, step.beta2_decay)};
}

double lowest_root(const AdafactorStep& step, at::ScalarType kind) {
  return step.eps1 >= 0 ? step.eps1 : machine_epsilon(kind);
}

// One parameter on the CPU, where to read a value does not wait. `t` is the parameter, its gradient and the
// factors of its variance, or the variance.
void adafactor_one(const List& t, const AdafactorStep& step) {
  const auto [rho, part] = adafactor_numbers(step, step.lr, step.steps);
  const double weight = part.host();
  const auto& parameter = t[0];
  const auto gradient = step.maximize ? t[1].neg() : t[1];
  const double eps = lowest_root(step, parameter.scalar_type());
  const double rate = std::max(step.eps2, root_mean_square(parameter)) * rho.host();
  if (step.weight_decay != 0) {
    parameter.mul_(1 - step.lr * step.weight_decay);
  }
  at::Tensor variance;
  if (t.size() == 4) {
    const auto &rows = t[2], &columns = t[3];
    rows.lerp_(mean_square(gradient, -1), weight);
    columns.lerp_(mean_square(gradient, -2), weight);
    variance = rows.matmul(columns).div_(rows.mean(-2, /*keepdim=*/true).clamp_min_(eps));
  } else {
    t[2].lerp_(gradient * gradient, weight);
    variance = t[2].clone();
  }
  const auto update = variance.clamp_min_(eps * eps).rsqrt_().mul_(gradient);
  const double excess = std::max(1.0, root_mean_square(update) / step.threshold);
  parameter.add_(update, -rate / excess);
}

// Their root mean squares, as a vector in double precision.
at::Tensor root_mean_squares(const List& list) {
  auto each = at::_foreach_norm(list);
  std::vector<at::Scalar> sizes;
  for (const auto& tensor : list) {
    sizes.emplace_back(std::sqrt(static_cast<double>(tensor.numel())));
  }
  at::_foreach_div_(each, sizes);
  return at::stack(each).to(at::kDouble);
}

// mean = mean + part x (value - mean), unless skipped; values are lists of squares, which are used up.
void move_means_by(
    const List& means, const List& values, const Number& part, const StepNumbers& numbers) {
  if (part.on_host() && !numbers.can_skip()) {
    at::_foreach_lerp_(means, values, part.host());
    return;
  }
  multiply_list(means, numbers.unless_skipped(1 - part, 1));
  multiply_list(values, numbers.unless_skipped(part, 0));
  at::_foreach_add_(means, values);
}

// The means of squares along one dimension: one reduction for each, the rest together.
List mean_squares(const List& list, int64_t dimension) {
  List means;
  std::vector<at::Scalar> sizes;
  means.reserve(list.size());
  for (const auto& values : list) {
    means.push_back(at::linalg_vector_norm(values, 2, dimension, /*keepdim=*/true));
    sizes.emplace_back(static_cast<double>(values.size(dimension)));
  }
  at::_foreach_mul_(means, means);
  at::_foreach_div_(means, sizes);
  return means;
}

void adafactor_list(StepPiece& piece, const AdafactorStep& step, rust::Slice<const TensorRef> device) {
  const auto& p = piece.roles[0];
  const StepNumbers now(device, piece.device, step.lr, step.steps);
  const auto [rho, part] = adafactor_numbers(step, now.lr, now.steps);
  const double eps = lowest_root(step, piece.kind);
  const auto sizes = root_mean_squares(p).clamp_min_(step.eps2);
  const auto slopes = decay_and_slopes(
      p, piece.roles[1], step.maximize, step.weight_decay, /*decoupled=*/true, now);
  Scratch updates(p, p[0].scalar_type());
  if (piece.roles.size() == 4) {
    const auto &rows = piece.roles[2], &columns = piece.roles[3];
    move_means_by(rows, mean_squares(slopes.list, -1), part, now);
    move_means_by(columns, mean_squares(slopes.list, -2), part, now);
    List means;
    means.reserve(rows.size());
    for (const auto& row : rows) {
      means.push_back(row.mean(-2, /*keepdim=*/true));
    }
    at::_foreach_clamp_min_(means, eps);
    for (size_t i = 0; i < rows.size(); ++i) {
      at::mul_out(updates.views[i], rows[i].div(means[i]), columns[i]);
    }
  } else {
    move_means_by(piece.roles[2], at::_foreach_mul(slopes.list, slopes.list), part, now);
    updates.copy(piece.roles[2]);
  }
  updates.block.clamp_min_(eps * eps).rsqrt_();
  at::_foreach_mul_(updates.views, slopes.list);
  const auto excess = root_mean_squares(updates.views).div_(step.threshold).clamp_min_(1);
  descend_each(p, std::move(updates), scaled(sizes, rho).div_(excess), now);
}

// What a matrix' shape multiplies Muon's learning rate by.
double shape_factor(const at::Tensor& matrix, const MuonStep& step) {
  const auto rows = static_cast<double>(matrix.size(0)), columns = static_cast<double>(matrix.size(1));
  return step.match_rms_adamw ? 0.2 * std::sqrt(std::max(rows, columns))
                              : std::sqrt(std::max(rows / columns, 1.0));
}

void muon_one(const List& t, const MuonStep& step) {
  const auto &parameter = t[0], &gradient = t[1], &buffer = t[2];
  buffer.lerp_(gradient, 1 - step.momentum);
  const auto direction = step.nesterov ? gradient.lerp(buffer, step.momentum) : buffer;
  const auto update = orthogonalized(direction, step);
  if (step.weight_decay != 0) {
    parameter.mul_(1 - step.lr * step.weight_decay);
  }
  parameter.add_(update, -(step.lr * shape_factor(parameter, step)));
}

// The same as `orthogonalized`, of matrices of one shape at once.
at::Tensor all_orthogonalized(const List& matrices, const MuonStep& step) {
  auto x = at::stack(matrices).to(at::kBFloat16);
  const bool tall = x.size(1) > x.size(2);
  if (tall) {
    x = x.transpose(1, 2);
  }
  x = x.div(at::linalg_vector_norm(x, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true)
                .clamp_min_(step.eps));
  for (int64_t i = 0; i < step.iterations; ++i) {
    const auto gram = x.bmm(x.transpose(1, 2));
    const auto polynomial = at::baddbmm(gram, gram, gram, step.b, step.c);
    x = at::baddbmm(x, polynomial, x, step.a, 1);
  }
  return tall ? x.transpose(1, 2) : x;
}

void muon_list(StepPiece& piece, const MuonStep& step, rust::Slice<const TensorRef> device) {
  const auto &all = piece.roles[0], &buffers = piece.roles[2];
  const StepNumbers now(device, piece.device, step.lr, 0);
  const auto slopes = decay_and_slopes(
      all, piece.roles[1], /*maximize=*/false, step.weight_decay, /*decoupled=*/true, now);
  move_means(buffers, slopes.list, 1 - step.momentum, now);
  List directions = buffers;
  std::optional<Scratch> ahead;
  if (step.nesterov) {
    ahead.emplace(all, all[0].scalar_type());
    ahead->copy(slopes.list);
    at::_foreach_lerp_(ahead->views, buffers, step.momentum);
    directions = ahead->views;
  }
  std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> shapes;
  for (size_t i = 0; i < all.size(); ++i) {
    shapes[{all[i].size(0), all[i].size(1)}].push_back(i);
  }
  for (const auto& [shape, indices] : shapes) {
    const auto of = chosen({all, directions}, indices);
    const auto update = all_orthogonalized(of[1], step).to(of[0][0].scalar_type());
    descend(of[0], update.unbind(0), now.lr * shape_factor(of[0][0], step), now);
  }
}

// Those of the CPU, which are stepped one by one, and the others.
std::pair<std::vector<size_t>, std::vector<size_t>> ways(const Roles& roles, bool operations) {
  std::pair<std::vector<size_t>, std::vector<size_t>> out;
  for (size_t i = 0; i < roles[0].size(); ++i) {
    (roles[0][i].is_cpu() && !operations ? out.first : out.second).push_back(i);
  }
  return out;
}

List of_one(const Roles& roles, size_t index) {
  List out;
  for (const auto& role : roles) {
    out.push_back(role[index]);
  }
  return out;
}

} // namespace

void adafactor(
    rust::Slice<const TensorRef> tensors, size_t count, const AdafactorStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  if (count == 0) {
    return;
  }
  const bool factored = tensors.size() == count * 4;
  const auto roles = roles_of(tensors, count, factored ? 4 : 3, factored ? 2 : 3, "Adafactor");
  for (const auto& parameter : roles[0]) {
    TORCH_CHECK(
        (parameter.dim() > 1) == factored,
        "Adafactor keeps two factors of the variance of two or more dimensions, and the variance of less; a "
        "parameter of shape ", parameter.sizes(), " has ", factored ? "two factors" : "one variance");
  }
  const auto [single, together] = ways(roles, operations || !device.empty());
  for (const size_t index : single) {
    adafactor_one(of_one(roles, index), step);
  }
  each_piece(chosen(roles, together), kGradient, [&](StepPiece& piece) {
    adafactor_list(piece, step, device);
  });
}

void muon(
    rust::Slice<const TensorRef> tensors, size_t count, const MuonStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  const auto roles = roles_of(tensors, count, 3, 3, "Muon");
  for (const auto& parameter : roles[0]) {
    TORCH_CHECK(
        parameter.dim() == 2, "Muon steps matrices; this parameter has shape ", parameter.sizes());
  }
  const auto [single, together] = ways(roles, operations || !device.empty());
  for (const size_t index : single) {
    muon_one(of_one(roles, index), step);
  }
  each_piece(chosen(roles, together), kGradient, [&](StepPiece& piece) {
    muon_list(piece, step, device);
  });
}

} // namespace brigade
