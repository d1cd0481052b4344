// Memory of tensors that comes and goes while the tensors stay.
#pragma once

#include "tensors.h"

#include <c10/core/Storage.h>

#include <string>

namespace brigade {

// A storage of 0 bytes on a device, whose memory comes later.
c10::Storage empty_storage(at::Device device);
// A tensor of the storage, without a look at how many bytes that has.
at::Tensor tensor_of(
    const c10::Storage& storage,
    at::ScalarType kind,
    int64_t offset,
    at::IntArrayRef sizes,
    at::IntArrayRef strides);
// Gives the storage new memory, whose contents are arbitrary. Tensors of the storage stay, and with them what
// autograd has saved.
void allocate(const c10::Storage& storage, size_t bytes);
// Gives the storage the memory of another one, which lives on with it.
void borrow(const c10::Storage& storage, const c10::Storage& from);
// Gives the memory back, or has the storage wait for its first. An access throws `why` from now on: without that it would
// read address 0.
void release(const c10::Storage& storage, size_t bytes, const std::string& why);

// A tensor of the type and device of another one that has no memory: an access throws `why`.
std::unique_ptr<Tensor> unallocated(
    const Tensor& like, rust::Slice<const int64_t> sizes, rust::Slice<const int64_t> strides, rust::Str why);
// Whether all elements lie in memory.
bool has_memory(const Tensor& tensor);
// `set_data`, between the CPU and PrivateUse1, too.
void set_data(const Tensor& tensor, const Tensor& values);

} // namespace brigade
