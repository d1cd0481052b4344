// The state of all files of GPU kernels.
#pragma once

#include "rust/cxx.h"

#include <cstdint>

namespace brigade {

struct KernelState;

// Compiles all files of kernels for a GPU and a type of elements, several at a time, or reads them from the user's cache.
rust::Vec<KernelState> prepare_kernels(int32_t gpu, int8_t kind);

} // namespace brigade
