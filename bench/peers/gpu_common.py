"""What the peers on a GPU have in common: the device, its settings, blocks of steps on request.

`BRIGADE_BENCH_SMALL=1` makes sizes small, for tests of these programs on a CPU.
"""

import gc
import json
import os
import sys
import time

import torch
from torch import nn

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


class ImageLoss(nn.Module):
    """Normalisation of images of bytes, a network in bf16 and its loss, to be compiled as one."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        for name, values in [("mean", [0.485, 0.456, 0.406]), ("std", [0.229, 0.224, 0.225])]:
            self.register_buffer(name, (torch.tensor(values) * 255).view(1, 3, 1, 1))

    def forward(self, images, labels):
        # Channels last in memory.
        images = images.permute(0, 3, 1, 2).float().sub_(self.mean).div_(self.std)
        with torch.autocast(images.device.type, torch.bfloat16):
            logits = self.network(images)
        return nn.functional.cross_entropy(logits.float(), labels)


def host_images(place, batch, side):
    """A function of a step's number that moves a batch of images of random bytes and labels from the host's pinned
    memory to `place`, without waiting.
    """
    held = [
        (
            pinned(torch.randint(256, (batch, side, side, 3), dtype=torch.uint8)),
            pinned(torch.randint(1000, (batch,))),
        )
        for _ in range(8)
    ]

    def batch_at(number):
        return [part.to(place, non_blocking=True) for part in held[number % len(held)]]

    return batch_at


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak():
    """The most memory of the GPU that tensors had since it was last reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class Training:
    """Steps of `optimizer` on `module`, which computes the loss of the batch that `batch_at` returns for a step's
    number.

    With one of `modes` the module is compiled. With several it is compiled in each at the first block of steps, and
    keeps the fastest; a mode that fails has its words on stderr.
    """

    def __init__(self, module, batch_at, optimizer, modes=()):
        self.module, self.batch_at, self.optimizer, self.modes = module, batch_at, optimizer, modes
        self.forward, self.compiled, self.number = module, False, 0

    def step(self):
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.forward(*self.batch_at(self.number))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.number += 1

    def block(self, steps):
        """The seconds of a step."""
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return (time.perf_counter() - start) / steps

    def _compile(self, mode):
        # Frees what the mode before has compiled, and the memory of its recorded graphs.
        self.forward = self.module
        torch._dynamo.reset()
        gc.collect()
        self.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.forward, self.compiled = torch.compile(self.module, mode=mode), True

    def choose(self, steps):
        """Compiles in the fastest mode, and takes blocks of steps to warm up."""
        seconds = {}
        for mode in self.modes:
            try:
                self._compile(mode)
                self.block(steps)
                seconds[mode] = self.block(steps)
                print(f"  {mode}: {1e3 * seconds[mode]:.3f} ms", file=sys.stderr, flush=True)
            except Exception as error:
                if len(self.modes) == 1:
                    raise
                print(f"  {mode} failed: {error}", file=sys.stderr, flush=True)
        if len(self.modes) > 1:
            best = min(seconds, key=seconds.get)
            if best != self.modes[-1]:
                self._compile(best)
        self.block(steps)

    def serve(self, steps):
        """Takes `steps` steps for each line of standard input, and answers with their seconds on average and the most
        memory of the GPU that tensors had until then. What the first line asks for warms up.
        """
        warm = False
        for _ in sys.stdin:
            if not warm:
                self.choose(steps)
                warm = True
            seconds = self.block(steps)
            print(f"[{seconds}, {peak()}]", flush=True)

    def account(self, steps):
        """Prints the kernels of a step after others, each name with its seconds and calls; on a CPU the operations
        without those that they call.
        """
        self.choose(steps)
        on_gpu = torch.cuda.is_available()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # The first recording starts CUPTI.
        for _ in range(2):
            with torch.profiler.profile(activities=activities) as recording:
                self.step()
                synchronize()
        kernels = {}
        if on_gpu:
            for event in recording.events():
                on_device = event.device_type == torch.autograd.DeviceType.CUDA
                # Scopes are shown on the device, too, as what lasts from their first kernel to their last.
                if on_device and not event.is_user_annotation:
                    seconds, calls = kernels.get(event.name, (0.0, 0))
                    kernels[event.name] = (seconds + 1e-6 * event.device_time, calls + 1)
        else:
            for event in recording.key_averages():
                kernels[event.key] = (1e-6 * event.self_cpu_time_total, event.count)
        print(json.dumps([[name, *numbers] for name, numbers in kernels.items()]), flush=True)


def compile_modes():
    """The modes of `torch.compile` that are tried: all, or those that `BRIGADE_BENCH_MODES` lists with commas."""
    named = os.environ.get("BRIGADE_BENCH_MODES", "")
    return named.split(",") if named else ["default", "reduce-overhead", "max-autotune"]
