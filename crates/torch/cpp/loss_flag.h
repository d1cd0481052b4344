// A non-finite loss, signalled to the other ranks in the gradients that are reduced anyway.
#pragma once

#include "rust/cxx.h"
#include "tensors.h"

#include <memory>

namespace brigade {

struct LossFlag {
  struct State;
  std::shared_ptr<State> state;
};

// Of one model, whose parameters these are. It lives in their hooks.
std::unique_ptr<LossFlag> new_loss_flag(rust::Slice<const TensorRef> parameters);
// Has the first gradient that the next backward brings take this into its first element: NaN, or on a device
// 0 or NaN.
void loss_flag_raise(const LossFlag& flag, const Tensor& value);
// Ends that, and tells whether a backward has reached the model since the last call.
bool loss_flag_lower(const LossFlag& flag);

// Whether the first elements are finite, where a raised flag leaves its mark. Waits for devices.
bool first_elements_are_finite(rust::Slice<const TensorRef> tensors);
// The same as an int64 [1] on the tensors' device: 1 when one is not.
std::unique_ptr<Tensor> first_elements_not_finite(rust::Slice<const TensorRef> tensors);

} // namespace brigade
