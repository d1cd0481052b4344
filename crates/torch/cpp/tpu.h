// Google's TPUs by TorchTPU's backend (the feature tpu).
#pragma once

#include "rust/cxx.h"

#include "group.h"

#include <cstdint>
#include <memory>

namespace brigade {

struct GlooOptions;
struct PjrtVersion;
struct TpuFiles;

// The version of the C API of a PJRT plug-in.
PjrtVersion pjrt_version(rust::Str plugin);
// Loads TorchTPU and makes its devices tch's `Device::Mps`. Once per process.
void load_tpu(const TpuFiles& files);
// Drops a warning of libtorch's on this thread that TorchTPU causes with each read of a loss, and has the thread wait for
// pending work when it ends.
void prepare_tpu_thread();
// TorchTPU's process group for tensors on TPUs, Gloo for those on the CPU.
std::unique_ptr<Group> tpu_group(
    const Store& tpu_store,
    const Store& gloo_store,
    int32_t rank,
    int32_t size,
    const GlooOptions& options);
// Waits until everything that the device was given is done.
void synchronize_tpu();

} // namespace brigade
