#include "activation.h"

#include "activation.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace brigade {

namespace {

// Blocks for each of the GPU's multiprocessors: as many as fit of eight warps each, and in the forward several times
// that, since its blocks leave nothing to add up.
constexpr int64_t kActivationBlocks = 8;
constexpr int64_t kActivationForwardBlocks = 32;

// A bias as the kernels read it: float32, contiguous.
at::Tensor as_float(const at::Tensor& bias) {
  return bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
}

// The arguments of both directions, and the tensors that they point to.
struct ActivationCall {
  ActivationArguments args{};
  at::Tensor values, up, bias, up_bias;
  bool is_gated;
  bool aligned = true;

  ActivationCall(const ActivationInput& input, int activation) : is_gated(input.is_gated()) {
    const int64_t width = input.width();
    const auto rows = activation_rows(input.values);
    const auto offset = as_float(input.bias);
    if (input.is_packed) {
      values = rows.narrow(1, 0, width);
      up = rows.narrow(1, width, width);
      if (offset.defined()) {
        bias = offset.narrow(0, 0, width);
        up_bias = offset.narrow(0, width, width);
      }
    } else {
      values = rows;
      bias = offset;
      if (is_gated) {
        up = activation_rows(input.up);
        up_bias = as_float(input.up_bias);
      }
    }
    args.width = static_cast<int>(width);
    args.rows = values.size(0);
    args.activation = activation;
    args.biases = is_gated ? 2 : 1;
    args.input = read(values, args.input_stride);
    args.up = is_gated ? read(up, args.up_stride) : nullptr;
    args.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
    args.up_bias = up_bias.defined() ? up_bias.const_data_ptr<float>() : nullptr;
  }

  const void* read(const at::Tensor& rows, long long& stride) {
    aligned = aligned && kernels::has_aligned_rows(rows);
    stride = rows.stride(0);
    return rows.const_data_ptr();
  }

  void* write(const at::Tensor& rows, long long& stride) {
    return const_cast<void*>(read(rows, stride));
  }

  // Without a gap between rows.
  void* write(const at::Tensor& rows) {
    aligned = aligned && kernels::has_aligned_rows(rows);
    return rows.mutable_data_ptr();
  }

  // Divides the rows into parts, for at most `most` blocks.
  void divide(int64_t most) {
    // The second dimension of a grid has 16 bits.
    const int64_t few = std::clamp<int64_t>(most / column_blocks(), 1, std::numeric_limits<uint16_t>::max());
    args.parts = static_cast<int>(std::min<int64_t>(few, kernels::quotient_up(args.rows, kActivationRows)));
  }

  void launch(kernels::Program& program, const std::string& suffix) const {
    const std::string name = std::string("activation") + (is_gated ? "_gated" : "") + (aligned ? "" : "_unaligned");
    program.launch(
        name + suffix, {column_blocks(), static_cast<unsigned>(args.parts)}, {kActivationColumns, kActivationRows},
        /*shared=*/0, args);
  }

 private:
  unsigned column_blocks() const {
    const int64_t vector = 16 / static_cast<int64_t>(values.element_size());
    return kernels::quotient_up(args.width, vector * kActivationColumns);
  }
};

bool has_kernels_for(const ActivationInput& input) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  const auto& values = input.values;
  const auto type = values.scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf && type != at::kFloat) {
    return false;
  }
  const auto is_plain = [&](const at::Tensor& t) {
    return t.layout() == at::kStrided && !t.is_neg() && t.device() == values.device();
  };
  const auto is_bias = [&](const at::Tensor& t, int64_t size) {
    return !t.defined() ||
        (is_plain(t) && at::isFloatingType(t.scalar_type()) && t.dim() == 1 && t.size(0) == size);
  };
  return values.is_cuda() && is_plain(values) && values.dim() > 0 && values.numel() > 0 &&
      (!input.is_packed || values.size(-1) % 2 == 0) &&
      // Two sums for each column, and a vector beyond the last column, have 32-bit numbers.
      values.size(-1) <= kMax / 4 && values.numel() / values.size(-1) <= kMax &&
      is_bias(input.bias, values.size(-1)) &&
      (!input.up.defined() ||
       (is_plain(input.up) && input.up.scalar_type() == type && input.up.sizes() == values.sizes() &&
        is_bias(input.up_bias, values.size(-1))));
}

} // namespace

at::Tensor activation_rows(const at::Tensor& t) {
  const auto rows = t.reshape({-1, t.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

kernels::Program* activation_kernels(const ActivationInput& input) {
  return has_kernels_for(input) ? kernels::program("activation", input.values) : nullptr;
}

at::Tensor activation_forward_gpu(kernels::Program& program, const ActivationInput& input, int activation) {
  TORCH_CHECK(has_kernels_for(input), "the kernels do not take values of ", input.values.sizes(), " and ",
              input.values.scalar_type());
  ActivationCall call(input, activation);
  const auto output = at::empty({call.args.rows, call.args.width}, call.values.options());
  call.args.output = call.write(output);
  call.divide(kActivationForwardBlocks * program.processors());
  call.launch(program, "");
  return output.view(input.output_sizes());
}

ActivationGradients activation_backward_gpu(
    kernels::Program& program, const ActivationInput& input, int activation, const at::Tensor& doutput,
    bool may_overwrite, ActivationWishes wishes) {
  const auto sizes = input.output_sizes();
  TORCH_CHECK(has_kernels_for(input), "the kernels do not take values of ", input.values.sizes(), " and ",
              input.values.scalar_type());
  TORCH_CHECK(
      doutput.sizes() == at::IntArrayRef(sizes) && doutput.scalar_type() == input.values.scalar_type() &&
          doutput.device() == input.values.device(),
      "the gradient does not have the output's shape and type");
  ActivationCall call(input, activation);
  auto& a = call.args;
  const int64_t rows = a.rows, width = a.width;
  const auto options = call.values.options();
  const auto given = doutput.reshape({rows, width}).contiguous();
  const bool is_own = may_overwrite || !given.is_alias_of(doutput);
  const auto matrix = [&] { return at::empty({rows, width}, options); };
  ActivationGradients out;
  at::Tensor dvalues, dup;
  if (input.is_packed) {
    out.values = at::empty({rows, 2 * width}, options);
    dvalues = out.values.narrow(1, 0, width);
    dup = out.values.narrow(1, width, width);
    out.output = !wishes.output ? at::Tensor() : is_own ? given : matrix();
  } else {
    dvalues = out.values = is_own ? given : matrix();
    dup = out.up = input.is_gated() ? matrix() : at::Tensor();
    out.output = wishes.output ? matrix() : at::Tensor();
  }
  a.doutput = call.write(given);
  a.dinput = call.write(dvalues, a.dinput_stride);
  a.dup = dup.defined() ? call.write(dup, a.dup_stride) : nullptr;
  a.output = out.output.defined() ? call.write(out.output) : nullptr;
  call.divide(kActivationBlocks * program.processors());
  const int64_t columns = a.biases * width;
  at::Tensor part_sums, sums;
  if (wishes.biases) {
    part_sums = at::empty({a.parts, columns}, options.dtype(at::kFloat));
    sums = at::empty({columns}, part_sums.options());
    a.part_sums = part_sums.mutable_data_ptr<float>();
    a.column_sums = sums.mutable_data_ptr<float>();
  }
  call.launch(program, "_backward");
  if (wishes.biases) {
    program.launch(
        "activation_sums", {kernels::quotient_up(columns, kActivationSums), 1},
        {kActivationSums, kActivationStripes}, /*shared=*/0, a);
    out.bias = input.is_packed ? sums : sums.narrow(0, 0, width);
    out.up_bias = out.up.defined() ? sums.narrow(0, width, width) : at::Tensor();
  }
  out.values = out.values.view(input.values.sizes());
  out.up = out.up.defined() ? out.up.view(sizes) : out.up;
  out.output = out.output.defined() ? out.output.view(sizes) : out.output;
  return out;
}

} // namespace brigade
