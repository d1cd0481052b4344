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

} // namespace

void combine(
    const Request& request, char* out, const char* in, size_t stride, int ranks, size_t count) {
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

void check_same(int rank, const Request& request, int other_rank, const Request& other) {
  TORCH_CHECK(
      other == request,
      "an all-reduce is of the same on all ranks: rank ",
      rank,
      " asked for ",
      request.text(),
      ", rank ",
      other_rank,
      " for ",
      other.text());
}

std::string Request::text() const {
  std::ostringstream out;
  out << numel << " numbers of type " << c10::toString(kind) << ", " << name(op);
  return out.str();
}

} // namespace brigade
