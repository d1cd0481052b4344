#include "brigade-torch/src/bridge.rs.h"

#include "every_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace brigade {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Elements below which a second thread costs more than it saves.
constexpr int64_t kFewestOfThread = 16384;

// The places of one token among the ids: part of a list that is in the order of the places.
struct TokenPlaces {
  int64_t token;
  const int64_t* places;
  int64_t count;
};

// The sum of a token's gradients is added once, as that of libtorch's dense gradient. Of 16 bits it is one of 32.
template <typename T, typename C = at::opmath_type<T>>
BRIGADE_EVERY_CPU void add_token(
    const T* gradients, const TokenPlaces& token, int64_t width, C* sum, T* row) {
  const T* first = gradients + token.places[0] * width;
  if (token.count == 1) {
    for (int64_t i = 0; i < width; ++i) {
      row[i] = static_cast<T>(static_cast<C>(row[i]) + static_cast<C>(first[i]));
    }
    return;
  }
  for (int64_t i = 0; i < width; ++i) {
    sum[i] = static_cast<C>(first[i]);
  }
  for (int64_t place = 1; place < token.count; ++place) {
    const T* gradient = gradients + token.places[place] * width;
    for (int64_t i = 0; i < width; ++i) {
      sum[i] += static_cast<C>(gradient[i]);
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    row[i] = static_cast<T>(static_cast<C>(row[i]) + sum[i]);
  }
}

// Adds rows [n, width] to those rows of a dense [vocabulary, width] that the ids [n] name. Threads share tokens out, so
// that no sum depends on their number. The lookup has checked the ids.
void add_rows_on_cpu(const at::Tensor& dense, const at::Tensor& rows, const at::Tensor& ids, int64_t padding) {
  const int64_t vocabulary = dense.size(0), width = dense.size(1), count = ids.numel();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> ends(vocabulary);
  for (int64_t place = 0; place < count; ++place) {
    ++ends[id[place]];
  }
  int64_t total = 0;
  for (auto& end : ends) {
    total += std::exchange(end, total);
  }
  std::vector<int64_t> places(count);
  for (int64_t place = 0; place < count; ++place) {
    places[ends[id[place]]++] = place;
  }
  std::vector<TokenPlaces> tokens;
  tokens.reserve(std::min(vocabulary, count));
  for (int64_t token = 0, begin = 0; token < vocabulary; begin = ends[token++]) {
    if (ends[token] > begin && token != padding) {
      tokens.push_back({token, places.data() + begin, ends[token] - begin});
    }
  }
  const int64_t fewest = std::max<int64_t>(1, kFewestOfThread / std::max<int64_t>(1, width));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dense.scalar_type(), "tied_embedding", [&] {
    const scalar_t* from = rows.const_data_ptr<scalar_t>();
    scalar_t* to = dense.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, static_cast<int64_t>(tokens.size()), fewest, [&](int64_t begin, int64_t end) {
      std::vector<at::opmath_type<scalar_t>> sum(width);
      for (int64_t i = begin; i < end; ++i) {
        add_token(from, tokens[i], width, sum.data(), to + tokens[i].token * width);
      }
    });
  });
}

void add_rows(at::Tensor& dense, const at::Tensor& of_rows, const at::Tensor& ids, int64_t padding) {
  auto rows = of_rows.reshape({-1, dense.size(1)}).contiguous();
  const auto flat = ids.reshape({-1}).to(at::kLong).contiguous();
  if (dense.is_cpu()) {
    add_rows_on_cpu(dense, rows, flat, padding);
    return;
  }
  if (padding >= 0) {
    rows = rows.masked_fill(flat.eq(padding).unsqueeze(1), 0);
  }
  // CUDA's kernel sorts the ids on the device, without atomic additions. The lookup has checked them.
  at::_index_put_impl_(dense, {flat}, rows, /*accumulate=*/true, /*unsafe=*/true);
}

// Nobody else sees the tensor, and its rows lie one after the other.
bool is_own(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.has_storage() && gradient.storage().use_count() == 1 &&
      gradient.is_contiguous();
}

// The weight is an output, too, so that the gradients of both its uses meet here.
struct LookUp : public torch::autograd::Function<LookUp> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids, int64_t padding) {
    RECORD_FUNCTION("brigade::tied_embedding", {});
    context->set_materialize_grads(false);
    context->save_for_backward({ids});
    context->saved_data["vocabulary"] = weight.size(0);
    context->saved_data["padding"] = padding;
    return {at::embedding(weight, ids, padding), weight};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::tied_embedding_backward", {});
    const auto &of_rows = gradients[0], &of_weight = gradients[1];
    const auto ids = context->get_saved_variables()[0];
    const int64_t vocabulary = context->saved_data.at("vocabulary").toInt();
    const int64_t padding = context->saved_data.at("padding").toInt();
    variable_list out(3);
    if (!of_rows.defined()) {
      out[0] = of_weight;
    } else if (!of_weight.defined() || at::GradMode::is_enabled()) {
      const auto own = at::embedding_dense_backward(of_rows, ids, vocabulary, padding, false);
      out[0] = of_weight.defined() ? of_weight + own : own;
    } else {
      out[0] = is_own(of_weight) ? of_weight : of_weight.clone(at::MemoryFormat::Contiguous);
      add_rows(out[0], of_rows, ids, padding);
    }
    return out;
  }
};

} // namespace

TiedEmbedding tied_embedding(const Tensor& weight, const Tensor& ids, int64_t padding) {
  const bool records = at::GradMode::is_enabled() && weight.requires_grad() && weight.dim() == 2 &&
      weight.layout() == at::kStrided && (weight.is_cpu() || weight.is_cuda());
  if (!records) {
    return {
        std::make_unique<Tensor>(at::embedding(weight, ids, padding)), std::make_unique<Tensor>(weight)};
  }
  auto both = LookUp::apply(weight, ids, padding);
  return {
      std::make_unique<Tensor>(std::move(both[0])), std::make_unique<Tensor>(std::move(both[1]))};
}

} // namespace brigade
