// Google's TPUs by TorchTPU, an eager backend for libtorch on the key PrivateUse1, which is loaded when a TPU is first
// asked for: a program with the feature tpu starts on machines without it, too.
//
// tch has no device for PrivateUse1. It shows devices that it does not know as `Device::Mps`, and asks for MPS when it
// is given that. Nothing registers MPS with libtorch on Linux, so here a fallback of its dispatch key sends all
// operations that make tensors on MPS to PrivateUse1, and a device guard forwards to that of PrivateUse1.
#include "brigade-torch/src/bridge.rs.h"

#include "warnings.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Type.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace brigade {

namespace {

constexpr auto kTpu = at::kPrivateUse1;

// The reason why the loader has refused a library, with the names of C++ as they are written.
std::string loader_error() {
  const char* found = dlerror();
  std::string text = found == nullptr ? "unknown error of the loader" : found;
  const auto mangled = text.find("_Z");
  if (mangled != std::string::npos) {
    const auto end = text.find_first_of(" ,)", mangled);
    const auto name = text.substr(mangled, end == std::string::npos ? end : end - mangled);
    text.replace(mangled, name.size(), c10::demangle(name.c_str()));
  }
  return text;
}

void* open(const std::string& path, int scope) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NODELETE | scope);
  TORCH_CHECK(library != nullptr, loader_error());
  return library;
}

template <typename Function>
Function* symbol(void* library, const std::string& path, const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(library, name));
  TORCH_CHECK(found != nullptr, path, " has no function ", c10::demangle(name));
  return found;
}

// A file in memory with a library that this program carries, as a path that can be opened. It stays open, since
// TorchTPU opens the path again.
std::string carried(rust::Slice<const uint8_t> library) {
  const int file = memfd_create("brigade-tpu", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0, "cannot make a file in memory: ", std::strerror(errno));
  for (size_t written = 0; written < library.size();) {
    const auto count = write(file, library.data() + written, library.size() - written);
    TORCH_CHECK(count > 0, "cannot write a file in memory: ", std::strerror(errno));
    written += static_cast<size_t>(count);
  }
  return "/proc/self/fd/" + std::to_string(file);
}

// Sets a variable, or removes it, for as long as it lives. The environment is that of the whole process: other threads
// must not read it meanwhile, as with every change of it.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (const char* before = std::getenv(name)) {
      before_ = before;
    }
    set(value);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() {
    set(before_);
  }

 private:
  void set(const std::optional<std::string>& value) const {
    value ? setenv(name_, value->c_str(), /*overwrite=*/1) : unsetenv(name_);
  }

  const char* name_;
  std::optional<std::string> before_;
};

// absl::Status, which is returned in memory of the caller since it has a destructor. What it may point to is not freed.
struct Status {
  static constexpr uintptr_t kOk = 1;
  uintptr_t value = kOk;
  ~Status() {}
};

// Every operation that would make a tensor on MPS makes it on the TPU.
void on_tpu(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = operation.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().is_mps()) {
      value = at::Device(kTpu, 0);
    }
  }
  operation.callBoxed(stack);
}

// Registered from the start, with one device: the engine of autograd starts the threads of all devices with its first
// backward, which may be one on the CPU before the TPU is loaded.
struct GuardOfMps final : c10::impl::DeviceGuardImplInterface {
  // Null until it is loaded.
  static const c10::impl::DeviceGuardImplInterface* tpu() {
    return c10::impl::device_guard_impl_registry[static_cast<size_t>(kTpu)].load();
  }
  static at::Device in(at::Device device) {
    return {kTpu, device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(0)};
  }
  static at::Device out(at::Device device) {
    return {at::kMPS, device.index()};
  }
  at::DeviceType type() const override {
    return at::kMPS;
  }
  at::Device exchangeDevice(at::Device device) const override {
    return tpu() == nullptr ? device : out(tpu()->exchangeDevice(in(device)));
  }
  at::Device getDevice() const override {
    return tpu() == nullptr ? at::Device(at::kMPS, 0) : out(tpu()->getDevice());
  }
  void setDevice(at::Device device) const override {
    if (tpu() != nullptr) {
      tpu()->setDevice(in(device));
    }
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    if (tpu() != nullptr) {
      tpu()->uncheckedSetDevice(in(device));
    }
  }
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, out(in(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
};

const c10::impl::DeviceGuardImplRegistrar kGuard(at::kMPS, new GuardOfMps);

// Attention by products and a softmax: TorchTPU's own is a call that only a TPU has. The operation below adds a mask to
// the scores, whatever its type.
at::Tensor plain_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool causal,
    std::optional<double> scale,
    bool grouped) {
  auto added = mask;
  if (mask && mask->scalar_type() == at::kBool) {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    added = at::zeros(mask->sizes(), query.options()).masked_fill(mask->logical_not(), kHidden);
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, added, dropout, causal, /*dropout_mask=*/std::nullopt, scale, grouped));
}

// The logarithm of the sum of two powers, which TorchTPU 0.2.0 lacks.
at::Tensor logaddexp(const at::Tensor& one, const at::Tensor& other) {
  const auto sum = at::maximum(one, other) + (one - other).abs().neg().exp().log1p();
  // Equal infinities have no difference.
  return at::where(one.eq(other), one + std::log(2.0), sum);
}

// Mish and its gradient, which TorchTPU 0.2.0 lacks. Values of 16 bits are computed in float32, as by other kernels.
at::Tensor wide(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x;
}

at::Tensor mish_values(const at::Tensor& self) {
  const auto x = wide(self);
  return x.mul(at::softplus(x).tanh()).to(self.scalar_type());
}

at::Tensor& mish_into(const at::Tensor& self, at::Tensor& out) {
  at::native::resize_output(out, self.sizes());
  return out.copy_(mish_values(self));
}

at::Tensor& mish_in_place(at::Tensor& self) {
  return self.copy_(mish_values(self));
}

at::Tensor mish_gradient(const at::Tensor& gradient, const at::Tensor& self) {
  const auto x = wide(self), t = at::softplus(x).tanh();
  const auto slope = t + x * x.sigmoid() * (1 - t.square());
  return wide(gradient).mul(slope).to(self.scalar_type());
}

// The loss scale after a step, which TorchTPU 0.2.0 lacks.
at::Tensor& update_scale(
    at::Tensor& scale,
    at::Tensor& tracker,
    const at::Tensor& found_inf,
    double growth,
    double backoff,
    int64_t interval) {
  const auto overflow = found_inf.ne(0), next = tracker.add(1);
  const auto grown = scale.mul(growth);
  const auto due = overflow.logical_not().logical_and(next.eq(interval));
  const auto kept = at::where(due.logical_and(grown.isfinite()), grown, scale);
  scale.copy_(at::where(overflow, scale.mul(backoff), kept));
  tracker.copy_(at::where(overflow.logical_or(due), at::zeros_like(next), next));
  return scale;
}

// Cumulative sums and products, on the host: XLA's compiler for CPUs fails a check of its own for them, which ends the
// process.
using Cumulated = at::Tensor (*)(const at::Tensor&, int64_t, std::optional<at::ScalarType>);

template <Cumulated operation>
at::Tensor cumulated(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> kind) {
  return operation(self.cpu(), dim, kind).to(self.device());
}

template <Cumulated operation>
at::Tensor& cumulated_into(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> kind, at::Tensor& out) {
  at::native::resize_output(out, self.sizes());
  return out.copy_(operation(self.cpu(), dim, kind));
}

template <Cumulated operation>
at::Tensor& cumulate(at::Tensor& self, int64_t dim, std::optional<at::ScalarType> kind) {
  return self.copy_(operation(self.cpu(), dim, kind));
}

at::Tensor log_cumulated_powers(const at::Tensor& self, int64_t dim) {
  return at::_logcumsumexp(self.cpu(), dim).to(self.device());
}

template <Cumulated operation>
void register_cumulated(torch::Library& library, const std::string& name) {
  library.impl(name.c_str(), TORCH_FN(cumulated<operation>));
  library.impl((name + "_").c_str(), TORCH_FN(cumulate<operation>));
  library.impl((name + ".out").c_str(), TORCH_FN(cumulated_into<operation>));
}

// The gradient of a convolution's input as a convolution of the output's gradient, undefined where that is not so simple.
// XLA's compiler for CPUs computes the form that TorchTPU gives it, with a reversed window, a hundred times slower.
at::Tensor input_gradient(const c10::ArrayRef<c10::IValue> arguments) {
  const auto gradient = arguments[0].toTensor(), input = arguments[1].toTensor(), weight = arguments[2].toTensor();
  const auto stride = arguments[4].toIntVector(), padding = arguments[5].toIntVector(),
             dilation = arguments[6].toIntVector();
  if (input.dim() != 4 || gradient.numel() == 0 || arguments[7].toBool() || arguments[9].toInt() != 1) {
    return {};
  }
  std::vector<int64_t> outer(2);
  auto spread = gradient;
  for (int64_t i = 0; i < 2; ++i) {
    const int64_t reach = dilation[i] * (weight.size(2 + i) - 1);
    outer[i] = reach - padding[i];
    if (outer[i] < 0) {
      return {};
    }
    // Zeros between the rows, and behind the last one for rows of the input that no window begins at.
    const int64_t rows = input.size(2 + i) + 2 * padding[i] - reach;
    auto sizes = spread.sizes().vec();
    sizes[2 + i] *= stride[i];
    auto padded = spread.unsqueeze(3 + i);
    std::vector<int64_t> pads(2 * (padded.dim() - 3 - i), 0);
    pads.back() = stride[i] - 1;
    spread = at::constant_pad_nd(padded, pads).reshape(sizes).narrow(2 + i, 0, rows);
  }
  return at::conv2d(spread, weight.flip({2, 3}).transpose(0, 1), {}, at::IntArrayRef{1, 1}, outer, dilation);
}

// TorchTPU's kernels of operations that have one of ours.
struct Kept {
  std::optional<c10::SafeKernelFunction> convolution_backward;
  std::optional<c10::SafeKernelFunction> native_batch_norm;
  std::optional<c10::SafeKernelFunction> native_layer_norm;
  std::optional<c10::SafeKernelFunction> native_layer_norm_backward;
};

Kept& kept() {
  static Kept kernels;
  return kernels;
}

// TorchTPU 0.2.0 leaves the running statistics as they are.
void native_batch_norm(
    const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  kept().native_batch_norm->callBoxed(operation, keys, stack);
  if (!arguments[5].toBool() || arguments[3].isNone() || arguments[4].isNone()) {
    return;
  }
  const auto input = arguments[0].toTensor(), mean = arguments[3].toTensor(), variance = arguments[4].toTensor();
  const double momentum = arguments[6].toDouble(), eps = arguments[7].toDouble();
  if (!mean.defined() || !variance.defined()) {
    return;
  }
  const auto of_batch = (*stack)[stack->size() - 2].toTensor();
  const auto inverse_root = (*stack)[stack->size() - 1].toTensor();
  const auto values = static_cast<double>(input.numel() / input.size(1));
  const auto unbiased = inverse_root.pow(-2).sub(eps).clamp_min(0).mul(values / (values - 1));
  // Autograd has saved the statistics, and must not count a change, as it does none by other kernels.
  mean.variable_data().mul_(1 - momentum).add_(of_batch, momentum);
  variance.variable_data().mul_(1 - momentum).add_(unbiased, momentum);
}

// Calls TorchTPU's kernel of a layer norm. It takes parameters of the input's type alone: float32 ones of an input in 16
// bits make all of it float32, as libtorch's kernels compute it, and the first result is cast back. The weight is the
// argument at `weight`, and the bias is behind it.
void layer_norm_in_float(
    const c10::SafeKernelFunction& kernel,
    size_t input,
    size_t weight,
    const c10::OperatorHandle& operation,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const auto is_tensor = [](const c10::IValue& value) { return value.isTensor() && value.toTensor().defined(); };
  auto* const arguments = stack->data() + stack->size() - operation.schema().arguments().size();
  const auto type = arguments[input].toTensor().scalar_type();
  bool is_mixed = false;
  for (const size_t i : {weight, weight + 1}) {
    const auto& value = arguments[i];
    is_mixed |= at::isReducedFloatingType(type) && is_tensor(value) && value.toTensor().scalar_type() == at::kFloat;
  }
  if (is_mixed) {
    for (auto* value = arguments; value != stack->data() + stack->size(); ++value) {
      if (is_tensor(*value)) {
        *value = value->toTensor().to(at::kFloat);
      }
    }
  }
  kernel.callBoxed(operation, keys, stack);
  auto& result = (*stack)[stack->size() - operation.schema().returns().size()];
  if (is_mixed && is_tensor(result)) {
    result = result.toTensor().to(type);
  }
}

void native_layer_norm(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  layer_norm_in_float(*kept().native_layer_norm, 0, 2, operation, keys, stack);
}

void native_layer_norm_backward(
    const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  layer_norm_in_float(*kept().native_layer_norm_backward, 1, 5, operation, keys, stack);
}

void convolution_backward(
    const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size();
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - count, count);
  auto wanted = arguments[count - 1].toBoolList();
  at::Tensor own;
  if (wanted.get(0)) {
    own = input_gradient(arguments);
  }
  if (own.defined()) {
    wanted = wanted.copy();
    wanted.set(0, false);
    stack->back() = wanted;
  }
  kept().convolution_backward->callBoxed(operation, keys, stack);
  if (own.defined()) {
    (*stack)[stack->size() - 3] = own;
  }
}

// TorchTPU's hooks leave the number of devices at 0, for which libtorch's `manual_seed` seeds none of their generators.
// They are an object without fields and cannot be registered a second time: it gets a copy of its table of virtual
// functions, in which one says that there is a device.
void count_devices(void* library, const std::string& path) {
  struct Counted final : at::PrivateUse1HooksInterface {
    c10::DeviceIndex deviceCount() const override {
      return 1;
    }
  };
  auto* const theirs = symbol<void*>(library, path, "_ZTVN9torch_tpu17TpuHooksInterfaceE");
  Dl_info info;
  ElfW(Sym)* entry = nullptr;
  TORCH_CHECK(
      dladdr1(theirs, &info, reinterpret_cast<void**>(&entry), RTLD_DL_SYMENT) != 0 && entry != nullptr,
      path, " does not say how large the table of its hooks is");
  static const std::vector<void*> table = [&] {
    std::vector<void*> copy(theirs, theirs + entry->st_size / sizeof(void*));
    // Before the functions are the offset to the whole object and the type. A pointer to a virtual function is its
    // offset in the table plus 1.
    constexpr size_t kBefore = 2;
    const auto function = &at::AcceleratorHooksInterface::deviceCount;
    size_t offset = 0;
    std::memcpy(&offset, &function, sizeof(offset));
    const auto place = kBefore + (offset - 1) / sizeof(void*);
    static const Counted counted;
    void** ours = nullptr;
    std::memcpy(&ours, &counted, sizeof(ours));
    copy.at(place) = ours[place - kBefore];
    return copy;
  }();
  auto* const hooks = const_cast<at::PrivateUse1HooksInterface*>(&at::detail::getPrivateUse1Hooks());
  void* const* functions = table.data() + 2;
  std::memcpy(static_cast<void*>(hooks), &functions, sizeof(functions));
  const auto count = at::detail::getPrivateUse1Hooks().deviceCount();
  TORCH_CHECK(count == 1, "TorchTPU's hooks count ", count, " devices instead of 1");
}

// Registrations live as long as the process: their destructors would run after TorchTPU's.
void register_devices(bool is_libtpu) {
  using Kind = torch::Library::Kind;
  static auto* const makers =
      new torch::Library(Kind::IMPL, "_", c10::DispatchKey::MPS, __FILE__, __LINE__);
  makers->fallback(torch::CppFunction::makeFromBoxedFunction<&on_tpu>());
  const WarningFilter expected("Overriding a previously registered kernel");
  static auto* const ours =
      new torch::Library(Kind::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  const auto kernel = [](const char* name) {
    const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    return operation.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
  };
  kept().native_batch_norm.emplace(kernel("aten::native_batch_norm"));
  ours->impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&native_batch_norm>());
  kept().native_layer_norm.emplace(kernel("aten::native_layer_norm"));
  ours->impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&native_layer_norm>());
  kept().native_layer_norm_backward.emplace(kernel("aten::native_layer_norm_backward"));
  ours->impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&native_layer_norm_backward>());
  ours->impl("logaddexp", TORCH_FN(logaddexp));
  ours->impl("mish", TORCH_FN(mish_values));
  ours->impl("mish.out", TORCH_FN(mish_into));
  ours->impl("mish_", TORCH_FN(mish_in_place));
  ours->impl("mish_backward", TORCH_FN(mish_gradient));
  ours->impl("_amp_update_scale_", TORCH_FN(update_scale));
  if (!is_libtpu) {
    kept().convolution_backward.emplace(kernel("aten::convolution_backward"));
    ours->impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
    register_cumulated<&at::cumsum>(*ours, "cumsum");
    register_cumulated<&at::cumprod>(*ours, "cumprod");
    ours->impl("_logcumsumexp", TORCH_FN(log_cumulated_powers));
    for (const auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}) {
      auto* const plain = new torch::Library(Kind::IMPL, "aten", key, __FILE__, __LINE__);
      plain->impl("scaled_dot_product_attention", TORCH_FN(plain_attention));
    }
  }
}

} // namespace

PjrtVersion pjrt_version(rust::Str plugin) {
  // The beginning of the table, which is the same in all versions.
  struct Api {
    size_t size;
    void* extensions;
    size_t version_size;
    void* version_extensions;
    int32_t major;
    int32_t minor;
  };
  const std::string path(plugin);
  auto* const get = symbol<const Api*()>(open(path, RTLD_LOCAL), path, "GetPjrtApi");
  const auto* api = get();
  TORCH_CHECK(api != nullptr && api->size >= sizeof(Api), path, " gives no table of PJRT's functions");
  return {api->major, api->minor};
}

namespace {

// TorchTPU's library for this libtorch, with its path.
struct Glue {
  void* library = nullptr;
  std::string path;
};

Glue& loaded_glue() {
  static Glue glue;
  return glue;
}

// The process that has loaded TorchTPU. A fork of it has none of TorchTPU's threads, and would wait for them in vain.
pid_t loaded_by = 0;

void wait_at_end() {
  if (loaded_by != getpid()) {
    return;
  }
  try {
    synchronize_tpu();
  } catch (...) {
    // Who needed the results has had the error.
  }
}

} // namespace

void load_tpu(const TpuFiles& files) {
  const std::string plugin(files.plugin), glue(files.glue);
  // A program inside of Python has the real one.
  const bool has_python = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD) != nullptr;
  std::string wrapper;
  if (!has_python || files.wraps_plugin) {
    wrapper = carried(files.carried);
    void* const library = open(wrapper, has_python ? RTLD_LOCAL : RTLD_GLOBAL);
    auto* const set =
        symbol<const char*(const char*)>(library, "the carried library", "brigade_set_pjrt_plugin");
    if (files.wraps_plugin) {
      const char* const refused = set(plugin.c_str());
      TORCH_CHECK(refused == nullptr, plugin, ": ", refused);
    }
  }
  // By default a rank's messages go by Gloo. TorchTPU takes a world size for ranks of its own process group, whose
  // addresses and topology it then needs.
  std::optional<Variable> alone, addresses, topology;
  if (files.joins_slice) {
    const auto from = [](std::optional<Variable>& variable, const char* name, const char* other) {
      if (std::getenv(name) == nullptr) {
        const char* value = std::getenv(other);
        TORCH_CHECK(value != nullptr, "TorchTPU's process group needs ", name, " or ", other, " in the environment");
        variable.emplace(name, value);
      }
    };
    from(addresses, "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TPU_PROCESS_ADDRESSES");
    from(topology, "TORCH_TPU_TOPOLOGY", "TPU_PROCESS_BOUNDS");
  } else {
    alone.emplace("WORLD_SIZE", std::nullopt);
  }
  // Its notes on each start are none of the program's; errors are.
  std::optional<Variable> quiet;
  if (std::getenv("TF_CPP_MIN_LOG_LEVEL") == nullptr) {
    quiet.emplace("TF_CPP_MIN_LOG_LEVEL", "2");
  }
  // Read when the library is loaded.
  const Variable path("TPU_LIBRARY_PATH", files.wraps_plugin ? wrapper : plugin);
  open(std::string(files.base), RTLD_GLOBAL);
  void* const library = open(glue, RTLD_GLOBAL);
  auto* const add_hooks = symbol<Status()>(library, glue, "_ZN9torch_tpu11AddTpuHooksEv");
  loaded_glue() = {library, glue};
  static auto* const end_materializations =
      symbol<void()>(library, glue, "_ZN9torch_tpu28ShutDownMaterializationStateEv");
  static auto* const end_compilations =
      symbol<void()>(library, glue, "_ZN9torch_tpu16CompilationCache8ShutDownEv");
  c10::register_privateuse1_backend("tpu");
  const auto added = add_hooks().value;
  TORCH_CHECK(added == Status::kOk, "TorchTPU refuses its hooks, status ", added);
  count_devices(library, glue);
  register_devices(/*is_libtpu=*/!files.wraps_plugin);
  // Starts the plug-in, and compiles and runs a first operation.
  const auto two = at::ones({2}, at::Device(kTpu, 0)).sum().item<float>();
  TORCH_CHECK(two == 2, "the first sum on the TPU is ", two, " instead of 2");
  // As if `manual_seed`, which seeds the generators of all devices, had been called after this.
  auto generator = at::globalContext().defaultGenerator(at::Device(kTpu, 0));
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(at::globalContext().defaultGenerator(at::kCPU).current_seed());
  }
  loaded_by = getpid();
  // Runs before the destructors of TorchTPU and of the plug-in, which were registered earlier and crash while work is
  // pending or a thread compiles, as some do for operations that may come.
  std::atexit([] {
    if (loaded_by != getpid()) {
      return;
    }
    wait_at_end();
    end_materializations();
    end_compilations();
  });
}

void prepare_tpu_thread() {
  // TorchTPU looks at the gradient of a tensor whose values it copies to the host. Lives as long as the thread.
  thread_local const WarningFilter filter("The .grad attribute of a Tensor that is not a leaf Tensor");
  // The process's end destroys what the plug-in has made last first, before functions that were registered earlier run:
  // pending work would use it. A thread's own objects are destroyed before that.
  struct End {
    ~End() {
      wait_at_end();
    }
  };
  thread_local const End end;
}

std::unique_ptr<Group> tpu_group(
    const Store& tpu_store,
    const Store& gloo_store,
    int32_t rank,
    int32_t size,
    const GlooOptions& options) {
  using Type = c10d::ProcessGroup::BackendType;
  const auto& [library, path] = loaded_glue();
  TORCH_CHECK_NOT_IMPLEMENTED(library != nullptr, "TorchTPU is not loaded");
  // torch_tpu::ProcessGroupTpu, of which TorchTPU has the symbols and no header for C++. The size is what the class's
  // deleting destructor hands to operator delete in TorchTPU 0.2.0, for libtorch 2.11, 2.12 and 2.13 alike.
  constexpr size_t kSize = 264;
  static_assert(sizeof(c10d::Backend) <= kSize);
  auto* const construct = symbol<void(void*, c10::intrusive_ptr<c10d::Store>, int, int)>(
      library,
      path,
      "_ZN9torch_tpu15ProcessGroupTpuC1EN3c1013intrusive_ptrIN4c10d5StoreENS1_6detail34intrusive_target_default_"
      "null_typeIS4_EEEEii");
  // Connects all ranks: who is missing is known before TorchTPU waits for them.
  const auto [gloo, shares_memory] = gloo_backend(gloo_store, rank, size, options);
  void* const room = ::operator new(kSize);
  try {
    construct(room, tpu_store.live(), rank, size);
  } catch (...) {
    ::operator delete(room, kSize);
    throw;
  }
  const auto tpu =
      c10::intrusive_ptr<c10d::Backend>::unsafe_steal_from_new(static_cast<c10d::Backend*>(room));
  auto group = wrap_backend(
      tpu_store,
      rank,
      size,
      options.name,
      {{kTpu, Type::CUSTOM, tpu}, {c10::DeviceType::CPU, Type::GLOO, gloo}});
  group->shares_memory = shares_memory;
  group->reduces_lists = false;
  return group;
}

void synchronize_tpu() {
  c10::impl::VirtualGuardImpl(kTpu).synchronizeDevice(0);
}

} // namespace brigade
