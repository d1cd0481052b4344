"""A call of Accelerate's on two processes that form a group and return: its seconds, once PyTorch is imported."""

import json
import time

import torch  # noqa: F401
from accelerate import Accelerator, debug_launcher


def join():
    assert Accelerator(cpu=True).num_processes == 2


start = time.perf_counter()
debug_launcher(join, (), 2)
print(json.dumps([[time.perf_counter() - start]]))
