"""What the peers on a GPU have in common: the device, its settings, blocks of steps on request.

`BRIGADE_BENCH_SMALL=1` makes sizes small, for tests of these programs on a CPU.
"""

import os
import sys
import time

import torch

SMALL = os.environ.get("BRIGADE_BENCH_SMALL", "") not in ("", "0")


def size(full, small):
    return small if SMALL else full


def device():
    """The GPU where there is one, with TF32 and cuDNN's benchmark, as the other side has them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # TF32 of products; convolutions have it by default.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda")


def pinned(tensor):
    """In memory from which a copy to the GPU runs beside the host."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def compiled(module, wanted):
    """`torch.compile` in the mode with CUDA graphs, where it is wanted."""
    return torch.compile(module, mode="reduce-overhead") if wanted else module


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve(step, steps):
    """Takes `steps` steps for each line of standard input, and answers with their seconds on average and the most
    memory of the GPU that tensors had until then. What the first line asks for warms up.

    `step` gets the step's number.
    """
    number = 0
    for _ in sys.stdin:
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(number)
            number += 1
        synchronize()
        seconds = (time.perf_counter() - start) / steps
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(f"[{seconds}, {peak}]", flush=True)


def serve_training(loss_of, optimizer, steps, compiled=False):
    """Serves steps of `optimizer` on the loss that `loss_of` computes from a step's number."""

    def step(number):
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(number)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    serve(step, steps)
