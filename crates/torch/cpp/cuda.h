// What CUDA's runtime says of this machine.
#pragma once

namespace brigade {

struct CudaState;

CudaState cuda_state();
// Whether an operation of libtorch that waits for a GPU throws.
void forbid_waiting(bool on) noexcept;

} // namespace brigade
