"""What torch.distributed.run's documentation shows: everything from the environment, errors recorded."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert rank == int(os.environ["RANK"]) and size == int(os.environ["WORLD_SIZE"])
    assert dist.is_torchelastic_launched()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"rank {rank} of {size}, attempt {attempt}: {total.item()}", flush=True)
    dist.barrier()
    if "fail" in sys.argv and rank == 1 and attempt == 0:
        # Else its threads may abort the process while Python ends.
        dist.destroy_process_group()
        raise ValueError("no more data")
    if "fail" in sys.argv and attempt == 0:
        # Until the launcher stops it: the lost connection would be an error of its own.
        signal.pause()
    dist.destroy_process_group()


main()
