#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"
#include "native_bf16.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

namespace brigade {

namespace context {

using regions::GroupHandle;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Scores of so many queries with all keys of a piece exist at a time where libtorch has no kernel that keeps none.
constexpr int64_t kQueryRows = 512;

// The attention of queries to some of the keys: what it would be were there no others, and the logarithm of the sum of its
// powers, by which several of them become one.
struct Attended {
  at::Tensor out; // [batch, heads, queries, size]
  at::Tensor log_sums; // [batch, heads, queries], float32 or float64
};

struct Gradients {
  at::Tensor q, k, v;
};

enum class Kernel { Cpu, CudaFlash, Plain };

Kernel kernel_of(const at::Tensor& q) {
  if (q.is_cpu()) {
    return Kernel::Cpu;
  }
  const bool is_short = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  return q.is_cuda() && is_short && q.size(3) % 8 == 0 && q.size(3) <= 256 ? Kernel::CudaFlash
                                                                          : Kernel::Plain;
}

at::ScalarType sum_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// [rows, keys]: true where a query, the first of which is `first`, does not see a key.
at::Tensor hidden(int64_t first, int64_t rows, int64_t keys, const at::Tensor& like) {
  return at::ones({rows, keys}, like.options().dtype(at::kBool)).triu_(first + 1);
}

at::Tensor plain_scores(
    const at::Tensor& q, const at::Tensor& k, int64_t first, bool causal, double scale) {
  auto scores = at::matmul(q, k.transpose(2, 3)).to(sum_type(q.scalar_type())).mul_(scale);
  if (causal) {
    scores.masked_fill_(hidden(first, q.size(2), k.size(2), q), -INFINITY);
  }
  return scores;
}

Attended plain(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
  std::vector<at::Tensor> outs, sums;
  for (int64_t first = 0; first < q.size(2); first += kQueryRows) {
    const auto rows = q.narrow(2, first, std::min(kQueryRows, q.size(2) - first));
    auto scores = plain_scores(rows, k, first, causal, scale);
    auto log_sums = at::logsumexp(scores, -1);
    outs.push_back(at::matmul(scores.sub_(log_sums.unsqueeze(-1)).exp_().to(v.scalar_type()), v));
    sums.push_back(std::move(log_sums));
  }
  return {at::cat(outs, 2), at::cat(sums, 2)};
}

Gradients plain_backward(
    const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attended& all, bool causal, double scale) {
  const auto type = sum_type(q.scalar_type());
  auto dk = at::zeros(k.sizes(), k.options().dtype(type));
  auto dv = at::zeros(v.sizes(), v.options().dtype(type));
  std::vector<at::Tensor> dqs;
  for (int64_t first = 0; first < q.size(2); first += kQueryRows) {
    const auto count = std::min(kQueryRows, q.size(2) - first);
    const auto of = [&](const at::Tensor& t) { return t.narrow(2, first, count); };
    auto powers = plain_scores(of(q), k, first, causal, scale);
    powers.sub_(of(all.log_sums).unsqueeze(-1)).exp_();
    const auto dot = at::sum(of(dy).to(type) * of(all.out).to(type), -1, /*keepdim=*/true);
    auto of_scores = at::matmul(of(dy), v.transpose(2, 3)).to(type).sub_(dot).mul_(powers).mul_(scale);
    const auto rounded = of_scores.to(q.scalar_type());
    dqs.push_back(at::matmul(rounded, k));
    dk.add_(at::matmul(rounded.transpose(2, 3), of(q)));
    dv.add_(at::matmul(powers.to(dy.scalar_type()).transpose(2, 3), of(dy)));
  }
  return {at::cat(dqs, 2), dk, dv};
}

// Keys or values for each head of the queries.
at::Tensor for_heads(const at::Tensor& shared, int64_t heads) {
  const auto repeats = heads / shared.size(1);
  return repeats == 1 ? shared : shared.unsqueeze(2).expand({-1, -1, repeats, -1, -1}).flatten(1, 2);
}

at::Tensor from_heads(const at::Tensor& gradient, int64_t shared) {
  const auto repeats = gradient.size(1) / shared;
  return repeats == 1 ? gradient : gradient.unflatten(1, {shared, repeats}).sum(2);
}

Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, double scale) {
  const auto keys = for_heads(k, q.size(1)), values = for_heads(v, q.size(1));
  switch (kernel_of(q)) {
    case Kernel::Cpu: {
      auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
          q, keys, values, 0.0, causal, std::nullopt, scale);
      return {out, sums};
    }
    case Kernel::CudaFlash: {
      auto found = at::_scaled_dot_product_flash_attention(q, keys, values, 0.0, causal, false, scale);
      return {std::get<0>(found), std::get<1>(found)};
    }
    case Kernel::Plain:
      return plain(q, keys, values, causal, scale);
  }
  TORCH_CHECK(false, "there is no such kernel of attention");
}

// `all` is the attention to all keys of the sequence: its sums of powers weigh those of these keys.
Gradients attend_backward(
    const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const Attended& all, bool causal, double scale) {
  const auto keys = for_heads(k, q.size(1)), values = for_heads(v, q.size(1));
  Gradients found;
  switch (kernel_of(q)) {
    case Kernel::Cpu: {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          dy, q, keys, values, all.out, all.log_sums, 0.0, causal, std::nullopt, scale);
      found = {dq, dk, dv};
      break;
    }
    case Kernel::CudaFlash: {
      // Without dropout no random state is read.
      const auto state = at::zeros({2}, q.options().dtype(at::kUInt64));
      const auto offset = at::zeros({}, q.options().dtype(at::kUInt64));
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward(
          dy, q, keys, values, all.out, all.log_sums, at::Tensor(), at::Tensor(), q.size(2),
          keys.size(2), 0.0, causal, state, offset, scale);
      found = {dq, dk, dv};
      break;
    }
    case Kernel::Plain:
      found = plain_backward(dy, q, keys, values, all, causal, scale);
      break;
  }
  return {found.q, from_heads(found.k, k.size(1)), from_heads(found.v, v.size(1))};
}

// Which of this rank's queries see which of another rank's keys, and how. Under a causal mask rank r of n has the chunks r and
// 2 n - 1 - r of the sequence, so that one call is enough for each pair of ranks: both halves see the early half of a rank
// before, and only the late half sees a rank behind, all of it.
struct Sight {
  int64_t first_query, queries, keys;
  bool causal;
};

Sight sight(bool causal, int64_t own, int64_t other, int64_t length) {
  if (!causal) {
    return {0, length, length, false};
  }
  if (other == own) {
    return {0, length, length, true};
  }
  const auto half = length / 2;
  return other < own ? Sight{0, length, half, false} : Sight{half, length - half, length, false};
}

// Weighs what has been attended so far and what is new by the sums of their powers.
void merge(Attended& all, const Attended& added, int64_t first) {
  const auto rows = added.out.size(2);
  auto out = all.out.narrow(2, first, rows);
  auto sums = all.log_sums.narrow(2, first, rows);
  const auto together = at::logaddexp(sums, added.log_sums);
  out.mul_((sums - together).exp_().unsqueeze(-1));
  out.addcmul_(added.out.to(out.scalar_type()), (added.log_sums - together).exp_().unsqueeze(-1));
  sums.copy_(together);
}

// A tensor on its way from the rank before, while this rank's goes to the next.
struct Shift {
  at::Tensor sent, received;
  c10::intrusive_ptr<c10d::Work> work;

  at::Tensor wait() {
    work->wait();
    return received;
  }
};

// As an all-to-all of which each rank has a part for its neighbour alone: transports run it without an order of sends and
// receives that could wait for each other.
Shift shift(const GroupHandle& group, const at::Tensor& tensor) {
  const auto ranks = group->getSize(), own = group->getRank();
  std::vector<int64_t> sent(ranks, 0), received(ranks, 0);
  sent[(own + 1) % ranks] = tensor.numel();
  received[(own + ranks - 1) % ranks] = tensor.numel();
  Shift shift{tensor.contiguous(), at::empty(tensor.sizes(), tensor.options()), nullptr};
  auto in = shift.sent.view({-1});
  auto out = shift.received.view({-1});
  shift.work = group->alltoall_base(out, in, received, sent);
  return shift;
}

struct Settings {
  bool causal;
  bool ring;
  double scale;
};

// Calls f(rank, keys and values of that rank) for each rank, this one first.
template <typename F>
void for_each_rank(const GroupHandle& group, const at::Tensor& own, bool ring, const F& f) {
  const auto ranks = group->getSize(), rank = group->getRank();
  if (!ring) {
    const auto all = regions::gather(group, own.unsqueeze(0), 0);
    for (int64_t step = 0; step < ranks; ++step) {
      const auto other = (rank + ranks - step) % ranks;
      f(other, all[other]);
    }
    return;
  }
  auto held = own;
  for (int64_t step = 0; step < ranks; ++step) {
    std::optional<Shift> next;
    if (step + 1 < ranks) {
      next = shift(group, held);
    }
    f((rank + ranks - step) % ranks, held);
    if (next) {
      held = next->wait();
    }
  }
}

Attended forward(const GroupHandle& group, const at::Tensor& q, const at::Tensor& own, const Settings& how) {
  Attended all;
  for_each_rank(group, own, how.ring, [&](int64_t other, const at::Tensor& held) {
    const auto seen = sight(how.causal, group->getRank(), other, q.size(2));
    const auto part = [&](int64_t which) { return held[which].narrow(2, 0, seen.keys); };
    auto found = attend(
        q.narrow(2, seen.first_query, seen.queries), part(0), part(1), seen.causal, how.scale);
    if (!all.out.defined()) {
      all = {found.out.to(sum_type(q.scalar_type()), false, /*copy=*/true), found.log_sums.clone()};
    } else {
      merge(all, found, seen.first_query);
    }
  });
  all.out = all.out.to(q.scalar_type());
  return all;
}

Gradients backward(
    const GroupHandle& group, const at::Tensor& dy, const at::Tensor& q, const at::Tensor& own,
    const Attended& all, const Settings& how) {
  const auto ranks = group->getSize();
  const auto type = own.options().dtype(sum_type(q.scalar_type()));
  auto dq = at::zeros(q.sizes(), type);
  // Of all ranks' keys and values where they were gathered.
  at::Tensor summed;
  std::optional<Shift> arriving;
  if (!how.ring) {
    auto sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), ranks);
    summed = at::zeros(sizes, type);
  }
  for_each_rank(group, own, how.ring, [&](int64_t other, const at::Tensor& held) {
    const auto seen = sight(how.causal, group->getRank(), other, q.size(2));
    const auto rows = [&](const at::Tensor& t) { return t.narrow(2, seen.first_query, seen.queries); };
    const auto part = [&](int64_t which) { return held[which].narrow(2, 0, seen.keys); };
    const auto found = attend_backward(
        rows(dy), rows(q), part(0), part(1), {rows(all.out), rows(all.log_sums)}, seen.causal, how.scale);
    rows(dq).add_(found.q);
    // In a ring the sum for these keys and values arrives with them, and goes on to the next rank.
    auto into = how.ring ? (arriving ? arriving->wait() : at::zeros(own.sizes(), type)) : summed[other];
    into[0].narrow(2, 0, seen.keys).add_(found.k);
    into[1].narrow(2, 0, seen.keys).add_(found.v);
    if (how.ring) {
      arriving = shift(group, into);
    }
  });
  at::Tensor mine;
  if (how.ring) {
    mine = arriving->wait();
  } else {
    mine = at::empty(own.sizes(), type);
    auto flat = mine.view({-1});
    auto parts = summed.view({-1});
    group->_reduce_scatter_base(flat, parts)->wait();
  }
  return {dq.to(q.scalar_type()), mine[0].to(own.scalar_type()), mine[1].to(own.scalar_type())};
}

struct ContextAttention : public torch::autograd::Function<ContextAttention> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const GroupHandle& group, bool causal, bool ring, double scale) {
    RECORD_FUNCTION("brigade::context_attention", {});
    const auto own = at::stack({k, v});
    const auto all = context::forward(group, q, own, {causal, ring, scale});
    context->save_for_backward({q, own, all.out, all.log_sums});
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    context->saved_data["causal"] = causal;
    context->saved_data["ring"] = ring;
    context->saved_data["scale"] = scale;
    return all.out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::context_attention_backward", {});
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "attention over several ranks has no gradients of gradients (create_graph)");
    check_not_fork("a process group");
    auto& data = context->saved_data;
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(data["group"].toCapsule());
    const auto saved = context->get_saved_variables();
    at::NoGradGuard no_grad;
    const auto found = context::backward(
        group, gradients[0].contiguous(), saved[0], saved[1], {saved[2], saved[3]},
        {data["causal"].toBool(), data["ring"].toBool(), data["scale"].toDouble()});
    return {found.q, found.k, found.v, {}, {}, {}, {}};
  }
};

} // namespace context

std::unique_ptr<Tensor> context_attention(
    const Group& group,
    const Tensor& queries,
    const Tensor& keys,
    const Tensor& values,
    bool ring,
    const AttentionOptions& options) {
  const at::Tensor &q = queries, &k = keys, &v = values;
  const bool is_shaped = q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && k.size(0) == q.size(0) &&
      k.size(2) == q.size(2) && k.size(3) == q.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0;
  TORCH_CHECK_VALUE(
      is_shaped, "queries are ", q.sizes(), ", keys ", k.sizes(), ", values ", v.sizes(),
      ", expected [batch, heads, own tokens, size], with a divisor of the heads for keys and values");
  TORCH_CHECK_VALUE(
      !options.causal || q.size(2) % 2 == 0, "each rank has ", q.size(2),
      " tokens, expected an early and a late half of one length");
  auto type = q.scalar_type();
  const auto device = q.device();
  if (at::autocast::is_autocast_enabled(device.type()) && at::isFloatingType(type) && type != at::kDouble) {
    type = at::autocast::get_autocast_dtype(device.type());
  }
  TORCH_CHECK_VALUE(
      at::isFloatingType(type) && k.device() == device && v.device() == device,
      "queries, keys and values are ", q.scalar_type(), " on ", device, ", ", k.device(), " and ", v.device(),
      ", expected floating-point numbers on one device");
  // On processors without products in 16 bits kernels for them are slower than those in 32, and no better.
  const auto kind = product_type(type, device);
  const double scale =
      options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  const auto out = context::ContextAttention::apply(
      q.to(kind), k.to(kind), v.to(kind), group.live(), options.causal, ring, scale);
  return std::make_unique<Tensor>(out.to(type));
}

} // namespace brigade
