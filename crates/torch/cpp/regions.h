// Collectives with gradients: the edges of regions in which the ranks of a group compute one layer together.
#pragma once

#include "group.h"

namespace brigade {

enum class RegionEdge : uint8_t;

// `dim` is what is cut or put together; an all-to-all puts together along `other`.
std::unique_ptr<Tensor> region_edge(
    const Group& group, const Tensor& input, RegionEdge edge, int64_t dim, int64_t other);

} // namespace brigade
