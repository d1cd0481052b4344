#include "brigade-torch/src/bridge.rs.h"

#include "device.h"
#include "exponential.h"
#include "kernels/products.h"
#include "native_bf16.h"
#include "philox.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Queries that are looked at together: their scores with all keys are what exists at a time, in each thread.
constexpr int64_t kQueries = 128;
// Sums that go side by side, so that they are vectors.
constexpr int64_t kScoreLanes = 32;

// The sum of f(0) to f(count - 1), in the same order on every processor.
template <typename F>
BRIGADE_INLINE float sum_in_lanes(int64_t count, const F& f) {
  float lanes[kScoreLanes] = {};
  const int64_t whole = count - count % kScoreLanes;
  for (int64_t at = 0; at < whole; at += kScoreLanes) {
    for (int64_t lane = 0; lane < kScoreLanes; ++lane) {
      lanes[lane] += f(at + lane);
    }
  }
  for (int64_t at = whole; at < count; ++at) {
    lanes[at - whole] += f(at);
  }
  float sum = 0;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

// NaN is not the largest: it comes back in the sum of the powers.
BRIGADE_INLINE float largest_of(const float* values, int64_t count) {
  float lanes[kScoreLanes];
  std::fill(lanes, lanes + kScoreLanes, -std::numeric_limits<float>::infinity());
  const int64_t whole = count - count % kScoreLanes;
  for (int64_t at = 0; at < whole; at += kScoreLanes) {
    for (int64_t lane = 0; lane < kScoreLanes; ++lane) {
      lanes[lane] = values[at + lane] > lanes[lane] ? values[at + lane] : lanes[lane];
    }
  }
  for (int64_t at = whole; at < count; ++at) {
    lanes[at - whole] = std::max(lanes[at - whole], values[at]);
  }
  return *std::max_element(lanes, lanes + kScoreLanes);
}

// Which keys a query sees, and what is added to its scores. One of the two is there, or none.
struct MaskRow {
  const bool* seen = nullptr;
  const float* added = nullptr;
};

// Scores of products: scaled, masked; those from `visible` on are of keys that the query does not see.
BRIGADE_INLINE void finish_scores(
    float* scores, int64_t visible, int64_t count, float scale, const MaskRow& mask) {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  if (mask.seen != nullptr) {
    for (int64_t at = 0; at < visible; ++at) {
      scores[at] = mask.seen[at] ? scores[at] * scale : kHidden;
    }
  } else if (mask.added != nullptr) {
    for (int64_t at = 0; at < visible; ++at) {
      scores[at] = scores[at] * scale + mask.added[at];
    }
  } else {
    for (int64_t at = 0; at < visible; ++at) {
      scores[at] *= scale;
    }
  }
  std::fill(scores + visible, scores + count, kHidden);
}

// Calls it with the first place of a tile of a row, how many places it has, and their factors.
template <typename F>
BRIGADE_INLINE void each_tile(const Dropping& dropping, uint64_t row, int64_t count, const F& run) {
  float factors[kPhiloxTile];
  for (int64_t at = 0; at < count; at += kPhiloxTile) {
    dropping.factors(row, static_cast<uint32_t>(at / kPhiloxTile), factors);
    run(at, std::min(kPhiloxTile, count - at), factors);
  }
}

// Products become weights, with dropout, in place. The logarithm of the sum of the powers, which is infinite
// for a query that sees no key: its weights are 0.
BRIGADE_EVERY_CPU float weigh(
    float* scores, int64_t visible, int64_t count, float scale, const MaskRow& mask,
    const Dropping& dropping, uint64_t row) {
  finish_scores(scores, visible, count, scale, mask);
  const float largest = largest_of(scores, count);
  if (largest == -std::numeric_limits<float>::infinity()) {
    bool any_nan = false;
    for (int64_t at = 0; at < count; ++at) {
      any_nan |= scores[at] != scores[at];
    }
    if (!any_nan) {
      std::fill(scores, scores + count, 0.0f);
      return std::numeric_limits<float>::infinity();
    }
  }
  for (int64_t at = 0; at < count; ++at) {
    scores[at] = exponential(scores[at] - largest);
  }
  const float sum = sum_in_lanes(count, [&](int64_t at) { return scores[at]; });
  const float inverse = 1 / sum;
  if (dropping.drops()) {
    each_tile(dropping, row, count, [&](int64_t from, int64_t size, const float* factors) {
      for (int64_t at = 0; at < size; ++at) {
        scores[from + at] *= inverse * factors[at];
      }
    });
  } else {
    for (int64_t at = 0; at < count; ++at) {
      scores[at] *= inverse;
    }
  }
  return largest + std::log(sum);
}

// In the backward: products become weights with dropout, and gradients of those the gradients of the products.
// `together` is the product of an output and its gradient.
BRIGADE_EVERY_CPU void weigh_gradients(
    float* scores, float* gradients, int64_t visible, int64_t count, float scale,
    const MaskRow& mask, float log_sum, float together, const Dropping& dropping, uint64_t row) {
  finish_scores(scores, visible, count, scale, mask);
  const auto tile = [&](int64_t from, int64_t size, const float* factors) {
    for (int64_t at = from; at < from + size; ++at) {
      const float factor = factors == nullptr ? 1.0f : factors[at - from];
      // Rounding can make it a little more than 0.
      const float apart = scores[at] - log_sum;
      const float weight = exponential(apart > 0 ? 0.0f : apart);
      scores[at] = weight * factor;
      gradients[at] = weight * (gradients[at] * factor - together) * scale;
    }
  };
  if (dropping.drops()) {
    each_tile(dropping, row, count, tile);
  } else {
    tile(0, count, nullptr);
  }
}

BRIGADE_EVERY_CPU float product_of_rows(const float* one, const float* other, int64_t count) {
  return sum_in_lanes(count, [&](int64_t at) { return one[at] * other[at]; });
}

// What forward and backward have in common.
struct Problem {
  at::Tensor q, k, v; // [batch, heads, length, width], the last two perhaps with fewer heads
  at::Tensor mask; // [batch, heads, queries, keys] or undefined
  int64_t batch, heads, queries, width, groups, keys, out_width;
  bool causal;
  float scale;
  Dropping dropping;

  Problem(
      const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
      bool causal, double scale, const Dropping& dropping)
      : q(q),
        k(k),
        v(v),
        mask(mask),
        batch(q.size(0)),
        heads(q.size(1)),
        queries(q.size(2)),
        width(q.size(3)),
        groups(k.size(1)),
        keys(k.size(2)),
        out_width(v.size(3)),
        causal(causal),
        scale(static_cast<float>(scale)),
        dropping(dropping) {}

  int64_t blocks() const {
    return (queries + kQueries - 1) / kQueries;
  }

  int64_t in_block(int64_t block) const {
    return std::min(kQueries, queries - block * kQueries);
  }

  // Keys that a block of queries sees, at most; a query of it.
  int64_t keys_of_block(int64_t block) const {
    return causal ? std::min(keys, block * kQueries + in_block(block)) : keys;
  }
  int64_t keys_of(int64_t query) const {
    return causal ? std::min(keys, query + 1) : keys;
  }

  uint64_t row(int64_t b, int64_t head, int64_t query) const {
    return static_cast<uint64_t>((b * heads + head) * queries + query);
  }

  MaskRow mask_row(int64_t b, int64_t head, int64_t query) const {
    if (!mask.defined()) {
      return {};
    }
    const int64_t at = b * mask.stride(0) + head * mask.stride(1) + query * mask.stride(2);
    if (mask.scalar_type() == at::kBool) {
      return {mask.const_data_ptr<bool>() + at, nullptr};
    }
    return {nullptr, mask.const_data_ptr<float>() + at};
  }

  // Of one batch and head, as matrices of float.
  at::Tensor q_of(int64_t b, int64_t head, int64_t block) const {
    return q.select(0, b).select(0, head).narrow(0, block * kQueries, in_block(block)).to(at::kFloat);
  }
  at::Tensor k_of(int64_t b, int64_t head, int64_t count) const {
    return k.select(0, b).select(0, head / (heads / groups)).narrow(0, 0, count).to(at::kFloat);
  }
  at::Tensor v_of(int64_t b, int64_t head, int64_t count) const {
    return v.select(0, b).select(0, head / (heads / groups)).narrow(0, 0, count).to(at::kFloat);
  }
};

// [batch, heads, length, width], which lies in memory as [batch, length, heads, width]: as linear layers make
// and take it.
at::Tensor heads_inside(
    int64_t batch, int64_t heads, int64_t length, int64_t width, const at::TensorOptions& options) {
  return at::empty({batch, length, heads, width}, options).transpose(1, 2);
}

// Threads do not take over from the one that starts them that operations are neither recorded nor cast.
struct PlainOperations {
  at::AutoDispatchBelowADInplaceOrView not_recorded;
  c10::impl::ExcludeDispatchKeyGuard not_cast{c10::autocast_dispatch_keyset};
};

// [keys, queries' rows] of memory, seen as a matrix.
at::Tensor matrix(const at::Tensor& memory, int64_t rows, int64_t columns) {
  return memory.narrow(0, 0, rows * columns).view({rows, columns});
}

std::pair<at::Tensor, at::Tensor> attend(const Problem& on) {
  auto out = heads_inside(on.batch, on.heads, on.queries, on.out_width, on.q.options());
  auto log_sums = at::empty({on.batch, on.heads, on.queries}, on.q.options().dtype(at::kFloat));
  float* logs = log_sums.mutable_data_ptr<float>();
  const int64_t blocks = on.blocks();
  at::parallel_for(0, on.batch * on.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    const PlainOperations plain;
    const auto memory = at::empty({kQueries * on.keys}, log_sums.options());
    for (int64_t task = begin; task < end; ++task) {
      // Long blocks first would be even, but they lie together: each thread has some of all.
      const int64_t b = task / blocks / on.heads, head = task / blocks % on.heads;
      const int64_t block = task % blocks;
      const int64_t count = on.keys_of_block(block), rows = on.in_block(block);
      auto scores = matrix(memory, rows, count);
      at::mm_out(scores, on.q_of(b, head, block), on.k_of(b, head, count).t());
      float* at = scores.mutable_data_ptr<float>();
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t query = block * kQueries + i;
        const auto row = on.row(b, head, query);
        logs[row] = weigh(
            at + i * count, on.keys_of(query), count, on.scale, on.mask_row(b, head, query),
            on.dropping, row);
      }
      auto to = out.select(0, b).select(0, head).narrow(0, block * kQueries, rows);
      if (to.scalar_type() == at::kFloat) {
        at::mm_out(to, scores, on.v_of(b, head, count));
      } else {
        to.copy_(scores.mm(on.v_of(b, head, count)));
      }
    }
  });
  return {out, log_sums};
}

std::array<at::Tensor, 3> attend_backward(
    const Problem& on, const at::Tensor& out, const at::Tensor& log_sums,
    const at::Tensor& gradient) {
  const auto floats = log_sums.options();
  auto dq = heads_inside(on.batch, on.heads, on.queries, on.width, on.q.options());
  auto dk = heads_inside(on.batch, on.groups, on.keys, on.width, on.k.options());
  auto dv = heads_inside(on.batch, on.groups, on.keys, on.out_width, on.v.options());
  const float* logs = log_sums.const_data_ptr<float>();
  const int64_t shared = on.heads / on.groups;
  at::parallel_for(0, on.batch * on.groups, 1, [&](int64_t begin, int64_t end) {
    const PlainOperations plain;
    const auto score_memory = at::empty({kQueries * on.keys}, floats);
    const auto gradient_memory = at::empty({kQueries * on.keys}, floats);
    const auto of_keys = at::empty({on.keys, on.width}, floats);
    const auto of_values = at::empty({on.keys, on.out_width}, floats);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / on.groups, group = task % on.groups;
      of_keys.zero_();
      of_values.zero_();
      for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        for (int64_t block = 0; block < on.blocks(); ++block) {
          const int64_t count = on.keys_of_block(block), rows = on.in_block(block);
          const auto q = on.q_of(b, head, block), k = on.k_of(b, head, count);
          const auto block_of = [&](const at::Tensor& tensor) {
            return tensor.select(0, b).select(0, head).narrow(0, block * kQueries, rows);
          };
          const auto dy = block_of(gradient).to(at::kFloat).contiguous();
          const auto y = block_of(out).to(at::kFloat).contiguous();
          auto scores = matrix(score_memory, rows, count);
          auto gradients = matrix(gradient_memory, rows, count);
          at::mm_out(scores, q, k.t());
          at::mm_out(gradients, dy, on.v_of(b, head, count).t());
          float* score = scores.mutable_data_ptr<float>();
          float* of_score = gradients.mutable_data_ptr<float>();
          for (int64_t i = 0; i < rows; ++i) {
            const int64_t query = block * kQueries + i;
            const auto row = on.row(b, head, query);
            const float together = product_of_rows(
                dy.const_data_ptr<float>() + i * on.out_width,
                y.const_data_ptr<float>() + i * on.out_width, on.out_width);
            weigh_gradients(
                score + i * count, of_score + i * count, on.keys_of(query), count, on.scale,
                on.mask_row(b, head, query), logs[row], together, on.dropping, row);
          }
          of_values.narrow(0, 0, count).addmm_(scores.t(), dy);
          of_keys.narrow(0, 0, count).addmm_(gradients.t(), q);
          auto to = block_of(dq);
          if (to.scalar_type() == at::kFloat) {
            at::mm_out(to, gradients, k);
          } else {
            to.copy_(gradients.mm(k));
          }
        }
      }
      dk.select(0, b).select(0, group).copy_(of_keys);
      dv.select(0, b).select(0, group).copy_(of_values);
    }
  });
  return {dq, dk, dv};
}

struct Attention : public torch::autograd::Function<Attention> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const std::optional<at::Tensor>& mask, bool causal, double scale, double dropout,
      int64_t seed) {
    RECORD_FUNCTION("brigade::attention", {});
    const Dropping dropping(dropout, static_cast<uint64_t>(seed));
    const auto [out, log_sums] =
        attend(Problem(q, k, v, mask.value_or(at::Tensor()), causal, scale, dropping));
    context->save_for_backward({q, k, v, mask.value_or(at::Tensor()), out, log_sums});
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    context->saved_data["dropout"] = dropout;
    context->saved_data["seed"] = seed;
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::attention_backward", {});
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "attention has no gradients of gradients (create_graph): compute it from matmul and softmax");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const Dropping dropping(data["dropout"].toDouble(), static_cast<uint64_t>(data["seed"].toInt()));
    const Problem problem(
        saved[0], saved[1], saved[2], saved[3], data["causal"].toBool(), data["scale"].toDouble(),
        dropping);
    auto [dq, dk, dv] = attend_backward(problem, saved[4], saved[5], gradients[0]);
    variable_list out(8);
    out[0] = std::move(dq);
    out[1] = std::move(dk);
    out[2] = std::move(dv);
    return out;
  }
};

// With rows whose values lie one after another.
at::Tensor with_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

// Head sizes that flash and the memory-efficient kernel take.
constexpr int64_t kHeadMultiple = 8;
// Beyond it flash's backward has no dropout on some GPUs.
constexpr int64_t kLargestFlashHead = 192;
// Beyond it cuDNN has kernels on some GPUs only.
constexpr int64_t kLargestCudnnHead = 128;

at::Tensor with_head_padding(const at::Tensor& tensor) {
  const int64_t over = tensor.size(3) % kHeadMultiple;
  return over == 0 ? tensor : at::constant_pad_nd(tensor, {0, kHeadMultiple - over});
}

// The mask as the memory-efficient kernel reads it: added to the scores, in their type, with rows that begin at multiples
// of 16 values.
at::Tensor as_bias(const at::Tensor& mask, const at::Tensor& q, int64_t keys) {
  constexpr int64_t kRow = 16;
  auto bias = mask;
  if (mask.scalar_type() == at::kBool) {
    bias = at::zeros(mask.sizes(), q.options())
               .masked_fill_(mask.logical_not(), -std::numeric_limits<double>::infinity());
  }
  bias = bias.to(q.scalar_type());
  if (bias.size(-1) != keys) {
    auto sizes = bias.sizes().vec();
    sizes.back() = keys;
    bias = bias.expand(sizes).contiguous();
  }
  if (keys % kRow != 0) {
    bias = at::constant_pad_nd(bias, {0, kRow - keys % kRow}).narrow(-1, 0, keys);
  }
  return bias.expand({q.size(0), q.size(1), q.size(2), keys});
}

// Operands whose kernel is chosen by measurement: those that flash attention and cuDNN's take both.
struct MeasuredAttention {
  at::Tensor q, k, v;
  const AttentionOptions& options;
  double scale;

  // The kernel that libtorch chooses and the other one. Nothing if only one of them can be used.
  std::optional<std::array<at::SDPBackend, 2>> pair() const {
    constexpr auto kFlash = at::SDPBackend::flash_attention, kCudnn = at::SDPBackend::cudnn_attention;
    const auto& settings = at::globalContext();
    const bool is_taken_by_both = q.size(3) == v.size(3) && q.size(3) % kHeadMultiple == 0 &&
        q.size(3) <= kLargestCudnnHead && q.size(1) == k.size(1) && settings.userEnabledFlashSDP() &&
        settings.userEnabledCuDNNSDP();
    if (!is_taken_by_both) {
      return std::nullopt;
    }
    const auto own = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
        q, k, v, std::nullopt, options.dropout, options.causal, scale, /*enable_gqa=*/false));
    if (own != kFlash && own != kCudnn) {
      return std::nullopt;
    }
    return std::array{own, own == kFlash ? kCudnn : kFlash};
  }

  bool records() const {
    return at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  }

  std::string key() const {
    const auto numbers = [](const at::Tensor& t) { return c10::str(t.sizes(), t.strides()); };
    return c10::str(
        "attention ", q.scalar_type(), ' ', numbers(q), ' ', numbers(k), ' ', numbers(v),
        options.causal ? " causal" : "", records() ? " trained" : "");
  }

  at::Tensor by(at::SDPBackend kernel) const {
    if (kernel == at::SDPBackend::flash_attention) {
      return std::get<0>(at::_scaled_dot_product_flash_attention(
          q, k, v, options.dropout, options.causal, /*return_debug_mask=*/false, scale));
    }
    return std::get<0>(at::_scaled_dot_product_cudnn_attention(
        q, k, v, std::nullopt, /*compute_log_sumexp=*/records(), options.dropout, options.causal,
        /*return_debug_mask=*/false, scale));
  }

  // Computes the forward and the backward by a kernel, and drops the results.
  void train_by(at::SDPBackend kernel) const {
    const at::AutoGradMode enabled(true);
    const auto leaf = [](const at::Tensor& t) { return t.detach().requires_grad_(); };
    const variable_list leaves{leaf(q), leaf(k), leaf(v)};
    const auto output = MeasuredAttention{leaves[0], leaves[1], leaves[2], options, scale}.by(kernel);
    torch::autograd::grad({output}, leaves, {output.detach()});
  }

  // Nothing if there is nothing to choose.
  std::optional<at::Tensor> by_the_fastest() const {
    auto* const meter = kernels::products(q.device());
    const auto both = meter == nullptr ? std::nullopt : pair();
    auto* const choice = both ? meter->choice(key(), /*candidates=*/2, /*unmeasured=*/0) : nullptr;
    if (choice == nullptr) {
      return std::nullopt;
    }
    at::Tensor output;
    const bool is_trained = records();
    choice->run(
        *meter, q.device(), [&](int candidate) { output = by(both->at(candidate)); },
        [&](int candidate) {
          if (is_trained) {
            train_by(both->at(candidate));
          }
        });
    return output;
  }
};

// Attention of a GPU by the kernel, for operands of 16 bits.
at::Tensor attend_by(
    AttentionKernel kernel, const at::Tensor& q, at::Tensor k, at::Tensor v,
    const std::optional<at::Tensor>& mask, const AttentionOptions& options, double scale) {
  // The gradient of a view is a pass of its own.
  const auto without_padding = [width = v.size(3)](const at::Tensor& out) {
    return out.size(3) == width ? out : out.narrow(3, 0, width);
  };
  if (kernel == AttentionKernel::Flash) {
    return without_padding(std::get<0>(at::_scaled_dot_product_flash_attention(
        with_head_padding(q), with_head_padding(k), with_head_padding(v), options.dropout, options.causal,
        /*return_debug_mask=*/false, scale)));
  }
  if (q.size(1) != k.size(1)) {
    const int64_t queries_of_a_key = q.size(1) / k.size(1);
    k = k.repeat_interleave(queries_of_a_key, 1);
    v = v.repeat_interleave(queries_of_a_key, 1);
  }
  const auto bias = mask ? std::optional(as_bias(*mask, q, k.size(2))) : std::nullopt;
  const bool records = at::GradMode::is_enabled() &&
      (q.requires_grad() || k.requires_grad() || v.requires_grad() || (mask && mask->requires_grad()));
  return without_padding(std::get<0>(at::_scaled_dot_product_efficient_attention(
      with_head_padding(q), with_head_padding(k), with_head_padding(v), bias,
      /*compute_log_sumexp=*/records, options.dropout, options.causal, scale)));
}

} // namespace

AttentionKernel attention_kernel(const AttentionCall& call) noexcept {
  const double sixteenths = call.dropout * 16;
  const bool is_exact = sixteenths == std::floor(sixteenths);
  // cuDNN has 16-bit kernels alone, from Ampere on.
  if (is_exact || !call.sixteen_bits || !call.ampere) {
    return AttentionKernel::Libtorch;
  }
  const bool fits_flash = !call.masked && !call.causal_rectangle &&
      call.head_size == call.value_size && call.head_size <= kLargestFlashHead;
  return fits_flash ? AttentionKernel::Flash : AttentionKernel::Efficient;
}

std::unique_ptr<Tensor> attention(
    const Tensor& queries,
    const Tensor& keys,
    const Tensor& values,
    rust::Slice<const TensorRef> mask,
    const AttentionOptions& options) {
  const at::Tensor &q = queries, &k = keys, &v = values;
  auto given = optional_handle(mask);
  const bool is_shaped = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(0) == q.size(0) &&
      v.size(0) == q.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2) &&
      k.size(3) == q.size(3) && k.size(1) > 0 && q.size(1) % k.size(1) == 0;
  TORCH_CHECK_VALUE(
      is_shaped, "queries are ", q.sizes(), ", keys ", k.sizes(), ", values ", v.sizes(),
      ", expected [batch, heads, length, width], with a divisor of the heads for keys and values");
  TORCH_CHECK_VALUE(
      !options.causal || !given, "expected a mask or causal attention, found both: build one mask");
  TORCH_CHECK_VALUE(
      options.dropout >= 0 && options.dropout <= 1, "the probability of dropout is ",
      options.dropout, ", expected 0 to 1");
  const auto device = q.device();
  auto type = q.scalar_type();
  const bool casts = at::autocast::is_autocast_enabled(device.type()) &&
      at::isFloatingType(type) && type != at::kDouble;
  if (casts) {
    type = at::autocast::get_autocast_dtype(device.type());
  }
  const auto is_mine = [&](const at::Tensor& t) {
    return t.device().is_cpu() && t.layout() == at::kStrided && at::isFloatingType(t.scalar_type()) &&
        t.scalar_type() != at::kDouble && (casts || t.scalar_type() == type);
  };
  // libtorch's own is as good without dropout, in types that the processor has.
  const bool pays = options.dropout > 0 || product_type(type, device) != type;
  const bool mine = pays && is_mine(q) && is_mine(k) && is_mine(v) && q.numel() > 0 &&
      k.numel() > 0 && v.numel() > 0 &&
      (!given || (!given->requires_grad() && given->device().is_cpu()));
  const bool grouped = q.size(1) != k.size(1);
  const double scale =
      options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  AttentionCall call{options.dropout, type == at::kBFloat16 || type == at::kHalf, q.size(3), v.size(3),
                     given.has_value(), options.causal && q.size(2) != k.size(2), false};
  call.ampere = call.sixteen_bits && q.is_cuda() && q.numel() > 0 && k.numel() > 0 && gpu_has_bf16(q.device().index());
  const auto kernel = attention_kernel(call);
  if (kernel != AttentionKernel::Libtorch) {
    return std::make_unique<Tensor>(
        attend_by(kernel, q.to(type), k.to(type), v.to(type), given, options, scale));
  }
  // Trials with dropout would draw numbers.
  if (call.ampere && !given && !call.causal_rectangle && options.dropout == 0) {
    const auto own = [&](const at::Tensor& t) { return t.to(type); };
    if (auto output = MeasuredAttention{own(q), own(k), own(v), options, scale}.by_the_fastest()) {
      return std::make_unique<Tensor>(*std::move(output));
    }
  }
  if (!mine) {
    return std::make_unique<Tensor>(at::scaled_dot_product_attention(
        q, k, v, given, options.dropout, options.causal, scale, grouped));
  }
  if (given) {
    const auto kind = given->scalar_type() == at::kBool ? at::kBool : at::kFloat;
    given = with_rows(given->to(kind)).expand({q.size(0), q.size(1), q.size(2), k.size(2)});
    given = given->stride(3) == 1 || given->size(3) == 1 ? given : given->contiguous();
  }
  const auto seed = options.dropout > 0 ? static_cast<int64_t>(draw_seed()) : 0;
  return std::make_unique<Tensor>(Attention::apply(
      with_rows(q.to(type)), with_rows(k.to(type)), with_rows(v.to(type)), given, options.causal,
      scale, options.dropout, seed));
}

} // namespace brigade
