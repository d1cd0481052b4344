#include "brigade-torch/src/bridge.rs.h"

#include <kineto/libkineto.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <sstream>

namespace brigade {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

void profiler_start(const ProfilerOptions& options) {
  const torch::profiler::impl::ProfilerConfig config(
      torch::profiler::impl::ProfilerState::KINETO,
      options.shapes,
      options.memory,
      /*with_stack=*/false,
      options.flops);
  std::set<ActivityType> activities{ActivityType::CPU};
  if (options.cuda) {
    activities.insert(ActivityType::CUDA);
  }
  // Kineto complains on standard error when the first profile begins on another thread than the one that
  // loaded libtorch, where libtorch introduced itself to it. So it does that again, here.
  if (auto& kineto = libkineto::api(); !kineto.isProfilerRegistered() && kineto.client() != nullptr) {
    kineto.registerClient(kineto.client());
  }
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

namespace {

rust::String describe(const profiler::KinetoEvent& event) {
  if (!event.hasShapes()) {
    return rust::String();
  }
  std::ostringstream out;
  out << '[';
  const char* between = "";
  for (const auto& shape : event.shapes()) {
    out << between << '[';
    between = ", ";
    const char* comma = "";
    for (auto size : shape) {
      out << comma << size;
      comma = ", ";
    }
    out << ']';
  }
  out << ']';
  return rust::String(out.str());
}

} // namespace

rust::Vec<ProfiledEvent> profiler_stop(rust::Str path) {
  auto result = profiler::disableProfiler();
  if (!path.empty()) {
    result->save(std::string(path));
  }
  rust::Vec<ProfiledEvent> out;
  for (const auto& event : result->events()) {
    if (event.isHiddenEvent()) {
      continue;
    }
    const bool on_device = event.deviceType() != c10::DeviceType::CPU;
    out.push_back(ProfiledEvent{
        rust::String::lossy(event.name()),
        event.startNs(),
        event.durationNs(),
        on_device ? static_cast<uint64_t>(event.deviceResourceId()) : event.startThreadId(),
        on_device,
        event.nBytes(),
        event.flops(),
        describe(event)});
  }
  return out;
}

std::unique_ptr<Scope> enter_scope(rust::Str name) {
  auto scope = std::make_unique<Scope>();
  if (scope->guard.isActive()) {
    scope->guard.before(std::string(name));
  }
  return scope;
}

} // namespace brigade
