"""Greedy generation of transformers on the CPU: seconds of a token in each pass and the highest memory, as JSON.

`floats FOLDER dynamic|static|compiled BATCH TOKENS`: a model in the type of its file, with a dynamic cache, a static
cache, or a static cache and a step that `torch.compile` compiles.
`quantised FOLDER int8|int4 TOKENS`: a Llama in bfloat16 whose linear layers but the head compute with the kernels
`_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu` (groups of 128).
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, CompileConfig

PROMPT = 16
PASSES = 3
GROUP = 128


class Int8Linear(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        scale = weight.float().abs().amax(1).clamp_min(1e-12) / 127
        self.scale = scale.bfloat16()
        self.weight = (weight.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8)

    def forward(self, x):
        out = torch._weight_int8pack_mm(x.flatten(0, -2), self.weight, self.scale)
        return out.view(*x.shape[:-1], -1)


class Int4Linear(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // GROUP, GROUP)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp_min(1e-12)
        numbers = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(numbers.view(rows, columns), 1)
        # The kernel subtracts 8 from the numbers.
        zeros = low + 8 * scale
        self.scales = torch.stack([scale.t(), zeros.t()], 2).bfloat16().contiguous()

    def forward(self, x):
        out = torch._weight_int4pack_mm_for_cpu(x.flatten(0, -2).contiguous(), self.packed, GROUP, self.scales)
        return out.view(*x.shape[:-1], -1)


def quantise(module, kind):
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name != "lm_head":
            setattr(module, name, kind(child.weight.data))
        else:
            quantise(child, kind)


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def generate(model, batch, tokens, before, **settings):
    ids = torch.arange(batch * PROMPT).remainder(500).view(batch, PROMPT)
    model.generation_config.eos_token_id = None
    seconds = []
    with torch.no_grad():
        for number in range(1 + PASSES):
            start = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **settings,
            )
            if number >= 1:
                seconds.append((time.perf_counter() - start) / tokens)
    print(json.dumps([seconds, [status("VmHWM") - before]]))


def load(folder, dtype):
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    before = status("VmRSS")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), before


def floats(folder, cache, batch, tokens):
    model, before = load(folder, "auto")
    settings = {} if cache == "dynamic" else {"cache_implementation": "static"}
    if cache == "static":
        settings["disable_compile"] = True
    elif cache == "compiled":
        # transformers compiles on GPUs alone unless it is told otherwise.
        compilation = CompileConfig(mode="default", fullgraph=False)
        compilation._compile_all_devices = True
        settings["compile_config"] = compilation
    generate(model, int(batch), int(tokens), before, **settings)


def quantised(folder, form, tokens):
    model, before = load(folder, torch.bfloat16)
    quantise(model, Int8Linear if form == "int8" else Int4Linear)
    generate(model, 1, int(tokens), before)


if __name__ == "__main__":
    torch.set_num_threads(2)
    {"floats": floats, "quantised": quantised}[sys.argv[1]](*sys.argv[2:])
