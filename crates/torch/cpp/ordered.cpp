#include "ordered.h"

#include <ATen/ATen.h>

#include <chrono>

namespace brigade {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Fewer bytes cost their message, not their length: all go to all at once.
constexpr size_t kSmall = 16 << 10;
static_assert(sizeof(Request) <= kLine);

char* bytes_of(const at::Tensor& memory) {
  return static_cast<char*>(memory.data_ptr());
}

at::Tensor memory(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::kByte);
}

// The pieces one after the other, in `kept` where they are several.
char* as_one(const Pieces& pieces, std::vector<at::Tensor>& kept) {
  if (char* data = pieces.as_one()) {
    return data;
  }
  kept.push_back(memory(pieces.bytes()));
  pieces.copy_to(bytes_of(kept.back()), 0, pieces.bytes());
  return bytes_of(kept.back());
}

} // namespace

// Messages under way at once. Gloo's threads move them, so that none here is waited for.
class OrderedExchange::Messages {
 public:
  Messages(OrderedExchange& exchange, int step)
      : backend_(exchange.backend_), tag_(exchange.tag_ + step) {}

  void send(char* data, size_t bytes, int peer) {
    if (bytes > 0) {
      auto list = tensor(data, bytes);
      pending_.push_back(backend_.send(list, peer, tag_));
    }
  }
  void recv(char* data, size_t bytes, int peer) {
    if (bytes > 0) {
      auto list = tensor(data, bytes);
      pending_.push_back(backend_.recv(list, peer, tag_));
    }
  }
  void wait(Time end) {
    for (const auto& message : pending_) {
      const auto left = std::chrono::ceil<milliseconds>(end - steady_clock::now());
      message->wait(std::max(left, milliseconds(1)));
    }
  }

 private:
  static std::vector<at::Tensor> tensor(char* data, size_t bytes) {
    return {at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
  }

  c10d::Backend& backend_;
  const int tag_;
  std::vector<c10::intrusive_ptr<c10d::Work>> pending_;
};

// One of each rank: what it asks for, and its data where they are few.
struct OrderedExchange::Letters {
  static constexpr size_t kBytes = kLine + kSmall;

  explicit Letters(int size) : in(memory(kBytes * static_cast<size_t>(size))) {}

  char* of(int rank) const {
    return bytes_of(in) + kBytes * static_cast<size_t>(rank);
  }
  std::vector<const char*> data(int size) const {
    std::vector<const char*> all;
    for (int rank = 0; rank < size; ++rank) {
      all.push_back(of(rank) + kLine);
    }
    return all;
  }

  at::Tensor in;
};

OrderedExchange::OrderedExchange(c10d::Backend& backend, uint64_t number)
    : Exchange(backend.getRank(), backend.getSize()),
      backend_(backend),
      // Above those of messages between two ranks; a number comes again after 2^27 exchanges.
      tag_(static_cast<int>(0x40000000 | (number << 2 & 0x1FFFFFFC))) {}

// From the next rank on, so that not all send to the same one first.
std::vector<int> OrderedExchange::others() const {
  std::vector<int> peers;
  for (int step = 1; step < size_; ++step) {
    peers.push_back((rank_ + step) % size_);
  }
  return peers;
}

// Sends every rank what this one asks for, and what `for_rank` gives for it where that is little. This rank's own
// letter has its own data.
template <typename ForRank>
OrderedExchange::Letters OrderedExchange::ask(
    const Request& request, bool small, Time end, ForRank for_rank) {
  const Letters letters(size_);
  const size_t length = Letters::kBytes;
  auto out = memory(length * static_cast<size_t>(size_));
  Messages messages(*this, 0);
  for (int peer : others()) {
    messages.recv(letters.of(peer), length, peer);
  }
  for (int rank = 0; rank < size_; ++rank) {
    char* const letter =
        rank == rank_ ? letters.of(rank) : bytes_of(out) + length * static_cast<size_t>(rank);
    std::memcpy(letter, &request, sizeof(request));
    if (small) {
      const Pieces& pieces = for_rank(rank);
      pieces.copy_to(letter + kLine, 0, pieces.bytes());
    }
  }
  for (int peer : others()) {
    char* const letter = bytes_of(out) + length * static_cast<size_t>(peer);
    messages.send(letter, kLine + (small ? for_rank(peer).bytes() : 0), peer);
  }
  messages.wait(end);
  for (int peer : others()) {
    Request other;
    std::memcpy(&other, letters.of(peer), sizeof(other));
    check_same(rank_, request, peer, other);
  }
  return letters;
}

void OrderedExchange::all_reduce(char* data, const Request& request, milliseconds limit) {
  const auto end = deadline(limit);
  const size_t width = c10::elementSize(request.kind);
  const auto count = static_cast<size_t>(request.numel);
  const auto begin_of = [&](int rank) { return count * static_cast<size_t>(rank) / size_; };
  const auto pieces = [&](size_t from, size_t to) {
    Pieces one;
    one.add(data + from * width, (to - from) * width, request.kind);
    return one;
  };
  const auto whole = pieces(0, count);
  const bool small = whole.bytes() <= kSmall;
  const auto letters = ask(request, small, end, [&](int) -> const Pieces& { return whole; });
  if (small) {
    combine(request.op, whole, whole, 0, whole.bytes(), rank_, letters.data(size_));
    return;
  }
  std::vector<Pieces> parts;
  for (int rank = 0; rank < size_; ++rank) {
    parts.push_back(pieces(begin_of(rank), begin_of(rank + 1)));
  }
  const auto& own = parts[static_cast<size_t>(rank_)];
  combine_parts(parts, own, request, end);
  auto places = parts;
  // Its sums are where they belong.
  places[static_cast<size_t>(rank_)] = Pieces();
  gather(own, places, end);
}

void OrderedExchange::all_gather(
    const Pieces& own,
    const std::vector<Pieces>& places,
    const Request& request,
    milliseconds limit) {
  const auto end = deadline(limit);
  const bool small = longest(places) <= kSmall;
  const auto letters = ask(request, small, end, [&](int) -> const Pieces& { return own; });
  if (!small) {
    return gather(own, places, end);
  }
  const auto data = letters.data(size_);
  for (size_t rank = 0; rank < places.size(); ++rank) {
    places[rank].copy_from(data[rank], 0, places[rank].bytes());
  }
}

void OrderedExchange::reduce_scatter(
    const std::vector<Pieces>& parts,
    const Pieces& out,
    const Request& request,
    milliseconds limit) {
  const auto end = deadline(limit);
  const bool small = longest(parts) <= kSmall;
  const auto letters =
      ask(request, small, end, [&](int rank) -> const Pieces& { return parts[static_cast<size_t>(rank)]; });
  if (small) {
    const auto& own = parts[static_cast<size_t>(rank_)];
    combine(request.op, own, out, 0, out.bytes(), rank_, letters.data(size_));
  } else {
    combine_parts(parts, out, request, end);
  }
}

void OrderedExchange::combine_parts(
    const std::vector<Pieces>& parts, const Pieces& out, const Request& request, Time end) {
  const size_t stride = up_to_line(out.bytes());
  const auto in = memory(stride * static_cast<size_t>(size_));
  std::vector<const char*> operands;
  for (int rank = 0; rank < size_; ++rank) {
    operands.push_back(bytes_of(in) + stride * static_cast<size_t>(rank));
  }
  std::vector<at::Tensor> joined;
  Messages messages(*this, 1);
  for (int peer : others()) {
    messages.recv(bytes_of(in) + stride * static_cast<size_t>(peer), out.bytes(), peer);
  }
  for (int peer : others()) {
    const auto& part = parts[static_cast<size_t>(peer)];
    messages.send(as_one(part, joined), part.bytes(), peer);
  }
  messages.wait(end);
  const auto& own = parts[static_cast<size_t>(rank_)];
  combine(request.op, own, out, 0, out.bytes(), rank_, operands);
}

void OrderedExchange::gather(const Pieces& own, const std::vector<Pieces>& places, Time end) {
  std::vector<at::Tensor> joined;
  char* const sent = as_one(own, joined);
  std::vector<char*> received(places.size());
  Messages messages(*this, 2);
  for (int peer : others()) {
    const auto& place = places[static_cast<size_t>(peer)];
    auto& data = received[static_cast<size_t>(peer)] = place.as_one();
    if (!data) {
      joined.push_back(memory(place.bytes()));
      data = bytes_of(joined.back());
    }
    messages.recv(data, place.bytes(), peer);
  }
  for (int peer : others()) {
    messages.send(sent, own.bytes(), peer);
  }
  received[static_cast<size_t>(rank_)] = sent;
  messages.wait(end);
  for (size_t rank = 0; rank < places.size(); ++rank) {
    const auto& place = places[rank];
    if (received[rank] != place.as_one()) {
      place.copy_from(received[rank], 0, place.bytes());
    }
  }
}

} // namespace brigade
