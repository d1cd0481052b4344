// Tensors across the border.
//
// A tch::Tensor owns a heap-allocated at::Tensor. Borrowed tensors cross as references to it (in lists,
// TensorRef); C++ copies the handle (one reference count) if it keeps the tensor. New tensors cross as
// unique pointers, which tch takes over.
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
struct Blob;

std::vector<at::Tensor> copy_handles(rust::Slice<const TensorRef> tensors);
// The one tensor of a slice that has one or none.
std::optional<at::Tensor> optional_handle(rust::Slice<const TensorRef> tensor);

// A tensor over memory owned by a Rust box, which is dropped with the last reference.
std::unique_ptr<Tensor> tensor_from_blob(rust::Box<Blob> blob, rust::Slice<const int64_t> shape, int8_t kind);
std::unique_ptr<Tensor> copy_handle(const Tensor& tensor);

// Address of the first element: to read from, and to write to (a copy-on-write tensor gets memory of its own).
size_t tensor_data(const Tensor& tensor);
size_t tensor_mutable_data(const Tensor& tensor);
// Whether the tensor is a dense contiguous CPU tensor.
bool tensor_is_plain(const Tensor& tensor);
// Whether another handle, a view or a graph uses its memory as well.
bool tensor_is_shared(const Tensor& tensor);

// Address of what all handles of one tensor share. It stays when the tensor gets other data, and is there for one
// without memory.
size_t tensor_identity(const Tensor& tensor);
// Sets the gradient to undefined, as zero_grad(set_to_none=True) does.
void clear_gradient(const Tensor& tensor);

// The gradients of what a scalar was computed from.
void backward(const Tensor& loss, bool retain_graph, bool create_graph);
// The gradient, or null when there is none.
std::unique_ptr<Tensor> gradient(const Tensor& tensor);
void set_gradient(const Tensor& tensor, const Tensor& gradient);

rust::Vec<uint8_t> rng_state(int32_t cuda_device);
void set_rng_state(int32_t cuda_device, rust::Slice<const uint8_t> state);
// Whether operations record what backward needs (false inside no_grad).
bool grad_enabled();

// A number on its way from a device to the host. The event says when it has come: it stands behind the
// copy alone, so that waiting for it does not wait for what the device was given afterwards.
struct Fetch {
  at::Tensor host;
  std::optional<c10::Event> copied;
};

std::unique_ptr<Fetch> start_fetch(const Tensor& tensor);
int64_t fetched_number(const Fetch& fetch);

// The same values without a base, for the output of an operation with its own gradient: autograd refuses changes in place
// of a view that such an operation returns.
inline at::Tensor without_base(const at::Tensor& output) {
  return output.is_view() ? output.variable_data() : output;
}

rust::String libtorch_version();

} // namespace brigade
