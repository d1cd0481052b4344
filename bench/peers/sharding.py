"""FSDP2 and DDP of PyTorch among the processes of torchrun: seconds as JSON, from rank 0.

`step MODEL ddp|fsdp2` trains a GPT-2 of transformers (`small`: 5.8 M parameters, `gpt2`: 124 M).
`checkpoint FOLDER` saves and loads 1 GB of weights and Adam's states with torch.distributed.checkpoint.
`load FILE` reads a safetensors file of 1 GB on rank 0 and spreads it: seconds, and the highest memory of rank 0 above
what it had before.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 2


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def step(model_name, how):
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    small = {"vocab_size": 4096, "n_positions": 128, "n_embd": 256, "n_layer": 6, "n_head": 8}
    config = GPT2Config(**off, **(small if model_name == "small" else {}))
    rows, steps = (4, 20) if model_name == "small" else (2, 5)
    model = GPT2LMHeadModel(config)
    if how == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()
    batches = [torch.randint(config.vocab_size, (rows, 128)) for _ in range(4)]
    seconds = []
    for number in range(WARM_UP + steps):
        start = time.perf_counter()
        ids = batches[number % 4]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return [seconds]


LAYERS, WIDTH = 21, 2048


def layers():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def checkpoint(folder):
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saves, loads = [], []
    for number in range(4):
        path = os.path.join(folder, f"peer_{number}")
        dist.barrier()
        start = time.perf_counter()
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
        saves.append(time.perf_counter() - start)
        # The first load brings the files into the page cache, as on the other side.
        for _ in range(2):
            dist.barrier()
            start = time.perf_counter()
            weights, states = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": states}
            dcp.load(state, checkpoint_id=path)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            seconds = time.perf_counter() - start
        loads.append(seconds)
    # The first of each makes files and memory new.
    return [saves[1:], loads[1:]]


def load(file):
    from safetensors.torch import load_file

    dist.barrier()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    start = time.perf_counter()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3 * LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    whole = load_file(file) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    dist.barrier()
    return [[time.perf_counter() - start], [status("VmHWM") - before]]


def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    found = {"step": step, "checkpoint": checkpoint, "load": load}[sys.argv[1]](*sys.argv[2:])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
