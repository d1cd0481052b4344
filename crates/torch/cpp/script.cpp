#include "brigade-torch/src/bridge.rs.h"

#include "script.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <string>

namespace brigade {

struct ScriptModule {
  torch::jit::Module module;
};

struct ScriptValue {
  rust::Vec<ScriptNode> nodes;
  std::vector<Tensor> tensors;
};

std::unique_ptr<Script> script_load(rust::Str path) {
  auto module = torch::jit::load(std::string(path), at::Device(at::kCPU));
  return std::make_unique<Script>(
      Script{std::make_shared<ScriptModule>(ScriptModule{std::move(module)})});
}

namespace {

template <typename F>
void each_tensor(const Script& script, bool buffers, F&& f) {
  if (buffers) {
    for (const auto& item : script.module->module.named_buffers()) {
      f(item);
    }
  } else {
    for (const auto& item : script.module->module.named_parameters()) {
      f(item);
    }
  }
}

void flatten(const c10::IValue& value, ScriptValue& out) {
  ScriptNode node{ScriptKind::None, 0, 0, 0.0, rust::String()};
  if (value.isNone()) {
    out.nodes.push_back(std::move(node));
  } else if (value.isTensor()) {
    node.kind = ScriptKind::Tensor;
    node.count = out.tensors.size();
    out.tensors.push_back(value.toTensor());
    out.nodes.push_back(std::move(node));
  } else if (value.isBool()) {
    node.kind = ScriptKind::Bool;
    node.integer = value.toBool() ? 1 : 0;
    out.nodes.push_back(std::move(node));
  } else if (value.isInt()) {
    node.kind = ScriptKind::Int;
    node.integer = value.toInt();
    out.nodes.push_back(std::move(node));
  } else if (value.isDouble()) {
    node.kind = ScriptKind::Float;
    node.number = value.toDouble();
    out.nodes.push_back(std::move(node));
  } else if (value.isString()) {
    node.kind = ScriptKind::Text;
    node.text = rust::String(value.toStringRef());
    out.nodes.push_back(std::move(node));
  } else if (value.isTuple()) {
    const auto tuple = value.toTuple();
    const auto& elements = tuple->elements();
    node.kind = ScriptKind::Tuple;
    node.count = elements.size();
    out.nodes.push_back(std::move(node));
    for (const auto& element : elements) {
      flatten(element, out);
    }
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    node.kind = ScriptKind::List;
    node.count = elements.size();
    out.nodes.push_back(std::move(node));
    for (const auto& element : elements) {
      flatten(element, out);
    }
  } else if (value.isGenericDict()) {
    const auto dictionary = value.toGenericDict();
    node.kind = ScriptKind::Dict;
    node.count = dictionary.size();
    out.nodes.push_back(std::move(node));
    for (const auto& entry : dictionary) {
      TORCH_CHECK(entry.key().isString(), "a TorchScript module gave a dictionary whose keys are not strings");
      flatten(entry.key(), out);
      flatten(entry.value(), out);
    }
  } else {
    TORCH_CHECK(false, "a TorchScript module gave a value of type ", value.tagKind(), ", which is not supported");
  }
}

} // namespace

rust::Vec<rust::String> script_names(const Script& script, bool buffers) {
  rust::Vec<rust::String> out;
  each_tensor(script, buffers, [&](const auto& item) { out.push_back(rust::String(item.name)); });
  return out;
}

std::unique_ptr<std::vector<Tensor>> script_tensors(const Script& script, bool buffers) {
  auto out = std::make_unique<std::vector<Tensor>>();
  each_tensor(script, buffers, [&](const auto& item) { out->push_back(item.value); });
  return out;
}

void script_train(const Script& script, bool on) {
  auto module = script.module->module;
  module.train(on);
}

std::unique_ptr<ScriptOutput> script_forward(
    const Script& script,
    rust::Slice<const TensorRef> inputs,
    rust::Slice<const rust::String> names) {
  auto handles = copy_handles(inputs);
  TORCH_CHECK(names.size() <= handles.size(), "more names than inputs");
  const auto positional = handles.size() - names.size();
  std::vector<c10::IValue> arguments(handles.begin(), handles.begin() + positional);
  torch::jit::Kwargs named;
  for (size_t i = 0; i < names.size(); ++i) {
    named.emplace(std::string(names[i]), handles[positional + i]);
  }
  // Operation by operation, as Python without TorchScript. The optimising executor profiles its first
  // runs, rewrites the graph, and so gives other bits from the second or third run on: a resumed run
  // would not equal the one that was not stopped.
  torch::jit::GraphOptimizerEnabledGuard without_rewriting(false);
  auto module = script.module->module;
  auto out = std::make_shared<ScriptValue>();
  flatten(module.forward(std::move(arguments), named), *out);
  return std::make_unique<ScriptOutput>(ScriptOutput{std::move(out)});
}

rust::Vec<ScriptNode> script_nodes(const ScriptOutput& output) {
  return output.value->nodes;
}

const std::vector<Tensor>& script_output_tensors(const ScriptOutput& output) {
  return output.value->tensors;
}

} // namespace brigade
