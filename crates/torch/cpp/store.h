// c10d's key-value stores.
#pragma once

#include "rust/cxx.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

namespace brigade {

struct Store {
  explicit Store(c10::intrusive_ptr<c10d::Store> store) : store(std::move(store)) {}
  // A child of fork leaves it as it is: a server's destructor would wait for its thread, which stayed in the
  // parent.
  ~Store();

  // Throws in a child of fork, which would write into the parent's connection: the only way to the store.
  const c10::intrusive_ptr<c10d::Store>& live() const;

 private:
  c10::intrusive_ptr<c10d::Store> store;
};

struct TcpStoreOptions;

std::unique_ptr<Store> tcp_store(const TcpStoreOptions& options);
std::unique_ptr<Store> file_store(rust::Str path, int32_t world_size);
std::unique_ptr<Store> hash_store();
std::unique_ptr<Store> prefix_store(rust::Str prefix, const Store& store);
uint16_t tcp_store_port(const Store& store);

void store_set(const Store& store, rust::Str key, rust::Slice<const uint8_t> value);
rust::Vec<uint8_t> store_get(const Store& store, rust::Str key);
int64_t store_add(const Store& store, rust::Str key, int64_t amount);
rust::Vec<uint8_t> store_compare_set(
    const Store& store,
    rust::Str key,
    rust::Slice<const uint8_t> expected,
    rust::Slice<const uint8_t> desired);
bool store_delete(const Store& store, rust::Str key);
bool store_check(const Store& store, rust::Slice<const rust::Str> keys);
int64_t store_num_keys(const Store& store);
void store_wait(const Store& store, rust::Slice<const rust::Str> keys, int64_t timeout_ms);
void store_set_timeout(const Store& store, int64_t timeout_ms);
int64_t store_timeout(const Store& store);

} // namespace brigade
