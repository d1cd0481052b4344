#include "combine.h"

#include "every_cpu.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <type_traits>

namespace brigade {

namespace {

using RedOp = c10d::ReduceOp::RedOpType;

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

// One operand of each rank.
using Operands = std::vector<const char*>;

template <typename T>
BRIGADE_INLINE const T* as(const char* operand) {
  return reinterpret_cast<const T*>(operand);
}

// 16-bit numbers are combined in 32.
template <typename T, typename Combine>
BRIGADE_INLINE void combine_all(T* to, const Operands& from, size_t count, Combine combine) {
  using Wide = std::conditional_t<
      std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>,
      float,
      T>;
  constexpr size_t kBlock = 1024;
  Wide block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    const T* first = as<T>(from[0]) + begin;
    for (size_t i = 0; i < n; ++i) {
      block[i] = static_cast<Wide>(first[i]);
    }
    for (size_t rank = 1; rank < from.size(); ++rank) {
      const T* other = as<T>(from[rank]) + begin;
      for (size_t i = 0; i < n; ++i) {
        block[i] = combine(block[i], static_cast<Wide>(other[i]));
      }
    }
    for (size_t i = 0; i < n; ++i) {
      to[begin + i] = static_cast<T>(block[i]);
    }
  }
}

// Whole numbers wrap around as unsigned ones: with a sign that is undefined in C++.
template <typename T>
using Wrapping = std::conditional_t<
    std::is_integral_v<T>,
    std::make_unsigned<T>,
    std::type_identity<T>>::type;

struct Sum {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Product {
  template <typename T>
  BRIGADE_INLINE T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
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
void sum_float(float* to, const Operands& from, size_t count) {
  combine_all(to, from, count, Sum());
}
BRIGADE_EVERY_CPU
void sum_bfloat16(c10::BFloat16* to, const Operands& from, size_t count) {
  combine_all(to, from, count, Sum());
}

template <typename T>
void combine_as(RedOp op, char* out, const Operands& from, size_t count) {
  auto* to = reinterpret_cast<T*>(out);
  switch (op) {
    case RedOp::SUM:
      if constexpr (std::is_same_v<T, float>) {
        return sum_float(to, from, count);
      } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
        return sum_bfloat16(to, from, count);
      } else {
        return combine_all(to, from, count, Sum());
      }
    case RedOp::PRODUCT:
      return combine_all(to, from, count, Product());
    case RedOp::MIN:
      return combine_all(to, from, count, Smallest());
    default:
      return combine_all(to, from, count, Largest());
  }
}

} // namespace

void combine(
    c10::ScalarType kind, RedOp op, char* out, const std::vector<const char*>& in, size_t count) {
  switch (kind) {
    case c10::ScalarType::Float:
      return combine_as<float>(op, out, in, count);
    case c10::ScalarType::Double:
      return combine_as<double>(op, out, in, count);
    case c10::ScalarType::Half:
      return combine_as<c10::Half>(op, out, in, count);
    case c10::ScalarType::BFloat16:
      return combine_as<c10::BFloat16>(op, out, in, count);
    case c10::ScalarType::Int:
      return combine_as<int32_t>(op, out, in, count);
    default:
      return combine_as<int64_t>(op, out, in, count);
  }
}

void combine(
    RedOp op,
    const Pieces& own,
    const Pieces& out,
    size_t begin,
    size_t end,
    int rank,
    const std::vector<const char*>& in) {
  std::vector<const char*> operands(in.size());
  out.visit(begin, end, [&](const Piece& it) {
    for (size_t from = 0; from < in.size(); ++from) {
      const bool is_own = from == static_cast<size_t>(rank);
      operands[from] = is_own ? own.at(begin + it.place) : in[from] + it.place;
    }
    combine(it.kind, op, it.data, operands, it.bytes / c10::elementSize(it.kind));
  });
}

bool can_combine(c10::ScalarType kind, RedOp op) {
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

bool depends_on_order(c10::ScalarType kind, RedOp op) {
  return c10::isFloatingType(kind) && (op == RedOp::SUM || op == RedOp::PRODUCT);
}

const char* name(Operation operation) {
  switch (operation) {
    case Operation::AllReduce:
      return "an all-reduce";
    case Operation::AllGather:
      return "an all-gather";
    default:
      return "a reduce-scatter";
  }
}

void check_same(int rank, const Request& request, int other_rank, const Request& other) {
  if (other == request) {
    return;
  }
  const auto asked = request.text(), other_asked = other.text();
  TORCH_CHECK(
      false,
      "a collective is of the same on all ranks: rank ",
      rank,
      " asked for ",
      asked,
      ", rank ",
      other_rank,
      " for ",
      other_asked,
      asked == other_asked ? " with tensors of other types or lengths" : "");
}

std::string Request::text() const {
  std::ostringstream out;
  out << name(operation) << " of ";
  if (tensors != 1) {
    out << tensors << " tensors with ";
  }
  out << numel << " numbers of ";
  if (kind == c10::ScalarType::Undefined) {
    out << "several types";
  } else {
    out << "type " << c10::toString(kind);
  }
  if (operation != Operation::AllGather) {
    out << ", " << name(op);
  }
  return out.str();
}

} // namespace brigade
