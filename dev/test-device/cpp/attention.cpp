// Fused attention of GPUs made of host memory: one operator each for the flash and the memory-efficient kernel, computed
// by plain operators in float32. They keep the mask of dropout, for the backward, in place of the generator's state.
#include "fake_gpu.h"

#include <ATen/SDPBackend.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

namespace brigade::fake_gpu {
namespace {

using at::Tensor;

struct Weights {
  Tensor logits_sum; // logarithm of the sum of exponentials, [batch, heads, queries]
  Tensor weights; // softmax, [batch, heads, queries, keys]
};

struct Inputs {
  Tensor q, k, v;
  double scale;

  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale)
      : q(q.to(at::kFloat)),
        k(k.to(at::kFloat)),
        v(v.to(at::kFloat)),
        scale(scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))) {}

  Weights weights(const std::optional<Tensor>& bias, bool causal) const {
    auto scores = q.matmul(k.transpose(-2, -1)).mul_(scale);
    if (bias && bias->defined()) {
      scores = scores + bias->to(at::kFloat);
    }
    if (causal) {
      const auto after = at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).triu(1);
      scores = scores.masked_fill(after, -std::numeric_limits<float>::infinity());
    }
    return {scores.logsumexp(-1), scores.softmax(-1)};
  }
};

// As the kernels lay out their results: the heads of a token side by side.
Tensor by_tokens(const Tensor& tensor, at::ScalarType type) {
  return tensor.to(type).transpose(1, 2).contiguous().transpose(1, 2);
}

// Plain operators below autograd and autocast, which are one launch of a real GPU.
struct OneLaunch {
  explicit OneLaunch(const char* name) {
    enter_in_account(name, 0);
    nested.emplace();
  }

  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{at::autocast_dispatch_keyset};
  std::optional<Nested> nested;
};

struct Result {
  Tensor output, logits_sum, keep;
};

Result attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, double dropout, bool causal,
    std::optional<double> scale) {
  const Inputs inputs(q, k, v, scale);
  auto [logits_sum, weights] = inputs.weights(bias, causal);
  auto keep = at::empty({0}, q.options().dtype(at::kBool));
  if (dropout > 0) {
    keep = at::empty_like(weights, weights.options().dtype(at::kBool)).bernoulli_(1 - dropout);
    weights = weights.mul(keep).div_(1 - dropout);
  }
  return {by_tokens(weights.matmul(inputs.v), q.scalar_type()), logits_sum, keep};
}

// Gradients of queries, keys, values and of the scores before the scale, which are those of the bias.
std::array<Tensor, 4> attend_backward(
    const Tensor& upstream, const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias,
    const Tensor& keep, double dropout, bool causal, std::optional<double> scale) {
  const Inputs inputs(q, k, v, scale);
  const auto weights = inputs.weights(bias, causal).weights;
  const auto dropped = [&](const Tensor& of) { return dropout > 0 ? of.mul(keep).div_(1 - dropout) : of; };
  const auto out = upstream.to(at::kFloat);
  const auto dv = dropped(weights).transpose(-2, -1).matmul(out);
  const auto of_weights = dropped(out.matmul(inputs.v.transpose(-2, -1)));
  const auto scores = weights.mul(of_weights - (weights * of_weights).sum(-1, true));
  const auto dq = scores.matmul(inputs.k).mul_(inputs.scale);
  const auto dk = scores.transpose(-2, -1).matmul(inputs.q).mul_(inputs.scale);
  return {
      by_tokens(dq, q.scalar_type()), by_tokens(dk, k.scalar_type()), by_tokens(dv, v.scalar_type()),
      scores.to(q.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool,
    std::optional<double> scale) {
  TORCH_CHECK(
      q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16,
      "FlashAttention only support fp16 and bf16 data type");
  TORCH_CHECK(q.size(3) % 8 == 0 && q.size(3) <= 256, "FlashAttention: the head size is ", q.size(3));
  OneLaunch launch("aten::_scaled_dot_product_flash_attention");
  auto [output, logits_sum, keep] = attend(q, k, v, std::nullopt, dropout, causal, scale);
  return {output, logits_sum, Tensor(), Tensor(), q.size(2), k.size(2), keep, Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& upstream, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor& keep,
    const Tensor&, std::optional<double> scale) {
  OneLaunch launch("aten::_scaled_dot_product_flash_attention_backward");
  auto [dq, dk, dv, scores] = attend_backward(upstream, q, k, v, std::nullopt, keep, dropout, causal, scale);
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool, double dropout,
    bool causal, bool, std::optional<double> scale) {
  TORCH_CHECK(q.size(3) % 8 == 0 && q.size(3) <= 128, "cuDNN's attention: the head size is ", q.size(3));
  OneLaunch launch("aten::_scaled_dot_product_cudnn_attention");
  auto [output, logits_sum, keep] = attend(q, k, v, bias, dropout, causal, scale);
  return {output, logits_sum, Tensor(), Tensor(), q.size(2), k.size(2), keep, Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& upstream, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&,
    const Tensor& keep, const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool causal, std::optional<double> scale) {
  OneLaunch launch("aten::_scaled_dot_product_cudnn_attention_backward");
  auto [dq, dk, dv, scores] = attend_backward(upstream, q, k, v, std::nullopt, keep, dropout, causal, scale);
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool, double dropout,
    bool causal, std::optional<double> scale) {
  TORCH_CHECK(q.size(1) == k.size(1), "the memory-efficient kernel has no grouped heads");
  OneLaunch launch("aten::_scaled_dot_product_efficient_attention");
  auto [output, logits_sum, keep] = attend(q, k, v, bias, dropout, causal, scale);
  return {output, logits_sum, keep, at::empty({0}, q.options().dtype(at::kLong))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& upstream, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor& keep, const Tensor&, double dropout, std::array<bool, 4> wanted, bool causal,
    std::optional<double> scale) {
  if (!upstream.defined()) {
    return {};
  }
  OneLaunch launch("aten::_scaled_dot_product_efficient_attention_backward");
  auto [dq, dk, dv, scores] = attend_backward(upstream, q, k, v, bias, keep, dropout, causal, scale);
  return {dq, dk, dv, wanted[3] && bias.defined() ? at::sum_to(scores, bias.sizes()) : Tensor()};
}

// Fused attention is in the account as on a GPU. Without an account it is plain operators, which have gradients of
// gradients.
int64_t choice(
    const Tensor& q, const Tensor& k, const Tensor&, const std::optional<Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const bool is_short = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  if (!account_is_open() || q.scalar_type() == at::kDouble || q.size(1) != k.size(1)) {
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  return static_cast<int64_t>(
      is_short && !mask ? at::SDPBackend::flash_attention : at::SDPBackend::efficient_attention);
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_fused_sdp_choice", TORCH_FN(choice));
  library.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
  library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
  library.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
  library.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
  library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
  library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
}

}  // namespace brigade::fake_gpu
