// Products of matrices on the CPU whose bits do not depend on where their operands lie in memory.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace brigade {

enum class Products : uint8_t;

// Asks MKL for its conditional reproducibility, once for the process, and says what holds now.
Products make_products_reproducible();

// The kernels that libtorch and MKL choose on this processor.
rust::String cpu_kernels();

} // namespace brigade
