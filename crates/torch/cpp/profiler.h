// libtorch's profiler (kineto).
#pragma once

#include "rust/cxx.h"

#include <ATen/record_function.h>

#include <memory>

namespace brigade {

struct ProfilerOptions;
struct ProfiledEvent;

// Records what this thread and the threads of its backward do from now on.
void profiler_start(const ProfilerOptions& options);
// Ends the recording. Writes it in Chrome's format where the path is not empty.
rust::Vec<ProfiledEvent> profiler_stop(rust::Str path);

// A named part of the recording, until it is dropped.
struct Scope {
  at::RecordFunction guard{at::RecordScope::USER_SCOPE};
};
std::unique_ptr<Scope> enter_scope(rust::Str name);

} // namespace brigade
