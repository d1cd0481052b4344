// Element by element, what an all-reduce makes of the operands of all ranks.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <string>

namespace brigade {

// What an all-reduce is of. All ranks must ask for the same.
struct Request {
  int64_t numel;
  c10::ScalarType kind;
  c10d::ReduceOp::RedOpType op;
  bool operator==(const Request&) const = default;

  // For messages: `7 numbers of type Float, sum`.
  std::string text() const;
};

// Throws where two ranks do not ask for the same.
void check_same(int rank, const Request& request, int other_rank, const Request& other);

// Whether `combine` has this operation for this type.
bool can_combine(c10::ScalarType kind, c10d::ReduceOp::RedOpType op);

// Whether the result depends on the order of the operands.
bool depends_on_order(c10::ScalarType kind, c10d::ReduceOp::RedOpType op);

// Combines `count` elements of each rank in the order of the ranks, so that a result depends neither on its
// place among others nor on the rank that computes it. `in` holds one operand after the other, `stride`
// bytes apart, a multiple of the element's size; `out` may be one of them. 16-bit floats are combined in
// float32 and rounded once.
void combine(
    const Request& request, char* out, const char* in, size_t stride, int ranks, size_t count);

} // namespace brigade
