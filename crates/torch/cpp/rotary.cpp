#include "brigade-torch/src/bridge.rs.h"

#include "kernels/rotary.h"
#include "rotary_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

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

// The tables do not change, so that none of their gradients is wanted.
bool are_fixed(const at::Tensor& cos, const at::Tensor& sin) {
  return !at::GradMode::is_enabled() || !(cos.requires_grad() || sin.requires_grad());
}

kernels::Program* program_for(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  return are_fixed(cos, sin) ? rotary_kernels(heads, cos, sin) : nullptr;
}

// A new tensor for the rotation of heads, which lies as they do where their memory has no gaps.
at::Tensor place_for(const at::Tensor& heads) {
  return heads.is_non_overlapping_and_dense() ? at::empty_like(heads)
                                              : at::empty_like(heads, at::MemoryFormat::Contiguous);
}

// Heads whose values are adjacent.
variable_list rotated_by_kernels(
    at::TensorList heads, const at::Tensor& cos, const at::Tensor& sin, bool back, at::TensorList places) {
  auto* program = rotary_kernels(heads[0], cos, sin);
  TORCH_CHECK(program != nullptr, "the kernels of rotary embeddings are not there any more");
  const auto part = [&](size_t index) {
    return RotaryPart{heads[index], places[index], heads[index].size(1)};
  };
  rotary_gpu(*program, part(0), heads.size() > 1 ? std::optional(part(1)) : std::nullopt, cos, sin, back);
  return places.vec();
}

// The kernels of a GPU, for queries and keys or for one of both.
struct RotaryPair : public torch::autograd::Function<RotaryPair> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& queries, const std::optional<at::Tensor>& keys,
      const at::Tensor& cos, const at::Tensor& sin) {
    RECORD_FUNCTION("brigade::rotary", {});
    context->set_materialize_grads(false);
    context->save_for_backward({cos, sin});
    std::vector<at::Tensor> heads{with_whole_rows(queries)};
    if (keys) {
      heads.push_back(with_whole_rows(*keys));
    }
    std::vector<at::Tensor> places;
    for (const auto& own : heads) {
      places.push_back(place_for(own));
    }
    // The gradient lies as the input does, whose views need not copy it then.
    context->saved_data["strides"] = places[0].strides();
    context->saved_data["key_strides"] = places.back().strides();
    return rotated_by_kernels(heads, cos, sin, /*back=*/false, places);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::rotary_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &cos = saved[0], &sin = saved[1];
    const char* const names[] = {"strides", "key_strides"};
    variable_list out(4);
    std::vector<at::Tensor> heads, places;
    std::vector<size_t> indices;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto& gradient = gradients[i];
      if (!gradient.defined()) {
        continue;
      }
      if (at::GradMode::is_enabled() || rotary_kernels(gradient, cos, sin) == nullptr) {
        const auto type = gradient.scalar_type();
        out[i] = backward_by_operations(gradient, cos.to(type), sin.to(type));
        continue;
      }
      const auto strides = context->saved_data.at(names[i]).toIntVector();
      indices.push_back(i);
      heads.push_back(with_whole_rows(gradient));
      places.push_back(at::empty_strided(gradient.sizes(), strides, gradient.options()));
    }
    if (!heads.empty()) {
      rotated_by_kernels(heads, cos, sin, /*back=*/true, places);
    }
    for (size_t i = 0; i < indices.size(); ++i) {
      out[indices[i]] = places[i];
    }
    return out;
  }
};

// All heads of a product [batch, tokens, heads * width], as [batch, heads, tokens, width].
at::Tensor heads_of(const at::Tensor& product, int64_t width) {
  return product.view({product.size(0), product.size(1), product.size(2) / width, width}).transpose(1, 2);
}

// The first heads of a product by kernels of a GPU, in place or in a new tensor with the others.
struct RotaryPacked : public torch::autograd::Function<RotaryPacked> {
  static at::Tensor forward(
      AutogradContext* context, at::Tensor product, const at::Tensor& cos, const at::Tensor& sin, int64_t heads,
      bool in_place) {
    RECORD_FUNCTION("brigade::rotary", {});
    context->save_for_backward({cos, sin});
    context->saved_data["heads"] = heads;
    if (in_place) {
      context->mark_dirty({product});
      run(product, product, heads, cos, sin, /*back=*/false);
      return product;
    }
    const auto from = product.contiguous();
    const auto to = at::empty_like(from);
    run(from, to, heads, cos, sin, /*back=*/false);
    return to;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::rotary_backward", {});
    const auto saved = context->get_saved_variables();
    const auto &cos = saved[0], &sin = saved[1];
    const int64_t heads = context->saved_data.at("heads").toInt(), width = cos.size(-1);
    variable_list out(5);
    const auto gradient = gradients[0].contiguous();
    const auto all = heads_of(gradient, width);
    if (at::GradMode::is_enabled() || rotary_kernels(all, cos, sin) == nullptr) {
      const auto type = gradient.scalar_type();
      const auto rotated = backward_by_operations(all.narrow(1, 0, heads), cos.to(type), sin.to(type));
      const auto rest = all.narrow(1, heads, all.size(1) - heads);
      out[0] = at::cat({rotated, rest}, 1).transpose(1, 2).reshape(gradient.sizes());
    } else {
      out[0] = at::empty_like(gradient);
      run(gradient, out[0], heads, cos, sin, /*back=*/true);
    }
    return out;
  }

 private:
  // In place the others are left alone.
  static void run(
      const at::Tensor& from, const at::Tensor& to, int64_t heads, const at::Tensor& cos, const at::Tensor& sin,
      bool back) {
    const int64_t width = cos.size(-1);
    const bool is_same = from.is_same(to);
    const auto part = [&](const at::Tensor& t) {
      const auto all = heads_of(t, width);
      return is_same ? all.narrow(1, 0, heads) : all;
    };
    auto* program = rotary_kernels(part(from), cos, sin);
    TORCH_CHECK(program != nullptr, "the kernels of rotary embeddings are not there any more");
    rotary_gpu(*program, {part(from), part(to), heads}, std::nullopt, cos, sin, back);
  }
};

void check_heads(const at::Tensor& x) {
  TORCH_CHECK_VALUE(
      x.dim() > 0 && x.size(-1) > 0 && x.size(-1) % 2 == 0, "the heads are ", x.sizes(),
      ", expected an even number of features in the last dimension");
}

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
  check_heads(x);
  if (program_for(x, cos, sin) != nullptr) {
    return std::make_unique<Tensor>(RotaryPair::apply(x, std::optional<at::Tensor>(), cos, sin)[0]);
  }
  const auto own_cos = cos.to(x.scalar_type()), own_sin = sin.to(x.scalar_type());
  if (has_loops(x, own_cos, own_sin)) {
    return std::make_unique<Tensor>(
        Rotary::apply(x, with_whole_rows(own_cos), with_whole_rows(own_sin)));
  }
  return std::make_unique<Tensor>(by_operations(x, own_cos, own_sin));
}

RotatedPair rotary_pair(const Tensor& queries, const Tensor& keys, const Tensor& cos, const Tensor& sin) {
  check_heads(queries);
  check_heads(keys);
  const bool match = queries.scalar_type() == keys.scalar_type() && queries.dim() == 4 && keys.dim() == 4 &&
      queries.size(0) == keys.size(0) && queries.size(2) == keys.size(2);
  if (match && program_for(queries, cos, sin) != nullptr && program_for(keys, cos, sin) != nullptr) {
    auto found = RotaryPair::apply(queries, std::optional(keys), cos, sin);
    return {std::make_unique<Tensor>(std::move(found[0])), std::make_unique<Tensor>(std::move(found[1]))};
  }
  return {rotary(queries, cos, sin), rotary(keys, cos, sin)};
}

std::unique_ptr<Tensor> rotary_packed(const Tensor& product, int64_t heads, const Tensor& cos, const Tensor& sin) {
  const int64_t width = cos.dim() > 0 ? cos.size(-1) : 0;
  TORCH_CHECK_VALUE(
      product.dim() == 3 && width > 0 && width % 2 == 0 && product.size(2) % width == 0 && heads >= 0 &&
          heads <= product.size(2) / width,
      "the product is ", product.sizes(), ", expected [batch, tokens, at least ", heads,
      " heads of an even number of features, by the tables ", width, "]");
  if (product.numel() > 0 && heads > 0 && product.layout() == at::kStrided) {
    const auto& dense = product.is_contiguous() ? product : product.contiguous();
    if (program_for(heads_of(dense, width), cos, sin) != nullptr) {
      // A leaf must keep its values, and a view's base would need a history of its own.
      const bool is_recorded = at::GradMode::is_enabled() && product.requires_grad();
      const bool in_place =
          product.is_contiguous() && !(is_recorded && (product.is_leaf() || product.is_view()));
      return std::make_unique<Tensor>(RotaryPacked::apply(product, cos, sin, heads, in_place));
    }
  }
  const auto all = product.reshape({product.size(0), product.size(1), product.size(2) / width, width});
  const auto first = all.narrow(2, 0, heads).transpose(1, 2);
  const auto rotated = heads == 0 ? first : *rotary(first, cos, sin);
  const auto rest = all.narrow(2, heads, all.size(2) - heads);
  return std::make_unique<Tensor>(at::cat({rotated.transpose(1, 2), rest}, 2).reshape(product.sizes()));
}

} // namespace brigade
