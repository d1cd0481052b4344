"""Tensor parallelism of PyTorch (DTensor) among the processes of torchrun: numbers as JSON, from rank 0.

`layer` computes a layer of Llama with parallelize_module, forward and backward: seconds.
`loss` computes a head of 32,000 tokens and its loss on 1,024 tokens of width 512 with parallelize_module and
loss_parallel, forward and backward: seconds, and the highest memory of rank 0 above what it had before.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

WARM_UP, STEPS = 2, 5


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loss():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    head = nn.Linear(512, 32_000, bias=False)
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    hidden = torch.randn(1024, 512, requires_grad=True)
    targets = torch.randint(32_000, (1024,))
    dist.barrier()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")
    seconds = []
    for number in range(WARM_UP + STEPS):
        start = time.perf_counter()
        with loss_parallel():
            F.cross_entropy(head(hidden), targets).backward()
        hidden.grad = None
        head.weight.grad = None
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return [seconds, [status("VmHWM") - before]]


class Layer(nn.Module):
    """A layer of Llama between an embedding and a norm, without rotary positions, which favours PyTorch."""

    def __init__(self, size=512, inner=1376, heads=8):
        super().__init__()
        self.width = size // heads
        self.embed = nn.Embedding(64, size)
        self.norms = nn.ModuleList(nn.RMSNorm(size, eps=1e-6) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        inputs = self.norms[0](hidden)
        split = lambda states: states.unflatten(-1, (-1, self.width)).transpose(1, 2)
        queries, keys, values = (split(linear(inputs)) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.o(attended.transpose(1, 2).flatten(2))
        inputs = self.norms[1](hidden)
        hidden = hidden + self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        return self.norms[2](hidden)


def layer():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Layer()
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    parallelize_module(model, mesh, plan | {name: RowwiseParallel() for name in ("o", "down")})
    ids = torch.randint(64, (4, 256))
    dist.barrier()
    seconds = []
    for number in range(WARM_UP + STEPS):
        start = time.perf_counter()
        model(ids).mean().backward()
        model.zero_grad()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return [seconds]


def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    found = {"layer": layer, "loss": loss}[sys.argv[1]](*sys.argv[2:])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
