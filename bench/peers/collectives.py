"""All-reduces among two processes, under torchrun: as many numbers as ResNet-18 has gradients, and one."""

import json
import time

import torch
import torch.distributed as dist

NUMBERS = (11_689_512, 1)
WARM_UP, ROUNDS = 5, 40

dist.init_process_group("gloo")
torch.set_num_threads(1)
lists = []
for numbers in NUMBERS:
    tensor = torch.zeros(numbers)
    seconds = []
    for number in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    lists.append(seconds)
if dist.get_rank() == 0:
    print(json.dumps(lists), flush=True)
dist.barrier()
dist.destroy_process_group()
