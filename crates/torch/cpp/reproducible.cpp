#include "brigade-torch/src/bridge.rs.h"

#include <ATen/Version.h>

#include <cstdlib>
#include <string>

// MKL is linked into libtorch_cpu, and its headers are not in the wheel. These are `mkl_cbwr_set` and its
// like under the names that the library exports. Weak: a libtorch with another library has none of them.
extern "C" {
__attribute__((weak)) int mkl_serv_cbwr_set(int mode);
__attribute__((weak)) int mkl_serv_cbwr_get(int what);
__attribute__((weak)) int mkl_serv_cbwr_get_auto_branch();
}

namespace brigade {

namespace {

// From mkl_types.h.
constexpr int kAll = ~0;
constexpr int kBranchOff = 1;
constexpr int kAuto = 2;
constexpr int kCompatible = 3;
constexpr int kStrict = 0x10000;
constexpr int kModeChangeFailure = -8;

} // namespace

Products make_products_reproducible() {
  // All three come with MKL.
  if (mkl_serv_cbwr_set == nullptr || mkl_serv_cbwr_get == nullptr ||
      mkl_serv_cbwr_get_auto_branch == nullptr) {
    return Products::Unsupported;
  }
  // Also what a program has set by itself. The environment's MKL_CBWR is in it, too.
  const int mode = mkl_serv_cbwr_get(kAll);
  // Without STRICT, the faster branches want operands at multiples of 64 bytes.
  if ((mode & kStrict) != 0 || mode == kCompatible) {
    return Products::Reproducible;
  }
  if (mode > kBranchOff || std::getenv("MKL_CBWR") != nullptr) {
    return Products::TurnedOff;
  }
  // The fastest branch of this processor, and any alignment. Measured on Zen 4: as fast as without.
  int result = mkl_serv_cbwr_set(kAuto | kStrict);
  if (result != 0 && result != kModeChangeFailure) {
    result = mkl_serv_cbwr_set(mkl_serv_cbwr_get_auto_branch() | kStrict);
  }
  switch (result) {
    case 0:
      return Products::Reproducible;
    case kModeChangeFailure:
      return Products::UsedBefore;
    default:
      return Products::Unsupported;
  }
}

rust::String cpu_kernels() {
  std::string kernels = at::get_cpu_capability();
  if (mkl_serv_cbwr_get_auto_branch != nullptr) {
    kernels += ", MKL branch " + std::to_string(mkl_serv_cbwr_get_auto_branch());
  }
  return kernels;
}

} // namespace brigade
