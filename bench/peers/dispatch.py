"""Accelerate's device maps on the CPU: seconds as JSON.

`load FOLDER cpu|disk`: `load_checkpoint_and_dispatch` of a Llama to bfloat16, all in memory, or all but the first block on the
disk: seconds, and the highest memory above what there was before.
`forward FOLDER memory|disk TOKENS`: seconds of forwards in float32 with all in memory, or with the blocks on the disk.
`generate FOLDER memory|half TOKENS`: seconds of greedy generation, with all in memory or half of the blocks on the disk.
"""

import json
import sys
import tempfile
import time

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, LlamaForCausalLM

WARM_UP = 2
PASSES = 5


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def dispatched(folder, place, dtype, offload, in_memory):
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    model.tie_weights()
    layers = {f"model.layers.{i}": "cpu" if i < in_memory else place for i in range(config.num_hidden_layers)}
    others = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = load_checkpoint_and_dispatch(
        model, folder, device_map=layers | others, offload_folder=offload, dtype=dtype
    )
    return model.eval()


def load(folder, place):
    with tempfile.TemporaryDirectory() as offload:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
        before = status("VmRSS")
        start = time.perf_counter()
        model = dispatched(folder, place, torch.bfloat16, offload, 1)
        seconds = time.perf_counter() - start
        print(json.dumps([[seconds], [status("VmHWM") - before]]))
        del model


def forward(folder, how, tokens):
    with tempfile.TemporaryDirectory() as offload, torch.no_grad():
        model = dispatched(folder, "cpu" if how == "memory" else "disk", torch.float32, offload, 0)
        ids = torch.arange(int(tokens)).remainder(model.config.vocab_size).view(1, -1)
        seconds = []
        for number in range(WARM_UP + PASSES):
            start = time.perf_counter()
            model(input_ids=ids)
            if number >= WARM_UP:
                seconds.append(time.perf_counter() - start)
        print(json.dumps([seconds]))


def generate(folder, how, tokens):
    with tempfile.TemporaryDirectory() as offload, torch.no_grad():
        half = AutoConfig.from_pretrained(folder).num_hidden_layers // 2
        model = dispatched(folder, "cpu" if how == "memory" else "disk", torch.float32, offload, half)
        ids = torch.arange(8).view(1, -1)
        model.generation_config.eos_token_id = None
        seconds = []
        for number in range(1 + 3):
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=int(tokens), do_sample=False, pad_token_id=0)
            if number >= 1:
                seconds.append((time.perf_counter() - start) / int(tokens))
        print(json.dumps([seconds]))


if __name__ == "__main__":
    torch.set_num_threads(2)
    {"load": load, "forward": forward, "generate": generate}[sys.argv[1]](*sys.argv[2:])
