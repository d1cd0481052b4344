#include "brigade-torch/src/bridge.rs.h"

#include "foreach.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

namespace brigade {

namespace {

// Elements of a row of a `Scratch`: a multiple of what vectorised loads need, small against a matrix.
constexpr int64_t kRow = 512;
// Elements that are stepped at once: 128 MiB for each list of float32 that a step makes.
constexpr int64_t kPiece = int64_t{1} << 25;

template <typename OnHost, typename TensorTensor, typename TensorScalar, typename ScalarTensor>
Number combined(
    const Number& left, const Number& right, const OnHost& on_host, const TensorTensor& tensors,
    const TensorScalar& tensor_scalar, const ScalarTensor& scalar_tensor) {
  if (left.on_host() && right.on_host()) {
    return on_host(left.host(), right.host());
  }
  if (right.on_host()) {
    return Number(tensor_scalar(left.device(), right.host()));
  }
  if (left.on_host()) {
    return Number(scalar_tensor(left.host(), right.device()));
  }
  return Number(tensors(left.device(), right.device()));
}

// A tensor over part of a block's memory, made without a trip through the dispatcher: a step makes one for
// each parameter.
at::Tensor part_of(
    const at::Tensor& block, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto part = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(block.storage()), block.key_set(), block.dtype());
  part.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return part;
}

// A scalar of a list of numbers, on the device where it is needed.
at::Tensor scalar(const at::Tensor& tensor, at::Device where, const char* what) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.numel() == 1 && at::isFloatingType(tensor.scalar_type()),
      "the ", what, " of a step is one floating-point number, not ", tensor.toString(), " of shape ",
      tensor.sizes());
  return tensor.reshape({}).to(where);
}

} // namespace

Number operator+(const Number& left, const Number& right) {
  return combined(
      left, right, [](double a, double b) { return a + b; },
      [](const at::Tensor& a, const at::Tensor& b) { return a.add(b); },
      [](const at::Tensor& a, double b) { return a.add(b); },
      [](double a, const at::Tensor& b) { return b.add(a); });
}

Number operator-(const Number& left, const Number& right) {
  return combined(
      left, right, [](double a, double b) { return a - b; },
      [](const at::Tensor& a, const at::Tensor& b) { return a.sub(b); },
      [](const at::Tensor& a, double b) { return a.sub(b); },
      [](double a, const at::Tensor& b) { return at::rsub(b, a); });
}

Number operator*(const Number& left, const Number& right) {
  return combined(
      left, right, [](double a, double b) { return a * b; },
      [](const at::Tensor& a, const at::Tensor& b) { return a.mul(b); },
      [](const at::Tensor& a, double b) { return a.mul(b); },
      [](double a, const at::Tensor& b) { return b.mul(a); });
}

Number operator/(const Number& left, const Number& right) {
  return combined(
      left, right, [](double a, double b) { return a / b; },
      [](const at::Tensor& a, const at::Tensor& b) { return a.div(b); },
      [](const at::Tensor& a, double b) { return a.div(b); },
      [](double a, const at::Tensor& b) { return b.reciprocal().mul_(a); });
}

Number root(const Number& number) {
  return number.on_host() ? Number(std::sqrt(number.host())) : Number(number.device().sqrt());
}

Number power(double base, const Number& exponent) {
  return exponent.on_host() ? Number(std::pow(base, exponent.host()))
                            : Number(at::pow(at::Scalar(base), exponent.device()));
}

Number power(const Number& base, double exponent) {
  return base.on_host() ? Number(std::pow(base.host(), exponent))
                        : Number(base.device().pow(exponent));
}

Number lower(const Number& left, const Number& right) {
  return combined(
      left, right, [](double a, double b) { return std::min(a, b); },
      [](const at::Tensor& a, const at::Tensor& b) { return at::minimum(a, b); },
      [](const at::Tensor& a, double b) { return a.clamp_max(b); },
      [](double a, const at::Tensor& b) { return b.clamp_max(a); });
}

Number where_above(const Number& condition, double bound, const Number& number, double otherwise) {
  if (condition.on_host()) {
    return condition.host() > bound ? number : Number(otherwise);
  }
  const auto above = condition.device().gt(bound);
  auto value = number.on_host() ? at::full_like(condition.device(), number.host()) : number.device();
  return Number(value.masked_fill(above.logical_not(), otherwise));
}

StepNumbers::StepNumbers(
    rust::Slice<const TensorRef> device, at::Device where, double lr, double steps)
    : lr(lr), steps(steps) {
  if (device.empty()) {
    return;
  }
  const auto given = copy_handles(device);
  TORCH_CHECK(given.size() == 4, "a step was given ", given.size(), " numbers, expected 4");
  if (given[0].defined()) {
    this->lr = Number(scalar(given[0], where, "learning rate"));
  }
  if (given[1].defined()) {
    this->steps = Number(scalar(given[1], where, "count of steps"));
  }
  if (given[2].defined()) {
    const auto scale = scalar(given[2], where, "gradients' scale");
    inverse_scale = scale.to(at::kDouble).reciprocal();
    fused_scale = scale.to(at::kFloat);
  }
  if (given[3].defined()) {
    skip = scalar(given[3], where, "sign of gradients that are not finite").ne(0);
    skipped_ = skip.to(at::kDouble);
    made_ = at::rsub(skipped_, 1);
    fused_found = skip.to(at::kFloat);
  }
}

Number StepNumbers::unless_skipped(const Number& value, double otherwise) const {
  if (!can_skip()) {
    return value;
  }
  if (value.on_host()) {
    // One of both terms is 0, so that the other is not rounded.
    return Number(made_.mul(value.host()).add_(skipped_, otherwise));
  }
  return Number(value.device().masked_fill(skip, otherwise));
}

Scratch::Scratch(const List& like, at::ScalarType kind) {
  rows_.reserve(like.size());
  int64_t rows = 0;
  for (const auto& tensor : like) {
    rows_.push_back((tensor.numel() + kRow - 1) / kRow);
    rows += rows_.back();
  }
  block = at::empty({rows * kRow}, like.at(0).options().dtype(kind).requires_grad(false));
  views.reserve(like.size());
  int64_t offset = 0;
  for (size_t i = 0; i < like.size(); ++i) {
    const auto& tensor = like[i];
    // Foreach operations are fast where all lists lie alike.
    const auto strides = tensor.is_non_overlapping_and_dense()
        ? c10::DimVector(tensor.strides())
        : c10::contiguous_strides(tensor.sizes());
    views.push_back(part_of(block, offset, tensor.sizes(), strides));
    offset += rows_[i] * kRow;
  }
}

void Scratch::copy(const List& from) {
  at::_foreach_copy_(views, from);
}

void Scratch::multiply(const Number& factor) {
  if (!factor.on_host()) {
    block.mul_(factor.device());
  } else if (factor.host() != 1) {
    block.mul_(factor.host());
  }
}

void Scratch::add(const Number& term) {
  if (!term.on_host()) {
    block.add_(term.device());
  } else if (term.host() != 0) {
    block.add_(term.host());
  }
}

void Scratch::multiply_each(const at::Tensor& factors) {
  const int64_t rows = block.numel() / kRow;
  if (rows == 0) {
    return;
  }
  // Which tensor each row belongs to, made on the device: copying it there would wait.
  const auto owner = at::zeros({rows}, block.options().dtype(at::kInt));
  List owners;
  std::vector<at::Scalar> indices;
  int64_t offset = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i] > 0) {
      owners.push_back(part_of(owner, offset, {rows_[i]}, {1}));
      indices.emplace_back(static_cast<int64_t>(i));
      offset += rows_[i];
    }
  }
  at::_foreach_add_(owners, indices);
  const auto each_row = factors.to(block.scalar_type()).index_select(0, owner);
  block.view({rows, kRow}).mul_(each_row.unsqueeze(1));
}

void Scratch::clear_if_skipped(const StepNumbers& numbers) {
  if (numbers.can_skip()) {
    block.masked_fill_(numbers.skip, -0.0);
  }
}

Slopes decay_and_slopes(
    const List& parameters, const List& gradients, bool maximize, double weight_decay, bool decoupled,
    const StepNumbers& numbers) {
  if (decoupled && weight_decay != 0) {
    multiply_list(parameters, numbers.unless_skipped(1 - numbers.lr * weight_decay, 1));
  }
  const double added = decoupled ? 0 : weight_decay;
  // A gradient may lie otherwise than its parameter when it was set by hand.
  const bool alike = std::equal(
      parameters.begin(), parameters.end(), gradients.begin(),
      [](const at::Tensor& one, const at::Tensor& other) { return one.strides() == other.strides(); });
  if (alike && !maximize && added == 0 && !numbers.inverse_scale.defined() && !numbers.can_skip()) {
    return {gradients, std::nullopt};
  }
  Scratch own(parameters, parameters.at(0).scalar_type());
  own.copy(gradients);
  if (numbers.inverse_scale.defined()) {
    own.block.mul_(numbers.inverse_scale);
  }
  if (maximize) {
    own.block.neg_();
  }
  if (added != 0) {
    at::_foreach_add_(own.views, parameters, added);
  }
  own.clear_if_skipped(numbers);
  return {own.views, own};
}

void multiply_list(const List& list, const Number& factor) {
  if (!factor.on_host()) {
    // The fast path wants the list's kind.
    at::_foreach_mul_(list, factor.device().to(list.at(0).scalar_type()));
  } else if (factor.host() != 1) {
    at::_foreach_mul_(list, factor.host());
  }
}

void move_means(const List& means, const List& values, double part, const StepNumbers& numbers) {
  if (!numbers.can_skip()) {
    at::_foreach_lerp_(means, values, part);
    return;
  }
  multiply_list(means, numbers.unless_skipped(1 - part, 1));
  at::_foreach_add_(means, values, part);
}

void move_squares(const List& squares, const List& values, double decay, const StepNumbers& numbers) {
  multiply_list(squares, numbers.unless_skipped(decay, 1));
  at::_foreach_addcmul_(squares, values, values, 1 - decay);
}

void accumulate(const List& sums, const List& values, double factor, const StepNumbers& numbers) {
  multiply_list(sums, numbers.unless_skipped(factor, 1));
  at::_foreach_add_(sums, values);
}

Scratch roots(const List& squares, const Number& scale, const Number& eps) {
  Scratch made(squares, squares.at(0).scalar_type());
  made.copy(squares);
  made.block.sqrt_();
  made.multiply(scale);
  made.add(eps);
  return made;
}

void descend(
    const List& parameters, const List& updates, const Number& rate, const StepNumbers& numbers) {
  if (rate.on_host() && !numbers.can_skip()) {
    at::_foreach_add_(parameters, updates, -rate.host());
    return;
  }
  Scratch moves(parameters, parameters.at(0).scalar_type());
  moves.copy(updates);
  moves.multiply(rate * -1);
  moves.clear_if_skipped(numbers);
  at::_foreach_add_(parameters, moves.views);
}

void descend_quotients(
    const List& parameters, const List& numerators, Scratch denominators, const Number& rate,
    const StepNumbers& numbers) {
  if (rate.on_host() && !numbers.can_skip()) {
    at::_foreach_addcdiv_(parameters, numerators, denominators.views, -rate.host());
    return;
  }
  Scratch moves(parameters, parameters.at(0).scalar_type());
  moves.copy(numerators);
  moves.block.div_(denominators.block);
  moves.multiply(rate * -1);
  moves.clear_if_skipped(numbers);
  at::_foreach_add_(parameters, moves.views);
}

void descend_each(
    const List& parameters, Scratch updates, const at::Tensor& rates, const StepNumbers& numbers) {
  updates.multiply_each(rates.neg());
  updates.clear_if_skipped(numbers);
  at::_foreach_add_(parameters, updates.views);
}

at::Tensor norms(const List& list) {
  return at::stack(at::_foreach_norm(list)).to(at::kDouble);
}

at::Tensor scaled(const at::Tensor& vector, const Number& factor) {
  return factor.on_host() ? vector.mul(factor.host()) : vector.mul(factor.device());
}

Roles roles_of(
    rust::Slice<const TensorRef> tensors, size_t count, size_t wanted, size_t alike, const char* rule) {
  TORCH_CHECK(
      tensors.size() == count * wanted,
      rule, " of ", count, " parameters wants ", wanted, " tensors for each, found ", tensors.size(),
      " in all");
  const auto handles = copy_handles(tensors);
  Roles roles(wanted);
  for (size_t role = 0; role < wanted; ++role) {
    roles[role].assign(handles.begin() + role * count, handles.begin() + (role + 1) * count);
  }
  for (size_t i = 0; i < count; ++i) {
    const auto& parameter = roles[0][i];
    for (size_t role = 0; role < wanted; ++role) {
      const auto& tensor = roles[role][i];
      TORCH_CHECK(tensor.defined(), "a tensor of parameter ", i, " is undefined");
      TORCH_CHECK(
          tensor.layout() == at::kStrided,
          "this optimizer takes dense gradients only; found one of layout ", tensor.layout());
      TORCH_CHECK(
          tensor.device() == parameter.device() && tensor.scalar_type() == parameter.scalar_type() &&
              (role >= alike || tensor.sizes() == parameter.sizes()),
          "a parameter of shape ", parameter.sizes(), " on ", parameter.device(), " in ",
          parameter.scalar_type(), " has a gradient or state of shape ", tensor.sizes(), " on ",
          tensor.device(), " in ", tensor.scalar_type());
    }
  }
  return roles;
}

Roles chosen(const Roles& roles, const std::vector<size_t>& indices) {
  Roles out(roles.size());
  for (size_t role = 0; role < roles.size(); ++role) {
    out[role].reserve(indices.size());
    for (const size_t index : indices) {
      out[role].push_back(roles[role][index]);
    }
  }
  return out;
}

void each_piece(const Roles& roles, size_t unchanged, const std::function<void(StepPiece&)>& run) {
  // A list with one tensor that has gaps is stepped tensor by tensor: those have a list of their own.
  std::map<std::tuple<at::DeviceType, int, at::ScalarType, bool>, std::vector<size_t>> groups;
  for (size_t i = 0; i < roles.at(0).size(); ++i) {
    const auto& parameter = roles[0][i];
    const auto device = parameter.device();
    groups[{device.type(), device.index(), parameter.scalar_type(),
            parameter.is_non_overlapping_and_dense()}]
        .push_back(i);
  }
  for (const auto& [key, indices] : groups) {
    size_t begin = 0;
    while (begin < indices.size()) {
      int64_t elements = 0;
      size_t end = begin;
      do {
        elements += roles[0][indices[end++]].numel();
      } while (end < indices.size() && elements + roles[0][indices[end]].numel() <= kPiece);
      const std::vector<size_t> places(indices.begin() + begin, indices.begin() + end);
      const auto own = chosen(roles, places);
      begin = end;
      const auto& first = own[0][0];
      StepPiece piece{own, first.device(), first.scalar_type(), places};
      const bool half = piece.kind == at::kHalf || piece.kind == at::kBFloat16;
      if (half) {
        // In 16 bits 0.999 x is mostly x. Copies are rounded once, at the end.
        for (auto& list : piece.roles) {
          Scratch copies(list, at::kFloat);
          copies.copy(list);
          list = copies.views;
        }
      }
      run(piece);
      for (size_t role = 0; half && role < own.size(); ++role) {
        if (role != unchanged) {
          at::_foreach_copy_(own[role], piece.roles[role]);
        }
      }
    }
  }
}

} // namespace brigade
