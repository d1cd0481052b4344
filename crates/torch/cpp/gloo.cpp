// The Gloo backend. The only file that sees the declarations in cpp/gloo_declarations.
#define USE_C10D_GLOO 1

#include "brigade-torch/src/bridge.rs.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <chrono>

namespace brigade {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long the destructor lets operations in flight go on that nobody has waited for.
constexpr milliseconds kGrace{5000};

// Gloo with an abort, which c10d's own class has not, and with a destructor that ends: c10d's waits for
// all operations in flight, up to their time limit, even when their peers are gone.
class AbortableGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  ~AbortableGloo() override {
    const auto end = steady_clock::now() + kGrace;
    try {
      for (const auto& work : in_flight()) {
        const auto left =
            std::chrono::duration_cast<milliseconds>(end - steady_clock::now());
        work->wait(std::max(left, milliseconds(1)));
      }
    } catch (const std::exception&) {
      // It failed, or time is up: no other will end well.
      close("the group was dropped");
    }
  }

  // Every operation in flight, and every later one, fails at once on this rank and on its peers.
  void abort() override {
    close("the group was aborted");
  }
  void shutdown() override {
    abort();
  }

 private:
  std::vector<c10::intrusive_ptr<AsyncWork>> in_flight() {
    std::lock_guard<std::mutex> lock(workMutex_);
    std::vector<c10::intrusive_ptr<AsyncWork>> works(workQueue_.begin(), workQueue_.end());
    for (const auto& work : workInProgress_) {
      if (work) {
        works.push_back(work);
      }
    }
    return works;
  }

  // A closed connection alone wakes only the peer: what waits here must be told.
  void close(const std::string& why) noexcept {
    for (auto& context : contexts_) {
      for (int peer = 0; peer < getSize(); ++peer) {
        if (peer == getRank()) {
          continue;
        }
        try {
          // Our devices are TCP devices, whose pairs derive from transport::Pair first.
          auto* pair = context->getPair(peer).get();
          if (pair != nullptr) {
            reinterpret_cast<gloo::transport::tcp::Pair*>(pair)->signalExceptionExternal(why);
          }
        } catch (const std::exception&) {
          // It is closed already.
        }
      }
    }
  }
};

} // namespace

std::unique_ptr<Group> gloo_group(
    const Store& store, int32_t rank, int32_t size, const GlooOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  auto opts = Gloo::Options::create(std::chrono::milliseconds(options.timeout_ms));
  if (!options.address.empty()) {
    opts->devices.push_back(Gloo::createDeviceForHostname(std::string(options.address)));
  }
  for (const auto& interface : options.interfaces) {
    opts->devices.push_back(Gloo::createDeviceForInterface(std::string(interface)));
  }
  if (opts->devices.empty()) {
    opts->devices.push_back(Gloo::createDefaultDevice());
  }
  opts->threads = static_cast<int>(opts->devices.size()) * 2;
  opts->group_name = std::string(options.name);
  auto backend = c10::make_intrusive<AbortableGloo>(store.store, rank, size, opts);
  return wrap_backend(
      store,
      rank,
      size,
      options.name,
      c10d::ProcessGroup::BackendType::GLOO,
      backend,
      {c10::DeviceType::CPU});
}

} // namespace brigade
