"""Loads converted checkpoints with Accelerate and goes on: `torch_schedulers.py CASES.json` under torchrun.

Each case names the folder of a converted checkpoint and the scheduler that its program has, an expression of `o`
(the optimizer), `n` (the processes) and the classes of torch and transformers. Rank 0 prints, as JSON, the rates of
all groups and the momentum after each of ten optimizer steps, by the name of the case.
"""

import json
import math
import sys
import warnings

import torch
import transformers
from accelerate import Accelerator

NAMES = {**vars(torch.optim.lr_scheduler), **vars(transformers.optimization), "math": math}


def main():
    warnings.simplefilter("ignore")
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    accelerator = Accelerator(cpu=True)
    found = {}
    for case in cases:
        accelerator.free_memory()
        model = torch.nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.05}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        names = {**NAMES, "o": optimizer, "n": accelerator.num_processes}
        scheduler = eval(case["scheduler"], names)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        scheduler.split_batches = case["split_batches"]
        accelerator.load_state(case["folder"])
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups], case
        rows = []
        for step in range(10):
            optimizer.step()
            scheduler.step(*([case["metrics"][step]] if case["metrics"] else []))
            rates = [group["lr"] for group in optimizer.param_groups]
            rows.append(rates + [optimizer.param_groups[0]["betas"][0]])
        found[case["name"]] = rows
    if accelerator.is_main_process:
        print(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
