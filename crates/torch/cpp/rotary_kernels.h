// The rotation of pairs of features, without libtorch.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

namespace brigade {

// `count` heads of twice `half` values, with their cosines and sines of as many. Steps are from one head to the next.
template <typename T>
struct RotaryHeads {
  const T* from;
  int64_t from_step;
  T* to;
  int64_t to_step;
  const T* cos;
  int64_t cos_step;
  const T* sin;
  int64_t sin_step;
  int64_t count;
  int64_t half;
};

// x cos + turned(x) sin, where turned(x) is the negated second half and the first one. Values are rounded as those of
// libtorch's operations `mul` and, on processors that have it in one instruction, `addcmul`.
void rotate(const RotaryHeads<float>& heads);
void rotate(const RotaryHeads<double>& heads);
void rotate(const RotaryHeads<c10::BFloat16>& heads);
// The gradient of x for one of the result, rounded as the operations' backward does.
void rotate_back(const RotaryHeads<float>& heads);
void rotate_back(const RotaryHeads<double>& heads);
void rotate_back(const RotaryHeads<c10::BFloat16>& heads);

} // namespace brigade
