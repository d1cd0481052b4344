// Collectives over the network, of ranks that are all ours.
#pragma once

#include "exchange.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace brigade {

// Each element is combined in the order of the ranks: every rank gets its part of all others and combines it. As many
// bytes as in Gloo's ring, whose order depends on where an element lies among the others; and a reducer lays gradients
// out anew after its first backward, so that a run that is resumed would have other last digits than one that was not
// stopped.
//
// What each rank asks for goes first, since data of another length would end Gloo's thread; few data go with it.
class OrderedExchange final : public Exchange {
 public:
  // `number` counts the exchanges of the group.
  OrderedExchange(c10d::Backend& backend, uint64_t number);

  void all_reduce(char* data, const Request& request, std::chrono::milliseconds limit) override;
  void all_gather(
      const Pieces& own,
      const std::vector<Pieces>& places,
      const Request& request,
      std::chrono::milliseconds limit) override;
  void reduce_scatter(
      const std::vector<Pieces>& parts,
      const Pieces& out,
      const Request& request,
      std::chrono::milliseconds limit) override;
  // The connections tell them.
  void fail(const std::exception_ptr&) noexcept override {}

 private:
  using Time = std::chrono::steady_clock::time_point;
  class Messages;
  struct Letters;

  template <typename ForRank>
  Letters ask(const Request& request, bool small, Time end, ForRank for_rank);
  void gather(const Pieces& own, const std::vector<Pieces>& places, Time end);
  void combine_parts(
      const std::vector<Pieces>& parts, const Pieces& out, const Request& request, Time end);
  std::vector<int> others() const;

  c10d::Backend& backend_;
  const int tag_;
};

} // namespace brigade
