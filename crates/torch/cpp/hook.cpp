// Communication hooks of the gradient reducer.
#include "brigade-torch/src/bridge.rs.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

namespace {

using c10::ivalue::Future;

// Casts a bucket to a smaller type for the wire, as torch's fp16_compress_hook and bf16_compress_hook:
// each rank divides before the sum, so that it does not overflow.
class CompressHook final : public c10d::CommHookInterface {
 public:
  CompressHook(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType kind)
      : group_(std::move(group)), kind_(kind) {}

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    at::NoGradGuard no_grad;
    auto compressed = bucket.getBuffer().to(kind_);
    compressed.div_(group_->getSize());
    std::vector<at::Tensor> list{compressed};
    auto reduced = group_->allreduce(list)->getFuture();
    // A view of the gradients where gradients are views: filled in place, as the reducer does.
    auto target = bucket.getBuffer();
    return reduced->then(
        [target, compressed](Future& done) {
          at::NoGradGuard no_grad;
          if (done.hasError()) {
            std::rethrow_exception(done.exception_ptr());
          }
          auto out = target;
          out.copy_(compressed);
          return c10::IValue(out);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.toTensor();
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  at::ScalarType kind_;
};

// Hands buckets to Rust, which leaves the mean in the buffer before it returns.
class RustHook final : public c10d::CommHookInterface {
 public:
  RustHook(
      rust::Box<Hook> hook, std::unordered_map<const c10::TensorImpl*, size_t> places)
      : hook_(std::move(hook)), places_(std::move(places)) {}

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    at::NoGradGuard no_grad;
    const auto gradients = bucket.getGradients();
    rust::Vec<size_t> parameters;
    for (const auto& parameter : bucket.getParameters()) {
      parameters.push_back(places_.at(parameter.unsafeGetTensorImpl()));
    }
    run_hook(
        *hook_,
        bucket.getIndex(),
        bucket.isLast(),
        bucket.getBuffer(),
        gradients,
        std::move(parameters));
    std::vector<c10::Device> devices;
    if (!bucket.getBuffer().is_cpu()) {
      devices.push_back(bucket.getBuffer().device());
    }
    auto future = c10::make_intrusive<Future>(c10::TensorType::get(), std::move(devices));
    // The hook may fill the buffer as late as in its call for the last bucket: the reducer looks at it
    // when all buckets are through.
    future->markCompleted(c10::IValue(bucket.getBuffer()));
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.toTensor();
  }

 private:
  rust::Box<Hook> hook_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;
};

} // namespace

void reducer_compress(const Reducer& reducer, const Group& group, int8_t kind) {
  reducer.reducer->register_comm_hook(
      std::make_unique<CompressHook>(group.live(), static_cast<at::ScalarType>(kind)));
}

void reducer_hook(const Reducer& reducer, rust::Box<Hook> hook) {
  reducer.reducer->register_comm_hook(std::make_unique<RustHook>(std::move(hook), reducer.places));
}

} // namespace brigade
