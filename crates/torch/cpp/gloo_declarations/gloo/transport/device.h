// The wheel has no Gloo headers: see ../../README.md.
#pragma once

#include <exception>
#include <string>

namespace gloo::transport {

class Device;
class Pair;
class UnboundBuffer;

namespace tcp {

class Pair {
 public:
  // Called by our abort: ends the pair and all that waits on it with an exception.
  std::exception_ptr signalExceptionExternal(const std::string& message);
};

} // namespace tcp

} // namespace gloo::transport
