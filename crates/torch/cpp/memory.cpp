#include "memory.h"

#include "forks.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>

#ifdef __linux__
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <unordered_map>

namespace brigade {

namespace {

#ifdef __linux__

// Smaller tensors stay with the C library: they are many, and would break the large blocks up.
constexpr size_t kSmallest = 1 << 20;
// c10's own alignment of CPU tensors.
constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = 2 << 20;

size_t rounded_up(size_t number, size_t step) {
  return (number + step - 1) / step * step;
}

// Whether nothing counts addresses, as `ulimit -v` does.
bool addresses_are_unlimited() {
  rlimit limit{};
  return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
}

// True if address space is unlimited: no RLIMIT_AS, and no strict accounting of reserved memory.
bool addresses_are_free() {
  if (!addresses_are_unlimited()) {
    return false;
  }
  int accounting = 0;
  std::ifstream("/proc/sys/vm/overcommit_memory") >> accounting;
  return accounting != 2;
}

// For a heap that is not to be trusted any more: no allocation, no destructor.
[[noreturn]] void die(const char* line) {
  const auto written = ::write(STDERR_FILENO, line, std::strlen(line));
  (void)written;
  std::abort();
}

// First fit over one stretch of addresses, where neighbours that are free become one block. A training
// step asks for the same sizes in the same order, and its free blocks are few: over the steps of
// ResNet-18 the highest address stays within 1 % of what is held at most (best fit: 10 %). The addresses
// are reserved once, without memory: the system gives pages at their first touch, and only as far up as
// blocks have ever reached. All of it may lie in huge pages, since nothing small is between.
class Blocks {
 public:
  static Blocks* reserve() {
    const auto pages = sysconf(_SC_PHYS_PAGES);
    const auto page = sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page <= 0 || !addresses_are_free()) {
      return nullptr;
    }
    // More than the machine has cannot be used.
    const auto length = rounded_up(static_cast<size_t>(pages) * page, kHugePage);
    void* start = mmap(
        nullptr, length + kHugePage, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
      return nullptr;
    }
    auto* aligned =
        reinterpret_cast<char*>(rounded_up(reinterpret_cast<uintptr_t>(start), kHugePage));
#ifdef MADV_HUGEPAGE
    // Refused where the kernel has none: then these are ordinary pages.
    (void)madvise(aligned, length, MADV_HUGEPAGE);
#endif
    return new Blocks(aligned, length, static_cast<size_t>(page));
  }

  // Null when no free block is large enough.
  void* take(size_t bytes) {
    if (bytes > length_) {
      return nullptr; // also what would overflow below
    }
    // Without the extra line, tensors of a power of two would all begin at the same place of the caches.
    const auto size = rounded_up(bytes, kAlignment) + kAlignment;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(
        free_.begin(), free_.end(), [&](const auto& block) { return block.second >= size; });
    if (found == free_.end()) {
      return nullptr;
    }
    const auto [offset, length] = *found;
    const auto next = free_.erase(found);
    if (length > size) {
      free_.emplace_hint(next, offset + size, length - size);
    }
    taken_.emplace(offset, size);
    return start_ + offset;
  }

  bool has(const void* pointer) const {
    return pointer >= start_ && pointer < start_ + length_;
  }

  void give(void* pointer) {
    const auto at = static_cast<size_t>(static_cast<char*>(pointer) - start_);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto held = taken_.find(at);
    if (held == taken_.end()) {
      die("brigade: memory of a tensor was freed twice, or by an address that is not its own\n");
    }
    const auto size = held->second;
    taken_.erase(held);
    auto above = free_.emplace(at, size).first;
    if (above != free_.begin()) {
      const auto below = std::prev(above);
      if (below->first + below->second == at) {
        below->second += size;
        free_.erase(above);
        above = below;
      }
    }
    const auto block = above++;
    if (above != free_.end() && block->first + block->second == above->first) {
      block->second += above->second;
      free_.erase(above);
    }
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [offset, size] : free_) {
      const auto begin = rounded_up(offset, page_);
      const auto end = (offset + size) / page_ * page_;
      if (begin < end) {
        // What it cannot give back it keeps, and both are fine.
        (void)madvise(start_ + begin, end - begin, MADV_DONTNEED);
      }
    }
  }

 private:
  Blocks(char* start, size_t length, size_t page) : start_(start), length_(length), page_(page) {
    free_.emplace(0, length);
  }

  char* start_;
  size_t length_;
  size_t page_;
  std::mutex mutex_;
  // Offset to size, both.
  std::map<size_t, size_t> free_;
  std::unordered_map<size_t, size_t> taken_;
};

class LargeBlocks final : public c10::Allocator {
 public:
  LargeBlocks(Blocks* blocks, c10::Allocator* small) : blocks_(blocks), small_(small) {}

  c10::DataPtr allocate(size_t bytes) override {
    // Another thread may have held the lock when this process was forked.
    check_not_fork("memory for tensors");
    // A limit that comes later must be felt, and the stretch was reserved before it.
    const bool mine = bytes >= kSmallest && addresses_are_unlimited();
    void* block = mine ? blocks_->take(bytes) : nullptr;
    if (block == nullptr) {
      try {
        return small_->allocate(bytes);
      } catch (const c10::Error& error) {
        // In libtorch's own words, which people know, but of a type that tells it from other errors.
        C10_THROW_ERROR(OutOfMemoryError, error.msg());
      }
    }
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &LargeBlocks::free, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &LargeBlocks::free;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void release() {
    blocks_->release();
  }

  // The one of this process. It is never destroyed: tensors may outlive everything else.
  static LargeBlocks* installed() {
    static LargeBlocks* const allocator = []() -> LargeBlocks* {
      auto* blocks = Blocks::reserve();
      if (blocks == nullptr) {
        return nullptr;
      }
      return new LargeBlocks(blocks, c10::GetCPUAllocator());
    }();
    return allocator;
  }

 private:
  static void free(void* pointer) {
    auto* self = installed();
    if (is_fork()) {
      // It is the parent's, and ends with this process.
      return;
    }
    if (self->blocks_->has(pointer)) {
      c10::profiledCPUMemoryReporter().Delete(pointer);
      self->blocks_->give(pointer);
    } else {
      self->small_->raw_deleter()(pointer);
    }
  }

  Blocks* blocks_;
  c10::Allocator* small_;
};

bool keep_large_blocks() {
  auto* allocator = LargeBlocks::installed();
  if (allocator == nullptr) {
    return false;
  }
  watch_forks();
  c10::SetCPUAllocator(allocator, 1);
  return true;
}

void release_large_blocks() {
  // Not `installed()`: asking must not reserve.
  if (auto* allocator = dynamic_cast<LargeBlocks*>(c10::GetCPUAllocator())) {
    allocator->release();
  }
}

#else

bool keep_large_blocks() {
  return false;
}

void release_large_blocks() {}

#endif

#ifdef __GLIBC__

// What oneDNN works in, and small tensors. The heap grows at its end, and only pages that exist can be
// asked to be huge ones: so it grows first, which takes addresses and no memory.
void put_heap_in_huge_pages() {
#ifdef MADV_HUGEPAGE
  constexpr size_t kHeap = 64 << 20;
  void* block = malloc(kHeap);
  if (block == nullptr) {
    return;
  }
  const auto begin = rounded_up(reinterpret_cast<uintptr_t>(block), kHugePage);
  const auto end = (reinterpret_cast<uintptr_t>(block) + kHeap) / kHugePage * kHugePage;
  free(block);
  // Somewhere else than in the heap, it was given back.
  if (end <= reinterpret_cast<uintptr_t>(sbrk(0))) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

bool keep_heap() {
  constexpr int kNever = std::numeric_limits<int>::max();
  // Older versions take at most half a heap for the first.
  constexpr int kHalfHeap = 32 << 20;
  const bool no_maps = mallopt(M_MMAP_THRESHOLD, kNever) != 0 ||
      mallopt(M_MMAP_THRESHOLD, kHalfHeap) != 0;
  if (mallopt(M_TRIM_THRESHOLD, kNever) == 0 || !no_maps) {
    return false;
  }
  if (addresses_are_free()) {
    put_heap_in_huge_pages();
  }
  return true;
}

#else

bool keep_heap() {
  return false;
}

#endif

// Tensors that begin at any multiple of 4 bytes, as bits must not depend on it.
class ShiftedBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t shift = shift_.load();
    // The block's own address lies in front of the tensor.
    char* block = static_cast<char*>(std::aligned_alloc(
        c10::gAlignment, (bytes + shift + 2 * c10::gAlignment) / c10::gAlignment * c10::gAlignment));
    TORCH_CHECK(block != nullptr, "not enough memory for a tensor of ", bytes, " bytes");
    char* tensor = block + c10::gAlignment + shift;
    std::memcpy(tensor - sizeof(block), &block, sizeof(block));
    return {tensor, tensor, &ShiftedBlocks::free, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &ShiftedBlocks::free;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static void install(size_t shift) {
    // Never destroyed: tensors may outlive everything else.
    static ShiftedBlocks* const allocator = new ShiftedBlocks();
    allocator->shift_ = shift;
    // Before the allocator of `keep_freed_memory`, which may come later.
    c10::SetCPUAllocator(allocator, 2);
  }

 private:
  static void free(void* tensor) {
    if (tensor != nullptr) {
      char* block = nullptr;
      std::memcpy(&block, static_cast<char*>(tensor) - sizeof(block), sizeof(block));
      std::free(block);
    }
  }

  std::atomic<size_t> shift_{0};
};

} // namespace

void shift_allocations(size_t bytes) {
  TORCH_CHECK(
      bytes % 4 == 0 && bytes < c10::gAlignment,
      "allocations can be shifted by multiples of 4 bytes below ", c10::gAlignment, ", not by ", bytes);
  ShiftedBlocks::install(bytes);
}

bool keep_freed_memory() {
  const bool blocks = keep_large_blocks();
  return keep_heap() || blocks;
}

void release_freed_memory() {
  release_large_blocks();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

} // namespace brigade
