// The wheel has no Gloo headers: see ../README.md.
#pragma once

#include <gloo/transport/device.h>

#include <chrono>
#include <memory>

namespace gloo {

// What is declared here is defined in libtorch_cpu.
class Context {
 public:
  // Mentioned by ProcessGroupGloo::setTimeout, which is inline.
  void setTimeout(std::chrono::milliseconds timeout);
  // Called by our abort.
  std::unique_ptr<transport::Pair>& getPair(int rank);
};

} // namespace gloo
