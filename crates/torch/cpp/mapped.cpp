#include "mapped.h"

#ifdef __linux__
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#endif

namespace brigade {

#ifdef __linux__

namespace {

// Where a window lies, for the handler of SIGBUS. That is the process's, runs in whichever thread
// faulted, and may take no lock and no memory: so these are static, and a fixed number.
struct Slot {
  std::atomic<bool> taken{false};
  // Zero while there is no window.
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> cut{false};
};

// More threads than that read the others' way.
constexpr size_t kSlots = 128;
Slot slots[kSlots];
static_assert(std::atomic<uintptr_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

struct sigaction before;
uintptr_t page = 0;

// What the process would have done without us.
void pass_on(int number, siginfo_t* info, void* context) {
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
    return;
  }
  // Not a fault: somebody sent it.
  const bool sent = info->si_code <= 0;
  if (before.sa_handler == SIG_IGN && sent) {
    return;
  }
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
    return;
  }
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  (void)sigaction(number, &standard, nullptr);
  // A fault comes again when the instruction does; what was sent must be sent again, and comes when
  // this handler has returned.
  if (sent) {
    (void)raise(number);
  }
}

// Puts zeros in the place of the window's pages from the faulting one to the end, which the file does
// not have either; one call, and the copy goes on.
bool fill_with_zeros(uintptr_t fault) {
  for (auto& slot : slots) {
    const auto begin = slot.begin.load(std::memory_order_acquire);
    const auto end = slot.end.load(std::memory_order_acquire);
    // Asked twice: the slot may have gone to another window between the two.
    if (begin == 0 || fault < begin || fault >= end ||
        slot.begin.load(std::memory_order_acquire) != begin) {
      continue;
    }
    slot.cut.store(true, std::memory_order_release);
    const auto first = fault / page * page;
    // A bare system call, as a handler may make; the C library only adds errno to it.
    void* zeros = mmap(
        reinterpret_cast<void*>(first), end - first, PROT_READ,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return zeros != MAP_FAILED;
  }
  return false;
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const int kept = errno;
  // Positive: the kernel's, about an address.
  const bool ours = info->si_code > 0 &&
      fill_with_zeros(reinterpret_cast<uintptr_t>(info->si_addr));
  errno = kept;
  if (!ours) {
    pass_on(number, info, context);
  }
}

// Whether a fault of this thread would come to the handler. Somebody may have set another one since, or
// blocked the signal: a fault would end the process then.
bool is_guarded() {
  static const bool installed = [] {
    const auto size = sysconf(_SC_PAGESIZE);
    if (size <= 0 || sigaction(SIGBUS, nullptr, &before) != 0) {
      return false;
    }
    page = static_cast<uintptr_t>(size);
    struct sigaction ours {};
    ours.sa_sigaction = on_bus_error;
    // On the stack that Rust gives its threads for that, as its own handler.
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | (before.sa_flags & SA_RESTART);
    ours.sa_mask = before.sa_mask;
    return sigaction(SIGBUS, &ours, nullptr) == 0;
  }();
  struct sigaction now {};
  sigset_t blocked;
  return installed && sigaction(SIGBUS, nullptr, &now) == 0 &&
      (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_bus_error &&
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked) == 0 && sigismember(&blocked, SIGBUS) == 0;
}

} // namespace

std::unique_ptr<Window> map_window(int32_t file, uint64_t offset, size_t bytes) {
  if (bytes == 0 || !is_guarded()) {
    return nullptr;
  }
  size_t slot = 0;
  while (slot < kSlots && slots[slot].taken.exchange(true, std::memory_order_acq_rel)) {
    ++slot;
  }
  if (slot == kSlots) {
    return nullptr;
  }
  const auto skipped = static_cast<size_t>(offset % page);
  const auto length = (skipped + bytes + page - 1) / page * page;
  void* start =
      mmap(nullptr, length, PROT_READ, MAP_SHARED, file, static_cast<off_t>(offset - skipped));
  if (start == MAP_FAILED) {
    slots[slot].taken.store(false, std::memory_order_release);
    return nullptr;
  }
  const auto begin = reinterpret_cast<uintptr_t>(start);
  slots[slot].cut.store(false, std::memory_order_relaxed);
  slots[slot].end.store(begin + length, std::memory_order_release);
  slots[slot].begin.store(begin, std::memory_order_release);
#ifdef MADV_POPULATE_READ
  // In one call what would be a fault for every 16 pages. What cannot be had now, or by an older kernel,
  // faults later.
  (void)madvise(start, length, MADV_POPULATE_READ);
#endif
  return std::make_unique<Window>(start, length, skipped, slot);
}

Window::~Window() {
  // First the slot: from the next line on others may get these addresses.
  slots[slot_].begin.store(0, std::memory_order_release);
  (void)munmap(start_, length_);
  slots[slot_].taken.store(false, std::memory_order_release);
}

bool Window::is_sound() const {
  return !slots[slot_].cut.load(std::memory_order_acquire);
}

#else

std::unique_ptr<Window> map_window(int32_t, uint64_t, size_t) {
  return nullptr;
}

Window::~Window() = default;

bool Window::is_sound() const {
  return true;
}

#endif

size_t window_address(const Window& window) {
  return window.address();
}

bool window_is_sound(const Window& window) {
  return window.is_sound();
}

} // namespace brigade
