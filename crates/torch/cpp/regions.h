// Collectives with gradients: the edges of regions in which the ranks of a group compute one layer together.
#pragma once

#include "group.h"

namespace brigade {

enum class RegionEdge : uint8_t;

namespace regions {

using GroupHandle = c10::intrusive_ptr<c10d::ProcessGroup>;

// The tensors of all ranks side by side along `dim`, without a gradient.
at::Tensor gather(const GroupHandle& group, const at::Tensor& input, int64_t dim);

} // namespace regions

// `dim` is what is cut or put together; an all-to-all puts together along `other`.
std::unique_ptr<Tensor> region_edge(
    const Group& group, const Tensor& input, RegionEdge edge, int64_t dim, int64_t other);

// Rows to each rank and from each, whose numbers are given; the gradient goes back the same way.
std::unique_ptr<Tensor> region_exchange_rows(
    const Group& group,
    const Tensor& input,
    rust::Slice<const int64_t> send_rows,
    rust::Slice<const int64_t> receive_rows);

// The input, whose gradient is multiplied.
std::unique_ptr<Tensor> region_scale_gradient(const Tensor& input, double factor);

} // namespace brigade
