// What CUDA's runtime says of this machine.
#pragma once

namespace brigade {

struct CudaState;

CudaState cuda_state();

} // namespace brigade
