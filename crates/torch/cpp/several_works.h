#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <vector>

namespace brigade {

// Operations of one call.
class SeveralWorks final : public c10d::Work {
 public:
  explicit SeveralWorks(std::vector<c10::intrusive_ptr<c10d::Work>> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& it) { return it->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& it) { return it->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (auto error = work->exception()) {
        return error;
      }
    }
    return nullptr;
  }
  // The limit is that of all together.
  bool wait(std::chrono::milliseconds limit) override {
    const auto end = std::chrono::steady_clock::now() + limit;
    bool good = true;
    for (const auto& work : works_) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      good = work->wait(limit.count() > 0 ? std::max(left, std::chrono::milliseconds(1)) : limit) && good;
    }
    return good;
  }
  void abort() override {
    for (const auto& work : works_) {
      work->abort();
    }
  }

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

} // namespace brigade
