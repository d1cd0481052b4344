// The rotation of pairs of features, without libtorch.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace brigade {

// The heads of one token: `count` vectors of twice `half` values, some values apart.
template <typename T>
struct TokenHeads {
  const T* from;
  int64_t from_step;
  T* to;
  int64_t to_step;
  int64_t count;
  int64_t half;
};

// x cos + turned(x) sin, where turned(x) is the negated second half and the first one. Cosines and sines have as many
// values as a head. Values are rounded as those of libtorch's operations `mul` and, on processors that have it in one
// instruction, `addcmul`.
void rotate(const TokenHeads<float>& heads, const float* cos, const float* sin);
void rotate(const TokenHeads<double>& heads, const double* cos, const double* sin);
void rotate(const TokenHeads<c10::BFloat16>& heads, const c10::BFloat16* cos, const c10::BFloat16* sin);
// The gradient of x for one of the result, rounded as the operations' backward does.
void rotate_back(const TokenHeads<float>& heads, const float* cos, const float* sin);
void rotate_back(const TokenHeads<double>& heads, const double* cos, const double* sin);
void rotate_back(const TokenHeads<c10::BFloat16>& heads, const c10::BFloat16* cos, const c10::BFloat16* sin);

} // namespace brigade
