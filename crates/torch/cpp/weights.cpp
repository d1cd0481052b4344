#include "brigade-torch/src/bridge.rs.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>

namespace brigade {

namespace {

struct KeptCopy;

// Which copy a storage is watched for: one of two tensors with the same memory.
struct Watched {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, const KeptCopy*> storages;
};

Watched& watched() {
  // Never destroyed: parameters may live as long as the program.
  static auto* all = new Watched;
  return *all;
}

std::atomic<int64_t> replays{0};
std::atomic<int64_t> suspended{0};

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

  // Whether the values are those of a tensor: the parameter, or one that has its memory.
  bool is_current(const at::Tensor& tensor) const {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto& all = watched().storages;
    const auto found = all.find(storage);
    return found != all.end() && found->second == this && storage == watches() && replay == replays &&
        version == counter.current_version() && c10::impl::cow::is_cow_data_ptr(storage->data_ptr());
  }

  // The same in a type and with so many rows at least.
  bool serves(const at::Tensor& tensor, at::ScalarType type, int64_t rows) const {
    return values.defined() && values.scalar_type() == type && values.dim() == tensor.dim() &&
        values.size(0) >= rows && values.sizes().slice(1) == tensor.sizes().slice(1) && is_current(tensor);
  }

  void fill(const at::Tensor& parameter, at::ScalarType type, int64_t rows) {
    auto sizes = parameter.sizes().vec();
    sizes[0] = rows;
    const bool fits = values.defined() && values.scalar_type() == type && values.sizes() == sizes &&
        values.device() == parameter.device() && is_own();
    if (!fits) {
      values = at::Tensor();
      values = at::empty(sizes, parameter.options().dtype(type).requires_grad(false));
    }
    const int64_t given = parameter.size(0);
    values.narrow(0, 0, given).copy_(parameter);
    if (rows > given) {
      values.narrow(0, given, rows - given).zero_();
    }
    watch(parameter);
  }

  void watch(const at::Tensor& parameter) {
    unwatch();
    const auto& storage = parameter.storage();
    auto* impl = storage.unsafeGetStorageImpl();
    // What it returns has the other reference.
    const bool is_shared = c10::impl::cow::lazy_clone_storage(*impl).defined();
    if (is_shared) {
      source.emplace(storage.getWeakStorageImpl());
      counter = parameter.unsafeGetTensorImpl()->version_counter();
      version = counter.current_version();
      replay = replays;
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

  // The weak reference keeps the address from being another storage's.
  const c10::StorageImpl* watches() const {
    return source ? source->_unsafe_get_target() : nullptr;
  }

  // Nobody reads the values at the moment.
  bool is_own() const {
    return values.use_count() == 1 && values.storage().use_count() == 1;
  }

  at::Tensor values; // the parameter's elements in their order, and rows of zeros
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> source;
  c10::VariableVersion counter; // the parameter's
  int64_t version = 0;
  int64_t replay = 0;
};

at::Tensor parameter_of(const at::Tensor& weight) {
  return weight.is_view() ? at::Tensor(weight._base()) : weight;
}

// The parameter's copy, current and of at least as many rows.
const at::Tensor& current_values(const at::Tensor& parameter, at::ScalarType type, int64_t rows) {
  // Perhaps that of another tensor with the memory: the backward of a recomputed part has such a one.
  const auto& all = watched().storages;
  const auto found = all.find(parameter.storage().unsafeGetStorageImpl());
  if (found != all.end() && found->second->serves(parameter, type, rows)) {
    return found->second->values;
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
      parameter.numel() > 0 && parameter.is_contiguous() && parameter.storage_offset() == 0 &&
      parameter.storage().nbytes() == parameter.nbytes() && has_memory(parameter);
  if (!is_whole) {
    return false;
  }
  const auto& storage = *parameter.storage().unsafeGetStorageImpl();
  const std::lock_guard lock(watched().mutex);
  return (parameter.unsafeGetTensorImpl()->get_backend_meta() == nullptr || KeptCopy::of(parameter) != nullptr) &&
      (c10::impl::cow::has_simple_data_ptr(storage) || c10::impl::cow::is_cow_data_ptr(storage.data_ptr()));
}

bool keeps_copy(const at::Tensor& weight, at::ScalarType type) {
  return suspended == 0 && can_keep_copy(weight, type);
}

bool keeps_whole_copy(const at::Tensor& weight, at::ScalarType type) {
  return weight.is_contiguous() && keeps_copy(weight, type) && weight.sizes() == parameter_of(weight).sizes();
}

at::Tensor kept_copy(const at::Tensor& weight, at::ScalarType type) {
  at::NoGradGuard no_grad;
  const auto parameter = parameter_of(weight);
  const std::lock_guard lock(watched().mutex);
  return current_values(parameter, type, parameter.size(0))
      .as_strided(weight.sizes(), weight.strides(), weight.storage_offset());
}

at::Tensor kept_copy_with_rows(const at::Tensor& weight, at::ScalarType type, int64_t rows) {
  at::NoGradGuard no_grad;
  const auto parameter = parameter_of(weight);
  const std::lock_guard lock(watched().mutex);
  return current_values(parameter, type, rows).narrow(0, 0, rows);
}

at::Tensor copy_for_step(const at::Tensor& parameter) {
  const std::lock_guard lock(watched().mutex);
  const auto* kept = KeptCopy::of(parameter);
  const bool can = suspended == 0 && kept != nullptr && kept->values.defined() && kept->is_current(parameter) &&
      kept->is_own() && parameter.is_contiguous() && parameter.numel() <= kept->values.numel();
  return can ? kept->values : at::Tensor();
}

void copy_was_stepped(const at::Tensor& parameter) {
  const std::lock_guard lock(watched().mutex);
  if (auto* kept = KeptCopy::of(parameter)) {
    kept->watch(parameter);
  }
}

void refuse_copies(const Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Refused>());
}

void suspend_copies(bool suspend) noexcept {
  suspended += suspend ? 1 : -1;
}

void forget_copies() noexcept {
  ++replays;
}

} // namespace brigade
