// Functions of the libraries that libtorch has loaded.
#pragma once

#include <c10/util/Exception.h>

#include <dlfcn.h>

namespace brigade::kernels {

// Returns the function: looked up, so that programs need not be linked with its library.
template <typename Function>
Function* loaded_function(const char* name) {
  auto* found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(found != nullptr, "no library that libtorch has loaded has the function ", name);
  return found;
}

#define BRIGADE_LOADED(name) ::brigade::kernels::loaded_function<decltype(name)>(#name)

} // namespace brigade::kernels
