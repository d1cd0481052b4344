#include "brigade-torch/src/bridge.rs.h"

#include "activation.h"
#include "activation_loops.h"
#include "linear.h"
#include "step_kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor applied(const at::Tensor& x, int64_t activation) {
  switch (activation) {
    case kActivationGelu:
    case kActivationGeluTanh:
      return at::gelu(x, gelu_approximation(activation));
    case kActivationSilu:
      return at::silu(x);
    case kActivationMish:
      return at::mish(x);
    case kActivationRelu:
      return at::relu(x);
    case kActivationReluSquared:
      return at::relu(x).square();
    default:
      TORCH_CHECK(false, "there is no activation ", activation);
  }
}

at::Tensor defined_or_empty(const std::optional<at::Tensor>& t) {
  return t.value_or(at::Tensor());
}

// Pairs whose values, gradients and outputs stay in the first-level cache.
constexpr int64_t kPairsOfTile = 512;
// Tiles below which a second thread costs more than it saves.
constexpr int64_t kFewestTiles = 16;

// The gates and what they multiply, as matrices whose columns are adjacent.
struct PairRows {
  at::Tensor gate, up;

  explicit PairRows(const ActivationInput& input) {
    const int64_t width = input.width();
    const auto values = activation_rows(input.values);
    gate = values.narrow(1, 0, width);
    up = input.is_packed ? values.narrow(1, width, width) : activation_rows(input.up);
  }
};

// A matrix of T, read and written in float32 tile by tile: by way of a buffer where T is another type.
template <typename T>
class TiledRows {
 public:
  explicit TiledRows(const at::Tensor& rows)
      : at_(rows.defined() ? static_cast<T*>(const_cast<void*>(rows.const_data_ptr())) : nullptr),
        stride_(rows.defined() ? rows.stride(0) : 0) {}

  const float* read(int64_t row, int64_t column, int64_t count, float* buffer) const {
    const T* const from = at_ + row * stride_ + column;
    if constexpr (std::is_same_v<T, float>) {
      return from;
    } else {
      widen(from, buffer, count);
      return buffer;
    }
  }
  // Where the values of a tile go: null for a matrix that is not wanted.
  float* place(int64_t row, int64_t column, float* buffer) const {
    if constexpr (std::is_same_v<T, float>) {
      return at_ == nullptr ? nullptr : at_ + row * stride_ + column;
    } else {
      return at_ == nullptr ? nullptr : buffer;
    }
  }
  void write(int64_t row, int64_t column, int64_t count, const float* buffer) const {
    if constexpr (!std::is_same_v<T, float>) {
      if (at_ != nullptr) {
        narrow(buffer, at_ + row * stride_ + column, count);
      }
    }
  }

 private:
  T* at_;
  int64_t stride_;
};

// Calls `use` with a value of a type that the loops take.
template <typename Use>
void with_element(at::ScalarType type, const Use& use) {
  switch (type) {
    case at::kFloat:
      return use(float());
    case at::kBFloat16:
      return use(at::BFloat16());
    case at::kHalf:
      return use(at::Half());
    default:
      TORCH_CHECK(false, "there are no loops of ", type);
  }
}

// Calls `run(row, column, count)` for each tile of a matrix, on all threads. Rows without a gap between them in any of
// the matrices are one long row.
template <typename Run>
void for_each_tile(const std::vector<at::Tensor>& matrices, const Run& run) {
  int64_t rows = matrices[0].size(0), width = matrices[0].size(1);
  if (std::all_of(matrices.begin(), matrices.end(), [](const auto& t) { return !t.defined() || t.is_contiguous(); })) {
    width *= std::exchange(rows, 1);
  }
  const int64_t tiles = (width + kPairsOfTile - 1) / kPairsOfTile;
  at::parallel_for(0, rows * tiles, kFewestTiles, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t column = tile % tiles * kPairsOfTile;
      run(tile / tiles, column, std::min(kPairsOfTile, width - column));
    }
  });
}

at::Tensor paired_by_loops(const ActivationInput& input, int64_t activation) {
  const PairRows pair(input);
  const auto output = at::empty(pair.gate.sizes(), pair.gate.options());
  with_element(output.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const TiledRows<T> gates(pair.gate), ups(pair.up), outputs(output);
    for_each_tile({pair.gate, pair.up, output}, [&](int64_t row, int64_t column, int64_t count) {
      float buffers[3][kPairsOfTile];
      float* const to = outputs.place(row, column, buffers[2]);
      activate_pairs(
          static_cast<int>(activation), gates.read(row, column, count, buffers[0]),
          ups.read(row, column, count, buffers[1]), to, count);
      outputs.write(row, column, count, to);
    });
  });
  return output.view(input.output_sizes());
}

ActivationGradients differentiated_by_loops(
    const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool wants_output) {
  const PairRows pair(input);
  const auto given = doutput.reshape(pair.gate.sizes()).contiguous();
  const auto options = pair.gate.options();
  const int64_t rows = given.size(0), width = given.size(1);
  ActivationGradients out;
  out.values = at::empty({rows, input.values.size(-1)}, options);
  const auto dgate = out.values.narrow(1, 0, width);
  const auto dup = input.is_packed ? out.values.narrow(1, width, width) : at::empty({rows, width}, options);
  const auto output = wants_output ? at::empty({rows, width}, options) : at::Tensor();
  with_element(given.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const TiledRows<T> gates(pair.gate), ups(pair.up), doutputs(given), dgates(dgate), dups(dup), outputs(output);
    for_each_tile({pair.gate, pair.up, given, dgate, dup, output}, [&](int64_t row, int64_t column, int64_t count) {
      float buffers[6][kPairsOfTile];
      float* const to_gate = dgates.place(row, column, buffers[3]);
      float* const to_up = dups.place(row, column, buffers[4]);
      float* const to_output = outputs.place(row, column, buffers[5]);
      differentiate_pairs(
          static_cast<int>(activation), gates.read(row, column, count, buffers[0]),
          ups.read(row, column, count, buffers[1]), doutputs.read(row, column, count, buffers[2]), to_gate, to_up,
          to_output, count);
      dgates.write(row, column, count, to_gate);
      dups.write(row, column, count, to_up);
      outputs.write(row, column, count, to_output);
    });
  });
  const auto sizes = input.output_sizes();
  out.values = out.values.view(input.values.sizes());
  out.up = input.is_packed ? at::Tensor() : dup.view(sizes);
  out.output = wants_output ? output.view(sizes) : output;
  return out;
}

// float64, for which the loops have no vectors, and biases, which layers of a CPU add themselves, are left to
// operations.
bool has_loops_for(const ActivationInput& input) {
  const auto& values = input.values;
  const auto type = values.scalar_type();
  const auto is_plain = [&](const at::Tensor& t) {
    return t.device().is_cpu() && t.layout() == at::kStrided && !t.is_neg() && t.scalar_type() == type;
  };
  return (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && input.is_gated() &&
      !input.bias.defined() && !input.up_bias.defined() && is_plain(values) && values.dim() > 0 &&
      values.numel() > 0 && (!input.up.defined() || is_plain(input.up));
}

// An activation in one pass.
struct Activated : public torch::autograd::Function<Activated> {
  static at::Tensor forward(
      AutogradContext* context, const at::Tensor& values, const std::optional<at::Tensor>& bias,
      const std::optional<at::Tensor>& up, const std::optional<at::Tensor>& up_bias, int64_t activation, bool packed) {
    RECORD_FUNCTION("brigade::activation", {});
    const ActivationInput input{
        values, defined_or_empty(bias), defined_or_empty(up), defined_or_empty(up_bias), packed};
    context->save_for_backward({input.values, input.bias, input.up, input.up_bias});
    context->saved_data["activation"] = activation;
    context->saved_data["packed"] = packed;
    return without_base(ActivationPass(input).forward(input, activation));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::activation_backward", {});
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const ActivationInput input{saved[0], saved[1], saved[2], saved[3], data.at("packed").toBool()};
    const auto activation = data.at("activation").toInt();
    const bool recorded = at::GradMode::is_enabled();
    const ActivationPass pass(input);
    const auto doutput = gradients[0].to(input.values.scalar_type());
    auto found = recorded || !pass
        ? differentiated_by_operations(input, activation, doutput, recorded)
        : pass.backward(
              input, activation, doutput, /*may_overwrite=*/false,
              {/*output=*/false, /*biases=*/input.bias.defined() || input.up_bias.defined()});
    const auto of_bias = [](const at::Tensor& gradient, const at::Tensor& bias) {
      return bias.defined() && gradient.defined() ? gradient.to(bias.scalar_type()) : at::Tensor();
    };
    return {
        found.values, of_bias(found.bias, input.bias), found.up, of_bias(found.up_bias, input.up_bias),
        at::Tensor(), at::Tensor()};
  }
};

} // namespace

ActivationPass::ActivationPass(const ActivationInput& input)
    : program_(activation_kernels(input)), has_loops_(has_loops_for(input)) {}

at::Tensor ActivationPass::forward(const ActivationInput& input, int64_t activation) const {
  TORCH_CHECK(*this, "the kernels of activations are not there any more");
  return program_ != nullptr ? activation_forward_gpu(*program_, input, static_cast<int>(activation))
                             : paired_by_loops(input, activation);
}

ActivationGradients ActivationPass::backward(
    const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool may_overwrite,
    ActivationWishes wishes) const {
  TORCH_CHECK(*this, "the kernels of activations are not there any more");
  return program_ != nullptr ? activation_backward_gpu(
                                   *program_, input, static_cast<int>(activation), doutput, may_overwrite, wishes)
                             : differentiated_by_loops(input, activation, doutput, wishes.output);
}

const char* gelu_approximation(int64_t activation) {
  return activation == kActivationGelu ? "none" : activation == kActivationGeluTanh ? "tanh" : "";
}

at::Tensor activated_by_operations(const ActivationInput& input, int64_t activation) {
  const auto biased = [](const at::Tensor& t, const at::Tensor& bias) {
    return bias.defined() ? t + bias.to(t.scalar_type()) : t;
  };
  const auto values = biased(input.values, input.bias);
  if (!input.is_gated()) {
    return applied(values, activation);
  }
  const int64_t width = input.width();
  const auto gate = input.is_packed ? values.narrow(-1, 0, width) : values;
  const auto up = input.is_packed ? values.narrow(-1, width, width) : biased(input.up, input.up_bias);
  return applied(gate, activation).mul(up);
}

at::Tensor activated(const ActivationInput& input, int64_t activation) {
  if (!ActivationPass(input)) {
    return activated_by_operations(input, activation);
  }
  const auto optional = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return Activated::apply(
      input.values, optional(input.bias), optional(input.up), optional(input.up_bias), activation, input.is_packed);
}

ActivationGradients differentiated_by_operations(
    const ActivationInput& input, int64_t activation, const at::Tensor& doutput, bool recorded) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::AutoGradMode enabled(true);
  const auto leaf = [&](const at::Tensor& t) {
    return recorded || !t.defined() ? t : t.detach().requires_grad_();
  };
  const ActivationInput own{
      leaf(input.values), leaf(input.bias), leaf(input.up), leaf(input.up_bias), input.is_packed};
  ActivationGradients out;
  out.output = activated_by_operations(own, activation);
  variable_list inputs;
  std::vector<at::Tensor*> places;
  const std::pair<const at::Tensor*, at::Tensor*> all[] = {
      {&own.values, &out.values}, {&own.bias, &out.bias}, {&own.up, &out.up}, {&own.up_bias, &out.up_bias}};
  for (const auto& [tensor, place] : all) {
    if (tensor->defined() && tensor->requires_grad()) {
      inputs.push_back(*tensor);
      places.push_back(place);
    }
  }
  if (!inputs.empty()) {
    auto found = torch::autograd::grad(
        {out.output}, inputs, {doutput}, /*retain_graph=*/recorded, /*create_graph=*/recorded,
        /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) {
      *places[i] = std::move(found[i]);
    }
  }
  if (!recorded) {
    out.output = out.output.detach();
  }
  return out;
}

ActivationInput activation_input(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options) {
  ActivationInput input{
      values, defined_or_empty(optional_handle(bias)), defined_or_empty(optional_handle(up)),
      defined_or_empty(optional_handle(up_bias)), options.packed};
  TORCH_CHECK_VALUE(
      !options.packed || (values.dim() > 0 && values.size(-1) % 2 == 0), "the packed pair is ", values.sizes(),
      ", expected an even number of values in the last dimension");
  TORCH_CHECK_VALUE(
      !input.up.defined() || input.up.sizes() == values.sizes(), "the gate is ", values.sizes(),
      " and what it multiplies is ", input.up.defined() ? input.up.sizes() : at::IntArrayRef(),
      ", expected one shape");
  const auto check_bias = [&](const at::Tensor& offset) {
    TORCH_CHECK_VALUE(
        !offset.defined() ||
            (values.dim() > 0 && offset.dim() == 1 && offset.size(0) == values.size(-1) &&
             offset.device() == values.device()),
        "the bias is ", offset.defined() ? offset.sizes() : at::IntArrayRef(),
        ", expected a value for each of the last dimension of ", values.sizes(), " on ", values.device());
  };
  check_bias(input.bias);
  check_bias(input.up_bias);
  return input;
}

std::unique_ptr<Tensor> activation(
    const Tensor& values, rust::Slice<const TensorRef> bias, rust::Slice<const TensorRef> up,
    rust::Slice<const TensorRef> up_bias, const ActivationOptions& options) {
  return std::make_unique<Tensor>(
      activated(activation_input(values, bias, up, up_bias, options), options.activation));
}

bool activation_adds_bias(const Tensor& input) {
  const auto device = input.device().type();
  auto type = input.scalar_type();
  if (at::autocast::is_autocast_enabled(device) && at::isFloatingType(type) && type != at::kDouble) {
    type = at::autocast::get_autocast_dtype(device);
  }
  return input.is_cuda() && kernels::program("activation", input.device(), type) != nullptr;
}

} // namespace brigade
