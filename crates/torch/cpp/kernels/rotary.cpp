#include "rotary.h"

#include "rotary.cu"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace brigade {

namespace {

// A vector of 16 bytes begins at the tensor's start, at each of its rows, and at the middle of each.
bool has_aligned_halves(const at::Tensor& t) {
  const int64_t vector = 16 / static_cast<int64_t>(t.element_size());
  const auto is_whole = [&](int64_t dim) { return t.stride(dim) % vector == 0 || t.size(dim) == 1; };
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.size(3) / 2 % vector == 0 && is_whole(0) &&
      is_whole(1) && is_whole(2);
}

} // namespace

kernels::Program* rotary_kernels(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  const auto type = heads.scalar_type();
  const bool has_type = type == at::kBFloat16 || type == at::kHalf || type == at::kFloat;
  const auto is_plain = [&](const at::Tensor& t) {
    return t.layout() == at::kStrided && !t.is_neg() && t.device() == heads.device() && t.dim() == 4;
  };
  if (!heads.is_cuda() || !has_type || !is_plain(heads) || heads.numel() == 0 || heads.size(3) % 2 != 0 ||
      // Tokens of all texts, and values of a token, have 32-bit numbers.
      heads.size(0) * heads.size(2) > kMax || heads.size(1) * heads.size(3) > kMax / 4) {
    return nullptr;
  }
  const auto is_table = [&](const at::Tensor& table) {
    return is_plain(table) && table.scalar_type() == cos.scalar_type() &&
        (table.size(0) == 1 || table.size(0) == heads.size(0)) && table.size(1) == 1 && table.size(2) == heads.size(2) && table.size(3) == heads.size(3);
  };
  const bool are_tables =
      (cos.scalar_type() == type || cos.scalar_type() == at::kFloat) && is_table(cos) && is_table(sin);
  return are_tables ? kernels::program("rotary", heads) : nullptr;
}

void rotary_gpu(
    kernels::Program& program, const RotaryPart& part, const std::optional<RotaryPart>& other,
    const at::Tensor& cos, const at::Tensor& sin, bool back) {
  const auto& heads = part.from;
  const int64_t batch = heads.size(0), tokens = heads.size(2), width = heads.size(3);
  const auto whole_rows = [](const at::Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
  const auto cosines = whole_rows(cos), sines = whole_rows(sin);
  RotaryArguments a{};
  bool aligned = true;
  int64_t count = 0;
  const auto add = [&](const RotaryPart& own, RotaryHeadsArguments& to) {
    TORCH_CHECK(
        own.from.sizes() == own.to.sizes() && own.from.size(0) == batch && own.from.size(2) == tokens &&
            own.from.size(3) == width && own.from.stride(3) == 1 && own.to.stride(3) == 1 &&
            own.from.scalar_type() == heads.scalar_type() && own.to.scalar_type() == heads.scalar_type() &&
            own.rotated >= 0 && own.rotated <= own.from.size(1),
        "the kernels do not take heads of ", own.from.sizes(), " and ", own.from.scalar_type());
    aligned = aligned && has_aligned_halves(own.from) && has_aligned_halves(own.to);
    to = {own.from.const_data_ptr(), own.to.mutable_data_ptr(), own.from.stride(0), own.from.stride(2),
          own.from.stride(1), own.to.stride(0), own.to.stride(2), own.to.stride(1),
          static_cast<int>(own.rotated), static_cast<int>(own.from.size(1) - own.rotated)};
    count += own.from.size(1);
  };
  add(part, a.parts[0]);
  if (other) {
    add(*other, a.parts[1]);
  }
  TORCH_CHECK(
      count <= std::numeric_limits<int>::max() / width, count, " heads of ", width,
      " values are too many for a kernel");
  const auto step = [](const at::Tensor& table) { return table.size(0) == 1 ? 0 : table.stride(0); };
  a.cos = cosines.const_data_ptr();
  a.sin = sines.const_data_ptr();
  a.cos_batch = step(cosines);
  a.sin_batch = step(sines);
  a.cos_token = cosines.stride(2);
  a.sin_token = sines.stride(2);
  aligned = aligned && has_aligned_halves(cosines) && has_aligned_halves(sines);
  a.tokens = static_cast<int>(tokens);
  a.half = static_cast<int>(width / 2);
  a.has_float_tables = cosines.scalar_type() == at::kFloat;
  a.is_back = back;
  constexpr int64_t kWarp = 32;
  const int64_t vector = 16 / static_cast<int64_t>(heads.element_size());
  const int64_t items = count * kernels::quotient_up(a.half, vector);
  const auto threads =
      static_cast<unsigned>(std::min<int64_t>(kRotaryThreads, kernels::quotient_up(items, kWarp) * kWarp));
  program.launch(
      aligned ? "rotary" : "rotary_unaligned", {static_cast<unsigned>(batch * tokens), 1}, {threads, 1}, /*shared=*/0,
      a);
}

} // namespace brigade
