// Autocast, memory format, and passes over all gradients: unscaling, norm, clipping.
#pragma once

#include "tensors.h"

namespace brigade {

struct AutocastState;

// Sets this thread's autocast for a device type and gives what was set before.
AutocastState autocast_enter(int8_t device, const AutocastState& next);
// Sets back what `autocast_enter` gave. The outermost scope forgets the weights that it has cast.
void autocast_leave(int8_t device, const AutocastState& before) noexcept;

// The 16-bit type that products of this operand would be emulated in; -1 where they would not be.
int8_t emulated_type(const Tensor& operand);

// A tensor of four dimensions with its channels last in memory; itself where it has them there.
std::unique_ptr<Tensor> channels_last(const Tensor& tensor);
bool is_channels_last(const Tensor& tensor);

// Multiplies gradients in place, and gives a float32 [1] on their device: 1 if any was not finite.
std::unique_ptr<Tensor> unscale_gradients(
    rust::Slice<const TensorRef> gradients, double inverse_scale);
std::unique_ptr<Tensor> unscale_gradients_by(
    rust::Slice<const TensorRef> gradients, const Tensor& inverse_scale);
// The p-norm of all values of all tensors together, a scalar on their device.
std::unique_ptr<Tensor> norm_of_all(rust::Slice<const TensorRef> tensors, double p);
void multiply_all(rust::Slice<const TensorRef> tensors, const Tensor& factor);
void clamp_all(rust::Slice<const TensorRef> tensors, double limit);

// Gives memory that allocators keep for later back to the system and the device.
void release_memory(bool cuda);
// Whether convolutions on the CPU have oneDNN's kernels.
bool has_onednn();

} // namespace brigade
