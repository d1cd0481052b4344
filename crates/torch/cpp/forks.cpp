#include "forks.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#ifdef __unix__
#include <pthread.h>
#include <unistd.h>
#endif

namespace brigade {

namespace {

std::atomic<bool> forked{false};

// One more than the descriptor; 0: free.
std::array<std::atomic<int>, 256> descriptors{};

// In the child, where no lock may be taken.
void in_child() {
  forked = true;
#ifdef __unix__
  for (auto& slot : descriptors) {
    if (const int number = slot.exchange(0)) {
      (void)::close(number - 1);
    }
  }
#endif
}

} // namespace

void watch_forks() {
#ifdef __unix__
  // Fails without memory only: then a child is not told.
  static const int watched = pthread_atfork(nullptr, nullptr, in_child);
  (void)watched;
#endif
}

bool is_fork() {
  return forked;
}

void check_not_fork(const char* what) {
  TORCH_CHECK(
      !forked,
      what,
      " cannot be used in a child of fork: its threads and connections are the parent's; fork before the "
      "Accelerator is made, or start a program (exec)");
}

void close_in_forks(int descriptor) {
  watch_forks();
  for (auto& slot : descriptors) {
    int free = 0;
    if (slot.compare_exchange_strong(free, descriptor + 1)) {
      return;
    }
  }
}

void keep_in_forks(int descriptor) {
  for (auto& slot : descriptors) {
    int held = descriptor + 1;
    if (slot.compare_exchange_strong(held, 0)) {
      return;
    }
  }
}

} // namespace brigade
