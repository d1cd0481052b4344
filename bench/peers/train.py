"""A training loop on PyTorch with Accelerate: seconds of each step as JSON, or bytes of memory.

Without flags everything is as both set it by default: NCHW, the optimizer's loop over parameters, fp32.
Under torchrun each rank has its part of the batch, and the first speaks for all.
"""

import argparse
import json
import os
import resource
import sys
import time

import torch
from accelerate import Accelerator
from torch import nn

from cnn import cnn
from transformer import block, mlp

WARM_UP = 5


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["cnn", "resnet18", "resnet50", "mlp", "block"], required=True)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", action="store_true")
    return parser.parse_args()


def parts(name):
    if name == "cnn":
        return cnn(), (64, 1, 28, 28), 10
    if name == "mlp":
        return mlp(), (256, 768), 768
    if name == "block":
        return block(), (8, 128, 768), 768
    from torchvision import models

    if name == "resnet50":
        return models.resnet50(), (16, 3, 160, 160), 1000
    return models.resnet18(), (32, 3, 128, 128), 1000


def main():
    given = options()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, mixed_precision=given.precision)
    model, (batch, *sample), classes = parts(given.model)
    shape = (batch // accelerator.num_processes, *sample)
    kind = torch.optim.Adam if given.model == "cnn" else torch.optim.AdamW
    if given.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = kind(model.parameters(), lr=1e-3, fused=True if given.fused else None)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    # The first steps, which are not measured, compile it.
    run = torch.compile(model) if given.compile else model
    batches = [(torch.rand(shape), torch.randint(classes, shape[:1])) for _ in range(4)]
    seconds = []
    for number in range(WARM_UP + given.steps):
        images, labels = batches[number % len(batches)]
        start = time.perf_counter()
        if given.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(run(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    if given.memory:
        # Kilobytes on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        print(json.dumps([[resident], [peak]]))
    elif accelerator.is_main_process:
        print(json.dumps([seconds]))
    # A reducer that outlives its process group aborts now and then at the end of the process.
    del loss, run
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main())
