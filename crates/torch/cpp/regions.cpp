#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

namespace brigade {

namespace regions {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

enum class Move { Nothing, Sum, Part, Gather, SumPart, Exchange };

// In the input's own memory where nothing else can see it: a gradient of many megabytes that only passes by.
at::Tensor sum(const GroupHandle& group, const at::Tensor& input, bool may_overwrite) {
  const bool overwrites = may_overwrite && input.is_contiguous() && !tensor_is_shared(input);
  std::vector<at::Tensor> list{overwrites ? input : input.clone(at::MemoryFormat::Contiguous)};
  group->allreduce(list)->wait();
  return list[0];
}

at::Tensor part(const GroupHandle& group, const at::Tensor& input, int64_t dim) {
  const auto size = input.size(dim) / group->getSize();
  return input.narrow(dim, group->getRank() * size, size).contiguous();
}

at::Tensor gather(const GroupHandle& group, const at::Tensor& input, int64_t dim) {
  auto sizes = input.sizes().vec();
  sizes.insert(sizes.begin(), group->getSize());
  auto all = at::empty(sizes, input.options());
  auto flat = all.view({-1});
  auto own = input.contiguous().view({-1});
  group->_allgather_base(flat, own)->wait();
  return all.movedim(0, dim).flatten(dim, dim + 1).contiguous();
}

// As [ranks, ..., part, ...]: what each rank gets of `dim` follows one another.
at::Tensor by_ranks(const GroupHandle& group, const at::Tensor& input, int64_t dim) {
  const auto ranks = group->getSize();
  return input.unflatten(dim, {ranks, input.size(dim) / ranks}).movedim(dim, 0).contiguous();
}

at::Tensor sum_part(const GroupHandle& group, const at::Tensor& input, int64_t dim) {
  const auto parts = by_ranks(group, input, dim);
  auto out = at::empty(parts.sizes().slice(1), input.options());
  auto flat = out.view({-1});
  auto all = parts.view({-1});
  group->_reduce_scatter_base(flat, all)->wait();
  return out;
}

at::Tensor exchange(const GroupHandle& group, const at::Tensor& input, int64_t cut, int64_t joined) {
  const auto parts = by_ranks(group, input, cut);
  auto all = at::empty_like(parts);
  auto out = all.view({-1});
  auto in = parts.view({-1});
  std::vector<int64_t> equal;
  group->alltoall_base(out, in, equal, equal)->wait();
  return all.movedim(0, joined).flatten(joined, joined + 1).contiguous();
}

at::Tensor run(
    const GroupHandle& group,
    const at::Tensor& input,
    Move move,
    int64_t dim,
    int64_t other,
    bool may_overwrite) {
  at::NoGradGuard no_grad;
  switch (move) {
    case Move::Nothing:
      return input.alias();
    case Move::Sum:
      return sum(group, input, may_overwrite);
    case Move::Part:
      return part(group, input, dim);
    case Move::Gather:
      return gather(group, input, dim);
    case Move::SumPart:
      return sum_part(group, input, dim);
    case Move::Exchange:
      return exchange(group, input, dim, other);
  }
  TORCH_CHECK(false, "there is no such edge of a region");
}

// What is done forward, and with the gradient on its way back.
struct Moves {
  Move forward;
  Move backward;
};

Moves moves_of(RegionEdge edge) {
  switch (edge) {
    case RegionEdge::Copy:
      return {Move::Nothing, Move::Sum};
    case RegionEdge::Reduce:
      return {Move::Sum, Move::Nothing};
    case RegionEdge::Scatter:
      return {Move::Part, Move::Gather};
    case RegionEdge::Gather:
      return {Move::Gather, Move::Part};
    case RegionEdge::GatherSequence:
      return {Move::Gather, Move::SumPart};
    case RegionEdge::ReduceScatterSequence:
      return {Move::SumPart, Move::Gather};
    case RegionEdge::AllToAll:
      return {Move::Exchange, Move::Exchange};
  }
  TORCH_CHECK(false, "there is no such edge of a region");
}

void check_first_gradient() {
  TORCH_CHECK(
      !at::GradMode::is_enabled(),
      "the gradient of a region's edge would have a graph (`create_graph`): gradients of gradients are not supported ",
      "where ranks compute a layer together");
}

struct Edge : public torch::autograd::Function<Edge> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& input,
      const GroupHandle& group,
      int64_t edge,
      int64_t dim,
      int64_t other) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    context->saved_data["edge"] = edge;
    context->saved_data["dim"] = dim;
    context->saved_data["other"] = other;
    return run(group, input, moves_of(static_cast<RegionEdge>(edge)).forward, dim, other, /*may_overwrite=*/false);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_first_gradient();
    check_not_fork("a process group");
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    const auto edge = static_cast<RegionEdge>(context->saved_data["edge"].toInt());
    // An all-to-all goes back with its dimensions exchanged.
    const auto dim = context->saved_data["dim"].toInt();
    const auto other = context->saved_data["other"].toInt();
    const bool swaps = edge == RegionEdge::AllToAll;
    const auto move = moves_of(edge).backward;
    const auto found = run(
        group, gradients[0], move, swaps ? other : dim, swaps ? dim : other, /*may_overwrite=*/true);
    // A handle of its own: a group's thread may hold the other one a little longer, and autograd copies a gradient that
    // has two handles where it accumulates it.
    return {found.detach(), {}, {}, {}, {}};
  }
};

at::Tensor exchange_rows(
    const GroupHandle& group, const at::Tensor& input, std::vector<int64_t> send, std::vector<int64_t> receive) {
  at::NoGradGuard no_grad;
  auto sizes = input.sizes().vec();
  sizes[0] = std::accumulate(receive.begin(), receive.end(), int64_t{0});
  auto out = at::empty(sizes, input.options());
  auto in = input.contiguous();
  group->alltoall_base(out, in, receive, send)->wait();
  return out;
}

struct ExchangeRows : public torch::autograd::Function<ExchangeRows> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& input,
      const GroupHandle& group,
      std::vector<int64_t> send,
      std::vector<int64_t> receive) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    context->saved_data["send"] = send;
    context->saved_data["receive"] = receive;
    return exchange_rows(group, input, std::move(send), std::move(receive));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_first_gradient();
    check_not_fork("a process group");
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(
        context->saved_data["group"].toCapsule());
    auto send = context->saved_data["send"].toIntVector();
    auto receive = context->saved_data["receive"].toIntVector();
    return {exchange_rows(group, gradients[0], std::move(receive), std::move(send)), {}, {}, {}};
  }
};

struct ScaleGradient : public torch::autograd::Function<ScaleGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, double factor) {
    context->saved_data["factor"] = factor;
    return input.view_as(input);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0].mul(context->saved_data["factor"].toDouble()), {}};
  }
};

} // namespace regions

std::unique_ptr<Tensor> region_scale_gradient(const Tensor& input, double factor) {
  return std::make_unique<Tensor>(regions::ScaleGradient::apply(input, factor));
}

std::unique_ptr<Tensor> region_exchange_rows(
    const Group& group,
    const Tensor& input,
    rust::Slice<const int64_t> send_rows,
    rust::Slice<const int64_t> receive_rows) {
  return std::make_unique<Tensor>(regions::ExchangeRows::apply(
      input,
      group.live(),
      std::vector<int64_t>(send_rows.begin(), send_rows.end()),
      std::vector<int64_t>(receive_rows.begin(), receive_rows.end())));
}

std::unique_ptr<Tensor> region_edge(
    const Group& group, const Tensor& input, RegionEdge edge, int64_t dim, int64_t other) {
  return std::make_unique<Tensor>(
      regions::Edge::apply(input, group.live(), static_cast<int64_t>(edge), dim, other));
}

} // namespace brigade
