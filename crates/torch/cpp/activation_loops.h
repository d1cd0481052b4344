// Gated pairs of activations in float32, without libtorch.
#pragma once

#include <cstdint>

namespace brigade {

// Writes activation(gate) up. `activation` is an ActivationNumber. Each value depends on its own pair alone, and is the
// same bits on every processor.
void activate_pairs(int activation, const float* gate, const float* up, float* output, int64_t count);
// Writes the gradients of both for one of the output, and the output once more, which may be null.
void differentiate_pairs(
    int activation, const float* gate, const float* up, const float* doutput, float* dgate, float* dup, float* output,
    int64_t count);

} // namespace brigade
