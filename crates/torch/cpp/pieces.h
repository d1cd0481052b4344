// What a collective sends or fills of one rank: pieces of tensors as one stream of bytes.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace brigade {

// Where a piece begins in its stream, in another memory too: aligned for every type, and apart from what another
// rank writes.
constexpr size_t kLine = 64;

constexpr size_t up_to_line(size_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}

struct Piece {
  char* data;
  size_t bytes;
  c10::ScalarType kind;
  // Where it begins in the stream.
  size_t place;
};

// The layout of a stream follows from the lengths of its pieces alone, so that ranks which ask for the same lay out
// alike.
class Pieces {
 public:
  void add(char* data, size_t bytes, c10::ScalarType kind) {
    if (bytes > 0) {
      pieces_.push_back({data, bytes, kind, up_to_line(bytes_)});
    }
    skip(bytes);
  }

  // For a piece that is where it belongs already.
  void skip(size_t bytes) {
    if (bytes > 0) {
      bytes_ = up_to_line(bytes_) + bytes;
    }
  }

  // The length of the stream.
  size_t bytes() const {
    return bytes_;
  }

  // The memory of a stream that is one piece, else null.
  char* as_one() const {
    return pieces_.size() == 1 && pieces_[0].bytes == bytes_ ? pieces_[0].data : nullptr;
  }

  // The memory of a byte of the stream.
  char* at(size_t place) const {
    const auto& piece = *first_behind(place);
    return piece.data + (place - piece.place);
  }

  // Calls `act` with what there is of each piece from byte `begin` to `end`; places are counted from `begin`.
  template <typename Act>
  void visit(size_t begin, size_t end, Act act) const {
    for (auto it = first_behind(begin); it != pieces_.end() && it->place < end; ++it) {
      const size_t from = std::max(begin, it->place);
      const size_t to = std::min(end, it->place + it->bytes);
      act(Piece{it->data + (from - it->place), to - from, it->kind, from - begin});
    }
  }

  void copy_to(char* memory, size_t begin, size_t end) const {
    visit(begin, end, [&](const Piece& it) { std::memcpy(memory + it.place, it.data, it.bytes); });
  }

  void copy_from(const char* memory, size_t begin, size_t end) const {
    visit(begin, end, [&](const Piece& it) { std::memcpy(it.data, memory + it.place, it.bytes); });
  }

 private:
  // The first piece that does not end before `place`.
  std::vector<Piece>::const_iterator first_behind(size_t place) const {
    return std::partition_point(pieces_.begin(), pieces_.end(), [&](const Piece& it) {
      return it.place + it.bytes <= place;
    });
  }

  std::vector<Piece> pieces_;
  size_t bytes_ = 0;
};

// The length of the longest stream.
inline size_t longest(const std::vector<Pieces>& streams) {
  size_t bytes = 0;
  for (const auto& stream : streams) {
    bytes = std::max(bytes, stream.bytes());
  }
  return bytes;
}

} // namespace brigade
