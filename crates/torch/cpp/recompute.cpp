#include "brigade-torch/src/bridge.rs.h"

#include "recompute.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <array>
#include <mutex>
#include <optional>
#include <utility>

namespace brigade {

std::unique_ptr<std::vector<Tensor>> gradients_of(
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> inputs,
    rust::Slice<const TensorRef> output_gradients,
    bool retain_graph,
    bool create_graph,
    bool allow_unused) {
  return std::make_unique<std::vector<Tensor>>(torch::autograd::grad(
      copy_handles(outputs),
      copy_handles(inputs),
      copy_handles(output_gradients),
      retain_graph,
      create_graph,
      allow_unused));
}

void backward_from(
    rust::Slice<const TensorRef> outputs,
    rust::Slice<const TensorRef> output_gradients,
    rust::Slice<const TensorRef> leaves,
    bool retain_graph,
    bool create_graph) {
  torch::autograd::backward(
      copy_handles(outputs),
      copy_handles(output_gradients),
      retain_graph,
      create_graph,
      copy_handles(leaves));
}

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// Shape and type of a tensor that was saved: to notice a part that does not do the same twice.
struct Seen {
  std::vector<int64_t> size;
  at::ScalarType type;

  static Seen of(const at::Tensor& tensor) {
    return Seen{tensor.sizes().vec(), tensor.scalar_type()};
  }
  bool operator==(const Seen& other) const {
    return size == other.size && type == other.type;
  }
};

// CPU, CUDA and PrivateUse1 (TPUs), as in `autocast_enter`.
constexpr std::array<int8_t, 3> autocast_devices{0, 1, 20};
using AutocastStates = std::array<AutocastState, autocast_devices.size()>;

AutocastState autocast_now(int8_t device) {
  const auto type = static_cast<at::DeviceType>(device);
  return AutocastState{
      at::autocast::is_autocast_enabled(type),
      static_cast<int8_t>(at::autocast::get_autocast_dtype(type)),
      at::autocast::is_autocast_cache_enabled()};
}

struct AutocastScope {
  explicit AutocastScope(const AutocastStates& next) {
    for (size_t i = 0; i < autocast_devices.size(); ++i) {
      before[i] = autocast_enter(autocast_devices[i], next[i]);
    }
  }
  ~AutocastScope() {
    for (size_t i = autocast_devices.size(); i-- > 0;) {
      autocast_leave(autocast_devices[i], before[i]);
    }
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
  AutocastStates before;
};

// By the numbers of `default_generator`.
using RandomStates = std::vector<std::pair<int32_t, rust::Vec<uint8_t>>>;

void set_random(const RandomStates& states) {
  for (const auto& [device, state] : states) {
    set_rng_state(device, {state.data(), state.size()});
  }
}

struct RandomScope {
  explicit RandomScope(const RandomStates& next) {
    for (const auto& [device, state] : next) {
      before.emplace_back(device, rng_state(device));
    }
    set_random(next);
  }
  ~RandomScope() {
    // A state that the generator gave: it takes it again.
    set_random(before);
  }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;
  RandomStates before;
};

} // namespace

struct RecomputeFrame {
  std::mutex mutex;
  std::vector<SavedVariable> inputs;
  RandomStates random;
  AutocastStates autocast;
  std::vector<Seen> saved;
  std::optional<rust::Box<Recompute>> recompute;
  std::vector<at::Tensor> values;

  at::Tensor take(size_t index, const std::shared_ptr<RecomputeFrame>& self);
};

namespace {

// The second time: what is saved goes to the frame.
struct Capture {
  std::vector<at::Tensor> values;
  std::vector<Seen> saved;
};

struct HookScope {
  std::shared_ptr<RecomputeFrame> frame; // the first time
  std::shared_ptr<Capture> capture; // the second time
};

// libtorch asks for hooks on the thread that runs the operation. The top of the stack decides.
thread_local std::vector<HookScope> scopes;
thread_local int recomputing = 0;

struct LeftOut final : SavedVariableHooks {
  explicit LeftOut(std::shared_ptr<RecomputeFrame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = frame_->saved.size();
    frame_->saved.push_back(Seen::of(tensor));
  }
  at::Tensor call_unpack_hook() override {
    return frame_->take(index_, frame_);
  }

 private:
  std::shared_ptr<RecomputeFrame> frame_;
  size_t index_ = 0;
};

struct Captured final : SavedVariableHooks {
  explicit Captured(std::shared_ptr<Capture> capture) : capture_(std::move(capture)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    index_ = capture_->values.size();
    capture_->saved.push_back(Seen::of(tensor));
    capture_->values.push_back(tensor.detach());
  }
  at::Tensor call_unpack_hook() override {
    // A backward inside of the part itself.
    TORCH_CHECK(capture_->values[index_].defined(), "a recomputed tensor was released");
    return capture_->values[index_];
  }

 private:
  std::shared_ptr<Capture> capture_;
  size_t index_ = 0;
};

// libtorch asks its engine for the hooks of tensors that operations save; Python's engine overrides this
// function for torch.utils.checkpoint, and so does this one.
struct RecomputeEngine final : torch::autograd::Engine {
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (scopes.empty()) {
      return nullptr;
    }
    const auto& top = scopes.back();
    if (top.capture) {
      return std::make_unique<Captured>(top.capture);
    }
    return std::make_unique<LeftOut>(top.frame);
  }
};

torch::autograd::Engine& recompute_engine() {
  // Never destroyed: its threads may outlive static objects.
  static auto* engine = new RecomputeEngine;
  return *engine;
}

// At the start of the program: libtorch starts the threads of GPUs once, for the engine of the first backward, and an
// engine that comes later has no queues for them. libtorch's own static objects are made before this program's.
[[maybe_unused]] const bool installed_at_start = [] {
  torch::autograd::set_default_engine_stub(&recompute_engine);
  return true;
}();

struct CaptureScope {
  explicit CaptureScope(std::shared_ptr<Capture> capture) {
    scopes.push_back(HookScope{nullptr, std::move(capture)});
    ++recomputing;
  }
  ~CaptureScope() {
    --recomputing;
    scopes.pop_back();
  }
  CaptureScope(const CaptureScope&) = delete;
  CaptureScope& operator=(const CaptureScope&) = delete;
};

} // namespace

at::Tensor RecomputeFrame::take(size_t index, const std::shared_ptr<RecomputeFrame>& self) {
  std::lock_guard<std::mutex> lock(mutex);
  if (index >= values.size() || !values[index].defined()) {
    TORCH_CHECK(recompute, "a backward began before the forward of a recomputed part had ended");
    auto arguments = std::make_unique<std::vector<Tensor>>();
    for (const auto& input : inputs) {
      arguments->push_back(input.unpack());
    }
    auto capture = std::make_shared<Capture>();
    {
      at::AutoGradMode with_gradients(true);
      RandomScope same_random(random);
      AutocastScope same_precision(autocast);
      CaptureScope capturing(capture);
      run_recompute(**recompute, *arguments);
    }
    TORCH_CHECK(
        capture->saved == saved,
        "a recomputed part did something else than in the forward: it saved ",
        capture->saved.size(),
        " tensors, the forward ",
        saved.size(),
        ", or of other shapes or types");
    values = std::move(capture->values);
  }
  // Most are asked for once. Of a graph that is kept, the next backward computes them again.
  return std::exchange(values[index], at::Tensor());
}

std::unique_ptr<RecomputePart> recompute_begin(rust::Slice<const TensorRef> inputs) {
  auto frame = std::make_shared<RecomputeFrame>();
  constexpr int32_t kCpu = -1, kTpu = -2;
  int32_t device = kCpu;
  for (const auto& input : copy_handles(inputs)) {
    // Under an outer part its hooks take this: the inputs of a nested part are recomputed, too.
    frame->inputs.emplace_back(input, /*is_output=*/false);
    if (input.is_cuda()) {
      device = input.get_device();
    } else if (input.is_privateuseone()) {
      device = kTpu;
    }
  }
  frame->random.emplace_back(kCpu, rng_state(kCpu));
  if (device != kCpu) {
    frame->random.emplace_back(device, rng_state(device));
  }
  for (size_t i = 0; i < autocast_devices.size(); ++i) {
    frame->autocast[i] = autocast_now(autocast_devices[i]);
  }
  return std::make_unique<RecomputePart>(RecomputePart{std::move(frame)});
}

void recompute_enter(const RecomputePart& part) {
  scopes.push_back(HookScope{part.frame, nullptr});
}

void recompute_leave() noexcept {
  scopes.pop_back();
}

void recompute_finish(const RecomputePart& part, rust::Box<Recompute> recompute) {
  std::lock_guard<std::mutex> lock(part.frame->mutex);
  part.frame->recompute.emplace(std::move(recompute));
}

bool is_recomputing() {
  return recomputing > 0;
}

} // namespace brigade
