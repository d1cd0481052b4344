// What ranks ask each other for, and, element by element, what a reduction makes of the operands of all ranks.
#pragma once

#include "pieces.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace brigade {

enum class Operation : uint8_t { AllReduce, AllGather, ReduceScatter };

// For messages: `an all-gather`.
const char* name(Operation operation);

// What a collective is of. All ranks must ask for the same.
struct Request {
  Operation operation;
  // Undefined where tensors of several types go together.
  c10::ScalarType kind;
  // UNUSED for an all-gather.
  c10d::ReduceOp::RedOpType op;
  // Of an all-reduce one, whatever is reduced together.
  uint32_t tensors;
  // Of all ranks' parts together.
  int64_t numel;
  // A hash of the types and lengths of all parts; 0 for an all-reduce.
  uint64_t layout;
  bool operator==(const Request&) const = default;

  // For messages: `an all-reduce of 7 numbers of type Float, sum`.
  std::string text() const;
};

// Throws where two ranks do not ask for the same.
void check_same(int rank, const Request& request, int other_rank, const Request& other);

// Whether `combine` has this operation for this type.
bool can_combine(c10::ScalarType kind, c10d::ReduceOp::RedOpType op);

// Whether the result depends on the order of the operands.
bool depends_on_order(c10::ScalarType kind, c10d::ReduceOp::RedOpType op);

// Combines `count` elements of each rank in the order of the ranks, so that a result depends neither on its
// place among others nor on the rank that computes it. `in` has the operand of each rank; `out` may be one of
// them. 16-bit floats are combined in float32 and rounded once.
void combine(
    c10::ScalarType kind,
    c10d::ReduceOp::RedOpType op,
    char* out,
    const std::vector<const char*>& in,
    size_t count);

// The same for bytes `begin` to `end` of a stream. Rank `rank` has its operands in `own`, the others theirs at
// `in`, from `begin` on.
void combine(
    c10d::ReduceOp::RedOpType op,
    const Pieces& own,
    const Pieces& out,
    size_t begin,
    size_t end,
    int rank,
    const std::vector<const char*>& in);

} // namespace brigade
