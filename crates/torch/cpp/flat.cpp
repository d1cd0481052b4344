#include "brigade-torch/src/bridge.rs.h"

#include "foreach.h"
#include "step_ranges.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brigade {

namespace {

// Elements of a parallel task, and of a partial sum: sums do not depend on the number of threads.
constexpr int64_t kFlatBlock = 16384;

template <typename F>
void each_block(int64_t numel, const F& run) {
  const int64_t blocks = (numel + kFlatBlock - 1) / kFlatBlock;
  at::parallel_for(0, blocks, 2, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      run(block, block * kFlatBlock, std::min(numel, (block + 1) * kFlatBlock));
    }
  });
}

template <typename F>
Norms sum_of_squares(int64_t numel, const F& run) {
  std::vector<Norms> partial((numel + kFlatBlock - 1) / kFlatBlock);
  each_block(numel, [&](int64_t block, int64_t begin, int64_t end) {
    partial[block] = run(begin, end);
  });
  Norms sum;
  for (const auto& part : partial) {
    sum.first += part.first;
    sum.second += part.second;
  }
  return sum;
}

template <typename Step>
DecayNumbers decay_of(const Step& step) {
  return {
      step.maximize ? -1.0 : 1.0, step.decoupled ? 0 : step.weight_decay,
      step.decoupled ? 1 - step.lr * step.weight_decay : 1};
}

// A rule with norms goes over a parameter twice. In 16 bits the second pass would read what the first has rounded:
// operations step those, in copies of 32 bits.
enum class Loops { kElements, kNorms };

bool has_loops(at::ScalarType kind, Loops loops) {
  const bool wide = kind == at::kFloat || kind == at::kDouble;
  return wide || (loops == Loops::kElements && (kind == at::kBFloat16 || kind == at::kHalf));
}

// Which parameters are stepped by loops: those on the CPU, unless numbers of the step are on a device.
class Split {
 public:
  // Roles whose elements lie otherwise than the loops read them (views with gaps, gradients set by hand) become
  // copies; the role `unchanged` is not written back.
  Split(
      Roles& roles, size_t unchanged, Loops kind, rust::Slice<const TensorRef> device, bool operations_only) {
    for (size_t i = 0; i < roles[0].size(); ++i) {
      const auto parameter = roles[0][i];
      if (operations_only || !device.empty() || !parameter.is_cpu() ||
          !has_loops(parameter.scalar_type(), kind)) {
        operations.push_back(i);
        continue;
      }
      loops.push_back(i);
      // In the parameter's order where that is dense, else contiguous.
      const auto like = parameter.is_non_overlapping_and_dense() && !parameter.is_neg()
          ? parameter
          : at::empty(parameter.sizes(), parameter.options());
      for (size_t role = 0; role < roles.size(); ++role) {
        auto& own = roles[role][i];
        if (own.is_non_overlapping_and_dense() && !own.is_neg() && same_order(own, like)) {
          continue;
        }
        const auto copy = at::empty_strided(like.sizes(), like.strides(), like.options()).copy_(own);
        if (role != unchanged) {
          copies_.emplace_back(own, copy);
        }
        own = copy;
      }
    }
  }

  void write_back() const {
    for (const auto& [original, copy] : copies_) {
      original.copy_(copy);
    }
  }

  std::vector<size_t> loops;
  std::vector<size_t> operations;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// Calls `run` with the memory of each role and a number of elements, for ranges that together are all parameters. The
// role `unchanged` is not written to.
template <typename Run>
void loop_elements(
    const Roles& roles, const std::vector<size_t>& indices, size_t unchanged, const Run& run) {
  for (const auto kind : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    by_type(kind, [&](auto* null) {
      using T = std::remove_pointer_t<decltype(null)>;
      std::vector<StepMemory<T>> all;
      for (const size_t i : indices) {
        if (roles[0][i].scalar_type() == kind) {
          all.push_back(memory_of<T>(roles, i));
        }
      }
      each_range(all, unchanged, [&](size_t, const auto& memory, int64_t count) { run(memory, count); });
    });
  }
  for (const size_t i : indices) {
    changed(roles[0][i]);
  }
}

// Calls `run` with the index and the memory of each parameter, one by one.
template <typename Run>
void loop_tensors(const Roles& roles, const std::vector<size_t>& indices, const Run& run) {
  for (const size_t i : indices) {
    const auto& parameter = roles[0][i];
    if (parameter.scalar_type() == at::kFloat) {
      run(i, memory_of<float>(roles, i));
    } else {
      run(i, memory_of<double>(roles, i));
    }
    changed(parameter);
  }
}

// The sums of squares of a rule with norms, two for each parameter. Over whole parameters both passes are one call. Where
// ranks have rows of them, the first pass gives the sums of this rank's rows, and the second has those of all ranks.
class Squares {
 public:
  Squares(StepPart part, rust::Slice<const TensorRef> sums, const List& parameters) : part_(part) {
    TORCH_CHECK(
        sums.size() == (part == StepPart::Whole ? 0 : parameters.size()), sums.size(), " sums of squares for ",
        parameters.size(), " parameters");
    for (size_t i = 0; i < sums.size(); ++i) {
      const auto& sum = sums_.emplace_back(sums[i].tensor);
      TORCH_CHECK(
          sum.scalar_type() == at::kDouble && sum.numel() == 2 && sum.is_contiguous() &&
              sum.device() == parameters[i].device(),
          "sums of squares are two numbers in double precision beside their parameter");
    }
  }

  bool computes() const {
    return part_ != StepPart::Update;
  }
  bool updates() const {
    return part_ != StepPart::Sums;
  }

  // The sums of a parameter on the CPU.
  template <typename Compute>
  Norms of(size_t index, const Compute& compute) const {
    if (!computes()) {
      const auto* sums = sums_[index].const_data_ptr<double>();
      return {sums[0], sums[1]};
    }
    const Norms found = compute();
    if (!updates()) {
      auto* sums = sums_[index].mutable_data_ptr<double>();
      sums[0] = found.first;
      sums[1] = found.second;
    }
    return found;
  }

  // The norms of a piece of the parameters at `indices`, as vectors.
  template <typename Compute>
  std::pair<at::Tensor, at::Tensor> norms_of(
      const StepPiece& piece, const std::vector<size_t>& indices, const Compute& compute) const {
    List own;
    for (size_t i = 0; !sums_.empty() && i < piece.indices.size(); ++i) {
      own.push_back(sums_[indices[piece.indices[i]]].view({2}));
    }
    if (!computes()) {
      const auto norms = at::stack(own).sqrt_();
      return {norms.select(1, 0), norms.select(1, 1)};
    }
    const std::pair<at::Tensor, at::Tensor> found = compute();
    if (!updates()) {
      at::_foreach_copy_(own, at::stack({found.first, found.second}, 1).square_().unbind(0));
    }
    return found;
  }

 private:
  StepPart part_;
  List sums_;
};

// How RAdam divides its step, from the count of steps.
struct Rectification {
  Number size;
  Number root_scale;
  // Above 0 where the step is divided.
  Number adaptive;
};

Rectification rectification(const RectifiedStep& step, const Number& lr, const Number& steps) {
  const Number bias1 = 1 - power(step.beta1, steps);
  const Number power2 = power(step.beta2, steps);
  const Number bias2 = 1 - power2;
  const double longest = 2 / (1 - step.beta2) - 1;
  // The approximated length of the average of squares.
  const Number length = longest - 2 * steps * power2 / bias2;
  const Number factor =
      root((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length));
  const Number size = lr / bias1 * where_above(length, 5, factor, 1);
  // The same quotient, but for where eps stands in it.
  if (step.eps_of_unbiased) {
    return {size, where_above(length, 5, 1 / root(bias2), 1), length - 5};
  }
  return {size * where_above(length, 5, root(bias2), 1), 1, length - 5};
}

double lamb_rate(const LambStep& step, double weight_norm, double update_norm) {
  const bool either_is_zero = weight_norm == 0 || update_norm == 0;
  return step.lr * (either_is_zero ? 1 : std::min(weight_norm / update_norm, step.max_trust));
}

double larc_rate(const LarcStep& step, double weight_norm, double gradient_norm) {
  const double local = step.lr * step.trust * weight_norm /
      (gradient_norm + weight_norm * step.weight_decay + step.eps);
  return step.clip ? std::min(step.lr, local) : local;
}

} // namespace

void rmsprop(
    rust::Slice<const TensorRef> tensors, size_t count, const RmsPropStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  const size_t wanted = 3 + step.centered + buffered;
  auto roles = roles_of(tensors, count, wanted, wanted, "RMSprop");
  const Split ways(roles, kGradient, Loops::kElements, device, operations);
  const size_t mean_at = step.centered ? 3 : kNone, buffer_at = buffered ? wanted - 1 : kNone;
  const RmsPropNumbers numbers{
      decay_of(step), step.lr, step.alpha, step.eps, step.momentum, step.momentum_of_gradient};
  loop_elements(roles, ways.loops, kGradient, [&](const auto& t, int64_t count) {
    auto *mean = step.centered ? t[mean_at] : nullptr, *buffer = buffered ? t[buffer_at] : nullptr;
    rmsprop_loop(t[0], t[1], t[2], mean, buffer, count, numbers);
  });
  ways.write_back();
  each_piece(chosen(roles, ways.operations), kGradient, [&](StepPiece& piece) {
    const StepNumbers now(device, piece.device, step.lr, 0);
    const auto &p = piece.roles[0], &squares = piece.roles[2];
    auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_squares(squares, slopes.list, step.alpha, now);
    Scratch denominators(p, p[0].scalar_type());
    denominators.copy(squares);
    if (step.centered) {
      const auto& means = piece.roles[mean_at];
      move_means(means, slopes.list, 1 - step.alpha, now);
      at::_foreach_addcmul_(denominators.views, means, means, -1);
      // Rounding must not make it negative.
      denominators.block.clamp_min_(0);
    }
    denominators.block.sqrt_().add_(step.eps);
    if (!buffered) {
      descend_quotients(p, slopes.list, std::move(denominators), now.lr, now);
      return;
    }
    const auto& buffers = piece.roles[buffer_at];
    if (step.momentum_of_gradient) {
      accumulate(buffers, slopes.list, step.momentum, now);
      descend_quotients(p, buffers, std::move(denominators), now.lr, now);
    } else if (!now.can_skip()) {
      multiply_list(buffers, step.momentum);
      at::_foreach_addcdiv_(buffers, slopes.list, denominators.views);
      descend(p, buffers, now.lr, now);
    } else {
      auto& quotients = *slopes.own;
      quotients.block.div_(denominators.block);
      quotients.clear_if_skipped(now);
      accumulate(buffers, quotients.views, step.momentum, now);
      descend(p, buffers, now.lr, now);
    }
  });
}

void rectified(
    rust::Slice<const TensorRef> tensors, size_t count, const RectifiedStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "RAdam");
  const Split ways(roles, kGradient, Loops::kElements, device, operations);
  if (!ways.loops.empty()) {
    const auto how = rectification(step, step.lr, step.steps);
    const RectifiedNumbers numbers{
        decay_of(step), step.beta1, step.beta2, step.eps, how.size.host(), how.root_scale.host(),
        how.adaptive.host() > 0};
    loop_elements(roles, ways.loops, kGradient, [&](const auto& t, int64_t count) {
      rectified_loop(t[0], t[1], t[2], t[3], count, numbers);
    });
    ways.write_back();
  }
  each_piece(chosen(roles, ways.operations), kGradient, [&](StepPiece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    const auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_means(means, slopes.list, 1 - step.beta1, now);
    move_squares(squares, slopes.list, step.beta2, now);
    const auto how = rectification(step, now.lr, now.steps);
    if (how.adaptive.on_host() && !(how.adaptive.host() > 0)) {
      descend(p, means, how.size, now);
      return;
    }
    // Where the step is not divided, by 0 x root + 1.
    auto denominators = roots(
        squares, where_above(how.adaptive, 0, how.root_scale, 0),
        where_above(how.adaptive, 0, step.eps, 1));
    descend_quotients(p, means, std::move(denominators), how.size, now);
  });
}

void qhadam(
    rust::Slice<const TensorRef> tensors, size_t count, const QhAdamStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "QHAdam");
  const Split ways(roles, kGradient, Loops::kElements, device, operations);
  const auto mean_scale = [&](const Number& steps) {
    return step.nu1 / (1 - power(step.beta1, steps));
  };
  const auto square_scale = [&](const Number& steps) {
    return step.nu2 / (1 - power(step.beta2, steps));
  };
  const QhAdamNumbers numbers{
      decay_of(step), step.lr,  step.beta1, step.beta2,
      step.nu1,       step.nu2, step.eps,   mean_scale(step.steps).host(),
      square_scale(step.steps).host()};
  loop_elements(roles, ways.loops, kGradient, [&](const auto& t, int64_t count) {
    qhadam_loop(t[0], t[1], t[2], t[3], count, numbers);
  });
  ways.write_back();
  each_piece(chosen(roles, ways.operations), kGradient, [&](StepPiece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    const auto slopes = decay_and_slopes(
        p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
    move_means(means, slopes.list, 1 - step.beta1, now);
    move_squares(squares, slopes.list, step.beta2, now);
    Scratch numerators(p, p[0].scalar_type()), denominators(p, p[0].scalar_type());
    numerators.copy(means);
    numerators.multiply(mean_scale(now.steps));
    at::_foreach_add_(numerators.views, slopes.list, 1 - step.nu1);
    denominators.copy(squares);
    denominators.multiply(square_scale(now.steps));
    at::_foreach_addcmul_(denominators.views, slopes.list, slopes.list, 1 - step.nu2);
    denominators.block.sqrt_().add_(step.eps);
    descend_quotients(p, numerators.views, std::move(denominators), now.lr, now);
  });
}

void lamb(
    rust::Slice<const TensorRef> tensors, size_t count, const LambStep& step, StepPart part,
    rust::Slice<const TensorRef> sums, rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 4, 4, "LAMB");
  const Squares squares_of(part, sums, roles[0]);
  const Split ways(roles, kGradient, Loops::kNorms, device, operations);
  const auto mean_scale = [&](const Number& steps) { return 1 / (1 - power(step.beta1, steps)); };
  const auto root_scale = [&](const Number& steps) {
    return 1 / root(1 - power(step.beta2, steps));
  };
  const LambNumbers numbers{
      decay_of(step), step.beta1, step.beta2, step.eps, mean_scale(step.steps).host(),
      root_scale(step.steps).host()};
  loop_tensors(roles, ways.loops, [&](size_t index, const auto& memory) {
    const auto sums = squares_of.of(index, [&] {
      return sum_of_squares(memory.count, [&](int64_t begin, int64_t end) {
        const auto t = memory.from(begin);
        return lamb_moments_loop(t[0], t[1], t[2], t[3], end - begin, numbers);
      });
    });
    if (!squares_of.updates()) {
      return;
    }
    const double rate = lamb_rate(step, std::sqrt(sums.first), std::sqrt(sums.second));
    each_block(memory.count, [&](int64_t, int64_t begin, int64_t end) {
      const auto t = memory.from(begin);
      lamb_update_loop(t[0], t[2], t[3], end - begin, numbers, rate);
    });
  });
  ways.write_back();
  each_piece(chosen(roles, ways.operations), kGradient, [&](StepPiece& piece) {
    const StepNumbers now(device, piece.device, step.lr, step.steps);
    const auto &p = piece.roles[0], &means = piece.roles[2], &squares = piece.roles[3];
    if (squares_of.computes()) {
      const auto slopes = decay_and_slopes(
          p, piece.roles[1], step.maximize, step.weight_decay, step.decoupled, now);
      move_means(means, slopes.list, 1 - step.beta1, now);
      move_squares(squares, slopes.list, step.beta2, now);
    }
    Scratch updates(p, p[0].scalar_type());
    updates.copy(means);
    updates.multiply(mean_scale(now.steps));
    updates.block.div_(roots(squares, root_scale(now.steps), step.eps).block);
    const auto [weight_norms, update_norms] = squares_of.norms_of(
        piece, ways.operations, [&] { return std::pair(norms(p), norms(updates.views)); });
    if (!squares_of.updates()) {
      return;
    }
    const auto either_is_zero = weight_norms.eq(0).logical_or_(update_norms.eq(0));
    const auto trust = weight_norms.div(update_norms)
                           .clamp_max_(step.max_trust)
                           .masked_fill_(either_is_zero, 1);
    descend_each(p, std::move(updates), scaled(trust, now.lr), now);
  });
}

void larc(
    rust::Slice<const TensorRef> tensors, size_t count, const LarcStep& step, StepPart part,
    rust::Slice<const TensorRef> sums, rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  const bool buffered = step.momentum != 0;
  auto roles = roles_of(tensors, count, 2 + buffered, 2 + buffered, "LARC");
  const Squares squares_of(part, sums, roles[0]);
  const Split ways(roles, kGradient, Loops::kNorms, device, operations);
  const LarcNumbers numbers{decay_of(step), step.momentum};
  loop_tensors(roles, ways.loops, [&](size_t index, const auto& memory) {
    const auto sums = squares_of.of(index, [&] {
      return sum_of_squares(memory.count, [&](int64_t begin, int64_t end) {
        const auto t = memory.from(begin);
        return larc_norms_loop(t[0], t[1], end - begin, numbers);
      });
    });
    if (!squares_of.updates()) {
      return;
    }
    const double rate = larc_rate(step, std::sqrt(sums.first), std::sqrt(sums.second));
    each_block(memory.count, [&](int64_t, int64_t begin, int64_t end) {
      // Without momentum the third role is null.
      const auto t = memory.from(begin);
      larc_loop(t[0], t[1], t[2], end - begin, numbers, rate);
    });
  });
  ways.write_back();
  each_piece(chosen(roles, ways.operations), kGradient, [&](StepPiece& piece) {
    const StepNumbers now(device, piece.device, step.lr, 0);
    const auto& p = piece.roles[0];
    // The first pass has shrunk the weights.
    const double weight_decay = step.decoupled && !squares_of.computes() ? 0 : step.weight_decay;
    auto slopes =
        decay_and_slopes(p, piece.roles[1], step.maximize, weight_decay, step.decoupled, now);
    const auto [weight_norms, slope_norms] = squares_of.norms_of(
        piece, ways.operations, [&] { return std::pair(norms(p), norms(slopes.list)); });
    if (!squares_of.updates()) {
      return;
    }
    const auto below = slope_norms.add(weight_norms, step.weight_decay).add_(step.eps);
    auto rates = scaled(weight_norms.mul(step.trust), now.lr).div_(below);
    if (step.clip) {
      rates = now.lr.on_host() ? rates.clamp_max(now.lr.host())
                               : at::minimum(rates, now.lr.device());
    }
    Scratch updates(p, p[0].scalar_type());
    if (buffered) {
      accumulate(piece.roles[2], slopes.list, step.momentum, now);
      updates.copy(piece.roles[2]);
    } else {
      updates.copy(slopes.list);
    }
    descend_each(p, std::move(updates), rates, now);
  });
}

void look_ahead(
    rust::Slice<const TensorRef> tensors, size_t count, const LookAheadStep& step,
    rust::Slice<const TensorRef> device, bool operations) {
  at::NoGradGuard no_grad;
  auto roles = roles_of(tensors, count, 2, 2, "Lookahead");
  const Split ways(roles, kNone, Loops::kElements, device, operations);
  loop_elements(roles, ways.loops, kNone, [&](const auto& t, int64_t count) {
    look_ahead_loop(t[0], t[1], count, step.alpha);
  });
  ways.write_back();
  each_piece(chosen(roles, ways.operations), kNone, [&](StepPiece& piece) {
    const auto &fast = piece.roles[0], &slow = piece.roles[1];
    const StepNumbers now(device, piece.device, 0, 0);
    if (now.steps.on_host()) {
      at::_foreach_lerp_(slow, fast, step.alpha);
      at::_foreach_copy_(fast, slow);
      return;
    }
    auto rests = now.steps.device().fmod(static_cast<double>(step.every)).ne(0);
    if (now.can_skip()) {
      rests.logical_or_(now.skip);
    }
    Scratch way(fast, fast[0].scalar_type());
    way.copy(fast);
    at::_foreach_sub_(way.views, slow);
    way.block.mul_(step.alpha).masked_fill_(rests, -0.0);
    at::_foreach_add_(slow, way.views);
    way.copy(fast);
    Scratch new_fast(slow, slow[0].scalar_type());
    new_fast.copy(slow);
    at::where_out(new_fast.block, rests, way.block, new_fast.block);
    at::_foreach_copy_(fast, new_fast.views);
  });
}

bool same_layout(const Tensor& first, const Tensor& second) {
  return first.device() == second.device() && first.scalar_type() == second.scalar_type() &&
      first.sizes() == second.sizes() && first.strides() == second.strides();
}

} // namespace brigade
