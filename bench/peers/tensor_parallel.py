"""Tensor parallelism of PyTorch (DTensor) among the processes of torchrun: numbers as JSON, from rank 0.

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
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

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


def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    found = {"loss": loss}[sys.argv[1]](*sys.argv[2:])
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
