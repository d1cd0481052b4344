// Memory that the ranks of a group share when all of them run on one host, and the collectives in it.
#pragma once

#include "exchange.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

namespace brigade {

// Gradients that go through the loopback device are copied into the kernel and out again, by each rank,
// in pieces that wake a thread each. Here a rank copies a chunk into its slot, and the others add from
// there, or copy it to its place.
//
// A rank is known to live by a lock on its byte of the memory's file, which the kernel gives up with the
// process. The file has no name: nothing of it is left behind.
class SharedMemory {
 public:
  using Clock = std::chrono::steady_clock;

  // Makes it, for rank 0. None where the system has no such memory.
  static std::shared_ptr<SharedMemory> make(int size);
  // Opens what rank 0 has made. None where this rank cannot: it is on another host, in another
  // container, or not allowed to.
  static std::shared_ptr<SharedMemory> open(const std::string& address, int rank, int size);
  ~SharedMemory();

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // How other ranks find it.
  std::string address() const;

  // The ticket of the next collective, in the order of the calls, which is the same on all ranks.
  uint64_t take_ticket() {
    return tickets_taken_.fetch_add(1, std::memory_order_relaxed);
  }

  // As in `Exchange`, after the collectives before it. The memory cannot be used after a failure.
  void all_reduce(
      char* data, const Request& request, uint64_t ticket, std::chrono::milliseconds limit);
  void all_gather(
      const Pieces& own,
      const std::vector<Pieces>& places,
      const Request& request,
      uint64_t ticket,
      std::chrono::milliseconds limit);
  void reduce_scatter(
      const std::vector<Pieces>& parts,
      const Pieces& out,
      const Request& request,
      uint64_t ticket,
      std::chrono::milliseconds limit);

  // Collectives in flight, and all later ones, fail at once with this, and those of the other ranks too.
  void close(const std::exception_ptr& why) noexcept;

 private:
  struct Rank;
  struct Turn;

  SharedMemory(int fd, void* base, size_t bytes, int rank, int size);
  static std::shared_ptr<SharedMemory> map(int fd, int rank, int size);
  Rank& state(int rank) const;
  char* slot(int rank, uint32_t chunk) const;
  std::vector<const char*> slots(uint32_t chunk, size_t offset) const;
  template <typename Act>
  void serve(
      const Request& request, uint64_t ticket, std::chrono::milliseconds limit, Act act);
  void publish();
  void wait_for(int rank, const Turn& turn);
  void meet(int rank, const Turn& turn);
  void meet_all(const Turn& turn);
  void check_open();
  bool lives(int rank) const;

  const int fd_;
  void* const base_;
  const size_t bytes_;
  const int rank_;
  const int size_;
  const size_t slot_bytes_;

  std::atomic<uint64_t> tickets_taken_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  // The ticket that is served. With `why_` under the mutex.
  uint64_t serving_ = 0;
  std::atomic<bool> closed_{false};
  std::exception_ptr why_;

  // Chunks so far, and steps that this rank has announced.
  uint32_t chunks_ = 0;
  uint32_t progress_ = 0;
};

// One collective in it.
class SharedExchange final : public Exchange {
 public:
  explicit SharedExchange(const std::shared_ptr<SharedMemory>& memory)
      : Exchange(memory->rank(), memory->size()), memory_(memory), ticket_(memory->take_ticket()) {}

  void all_reduce(
      char* data, const Request& request, std::chrono::milliseconds limit) override {
    memory_->all_reduce(data, request, ticket_, limit);
  }
  void all_gather(
      const Pieces& own,
      const std::vector<Pieces>& places,
      const Request& request,
      std::chrono::milliseconds limit) override {
    memory_->all_gather(own, places, request, ticket_, limit);
  }
  void reduce_scatter(
      const std::vector<Pieces>& parts,
      const Pieces& out,
      const Request& request,
      std::chrono::milliseconds limit) override {
    memory_->reduce_scatter(parts, out, request, ticket_, limit);
  }
  void fail(const std::exception_ptr& why) noexcept override {
    memory_->close(why);
  }

 private:
  const std::shared_ptr<SharedMemory> memory_;
  const uint64_t ticket_;
};

} // namespace brigade
