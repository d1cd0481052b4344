// Memory that the ranks of a group share when all of them run on one host, and the all-reduce in it.
#pragma once

#include "combine.h"

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
// in pieces that wake a thread each. Here a rank copies a piece into its slot, and the others add from
// there.
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

  // The ticket of the next all-reduce, in the order of the calls, which is the same on all ranks.
  uint64_t take_ticket() {
    return tickets_taken_.fetch_add(1, std::memory_order_relaxed);
  }

  // Combines `data` of all ranks, in the order of their numbers: all get the same bits. Waits for the
  // all-reduces before it. Throws when a rank asks for something else, has left or does not come in time;
  // the memory cannot be used after that.
  void all_reduce(void* data, const Request& request, uint64_t ticket, std::chrono::milliseconds limit);

  // All-reduces in flight, and all later ones, fail at once with this, and those of the other ranks too.
  void close(const std::exception_ptr& why) noexcept;

 private:
  struct Rank;
  struct TicketGuard;

  SharedMemory(int fd, void* base, size_t bytes, int rank, int size);
  static std::shared_ptr<SharedMemory> map(int fd, int rank, int size);
  Rank& state(int rank) const;
  char* slot(int rank, uint32_t chunk) const;
  void publish();
  void wait_for(int rank, Clock::time_point end, std::chrono::milliseconds limit);
  void wait_for_all(Clock::time_point end, std::chrono::milliseconds limit);
  void compare(const Request& request, uint32_t chunk) const;
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

  // Of the all-reduce that is served: pieces so far, and steps that this rank has announced.
  uint32_t chunks_ = 0;
  uint32_t progress_ = 0;
};

} // namespace brigade
