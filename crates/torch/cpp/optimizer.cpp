#include "brigade-torch/src/bridge.rs.h"

#include "foreach.h"
#include "kernels/optimizer.h"
#include "step_ranges.h"
#include "weights.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brigade {

namespace {

// The loops of the CPU take every tensor for a row of numbers, as long as the parameter, and so do libtorch's kernels
// when they are given rows; else they copy what is not contiguous in its dimensions' order (channels_last) and back,
// which takes longer than the step. Neither compares sizes or strides, so everything is compared here. A gradient
// that lies otherwise than its parameter (set by hand) is copied, and so is a parameter with gaps (a view), which gets
// its values back at the end.
class Rows {
 public:
  Rows(List given_parameters, List given_gradients, std::initializer_list<List*> states)
      : parameters(std::move(given_parameters)), gradients(std::move(given_gradients)) {
    // Parameters become rows below; their shapes are compared before.
    const List shapes = parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& parameter = parameters[i];
      auto& gradient = gradients[i];
      check(parameter, gradient, "gradient");
      if (!parameter.is_non_overlapping_and_dense()) {
        auto copy = at::empty_like(parameter).copy_(parameter);
        with_gaps_.emplace_back(std::exchange(parameter, copy), copy);
      }
      if (!gradient.is_non_overlapping_and_dense() || !same_order(parameter, gradient)) {
        gradient = at::empty_like(parameter).copy_(gradient);
      }
      as_row(parameter);
      as_row(gradient);
      for (auto* state : states) {
        if (state->empty()) {
          continue;
        }
        auto& own = (*state)[i];
        const auto& shaped = shapes[i];
        check(shaped, own, "state");
        TORCH_CHECK(
            own.is_non_overlapping_and_dense(),
            "a state of shape ", own.sizes(), " has gaps or overlaps in memory (strides ",
            own.strides(), ")");
        const auto& order = with_gaps_.empty() || !with_gaps_.back().second.is_alias_of(parameter)
            ? shaped
            : with_gaps_.back().second;
        TORCH_CHECK(
            same_order(order, own),
            "the elements of a state of shape ", own.sizes(),
            " lie in another order than the parameter's: strides ", own.strides(), ", not ",
            order.strides());
        as_row(own);
      }
    }
  }

  void write_back() const {
    for (const auto& [parameter, copy] : with_gaps_) {
      parameter.copy_(copy);
    }
  }

  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;

 private:
  static void check(const at::Tensor& parameter, const at::Tensor& other, const char* what) {
    TORCH_CHECK(other.defined(), "the ", what, " of a parameter is undefined");
    TORCH_CHECK(
        other.layout() == at::kStrided,
        "this optimizer takes dense gradients only; found a ", what, " of layout ", other.layout());
    TORCH_CHECK(
        other.sizes() == parameter.sizes() && other.device() == parameter.device() &&
            other.scalar_type() == parameter.scalar_type() && !other.is_neg(),
        "a parameter of shape ", parameter.sizes(), " on ", parameter.device(), " in ",
        parameter.scalar_type(), " has a ", what, " of shape ", other.sizes(), " on ",
        other.device(), " in ", other.scalar_type());
  }

  // The loops of the CPU take addresses.
  static void as_row(at::Tensor& tensor) {
    if (!tensor.is_cpu()) {
      tensor = tensor.as_strided({tensor.numel()}, {1});
    }
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;
};

// Takes the roles of a step: every list has a tensor for each parameter, or none at all.
Roles same_lengths(
    rust::Slice<const TensorRef> parameters, rust::Slice<const TensorRef> gradients, Roles states) {
  Roles roles{copy_handles(parameters), copy_handles(gradients)};
  const size_t count = roles[0].size();
  TORCH_CHECK(
      count == roles[1].size(), count, " parameters have ", roles[1].size(), " gradients");
  for (auto& state : states) {
    TORCH_CHECK(
        state.empty() || state.size() == count,
        count, " parameters have ", state.size(), " states of a kind");
    roles.push_back(std::move(state));
  }
  for (size_t i = 0; i < count; ++i) {
    const auto& parameter = roles[0][i];
    TORCH_CHECK(parameter.defined(), "parameter ", i, " is undefined");
    TORCH_CHECK(
        parameter.layout() == at::kStrided && at::isFloatingType(parameter.scalar_type()),
        "an optimizer steps dense parameters of floating-point numbers; found one in ",
        parameter.scalar_type(), " on ", parameter.device(), " of layout ", parameter.layout());
  }
  return roles;
}

// The roles of the parameters of each device and kind: the kernels of CUDA take one kind. Lists that are empty
// stay so.
std::vector<Roles> by_kind(const Roles& roles) {
  std::map<std::tuple<at::DeviceType, int, at::ScalarType>, std::vector<size_t>> groups;
  for (size_t i = 0; i < roles[0].size(); ++i) {
    const auto device = roles[0][i].device();
    groups[{device.type(), device.index(), roles[0][i].scalar_type()}].push_back(i);
  }
  std::vector<Roles> out;
  for (const auto& [key, indices] : groups) {
    Roles own(roles.size());
    for (size_t role = 0; role < roles.size(); ++role) {
      if (!roles[role].empty()) {
        own[role] = chosen({roles[role]}, indices)[0];
      }
    }
    out.push_back(std::move(own));
  }
  return out;
}

// Counts that the kernels read one number of, beside the parameters.
void check_counts(const List& counts, const List& parameters) {
  TORCH_CHECK(
      counts.size() == parameters.size(),
      parameters.size(), " parameters have ", counts.size(), " counts of steps");
  for (size_t i = 0; i < counts.size(); ++i) {
    const auto& count = counts[i];
    TORCH_CHECK(
        count.defined() && count.layout() == at::kStrided && count.scalar_type() == at::kFloat &&
            count.numel() == 1 && count.device() == parameters[i].device(),
        "a count of steps is one number in Float on its parameter's device, not ",
        count.toString(), " of shape ", count.defined() ? count.sizes() : at::IntArrayRef());
  }
}

// The value of a number of a step whose parameters are on the CPU, where to read it does not wait.
double value_of(const Number& number) {
  return number.on_host() ? number.host() : *number.device().const_data_ptr<double>();
}

bool is_skipped(const StepNumbers& now) {
  return now.can_skip() && *now.skip.const_data_ptr<bool>();
}

DecayNumbers decay_on_cpu(
    bool maximize, double weight_decay, bool decoupled, double lr, const StepNumbers& now) {
  const double scale = now.inverse_scale.defined() ? *now.inverse_scale.const_data_ptr<double>() : 1;
  return {
      maximize ? -scale : scale, decoupled ? 0 : weight_decay, decoupled ? 1 - lr * weight_decay : 1};
}

// Elements of a parameter, its gradient and states that together fit into a second-level cache.
constexpr int64_t kCopiedAtOnce = 8192;

// Writes elements of a parameter into its copy for products.
void narrow_into(const at::Tensor& copy, const float* from, int64_t first, int64_t count) {
  if (copy.scalar_type() == at::kBFloat16) {
    narrow(from, copy.mutable_data_ptr<c10::BFloat16>() + first, count);
  } else {
    narrow(from, copy.mutable_data_ptr<c10::Half>() + first, count);
  }
}

// Calls `run` with each parameter's index, the memory of its roles and a number of elements, for ranges that together
// are all parameters, which are of one kind.
template <typename Run>
void loop_on_cpu(const Roles& roles, const Run& run) {
  by_type(roles[0][0].scalar_type(), [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    std::vector<StepMemory<T>> all;
    all.reserve(roles[0].size());
    std::vector<at::Tensor> copies;
    for (size_t i = 0; i < roles[0].size(); ++i) {
      copies.push_back(copy_for_step(roles[0][i]));
      all.push_back(memory_of<T>(roles, i));
    }
    each_range(all, kGradient, [&](size_t index, const auto& t, int64_t count) {
      if constexpr (std::is_same_v<T, float>) {
        if (copies[index].defined()) {
          // Elements that are still in a cache.
          for (int64_t begin = 0; begin < count; begin += kCopiedAtOnce) {
            const int64_t size = std::min(kCopiedAtOnce, count - begin);
            const auto part = StepMemory<T>{t, count}.from(begin);
            run(index, part, size);
            narrow_into(copies[index], part[0], part[0] - all[index].roles[0], size);
          }
          return;
        }
      }
      run(index, t, count);
    });
    for (size_t i = 0; i < roles[0].size(); ++i) {
      changed(roles[0][i]);
      if (copies[i].defined()) {
        copy_was_stepped(roles[0][i]);
      }
    }
  });
}

void adam_on_cpu(const Roles& roles, const List& counts, const AdamStep& step, const StepNumbers& now) {
  if (is_skipped(now)) {
    return;
  }
  const double lr = value_of(now.lr);
  std::vector<AdamNumbers> numbers;
  numbers.reserve(counts.size());
  float last = 0;
  for (const auto& count : counts) {
    // Mostly all are the same.
    const float steps = *count.const_data_ptr<float>();
    if (numbers.empty() || steps != last) {
      last = steps;
      numbers.push_back(
          {decay_on_cpu(step.maximize, step.weight_decay, step.decoupled, lr, now), step.beta1, step.beta2,
           step.eps, lr / (1 - std::pow(step.beta1, double{steps})),
           std::sqrt(1 - std::pow(step.beta2, double{steps}))});
    } else {
      numbers.push_back(AdamNumbers(numbers.back()));
    }
  }
  loop_on_cpu(roles, [&](size_t index, const auto& t, int64_t count) {
    adam_loop(t[0], t[1], t[2], t[3], t[4], count, numbers[index]);
  });
}

void sgd_on_cpu(const Roles& roles, const SgdStep& step, const StepNumbers& now) {
  if (is_skipped(now)) {
    return;
  }
  const double lr = value_of(now.lr);
  const SgdNumbers numbers{
      decay_on_cpu(step.maximize, step.weight_decay, step.decoupled, lr, now), lr, step.momentum,
      step.dampening, step.nesterov, step.first};
  loop_on_cpu(roles, [&](size_t, const auto& t, int64_t count) {
    sgd_loop(t[0], t[1], step.momentum == 0 ? nullptr : t[2], count, numbers);
  });
}

void adagrad_on_cpu(
    const Roles& roles, const List& counts, const AdagradStep& step, const StepNumbers& now) {
  const auto decay = decay_on_cpu(step.maximize, step.weight_decay, /*decoupled=*/false, step.lr, now);
  std::vector<AdagradNumbers> numbers;
  numbers.reserve(counts.size());
  for (const auto& count : counts) {
    const double before = double{*count.const_data_ptr<float>()} - 1;
    numbers.push_back({decay, step.lr / (1 + before * step.lr_decay), step.eps});
  }
  loop_on_cpu(roles, [&](size_t index, const auto& t, int64_t count) {
    adagrad_loop(t[0], t[1], t[2], count, numbers[index]);
  });
}

// Steps parameters in float32 on a GPU by Brigade's kernels, which write their copies for products as well. `given` are
// the parameters, which the copies belong to, and `rows` their memory. `run` steps a list of rows by a program. Returns
// false, and does nothing, where there are no kernels for them.
template <typename Run>
bool step_by_kernels(const List& given, const Rows& rows, const Roles& states, const List& counts, const Run& run) {
  const auto device = given[0].device();
  const auto is_negated = [](const at::Tensor& parameter) { return parameter.is_neg(); };
  if (!device.is_cuda() || given[0].scalar_type() != at::kFloat ||
      std::any_of(given.begin(), given.end(), is_negated)) {
    return false;
  }
  List copies;
  copies.reserve(given.size());
  std::map<at::ScalarType, kernels::Program*> programs;
  for (const auto& parameter : given) {
    copies.push_back(copy_for_step(parameter));
    if (copies.back().defined()) {
      programs[copies.back().scalar_type()] = nullptr;
    }
  }
  for (auto& [type, program] : programs) {
    program = kernels::program("optimizer", device, type);
  }
  if (programs.empty()) {
    programs[at::kFloat] = kernels::program_of_any_type("optimizer", device);
  }
  for (const auto& [type, program] : programs) {
    if (program == nullptr) {
      return false;
    }
  }
  for (const auto& count : counts) {
    // A storage can be made shorter than its tensors; those of rows are compared when the rows are made.
    TORCH_CHECK(
        static_cast<size_t>(count.storage_offset() + 1) * sizeof(float) <= count.storage().nbytes(),
        "a count of steps has no memory for its number");
  }
  std::map<at::ScalarType, std::vector<OptimizerRow>> lists;
  for (size_t i = 0; i < given.size(); ++i) {
    OptimizerRow row{rows.parameters[i], rows.gradients[i], {}, counts.empty() ? at::Tensor() : counts[i], copies[i]};
    for (const auto& list : states) {
      if (!list.empty()) {
        row.states.push_back(list[i]);
      }
    }
    lists[copies[i].defined() ? copies[i].scalar_type() : programs.begin()->first].push_back(std::move(row));
  }
  for (const auto& [type, list] : lists) {
    run(*programs.at(type), list);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    changed(given[i]);
    if (copies[i].defined()) {
      copy_was_stepped(given[i]);
    }
  }
  return true;
}

// SGD with momentum by operations. `weight_decay` is what is added to the gradient.
void sgd_list(StepPiece& piece, const SgdStep& step, double weight_decay, const StepNumbers& now) {
  const auto &p = piece.roles[0], &buffers = piece.roles[2];
  const auto slopes = decay_and_slopes(
      p, piece.roles[1], step.maximize, weight_decay, /*decoupled=*/false, now);
  const Number damped = 1 - step.dampening;
  Scratch moves(p, p[0].scalar_type());
  moves.copy(slopes.list);
  if (!now.steps.on_host()) {
    moves.multiply(where_above(1.5 - now.steps, 0, 1, damped.host()));
    moves.clear_if_skipped(now);
  } else if (!step.first) {
    moves.multiply(damped);
  }
  if (step.first && now.steps.on_host() && !now.can_skip()) {
    at::_foreach_copy_(buffers, moves.views);
  } else {
    accumulate(buffers, moves.views, step.momentum, now);
  }
  if (step.nesterov) {
    moves.copy(buffers);
    moves.multiply(step.momentum);
    at::_foreach_add_(moves.views, slopes.list);
  }
  descend(p, step.nesterov ? moves.views : buffers, now.lr, now);
}

// Adagrad by operations: a list for those that have the same count of steps, which have one tensor for it.
void adagrad_list(
    const List& parameters, const List& gradients, const List& sums, const List& counts,
    const AdagradStep& step, rust::Slice<const TensorRef> device) {
  std::map<const void*, std::vector<size_t>> by_count;
  for (size_t i = 0; i < counts.size(); ++i) {
    by_count[counts[i].const_data_ptr()].push_back(i);
  }
  for (const auto& [address, indices] : by_count) {
    const Number steps(counts[indices[0]].reshape({}));
    each_piece(chosen({parameters, gradients, sums}, indices), kGradient, [&](StepPiece& piece) {
      const StepNumbers now(device, piece.device, step.lr, 0);
      const auto &p = piece.roles[0], &squares = piece.roles[2];
      const auto slopes = decay_and_slopes(
          p, piece.roles[1], step.maximize, step.weight_decay, /*decoupled=*/false, now);
      at::_foreach_addcmul_(squares, slopes.list, slopes.list);
      descend_quotients(
          p, slopes.list, roots(squares, 1, step.eps), now.lr / (1 + (steps - 1) * step.lr_decay),
          now);
    });
  }
}

// For the kernels' overloads that take the learning rate as a tensor.
at::Tensor fused_rate(const StepNumbers& now) {
  return now.lr.device().to(at::kFloat);
}

} // namespace

void fused_adam(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> exp_avgs,
    rust::Slice<const TensorRef> exp_avg_sqs,
    rust::Slice<const TensorRef> max_exp_avg_sqs,
    rust::Slice<const TensorRef> steps,
    const AdamStep& step,
    rust::Slice<const TensorRef> device) {
  at::NoGradGuard no_grad;
  const auto roles = same_lengths(
      parameters, gradients,
      {copy_handles(exp_avgs), copy_handles(exp_avg_sqs), copy_handles(max_exp_avg_sqs),
       copy_handles(steps)});
  const size_t count = roles[0].size();
  check_counts(roles[5], roles[0]);
  TORCH_CHECK(
      roles[2].size() == count && roles[3].size() == count &&
          roles[4].size() == (step.amsgrad ? count : 0),
      "Adam wants two means for each parameter, with amsgrad also the largest: found ",
      roles[2].size(), ", ", roles[3].size(), " and ", roles[4].size(), " for ", count);
  auto kinds = by_kind(roles);
  // All are checked before the first is stepped.
  std::vector<Rows> rows;
  for (auto& own : kinds) {
    rows.emplace_back(own[0], own[1], std::initializer_list<List*>{&own[2], &own[3], &own[4]});
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto &p = rows[i].parameters, &g = rows[i].gradients;
    const auto &m = kinds[i][2], &v = kinds[i][3], &vmax = kinds[i][4], &t = kinds[i][5];
    const StepNumbers now(device, p[0].device(), step.lr, 0);
    if (p[0].is_cpu()) {
      adam_on_cpu({p, g, m, v, vmax}, t, step, now);
      rows[i].write_back();
      continue;
    }
    const auto by_kernels = [&](kernels::Program& program, const std::vector<OptimizerRow>& list) {
      adam_gpu(program, list, step, now);
    };
    if (step_by_kernels(kinds[i][0], rows[i], {m, v, vmax}, t, by_kernels)) {
      rows[i].write_back();
      continue;
    }
    const auto run = [&](const auto& lr) {
      if (step.decoupled) {
        at::_fused_adamw_(
            p, g, m, v, vmax, t, lr, step.beta1, step.beta2, step.weight_decay, step.eps,
            step.amsgrad, step.maximize, now.fused_scale, now.fused_found);
      } else {
        at::_fused_adam_(
            p, g, m, v, vmax, t, lr, step.beta1, step.beta2, step.weight_decay, step.eps,
            step.amsgrad, step.maximize, now.fused_scale, now.fused_found);
      }
    };
    if (now.lr.on_host()) {
      run(now.lr.host());
    } else {
      run(fused_rate(now));
    }
    rows[i].write_back();
  }
}

void fused_sgd(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> momentum_buffers,
    const SgdStep& step,
    rust::Slice<const TensorRef> device) {
  at::NoGradGuard no_grad;
  const auto roles = same_lengths(parameters, gradients, {copy_handles(momentum_buffers)});
  TORCH_CHECK(
      step.momentum == 0 || roles[2].size() == roles[0].size(),
      "SGD with a momentum wants a buffer for each parameter: found ", roles[2].size(), " for ",
      roles[0].size());
  auto kinds = by_kind(roles);
  std::vector<Rows> rows;
  for (auto& own : kinds) {
    rows.emplace_back(own[0], own[1], std::initializer_list<List*>{&own[2]});
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto &p = rows[i].parameters, &g = rows[i].gradients, &buffers = kinds[i][2];
    const StepNumbers now(device, p[0].device(), step.lr, 0);
    // Kernels take from the host whether buffers are new, which a count on a device decides.
    const bool count_decides = step.momentum != 0 && !now.steps.on_host() && step.dampening != 0;
    if (p[0].is_cpu() && !count_decides) {
      sgd_on_cpu({p, g, buffers}, step, now);
      rows[i].write_back();
      continue;
    }
    const auto by_kernels = [&](kernels::Program& program, const std::vector<OptimizerRow>& list) {
      sgd_gpu(program, list, step, now);
    };
    const Roles states = step.momentum == 0 ? Roles{} : Roles{buffers};
    if (!count_decides && step_by_kernels(kinds[i][0], rows[i], states, {}, by_kernels)) {
      rows[i].write_back();
      continue;
    }
    if (step.decoupled && step.weight_decay != 0) {
      multiply_list(p, now.unless_skipped(1 - now.lr * step.weight_decay, 1));
    }
    const double added = step.decoupled ? 0 : step.weight_decay;
    if (count_decides) {
      each_piece({p, g, buffers}, kGradient, [&](StepPiece& piece) {
        sgd_list(piece, step, added, now);
      });
    } else if (now.lr.on_host()) {
      at::_fused_sgd_(
          p, g, buffers, added, step.momentum, now.lr.host(), step.dampening, step.nesterov,
          step.maximize, step.first, now.fused_scale, now.fused_found);
    } else {
      at::_fused_sgd_(
          p, g, buffers, added, step.momentum, fused_rate(now), step.dampening, step.nesterov,
          step.maximize, step.first, now.fused_scale, now.fused_found);
    }
    rows[i].write_back();
  }
}

void fused_adagrad(
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const TensorRef> gradients,
    rust::Slice<const TensorRef> state_sums,
    rust::Slice<const TensorRef> steps,
    const AdagradStep& step,
    rust::Slice<const TensorRef> device) {
  at::NoGradGuard no_grad;
  const auto roles =
      same_lengths(parameters, gradients, {copy_handles(state_sums), copy_handles(steps)});
  check_counts(roles[3], roles[0]);
  TORCH_CHECK(
      roles[2].size() == roles[0].size(),
      "Adagrad wants a sum for each parameter: found ", roles[2].size(), " for ", roles[0].size());
  auto kinds = by_kind(roles);
  std::vector<Rows> rows;
  for (auto& own : kinds) {
    rows.emplace_back(own[0], own[1], std::initializer_list<List*>{&own[2]});
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto &p = rows[i].parameters, &g = rows[i].gradients, &sums = kinds[i][2];
    if (p[0].is_cpu() && device.empty()) {
      adagrad_on_cpu({p, g, sums}, kinds[i][3], step, StepNumbers(device, p[0].device(), step.lr, 0));
    } else {
      // Not every version of libtorch that this is built with has the kernel for CUDA.
      adagrad_list(p, g, sums, kinds[i][3], step, device);
    }
    rows[i].write_back();
  }
}

} // namespace brigade
