// Optimizer steps over lists of tensors by libtorch's foreach operations: what `flat.cpp`, `matrix_step.cpp`
// and `optimizer.cpp` have in common.
//
// A step runs a number of operations that does not depend on how many parameters there are, and reads no
// value back from the device. Its numbers may be tensors there (`StepNumbers`), and then one of them may say
// that the step is to be left out.
#pragma once

#include "tensors.h"

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace brigade {

using List = std::vector<at::Tensor>;

// A number of a step: on the host, or a scalar in double precision on the parameters' device.
class Number {
 public:
  Number(double host) : host_(host) {}
  explicit Number(const at::Tensor& device) : device_(device.to(at::kDouble)) {}

  bool on_host() const {
    return !device_.defined();
  }
  double host() const {
    return host_;
  }
  const at::Tensor& device() const {
    return device_;
  }

 private:
  double host_ = 0;
  at::Tensor device_;
};

Number operator+(const Number& left, const Number& right);
Number operator-(const Number& left, const Number& right);
Number operator*(const Number& left, const Number& right);
Number operator/(const Number& left, const Number& right);
Number root(const Number& number);
Number power(double base, const Number& exponent);
Number power(const Number& base, double exponent);
Number lower(const Number& left, const Number& right);
// `number` where `condition` is above `bound`, else `otherwise`.
Number where_above(const Number& condition, double bound, const Number& number, double otherwise);

// The numbers of a step that may be tensors.
class StepNumbers {
 public:
  // `device`: none, or the learning rate, the count of steps, the gradients' scale and whether the step is to
  // be left out, each of which may be undefined. `lr` and `steps` are for those that are.
  StepNumbers(rust::Slice<const TensorRef> device, at::Device where, double lr, double steps);

  Number lr;
  Number steps;
  // What gradients are multiplied by.
  at::Tensor inverse_scale;
  // A bool, true where the step is to be left out; undefined when that cannot be.
  at::Tensor skip;

  bool can_skip() const {
    return skip.defined();
  }
  // `value`, or `otherwise` where the step is left out.
  Number unless_skipped(const Number& value, double otherwise) const;

  // For libtorch's fused kernels.
  std::optional<at::Tensor> fused_scale;
  std::optional<at::Tensor> fused_found;

 private:
  // 1 where the step is left out, and where it is made.
  at::Tensor skipped_;
  at::Tensor made_;
};

// Memory with a place for each tensor of a list, all of one kind: operations that are the same for all run
// once over the block. Each place is as long as a whole number of rows, so that a row belongs to one tensor.
class Scratch {
 public:
  Scratch(const List& like, at::ScalarType kind);

  void copy(const List& from);
  void multiply(const Number& factor);
  void add(const Number& term);
  // Multiplies the place of each tensor by its element of a vector on the device.
  void multiply_each(const at::Tensor& factors);
  // Where the step is left out: -0, which added to any number leaves its bits as they are.
  void clear_if_skipped(const StepNumbers& numbers);

  at::Tensor block;
  List views;

 private:
  std::vector<int64_t> rows_;
};

// The slopes to descend: gradients, unscaled, with their sign and what weight decay adds. Where nothing is to
// be done they are the gradients themselves, and `own` is empty.
struct Slopes {
  List list;
  std::optional<Scratch> own;
};

// Shrinks the weights by decoupled weight decay, and makes the slopes.
Slopes decay_and_slopes(
    const List& parameters, const List& gradients, bool maximize, double weight_decay, bool decoupled,
    const StepNumbers& numbers);

void multiply_list(const List& list, const Number& factor);
// mean = mean + part x (value - mean), unless skipped. `values` are cleared where they are.
void move_means(const List& means, const List& values, double part, const StepNumbers& numbers);
// square = decay x square + (1 - decay) x value^2, unless skipped.
void move_squares(const List& squares, const List& values, double decay, const StepNumbers& numbers);
// sum = factor x sum + value, unless skipped.
void accumulate(const List& sums, const List& values, double factor, const StepNumbers& numbers);
// root(square) x scale + eps
Scratch roots(const List& squares, const Number& scale, const Number& eps);
// parameter -= rate x update, unless skipped.
void descend(const List& parameters, const List& updates, const Number& rate, const StepNumbers& numbers);
// parameter -= rate x numerator / denominator, unless skipped. Uses the denominators up.
void descend_quotients(
    const List& parameters, const List& numerators, Scratch denominators, const Number& rate,
    const StepNumbers& numbers);
// parameter -= rate x update, each at its own rate, unless skipped. Uses the updates up.
void descend_each(
    const List& parameters, Scratch updates, const at::Tensor& rates, const StepNumbers& numbers);
// The norms as a vector in double precision.
at::Tensor norms(const List& list);
// A vector times a number.
at::Tensor scaled(const at::Tensor& vector, const Number& factor);

// Parameters and what belongs to them: a list for each role (parameter, gradient, states), all as long.
using Roles = std::vector<List>;

// Takes `tensors` apart, which has `count` tensors of each role, one role after the other, and compares their
// number with what is wanted. `alike`: the first so many roles must have the parameter's shape, kind and
// device.
Roles roles_of(
    rust::Slice<const TensorRef> tensors, size_t count, size_t wanted, size_t alike, const char* rule);

// Those at these indices.
Roles chosen(const Roles& roles, const std::vector<size_t>& indices);

// What one run of a rule's operations steps: of one device and one kind, and not too much at once, because
// steps need memory of the size of what they step.
struct StepPiece {
  Roles roles;
  at::Device device;
  // The parameters' kind. The roles of parameters in 16 bits are copies in 32.
  at::ScalarType kind;
  // Where the parameters are in the list that was cut into pieces.
  std::vector<size_t> indices;
};

constexpr size_t kNone = SIZE_MAX;
constexpr size_t kGradient = 1;

// Calls `run` with each piece; what it changes of copies is written back, but for the role `unchanged`.
void each_piece(const Roles& roles, size_t unchanged, const std::function<void(StepPiece&)>& run);

} // namespace brigade
