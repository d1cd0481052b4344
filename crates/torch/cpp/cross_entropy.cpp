#include "brigade-torch/src/bridge.rs.h"

#include "exponential.h"
#include "kernels/cross_entropy.h"
#include "linear.h"
#include "native_bf16.h"
#include "regions.h"
#include "weights.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <vector>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Logits that exist at a time, at most, but for this many rows: fewer would make the products slow, which
// read the whole weight and its gradient for each chunk. A GPU's products are that much faster than its memory.
constexpr int64_t kMostLogitBytes = int64_t{128} << 20;
constexpr int64_t kMostLogitBytesOfGpu = int64_t{512} << 20;
constexpr int64_t kFewestRows = 128;
// A GPU's fastest products need rows that begin at multiples of 16 bytes, and tiles of this many values.
constexpr int64_t kPaddedTo = 64;
// Sums that go side by side, so that they are vectors.
constexpr int64_t kLossLanes = 32;

// The classes, and which of them this rank has a column of logits for.
struct Classes {
  explicit Classes(int64_t all) : all(all), own(all) {}
  // A rank's part. What it has beyond the last class is padding.
  Classes(const Group& group, const VocabularyPart& part)
      : all(part.vocabulary),
        start(part.start),
        own(std::clamp<int64_t>(part.vocabulary - part.start, 0, part.size)) {
    if (group.live()->getSize() > 1) {
      this->group = group.live();
    }
  }

  int64_t all;
  int64_t start = 0; // the first one of this rank
  int64_t own; // number of this rank's
  c10::intrusive_ptr<c10d::ProcessGroup> group; // null where one rank has all of them

  // Equal on all ranks, so that all send as many messages.
  int64_t most_of_a_rank() const {
    return group ? (all + group->getSize() - 1) / group->getSize() : own;
  }
};

// What a row's logits become: its loss, and its gradient where that is wanted.
struct RowLoss {
  double smoothing; // of the targets
  double z_loss; // factor of the squared log of the sum of exponentials
  double scale; // of the gradient
  at::Tensor divisor; // of the gradient, too, where it is on a device
};

// Sums over a row's logits, or over a rank's part of them, which it sends to the others: the largest logit and the sum
// of exponentials apart, since their logarithm alone would lose what largest logits of 1e30 have beside them.
struct RowSums {
  double largest = -std::numeric_limits<double>::infinity();
  double exponentials = 0; // of what is left when the largest is subtracted
  double target = 0; // its logit; 0 where another rank has it
  double logits = 0; // for smoothing alone, without which it is not sent

  static int64_t sent(const RowLoss& how) {
    return how.smoothing > 0 ? 4 : 3;
  }
};
static_assert(sizeof(RowSums) == 4 * sizeof(double));

// A row over all ranks.
struct WholeRow {
  double largest;
  double exponentials;
  double loss;
  double slope; // of a logit's share of the exponentials
};

WholeRow whole_row(
    const double* sums, int64_t ranks, int64_t step, const Classes& classes, const RowLoss& how) {
  WholeRow row{-std::numeric_limits<double>::infinity(), 0, 0, how.scale};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    row.largest = std::max(row.largest, sums[rank * step]);
  }
  double target = 0, logits = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    RowSums of_rank;
    std::memcpy(&of_rank, sums + rank * step, RowSums::sent(how) * sizeof(double));
    row.exponentials += of_rank.exponentials * std::exp(of_rank.largest - row.largest);
    target += of_rank.target;
    logits += of_rank.logits;
  }
  const double log_sum = row.largest + std::log(row.exponentials);
  row.loss = log_sum - (1 - how.smoothing) * target;
  if (how.smoothing > 0) {
    row.loss -= how.smoothing / static_cast<double>(classes.all) * logits;
  }
  if (how.z_loss > 0) {
    row.loss += how.z_loss * log_sum * log_sum;
    row.slope *= 1 + 2 * how.z_loss * log_sum;
  }
  return row;
}

template <typename T>
struct Computed {
  using type = float;
};
template <>
struct Computed<double> {
  using type = double;
};

// The largest logit where it can be subtracted from all: minus infinity from itself would be NaN, and a rank's part of a
// row may have nothing else.
template <typename C>
BRIGADE_INLINE C subtracted(C largest) {
  return largest == -std::numeric_limits<C>::infinity() ? 0 : largest;
}

// `target` is negative where another rank has it.
template <typename T, typename C = typename Computed<T>::type>
BRIGADE_EVERY_CPU RowSums
sums_of_row(const T* logits, int64_t classes, int64_t target, const RowLoss& how) {
  C most[kLossLanes];
  std::fill(most, most + kLossLanes, -std::numeric_limits<C>::infinity());
  const int64_t whole = classes - classes % kLossLanes;
  for (int64_t at = 0; at < whole; at += kLossLanes) {
    for (int64_t lane = 0; lane < kLossLanes; ++lane) {
      const C value = static_cast<C>(logits[at + lane]);
      most[lane] = value > most[lane] ? value : most[lane];
    }
  }
  C largest = *std::max_element(most, most + kLossLanes);
  for (int64_t at = whole; at < classes; ++at) {
    largest = std::max(largest, static_cast<C>(logits[at]));
  }
  const C less = subtracted(largest);
  // Lanes of the whole row would lose digits in a row of many classes: a part is added up in double.
  constexpr int64_t kPart = 64 * kLossLanes;
  RowSums row;
  row.largest = largest;
  for (int64_t part = 0; part < whole; part += kPart) {
    C sums[kLossLanes] = {}, plain[kLossLanes] = {};
    const int64_t end = std::min(part + kPart, whole);
    for (int64_t at = part; at < end; at += kLossLanes) {
      for (int64_t lane = 0; lane < kLossLanes; ++lane) {
        sums[lane] += exponential(static_cast<C>(logits[at + lane]) - less);
      }
    }
    if (how.smoothing > 0) {
      for (int64_t at = part; at < end; at += kLossLanes) {
        for (int64_t lane = 0; lane < kLossLanes; ++lane) {
          plain[lane] += static_cast<C>(logits[at + lane]);
        }
      }
    }
    for (int64_t lane = 0; lane < kLossLanes; ++lane) {
      row.exponentials += sums[lane];
      row.logits += plain[lane];
    }
  }
  for (int64_t at = whole; at < classes; ++at) {
    row.exponentials += exponential(static_cast<C>(logits[at]) - less);
    row.logits += static_cast<C>(logits[at]);
  }
  row.target = target < 0 ? 0 : static_cast<double>(static_cast<C>(logits[target]));
  return row;
}

// Logits in, gradient out, which may be the same memory. `own_largest` is that of these logits.
template <typename T, typename C = typename Computed<T>::type>
BRIGADE_EVERY_CPU void gradient_of_row(
    const T* logits, const Classes& classes, int64_t target, double own_largest,
    const WholeRow& row, const RowLoss& how, T* gradient) {
  const double spread = how.smoothing / static_cast<double>(classes.all);
  const C at_target = target < 0 ? 0 : static_cast<C>(logits[target]);
  const C largest = subtracted(static_cast<C>(own_largest));
  const C factor =
      static_cast<C>(row.slope * std::exp(own_largest - row.largest) / row.exponentials);
  const C less = static_cast<C>(how.scale * spread);
  for (int64_t at = 0; at < classes.own; ++at) {
    gradient[at] =
        static_cast<T>(exponential(static_cast<C>(logits[at]) - largest) * factor - less);
  }
  if (target >= 0) {
    const double share = std::exp(static_cast<double>(at_target) - row.largest) / row.exponentials;
    gradient[target] =
        static_cast<T>(row.slope * share - how.scale * (spread + (1 - how.smoothing)));
  }
}

// Fewer rows than a thread is worth are done by one.
template <typename F>
void for_each_row(int64_t rows, const Classes& classes, const F& run) {
  const int64_t fewest = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, classes.own));
  at::parallel_for(0, rows, fewest, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      run(row);
    }
  });
}

template <typename T>
double loss_of_rows(
    const at::Tensor& logits, const at::Tensor& targets, const Classes& classes,
    const RowLoss& how, const at::Tensor& gradient) {
  const int64_t rows = logits.size(0), step = logits.stride(0);
  const T* from = logits.const_data_ptr<T>();
  const int64_t* target = targets.const_data_ptr<int64_t>();
  T* to = gradient.defined() ? gradient.mutable_data_ptr<T>() : nullptr;
  const auto own_target = [&](int64_t row) {
    const int64_t place = target[row] - classes.start;
    return place < classes.own ? std::max<int64_t>(place, -1) : -1;
  };
  const auto sums = [&](int64_t row) {
    return sums_of_row(from + row * step, classes.own, own_target(row), how);
  };
  std::vector<double> losses(rows);
  const auto finish = [&](int64_t row, double own_largest, const WholeRow& whole) {
    losses[row] = whole.loss;
    if (to != nullptr) {
      gradient_of_row(
          from + row * step, classes, own_target(row), own_largest, whole, how, to + row * step);
    }
  };
  if (!classes.group) {
    for_each_row(rows, classes, [&](int64_t row) {
      const auto own = sums(row);
      finish(row, own.largest, whole_row(&own.largest, 1, 4, classes, how));
    });
  } else {
    const int64_t sent = RowSums::sent(how);
    const auto of_own = at::empty({rows, sent}, targets.options().dtype(at::kDouble));
    double* own = of_own.mutable_data_ptr<double>();
    for_each_row(rows, classes, [&](int64_t row) {
      const auto of_row = sums(row);
      std::memcpy(own + row * sent, &of_row, sent * sizeof(double));
    });
    const auto of_all = regions::gather(classes.group, of_own, 0);
    const double* all = of_all.const_data_ptr<double>();
    for_each_row(rows, classes, [&](int64_t row) {
      finish(
          row, own[row * sent],
          whole_row(all + row * sent, classes.group->getSize(), rows * sent, classes, how));
    });
  }
  double loss = 0;
  for (const double of_row : losses) {
    loss += of_row;
  }
  return loss;
}

// The rows that count, and what their targets are. On a CPU other rows are left out, and the host knows how many there
// are. On a GPU, where the host would have to wait for that, all rows are there, and others are masked.
struct Counted {
  at::Tensor targets; // [rows]; with those that are ignored, where all rows are there
  int64_t ignore_index;
  at::Tensor places; // of them, undefined where all rows are there
  at::Tensor ignored; // bool [rows], where rows are there that do not count
  at::Tensor total; // how many count, a scalar of int64 on the rows' device
  std::optional<int64_t> count; // the same on the host

  Counted(const at::Tensor& all, int64_t classes, const CrossEntropyOptions& options)
      : ignore_index(options.ignore_index) {
    const auto flat = all.reshape({-1}).contiguous();
    if (flat.numel() == 0) {
      targets = flat;
      know(0);
      return;
    }
    if (!flat.device().is_cpu()) {
      targets = flat;
      ignored = flat.eq(options.ignore_index);
      total = ignored.logical_not().sum();
      return;
    }
    const auto counts = flat.ne(options.ignore_index);
    const auto checked = flat.where(counts, at::zeros({}, flat.options()));
    const auto number = counts.sum().item<int64_t>();
    const auto lowest = checked.min().item<int64_t>();
    const auto wrong = lowest < 0 ? lowest : checked.max().item<int64_t>();
    TORCH_CHECK_VALUE(
        number == 0 || (wrong >= 0 && wrong < classes), "target ", wrong, " is none of the classes 0 to ",
        classes - 1, ", nor ignore_index (", options.ignore_index, ")");
    if (number == flat.numel()) {
      targets = flat;
    } else {
      places = counts.nonzero().squeeze(1);
      targets = flat.index_select(0, places);
    }
    know(number);
  }

  int64_t rows() const {
    return targets.numel();
  }

  // The targets, 0 for those that are ignored. libtorch's kernel reports a target that is not a class.
  at::Tensor masked_targets() const {
    return ignored.defined() ? targets.masked_fill(ignored, 0) : targets;
  }

  at::Tensor of(const at::Tensor& rows) const {
    return (places.defined() ? rows.index_select(0, places) : rows).contiguous();
  }

  // Rows of counted targets among rows of zeros.
  at::Tensor among_all(const at::Tensor& rows, int64_t all) const {
    if (!places.defined()) {
      return rows;
    }
    auto out = at::zeros({all, rows.size(1)}, rows.options());
    return out.index_copy_(0, places, rows);
  }

  // Those of a chunk.
  Counted narrow(int64_t begin, int64_t size) const {
    auto part = *this;
    part.targets = targets.narrow(0, begin, size);
    if (ignored.defined()) {
      part.ignored = ignored.narrow(0, begin, size);
    }
    return part;
  }

 private:
  void know(int64_t number) {
    count = number;
    total = at::full({}, number, targets.options());
  }
};

// The same of a rank's part, on a device.
at::Tensor loss_and_gradient_of_part(
    const at::Tensor& logits, const Counted& counted, const Classes& classes, const RowLoss& how,
    at::Tensor gradient) {
  const auto wide = at::toOpMathType(logits.scalar_type());
  const int64_t rows = logits.size(0);
  const auto targets = counted.masked_targets();
  const auto places = targets - classes.start;
  const auto is_elsewhere = places.lt(0).logical_or_(places.ge(classes.own))
                                .logical_and_(targets.ge(0).logical_and_(targets.lt(classes.all)));
  // The place of a target that is no class stays outside: the kernel of `gather` tells of it.
  const auto columns = places.masked_fill(is_elsewhere, 0).unsqueeze(1);
  auto own = at::zeros({4, rows}, logits.options().dtype(at::kDouble));
  at::Tensor exponentials;
  if (classes.own == 0) {
    own[0].fill_(-std::numeric_limits<double>::infinity());
  } else {
    const auto largest = logits.amax(1).to(wide);
    const auto less = largest.masked_fill(largest.eq(-std::numeric_limits<double>::infinity()), 0);
    exponentials = at::sub(logits, less.unsqueeze(1)).exp_();
    own[0].copy_(largest);
    own[1].copy_(exponentials.sum(1, /*keepdim=*/false, at::kDouble));
    own[2].copy_(logits.gather(1, columns).squeeze(1).masked_fill_(is_elsewhere, 0));
    if (how.smoothing > 0) {
      own[3].copy_(logits.sum(1, /*keepdim=*/false, at::kDouble));
    }
  }
  const int64_t sent = RowSums::sent(how);
  const auto all = regions::gather(classes.group, own.narrow(0, 0, sent).unsqueeze(0), 0);
  const auto of_all = [&](int64_t which) { return all.select(1, which); };
  const auto largest = of_all(0).amax(0);
  const auto sum = of_all(1).mul((of_all(0) - largest).exp_()).sum(0);
  const auto log_sum = largest + sum.log();
  auto loss = log_sum - of_all(2).sum(0) * (1 - how.smoothing);
  const double spread = how.smoothing / static_cast<double>(classes.all);
  if (how.smoothing > 0) {
    loss.sub_(of_all(3).sum(0) * spread);
  }
  if (how.z_loss > 0) {
    loss.add_(log_sum.square() * how.z_loss);
  }
  if (counted.ignored.defined()) {
    loss.masked_fill_(counted.ignored, 0);
  }
  if (gradient.defined() && classes.own > 0) {
    auto factor = (own[0] - largest).exp_().div_(sum);
    if (how.z_loss > 0) {
      factor.mul_(1 + 2 * how.z_loss * log_sum);
    }
    exponentials.mul_(factor.to(wide).unsqueeze(1));
    if (spread > 0) {
      exponentials.sub_(spread);
    }
    const auto at_target = at::full({rows, 1}, -(1 - how.smoothing), exponentials.options());
    exponentials.scatter_add_(1, columns, at_target.masked_fill_(is_elsewhere.unsqueeze(1), 0));
    exponentials.mul_(how.scale);
    if (how.divisor.defined()) {
      exponentials.div_(how.divisor);
    }
    if (counted.ignored.defined()) {
      exponentials.masked_fill_(counted.ignored.unsqueeze(1), 0);
    }
    gradient.copy_(exponentials);
  }
  return loss.sum();
}

// The sum of the losses of rows of logits, a scalar. The rows' first columns are this rank's classes; others are padding.
// The gradient, where it is defined, is filled, and its padding is zero before. It may be the rows, and else has their
// strides.
at::Tensor loss_and_gradient(
    const at::Tensor& rows, const Counted& counted, const Classes& classes, const RowLoss& how,
    const at::Tensor& gradient_of_rows) {
  if (counted.ignored.defined() && !classes.group && fits_cross_entropy_kernels(rows)) {
    if (auto* program = cross_entropy_kernels(rows)) {
      const RowLossOptions options{counted.ignore_index, how.smoothing, how.z_loss, how.scale};
      const auto count = how.divisor.defined() ? counted.total : at::Tensor();
      return cross_entropy_rows_gpu(
                 *program, rows, classes.own, counted.targets, count, options, gradient_of_rows)
          .sum(at::kDouble);
    }
  }
  const auto without_padding = [&](const at::Tensor& all) { return all.narrow(1, 0, classes.own); };
  const auto logits = without_padding(rows);
  auto gradient = gradient_of_rows.defined() ? without_padding(gradient_of_rows) : at::Tensor();
  const auto wide = at::toOpMathType(logits.scalar_type());
  if (logits.device().is_cpu()) {
    double loss = 0;
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kBFloat16, at::kHalf, logits.scalar_type(), "cross_entropy", [&] {
          loss = loss_of_rows<scalar_t>(logits, counted.targets, classes, how, gradient);
        });
    return at::scalar_tensor(loss, at::TensorOptions().dtype(at::kDouble));
  }
  if (classes.group) {
    return loss_and_gradient_of_part(logits, counted, classes, how, gradient);
  }
  auto logs = at::log_softmax(logits, 1, wide);
  const auto places = counted.masked_targets().unsqueeze(1);
  const auto of_counted = [&](at::Tensor losses) {
    if (counted.ignored.defined()) {
      losses.masked_fill_(counted.ignored, 0);
    }
    return losses.sum(at::kDouble);
  };
  auto loss = of_counted(logs.gather(1, places).squeeze(1)) * -(1 - how.smoothing);
  const double less = how.smoothing / static_cast<double>(classes.all);
  if (how.smoothing > 0) {
    loss = loss - of_counted(logs.sum(1)) * less;
  }
  at::Tensor log_sum;
  if (how.z_loss > 0) {
    log_sum = logits.amax(1).to(wide) - logs.amax(1);
    loss = loss + of_counted(log_sum.square()) * how.z_loss;
  }
  if (gradient.defined()) {
    logs.exp_();
    if (log_sum.defined()) {
      logs.mul_((1 + 2 * how.z_loss * log_sum).unsqueeze(1));
    }
    if (less > 0) {
      logs.sub_(less);
    }
    logs.scatter_add_(1, places, at::full_like(places, -(1 - how.smoothing), logs.options()));
    if (how.scale != 1) {
      logs.mul_(how.scale);
    }
    if (how.divisor.defined()) {
      logs.div_(how.divisor);
    }
    if (counted.ignored.defined()) {
      logs.masked_fill_(counted.ignored.unsqueeze(1), 0);
    }
    gradient.copy_(logs);
  }
  return loss;
}

// Gradients are made as those of the mean: its backward, and that of a sum which is divided by the count, have
// nothing left to do. Not those of a sum in 16 bits, which would be rounded twice, and not where products are in
// float16: small ones would vanish before a loss scale reaches them.
RowLoss row_loss_of(
    const CrossEntropyOptions& options, const Counted& counted, at::ScalarType rows,
    at::ScalarType product) {
  const bool is_short = rows == at::kBFloat16 || rows == at::kHalf;
  const bool divide = product != at::kHalf && (options.mean || !is_short);
  if (counted.count) {
    const auto count = static_cast<double>(*counted.count);
    return {options.label_smoothing, options.z_loss, divide && count > 0 ? 1 / count : 1, at::Tensor()};
  }
  return {
      options.label_smoothing, options.z_loss, 1,
      divide ? counted.total.clamp_min(1).to(at::kDouble) : at::Tensor()};
}

at::Tensor reduced(
    const at::Tensor& sum, const CrossEntropyOptions& options, const Counted& counted,
    const at::TensorOptions& like) {
  // 0 / 0 is NaN, as in libtorch.
  const auto mean = [&] {
    return counted.count ? sum / static_cast<double>(*counted.count) : sum / counted.total;
  };
  return (options.mean ? mean() : sum).to(like.dtype(at::toOpMathType(like.dtype().toScalarType())));
}

// What the backward needs: gradients, made in the forward, which it gives away, and their part of the loss's.
void keep(
    AutogradContext* context, std::vector<std::optional<at::Tensor>> gradients,
    const CrossEntropyOptions& options, const Counted& counted, const RowLoss& how) {
  auto& kept = context->saved_data;
  if (counted.count) {
    const double of_loss =
        options.mean ? 1 / static_cast<double>(std::max<int64_t>(1, *counted.count)) : 1;
    kept["part"] = how.scale / of_loss;
  } else if (how.divisor.defined() == options.mean) {
    kept["part"] = 1.0;
  } else {
    const auto count = counted.total.clamp_min(1).to(at::kDouble);
    kept["part"] = options.mean ? count : count.reciprocal();
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i]) {
      kept[std::to_string(i)] = *std::move(gradients[i]);
    }
  }
}

variable_list give(
    AutogradContext* context, const char* name, size_t inputs, const at::Tensor& upstream) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled(), name,
      " has no gradients of gradients (create_graph): compute logits and cross_entropy apart for them");
  auto& kept = context->saved_data;
  TORCH_CHECK(
      kept.erase("spent") == 0, name,
      " was already differentiated: its gradients are made in the forward and given away by the first "
      "backward; compute the loss again for a second one (retain_graph does not keep them)");
  variable_list out(inputs);
  for (size_t i = 0; i < inputs; ++i) {
    const auto found = kept.find(std::to_string(i));
    if (found != kept.end()) {
      out[i] = std::move(found->second).toTensor();
    }
  }
  const auto part = kept.at("part");
  kept.clear();
  kept["spent"] = true;
  // Half of the last digit is what 1 / count was rounded by.
  const double rounding = upstream.scalar_type() == at::kDouble
      ? std::numeric_limits<double>::epsilon()
      : std::numeric_limits<float>::epsilon() / 2;
  const bool is_made = upstream.device().is_cpu() && part.isDouble() &&
      std::abs(upstream.item<double>() / part.toDouble() - 1) <= rounding;
  if (!is_made) {
    const auto factor = !part.isDouble() ? upstream / part.toTensor()
        : part.toDouble() == 1           ? upstream
                                         : upstream / part.toDouble();
    for (auto& gradient : out) {
      if (gradient.defined()) {
        gradient.mul_(factor);
      }
    }
  }
  return out;
}

struct CrossEntropy : public torch::autograd::Function<CrossEntropy> {
  static constexpr auto kName = "cross_entropy";

  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& logits, const Counted& counted,
      const Classes& classes, const CrossEntropyOptions& options, bool wanted) {
    RECORD_FUNCTION("brigade::cross_entropy", {});
    const int64_t columns = logits.size(-1);
    const auto flat = logits.reshape({-1, columns});
    const auto rows = counted.of(flat);
    const auto gradient = wanted ? at::empty_like(rows) : at::Tensor();
    if (wanted && classes.own < columns) {
      gradient.narrow(1, classes.own, columns - classes.own).zero_();
    }
    auto sum = at::zeros({}, rows.options().dtype(at::kDouble));
    const auto how = row_loss_of(options, counted, rows.scalar_type(), rows.scalar_type());
    if (counted.rows() > 0) {
      sum = loss_and_gradient(rows, counted, classes, how, gradient);
    }
    if (wanted) {
      const auto all = counted.among_all(gradient, flat.size(0)).view_as(logits);
      keep(context, {all}, options, counted, how);
    }
    return reduced(sum, options, counted, logits.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto out = give(context, kName, 1, gradients[0]);
    out.resize(5);
    return out;
  }
};

// The number of columns that logits of the classes have in memory.
int64_t padded_columns(int64_t classes, const at::Device& device) {
  return device.is_cuda() ? (classes + kPaddedTo - 1) / kPaddedTo * kPaddedTo : classes;
}

// The tensor's first `count` rows in the type, with rows of zeros behind them up to `padded`.
at::Tensor padded_rows(const at::Tensor& tensor, int64_t count, int64_t padded, at::ScalarType type) {
  const auto rows = tensor.narrow(0, 0, count);
  if (count == padded) {
    return rows.to(type);
  }
  auto sizes = rows.sizes().vec();
  sizes[0] = padded;
  auto out = at::empty(sizes, rows.options().dtype(type));
  out.narrow(0, 0, count).copy_(rows);
  out.narrow(0, count, padded - count).zero_();
  return out;
}

struct LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
  static constexpr auto kName = "linear_cross_entropy";

  // `compute_weight` is the weight in the type of the products: the rows of this rank's classes, on a GPU with rows of
  // zeros behind them. Logits have a column for each one, of which no one sees the last ones.
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& hidden, const at::Tensor& weight,
      const std::optional<at::Tensor>& bias, const at::Tensor& compute_weight,
      const Counted& counted, const Classes& classes, const CrossEntropyOptions& options,
      const std::array<bool, 3>& wanted) {
    RECORD_FUNCTION("brigade::linear_cross_entropy", {});
    // The types are chosen.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto type = compute_weight.scalar_type();
    const auto sum_type = at::toOpMathType(type);
    const int64_t width = weight.size(1);
    const int64_t columns = compute_weight.size(0);
    const auto without_padding = [&](const at::Tensor& all) { return all.narrow(0, 0, classes.own); };
    const auto flat = hidden.reshape({-1, width});
    const auto rows = counted.of(flat).to(type);
    const auto compute_bias = bias ? padded_rows(*bias, classes.own, columns, type) : at::Tensor();
    const auto how = row_loss_of(options, counted, hidden.scalar_type(), type);
    const bool any = wanted[0] || wanted[1] || wanted[2];

    const auto options_of = [&](at::ScalarType dtype) { return rows.options().dtype(dtype); };
    at::Tensor of_hidden, of_weight, of_bias;
    if (wanted[0]) {
      of_hidden = at::empty({counted.rows(), width}, options_of(type));
    }
    if (wanted[2]) {
      of_bias = at::zeros(bias->sizes(), options_of(sum_type));
    }
    at::Tensor sum;
    // Ranks whose processors differ compute 16-bit products in two types, and must still have as many chunks.
    const auto bytes = static_cast<int64_t>(
        classes.group ? std::max(sizeof(float), c10::elementSize(type)) : c10::elementSize(type));
    const int64_t of_device = hidden.is_cuda() ? kMostLogitBytesOfGpu : kMostLogitBytes;
    const int64_t most_bytes = options.logit_bytes > 0 ? options.logit_bytes : of_device;
    const int64_t of_row =
        std::max<int64_t>(1, padded_columns(classes.most_of_a_rank(), hidden.device())) * bytes;
    const int64_t most = std::max(kFewestRows, most_bytes / of_row);
    const int64_t chunks = (counted.rows() + most - 1) / most;
    const int64_t of_chunk = chunks == 0 ? 0 : (counted.rows() + chunks - 1) / chunks;
    // The first chunk is as large as any.
    const auto memory = at::empty({of_chunk, columns}, options_of(type));
    const bool adds_in_product = sums_in_float32(type, hidden.device());
    for (int64_t begin = 0; begin < counted.rows(); begin += of_chunk) {
      const int64_t size = std::min(of_chunk, counted.rows() - begin);
      const auto in = rows.narrow(0, begin, size);
      auto padded = memory.narrow(0, 0, size);
      const auto logits = padded.narrow(1, 0, classes.own);
      if (compute_bias.defined()) {
        at::addmm_out(padded, compute_bias, in, compute_weight.t());
      } else {
        at::mm_out(padded, in, compute_weight.t());
      }
      const auto loss =
          loss_and_gradient(padded, counted.narrow(begin, size), classes, how, any ? padded : at::Tensor());
      sum = sum.defined() ? sum + loss : loss;
      if (wanted[0]) {
        auto out = of_hidden.narrow(0, begin, size);
        at::mm_out(out, padded, compute_weight);
      }
      if (wanted[1]) {
        if (!of_weight.defined()) {
          const bool is_part = classes.own < weight.size(0);
          const auto of_sum = options_of(adds_in_product ? sum_type : type);
          of_weight = is_part ? at::zeros(weight.sizes(), of_sum) : at::empty(weight.sizes(), of_sum);
          auto out = without_padding(of_weight);
          if (adds_in_product) {
            at::mm_out(out, logits.t(), in, sum_type);
          } else {
            at::mm_out(out, logits.t(), in);
          }
        } else if (adds_in_product) {
          auto out = without_padding(of_weight);
          at::addmm_out(out, out, logits.t(), in, sum_type);
        } else if (type == sum_type) {
          without_padding(of_weight).addmm_(logits.t(), in);
        } else {
          of_weight = of_weight.to(sum_type);
          without_padding(of_weight).add_(at::mm(logits.t(), in));
        }
      }
      if (wanted[2]) {
        without_padding(of_bias).add_(logits.sum(0, /*keepdim=*/false, sum_type));
      }
    }
    if (wanted[0]) {
      of_hidden = counted.among_all(of_hidden.to(hidden.scalar_type()), flat.size(0)).view(hidden.sizes());
    }
    if (wanted[1]) {
      of_weight = of_weight.defined() ? of_weight.to(weight.scalar_type()) : at::zeros_like(weight);
    }
    if (wanted[2]) {
      of_bias = of_bias.to(bias->scalar_type());
    }
    const auto kept = [&](size_t i, at::Tensor& gradient) {
      return wanted[i] ? std::optional(std::move(gradient)) : std::nullopt;
    };
    keep(context, {kept(0, of_hidden), kept(1, of_weight), kept(2, of_bias)}, options, counted, how);
    sum = sum.defined() ? sum : at::zeros({}, options_of(at::kDouble));
    return reduced(sum, options, counted, hidden.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto out = give(context, kName, 3, gradients[0]);
    out.resize(8);
    return out;
  }
};

void check_targets(
    const at::Tensor& targets, const at::Tensor& rows, const CrossEntropyOptions& options) {
  TORCH_CHECK_VALUE(
      targets.scalar_type() == at::kLong, "targets are ", targets.scalar_type(), ", expected Int64");
  TORCH_CHECK_VALUE(
      targets.sizes() == rows.sizes().slice(0, rows.dim() - 1), "targets are ", targets.sizes(),
      ", expected one for each row of ", rows.sizes());
  TORCH_CHECK_VALUE(
      targets.device() == rows.device(), "targets are on ", targets.device(), ", the rows on ",
      rows.device());
  TORCH_CHECK_VALUE(
      options.label_smoothing >= 0 && options.label_smoothing <= 1, "label_smoothing is ",
      options.label_smoothing, ", expected 0 to 1");
  TORCH_CHECK_VALUE(
      options.z_loss >= 0 && std::isfinite(options.z_loss), "z_loss is ", options.z_loss,
      ", expected a finite number that is not negative");
}

void check_rows(const char* name, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      rows.layout() == at::kStrided && at::isFloatingType(rows.scalar_type()) && rows.dim() > 0,
      name, " is ", rows.sizes(), " of ", rows.scalar_type(), ", expected rows of floats");
}

CrossEntropyLoss handed_over(at::Tensor loss, const Counted& counted) {
  return {std::make_unique<Tensor>(std::move(loss)), std::make_unique<Tensor>(counted.total)};
}

void check_part(const char* name, int64_t size, const VocabularyPart& part) {
  TORCH_CHECK_VALUE(
      size == part.size, name, " has ", size, " classes, the part of the vocabulary ", part.size);
}

CrossEntropyLoss loss_of_logits(
    const Tensor& logits, const Tensor& targets, const Classes& classes,
    const CrossEntropyOptions& options) {
  check_targets(targets, logits, options);
  const Counted counted(targets, classes.all, options);
  const bool wanted = at::GradMode::is_enabled() && logits.requires_grad();
  return handed_over(CrossEntropy::apply(logits, counted, classes, options, wanted), counted);
}

CrossEntropyLoss loss_of_hidden(
    const Tensor& hidden, const Tensor& weight, rust::Slice<const TensorRef> bias,
    const Tensor& targets, const Classes& classes, const CrossEntropyOptions& options) {
  check_rows("hidden", hidden);
  check_targets(targets, hidden, options);
  const auto offset = optional_handle(bias);
  TORCH_CHECK_VALUE(
      weight.dim() == 2 && weight.size(1) == hidden.size(-1) && weight.device() == hidden.device(),
      "weight is ", weight.sizes(), " (", weight.device(), "), expected [classes, ", hidden.size(-1),
      "] on ", hidden.device());
  TORCH_CHECK_VALUE(
      !offset ||
          (offset->dim() == 1 && offset->size(0) == weight.size(0) &&
           offset->device() == hidden.device() && at::isFloatingType(offset->scalar_type())),
      "bias is ", offset->sizes(), " of ", offset->scalar_type(), ", expected [", weight.size(0),
      "] floats on ", hidden.device());
  const auto device = hidden.device();
  auto type = hidden.scalar_type();
  const bool casts = at::autocast::is_autocast_enabled(device.type()) && type != at::kDouble;
  if (casts) {
    type = at::autocast::get_autocast_dtype(device.type());
  } else {
    TORCH_CHECK_VALUE(
        weight.scalar_type() == type && (!offset || offset->scalar_type() == type),
        "hidden is ", type, ", weight ", weight.scalar_type(),
        ": expected one type outside of autocast");
  }
  type = product_type(type, device);
  const Counted counted(targets, classes.all, options);
  const bool records = at::GradMode::is_enabled();
  const std::array<bool, 3> wanted{
      records && hidden.requires_grad(), records && weight.requires_grad(),
      records && offset && offset->requires_grad()};
  const int64_t columns = padded_columns(classes.own, device);
  const auto kept = casts && classes.own == weight.size(0)
      ? kept_copy_with_rows(weight, type, columns)
      : at::Tensor();
  // Here, where gradients are recorded: autocast keeps the copy for others, who may need its history. A copy with
  // padding is the head's own.
  const bool shares = !kept.defined() && casts && type != at::kFloat && columns == classes.own;
  const auto compute_weight = kept.defined()
      ? kept
      : padded_rows(
            shares ? at::autocast::cached_cast(type, weight, device.type()).detach() : weight.detach(),
            classes.own, columns, type);
  return handed_over(
      LinearCrossEntropy::apply(
          hidden, weight, offset, compute_weight, counted, classes, options, wanted),
      counted);
}

} // namespace

CrossEntropyLoss cross_entropy(
    const Tensor& logits, const Tensor& targets, const CrossEntropyOptions& options) {
  check_rows("logits", logits);
  return loss_of_logits(logits, targets, Classes(logits.size(-1)), options);
}

CrossEntropyLoss linear_cross_entropy(
    const Tensor& hidden,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    const Tensor& targets,
    const CrossEntropyOptions& options) {
  check_rows("weight", weight);
  return loss_of_hidden(hidden, weight, bias, targets, Classes(weight.size(0)), options);
}

CrossEntropyLoss vocabulary_parallel_cross_entropy(
    const Group& group,
    const Tensor& logits,
    const Tensor& targets,
    const VocabularyPart& part,
    const CrossEntropyOptions& options) {
  check_rows("logits", logits);
  check_part("logits", logits.size(-1), part);
  return loss_of_logits(logits, targets, Classes(group, part), options);
}

CrossEntropyLoss linear_vocabulary_parallel_cross_entropy(
    const Group& group,
    const Tensor& hidden,
    const Tensor& weight,
    rust::Slice<const TensorRef> bias,
    const Tensor& targets,
    const VocabularyPart& part,
    const CrossEntropyOptions& options) {
  check_rows("weight", weight);
  check_part("weight", weight.size(0), part);
  return loss_of_hidden(hidden, weight, bias, targets, Classes(group, part), options);
}

} // namespace brigade
