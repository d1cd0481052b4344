// GPUs made of host memory: what the two units share, and the functions that Rust calls.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Stream.h>

#include <torch/library.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

namespace brigade::fake_gpu {

// How many devices there are: 0 until install.
int device_count();
// Throws where there is no such device.
void check_device(c10::DeviceIndex device);
c10::DeviceIndex current_device();
// Notes that something was allocated, run or made on the device: a real GPU has a context from then on.
void touch(c10::DeviceIndex device);

// The allocator of the devices' memory. It allocates on the current device.
c10::Allocator* device_allocator();
at::HostAllocator* pinned_allocator();
bool is_pinned(const void* data);
void record_stream(const c10::DataPtr& data, c10::Stream stream);

c10::Stream current_stream(c10::DeviceIndex device);
// Runs what the stream has put off.
void drain(c10::Stream stream);
// Puts work off until something waits for the stream.
void put_off(c10::Stream stream, std::function<void()> work);

// The generator of a CPU behind the generator of a device.
at::Generator host_generator(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex device);

// Notes a point at which the host waits for a device. Throws while a graph is captured.
void synchronization(const std::string& name);

// Throws while a graph is captured, and makes that graph unusable.
void refuse_while_capturing(const std::string& name);

// Adds a launch to the account, where one is open and the thread is not inside of another operator.
void enter_in_account(const std::string& name, uint64_t bytes);
// Adds an operator that has run. `fresh` are the results that are not arguments or views of them.
void enter_in_account(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, const std::vector<at::Tensor>& fresh);

bool account_is_open();

// The clock that events read, in milliseconds: by itself it goes as a real one, and launches move it on.
void pass_time(double milliseconds);
double passed_time();
// Milliseconds of each launch that is not nested in another one: `own` for those whose name contains the part, if that
// is not empty.
struct LaunchTimes {
  double usual = 0;
  std::string part;
  double own = 0;
};
void set_launch_times(LaunchTimes times);

// Whether launches of Brigade's kernels are entered in the account, and nothing runs.
bool only_counted();

// Operators of this thread are parts of one that is one launch on a real GPU: they are not in the account.
struct Nested {
  Nested();
  ~Nested();
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;
};

// Registers the operators; called once.
void register_operators();
void register_attention(torch::Library& library);
bool capturing();
bool capturing(c10::DeviceIndex device);
// Adds a launch of a kernel to the graph that is being captured. Returns false if there is none.
bool record(std::function<void()> node);
// Puts the freeing of memory off until the graph that is being captured is freed, whose launches refer to it by addresses
// alone. Returns false if none is captured.
bool free_with_graph(std::function<void()> free);
// Makes the graph that is being captured unusable, as an operation does that a capture does not permit.
void invalidate_capture();

// The messages of these functions are allocated with strdup; null is success.
extern "C" {
struct FakeGpuMemory {
  uint64_t allocated;
  uint64_t peak;
  uint64_t reserved;
  uint64_t capacity;
};

// A table of its own, so that another library can be given it without linking with this one.
struct FakeGpuGraphs {
  char* (*begin)(int32_t device);
  char* (*end)(void** graph);
  char* (*replay)(void* graph);
  void (*free)(void* graph);
  bool (*is_capturing)(int32_t device);
};

const FakeGpuGraphs* fake_gpu_graphs();
}

// Calls the function; an exception becomes a message.
char* caught(const std::function<void()>& function);

}  // namespace brigade::fake_gpu
