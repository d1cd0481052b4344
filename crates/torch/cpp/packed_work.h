#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <mutex>
#include <utility>

namespace brigade {

// A message of several tensors as one, which are copied out of it when it has ended.
class PackedWork final : public c10d::Work {
 public:
  PackedWork(c10::intrusive_ptr<c10d::Work> work, std::function<void()> unpack)
      : work_(std::move(work)), unpack_(std::move(unpack)) {}

  bool isCompleted() override {
    if (!work_->isCompleted()) {
      return false;
    }
    if (work_->isSuccess()) {
      unpack();
    }
    return true;
  }
  bool isSuccess() const override {
    return work_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return work_->exception();
  }
  bool wait(std::chrono::milliseconds limit) override {
    const bool good = work_->wait(limit);
    unpack();
    return good;
  }
  void abort() override {
    work_->abort();
  }

 private:
  // Once: what was written since into the tensors stays.
  void unpack() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto run = std::exchange(unpack_, nullptr)) {
      at::NoGradGuard no_grad;
      run();
    }
  }

  const c10::intrusive_ptr<c10d::Work> work_;
  std::mutex mutex_;
  std::function<void()> unpack_;
};

} // namespace brigade
