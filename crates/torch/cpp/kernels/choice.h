// Choices between several ways to compute the same, by the times that they take on a GPU.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace brigade::kernels {

// Values by the key of an operation and its shapes, for as many keys as a program of usual batches has. One whose batches
// all have other lengths has more.
template <typename Value>
class ByShape {
 public:
  // Returns the value of the key, which `make` makes at the first call; a null pointer stays one. Null if there are too
  // many keys.
  template <typename Make>
  Value* of(const std::string& key, const Make& make) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = values_.find(key);
    if (known != values_.end()) {
      return known->second.get();
    }
    if (values_.size() >= kMost) {
      return nullptr;
    }
    return values_.emplace(key, make()).first->second.get();
  }

 private:
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Value>> values_;
};

class Choice;

// What choices need to know of a GPU.
class Meter {
 public:
  virtual ~Meter() = default;

  // Returns `true` while the current stream is recorded as a graph: what it is given then has no time, and events must
  // not be asked for.
  virtual bool is_recording() = 0;
  // Returns what times depend on, GPU and versions of libraries: choices are kept under it. Empty if they are not kept.
  virtual std::string identity() = 0;

  // Returns the choice of an operation's key, which is made at the first call. Null if there are too many keys.
  Choice* choice(const std::string& key, int candidates, int unmeasured);

 private:
  ByShape<Choice> choices_;
};

// A choice between candidates for an operation of one shape. Candidate 0 always works and is used where another one
// fails. The first calls run each candidate a few times, with events around them that later calls read, so that the
// host never waits; then the candidate with the smallest median is taken. In deterministic mode nothing is measured.
class Choice {
 public:
  // `unmeasured` is the candidate that is taken where nothing was measured.
  Choice(std::string key, int candidates, int unmeasured);

  // Calls `candidate` with the number of a candidate, and once more with 0 if that throws. A measured run first calls
  // `trial`, within its time: the backward of an operation whose candidates differ there, too.
  void run(
      Meter& meter, c10::Device device, const std::function<void(int)>& candidate,
      const std::function<void(int)>& trial = {});

 private:
  // Runs of each candidate. The median of three leaves out the one in which a library loads its code.
  static constexpr int kRuns = 3;

  struct Candidate {
    int begun = 0;
    bool has_failed = false;
    std::vector<double> times;
  };
  struct Sample {
    int candidate;
    c10::Event begin, end;
  };

  // Reads the events that the device has come to, and decides once all are read.
  void collect(Meter& meter);
  // Returns the candidate that is to be measured next, if any is left.
  std::optional<int> next() const;
  // Returns the one with the smallest median so far.
  int best() const;

  const std::string key_;
  const int unmeasured_;
  std::mutex mutex_;
  std::vector<Candidate> candidates_;
  std::deque<Sample> pending_;
  bool was_looked_up_ = false;
  std::optional<int> chosen_;
};

} // namespace brigade::kernels
