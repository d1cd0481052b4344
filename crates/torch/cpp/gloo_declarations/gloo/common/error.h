// The wheel has no Gloo headers: see ../../README.md.
#pragma once

#include <stdexcept>

namespace gloo {

// What Gloo throws when a connection is lost or a time limit has passed. Only caught here, by name: the
// types' information is libtorch's.
class __attribute__((visibility("default"))) Exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class __attribute__((visibility("default"))) IoException : public Exception {
 public:
  using Exception::Exception;
};

} // namespace gloo
