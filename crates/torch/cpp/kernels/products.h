// Products of 16-bit matrices with an epilogue: what follows on a product, computed before its output is written.
#pragma once

#include "choice.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace brigade::kernels {

// Number of elements of which the sizes of matrices in memory are multiples: 16 bytes, which cuBLASLt asks of the GELU's
// input, too.
constexpr int64_t kVector = 8;

enum class Epilogue {
  // `vector` is a bias [n]: output = gelu(left right + vector) with the formula of tanh, other = left right + vector.
  kGeluBias,
  // `matrix` is what the GELU was computed of: output = left right * gelu'(matrix), other = its sums over the rows [n].
  kGeluGradient,
  // other = sums of the left factor's rows [m].
  kSumsOfLeft,
  // other = sums of the right factor's columns [n].
  kSumsOfRight,
};

// One product: left [m, k] times right [k, n]. Each factor has adjacent elements in one of its dimensions.
struct Product {
  Epilogue epilogue;
  at::Tensor left, right;
  // Type of the output and of sums of factors; the other results have the factors' type.
  at::ScalarType output_type;
  // Bias or input of the GELU, in the factors' type.
  at::Tensor operand;
};

// New tensors.
struct ProductResult {
  at::Tensor output, other;
};

// The algorithms that a library offers for a product, the best one by its own judgement first.
class ProductPlan {
 public:
  virtual ~ProductPlan() = default;
  virtual int algorithms() = 0;
  // Fills in the result of a product with the shapes and layouts for which the plan was made, on the current stream.
  virtual void run(const Product& product, int algorithm, const ProductResult& result) = 0;
};

// Products on a GPU: by cuBLASLt, or by the CPU in tests.
class Products : public Meter {
 public:
  // Computes the product by the fastest of the library's algorithms, or by `apart`, which has no epilogue, where that is
  // faster or the library does not take the product. `beside` is what an epilogue needs in addition, and is a part of
  // its time.
  ProductResult compute(
      const Product& product, const std::function<ProductResult()>& apart,
      const std::function<void(const ProductResult&)>& beside = {});

 private:
  struct Entry {
    std::unique_ptr<ProductPlan> plan;
    Choice choice;
  };

  virtual std::unique_ptr<ProductPlan> plan(const Product& product) = 0;
  // Returns the entry of the product's shapes, layouts and types. Null if there are too many.
  Entry* entry(const Product& product);

  ByShape<Entry> entries_;
};

// Returns the products of a GPU. Null on a CPU, without the feature cuda, where the library lacks a function, and where
// they are turned off (BRIGADE_FUSED).
Products* products(c10::Device device);

// Replaces the products of all GPUs, for tests. Null restores them.
void set_products(Products* products);

} // namespace brigade::kernels
