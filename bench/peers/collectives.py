"""Collectives among two processes, under torchrun.

all-reduce: of as many numbers as ResNet-18 has gradients, and of one.
shards: an all-gather into 16 MB, and a reduce-scatter of 16 MB.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

NUMBERS = (11_689_512, 1)
SHARDED_NUMBERS = 4 << 20
WARM_UP, ROUNDS = 5, 40

dist.init_process_group("gloo")
torch.set_num_threads(1)
if sys.argv[1] == "all-reduce":
    operations = [lambda tensor=torch.zeros(numbers): dist.all_reduce(tensor) for numbers in NUMBERS]
else:
    whole, shard = torch.zeros(SHARDED_NUMBERS), torch.zeros(SHARDED_NUMBERS // 2)
    operations = [
        lambda: dist.all_gather_into_tensor(whole, shard),
        lambda: dist.reduce_scatter_tensor(shard, whole),
    ]
lists = []
for operation in operations:
    seconds = []
    for number in range(WARM_UP + ROUNDS):
        start = time.perf_counter()
        operation()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    lists.append(seconds)
if dist.get_rank() == 0:
    print(json.dumps(lists), flush=True)
dist.barrier()
dist.destroy_process_group()
