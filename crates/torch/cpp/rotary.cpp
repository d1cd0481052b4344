#include "brigade-torch/src/bridge.rs.h"

#include "rotary_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Values below which a second thread costs more than it saves.
constexpr int64_t kFewestOfRotation = 16384;
// Tokens of all heads that a thread rotates together: their part of the tables stays in the first-level cache.
constexpr int64_t kTokensOfBlock = 16;

// A head's second half, and its first one.
std::pair<at::Tensor, at::Tensor> swapped(const at::Tensor& x) {
  const int64_t half = x.size(-1) / 2;
  return {x.narrow(-1, half, half), x.narrow(-1, 0, half)};
}

at::Tensor by_operations(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto [second, first] = swapped(x);
  return x.mul(cos).addcmul(at::cat({second.neg(), first}, -1), sin);
}

at::Tensor backward_by_operations(
    const at::Tensor& gradient, const at::Tensor& cos, const at::Tensor& sin) {
  const auto [second, first] = swapped(gradient.mul(sin));
  return gradient.mul(cos).add(at::cat({second, first.neg()}, -1));
}

// Writes the rotation of `from` [batch, heads, tokens, width] into `to`; tables are [batch or 1, 1, tokens, width].
void rotate_all(
    const at::Tensor& from, const at::Tensor& cos, const at::Tensor& sin, bool back, const at::Tensor& to) {
  const int64_t heads = from.size(1), tokens = from.size(2), width = from.size(3);
  const int64_t blocks = (tokens + kTokensOfBlock - 1) / kTokensOfBlock;
  const int64_t fewest = std::max<int64_t>(1, kFewestOfRotation / (kTokensOfBlock * heads * width + 1));
  // Neighbours in memory one after the other.
  const bool tokens_within_heads = from.stride(2) < from.stride(1);
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, from.scalar_type(), "rotary", [&] {
    const scalar_t* const source = from.const_data_ptr<scalar_t>();
    const scalar_t* const cosines = cos.const_data_ptr<scalar_t>();
    const scalar_t* const sines = sin.const_data_ptr<scalar_t>();
    scalar_t* const target = to.mutable_data_ptr<scalar_t>();
    const auto of_table = [](const at::Tensor& table, int64_t text, int64_t token) {
      return (table.size(0) == 1 ? 0 : text * table.stride(0)) + token * table.stride(2);
    };
    const auto run = [&](int64_t text, int64_t head, int64_t token, int64_t count) {
      const int64_t axis = tokens_within_heads ? 2 : 1;
      const RotaryHeads<scalar_t> own{
          source + text * from.stride(0) + head * from.stride(1) + token * from.stride(2),
          from.stride(axis),
          target + text * to.stride(0) + head * to.stride(1) + token * to.stride(2),
          to.stride(axis),
          cosines + of_table(cos, text, token),
          tokens_within_heads ? cos.stride(2) : 0,
          sines + of_table(sin, text, token),
          tokens_within_heads ? sin.stride(2) : 0,
          count,
          width / 2};
      back ? rotate_back(own) : rotate(own);
    };
    at::parallel_for(0, from.size(0) * blocks, fewest, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t text = block / blocks, first = block % blocks * kTokensOfBlock;
        const int64_t count = std::min(kTokensOfBlock, tokens - first);
        if (tokens_within_heads) {
          for (int64_t head = 0; head < heads; ++head) {
            run(text, head, first, count);
          }
        } else {
          for (int64_t token = first; token < first + count; ++token) {
            run(text, 0, token, heads);
          }
        }
      }
    });
  });
}

at::Tensor with_whole_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

struct Rotary : public torch::autograd::Function<Rotary> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    RECORD_FUNCTION("brigade::rotary", {});
    context->save_for_backward({cos, sin});
    const auto from = with_whole_rows(x);
    auto to = from.is_non_overlapping_and_dense() ? at::empty_like(from)
                                                  : at::empty_like(from, at::MemoryFormat::Contiguous);
    rotate_all(from, cos, sin, /*back=*/false, to);
    // The gradient lies as the input does, whose views need not copy it then.
    context->saved_data["strides"] = to.strides();
    return to;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::rotary_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &cos = saved[0], &sin = saved[1];
    variable_list out(3);
    if (at::GradMode::is_enabled()) {
      out[0] = backward_by_operations(gradients[0], cos, sin);
    } else {
      const auto from = with_whole_rows(gradients[0]);
      const auto strides = context->saved_data.at("strides").toIntVector();
      out[0] = at::empty_strided(from.sizes(), strides, from.options());
      rotate_all(from, cos, sin, /*back=*/true, out[0]);
    }
    return out;
  }
};

// The loops take heads of one kind on the CPU, and tables that are the same for all heads.
bool has_loops(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto type = x.scalar_type();
  if (!x.is_cpu() || x.layout() != at::kStrided || x.dim() != 4 || x.is_neg() ||
      (type != at::kFloat && type != at::kDouble && type != at::kBFloat16)) {
    return false;
  }
  const auto is_table = [&](const at::Tensor& table) {
    return table.is_cpu() && table.layout() == at::kStrided && table.dim() == 4 && !table.is_neg() &&
        table.scalar_type() == type && (table.size(0) == 1 || table.size(0) == x.size(0)) &&
        table.size(1) == 1 && table.size(2) == x.size(2) && table.size(3) == x.size(3) &&
        !(at::GradMode::is_enabled() && table.requires_grad());
  };
  return is_table(cos) && is_table(sin);
}

} // namespace

std::unique_ptr<Tensor> rotary(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK_VALUE(
      x.dim() > 0 && x.size(-1) > 0 && x.size(-1) % 2 == 0, "the heads are ", x.sizes(),
      ", expected an even number of features in the last dimension");
  const auto own_cos = cos.to(x.scalar_type()), own_sin = sin.to(x.scalar_type());
  if (has_loops(x, own_cos, own_sin)) {
    return std::make_unique<Tensor>(
        Rotary::apply(x, with_whole_rows(own_cos), with_whole_rows(own_sin)));
  }
  return std::make_unique<Tensor>(by_operations(x, own_cos, own_sin));
}

} // namespace brigade
