#include "brigade-torch/src/bridge.rs.h"

#include "dropout.h"
#include "philox.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tile of values at their places of the whole tensor; a last one may be shorter.
template <typename T>
BRIGADE_EVERY_CPU void drop_tiles(
    const T* x, const T* residual, int64_t begin, int64_t end, int64_t count,
    const Dropping& dropping, T* y) {
  using C = at::opmath_type<T>;
  for (int64_t tile = begin; tile < end; ++tile) {
    C factors[kPhiloxTile];
    dropping.factors(static_cast<uint64_t>(tile), 0, factors);
    const int64_t at = tile * kPhiloxTile;
    const int64_t size = std::min(kPhiloxTile, count - at);
    if (residual != nullptr) {
      for (int64_t i = 0; i < size; ++i) {
        y[at + i] = static_cast<T>(
            static_cast<C>(x[at + i]) * factors[i] + static_cast<C>(residual[at + i]));
      }
    } else {
      for (int64_t i = 0; i < size; ++i) {
        y[at + i] = static_cast<T>(static_cast<C>(x[at + i]) * factors[i]);
      }
    }
  }
}

at::Tensor dropped(
    const at::Tensor& input, const std::optional<at::Tensor>& residual, const Dropping& dropping) {
  const auto x = input.contiguous();
  const auto beside = residual ? residual->contiguous() : at::Tensor();
  auto y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const int64_t tiles = (x.numel() + kPhiloxTile - 1) / kPhiloxTile;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "dropout", [&] {
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const scalar_t* added = beside.defined() ? beside.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = y.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tiles, 256, [&](int64_t begin, int64_t end) {
      drop_tiles(from, added, begin, end, x.numel(), dropping, to);
    });
  });
  return y;
}

struct Dropout : public torch::autograd::Function<Dropout> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& input, const std::optional<at::Tensor>& residual,
      double probability, int64_t seed) {
    RECORD_FUNCTION("brigade::dropout", {});
    context->saved_data["probability"] = probability;
    context->saved_data["seed"] = seed;
    context->saved_data["residual"] = residual.has_value();
    return dropped(input, residual, Dropping(probability, static_cast<uint64_t>(seed)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::dropout_backward", {});
    variable_list out(4);
    if (context->needs_input_grad(0)) {
      const double probability = context->saved_data["probability"].toDouble();
      const int64_t seed = context->saved_data["seed"].toInt();
      // Linear in its input: the gradient's gradient is the same once more.
      out[0] = at::GradMode::is_enabled()
          ? Dropout::apply(gradients[0], std::nullopt, probability, seed)
          : dropped(gradients[0], std::nullopt, Dropping(probability, static_cast<uint64_t>(seed)));
    }
    if (context->saved_data["residual"].toBool() && context->needs_input_grad(1)) {
      out[1] = gradients[0];
    }
    return out;
  }
};

} // namespace

std::unique_ptr<Tensor> dropout(
    const Tensor& input, rust::Slice<const TensorRef> residual, double probability) {
  TORCH_CHECK_VALUE(
      probability >= 0 && probability <= 1, "the probability is ", probability, ", expected 0 to 1");
  const auto beside = optional_handle(residual);
  TORCH_CHECK_VALUE(
      !beside || (beside->sizes() == input.sizes() && beside->device() == input.device()),
      "the residual is ", beside->sizes(), " (", beside->device(), "), expected ", input.sizes(),
      " on ", input.device());
  const bool mine = probability > 0 && input.device().is_cpu() && input.layout() == at::kStrided &&
      at::isFloatingType(input.scalar_type());
  if (!mine) {
    auto y = at::dropout(input, probability, /*train=*/true);
    return std::make_unique<Tensor>(beside ? y + *beside : y);
  }
  // Under autocast a sum of 16 and 32 bits is one of 32.
  const bool together = beside && beside->scalar_type() == input.scalar_type();
  const auto seed = static_cast<int64_t>(draw_seed());
  auto y = Dropout::apply(input, together ? beside : std::nullopt, probability, seed);
  return std::make_unique<Tensor>(beside && !together ? y + *beside : y);
}

at::Tensor seeds_from_gpu(const at::Device& device, int64_t count) {
  const at::NoGradGuard no_grad;
  // All 64 bits.
  return at::empty({count}, at::TensorOptions(at::kLong).device(device))
      .random_(std::numeric_limits<int64_t>::min(), std::optional<int64_t>());
}

} // namespace brigade
