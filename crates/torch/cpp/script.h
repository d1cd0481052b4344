// TorchScript files: modules that Python wrote with torch.jit.
#pragma once

#include "tensors.h"

#include <memory>
#include <vector>

namespace brigade {

struct ScriptNode;
struct ScriptModule;
struct ScriptValue;

struct Script {
  std::shared_ptr<ScriptModule> module;
};

struct ScriptOutput {
  std::shared_ptr<ScriptValue> value;
};

// To the CPU.
std::unique_ptr<Script> script_load(rust::Str path);
rust::Vec<rust::String> script_names(const Script& script, bool buffers);
// The module's own tensors, in the order of the names.
std::unique_ptr<std::vector<Tensor>> script_tensors(const Script& script, bool buffers);
void script_train(const Script& script, bool on);
// The last of the inputs are given by name. The nodes are the result in preorder; its tensors come apart.
std::unique_ptr<ScriptOutput> script_forward(
    const Script& script,
    rust::Slice<const TensorRef> inputs,
    rust::Slice<const rust::String> names);
rust::Vec<ScriptNode> script_nodes(const ScriptOutput& output);
const std::vector<Tensor>& script_output_tensors(const ScriptOutput& output);

} // namespace brigade
