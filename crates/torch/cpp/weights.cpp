#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace brigade {

struct CopiesState;

namespace {

struct KeptCopy;

// Which copy a storage is watched for: one of two tensors with the same memory; and the graphs that are recorded.
struct Watched {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, KeptCopy*> storages;
  std::vector<CopiesState*> recorded;
  int64_t memories = 0;
  std::unordered_map<at::DeviceIndex, int64_t> replays;
};

Watched& watched() {
  // Never destroyed: parameters may live as long as the program.
  static auto* all = new Watched;
  return *all;
}

// Shallow copies of a parameter have no copy.
struct Refused final : c10::BackendMeta {
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
};

// All but the destructor under the lock.
struct KeptCopy final : c10::BackendMeta {
  ~KeptCopy() override {
    const std::lock_guard lock(watched().mutex);
    unwatch();
  }

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }

  static KeptCopy* of(const at::Tensor& parameter) {
    return dynamic_cast<KeptCopy*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
  }

  // Whether the values are those of a storage: the parameter's.
  bool is_current(const c10::StorageImpl* storage) const {
    const auto& all = watched().storages;
    const auto found = all.find(storage);
    return found != all.end() && found->second == this && storage == watches() && replay == replays() &&
        version == counter.current_version() && c10::impl::cow::is_cow_data_ptr(storage->data_ptr());
  }

  // The same of a tensor, the parameter or one that has its memory, in a type and with so many rows at least.
  bool serves(const at::Tensor& tensor, at::ScalarType type, int64_t rows) const {
    return values.defined() && values.scalar_type() == type && values.dim() == tensor.dim() &&
        values.size(0) >= rows && values.sizes().slice(1) == tensor.sizes().slice(1) &&
        values.strides() == tensor.strides() && is_current(tensor.storage().unsafeGetStorageImpl());
  }

  void fill(const at::Tensor& parameter, at::ScalarType type, int64_t rows) {
    auto sizes = parameter.sizes().vec();
    sizes[0] = rows;
    const bool fits = values.defined() && values.scalar_type() == type && values.sizes() == sizes &&
        values.strides() == parameter.strides() && values.device() == parameter.device() && is_own();
    if (!fits) {
      values = at::Tensor();
      values = at::empty_strided(
          sizes, parameter.strides(), parameter.options().dtype(type).requires_grad(false));
      memory = ++watched().memories;
    }
    given = parameter.size(0);
    values.narrow(0, 0, given).copy_(parameter);
    if (rows > given) {
      values.narrow(0, given, rows - given).zero_();
    }
    counter = parameter.unsafeGetTensorImpl()->version_counter();
    watch(parameter.storage());
  }

  void watch(const c10::Storage& storage) {
    unwatch();
    auto* impl = storage.unsafeGetStorageImpl();
    // What it returns has the other reference.
    const bool is_shared = c10::impl::cow::lazy_clone_storage(*impl).defined();
    if (is_shared) {
      source.emplace(storage.getWeakStorageImpl());
      version = counter.current_version();
      replay = replays();
      watched().storages[impl] = this;
    }
  }

  void unwatch() {
    auto& all = watched().storages;
    const auto found = all.find(watches());
    if (found != all.end() && found->second == this) {
      all.erase(found);
    }
    source.reset();
  }

  // The number of replays on the device, which may have written the parameter.
  int64_t replays() const {
    return watched().replays[values.device().index()];
  }

  // The weak reference keeps the address from being another storage's.
  const c10::StorageImpl* watches() const {
    return source ? source->_unsafe_get_target() : nullptr;
  }

  // Nobody reads the values at the moment. A GPU reads and writes in the stream's order, and graphs hold their memory.
  bool is_own() const {
    return values.is_cuda() || (values.use_count() == 1 && values.storage().use_count() == 1);
  }

  at::Tensor values; // the parameter's elements in their order, and rows of zeros
  int64_t given = 0; // rows of the parameter
  int64_t memory = 0; // a number of the memory of the values, of which no other has the same
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> source;
  c10::VariableVersion counter; // the parameter's
  int64_t version = 0;
  int64_t replay = 0;
};

// A copy that a graph reads or writes at its address.
struct RecordedCopy {
  c10::weak_intrusive_ptr<c10::StorageImpl> source;
  at::Tensor values;
  int64_t given;
  int64_t memory;

  // Writes the weight's values to it, unless it has them.
  void refresh() const {
    auto locked = source.lock();
    if (!locked) {
      return;
    }
    const c10::Storage storage(std::move(locked));
    const auto& all = watched().storages;
    const auto found = all.find(storage.unsafeGetStorageImpl());
    auto* kept = found != all.end() && found->second->memory == memory ? found->second : nullptr;
    if (kept != nullptr && kept->is_current(storage.unsafeGetStorageImpl())) {
      return;
    }
    const auto place = values.narrow(0, 0, given);
    if (storage.nbytes() != sizeof(float) * static_cast<size_t>(place.numel())) {
      return; // The weight's memory was given up, and the graph with it.
    }
    place.copy_(at::empty({0}, values.options().dtype(at::kFloat)).set_(storage, 0, place.sizes(), place.strides()));
    if (kept != nullptr) {
      kept->watch(storage);
    }
  }
};

} // namespace

struct CopiesState {
  at::Device device;
  std::unordered_map<int64_t, RecordedCopy> used;
  std::unordered_set<int64_t> current_at_end;
};

namespace {

bool is_recorded(const at::Device& device) {
  const auto& all = watched().recorded;
  return std::any_of(all.begin(), all.end(), [&](const auto* graph) { return graph->device == device; });
}

// Tells the graphs that are recorded that they use a copy.
void note_use(const KeptCopy& kept) {
  for (auto* graph : watched().recorded) {
    if (graph->device == kept.values.device()) {
      graph->used.try_emplace(kept.memory, RecordedCopy{*kept.source, kept.values, kept.given, kept.memory});
    }
  }
}

at::Tensor parameter_of(const at::Tensor& weight) {
  return weight.is_view() ? at::Tensor(weight._base()) : weight;
}

// The parameter's copy, current and of at least as many rows. Undefined where a graph is recorded and there is none: a
// cast would be part of the graph, and what it writes is not there before a replay.
at::Tensor current_values(const at::Tensor& parameter, at::ScalarType type, int64_t rows) {
  // Perhaps that of another tensor with the memory: the backward of a recomputed part has such a one.
  const auto& all = watched().storages;
  const auto found = all.find(parameter.storage().unsafeGetStorageImpl());
  if (found != all.end() && found->second->serves(parameter, type, rows)) {
    note_use(*found->second);
    return found->second->values;
  }
  if (is_recorded(parameter.device())) {
    return {};
  }
  auto* impl = parameter.unsafeGetTensorImpl();
  if (impl->get_backend_meta() == nullptr) {
    impl->set_backend_meta(c10::make_intrusive<KeptCopy>());
  }
  auto& kept = *KeptCopy::of(parameter);
  kept.fill(parameter, type, rows);
  return kept.values;
}

} // namespace

bool can_keep_copy(const at::Tensor& weight, at::ScalarType type) {
  if (!at::autocast::is_autocast_cache_enabled() || (type != at::kBFloat16 && type != at::kHalf) ||
      weight.scalar_type() != at::kFloat || weight.layout() != at::kStrided || weight.is_inference() || weight.is_neg() ||
      !(weight.is_cpu() || weight.is_cuda())) {
    return false;
  }
  const auto parameter = parameter_of(weight);
  const bool is_whole = parameter.scalar_type() == at::kFloat && parameter.is_leaf() && parameter.dim() > 0 &&
      parameter.numel() > 0 && parameter.is_non_overlapping_and_dense() && parameter.storage_offset() == 0 &&
      parameter.storage().nbytes() == parameter.nbytes() && has_memory(parameter);
  if (!is_whole) {
    return false;
  }
  const auto& storage = *parameter.storage().unsafeGetStorageImpl();
  const std::lock_guard lock(watched().mutex);
  return (parameter.unsafeGetTensorImpl()->get_backend_meta() == nullptr || KeptCopy::of(parameter) != nullptr) &&
      (c10::impl::cow::has_simple_data_ptr(storage) || c10::impl::cow::is_cow_data_ptr(storage.data_ptr()));
}

at::Tensor kept_copy(const at::Tensor& weight, at::ScalarType type) {
  if (!can_keep_copy(weight, type)) {
    return {};
  }
  at::NoGradGuard no_grad;
  const auto parameter = parameter_of(weight);
  const std::lock_guard lock(watched().mutex);
  const auto values = current_values(parameter, type, parameter.size(0));
  return values.defined() ? values.as_strided(weight.sizes(), weight.strides(), weight.storage_offset()) : values;
}

at::Tensor weight_in_type(const at::Tensor& weight, at::ScalarType type) {
  const auto copy = at::GradMode::is_enabled() ? at::Tensor() : kept_copy(weight, type);
  return copy.defined() ? copy : weight.to(type);
}

at::Tensor kept_copy_with_rows(const at::Tensor& weight, at::ScalarType type, int64_t rows) {
  const bool is_whole =
      weight.is_contiguous() && can_keep_copy(weight, type) && weight.sizes() == parameter_of(weight).sizes();
  if (!is_whole) {
    return {};
  }
  at::NoGradGuard no_grad;
  const std::lock_guard lock(watched().mutex);
  const auto values = current_values(parameter_of(weight), type, rows);
  return values.defined() ? values.narrow(0, 0, rows) : values;
}

at::Tensor copy_for_step(const at::Tensor& parameter) {
  const std::lock_guard lock(watched().mutex);
  const auto* kept = KeptCopy::of(parameter);
  const bool can = kept != nullptr && kept->values.defined() &&
      kept->serves(parameter, kept->values.scalar_type(), parameter.size(0)) && kept->is_own();
  if (!can) {
    return {};
  }
  note_use(*kept);
  return kept->values.as_strided({kept->values.numel()}, {1});
}

void copy_was_stepped(const at::Tensor& parameter) {
  const std::lock_guard lock(watched().mutex);
  if (auto* kept = KeptCopy::of(parameter)) {
    kept->watch(parameter.storage());
  }
}

void refuse_copies(const Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Refused>());
}

GraphCopies::GraphCopies(std::unique_ptr<CopiesState> given) : state(std::move(given)) {}

GraphCopies::~GraphCopies() {
  end();
}

void GraphCopies::end() noexcept {
  const std::lock_guard lock(watched().mutex);
  auto& all = watched().recorded;
  const auto own = std::find(all.begin(), all.end(), state.get());
  if (own == all.end()) {
    return;
  }
  all.erase(own);
  for (const auto& [storage, kept] : watched().storages) {
    if (kept->values.device() == state->device && kept->is_current(storage)) {
      state->current_at_end.insert(kept->memory);
    }
  }
}

void GraphCopies::before_replay() const {
  at::NoGradGuard no_grad;
  const c10::DeviceGuard on(state->device);
  const std::lock_guard lock(watched().mutex);
  for (const auto& [memory, copy] : state->used) {
    copy.refresh();
  }
  const auto before = watched().replays[state->device.index()]++;
  for (const auto& [storage, kept] : watched().storages) {
    if (kept->replay == before && state->current_at_end.count(kept->memory) > 0) {
      kept->replay = kept->replays();
    }
  }
}

std::unique_ptr<GraphCopies> copies_of_graph(int32_t gpu) {
  at::NoGradGuard no_grad;
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(gpu));
  const c10::DeviceGuard on(device);
  auto state = std::make_unique<CopiesState>(CopiesState{device, {}, {}});
  const std::lock_guard lock(watched().mutex);
  std::vector<RecordedCopy> all;
  for (const auto& [storage, kept] : watched().storages) {
    if (kept->values.device() == device) {
      all.push_back({*kept->source, kept->values, kept->given, kept->memory});
    }
  }
  for (const auto& copy : all) {
    copy.refresh();
  }
  watched().recorded.push_back(state.get());
  return std::make_unique<GraphCopies>(std::move(state));
}

} // namespace brigade
