#include "brigade-torch/src/bridge.rs.h"

#include "dropout.h"
#include "every_cpu.h"
#include "kernels/embedding.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
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

// The gradient of a weight [vocabulary, width] of which rows were looked up, whose gradients are `of_rows`.
// `of_weight` is that of a head with the same weight. Each may be undefined for 0.
at::Tensor gradient_of_both(
    const at::Tensor& of_weight, const at::Tensor& of_rows, const at::Tensor& ids, int64_t vocabulary,
    int64_t padding) {
  if (!of_rows.defined()) {
    return of_weight;
  }
  if (!of_weight.defined() || at::GradMode::is_enabled()) {
    const auto own = at::embedding_dense_backward(of_rows, ids, vocabulary, padding, false);
    return of_weight.defined() ? of_weight + own : own;
  }
  auto both = is_own(of_weight) ? of_weight : of_weight.clone(at::MemoryFormat::Contiguous);
  add_rows(both, of_rows, ids, padding);
  return both;
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
    const auto ids = context->get_saved_variables()[0];
    const auto& data = context->saved_data;
    variable_list out(3);
    out[0] = gradient_of_both(
        gradients[1], gradients[0], ids, data.at("vocabulary").toInt(), data.at("padding").toInt());
    return out;
  }
};

// What a sum of embeddings is made of.
struct SumRule {
  // Numbers of rows, and the rows without a gradient; negative for none.
  std::array<int64_t, kMostEmbeddings> vocabularies{};
  std::array<int64_t, kMostEmbeddings> paddings{};
  double dropout = 0;
  // That of autocast.
  at::ScalarType type = at::kFloat;
};

kernels::Program& embedding_program(const at::Tensor& like, at::ScalarType type) {
  auto* program = embedding_kernels(like, type);
  TORCH_CHECK(program != nullptr, "the kernels of embeddings are not there any more");
  return *program;
}

// The kernels of a GPU. The ids are those of EmbeddingLookup. Outputs: the sum [places, width], and the first weight.
struct EmbeddingSum : public torch::autograd::Function<EmbeddingSum> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& weight, const at::Tensor& ids,
      const std::optional<at::Tensor>& second_weight, const std::optional<at::Tensor>& second_ids,
      const std::optional<at::Tensor>& third_weight, const std::optional<at::Tensor>& third_ids,
      const std::optional<at::Tensor>& seed, const SumRule& rule) {
    RECORD_FUNCTION("brigade::embedding_sum", {});
    std::vector<EmbeddingLookup> lookups{{weight, ids}};
    if (second_weight) {
      lookups.push_back({*second_weight, *second_ids});
    }
    if (third_weight) {
      lookups.push_back({*third_weight, *third_ids});
    }
    const auto optional = [](const std::optional<at::Tensor>& t) { return t.value_or(at::Tensor()); };
    context->set_materialize_grads(false);
    context->save_for_backward({ids, optional(second_ids), optional(third_ids), optional(seed)});
    auto& data = context->saved_data;
    data["vocabularies"] = std::vector<int64_t>(rule.vocabularies.begin(), rule.vocabularies.end());
    data["paddings"] = std::vector<int64_t>(rule.paddings.begin(), rule.paddings.end());
    data["dropout"] = rule.dropout;
    data["type"] = static_cast<int64_t>(rule.type);
    const EmbeddingDropout dropout{rule.dropout, optional(seed)};
    auto sum = embedding_forward_gpu(embedding_program(weight, rule.type), lookups, ids.numel(), dropout);
    return {std::move(sum), weight};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    RECORD_FUNCTION("brigade::embedding_sum_backward", {});
    const auto saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    const auto vocabularies = data.at("vocabularies").toIntVector(), paddings = data.at("paddings").toIntVector();
    const EmbeddingDropout dropout{data.at("dropout").toDouble(), saved[kMostEmbeddings]};
    const auto& of_sum = gradients[0];
    variable_list out(kInputs);
    if (!of_sum.defined()) {
      out[0] = gradients[1];
      return out;
    }
    // An edge for each weight and its ids.
    const auto is_needed = [&](size_t table) {
      return saved[table].defined() && context->needs_input_grad(2 * table);
    };
    auto& program = embedding_program(of_sum, static_cast<at::ScalarType>(data.at("type").toInt()));
    const bool recorded = at::GradMode::is_enabled(), drops = dropout.seed.defined();
    // The gradient in front of dropout.
    at::Tensor rows;
    // A table whose gradient is made while the values are dropped.
    size_t with_dropout = 0;
    if (recorded) {
      rows = drops ? of_sum * factors(program, of_sum, dropout) : of_sum;
    } else {
      for (size_t table = 1; table < kMostEmbeddings && with_dropout == 0; ++table) {
        if (is_needed(table) && fits_embedding_backward(vocabularies[table], saved[table].numel())) {
          with_dropout = table;
        }
      }
      if (with_dropout > 0) {
        auto found = embedding_backward_gpu(
            program, of_sum, vocabularies[with_dropout], saved[with_dropout], paddings[with_dropout], dropout,
            /*wants_rows=*/true);
        out[2 * with_dropout] = std::move(found.weight);
        rows = drops ? std::move(found.rows) : of_sum;
      } else {
        rows = drops ? embedding_dropout_gpu(program, of_sum, dropout) : of_sum;
      }
    }
    for (size_t table = 1; table < kMostEmbeddings; ++table) {
      if (is_needed(table) && table != with_dropout) {
        const int64_t period = saved[table].numel();
        const bool is_one = period == 1 && with_dropout > 0 && paddings[with_dropout] < 0;
        // Each place is in one row of a table's gradient.
        const auto own = is_one ? out[2 * with_dropout].sum(0, /*keepdim=*/true)
            : period < rows.size(0) ? rows.reshape({-1, period, rows.size(1)}).sum(0)
                                    : rows;
        out[2 * table] =
            at::embedding_dense_backward(own, saved[table], vocabularies[table], paddings[table], false);
      }
    }
    out[0] = is_needed(0) ? gradient_of_both(gradients[1], rows, saved[0], vocabularies[0], paddings[0])
                          : at::Tensor();
    return out;
  }

 private:
  static constexpr size_t kInputs = 8;

  static at::Tensor factors(kernels::Program& program, const at::Tensor& like, const EmbeddingDropout& dropout) {
    const at::NoGradGuard no_grad;
    return embedding_dropout_gpu(program, at::ones_like(like), dropout);
  }
};

// The ids as the kernels read them, or nothing if they are not broadcast to the shape.
std::optional<at::Tensor> repeated_ids(const at::Tensor& ids, at::IntArrayRef shape) {
  auto sizes = ids.sizes();
  while (!sizes.empty() && sizes.front() == 1) {
    sizes = sizes.slice(1);
  }
  const auto flat = [](const at::Tensor& t) { return t.reshape({-1}).to(at::kLong).contiguous(); };
  if (sizes.size() <= shape.size() && sizes == shape.slice(shape.size() - sizes.size())) {
    return flat(ids);
  }
  return at::is_expandable_to(ids.sizes(), shape) ? std::optional(flat(ids.expand(shape))) : std::nullopt;
}

// What the kernels read of each table, or nothing if they cannot: other types, shapes and devices.
std::vector<EmbeddingLookup> kernel_lookups(
    const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& ids) {
  std::vector<EmbeddingLookup> lookups;
  const auto& first = weights[0];
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto &weight = weights[i], &own = ids[i];
    const auto type = own.scalar_type();
    const bool fits = fits_embedding_kernels(weight) && weight.device() == first.device() &&
        weight.size(1) == first.size(1) && own.layout() == at::kStrided && own.device() == first.device() &&
        (type == at::kLong || type == at::kInt) && ids[0].numel() > 0;
    const auto found = fits ? repeated_ids(own, ids[0].sizes()) : std::nullopt;
    if (!found) {
      return {};
    }
    lookups.push_back({weight, *found});
  }
  return lookups;
}

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

TiedEmbedding embedding_sum(
    rust::Slice<const TensorRef> weights, rust::Slice<const TensorRef> ids, rust::Slice<const int64_t> paddings,
    double dropout) {
  const auto tables = copy_handles(weights), places = copy_handles(ids);
  TORCH_CHECK_VALUE(
      !tables.empty() && tables.size() == places.size() && tables.size() == paddings.size(), "found ", tables.size(),
      " weights, ", places.size(), " tensors of ids and ", paddings.size(), " paddings, expected as many of each");
  TORCH_CHECK_VALUE(
      dropout >= 0 && dropout <= 1, "the probability of dropout is ", dropout, ", expected 0 to 1");
  const auto device = tables[0].device();
  SumRule rule;
  rule.dropout = dropout;
  rule.type = at::autocast::is_autocast_enabled(device.type()) ? at::autocast::get_autocast_dtype(device.type())
                                                               : tables[0].scalar_type();
  const auto lookups =
      tables.size() <= kMostEmbeddings ? kernel_lookups(tables, places) : std::vector<EmbeddingLookup>();
  if (!lookups.empty() && embedding_kernels(tables[0], rule.type) != nullptr) {
    for (size_t i = 0; i < lookups.size(); ++i) {
      rule.vocabularies[i] = tables[i].size(0);
      rule.paddings[i] = paddings[i];
    }
    const auto weight = [&](size_t i) { return i < lookups.size() ? std::optional(lookups[i].weight) : std::nullopt; };
    const auto own = [&](size_t i) { return i < lookups.size() ? std::optional(lookups[i].ids) : std::nullopt; };
    const auto seed = dropout > 0 ? std::optional(seeds_from_gpu(device, 1)) : std::nullopt;
    auto found = EmbeddingSum::apply(
        tables[0], lookups[0].ids, weight(1), own(1), weight(2), own(2), seed, rule);
    auto sizes = places[0].sizes().vec();
    sizes.push_back(tables[0].size(1));
    const bool has_alias = at::GradMode::is_enabled() && tables[0].requires_grad();
    return {
        std::make_unique<Tensor>(found[0].view(sizes)),
        std::make_unique<Tensor>(has_alias ? found[1] : tables[0])};
  }
  auto first = tied_embedding(tables[0], places[0], paddings[0]);
  std::vector<at::Tensor> others;
  for (size_t i = 1; i < tables.size(); ++i) {
    others.push_back(at::embedding(tables[i], places[i], paddings[i]));
  }
  // A single row, such as that of the only token type, is added to the rows before it, which are fewer than the sum's.
  for (; others.size() > 1 && places[others.size()].numel() == 1; others.pop_back()) {
    auto& before = others[others.size() - 2];
    before = before + others.back();
  }
  at::Tensor sum = std::move(*first.rows);
  for (const auto& other : others) {
    sum = sum + other;
  }
  auto dropped = dropout > 0 ? brigade::dropout(sum, rust::Slice<const TensorRef>(), dropout)
                             : std::make_unique<Tensor>(std::move(sum));
  return {std::move(dropped), std::move(first.weight)};
}

} // namespace brigade
