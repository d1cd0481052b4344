// Google's TPUs by TorchTPU's backend (the feature tpu).
#pragma once

#include "rust/cxx.h"

#include <cstdint>

namespace brigade {

struct TpuFiles;
struct PjrtVersion;

// The version of the C API of a PJRT plug-in.
PjrtVersion pjrt_version(rust::Str plugin);
// Loads TorchTPU and makes its devices tch's `Device::Mps`. Once per process.
void load_tpu(const TpuFiles& files);
// Drops a warning of libtorch's on this thread that TorchTPU causes with each read of a loss.
void quiet_tpu_reads();
// Waits until everything that the device was given is done.
void synchronize_tpu();

} // namespace brigade
