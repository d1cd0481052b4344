// Products with epilogues on the CPU, in place of cuBLASLt: in float32, each result rounded once. It shows what is asked
// of the library and what is made of its times, which a test sets.
#include "fake_gpu.h"

#include "kernels/products.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace brigade::fake_gpu {
namespace {

using kernels::Epilogue;
using kernels::Product;
using kernels::ProductResult;

std::string name_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kGeluBias:
      return "brigade::product_gelu_bias";
    case Epilogue::kGeluGradient:
      return "brigade::product_gelu_gradient";
    default:
      return "brigade::product_sums";
  }
}

void compute(const Product& product, const ProductResult& result) {
  const auto left = product.left.to(at::kFloat), right = product.right.to(at::kFloat);
  auto output = left.mm(right);
  at::Tensor other;
  switch (product.epilogue) {
    case Epilogue::kGeluBias:
      other = output + product.operand.to(at::kFloat);
      output = at::gelu(other, "tanh");
      break;
    case Epilogue::kGeluGradient:
      output = at::gelu_backward(output, product.operand.to(at::kFloat), "tanh");
      other = output.sum(0);
      break;
    case Epilogue::kSumsOfLeft:
      other = left.sum(1);
      break;
    case Epilogue::kSumsOfRight:
      other = right.sum(0);
      break;
  }
  at::Tensor(result.output).copy_(output);
  at::Tensor(result.other).copy_(other);
}

class Plan : public kernels::ProductPlan {
 public:
  explicit Plan(std::vector<double> times) : times_(std::move(times)) {}

  int algorithms() override {
    return static_cast<int>(times_.size());
  }

  void run(const Product& product, int algorithm, const ProductResult& result) override {
    const double time = times_.at(algorithm);
    TORCH_CHECK(time >= 0, "algorithm ", algorithm, " does not run");
    // In addition to the operands and the output, which are the product's own.
    const uint64_t operand = product.operand.defined() ? product.operand.nbytes() : 0;
    enter_in_account(
        name_of(product.epilogue) + ('/' + std::to_string(algorithm)), operand + result.other.nbytes());
    pass_time(time);
    if (only_counted()) {
      return;
    }
    const Nested nested;
    compute(product, result);
  }

 private:
  const std::vector<double> times_;
};

class FakeProducts : public kernels::Products {
 public:
  FakeProducts(std::vector<double> times, std::string identity)
      : times_(std::move(times)), identity_(std::move(identity)) {}

  bool is_recording() override {
    return capturing();
  }
  std::string identity() override {
    return identity_;
  }

 private:
  std::unique_ptr<kernels::ProductPlan> plan(const Product&) override {
    return std::make_unique<Plan>(times_);
  }

  const std::vector<double> times_;
  const std::string identity_;
};

} // namespace

extern "C" {

// Products of all GPUs, with an algorithm for each time in milliseconds, of which those below 0 fail. Each other launch
// takes `launch` milliseconds, and `own` if its name contains the part.
void fake_gpu_set_products(
    const double* times, size_t count, double launch, const char* part, double own, const char* identity) {
  // Kept: a backward thread may still have the last one.
  static auto* const all = new std::vector<std::unique_ptr<FakeProducts>>();
  all->push_back(std::make_unique<FakeProducts>(std::vector<double>(times, times + count), identity));
  set_launch_times({launch, part, own});
  kernels::set_products(all->back().get());
}

void fake_gpu_remove_products() {
  kernels::set_products(nullptr);
  set_launch_times({});
}

} // extern "C"

} // namespace brigade::fake_gpu
