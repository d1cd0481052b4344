#include "choice.h"

#include "brigade-torch/src/bridge.rs.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <utility>

namespace brigade::kernels {
namespace {

struct KeptChoiceOfKey {
  int candidates, chosen;
};

// The choices in the user's cache, by GPU and key, and those that this process has made since.
class KeptChoices {
 public:
  static KeptChoices& all() {
    // Never freed: backward threads may outlive any order of destructors.
    static auto* const all = new KeptChoices();
    return *all;
  }

  std::optional<int> find(const std::string& identity, const std::string& key, int candidates) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto& known = of(identity);
    const auto found = known.find(key);
    const bool fits = found != known.end() && found->second.candidates == candidates &&
        found->second.chosen < candidates;
    return fits ? std::optional(found->second.chosen) : std::nullopt;
  }

  void keep(const std::string& identity, const std::string& key, int candidates, int chosen) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& known = of(identity);
    known[key] = {candidates, chosen};
    rust::Vec<KeptChoice> rows;
    for (const auto& [name, choice] : known) {
      rows.push_back(KeptChoice{rust::String(name), choice.candidates, choice.chosen});
    }
    warn(keep_choices(identity, std::move(rows)));
  }

 private:
  std::map<std::string, KeptChoiceOfKey>& of(const std::string& identity) {
    const auto [place, is_new] = known_.try_emplace(identity);
    if (is_new) {
      const auto file = kept_choices(identity);
      warn(file.remark);
      for (const auto& row : file.choices) {
        place->second[std::string(row.key)] = {row.candidates, row.chosen};
      }
    }
    return place->second;
  }

  // Once: a folder that cannot be written stays so.
  void warn(const rust::String& remark) {
    if (!remark.empty() && !std::exchange(has_warned_, true)) {
      TORCH_WARN("choices of GPU products: ", std::string(remark));
    }
  }

  std::mutex mutex_;
  std::map<std::string, std::map<std::string, KeptChoiceOfKey>> known_;
  bool has_warned_ = false;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? std::numeric_limits<double>::infinity() : values[values.size() / 2];
}

c10::Event event_now(c10::Device device) {
  // The default flag is the one with a time.
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

} // namespace

Choice* Meter::choice(const std::string& key, int candidates, int unmeasured) {
  return choices_.of(key, [&] { return std::make_unique<Choice>(key, candidates, unmeasured); });
}

Choice::Choice(std::string key, int candidates, int unmeasured)
    : key_(std::move(key)), unmeasured_(unmeasured), candidates_(candidates) {}

void Choice::run(
    Meter& meter, c10::Device device, const std::function<void(int)>& candidate,
    const std::function<void(int)>& trial) {
  int number = unmeasured_;
  bool is_measured = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!at::globalContext().deterministicAlgorithms()) {
      if (!std::exchange(was_looked_up_, true)) {
        const auto identity = meter.identity();
        const int count = static_cast<int>(candidates_.size());
        chosen_ = identity.empty() ? std::nullopt : KeptChoices::all().find(identity, key_, count);
      }
      const bool may_measure = !chosen_ && !meter.is_recording();
      if (may_measure) {
        collect(meter);
      }
      const auto due = may_measure && !chosen_ ? next() : std::nullopt;
      is_measured = due.has_value();
      number = due ? *due : chosen_ ? *chosen_ : best();
      candidates_[number].begun += is_measured;
    }
    number = candidates_[number].has_failed ? 0 : number;
  }
  try {
    std::optional<c10::Event> begin;
    if (is_measured) {
      begin = event_now(device);
      if (trial) {
        trial(number);
      }
    }
    candidate(number);
    if (is_measured) {
      auto end = event_now(device);
      const std::lock_guard<std::mutex> lock(mutex_);
      pending_.push_back({number, std::move(*begin), std::move(end)});
    }
    return;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    if (number == 0) {
      throw;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    candidates_[number].has_failed = true;
    TORCH_WARN("candidate ", number, " of ", key_, " is not used: ", error.what_without_backtrace());
  }
  candidate(0);
}

void Choice::collect(Meter& meter) {
  while (!pending_.empty() && pending_.front().end.query()) {
    const auto& sample = pending_.front();
    candidates_[sample.candidate].times.push_back(sample.begin.elapsedTime(sample.end));
    pending_.pop_front();
  }
  const bool is_complete = std::all_of(candidates_.begin(), candidates_.end(), [](const auto& candidate) {
    return candidate.has_failed || candidate.times.size() >= kRuns;
  });
  if (is_complete) {
    chosen_ = best();
    if (const auto identity = meter.identity(); !identity.empty()) {
      KeptChoices::all().keep(identity, key_, static_cast<int>(candidates_.size()), *chosen_);
    }
  }
}

std::optional<int> Choice::next() const {
  std::optional<int> next;
  for (int i = 0; i < static_cast<int>(candidates_.size()); ++i) {
    const auto& candidate = candidates_[i];
    const bool is_due = !candidate.has_failed && candidate.begun < kRuns;
    if (is_due && (!next || candidate.begun < candidates_[*next].begun)) {
      next = i;
    }
  }
  return next;
}

int Choice::best() const {
  if (!candidates_[unmeasured_].has_failed && candidates_[unmeasured_].times.empty()) {
    return unmeasured_;
  }
  int best = unmeasured_;
  double time = std::numeric_limits<double>::infinity();
  for (int i = 0; i < static_cast<int>(candidates_.size()); ++i) {
    const double own = candidates_[i].has_failed ? time : median(candidates_[i].times);
    if (own < time) {
      best = i;
      time = own;
    }
  }
  return best;
}

} // namespace brigade::kernels
