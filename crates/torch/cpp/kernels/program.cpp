#include "program.h"

#include "brigade-torch/src/bridge.rs.h"
#include "load.h"
#include "prepare.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

namespace brigade {

namespace kernels {
namespace {

// A file's kernels for a device and a type of elements, or the reason why there are none.
struct Slot {
  std::once_flag filled;
  std::unique_ptr<Program> program;
  // The program as soon as it is there, for those that do not wait for it.
  std::atomic<Program*> known = nullptr;
  std::string reason;
};

void fill(Slot& slot, const std::string& file, c10::DeviceIndex device, c10::ScalarType type) {
#ifdef BRIGADE_CUDA
  const int capability = capability_of(device);
  slot.reason = std::string(kernel_obstacle(file, element_of(type), capability));
  if (!slot.reason.empty()) {
    return;
  }
  try {
    const auto made = kernel_code(file, element_of(type), capability, nvrtc_library());
    if (!made.remark.empty()) {
      TORCH_WARN("GPU kernels: ", std::string(made.remark));
    }
    slot.program = load(device, made.code.data());
    slot.known = slot.program.get();
  } catch (const c10::Error& error) {
    slot.reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    slot.reason = error.what();
  }
  if (slot.program == nullptr) {
    TORCH_WARN("operations of ", file, " use libtorch's kernels, which are slower: ", slot.reason);
  }
#else
  slot.reason = "built without the feature cuda";
#endif
}

struct Slots {
  std::mutex mutex;
  std::map<std::tuple<std::string, c10::DeviceIndex, c10::ScalarType>, Slot> of;
};

Slots& all_slots() {
  // Never freed: tensors in static variables may outlive any order of destructors.
  static auto* const slots = new Slots();
  return *slots;
}

const Slot& slot_of(const std::string& file, c10::DeviceIndex device, c10::ScalarType type) {
  auto& slots = all_slots();
  Slot* slot = nullptr;
  {
    const std::lock_guard<std::mutex> lock(slots.mutex);
    slot = &slots.of[{file, device, type}];
  }
  // Outside of the lock, so that threads compile several files at a time.
  std::call_once(slot->filled, [&] { fill(*slot, file, device, type); });
  return *slot;
}

std::atomic<ProgramSource> program_source{nullptr};

} // namespace

void set_program_source(ProgramSource source) {
  program_source = source;
}

Program* program(const char* file, const at::Tensor& like) {
  return program(file, like.device(), like.scalar_type());
}

Program* program(const char* file, c10::Device device, c10::ScalarType type) {
  if (const auto source = program_source.load()) {
    return device.is_cuda() ? source(file, type) : nullptr;
  }
  return device.is_cuda() && kHasKernels ? slot_of(file, device.index(), type).program.get() : nullptr;
}

Program* program_of_any_type(const char* file, c10::Device device) {
  if (program_source.load() == nullptr && device.is_cuda()) {
    auto& slots = all_slots();
    const std::lock_guard<std::mutex> lock(slots.mutex);
    for (const auto& [key, slot] : slots.of) {
      if (std::get<0>(key) == file && std::get<1>(key) == device.index() && slot.known != nullptr) {
        return slot.known;
      }
    }
  }
  return program(file, device, at::kFloat);
}

} // namespace kernels

rust::Vec<KernelState> prepare_kernels(int32_t gpu, int8_t kind) {
  const auto files = kernel_files();
  std::vector<KernelState> states(files.size());
  std::vector<std::exception_ptr> errors(files.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < files.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        const auto& slot = kernels::slot_of(
            std::string(files[i]), static_cast<c10::DeviceIndex>(gpu), static_cast<c10::ScalarType>(kind));
        states[i] = {files[i], slot.reason};
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (const auto& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
  rust::Vec<KernelState> out;
  for (auto& state : states) {
    out.push_back(std::move(state));
  }
  return out;
}

} // namespace brigade
