#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace brigade {

namespace {

std::unique_ptr<Store> store_handle(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<Store>(std::move(store));
}

std::vector<uint8_t> bytes(rust::Slice<const uint8_t> value) {
  return std::vector<uint8_t>(value.begin(), value.end());
}

rust::Vec<uint8_t> bytes(const std::vector<uint8_t>& value) {
  rust::Vec<uint8_t> out;
  out.reserve(value.size());
  for (auto b : value) {
    out.push_back(b);
  }
  return out;
}

std::vector<std::string> strings(rust::Slice<const rust::Str> keys) {
  std::vector<std::string> out;
  for (const auto& key : keys) {
    out.emplace_back(key);
  }
  return out;
}

// c10d's has the time limit of the store behind it, so that one that is set for a while is everybody's.
class PrefixStore final : public c10d::PrefixStore {
 public:
  PrefixStore(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& store)
      : c10d::PrefixStore(prefix, store) {
    c10d::Store::setTimeout(store->getTimeout());
  }

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = c10::make_intrusive<PrefixStore>(prefix_, store_->clone());
    copy->setTimeout(getTimeout());
    return copy;
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return c10d::PrefixStore::get(key);
  }
  void wait(const std::vector<std::string>& keys) override {
    c10d::PrefixStore::wait(keys, getTimeout());
  }
  void wait(
      const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    c10d::PrefixStore::wait(keys, limit);
  }
  const std::chrono::milliseconds& getTimeout() const noexcept override {
    return c10d::Store::getTimeout();
  }
  void setTimeout(const std::chrono::milliseconds& limit) override {
    c10d::Store::setTimeout(limit);
  }
};

} // namespace

Store::~Store() {
  if (is_fork()) {
    store.release();
  }
}

const c10::intrusive_ptr<c10d::Store>& Store::live() const {
  check_not_fork("a store");
  return store;
}

std::unique_ptr<Store> tcp_store(const TcpStoreOptions& options) {
  watch_forks();
  c10d::TCPStoreOptions opts;
  opts.port = options.port;
  opts.isServer = options.is_server;
  if (options.num_workers > 0) {
    opts.numWorkers = static_cast<size_t>(options.num_workers);
  }
  opts.waitWorkers = options.wait_workers;
  opts.timeout = std::chrono::milliseconds(options.timeout_ms);
  if (options.listen_fd >= 0) {
    opts.masterListenFd = options.listen_fd;
  }
  return store_handle(c10::make_intrusive<c10d::TCPStore>(std::string(options.host), opts));
}

std::unique_ptr<Store> file_store(rust::Str path, int32_t world_size) {
  return store_handle(c10::make_intrusive<c10d::FileStore>(std::string(path), world_size));
}

std::unique_ptr<Store> hash_store() {
  return store_handle(c10::make_intrusive<c10d::HashStore>());
}

std::unique_ptr<Store> prefix_store(rust::Str prefix, const Store& store) {
  return store_handle(c10::make_intrusive<PrefixStore>(std::string(prefix), store.live()));
}

uint16_t tcp_store_port(const Store& store) {
  auto* tcp = dynamic_cast<c10d::TCPStore*>(store.live().get());
  return tcp == nullptr ? 0 : tcp->getPort();
}

void store_set(const Store& store, rust::Str key, rust::Slice<const uint8_t> value) {
  store.live()->set(std::string(key), bytes(value));
}

rust::Vec<uint8_t> store_get(const Store& store, rust::Str key) {
  return bytes(store.live()->get(std::string(key)));
}

int64_t store_add(const Store& store, rust::Str key, int64_t amount) {
  return store.live()->add(std::string(key), amount);
}

rust::Vec<uint8_t> store_compare_set(
    const Store& store,
    rust::Str key,
    rust::Slice<const uint8_t> expected,
    rust::Slice<const uint8_t> desired) {
  return bytes(store.live()->compareSet(std::string(key), bytes(expected), bytes(desired)));
}

bool store_delete(const Store& store, rust::Str key) {
  return store.live()->deleteKey(std::string(key));
}

bool store_check(const Store& store, rust::Slice<const rust::Str> keys) {
  return store.live()->check(strings(keys));
}

int64_t store_num_keys(const Store& store) {
  return store.live()->getNumKeys();
}

void store_wait(const Store& store, rust::Slice<const rust::Str> keys, int64_t timeout_ms) {
  store.live()->wait(strings(keys), std::chrono::milliseconds(timeout_ms));
}

void store_set_timeout(const Store& store, int64_t timeout_ms) {
  store.live()->setTimeout(std::chrono::milliseconds(timeout_ms));
}

int64_t store_timeout(const Store& store) {
  return store.live()->getTimeout().count();
}

} // namespace brigade
