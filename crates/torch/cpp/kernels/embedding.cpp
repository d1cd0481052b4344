#include "embedding.h"

#include "../philox.h"
#include "embedding.cu"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace brigade {

namespace {

// Pairs of a row and an id: each block of the backward, which has one row, looks at all ids.
constexpr int64_t kMostComparisons = int64_t{1} << 24;

// Arguments that both directions have.
struct EmbeddingCall {
  EmbeddingArguments args{};
  bool aligned;

  EmbeddingCall(int64_t places, int64_t width, const EmbeddingDropout& dropout, const at::Device& device)
      : aligned(width % kEmbeddingVector == 0) {
    args.places = places;
    args.width = static_cast<int>(width);
    args.padding = -1;
    const Dropping dropping(dropout.probability, 0);
    args.below = static_cast<unsigned>(dropping.below);
    args.keep = static_cast<float>(dropping.kept);
    if (dropping.drops()) {
      const auto& seed = dropout.seed;
      TORCH_CHECK(
          seed.defined() && seed.scalar_type() == at::kLong && seed.numel() == 1 && seed.device() == device,
          "dropout has no seed on ", device);
      args.seed = reinterpret_cast<const long long*>(seed.const_data_ptr<int64_t>());
    }
  }

  void add(const at::Tensor& weight, const at::Tensor& ids, int64_t period) {
    auto& table = args.tables[args.count++];
    table.weight = read(weight);
    table.ids = ids.defined() ? reinterpret_cast<const long long*>(ids.const_data_ptr<int64_t>()) : nullptr;
    table.vocabulary = weight.size(0);
    table.period = period;
  }

  const float* read(const at::Tensor& t) {
    const auto* from = t.const_data_ptr<float>();
    aligned = aligned && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    return from;
  }

  float* write(const at::Tensor& t) {
    read(t);
    return t.mutable_data_ptr<float>();
  }

  at::Tensor run_forward(kernels::Program& program, const at::TensorOptions& options) {
    const auto sum = at::empty({args.places, args.width}, options);
    args.sum = write(sum);
    constexpr int64_t kOfBlock = int64_t{kEmbeddingThreads} * kEmbeddingVector;
    program.launch(
        aligned ? "embedding" : "embedding_unaligned", {kernels::quotient_up(sum.numel(), kOfBlock), 1},
        {kEmbeddingThreads, 1}, /*shared=*/0, args);
    return sum;
  }
};

void check_embedding_values(const at::Tensor& values) {
  TORCH_CHECK(
      fits_embedding_kernels(values), "the kernels of embeddings do not take ", values.sizes(), " of ",
      values.scalar_type(), " on ", values.device());
}

} // namespace

kernels::Program* embedding_kernels(const at::Tensor& weight, at::ScalarType type) {
  return kernels::program("embedding", weight.device(), type);
}

bool fits_embedding_kernels(const at::Tensor& weight) {
  constexpr int64_t kMax = std::numeric_limits<int>::max();
  return weight.is_cuda() && weight.layout() == at::kStrided && !weight.is_neg() &&
      weight.scalar_type() == at::kFloat && weight.dim() == 2 && weight.numel() > 0 &&
      // A vector beyond the last column has a 32-bit number, and so have the rows.
      weight.size(1) <= kMax / 4 && weight.size(0) <= kMax;
}

at::Tensor embedding_forward_gpu(
    kernels::Program& program, const std::vector<EmbeddingLookup>& lookups, int64_t places,
    const EmbeddingDropout& dropout) {
  TORCH_CHECK(
      !lookups.empty() && lookups.size() <= kMostEmbeddings, "the kernels add up ", kMostEmbeddings,
      " tables at most, found ", lookups.size());
  const auto& first = lookups[0].weight;
  EmbeddingCall call(places, first.size(1), dropout, first.device());
  std::vector<at::Tensor> held;
  for (const auto& [weight, ids] : lookups) {
    check_embedding_values(weight);
    TORCH_CHECK(
        weight.size(1) == first.size(1) && weight.device() == first.device() && ids.device() == first.device() &&
            ids.scalar_type() == at::kLong && ids.is_contiguous() && ids.numel() > 0 && places % ids.numel() == 0,
        "a table is ", weight.sizes(), " and its ids are ", ids.sizes(), " of ", ids.scalar_type(),
        ", which the kernels do not take for ", places, " rows of ", first.size(1));
    held.push_back(weight.contiguous());
    call.add(held.back(), ids, ids.numel());
  }
  return call.run_forward(program, first.options());
}

at::Tensor embedding_dropout_gpu(
    kernels::Program& program, const at::Tensor& values, const EmbeddingDropout& dropout) {
  check_embedding_values(values);
  const auto rows = values.contiguous();
  EmbeddingCall call(rows.size(0), rows.size(1), dropout, rows.device());
  call.add(rows, at::Tensor(), rows.size(0));
  return call.run_forward(program, rows.options());
}

bool fits_embedding_backward(int64_t vocabulary, int64_t period) {
  return vocabulary <= kMostComparisons / std::max<int64_t>(1, period);
}

EmbeddingGradients embedding_backward_gpu(
    kernels::Program& program, const at::Tensor& dsum, int64_t vocabulary, const at::Tensor& ids, int64_t padding,
    const EmbeddingDropout& dropout, bool wants_rows) {
  check_embedding_values(dsum);
  const auto given = dsum.contiguous();
  const int64_t width = given.size(1);
  TORCH_CHECK(
      vocabulary > 0 && ids.device() == given.device() && ids.scalar_type() == at::kLong && ids.is_contiguous() &&
          ids.numel() > 0 && given.size(0) % ids.numel() == 0,
      "the kernels do not take ids ", ids.sizes(), " of ", ids.scalar_type(), " for ", given.size(0), " rows");
  EmbeddingCall call(given.size(0), width, dropout, given.device());
  auto& a = call.args;
  EmbeddingGradients out;
  out.weight = at::empty({vocabulary, width}, given.options());
  out.rows = wants_rows && a.below > 0 ? at::empty_like(given) : at::Tensor();
  call.add(out.weight, ids, ids.numel());
  a.padding = padding;
  a.dsum = call.read(given);
  a.dweight = call.write(out.weight);
  a.drows = out.rows.defined() ? call.write(out.rows) : nullptr;
  constexpr int64_t kWarp = 32;
  const int64_t vectors = kernels::quotient_up(width, kEmbeddingVector);
  const auto threads = static_cast<unsigned>(
      std::min<int64_t>(kEmbeddingThreads, kernels::quotient_up(vectors, kWarp) * kWarp));
  const unsigned parts = kernels::quotient_up(vectors, threads);
  TORCH_CHECK(parts <= std::numeric_limits<uint16_t>::max(), "rows of ", width, " values are too wide");
  program.launch(
      call.aligned ? "embedding_backward" : "embedding_unaligned_backward",
      {static_cast<unsigned>(vocabulary), parts}, {threads, 1}, /*shared=*/0, a);
  return out;
}

} // namespace brigade
