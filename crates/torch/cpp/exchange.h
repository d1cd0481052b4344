// One collective of our own among the ranks of a group, by whatever way the data go.
#pragma once

#include "combine.h"
#include "pieces.h"

#include <chrono>
#include <exception>
#include <vector>

namespace brigade {

// When an operation that begins now is to end. A limit as large as its type allows is none.
inline std::chrono::steady_clock::time_point deadline(std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kNone = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + std::min(limit, kNone);
}

// Each throws when a rank asks for something else, has left or does not come in time; nothing that the group does
// later can end well after that.
class Exchange {
 public:
  Exchange(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Exchange() = default;

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }

  // Combines `data` of all ranks, in the order of their numbers: all get the same bits.
  virtual void all_reduce(char* data, const Request& request, std::chrono::milliseconds limit) = 0;

  // Fills `places[rank]` with what that rank has as `own`; the caller's own place is filled, too.
  virtual void all_gather(
      const Pieces& own,
      const std::vector<Pieces>& places,
      const Request& request,
      std::chrono::milliseconds limit) = 0;

  // Combines what each rank has in its `parts` for this one, in the order of their numbers: `out` gets the bits that
  // an all-reduce would leave there. `out` may be the caller's own part of `parts`.
  virtual void reduce_scatter(
      const std::vector<Pieces>& parts,
      const Pieces& out,
      const Request& request,
      std::chrono::milliseconds limit) = 0;

  // Tells the other ranks of a failure outside of the functions above.
  virtual void fail(const std::exception_ptr& why) noexcept = 0;

 protected:
  const int rank_;
  const int size_;
};

} // namespace brigade
