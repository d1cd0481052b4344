#include "brigade-torch/src/bridge.rs.h"

#include "forks.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

namespace brigade {

std::unique_ptr<Reducer> new_reducer(
    const Group& group,
    rust::Slice<const TensorRef> parameters,
    rust::Slice<const rust::String> names,
    const ReducerOptions& options) {
  auto params = copy_handles(parameters);
  const std::vector<bool> sparse(params.size(), false);

  // As torch's DistributedDataParallel: when the buckets will be rebuilt from the order in which
  // gradients arrive, the first iteration uses one bucket; else they are final now.
  std::vector<size_t> limits;
  if (options.static_graph || !options.find_unused_parameters) {
    limits = {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  } else {
    limits = {options.first_bucket_bytes, options.bucket_bytes};
  }
  auto [buckets, bucket_limits] =
      c10d::compute_bucket_assignment_by_size(params, limits, sparse);
  // Reverse registration order approximates the order in which gradients become ready.
  std::reverse(buckets.begin(), buckets.end());
  std::reverse(bucket_limits.begin(), bucket_limits.end());

  std::unordered_map<size_t, std::string> param_names;
  for (size_t i = 0; i < names.size(); ++i) {
    param_names.emplace(i, std::string(names[i]));
  }
  auto out = std::make_unique<Reducer>();
  for (size_t i = 0; i < params.size(); ++i) {
    out->places.emplace(params[i].unsafeGetTensorImpl(), i);
  }
  out->reducer = std::make_shared<c10d::Reducer>(
      std::move(params),
      std::move(buckets),
      group.live(),
      sparse,
      static_cast<int64_t>(options.bucket_bytes),
      options.find_unused_parameters,
      options.gradient_as_bucket_view,
      std::move(param_names),
      static_cast<int64_t>(options.first_bucket_bytes),
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 11
      /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false,
#endif
      std::vector<int64_t>{});
  out->logger = std::make_shared<c10d::Logger>(out->reducer);
  out->reducer->set_logger(out->logger);
  if (options.static_graph) {
    out->reducer->set_static_graph();
  }
  return out;
}

c10d::Reducer& Reducer::live() const {
  check_not_fork("a gradient reducer");
  return *reducer;
}

void reducer_prepare_for_forward(const Reducer& reducer) {
  reducer.live().prepare_for_forward();
}

bool reducer_rebuild_buckets(const Reducer& reducer) {
  return reducer.live().rebuild_buckets();
}

void reducer_prepare_for_backward(const Reducer& reducer, rust::Slice<const TensorRef> outputs) {
  reducer.live().prepare_for_backward(copy_handles(outputs));
}

namespace {

using torch::autograd::variable_list;

// As torch's _DDPSink: an identity whose undefined gradients stay undefined, so that a parameter that
// no rank used keeps its gradient untouched.
struct Sink : public torch::autograd::Function<Sink> {
  static variable_list forward(
      torch::autograd::AutogradContext* context,
      const std::shared_ptr<c10d::Reducer>& reducer,
      bool delay,
      at::TensorList outputs) {
    context->set_materialize_grads(false);
    if (delay) {
      // Weak: the graph may outlive the reducer.
      context->saved_data["reducer"] =
          c10::IValue::make_capsule(c10::make_intrusive<Holder>(reducer));
    }
    variable_list copies;
    copies.reserve(outputs.size());
    for (const auto& output : outputs) {
      // A copy, not a view: callers may change their outputs in place.
      copies.push_back(output.clone());
    }
    return copies;
  }

  static variable_list backward(
      torch::autograd::AutogradContext* context, const variable_list& gradients) {
    auto saved = context->saved_data.find("reducer");
    if (saved != context->saved_data.end()) {
      auto holder = c10::static_intrusive_pointer_cast<Holder>(saved->second.toCapsule());
      torch::autograd::Engine::get_default_engine().queue_callback([weak = holder->reducer] {
        if (auto reducer = weak.lock()) {
          reducer->delay_all_reduce();
        }
      });
    }
    variable_list out{at::Tensor(), at::Tensor()};
    out.insert(out.end(), gradients.begin(), gradients.end());
    return out;
  }

  struct Holder : torch::CustomClassHolder {
    explicit Holder(const std::shared_ptr<c10d::Reducer>& reducer) : reducer(reducer) {}
    std::weak_ptr<c10d::Reducer> reducer;
  };
};

} // namespace

std::unique_ptr<std::vector<Tensor>> reducer_sink(
    const Reducer& reducer, rust::Slice<const TensorRef> outputs, bool delay) {
  const auto handles = copy_handles(outputs);
  // A list of tensors is seen as inputs only in the form of a TensorList.
  return std::make_unique<std::vector<Tensor>>(
      Sink::apply(reducer.reducer, delay, at::TensorList(handles)));
}

void reducer_watch(const Reducer& reducer, rust::Slice<const TensorRef> outputs, bool refuse) {
  // The backward passes through one forward. All hooks of a pass run on one thread at a time, before those
  // of the parameters behind their outputs.
  auto first = std::make_shared<std::atomic<int>>(-1);
  auto last = std::make_shared<std::atomic<int>>(-1);
  for (const auto& output : copy_handles(outputs)) {
    if (output.is_leaf()) {
      continue; // a hook there would never be removed
    }
    // Weak: the graph may outlive the reducer.
    output.register_hook([weak = std::weak_ptr(reducer.reducer), first, last, refuse](const at::Tensor&) {
      const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
      if (chosen != nullptr && !chosen->empty()) {
        return; // the gradients of chosen tensors: no parameter's is accumulated
      }
      const auto pass = torch::autograd::get_current_graph_task_id();
      int none = -1;
      if (first->compare_exchange_strong(none, pass) || none == pass || last->exchange(pass) == pass) {
        return;
      }
      TORCH_CHECK(
          !refuse,
          "a second backward through a forward of a model whose gradients are reduced: the reducer cannot "
          "do that with find_unused_parameters, static_graph or while ranks join with unequal inputs");
      // After a pass c10d's reducer lets gradients be until the next forward: the ranks would differ.
      if (auto live = weak.lock()) {
        live->rebuild_buckets();
        live->prepare_for_backward({});
      }
    });
  }
}

rust::Vec<size_t> reducer_bucket_bytes(const Reducer& reducer) {
  rust::Vec<size_t> out;
  for (const auto& bucket : reducer.reducer->get_grad_buckets(/*return_zero_tensors=*/true)) {
    out.push_back(bucket.getBuffer().nbytes());
  }
  return out;
}

void reducer_divide_by(const Reducer& reducer, int64_t ranks) {
  // The reducer reads the number from the result of a collective of the forward pass, which here has
  // been waited for already: it tells more than this.
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future->markCompleted(c10::IValue(std::vector<at::Tensor>{at::scalar_tensor(ranks, at::kLong)}));
  reducer.reducer->set_forward_pass_work_handle(
      c10d::Work::create_from_future(future), /*useStaticWorldSize=*/ranks == 0);
}

bool reducer_shadow_backward(const Reducer& reducer) {
  at::NoGradGuard no_grad;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> started;
  // The buckets own the buffers, so they live until all messages have ended.
  auto buckets = reducer.live().get_grad_buckets(/*return_zero_tensors=*/true);
  for (auto& bucket : buckets) {
    started.push_back(reducer.reducer->run_comm_hook(bucket));
  }
  bool finite = true;
  for (size_t i = 0; i < started.size(); ++i) {
    started[i]->waitAndThrow();
    for (const auto& gradient : buckets[i].getGradients()) {
      const std::array<TensorRef, 1> one{TensorRef{gradient}};
      finite = finite && first_elements_are_finite({one.data(), one.size()});
    }
  }
  return finite;
}

void reducer_push_rebuilt(const Reducer& reducer) {
  reducer.reducer->push_rebuilt_params_for_all_indices();
}

std::unique_ptr<Tensor> reducer_used_map(const Reducer& reducer) {
  return std::make_unique<Tensor>(reducer.reducer->get_local_used_map_on_device());
}

} // namespace brigade
