#include "storage.h"

#include <ATen/ATen.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <optional>
#include <typeinfo>

namespace brigade {

namespace {

// libtorch 2.11 can set the flag, but has no public function that clears it. An explicit instantiation may name a
// private member.
template <auto Member>
struct Access {
  friend bool c10::StorageImpl::*access_is_refused() {
    return Member;
  }
};
bool c10::StorageImpl::*access_is_refused();
template struct Access<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

c10::DispatchKeySet keys_of(at::Device device) {
  return c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, at::kStrided, device));
}

} // namespace

c10::Storage empty_storage(at::Device device) {
  // The allocator that libtorch itself would take for the device.
  auto empty = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device));
  auto* allocator = empty.storage().allocator();
  TORCH_CHECK(allocator != nullptr, "no allocator for tensors on ", device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      0,
      c10::DataPtr(nullptr, empty.device()),
      allocator,
      /*resizable=*/true));
}

at::Tensor tensor_of(
    const c10::Storage& storage,
    at::ScalarType kind,
    int64_t offset,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys_of(storage.device()), at::scalarTypeToTypeMeta(kind));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void allocate(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  std::optional<c10::impl::VirtualGuardImpl> guard;
  std::optional<at::Device> before;
  if (!storage.device().is_cpu()) {
    guard.emplace(storage.device_type());
    before = guard->exchangeDevice(storage.device());
  }
  auto data = impl->allocator()->allocate(bytes);
  if (guard) {
    guard->setDevice(*before);
  }
  impl->*access_is_refused() = false;
  // Looks at the flag, too.
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

void borrow(const c10::Storage& storage, const c10::Storage& from) {
  auto* impl = storage.unsafeGetStorageImpl();
  void* const data = from.unsafeGetStorageImpl()->mutable_data();
  auto* const owner = new c10::Storage(from);
  c10::DataPtr borrowed(
      data, owner, [](void* it) { delete static_cast<c10::Storage*>(it); }, from.device());
  impl->*access_is_refused() = false;
  impl->set_data_ptr_noswap(std::move(borrowed));
  impl->set_nbytes(from.nbytes());
}

void release(const c10::Storage& storage, size_t bytes, const std::string& why) {
  auto* impl = storage.unsafeGetStorageImpl();
  impl->*access_is_refused() = false;
  impl->set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  // Views are made as of memory that is there, so that it is their use that throws `why`.
  impl->set_nbytes(bytes);
  // Sets flags only, in spite of its name.
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}

std::unique_ptr<Tensor> unallocated(
    const Tensor& like, rust::Slice<const int64_t> sizes, rust::Slice<const int64_t> strides, rust::Str why) {
  const auto storage = empty_storage(like.device());
  auto tensor = tensor_of(
      storage, like.scalar_type(), 0, {sizes.data(), sizes.size()}, {strides.data(), strides.size()});
  size_t end = tensor.numel() == 0 ? 0 : 1;
  for (size_t i = 0; end > 0 && i < sizes.size(); ++i) {
    end += static_cast<size_t>(sizes[i] - 1) * static_cast<size_t>(strides[i]);
  }
  release(storage, end * tensor.itemsize(), std::string(why));
  return std::make_unique<Tensor>(std::move(tensor));
}

void set_data(const Tensor& tensor, const Tensor& values) {
  auto handle = tensor;
  if (tensor.device().is_privateuseone() == values.device().is_privateuseone()) {
    handle.set_data(values);
    return;
  }
  // libtorch's own refuses a device of PrivateUse1 here, of which it does not know whether its tensors have a class of
  // their own. What it does otherwise is the same.
  auto* const impl = handle.unsafeGetTensorImpl();
  const auto& given = *values.unsafeGetTensorImpl();
  TORCH_CHECK(
      typeid(*impl) == typeid(c10::TensorImpl) && typeid(given) == typeid(c10::TensorImpl) &&
          tensor.layout() == at::kStrided && values.layout() == at::kStrided,
      "a tensor on ", tensor.device(), " cannot take the memory of one on ", values.device(),
      ": one of them is not an ordinary dense tensor");
  TORCH_CHECK(
      !tensor.requires_grad() || at::isFloatingType(values.scalar_type()) || at::isComplexType(values.scalar_type()),
      "a tensor that requires gradients cannot have the type ", values.scalar_type());
  if (auto* const autograd = torch::autograd::impl::get_autograd_meta(handle)) {
    // It would check gradients against the device on which it was made.
    const std::lock_guard lock(autograd->mutex_);
    autograd->grad_accumulator_.reset();
  }
  impl->shallow_copy_from(values.getIntrusivePtr());
}

bool has_memory(const Tensor& tensor) {
  return !tensor.defined() || tensor.numel() == 0 || !tensor.has_storage() ||
      !(tensor.storage().unsafeGetStorageImpl()->*access_is_refused());
}

} // namespace brigade
