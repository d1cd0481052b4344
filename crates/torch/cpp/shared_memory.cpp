#include "shared_memory.h"

#include "errors.h"
#include "forks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

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

constexpr size_t kPage = 4096;
// A chunk fits the cache between its writer and its readers.
constexpr size_t kLargestSlot = 1 << 20;
constexpr size_t kSmallestSlot = 128 << 10;
constexpr size_t kSlotsOfAllRanks = 4 << 20;
// More do not run on one host; a slot has a line for each.
constexpr int kMostRanks = 1024;
// Up to here every rank adds all chunks for itself; with more each adds its part and copies the others'.
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

} // namespace

// In the memory, one for each rank. Zero at first, as all of it.
struct alignas(kLine) SharedMemory::Rank {
  // Steps that it has made; the others sleep on it.
  std::atomic<uint32_t> progress;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> left;
  // Of the chunks with an even and an odd number: what the collective that begins with it is of.
  Request requests[2];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

// What the collective that is served has of its own.
struct SharedMemory::Turn {
  const Request& request;
  const Clock::time_point end;
  const milliseconds limit;
  uint32_t chunk = 0;
  // Of the first chunk the ranks compare what it is of.
  bool first = true;
};

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

// Whether a descriptor is of memory as rank 0 makes it: nameless, this user's, and of a size that nothing can
// change under a rank that uses it.
bool is_sealed_memory(int fd) {
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  struct stat found;
  const int seals = fcntl(fd, F_GET_SEALS);
  return fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_nlink == 0 &&
      found.st_uid == geteuid() && seals >= 0 && (seals & kSeals) == kSeals;
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
  if (size > kMostRanks) {
    return nullptr;
  }
  const int fd = memfd_create("brigade", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    return nullptr;
  }
  const size_t bytes = header_bytes(size, sizeof(Rank)) + 2 * slot_bytes(size) * size;
  // Sealed: nothing can take the memory away under a rank that uses it.
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    ::close(fd);
    return nullptr;
  }
  return map(fd, 0, size);
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& address, int rank, int size) {
  // Numbers, of which the path is made here: the store has them from a peer.
  std::istringstream in(address);
  int pid = 0, number = -1;
  std::string where;
  in >> pid >> number >> std::ws;
  std::getline(in, where);
  if (!in || pid <= 0 || number < 0 || where.empty() || where != host()) {
    return nullptr;
  }
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  // Not even opened for writing before it is known to be memory: to open a device or a pipe does things.
  const int seen = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  struct stat found;
  const bool regular = seen >= 0 && fstat(seen, &found) == 0 && S_ISREG(found.st_mode);
  if (seen >= 0) {
    ::close(seen);
  }
  const int fd = regular ? ::open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) {
    return nullptr;
  }
  if (!is_sealed_memory(fd)) {
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
  // A child would hold the lock beyond this process's end.
  close_in_forks(fd);
  return std::shared_ptr<SharedMemory>(new SharedMemory(fd, base, bytes, rank, size));
}

SharedMemory::~SharedMemory() {
  close(std::make_exception_ptr(Aborted("the group was dropped")));
  munmap(base_, bytes_);
  keep_in_forks(fd_);
  ::close(fd_);
}

std::string SharedMemory::address() const {
  const auto where = host();
  if (where.empty()) {
    return "";
  }
  std::ostringstream out;
  out << getpid() << ' ' << fd_ << ' ' << where;
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

void SharedMemory::close(const std::exception_ptr& why) noexcept {
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
void SharedMemory::wait_for(int rank, const Turn& turn) {
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
      throw PeerLost(
          "Connection closed by peer: rank " + std::to_string(rank) + " has left the group");
    }
    const auto now = Clock::now();
    if (now >= turn.end) {
      throw TimeLimit(
          "Timed out waiting " + std::to_string(turn.limit.count()) + "ms for rank " +
          std::to_string(rank) + " in " + name(turn.request.operation));
    }
    const auto left = std::chrono::ceil<milliseconds>(turn.end - now);
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
void SharedMemory::close(const std::exception_ptr&) noexcept {}
void SharedMemory::publish() {}
void SharedMemory::wait_for(int, const Turn&) {}

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

// Two for each rank, in turns: a rank may fill one because all ranks have read what it held: they have
// announced the chunk between.
char* SharedMemory::slot(int rank, uint32_t chunk) const {
  const size_t slots = 2 * slot_bytes_ * static_cast<size_t>(size_);
  char* first = static_cast<char*>(base_) + bytes_ - slots;
  return first + (chunk % 2 * static_cast<size_t>(size_) + static_cast<size_t>(rank)) * slot_bytes_;
}

// Those of all ranks, from a byte of them on.
std::vector<const char*> SharedMemory::slots(uint32_t chunk, size_t offset) const {
  std::vector<const char*> all;
  for (int rank = 0; rank < size_; ++rank) {
    all.push_back(slot(rank, chunk) + offset);
  }
  return all;
}

void SharedMemory::check_open() {
  if (closed_.load()) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::rethrow_exception(why_);
  }
}

// Waits for `rank`, which has asked for the same.
void SharedMemory::meet(int rank, const Turn& turn) {
  if (rank == rank_) {
    return;
  }
  wait_for(rank, turn);
  if (turn.first) {
    check_same(rank_, turn.request, rank, state(rank).requests[turn.chunk % 2]);
  }
}

void SharedMemory::meet_all(const Turn& turn) {
  for (int rank = 0; rank < size_; ++rank) {
    meet(rank, turn);
  }
}

// Waits for its turn, calls `act` for one chunk after the other until it returns that there is no more, and has the
// next one served.
template <typename Act>
void SharedMemory::serve(
    const Request& request, uint64_t ticket, milliseconds limit, Act act) {
  Turn turn{request, deadline(limit), limit};
  try {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const bool came = changed_.wait_until(
          lock, turn.end, [&] { return serving_ == ticket || closed_.load(); });
      if (closed_.load()) {
        std::rethrow_exception(why_);
      }
      if (!came) {
        throw TimeLimit(
            "Timed out waiting " + std::to_string(limit.count()) +
            "ms for the collective before this one");
      }
    }
    bool more = true;
    while (more) {
      turn.chunk = chunks_++;
      if (turn.first) {
        state(rank_).requests[turn.chunk % 2] = request;
      }
      more = act(turn);
      turn.first = false;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++serving_;
    }
    changed_.notify_all();
  } catch (const std::exception&) {
    // The ranks are no longer at the same place: what comes later fails for the same reason.
    close(std::current_exception());
    throw;
  }
}

void SharedMemory::all_reduce(
    char* data, const Request& request, uint64_t ticket, milliseconds limit) {
  const size_t width = c10::elementSize(request.kind);
  const size_t count = static_cast<size_t>(request.numel);
  const size_t most = slot_bytes_ / width;
  size_t done = 0;
  serve(request, ticket, limit, [&](const Turn& turn) {
    const size_t n = std::min(most, count - done);
    char* const chunk = data + done * width;
    std::memcpy(slot(rank_, turn.chunk), chunk, n * width);
    publish();
    meet_all(turn);
    if (size_ <= kAllAdd) {
      combine(request.kind, request.op, chunk, slots(turn.chunk, 0), n);
    } else {
      const auto part = [&](int rank) { return n * static_cast<size_t>(rank) / size_; };
      const size_t begin = part(rank_);
      char* const sums = slot(rank_, turn.chunk) + begin * width;
      const auto operands = slots(turn.chunk, begin * width);
      combine(request.kind, request.op, sums, operands, part(rank_ + 1) - begin);
      publish();
      meet_all(turn);
      for (int rank = 0; rank < size_; ++rank) {
        const size_t from = part(rank) * width;
        std::memcpy(
            chunk + from, slot(rank, turn.chunk) + from, part(rank + 1) * width - from);
      }
    }
    done += n;
    return done < count;
  });
}

void SharedMemory::all_gather(
    const Pieces& own,
    const std::vector<Pieces>& places,
    const Request& request,
    uint64_t ticket,
    milliseconds limit) {
  const size_t bytes = longest(places);
  size_t done = 0;
  serve(request, ticket, limit, [&](const Turn& turn) {
    const size_t end = done + slot_bytes_;
    own.copy_to(slot(rank_, turn.chunk), done, end);
    publish();
    // Its own first, for which it need not wait, then from the next rank on: not all read from the same one.
    for (int step = 0; step < size_; ++step) {
      const int rank = (rank_ + step) % size_;
      meet(rank, turn);
      places[static_cast<size_t>(rank)].copy_from(slot(rank, turn.chunk), done, end);
    }
    done = end;
    return done < bytes;
  });
}

void SharedMemory::reduce_scatter(
    const std::vector<Pieces>& parts,
    const Pieces& out,
    const Request& request,
    uint64_t ticket,
    milliseconds limit) {
  const auto& own = parts[static_cast<size_t>(rank_)];
  const size_t bytes = longest(parts);
  // A slot has a field for each other rank, the next rank's first.
  const size_t field = slot_bytes_ / static_cast<size_t>(size_ - 1) / kLine * kLine;
  const auto field_for = [&](int reader, int writer, uint32_t chunk) {
    const int step = (reader - writer + size_) % size_;
    return slot(writer, chunk) + static_cast<size_t>(step - 1) * field;
  };
  std::vector<const char*> operands(parts.size());
  size_t done = 0;
  serve(request, ticket, limit, [&](const Turn& turn) {
    const size_t end = done + field;
    for (int step = 1; step < size_; ++step) {
      const int reader = (rank_ + step) % size_;
      parts[static_cast<size_t>(reader)].copy_to(field_for(reader, rank_, turn.chunk), done, end);
    }
    publish();
    meet_all(turn);
    for (int rank = 0; rank < size_; ++rank) {
      operands[static_cast<size_t>(rank)] =
          rank == rank_ ? nullptr : field_for(rank_, rank, turn.chunk);
    }
    combine(request.op, own, out, done, end, rank_, operands);
    done = end;
    return done < bytes;
  });
}

} // namespace brigade
