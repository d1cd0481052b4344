#include "shared_memory.h"

#include "every_cpu.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <type_traits>

#ifdef __linux__
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace brigade {

namespace {

using std::chrono::milliseconds;
using RedOp = c10d::ReduceOp::RedOpType;

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
// A piece fits the cache between its writer and its readers.
constexpr size_t kLargestSlot = 1 << 20;
constexpr size_t kSmallestSlot = 128 << 10;
constexpr size_t kSlotsOfAllRanks = 4 << 20;
// Up to here every rank adds all pieces for itself; with more each adds its part and copies the others'.
constexpr int kAllAdd = 3;
// Looks before a rank sleeps: its core may have other work to do.
constexpr int kLooks = 200;
// How often a sleeping rank looks whether the others live.
constexpr milliseconds kLifeSign{50};

size_t slot_bytes(int size) {
  const size_t fair = kSlotsOfAllRanks / static_cast<size_t>(size) / kPage * kPage;
  return std::clamp(fair, kSmallestSlot, kLargestSlot);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

const char* name(RedOp op) {
  switch (op) {
    case RedOp::SUM:
      return "sum";
    case RedOp::PRODUCT:
      return "product";
    case RedOp::MIN:
      return "smallest";
    default:
      return "largest";
  }
}

// `from` is one operand of each rank, one slot after the other. 16-bit numbers are combined in 32.
template <typename T, typename Combine>
BRIGADE_INLINE void combine_all(
    T* to, const T* from, size_t stride, int ranks, size_t count, Combine combine) {
  using Wide = std::conditional_t<
      std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>,
      float,
      T>;
  constexpr size_t kBlock = 1024;
  Wide block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    for (size_t i = 0; i < n; ++i) {
      block[i] = static_cast<Wide>(from[begin + i]);
    }
    for (int rank = 1; rank < ranks; ++rank) {
      const T* other = from + rank * stride + begin;
      for (size_t i = 0; i < n; ++i) {
        block[i] = combine(block[i], static_cast<Wide>(other[i]));
      }
    }
    for (size_t i = 0; i < n; ++i) {
      to[begin + i] = static_cast<T>(block[i]);
    }
  }
}

struct Sum {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Product {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return a * b;
  }
};
struct Smallest {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Largest {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// What gradients are.
BRIGADE_EVERY_CPU
void sum_float(float* to, const float* from, size_t stride, int ranks, size_t count) {
  combine_all(to, from, stride, ranks, count, Sum());
}
BRIGADE_EVERY_CPU
void sum_bfloat16(
    c10::BFloat16* to, const c10::BFloat16* from, size_t stride, int ranks, size_t count) {
  combine_all(to, from, stride, ranks, count, Sum());
}

template <typename T>
void combine_as(RedOp op, char* out, const char* in, size_t stride, int ranks, size_t count) {
  auto* to = reinterpret_cast<T*>(out);
  const auto* from = reinterpret_cast<const T*>(in);
  stride /= sizeof(T);
  switch (op) {
    case RedOp::SUM:
      if constexpr (std::is_same_v<T, float>) {
        return sum_float(to, from, stride, ranks, count);
      } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
        return sum_bfloat16(to, from, stride, ranks, count);
      } else {
        return combine_all(to, from, stride, ranks, count, Sum());
      }
    case RedOp::PRODUCT:
      return combine_all(to, from, stride, ranks, count, Product());
    case RedOp::MIN:
      return combine_all(to, from, stride, ranks, count, Smallest());
    default:
      return combine_all(to, from, stride, ranks, count, Largest());
  }
}

void combine(
    const SharedMemory::Request& request,
    char* out,
    const char* in,
    size_t stride,
    int ranks,
    size_t count) {
  switch (request.kind) {
    case c10::ScalarType::Float:
      return combine_as<float>(request.op, out, in, stride, ranks, count);
    case c10::ScalarType::Double:
      return combine_as<double>(request.op, out, in, stride, ranks, count);
    case c10::ScalarType::Half:
      return combine_as<c10::Half>(request.op, out, in, stride, ranks, count);
    case c10::ScalarType::BFloat16:
      return combine_as<c10::BFloat16>(request.op, out, in, stride, ranks, count);
    case c10::ScalarType::Int:
      return combine_as<int32_t>(request.op, out, in, stride, ranks, count);
    default:
      return combine_as<int64_t>(request.op, out, in, stride, ranks, count);
  }
}

} // namespace

// In the memory, one for each rank. Zero at first, as all of it.
struct alignas(kLine) SharedMemory::Rank {
  // Steps that it has made; the others sleep on it.
  std::atomic<uint32_t> progress;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> left;
  // Of the pieces with an even and an odd number: what the all-reduce that begins with it is of.
  Request requests[2];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

bool SharedMemory::serves(c10::ScalarType kind, RedOp op) {
  switch (kind) {
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return op == RedOp::SUM || op == RedOp::PRODUCT || op == RedOp::MIN || op == RedOp::MAX;
    default:
      return false;
  }
}

#ifdef __linux__

namespace {

size_t header_bytes(int size, size_t rank_bytes) {
  return (static_cast<size_t>(size) * rank_bytes + kPage - 1) / kPage * kPage;
}

// Processes with the same answer can reach each other's descriptors, and their network is one: where it
// is not, a test or a container makes several hosts of this one, and they are to meet as such.
std::string host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  struct stat pids, net;
  if (boot.empty() || stat("/proc/self/ns/pid", &pids) != 0 || stat("/proc/self/ns/net", &net) != 0) {
    return "";
  }
  std::ostringstream out;
  out << boot << ' ' << pids.st_ino << ' ' << net.st_ino;
  return out.str();
}

// The device and number of the file behind a descriptor.
std::string identity(int fd) {
  struct stat found;
  if (fstat(fd, &found) != 0) {
    return "";
  }
  std::ostringstream out;
  out << found.st_dev << ' ' << found.st_ino;
  return out.str();
}

bool lock_byte(int fd, int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

void sleep_while(const std::atomic<uint32_t>& word, uint32_t value, milliseconds limit) {
  struct timespec time = {};
  time.tv_sec = limit.count() / 1000;
  time.tv_nsec = limit.count() % 1000 * 1'000'000;
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

} // namespace

std::shared_ptr<SharedMemory> SharedMemory::make(int size) {
  const int fd = memfd_create("brigade", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return nullptr;
  }
  const size_t bytes = header_bytes(size, sizeof(Rank)) + 2 * slot_bytes(size) * size;
  // Sealed: nobody can take the memory away under a rank that uses it.
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    ::close(fd);
    return nullptr;
  }
  return map(fd, 0, size);
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& address, int rank, int size) {
  std::istringstream in(address);
  std::string path, file, where;
  std::getline(in, path, '\n');
  std::getline(in, file, '\n');
  std::getline(in, where, '\n');
  if (where.empty() || where != host()) {
    return nullptr;
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return nullptr;
  }
  if (identity(fd) != file) {
    ::close(fd);
    return nullptr;
  }
  return map(fd, rank, size);
}

std::shared_ptr<SharedMemory> SharedMemory::map(int fd, int rank, int size) {
  const size_t bytes = header_bytes(size, sizeof(Rank)) + 2 * slot_bytes(size) * size;
  struct stat found;
  void* base = MAP_FAILED;
  if (fstat(fd, &found) == 0 && static_cast<size_t>(found.st_size) == bytes && lock_byte(fd, rank)) {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (base == MAP_FAILED) {
    ::close(fd);
    return nullptr;
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(fd, base, bytes, rank, size));
}

SharedMemory::~SharedMemory() {
  close("the group was dropped");
  munmap(base_, bytes_);
  ::close(fd_);
}

std::string SharedMemory::address() const {
  const auto where = host();
  if (where.empty()) {
    return "";
  }
  std::ostringstream out;
  out << "/proc/" << getpid() << "/fd/" << fd_ << '\n' << identity(fd_) << '\n' << where;
  return out.str();
}

bool SharedMemory::lives(int rank) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  // What cannot be asked is taken for alive: the time limit is still there.
  return fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void SharedMemory::close(const std::string& why) noexcept {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (closed_.exchange(true)) {
      return;
    }
    why_ = why;
  }
  changed_.notify_all();
  state(rank_).left.store(1);
  for (int rank = 0; rank < size_; ++rank) {
    wake_all(state(rank).progress);
  }
}

void SharedMemory::publish() {
  auto& own = state(rank_);
  own.progress.store(++progress_);
  // In one order with the sleeper's count and its look at the progress.
  if (own.sleepers.load() > 0) {
    wake_all(own.progress);
  }
}

// Until `rank` has made as many steps as this one.
void SharedMemory::wait_for(int rank, Clock::time_point end, milliseconds limit) {
  auto& other = state(rank);
  uint32_t seen = 0;
  // The numbers go round: their distance tells.
  const auto there = [&] {
    seen = other.progress.load();
    return static_cast<int32_t>(seen - progress_) >= 0;
  };
  for (int look = 0; look < kLooks; ++look) {
    if (there()) {
      return;
    }
    relax();
  }
  bool gone = false;
  while (!there()) {
    check_open();
    // Looked at once more after it was seen to be gone: its last step counts.
    if (gone || other.left.load() != 0) {
      if (there()) {
        return;
      }
      throw std::runtime_error(
          "Connection closed by peer: rank " + std::to_string(rank) + " has left the group");
    }
    const auto now = Clock::now();
    if (now >= end) {
      throw std::runtime_error(
          "Timed out waiting " + std::to_string(limit.count()) + "ms for rank " +
          std::to_string(rank) + " in an all-reduce");
    }
    const auto left = std::chrono::ceil<milliseconds>(end - now);
    other.sleepers.fetch_add(1);
    if (!there() && !closed_.load()) {
      sleep_while(other.progress, seen, std::min(left, kLifeSign));
    }
    other.sleepers.fetch_sub(1);
    gone = !there() && !lives(rank);
  }
}

#else

std::shared_ptr<SharedMemory> SharedMemory::make(int) {
  return nullptr;
}
std::shared_ptr<SharedMemory> SharedMemory::open(const std::string&, int, int) {
  return nullptr;
}
SharedMemory::~SharedMemory() = default;
std::string SharedMemory::address() const {
  return "";
}
void SharedMemory::close(const std::string&) noexcept {}
void SharedMemory::publish() {}
void SharedMemory::wait_for(int, Clock::time_point, milliseconds) {}

#endif

SharedMemory::SharedMemory(int fd, void* base, size_t bytes, int rank, int size)
    : fd_(fd),
      base_(base),
      bytes_(bytes),
      rank_(rank),
      size_(size),
      slot_bytes_(brigade::slot_bytes(size)) {}

SharedMemory::Rank& SharedMemory::state(int rank) const {
  return static_cast<Rank*>(base_)[rank];
}

// Two for each rank, in turns: who fills one knows that all have read what it held, since they have told
// of the piece between.
char* SharedMemory::slot(int rank, uint32_t chunk) const {
  const size_t slots = 2 * slot_bytes_ * static_cast<size_t>(size_);
  char* first = static_cast<char*>(base_) + bytes_ - slots;
  return first + (chunk % 2 * static_cast<size_t>(size_) + static_cast<size_t>(rank)) * slot_bytes_;
}

void SharedMemory::check_open() {
  if (closed_.load()) {
    std::lock_guard<std::mutex> guard(mutex_);
    throw std::runtime_error(why_);
  }
}

void SharedMemory::wait_for_all(Clock::time_point end, milliseconds limit) {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_) {
      wait_for(rank, end, limit);
    }
  }
}

void SharedMemory::compare(const Request& request, uint32_t chunk) const {
  for (int rank = 0; rank < size_; ++rank) {
    const auto& other = state(rank).requests[chunk % 2];
    if (!(other == request)) {
      const auto text = [](const Request& request) {
        std::ostringstream out;
        out << request.numel << " numbers of type " << c10::toString(request.kind) << ", "
            << name(request.op);
        return out.str();
      };
      TORCH_CHECK(
          false,
          "an all-reduce is of the same on all ranks: rank ",
          rank_,
          " asked for ",
          text(request),
          ", rank ",
          rank,
          " for ",
          text(other));
    }
  }
}

// The all-reduce whose turn it is; the next one's when this is gone.
struct SharedMemory::Turn {
  Turn(SharedMemory& memory, uint64_t turn, Clock::time_point end, milliseconds limit)
      : memory(memory) {
    std::unique_lock<std::mutex> lock(memory.mutex_);
    const bool came = memory.changed_.wait_until(
        lock, end, [&] { return memory.turn_ == turn || memory.closed_.load(); });
    if (memory.closed_.load()) {
      throw std::runtime_error(memory.why_);
    }
    if (!came) {
      throw std::runtime_error(
          "Timed out waiting " + std::to_string(limit.count()) +
          "ms for the all-reduce before this one");
    }
  }
  ~Turn() {
    {
      std::lock_guard<std::mutex> guard(memory.mutex_);
      ++memory.turn_;
    }
    memory.changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  SharedMemory& memory;
};

void SharedMemory::all_reduce(
    void* data, const Request& request, uint64_t turn, milliseconds limit) {
  // A limit as large as the type allows is none.
  const auto now = Clock::now();
  const auto longest = std::chrono::duration_cast<milliseconds>(Clock::time_point::max() - now) / 2;
  const auto end = now + std::min(limit, longest);
  try {
    const Turn own(*this, turn, end, limit);
    const size_t width = c10::elementSize(request.kind);
    const size_t count = static_cast<size_t>(request.numel);
    const size_t most = slot_bytes_ / width;
    size_t done = 0;
    do {
      const size_t n = std::min(most, count - done);
      char* const piece = static_cast<char*>(data) + done * width;
      const uint32_t chunk = chunks_++;
      if (done == 0) {
        state(rank_).requests[chunk % 2] = request;
      }
      std::memcpy(slot(rank_, chunk), piece, n * width);
      publish();
      wait_for_all(end, limit);
      if (done == 0) {
        compare(request, chunk);
      }
      if (size_ <= kAllAdd) {
        combine(request, piece, slot(0, chunk), slot_bytes_, size_, n);
      } else {
        const auto part = [&](int rank) { return n * static_cast<size_t>(rank) / size_; };
        const size_t begin = part(rank_);
        char* const sums = slot(rank_, chunk) + begin * width;
        combine(
            request,
            sums,
            slot(0, chunk) + begin * width,
            slot_bytes_,
            size_,
            part(rank_ + 1) - begin);
        publish();
        wait_for_all(end, limit);
        for (int rank = 0; rank < size_; ++rank) {
          const size_t from = part(rank) * width;
          std::memcpy(piece + from, slot(rank, chunk) + from, part(rank + 1) * width - from);
        }
      }
      done += n;
    } while (done < count);
  } catch (const std::exception& error) {
    // The ranks are no longer at the same place: what comes later fails for the same reason.
    close(error.what());
    throw;
  }
}

} // namespace brigade
