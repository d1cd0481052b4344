// Gloo's threads give way to the thread that they wait for.
//
// A thread of a Gloo device ("gloo_tcp_loop") that finds a connection locked, because another thread sends on it, leaves
// the message where it is and asks the system for messages again, which returns at once. If the sending thread has lost
// its processor meanwhile, the loop takes the whole of its time slice, some milliseconds, for each such message. That
// is the rule where ranks and their threads need all processors of a host: the message of a sender wakes the loop of the
// receiver, which takes the sender's processor and answers. Of a pipeline's step on two processors it was 40 % of the
// processor time.
//
// libtorch has Gloo linked in, without a setting for this. It calls libc's function for the attempt, and the linker lets
// the one of the program take its place. For all other threads it is libc's.
#if defined(__linux__) && defined(__GLIBC__)

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>

namespace brigade {

namespace {

using TryLock = int (*)(pthread_mutex_t*);

// The function that the program would have without this file.
TryLock next_try_lock() {
  // Without the guard of a static initialiser: `dlsym` may allocate, and an allocator may come here.
  static std::atomic<TryLock> known{nullptr};
  TryLock next = known.load(std::memory_order_relaxed);
  if (next == nullptr) {
    next = reinterpret_cast<TryLock>(dlsym(RTLD_NEXT, "pthread_mutex_trylock"));
    known.store(next, std::memory_order_relaxed);
  }
  return next;
}

bool is_loop_of_gloo() {
  char name[16] = "";
  return pthread_getname_np(pthread_self(), name, sizeof(name)) == 0 &&
      std::strcmp(name, "gloo_tcp_loop") == 0;
}

// Attempts between which the thread sleeps once: the one with the lock may wait for another processor, from which only
// a processor that has nothing to do takes it over.
constexpr int kYields = 4;
constexpr timespec kSleep{0, 20'000};

void give_way() {
  thread_local const bool is_loop = is_loop_of_gloo();
  thread_local int failed = 0;
  if (!is_loop) {
    return;
  }
  failed = failed % (kYields + 1) + 1;
  if (failed <= kYields) {
    sched_yield();
  } else {
    nanosleep(&kSleep, nullptr);
  }
}

} // namespace

} // namespace brigade

extern "C" __attribute__((visibility("default"))) int pthread_mutex_trylock(pthread_mutex_t* mutex) __THROWNL {
  const int result = brigade::next_try_lock()(mutex);
  if (result == EBUSY) {
    // libc's function leaves it alone, and a sleep that a signal ends does not.
    const int kept = errno;
    brigade::give_way();
    errno = kept;
  }
  return result;
}

#endif
