// What nearly every file here includes of libtorch: three quarters of the time of compiling one.
// The build script compiles it once, ahead of the others; they do not rely on it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
