// The operators of GPUs made of host memory: those of the CPU, on the devices' memory; and graphs of them.
#include "fake_gpu.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#if __has_include(<torch/headeronly/core/enum_tag.h>)
#include <torch/headeronly/core/enum_tag.h>
#else
#include <ATen/core/enum_tag.h>
#endif

#include <cstring>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace brigade::fake_gpu {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;

using StoragePointer = const c10::StorageImpl*;

void copy_bytes(void* to, const void* from, size_t count) {
  if (count > 0) {
    std::memcpy(to, from, count);
  }
}

// A tensor of the given storage, with everything else as the other's.
Tensor like(const Tensor& other, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), other.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  made._set_conj(other.is_conj());
  made._set_neg(other.is_neg());
  return made;
}

// Asks for a device's memory to write to, as a kernel of CUDA does: its host views are written behind its back. Ends
// copy-on-write.
void ask_to_write(const Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda()) {
    tensor.storage().mutable_data();
  }
}

// The tensors of a list, or of an optional one; undefined ones for those that are not there.
std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  if (value.isTensorList()) {
    return value.toTensorVector();
  }
  std::vector<Tensor> found;
  if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& it : value.toOptionalTensorVector()) {
      found.push_back(it.value_or(Tensor()));
    }
  }
  return found;
}

// The value with every tensor replaced.
IValue with_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& it : value.toTensorVector()) {
      list.push_back(it.defined() ? replace(it) : it);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& it : value.toOptionalTensorVector()) {
      list.push_back(it.has_value() && it->defined() ? std::optional(replace(*it)) : it);
    }
    return list;
  }
  return value;
}

// Kernels of the CPU are below autograd and autocast, as those of the device are.
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{at::autocast_dispatch_keyset};
};

// Tensors of a device as tensors of the CPU on the same memory.
class HostViews {
 public:
  explicit HostViews(DeviceIndex device) : device_(device) {}

  Tensor of(const Tensor& tensor) {
    if (!tensor.is_cuda()) {
      return tensor;
    }
    TORCH_CHECK(
        tensor.layout() == c10::kStrided && !tensor.is_quantized(),
        "a GPU made of host memory has dense tensors alone, and no ", tensor.layout(), " ones");
    for (const auto& [own, host] : views_) {
      if (own.is_same(tensor)) {
        return host;
      }
    }
    Tensor view = like(tensor, storage(tensor), c10::DispatchKey::CPU);
    views_.emplace_back(tensor, view);
    return view;
  }

  // What a kernel of the CPU gave back, as a tensor of the device: the argument itself, a view of its memory, or a
  // copy in memory of its own, which the list then has.
  Tensor back(const Tensor& result, std::vector<Tensor>* fresh) {
    TORCH_CHECK(
        result.layout() == c10::kStrided && !result.is_quantized(),
        "a GPU made of host memory has dense tensors alone; this operator gave back one with layout ",
        result.layout());
    for (const auto& [own, host] : views_) {
      if (host.is_same(result)) {
        return own;
      }
    }
    const c10::Storage& storage = result.storage();
    for (const auto& [own, host] : storages_) {
      if (host.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return like(result, own, c10::DispatchKey::CUDA);
      }
    }
    c10::DeviceGuard guard(Device(c10::kCUDA, device_));
    size_t bytes = storage.nbytes();
    c10::DataPtr data = device_allocator()->allocate(bytes);
    copy_bytes(data.get(), storage.data(), bytes);
    c10::Storage own(
        c10::Storage::use_byte_size_t(), bytes, std::move(data), device_allocator(), /*resizable=*/true);
    storages_.emplace_back(own, storage);
    Tensor made = like(result, own, c10::DispatchKey::CUDA);
    fresh->push_back(made);
    return made;
  }

  // Carries over what the kernel has resized.
  void settle() {
    for (const auto& [own, host] : storages_) {
      auto* to = own.unsafeGetStorageImpl();
      if (host.data() == own.data() && host.nbytes() == own.nbytes()) {
        continue;
      }
      if (host.data() != own.data()) {
        c10::DeviceGuard guard(Device(c10::kCUDA, device_));
        c10::DataPtr data = device_allocator()->allocate(host.nbytes());
        copy_bytes(data.get(), host.data(), host.nbytes());
        to->set_data_ptr(std::move(data));
      }
      to->set_nbytes(host.nbytes());
    }
    for (const auto& [own, host] : views_) {
      bool same = own.sizes() == host.sizes() && own.strides() == host.strides() &&
          own.storage_offset() == host.storage_offset();
      if (!same) {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
      }
    }
  }

 private:
  c10::Storage storage(const Tensor& tensor) {
    const c10::Storage& own = tensor.storage();
    for (const auto& [known, host] : storages_) {
      if (known.unsafeGetStorageImpl() == own.unsafeGetStorageImpl()) {
        return host;
      }
    }
    auto* data = const_cast<void*>(own.data());
    c10::Storage host(
        c10::Storage::use_byte_size_t(), own.nbytes(), c10::DataPtr(data, c10::kCPU), c10::GetCPUAllocator(),
        /*resizable=*/true);
    storages_.emplace_back(own, host);
    return host;
  }

  DeviceIndex device_;
  std::vector<std::pair<Tensor, Tensor>> views_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// ---- graphs

struct Graph {
  DeviceIndex device = 0;
  std::optional<c10::Stream> stream;
  std::vector<std::function<void()>> nodes;
  // The memory that the operators used first, as it was: a capture runs nothing on a real GPU.
  std::vector<std::pair<c10::Storage, std::string>> before;
  std::unordered_set<StoragePointer> known;
  std::vector<c10::Storage> made;
  at::Generator generator_before;
  bool invalid = false;
  std::vector<std::function<void()>> frees;

  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    for (const auto& free : frees) {
      free();
    }
  }
};

std::recursive_mutex graph_mutex;
Graph* capture = nullptr;

// The capture that what this thread gives the device now belongs to: other threads go on with streams of their own
// meanwhile, and those of autograd have the stream of the forward. Under the lock.
Graph* capture_of_stream() {
  return capture != nullptr && current_stream(capture->device) == *capture->stream ? capture : nullptr;
}

void remember(const Tensor& tensor) {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  Graph* captured = capture_of_stream();
  if (captured == nullptr || !tensor.defined() || !tensor.is_cuda()) {
    return;
  }
  const c10::Storage& storage = tensor.storage();
  if (captured->known.insert(storage.unsafeGetStorageImpl()).second) {
    captured->before.emplace_back(
        storage, std::string(static_cast<const char*>(storage.data()), storage.nbytes()));
  }
}

// A tensor of its own on the same memory: what later becomes of the other does not matter to a graph.
Tensor held(const Tensor& tensor) {
  if (tensor.is_cuda()) {
    return like(tensor, tensor.storage(), c10::DispatchKey::CUDA);
  }
  auto copy = tensor.clone();
  // A number of the program does not decide the result's type.
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

// ---- operators

const std::set<std::string>& takes_scalars_of_the_cpu() {
  static const std::set<std::string> names{
      "aten::fill_",        "aten::fill",          "aten::masked_fill_",      "aten::masked_fill",
      "aten::index_fill_",  "aten::index_fill",    "aten::index_put_",        "aten::_index_put_impl_",
      "aten::where",        "aten::_fused_adam_",  "aten::_fused_adamw_",     "aten::_fused_sgd_",
      "aten::_fused_adagrad_"};
  return names;
}

const std::set<std::string>& takes_indices() {
  static const std::set<std::string> names{
      "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
  return names;
}

// Operators whose result has a size that only the device knows, or that give the host a value.
const std::set<std::string>& always_waits() {
  static const std::set<std::string> names{
      "aten::nonzero",    "aten::masked_select",      "aten::_unique",                 "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",  "aten::bincount",
      "aten::equal"};
  return names;
}

// What a call has to do with devices.
struct Call {
  DeviceIndex device = 0;
  bool waits = false;
};

[[noreturn]] void refuse_devices(const std::string& name, const Device& one, const Device& other) {
  std::string short_name = name.substr(name.find(':') + 2);
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ", one.str(), " and ",
      other.str(), "! (when checking argument in method wrapper_CUDA_", short_name, ")");
}

// Whether index_put_ is one masked_fill_: a single mask of the device, and one number of the host.
bool fills_a_mask(const std::vector<IValue>& arguments) {
  const Tensor& number = arguments[2].toTensor();
  if (arguments[3].toBool() || !number.is_cpu() || number.numel() != 1) {
    return false;
  }
  int masks = 0;
  for (const Tensor& index : tensors_of(arguments[1])) {
    if (index.defined()) {
      bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      if (!is_mask || !index.is_cuda()) {
        return false;
      }
      masks += 1;
    }
  }
  return masks == 1;
}

Call look_at(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const std::string& name = op.operator_name().name;
  Call call;
  std::optional<Device> device;
  for (const IValue& value : arguments) {
    for (const Tensor& tensor : tensors_of(value)) {
      if (tensor.defined() && tensor.is_cuda()) {
        if (device && *device != tensor.device()) {
          refuse_devices(name, *device, tensor.device());
        }
        device = tensor.device();
      }
    }
  }
  bool with_tensors = device.has_value();
  for (const IValue& value : arguments) {
    if (!device && value.isDevice() && value.toDevice().is_cuda()) {
      device = value.toDevice();
    }
    if (!device && value.isGenerator() && value.toGenerator().device().is_cuda()) {
      device = value.toGenerator().device();
    }
  }
  call.device = device && device->has_index() ? device->index() : current_device();
  check_device(call.device);
  bool scalars = op.hasTag(at::Tag::pointwise) || takes_scalars_of_the_cpu().count(name) > 0;
  bool indices = takes_indices().count(name) > 0;
  // A mask that a number is written through needs no indices, and so no wait.
  bool fills = name == "aten::_index_put_impl_" && fills_a_mask(arguments);
  bool copies_scalars = name == "aten::where" || name == "aten::_index_put_impl_";
  const auto& declared = op.schema().arguments();
  for (size_t at = 0; at < arguments.size(); ++at) {
    const IValue& value = arguments[at];
    const auto* alias = declared[at].alias_info();
    bool is_written = alias != nullptr && alias->isWrite();
    bool is_index_list = indices && (value.isOptionalTensorList() || value.isTensorList());
    for (const Tensor& tensor : tensors_of(value)) {
      if (!tensor.defined()) {
        continue;
      }
      bool is_mask = tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      call.waits = call.waits || (is_index_list && !fills && (is_mask || tensor.is_cpu()));
      if (!with_tensors || tensor.is_cuda()) {
        continue;
      }
      bool number = tensor.dim() == 0 && value.isTensor() && !is_written &&
          (scalars || tensor.unsafeGetTensorImpl()->is_wrapped_number());
      if (!number && !is_index_list) {
        refuse_devices(name, *device, tensor.device());
      }
      // These copy it to the device first, and not from pinned memory.
      call.waits = call.waits || (number && copies_scalars && !fills);
    }
  }
  call.waits = call.waits || always_waits().count(name) > 0;
  if (name == "aten::repeat_interleave") {
    call.waits = arguments.size() < 2 || arguments.back().isNone();
  } else if (name == "aten::multinomial") {
    call.waits = arguments[1].toInt() == 1 || !arguments[2].toBool();
  }
  return call;
}

// Runs the kernel of the CPU on the arguments; its results as it gave them. `views` has what stands for what.
Stack run_on_host(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, DeviceIndex device, HostViews& views) {
  static const auto optional_generator = c10::OptionalType::create(c10::GeneratorType::get());
  const auto& schema = op.schema();
  Stack stack;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const IValue& value = arguments[at];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      stack.emplace_back(Device(c10::kCPU));
    } else if (value.isGenerator()) {
      stack.emplace_back(host_generator(value.toGenerator()));
    } else if (value.isNone() && schema.arguments()[at].type()->isSubtypeOf(*optional_generator)) {
      stack.emplace_back(host_generator(default_generator(device)));
    } else {
      stack.push_back(with_tensors(value, [&](const Tensor& it) { return views.of(it); }));
    }
  }
  Below below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return stack;
}

// What the arguments must be for kernels that the CPU has with fewer types.
struct Adapted {
  std::vector<IValue> arguments;
  std::optional<at::ScalarType> result;
};

Adapted adapt(const std::string& name, std::vector<IValue> arguments) {
  Adapted adapted{std::move(arguments), std::nullopt};
  auto& list = adapted.arguments;
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && list[2].toBool()) {
    list[0] = list[0].toTensor().to(at::kFloat);
    list[2] = false;
  } else if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data") {
    at::ScalarType type = list[3].toScalarType();
    at::ScalarType computed = list[0].toTensor().scalar_type();
    if (type != computed && list.size() == 4) {
      list[3] = computed;
      adapted.result = type;
    }
  }
  return adapted;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = op.operator_name().name;
  auto given = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, given.size());
  Below below;
  auto [arguments, result_type] = adapt(name, std::move(given));
  Call call = look_at(op, arguments);
  if (call.waits) {
    synchronization(name);
  }
  c10::DeviceGuard guard(Device(c10::kCUDA, call.device));
  touch(call.device);
  drain(current_stream(call.device));
  bool recorded = capturing(call.device) && name != "aten::resize_" && name != "aten::is_set_to";
  if (recorded) {
    for (const IValue& value : arguments) {
      for (const Tensor& tensor : tensors_of(value)) {
        remember(tensor);
      }
    }
  }
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (const Tensor& tensor : tensors_of(arguments[at])) {
        ask_to_write(tensor);
      }
    }
  }
  HostViews views(call.device);
  Stack results = run_on_host(op, arguments, call.device, views);
  views.settle();
  std::vector<Tensor> fresh;
  Stack outputs;
  for (const IValue& value : results) {
    outputs.push_back(with_tensors(value, [&](const Tensor& it) { return views.back(it, &fresh); }));
  }
  enter_in_account(op, arguments, fresh);
  if (recorded) {
    std::vector<IValue> kept;
    std::vector<std::pair<Tensor, Tensor>> same;
    auto keep = [&](const Tensor& tensor) {
      for (const auto& [original, copy] : same) {
        if (original.is_same(tensor)) {
          return copy;
        }
      }
      same.emplace_back(tensor, held(tensor));
      return same.back().second;
    };
    for (const IValue& value : arguments) {
      kept.push_back(with_tensors(value, keep));
    }
    // Where the results were written, in their order; undefined where they are an argument's memory.
    std::vector<Tensor> places;
    for (const IValue& value : outputs) {
      for (const Tensor& tensor : tensors_of(value)) {
        bool is_fresh = false;
        for (const Tensor& it : fresh) {
          is_fresh = is_fresh || it.is_same(tensor);
        }
        places.push_back(tensor.defined() && is_fresh ? held(tensor) : Tensor());
      }
    }
    {
      std::lock_guard<std::recursive_mutex> lock(graph_mutex);
      if (Graph* captured = capture_of_stream()) {
        for (const Tensor& tensor : fresh) {
          captured->known.insert(tensor.storage().unsafeGetStorageImpl());
          captured->made.push_back(tensor.storage());
        }
      }
    }
    record([op, kept, places, device = call.device] {
      c10::DeviceGuard guard(Device(c10::kCUDA, device));
      HostViews views(device);
      Stack results = run_on_host(op, kept, device, views);
      size_t at = 0;
      for (const IValue& value : results) {
        for (const Tensor& tensor : tensors_of(value)) {
          const Tensor& place = places.at(at++);
          if (place.defined()) {
            TORCH_CHECK(
                tensor.storage().nbytes() == place.storage().nbytes(), op.operator_name().name,
                " gave a result of another size at a graph's replay: ", tensor.sizes(), " of ",
                tensor.scalar_type(), " in ", tensor.storage().nbytes(), " bytes instead of ", place.sizes(),
                " of ", place.scalar_type(), " in ", place.storage().nbytes());
            copy_bytes(place.storage().mutable_data(), tensor.storage().data(), place.storage().nbytes());
          }
        }
      }
    });
  }
  for (IValue& value : outputs) {
    if (result_type && value.isTensor()) {
      value = value.toTensor().to(*result_type);
    }
    stack->push_back(std::move(value));
  }
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(c10::kStrided) == c10::kStrided, "a GPU made of host memory has dense tensors alone");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      type.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      type.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
      "\" to a storage on different device \"", source.device(), "\".");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  TORCH_CHECK(
      self.numel() == 0 || needed <= self.storage().nbytes(), "setStorage: sizes ", self.sizes(), ", strides ",
      self.strides(), ", storage offset ", offset, " need ", needed, " bytes, and the storage has ",
      self.storage().nbytes());
  return self;
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), /*resizable=*/true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

// Copies as kernels of the CPU do, between views of both tensors.
void copy_now(const Tensor& to, const Tensor& from) {
  HostViews views(to.is_cuda() ? to.device().index() : from.device().index());
  HostViews other(from.is_cuda() ? from.device().index() : 0);
  Below below;
  // One set of views where both may be one memory.
  bool same = to.is_cuda() && from.is_cuda() && to.device() == from.device();
  Tensor target = views.of(to);
  target.copy_(same ? views.of(from) : other.of(from));
}

Tensor& copy(Tensor& self, const Tensor& given, bool non_blocking) {
  if (self.is_same(given)) {
    return self;
  }
  Below below;
  Tensor source = self.sizes() == given.sizes() ? given : given.expand(self.sizes());
  if (self.numel() == 0) {
    return self;
  }
  ask_to_write(self);
  enter_in_account("aten::copy_", self.nbytes() + std::min(given.nbytes(), source.nbytes()));
  if (self.is_cuda() && source.is_cuda()) {
    for (const Tensor& tensor : {self, source}) {
      touch(tensor.device().index());
      drain(current_stream(tensor.device().index()));
    }
    if (capturing(self.device().index()) || capturing(source.device().index())) {
      remember(self);
      remember(source);
      record([to = held(self), from = held(source)] { copy_now(to, from); });
    }
    copy_now(self, source);
    return self;
  }
  bool up = self.is_cuda();
  const Tensor& device_side = up ? self : source;
  const Tensor& host_side = up ? source : self;
  TORCH_CHECK(host_side.is_cpu(), "a GPU made of host memory copies from and to CPUs, not ", host_side.device());
  DeviceIndex device = device_side.device().index();
  touch(device);
  c10::Stream stream = current_stream(device);
  bool as_bytes = self.scalar_type() == source.scalar_type() && self.strides() == source.strides() &&
      self.is_non_overlapping_and_dense() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  bool pinned = is_pinned(host_side.storage().data());
  if (!non_blocking || !pinned || !as_bytes) {
    synchronization(up ? "copy: host to device" : "copy: device to host");
    drain(stream);
    copy_now(self, source);
    return self;
  }
  pinned_allocator()->record_event(const_cast<void*>(host_side.const_data_ptr()), nullptr, stream);
  void* to = self.mutable_data_ptr();
  const void* from = source.const_data_ptr();
  size_t count = self.nbytes();
  if (capturing(device)) {
    remember(self);
    record([to, from, count, self_storage = self.storage(), source_storage = source.storage()] {
      copy_bytes(to, from, count);
    });
    drain(stream);
    copy_bytes(to, from, count);
  } else if (stream.id() == 0) {
    copy_bytes(to, from, count);
  } else {
    // Addresses alone: nothing keeps the tensors, as nothing does on a real GPU.
    put_off(stream, [to, from, count] { copy_bytes(to, from, count); });
  }
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  synchronization("aten::_local_scalar_dense");
  touch(self.device().index());
  drain(current_stream(self.device().index()));
  HostViews views(self.device().index());
  return at::_local_scalar_dense(views.of(self));
}

void record_stream_of(Tensor& self, at::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// As the kernel for CUDA: the CPU's takes its numbers from the CPU's own generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  Below below;
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  // Read, write, and a byte of the mask.
  enter_in_account("aten::native_dropout", 2 * input.nbytes() + input.numel());
  Nested nested;
  if (p == 1) {
    return {at::zeros_like(input), at::zeros_like(input, input.options().dtype(at::kBool))};
  }
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(1 / (1 - p)), mask};
}

void check_product_type(const Tensor& operand, at::ScalarType type, const Tensor& out) {
  const bool is_short = operand.scalar_type() == at::kHalf || operand.scalar_type() == at::kBFloat16;
  TORCH_CHECK(
      type == operand.scalar_type() || (type == at::kFloat && is_short),
      "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(out.scalar_type() == type, "out_dtype must be the same as the dtype of the provided out tensor");
}

// Products of 16 bits with a result of 32, for which the CPU has no kernels.
Tensor& mm_with_type(const Tensor& self, const Tensor& other, at::ScalarType type, Tensor& out) {
  check_product_type(self, type, out);
  enter_in_account("aten::mm", 0);
  Nested nested;
  Below below;
  return out.copy_(self.to(type).mm(other.to(type)));
}

Tensor& addmm_with_type(
    const Tensor& self, const Tensor& one, const Tensor& other, at::ScalarType type, const at::Scalar& beta,
    const at::Scalar& alpha, Tensor& out) {
  check_product_type(one, type, out);
  enter_in_account("aten::addmm", 0);
  Nested nested;
  Below below;
  return out.copy_(self.mul(beta).add_(one.to(type).mm(other.to(type)), alpha));
}

bool no_library_for_ctc(const Tensor&, const Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) { return false; }

bool no_library_for_ctc_of_tensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t) {
  return false;
}

Tensor sum_of_gates(
    const Tensor& input, const Tensor& hidden, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  Tensor sum = input + hidden;
  if (input_bias && input_bias->defined()) {
    sum = sum + *input_bias + *hidden_bias;
  }
  return sum;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  Below below;
  auto gates = sum_of_gates(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  Below below;
  bool from_hidden = grad_hy && grad_hy->defined(), from_cell = grad_cy && grad_cy->defined();
  if (!from_hidden && !from_cell) {
    return {};
  }
  auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  Tensor bent = cy.tanh();
  Tensor grad_out = from_hidden ? *grad_hy * bent : at::zeros_like(cx);
  Tensor grad_cell = from_hidden ? *grad_hy * out * (1 - bent * bent) : at::zeros_like(cx);
  if (from_cell) {
    grad_cell = grad_cell + *grad_cy;
  }
  Tensor grad_gates = at::cat(
      {grad_cell * cell * in * (1 - in), grad_cell * cx * forget * (1 - forget), grad_cell * in * (1 - cell * cell),
       grad_out * out * (1 - out)},
      1);
  return {grad_gates, grad_cell * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  Below below;
  bool biased = input_bias && input_bias->defined();
  auto in = (biased ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto hidden = (biased ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  Tensor reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  Tensor fresh = (in[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& workspace, bool has_bias) {
  Below below;
  auto parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  Tensor grad_update = grad * (hx - fresh) * update * (1 - update);
  Tensor grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  Tensor grad_reset = grad_fresh * hidden * reset * (1 - reset);
  Tensor grad_in = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {
      grad_in, grad_hidden, grad * update, has_bias ? grad_in.sum(0) : Tensor(),
      has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

void register_operators() {
  // Never freed: what it registers goes with it.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("empty.memory_format", TORCH_FN(empty));
  library->impl("empty_strided", TORCH_FN(empty_strided));
  library->impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library->impl("view", TORCH_FN(at::native::view));
  library->impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library->impl("unfold", TORCH_FN(at::native::unfold));
  library->impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library->impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library->impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library->impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library->impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library->impl("set_", TORCH_FN(set_nothing));
  library->impl("copy_", TORCH_FN(copy));
  library->impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library->impl("record_stream", TORCH_FN(record_stream_of));
  library->impl("native_dropout", TORCH_FN(native_dropout));
  register_attention(*library);
  library->impl("mm.dtype_out", TORCH_FN(mm_with_type));
  library->impl("addmm.dtype_out", TORCH_FN(addmm_with_type));
  for (const char* name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    library->impl(name, TORCH_FN(no_library_for_ctc));
    library->impl((std::string(name) + ".Tensor").c_str(), TORCH_FN(no_library_for_ctc_of_tensors));
  }
  library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library->impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library->impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  auto host = [&](const std::string& name) {
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  };
  // Made of other operators, which they choose by the kind of the device.
  for (const char* name : {"convolution", "_convolution", "convolution_backward"}) {
    host(name);
  }
  // What the CPU has a kernel for, a GPU has one for, too: not the ones for every device, which may round otherwise.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      continue;
    }
    host(name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name));
  }
  auto* rest = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  rest->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

bool capturing() {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  return capture_of_stream() != nullptr;
}

bool capturing(DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  return capture != nullptr && capture->device == device && capture_of_stream() != nullptr;
}

bool record(std::function<void()> node) {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  Graph* captured = capture_of_stream();
  if (captured != nullptr) {
    captured->nodes.push_back(std::move(node));
  }
  return captured != nullptr;
}

bool free_with_graph(std::function<void()> free) {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  Graph* captured = capture_of_stream();
  if (captured != nullptr) {
    captured->frees.push_back(std::move(free));
  }
  return captured != nullptr;
}

void invalidate_capture() {
  std::lock_guard<std::recursive_mutex> lock(graph_mutex);
  if (Graph* captured = capture_of_stream()) {
    captured->invalid = true;
  }
}

extern "C" {

char* fake_gpu_begin_capture(int32_t device) {
  return caught([&] {
    check_device(static_cast<DeviceIndex>(device));
    std::lock_guard<std::recursive_mutex> lock(graph_mutex);
    TORCH_CHECK(capture == nullptr, "CUDA error: a graph is captured already");
    touch(static_cast<DeviceIndex>(device));
    drain(current_stream(static_cast<DeviceIndex>(device)));
    capture = new Graph();
    capture->device = static_cast<DeviceIndex>(device);
    capture->stream = current_stream(capture->device);
    capture->generator_before = host_generator(default_generator(capture->device)).clone();
  });
}

char* fake_gpu_end_capture(void** graph) {
  return caught([&] {
    std::lock_guard<std::recursive_mutex> lock(graph_mutex);
    TORCH_CHECK(capture != nullptr, "CUDA error: no graph is captured");
    std::unique_ptr<Graph> captured(std::exchange(capture, nullptr));
    // A capture runs nothing on a real GPU: memory and generator are as before it, and what it made has no values.
    for (auto& [storage, bytes] : captured->before) {
      copy_bytes(storage.mutable_data(), bytes.data(), std::min(bytes.size(), storage.nbytes()));
    }
    for (auto& storage : captured->made) {
      if (storage.nbytes() > 0) {
        std::memset(storage.mutable_data(), 0xFF, storage.nbytes());
      }
    }
    captured->before.clear();
    captured->known.clear();
    captured->made.clear();
    at::Generator generator = host_generator(default_generator(captured->device));
    generator.set_state(captured->generator_before.get_state());
    TORCH_CHECK(
        !captured->invalid, "CUDA error: operation failed due to a previous error during capture");
    *graph = captured.release();
  });
}

char* fake_gpu_replay(void* graph) {
  return caught([&] {
    auto* captured = static_cast<Graph*>(graph);
    touch(captured->device);
    drain(current_stream(captured->device));
    for (const auto& node : captured->nodes) {
      node();
    }
  });
}

void fake_gpu_free_graph(void* graph) { delete static_cast<Graph*>(graph); }

bool fake_gpu_is_capturing(int32_t device) { return capturing(static_cast<DeviceIndex>(device)); }

const FakeGpuGraphs* fake_gpu_graphs() {
  static const FakeGpuGraphs table{
      fake_gpu_begin_capture, fake_gpu_end_capture, fake_gpu_replay, fake_gpu_free_graph, fake_gpu_is_capturing};
  return &table;
}
}

}  // namespace brigade::fake_gpu
