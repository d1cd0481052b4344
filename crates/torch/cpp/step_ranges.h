// Runs the loops of `step_kernels.h` over lists of tensors on the CPU, in parallel over all of their elements.
#pragma once

#include "foreach.h"
#include "step_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

namespace brigade {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kFewestElements = 16384;
// Ranges of threads meet at multiples of so many elements of a tensor: cache lines of every type.
constexpr int64_t kRangeUnit = 64;
// Of all rules: parameter, gradient, up to three states.
constexpr size_t kMostRoles = 5;
// Elements of 16 bits that are converted at once: those of all roles stay in the first-level cache.
constexpr int64_t kStaged = 1024;

// The elements of one parameter and of what belongs to it, role after role; null for roles that a rule has not.
template <typename T>
struct StepMemory {
  std::array<T*, kMostRoles> roles{};
  int64_t count = 0;

  std::array<T*, kMostRoles> from(int64_t begin) const {
    auto out = roles;
    for (auto& memory : out) {
      memory = memory == nullptr ? nullptr : memory + begin;
    }
    return out;
  }
};

// Calls `run` with a null pointer of the type of a kind's elements.
template <typename Run>
void by_type(at::ScalarType kind, const Run& run) {
  switch (kind) {
    case at::kFloat:
      return run(static_cast<float*>(nullptr));
    case at::kDouble:
      return run(static_cast<double*>(nullptr));
    case at::kBFloat16:
      return run(static_cast<c10::BFloat16*>(nullptr));
    case at::kHalf:
      return run(static_cast<c10::Half*>(nullptr));
    default:
      TORCH_CHECK(false, "an optimizer on the CPU steps Float, Double, BFloat16 and Half; found ", kind);
  }
}

// Whether the elements of two tensors of one shape lie in the same order.
inline bool same_order(const at::Tensor& one, const at::Tensor& other) {
  for (int64_t dimension = 0; dimension < one.dim(); ++dimension) {
    if (one.size(dimension) > 1 && one.stride(dimension) != other.stride(dimension)) {
      return false;
    }
  }
  return true;
}

// The memory of a parameter. All roles have to be dense, of its shape, and in the same order.
template <typename T>
StepMemory<T> memory_of(const Roles& roles, size_t index) {
  StepMemory<T> out;
  out.count = roles[0][index].numel();
  for (size_t role = 0; role < roles.size(); ++role) {
    if (roles[role].empty()) {
      continue;
    }
    const auto& tensor = roles[role][index];
    out.roles[role] = tensor.template mutable_data_ptr<T>();
    // A storage can be made shorter than its tensors.
    const auto end = static_cast<size_t>(tensor.storage_offset() + out.count) * sizeof(T);
    TORCH_CHECK(
        out.count == 0 || end <= tensor.storage().nbytes(),
        "a parameter, gradient or state of shape ", tensor.sizes(), " has no memory for its elements");
  }
  return out;
}

// Calls `run` with part of a parameter's elements in the type that they are computed in, and their number. The role
// `unchanged` is not written to.
template <typename T, typename Run>
void run_range(const StepMemory<T>& memory, int64_t begin, int64_t end, size_t unchanged, const Run& run) {
  if constexpr (sizeof(T) > 2) {
    run(memory.from(begin), end - begin);
  } else {
    float staged[kMostRoles][kStaged];
    std::array<float*, kMostRoles> wide{};
    for (size_t role = 0; role < kMostRoles; ++role) {
      wide[role] = memory.roles[role] == nullptr ? nullptr : staged[role];
    }
    for (; begin < end; begin += kStaged) {
      const int64_t count = std::min(kStaged, end - begin);
      const auto narrow_roles = memory.from(begin);
      for (size_t role = 0; role < kMostRoles; ++role) {
        if (wide[role] != nullptr) {
          widen(narrow_roles[role], wide[role], count);
        }
      }
      run(wide, count);
      for (size_t role = 0; role < kMostRoles; ++role) {
        if (wide[role] != nullptr && role != unchanged) {
          narrow(wide[role], narrow_roles[role], count);
        }
      }
    }
  }
}

// Calls `run` with a tensor's index, the memory of its roles and a number of elements, for ranges that together are all
// elements of all tensors. One parallel region for the list: many small tensors cost no more than a large one.
template <typename T, typename Run>
void each_range(const std::vector<StepMemory<T>>& all, size_t unchanged, const Run& run) {
  std::vector<int64_t> ends;
  ends.reserve(all.size());
  int64_t total = 0;
  for (const auto& memory : all) {
    total += memory.count;
    ends.push_back(total);
  }
  at::parallel_for(0, total, kFewestElements, [&](int64_t begin, int64_t end) {
    size_t index = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; index < all.size() && ends[index] - all[index].count < end; ++index) {
      const int64_t count = all[index].count, start = ends[index] - count;
      const auto cut = [&](int64_t place) {
        const int64_t inside = std::max<int64_t>(place - start, 0);
        return std::min(count, (inside + kRangeUnit - 1) / kRangeUnit * kRangeUnit);
      };
      const int64_t from = cut(begin), to = cut(end);
      if (from < to) {
        run_range(all[index], from, to, unchanged, [&](const auto& roles, int64_t elements) {
          run(index, roles, elements);
        });
      }
    }
  });
}

// A change that libtorch does not know of.
inline void changed(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->bump_version();
}

} // namespace brigade
