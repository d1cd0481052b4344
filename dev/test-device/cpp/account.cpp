// An account of what the GPUs made of host memory were asked to do: calls of operators, and bytes that they read and
// write.
#include "fake_gpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace brigade::fake_gpu {
namespace {

using at::Tensor;
using c10::IValue;

struct Row {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

std::atomic<bool> is_open{false};
std::mutex account_mutex;
std::map<std::string, Row> account;
thread_local int nested = 0;
std::atomic<double> passed{0};
LaunchTimes launch_times;

bool is_one_of(const std::set<std::string>& names, const std::string& name) {
  return names.count(name) > 0;
}

// Bytes of the values that a tensor refers to. An expanded dimension has its values once.
uint64_t bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) {
    return 0;
  }
  uint64_t values = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    values *= tensor.stride(dim) == 0 ? 1 : static_cast<uint64_t>(tensor.size(dim));
  }
  return values * tensor.itemsize();
}

uint64_t bytes_of_value(const IValue& value) {
  uint64_t bytes = 0;
  if (value.isTensor()) {
    return bytes_of(value.toTensor());
  }
  if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      bytes += bytes_of(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      bytes += tensor ? bytes_of(*tensor) : 0;
    }
  }
  return bytes;
}

// Write the whole tensor without reading it.
const std::set<std::string>& fills() {
  static const std::set<std::string> names{
      "aten::fill_", "aten::zero_", "aten::bernoulli_", "aten::normal_", "aten::uniform_", "aten::random_"};
  return names;
}

// Read as many values of their first argument as they return.
const std::set<std::string>& picks() {
  static const std::set<std::string> names{
      "aten::embedding", "aten::gather", "aten::index", "aten::index_select"};
  return names;
}

// Touch as many values of their first argument as the last tensor has.
const std::set<std::string>& scatters() {
  static const std::set<std::string> names{
      "aten::scatter_add_", "aten::scatter_", "aten::scatter", "aten::index_add_", "aten::index_copy_",
      "aten::_index_put_impl_", "aten::index_put_"};
  return names;
}

}  // namespace

bool account_is_open() {
  return is_open;
}

void pass_time(double milliseconds) {
  passed = passed + milliseconds;
}

double passed_time() {
  return passed;
}

void set_launch_times(LaunchTimes times) {
  const std::lock_guard<std::mutex> lock(account_mutex);
  launch_times = std::move(times);
}

static double launch_time(const std::string& name) {
  const std::lock_guard<std::mutex> lock(account_mutex);
  const auto& [usual, part, own] = launch_times;
  return !part.empty() && name.find(part) != std::string::npos ? own : usual;
}

Nested::Nested() {
  ++nested;
}

Nested::~Nested() {
  --nested;
}

void enter_in_account(const std::string& name, uint64_t bytes) {
  if (nested > 0) {
    return;
  }
  pass_time(launch_time(name));
  if (!is_open) {
    return;
  }
  std::lock_guard<std::mutex> lock(account_mutex);
  Row& row = account[name];
  row.calls += 1;
  row.bytes += bytes;
}

void enter_in_account(
    const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const std::vector<Tensor>& fresh) {
  const std::string& name = op.operator_name().name;
  if (nested > 0 || (!is_open && launch_time(name) == 0)) {
    return;
  }
  const auto& schema = op.schema();
  // Views, and what only changes a tensor's shape or memory, launch nothing.
  bool is_view = fresh.empty();
  uint64_t bytes = 0, written = 0, read = 0, last = 0;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto& declared = schema.arguments()[at];
    const uint64_t size = bytes_of_value(arguments[at]);
    const auto* alias = declared.alias_info();
    if (alias != nullptr && alias->isWrite()) {
      is_view = false;
      written += size;
      read += declared.is_out() || is_one_of(fills(), name) ? 0 : size;
    } else {
      read += size;
    }
    if (arguments[at].isTensor() || arguments[at].isOptionalTensorList()) {
      last = size == 0 ? last : size;
    }
  }
  for (const Tensor& tensor : fresh) {
    written += bytes_of(tensor);
  }
  if (is_view || name == "aten::resize_" || name == "aten::set_") {
    return;
  }
  const uint64_t first = arguments.empty() ? 0 : bytes_of_value(arguments[0]);
  if (is_one_of(picks(), name)) {
    bytes = read - std::min(read, first) + 2 * written;
  } else if (is_one_of(scatters(), name)) {
    const bool in_place = schema.arguments()[0].alias_info() != nullptr;
    const uint64_t of_first = in_place ? 2 * first : written + first;
    bytes = read + written - std::min(read + written, of_first) + 2 * last + (in_place ? 0 : of_first);
  } else {
    bytes = read + written;
  }
  enter_in_account(name, bytes);
}

extern "C" {

void fake_gpu_open_account() {
  std::lock_guard<std::mutex> lock(account_mutex);
  account.clear();
  is_open = true;
}

// A line for each operator: calls, bytes and name, between spaces.
char* fake_gpu_close_account() {
  std::lock_guard<std::mutex> lock(account_mutex);
  is_open = false;
  std::ostringstream text;
  for (const auto& [name, row] : account) {
    text << row.calls << ' ' << row.bytes << ' ' << name << '\n';
  }
  account.clear();
  return strdup(text.str().c_str());
}

}  // extern "C"

}  // namespace brigade::fake_gpu
