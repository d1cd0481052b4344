#include "products.h"

#include "brigade-torch/src/bridge.rs.h"
#include "load.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace brigade::kernels {
namespace {

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Adjacent elements in the given dimension, and a leading dimension in the other one.
bool is_adjacent(const at::Tensor& t, int64_t dim) {
  const int64_t leading = t.stride(1 - dim);
  return t.stride(dim) == 1 && leading >= t.size(dim) && leading % kVector == 0;
}

bool is_factor(const at::Tensor& t) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return t.layout() == at::kStrided && t.dim() == 2 && t.numel() > 0 && t.size(0) <= kMax && t.size(1) <= kMax &&
      !t.is_neg() && is_aligned(t) && (is_adjacent(t, 0) || is_adjacent(t, 1));
}

// Returns `true` for a product whose types, layouts and alignment an epilogue can take.
bool takes_epilogue(const Product& product) {
  const auto& [epilogue, left, right, output_type, operand] = product;
  const auto type = left.scalar_type();
  const bool has_factors = (type == at::kBFloat16 || type == at::kHalf) && right.scalar_type() == type &&
      left.is_cuda() && right.device() == left.device() && is_factor(left) && is_factor(right) &&
      left.size(1) == right.size(0) && right.size(1) % kVector == 0;
  if (!has_factors) {
    return false;
  }
  const auto is_operand = [&](at::IntArrayRef sizes) {
    return operand.defined() && operand.device() == left.device() && operand.scalar_type() == type &&
        operand.sizes() == sizes && operand.is_contiguous() && is_aligned(operand) && output_type == type;
  };
  switch (epilogue) {
    case Epilogue::kGeluBias:
      return is_operand({right.size(1)});
    case Epilogue::kGeluGradient:
      return is_operand({left.size(0), right.size(1)});
    default:
      return output_type == type || output_type == at::kFloat;
  }
}

std::string key_of(const Product& product) {
  const auto layout = [](const at::Tensor& t) {
    const bool is_row_major = is_adjacent(t, 1);
    return (is_row_major ? "n" : "t") + std::to_string(t.stride(is_row_major ? 0 : 1));
  };
  static const char* const names[] = {"gelu_bias", "gelu_gradient", "sums_of_left", "sums_of_right"};
  return std::string(names[static_cast<int>(product.epilogue)]) + ' ' + c10::toString(product.left.scalar_type()) +
      ' ' + c10::toString(product.output_type) + ' ' + std::to_string(product.left.size(0)) + 'x' +
      std::to_string(product.left.size(1)) + 'x' + std::to_string(product.right.size(1)) + ' ' +
      layout(product.left) + ' ' + layout(product.right);
}

ProductResult empty_result(const Product& product) {
  const auto options = product.left.options();
  const int64_t rows = product.left.size(0), columns = product.right.size(1);
  ProductResult result{at::empty({rows, columns}, options.dtype(product.output_type)), {}};
  switch (product.epilogue) {
    case Epilogue::kGeluBias:
      result.other = at::empty({rows, columns}, options);
      break;
    case Epilogue::kGeluGradient:
      result.other = at::empty({columns}, options);
      break;
    case Epilogue::kSumsOfLeft:
      result.other = at::empty({rows}, options.dtype(product.output_type));
      break;
    case Epilogue::kSumsOfRight:
      result.other = at::empty({columns}, options.dtype(product.output_type));
      break;
  }
  return result;
}

std::atomic<Products*> replacement{nullptr};

} // namespace

ProductResult Products::compute(
    const Product& product, const std::function<ProductResult()>& apart,
    const std::function<void(const ProductResult&)>& beside) {
  Entry* const found = takes_epilogue(product) ? entry(product) : nullptr;
  if (found == nullptr) {
    return apart();
  }
  ProductResult result;
  found->choice.run(*this, product.left.device(), [&](int candidate) {
    if (candidate == 0) {
      result = apart();
      return;
    }
    result = empty_result(product);
    found->plan->run(product, candidate - 1, result);
    if (beside) {
      beside(result);
    }
  });
  return result;
}

Products::Entry* Products::entry(const Product& product) {
  const auto key = key_of(product);
  return entries_.of(key, [&]() -> std::unique_ptr<Entry> {
    auto made = plan(product);
    const int algorithms = made == nullptr ? 0 : made->algorithms();
    // Without an algorithm there is nothing to choose, which is known for the next call, too.
    return algorithms == 0 ? nullptr
                           : std::unique_ptr<Entry>(
                                 new Entry{std::move(made), {key, algorithms + 1, /*unmeasured=*/1}});
  });
}

Products* products(c10::Device device) {
  if (!device.is_cuda()) {
    return nullptr;
  }
  if (auto* const other = replacement.load()) {
    return other;
  }
#ifdef BRIGADE_CUDA
  struct Slot {
    std::once_flag filled;
    std::unique_ptr<Products> products;
  };
  // Never freed: at the end of the process CUDA may be gone first.
  static auto* const slots = new std::map<c10::DeviceIndex, Slot>();
  static std::mutex mutex;
  Slot* slot = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    slot = &(*slots)[device.index()];
  }
  std::call_once(slot->filled, [&] {
    if (!allows_epilogues() || capability_of(device.index()) < 80) {
      return;
    }
    try {
      slot->products = library_products(device.index());
    } catch (const c10::Error& error) {
      TORCH_WARN("products have no epilogues: ", error.what_without_backtrace());
    }
  });
  return slot->products.get();
#else
  return nullptr;
#endif
}

void set_products(Products* products) {
  replacement = products;
}

} // namespace brigade::kernels
