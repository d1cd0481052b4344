// Devices, streams, events, memory and generators of GPUs made of host memory.
#include "fake_gpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/GradMode.h>
#include <c10/util/Backtrace.h>
#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <unistd.h>

namespace brigade::fake_gpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex kMost = 16;
// The index of host memory that is pinned, among the pools.
constexpr DeviceIndex kPinned = kMost;
constexpr size_t kRounding = 512;
// What is kept for reuse before it goes back to the system.
constexpr size_t kMostCached = size_t(1) << 30;
constexpr int kPoisonByte = 0xFF;
constexpr StreamId kFirstNewStream = 100;
constexpr StreamId kPoolStreams = 32;

struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
  StreamId stream;
  // The streams that use it beside the one on which it was allocated.
  std::set<std::pair<DeviceIndex, StreamId>> uses;
  // How many streams must be drained before it may be used again.
  int awaited = 0;
};

struct StreamState {
  std::deque<std::function<void()>> work;
  uint64_t queued = 0;
  uint64_t done = 0;
  // Freed blocks, and how much of the work must be done before they may be used again.
  std::vector<std::pair<uint64_t, Block*>> freed;
};

struct Pool {
  std::multimap<std::pair<StreamId, size_t>, Block*> blocks;
  size_t allocated = 0;
  size_t peak = 0;
  size_t reserved = 0;
  size_t reserved_peak = 0;
  size_t capacity = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::map<std::pair<DeviceIndex, StreamId>, StreamState> streams;
  std::array<Pool, kMost + 1> pools;
  std::map<uintptr_t, Block*> live;
  StreamId next_stream = kFirstNewStream;
  StreamId next_pool_stream = 0;
  std::vector<at::Generator> generators;
  std::vector<std::string> synchronizations;
  int listeners = 0;
  // State of the generator of random delays; 0 where work is put off until something waits for it.
  uint64_t delays = 0;
};

// Never freed: tensors in static variables may outlive any order of destructors.
State& state() {
  static State* const state = new State();
  return *state;
}

using Lock = std::lock_guard<std::recursive_mutex>;

std::atomic<int> installed_devices{0};
std::array<std::atomic<bool>, kMost> contexts{};
thread_local DeviceIndex this_device = 0;
thread_local std::array<StreamId, kMost> this_stream{};

void release(Block* block) {
  std::memset(block->data, kPoisonByte, block->size);
  block->uses.clear();
  state().pools[block->device].blocks.emplace(std::pair(block->stream, block->size), block);
}

void run_until(DeviceIndex device, StreamId id, uint64_t position) {
  Lock lock(state().mutex);
  auto found = state().streams.find({device, id});
  if (found == state().streams.end()) {
    return;
  }
  StreamState& stream = found->second;
  while (stream.done < position && !stream.work.empty()) {
    auto work = std::move(stream.work.front());
    stream.work.pop_front();
    work();
    stream.done += 1;
  }
  for (size_t at = 0; at < stream.freed.size();) {
    auto [needed, block] = stream.freed[at];
    if (needed > stream.done) {
      at += 1;
      continue;
    }
    stream.freed.erase(stream.freed.begin() + static_cast<std::ptrdiff_t>(at));
    block->awaited -= 1;
    if (block->awaited == 0) {
      release(block);
    }
  }
}

// With random delays: does some of the work of a stream now and then, as a device does that is not the slowest one.
void maybe_progress() {
  Lock lock(state().mutex);
  auto& delays = state().delays;
  if (delays == 0 || capturing()) {
    return;
  }
  // xorshift64
  delays ^= delays << 13;
  delays ^= delays >> 7;
  delays ^= delays << 17;
  std::vector<std::pair<DeviceIndex, StreamId>> busy;
  for (auto& [key, stream] : state().streams) {
    if (!stream.work.empty()) {
      busy.push_back(key);
    }
  }
  if (busy.empty() || delays % 2 == 0) {
    return;
  }
  const auto [device, id] = busy[(delays >> 8) % busy.size()];
  run_until(device, id, state().streams[{device, id}].done + 1 + (delays >> 32) % 3);
}

bool is_drained(DeviceIndex device, StreamId id) {
  Lock lock(state().mutex);
  auto found = state().streams.find({device, id});
  return found == state().streams.end() || found->second.work.empty();
}

void drain_device(DeviceIndex device) {
  Lock lock(state().mutex);
  std::vector<StreamId> ids;
  for (auto& [key, stream] : state().streams) {
    if (key.first == device) {
      ids.push_back(key.second);
    }
  }
  for (StreamId id : ids) {
    run_until(device, id, UINT64_MAX);
  }
}

// Gives the memory that is kept for reuse back to the system. Work that was put off may have the address of memory
// that was freed too early: it is done first, since afterwards it would write into memory of others.
void empty_cache(DeviceIndex index) {
  Lock lock(state().mutex);
  for (DeviceIndex device = 0; device < device_count(); ++device) {
    drain_device(device);
  }
  Pool& pool = state().pools[index];
  for (auto& [key, block] : pool.blocks) {
    pool.reserved -= block->size;
    std::free(block->data);
    delete block;
  }
  pool.blocks.clear();
}

std::string in_words(size_t bytes) {
  char text[64];
  if (bytes < size_t(1) << 20) {
    std::snprintf(text, sizeof text, "%.2f KiB", static_cast<double>(bytes) / 1024.0);
  } else if (bytes < size_t(1) << 30) {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576.0);
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / 1073741824.0);
  }
  return text;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->device != kPinned && free_with_graph([block] { free_block(block); })) {
    return;
  }
  Lock lock(state().mutex);
  Pool& pool = state().pools[block->device];
  pool.allocated -= block->size;
  state().live.erase(reinterpret_cast<uintptr_t>(block->data));
  auto uses = block->uses;
  if (block->device != kPinned) {
    uses.emplace(block->device, block->stream);
  }
  for (const auto& use : uses) {
    auto found = state().streams.find(use);
    if (found != state().streams.end() && !found->second.work.empty()) {
      found->second.freed.emplace_back(found->second.queued, block);
      block->awaited += 1;
    }
  }
  if (block->awaited == 0) {
    release(block);
    if (pool.reserved - pool.allocated > kMostCached) {
      empty_cache(block->device);
    }
  }
}

Block* allocate_block(DeviceIndex index, StreamId stream, size_t requested) {
  Lock lock(state().mutex);
  maybe_progress();
  Pool& pool = state().pools[index];
  size_t size = (requested + kRounding - 1) / kRounding * kRounding;
  Block* block = nullptr;
  auto kept = pool.blocks.find({stream, size});
  if (kept != pool.blocks.end()) {
    block = kept->second;
    pool.blocks.erase(kept);
  } else {
    if (pool.capacity != 0 && pool.reserved + size > pool.capacity) {
      empty_cache(index);
    }
    if (pool.capacity != 0 && pool.reserved + size > pool.capacity) {
      size_t free = pool.capacity > pool.reserved ? pool.capacity - pool.reserved : 0;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_words(size), ". GPU ",
          static_cast<int>(index), " has a total capacity of ", in_words(pool.capacity), " of which ", in_words(free),
          " is free. Process ", getpid(), " has ", in_words(pool.reserved),
          " memory in use. Of the allocated memory ", in_words(pool.allocated), " is allocated by PyTorch, and ",
          in_words(pool.reserved - pool.allocated), " is reserved by PyTorch but unallocated. (a GPU made of host ",
          "memory, whose capacity the test has set)");
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host has no ", in_words(size), " for a GPU made of it");
    std::memset(data, kPoisonByte, size);
    block = new Block{data, size, index, stream, {}, 0};
    pool.reserved += size;
    pool.reserved_peak = std::max(pool.reserved_peak, pool.reserved);
  }
  pool.allocated += size;
  pool.peak = std::max(pool.peak, pool.allocated);
  state().live[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block;
}

// The block in which the address lies, or null.
Block* block_of(const void* data) {
  auto address = reinterpret_cast<uintptr_t>(data);
  auto above = state().live.upper_bound(address);
  if (above == state().live.begin()) {
    return nullptr;
  }
  Block* block = std::prev(above)->second;
  return address < reinterpret_cast<uintptr_t>(block->data) + block->size ? block : nullptr;
}

void free_data(void* data) {
  Lock lock(state().mutex);
  free_block(block_of(data));
}

void record_use(const void* data, Stream stream) {
  Lock lock(state().mutex);
  if (Block* block = block_of(data)) {
    block->uses.emplace(stream.device_index(), stream.id());
  }
}

#if __has_include(<c10/core/CachingDeviceAllocator.h>)
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

struct DeviceMemory final : AllocatorBase {
  c10::DataPtr allocate(size_t size) override {
    check_device(this_device);
    touch(this_device);
    Device device(c10::kCUDA, this_device);
    if (size == 0) {
      return {nullptr, device};
    }
    Block* block = allocate_block(this_device, this_stream[this_device], size);
    // The address alone, as of CUDA's allocator.
    return {block->data, block->data, &free_data, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

#if __has_include(<c10/core/CachingDeviceAllocator.h>)
  bool initialized() override { return device_count() > 0; }

  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex device = 0; device < device_count(); ++device) {
      empty_cache(device);
    }
  }

  void recordStream(const c10::DataPtr& data, Stream stream) override { record_use(data.get(), stream); }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    check_device(device);
    Lock lock(state().mutex);
    const Pool& pool = state().pools[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](c10::CachingAllocator::StatArray& stat, size_t current, size_t peak) {
      stat[0].current = static_cast<int64_t>(current);
      stat[0].peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes, pool.allocated, pool.peak);
    set(stats.active_bytes, pool.allocated, pool.peak);
    set(stats.requested_bytes, pool.allocated, pool.peak);
    set(stats.reserved_bytes, pool.reserved, pool.reserved_peak);
    return stats;
  }

  void resetAccumulatedStats(DeviceIndex) override {}

  void resetPeakStats(DeviceIndex device) override {
    check_device(device);
    Lock lock(state().mutex);
    state().pools[device].peak = state().pools[device].allocated;
    state().pools[device].reserved_peak = state().pools[device].reserved;
  }

  // Virtual in some versions of libtorch only.
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {
    check_device(device);
    Lock lock(state().mutex);
    const Pool& pool = state().pools[device];
    size_t total = pool.capacity == 0 ? size_t(64) << 30 : pool.capacity;
    return {total > pool.reserved ? total - pool.reserved : 0, total};
  }
#endif
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(device_count() > 0, "there is no GPU for which memory could be pinned");
    // Pinned memory belongs to a context: one that is there, or else a new one on the current device.
    bool any = false;
    for (const auto& context : contexts) {
      any = any || context;
    }
    if (!any) {
      touch(this_device);
    }
    if (size == 0) {
      return {nullptr, Device(c10::kCPU)};
    }
    Block* block = allocate_block(kPinned, 0, size);
    return {block->data, block, &free_block, Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

  bool record_event(void* data, void*, Stream stream) override {
    record_use(data, stream);
    return true;
  }

  void empty_cache() override { fake_gpu::empty_cache(kPinned); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// A generator of a device: one of a CPU, with the device's name.
struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator(DeviceIndex device, at::Generator host)
      : GeneratorImpl(Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), host.clone()); }

  at::Generator host;
};

at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

struct Event {
  DeviceIndex device;
  StreamId stream = 0;
  uint64_t position = 0;
  std::chrono::steady_clock::time_point when;
  double passed = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }

  Device exchangeDevice(Device device) const override {
    Device previous = getDevice();
    setDevice(device);
    return previous;
  }

  Device getDevice() const override { return {c10::kCUDA, this_device}; }

  void setDevice(Device device) const override {
    TORCH_INTERNAL_ASSERT(device.is_cuda());
    if (device.has_index()) {
      check_device(device.index());
      this_device = device.index();
    }
  }

  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      this_device = device.index();
    }
  }

  Stream getStream(Device device) const override { return current_stream(index(device)); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }

  Stream getStreamFromGlobalPool(Device device, bool) const override {
    Lock lock(state().mutex);
    touch(index(device));
    return stream(index(device), 1 + state().next_pool_stream++ % kPoolStreams);
  }

  Stream getNewStream(Device device, int) const override {
    Lock lock(state().mutex);
    touch(index(device));
    return stream(index(device), state().next_stream++);
  }

  Stream exchangeStream(Stream next) const override {
    check_device(next.device_index());
    Stream previous = current_stream(next.device_index());
    this_stream[next.device_index()] = next.id();
    return previous;
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().mutex);
    touch(on.device_index());
    if (*event == nullptr) {
      *event = new Event{on.device_index()};
    }
    auto* recorded = static_cast<Event*>(*event);
    TORCH_CHECK(
        recorded->device == on.device_index(), "an event of device ", static_cast<int>(recorded->device),
        " cannot be recorded on a stream of device ", static_cast<int>(on.device_index()));
    recorded->stream = on.id();
    recorded->position = state().streams[{on.device_index(), on.id()}].queued;
    recorded->when = std::chrono::steady_clock::now();
    recorded->passed = passed_time();
  }

  // The other stream's later work comes after the event's: it is done now.
  void block(void* event, const Stream&) const override { wait(event); }

  bool queryEvent(void* event) const override {
    refuse_while_capturing("query");
    auto* recorded = static_cast<Event*>(event);
    if (recorded == nullptr) {
      return true;
    }
    Lock lock(state().mutex);
    auto& stream = state().streams[{recorded->device, recorded->stream}];
    return progress(recorded->device, recorded->stream, stream, recorded->position);
  }

  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }

  bool queryStream(const Stream& on) const override {
    refuse_while_capturing("query");
    Lock lock(state().mutex);
    auto& stream = state().streams[{on.device_index(), on.id()}];
    return progress(on.device_index(), on.id(), stream, stream.queued);
  }

  void synchronizeStream(const Stream& on) const override {
    synchronization("synchronize: stream");
    drain(on);
  }

  // Virtual in some versions of libtorch only.
  bool isStreamCapturing(const Stream& on) const { return fake_gpu::capturing(on.device_index()); }

  void synchronizeEvent(void* event) const override {
    auto* recorded = static_cast<Event*>(event);
    bool own = recorded != nullptr && recorded->stream != 0 && recorded->stream == this_stream[recorded->device];
    synchronization(own ? "synchronize: side stream" : "synchronize: event");
    wait(event);
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    synchronization("synchronize: device");
    check_device(device);
    touch(device);
    drain_device(device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    record_use(data.get(), on);
  }

  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded before their time is asked for");
    const auto &begin = *static_cast<Event*>(from), &end = *static_cast<Event*>(to);
    std::chrono::duration<double, std::milli> time = end.when - begin.when;
    return time.count() + end.passed - begin.passed;
  }

 private:
  static DeviceIndex index(Device device) {
    DeviceIndex index = device.has_index() ? device.index() : this_device;
    check_device(index);
    return index;
  }

  static Stream stream(DeviceIndex device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), id);
  }

  static void wait(void* event) {
    if (auto* recorded = static_cast<Event*>(event)) {
      run_until(recorded->device, recorded->stream, recorded->position);
    }
  }

  // Whether the work is done. Each question that finds it undone does a piece of it, so that one who asks until it is
  // done comes to an end.
  static bool progress(DeviceIndex device, StreamId id, const StreamState& stream, uint64_t position) {
    if (stream.done >= position) {
      return true;
    }
    run_until(device, id, stream.done + 1);
    return false;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override { TORCH_CHECK(device_count() > 0, "no GPU made of host memory is installed"); }

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device == -1 ? this_device : device);
  }

  at::Generator getNewGenerator(DeviceIndex device) const override {
    DeviceIndex index = device == -1 ? this_device : device;
    check_device(index);
    return new_generator(index);
  }

  Device getDeviceFromPtr(void* data) const override {
    Lock lock(state().mutex);
    Block* block = block_of(data);
    TORCH_CHECK(
        block != nullptr && block->device != kPinned, "The specified pointer resides on host memory and is not ",
        "registered with any CUDA device.");
    return {c10::kCUDA, block->device};
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool isBuilt() const override { return device_count() > 0; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasCUDART() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex device) const override {
    check_device(device);
    return contexts[device];
  }
  DeviceIndex current_device() const override { return device_count() > 0 ? this_device : DeviceIndex(-1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  std::string showConfig() const override { return "GPUs made of host memory\n"; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({c10::kCUDA, device}); }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({c10::kCUDA, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

// libtorch makes the hooks once, at the first question about CUDA: they must be there before main, and answer that
// there is none until install. A program that is linked with CUDA itself has other hooks.
const bool hooks_are_ours = [] {
  if (at::CUDAHooksRegistry()->Has("CUDAHooks")) {
    return false;
  }
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs arguments) {
    return std::make_unique<Hooks>(arguments);
  });
  return true;
}();

}  // namespace

int device_count() { return installed_devices; }

void check_device(DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "CUDA error: invalid device ordinal ", static_cast<int>(device),
      "; there are ", device_count());
}

DeviceIndex current_device() { return this_device; }

void touch(DeviceIndex device) {
  check_device(device);
  contexts[device] = true;
}

c10::Allocator* device_allocator() {
  static auto* const allocator = new DeviceMemory();
  return allocator;
}

at::HostAllocator* pinned_allocator() {
  static auto* const allocator = new PinnedMemory();
  return allocator;
}

bool is_pinned(const void* data) {
  Lock lock(state().mutex);
  Block* block = block_of(data);
  return block != nullptr && block->device == kPinned;
}

void record_stream(const c10::DataPtr& data, Stream stream) { record_use(data.get(), stream); }

Stream current_stream(DeviceIndex device) {
  check_device(device);
  return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), this_stream[device]);
}

void drain(Stream stream) { run_until(stream.device_index(), stream.id(), UINT64_MAX); }

void put_off(Stream stream, std::function<void()> work) {
  Lock lock(state().mutex);
  auto& on = state().streams[{stream.device_index(), stream.id()}];
  on.work.push_back(std::move(work));
  on.queued += 1;
  maybe_progress();
}

at::Generator host_generator(const at::Generator& generator) {
  auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(
      own != nullptr, "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
  return own->host;
}

const at::Generator& default_generator(DeviceIndex device) {
  check_device(device);
  return state().generators[device];
}

void refuse_while_capturing(const std::string& name) {
  if (capturing()) {
    invalidate_capture();
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", name, ")");
  }
}

void synchronization(const std::string& name) {
  refuse_while_capturing(name);
  static const bool show = std::getenv("BRIGADE_FAKE_GPU_BACKTRACE") != nullptr;
  if (show) {
    std::cerr << "synchronization: " << name << "\n" << c10::get_backtrace() << std::endl;
  }
  Lock lock(state().mutex);
  if (state().listeners > 0) {
    state().synchronizations.push_back(name);
  }
}

char* caught(const std::function<void()>& function) {
  try {
    function();
    return nullptr;
  } catch (const c10::Error& error) {
    return strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

extern "C" {

char* fake_gpu_install(int32_t devices) {
  return caught([&] {
    Lock lock(state().mutex);
    TORCH_CHECK(hooks_are_ours, "this program has CUDA itself: GPUs made of host memory need a libtorch for CPUs");
    TORCH_CHECK(devices > 0 && devices <= kMost, devices, " GPUs made of host memory: there can be 1 to ", int(kMost));
    if (device_count() == devices) {
      return;
    }
    TORCH_CHECK(
        device_count() == 0, device_count(), " GPUs made of host memory are installed; their number cannot become ",
        devices);
    for (DeviceIndex device = 0; device < devices; ++device) {
      state().generators.push_back(new_generator(device));
    }
    c10::impl::registerDeviceGuard(c10::kCUDA, new Guard());
    c10::SetAllocator(c10::kCUDA, device_allocator());
    at::setHostAllocator(c10::kCUDA, pinned_allocator());
    register_operators();
    installed_devices = devices;
  });
}

// 0: work is put off until something waits for it.
void fake_gpu_random_delays(uint64_t seed) {
  Lock lock(state().mutex);
  state().delays = seed;
}

void fake_gpu_free_text(char* text) { std::free(text); }

uint64_t fake_gpu_contexts() {
  uint64_t found = 0;
  for (DeviceIndex device = 0; device < kMost; ++device) {
    found |= uint64_t(contexts[device]) << device;
  }
  return found;
}

// Begins to note synchronisations; how many there are already.
uint64_t fake_gpu_listen() {
  Lock lock(state().mutex);
  state().listeners += 1;
  return state().synchronizations.size();
}

// Ends it; the names since then, each with a newline.
char* fake_gpu_heard(uint64_t since) {
  Lock lock(state().mutex);
  std::string text;
  for (size_t at = since; at < state().synchronizations.size(); ++at) {
    text += state().synchronizations[at] + "\n";
  }
  state().listeners -= 1;
  if (state().listeners == 0) {
    state().synchronizations.clear();
  }
  return strdup(text.c_str());
}

char* fake_gpu_set_capacity(int32_t device, uint64_t bytes) {
  return caught([&] {
    check_device(static_cast<DeviceIndex>(device));
    Lock lock(state().mutex);
    state().pools[device].capacity = bytes;
  });
}

char* fake_gpu_memory(int32_t device, FakeGpuMemory* memory) {
  return caught([&] {
    check_device(static_cast<DeviceIndex>(device));
    Lock lock(state().mutex);
    const Pool& pool = state().pools[device];
    *memory = {pool.allocated, pool.peak, pool.reserved, pool.capacity};
  });
}

char* fake_gpu_new_stream(int32_t device, int64_t* id) {
  return caught([&] { *id = Guard().getNewStream({c10::kCUDA, static_cast<DeviceIndex>(device)}, 0).id(); });
}

char* fake_gpu_exchange_stream(int32_t device, int64_t id, int64_t* previous) {
  return caught([&] {
    Stream stream(Stream::UNSAFE, {c10::kCUDA, static_cast<DeviceIndex>(device)}, id);
    *previous = Guard().exchangeStream(stream).id();
  });
}

char* fake_gpu_synchronize_stream(int32_t device, int64_t id) {
  return caught([&] {
    Guard().synchronizeStream(Stream(Stream::UNSAFE, {c10::kCUDA, static_cast<DeviceIndex>(device)}, id));
  });
}

bool fake_gpu_stream_is_drained(int32_t device, int64_t id) {
  return is_drained(static_cast<DeviceIndex>(device), id);
}

char* fake_gpu_record_event(int32_t device, int64_t id, void** event) {
  return caught([&] {
    Stream stream(Stream::UNSAFE, {c10::kCUDA, static_cast<DeviceIndex>(device)}, id);
    Guard().record(event, stream, stream.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
  });
}

char* fake_gpu_query_event(void* event, bool* done) {
  return caught([&] { *done = Guard().queryEvent(event); });
}

char* fake_gpu_wait_event(void* event) {
  return caught([&] { Guard().block(event, current_stream(this_device)); });
}

char* fake_gpu_synchronize_event(void* event) {
  return caught([&] { Guard().synchronizeEvent(event); });
}

void fake_gpu_free_event(void* event) { Guard().destroyEvent(event, 0); }

char* fake_gpu_record_stream(const at::Tensor* tensor, int32_t device, int64_t id) {
  return caught([&] {
    at::Tensor(*tensor).record_stream(Stream(Stream::UNSAFE, {c10::kCUDA, static_cast<DeviceIndex>(device)}, id));
  });
}

char* fake_gpu_copy(const at::Tensor* to, const at::Tensor* from) {
  return caught([&] {
    c10::NoGradGuard no_grad;
    auto target = *to;
    target.copy_(*from, /*non_blocking=*/true);
  });
}

char* fake_gpu_set_device(int32_t device) {
  return caught([&] { Guard().setDevice({c10::kCUDA, static_cast<DeviceIndex>(device)}); });
}

char* fake_gpu_empty_cache(int32_t device) {
  return caught([&] {
    check_device(static_cast<DeviceIndex>(device));
    empty_cache(static_cast<DeviceIndex>(device));
  });
}
}

}  // namespace brigade::fake_gpu
