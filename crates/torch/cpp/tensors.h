// Tensors across the border.
//
// A tch::Tensor owns a heap-allocated at::Tensor. Borrowed tensors cross as pointers to it (TensorRef);
// C++ copies the handle (one reference count) if it keeps the tensor. New tensors cross as owned
// pointers, which tch frees.
#pragma once

#include "rust/cxx.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <memory>
#include <optional>
#include <vector>

namespace brigade {

using Tensor = at::Tensor;
struct TensorRef;
struct Arrival;
struct Blob;

std::vector<at::Tensor> copy_handles(rust::Slice<const TensorRef> tensors);

// A tensor over memory owned by a Rust box, which is dropped with the last reference.
Tensor* tensor_from_blob(rust::Box<Blob> blob, rust::Slice<const int64_t> shape, int8_t kind);
// Address of the first element, and whether the tensor is a dense contiguous CPU tensor.
size_t tensor_data(const Tensor* tensor);
bool tensor_is_plain(const Tensor* tensor);

// Sets the gradient to undefined, as zero_grad(set_to_none=True) does.
void clear_gradient(const Tensor* tensor);
// The gradient, or null when there is none.
Tensor* gradient(const Tensor* tensor);

// Whether operations record what backward needs (false inside no_grad).
void set_gradient(const Tensor* tensor, const Tensor* gradient);
rust::Vec<uint8_t> rng_state(int32_t cuda_device);
void set_rng_state(int32_t cuda_device, rust::Slice<const uint8_t> state);
bool grad_enabled();
// Calls Rust once, when a backward pass first reaches one of the outputs, before what lies behind it.
void call_on_arrival(rust::Slice<const TensorRef> outputs, rust::Box<Arrival> arrival);

// A number on its way from a device to the host. The event says when it has come: it stands behind the
// copy alone, so that waiting for it does not wait for what the device was given afterwards.
struct Fetch {
  at::Tensor host;
  std::optional<c10::Event> copied;
};

std::unique_ptr<Fetch> start_fetch(const Tensor* tensor);
int64_t fetched_number(const Fetch& fetch);

rust::String libtorch_version();
bool cuda_compiled();

} // namespace brigade
