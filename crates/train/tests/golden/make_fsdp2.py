"""Writes fsdp2.json: what PyTorch's fully_shard (FSDP2) trains on two and three ranks over Gloo, in float64.

    python make_fsdp2.py fsdp2.json        # torch 2.13
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = 4
MICRO = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wave(count, phase):
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + phase)


def samples(rank, micro):
    phase = float(rank * 31 + micro * 17)
    return wave(10, phase).view(2, 5), wave(6, phase + 0.5).view(2, 3)


def trained(rank, case):
    model = Net().double()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)) * 0.4
            parameter.copy_(values.view_as(parameter))
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=case["reshard"])
    fully_shard(model, reshard_after_forward=case["reshard"])
    if case["rule"] == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            model.set_requires_gradient_sync(not case["window"] or micro + 1 == MICRO)
            inputs, targets = samples(rank, step * MICRO + micro)
            loss = (model(inputs) - targets).square().mean()
            (loss / MICRO).backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    all_losses = [None] * dist.get_world_size()
    dist.all_gather_object(all_losses, losses)
    weights = {name: it.full_tensor().flatten().tolist() for name, it in model.named_parameters()}
    return {"losses": all_losses, "norms": norms, "weights": weights}


def run(rank, world, file, cases, results):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    found = [{**case, "ranks": world, **trained(rank, case)} for case in cases]
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main():
    cases = [
        {"rule": rule, "reshard": reshard, "window": window, "clip": clip}
        for rule, reshard, window, clip in [
            ("adamw", True, False, 0.05),
            ("adamw", True, True, 1e9),
            ("sgd", False, False, 1e9),
            ("sgd", True, True, 0.05),
        ]
    ]
    import tempfile

    all_found = []
    for world in (2, 3):
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            ranks = mp.spawn(run, (world, f"{folder}/store", cases, results), world, join=False)
            all_found += results.get()
            while not ranks.join():
                pass
    with open(sys.argv[1], "w") as out:
        json.dump({"torch": torch.__version__, "cases": all_found}, out)
        out.write("\n")


if __name__ == "__main__":
    main()
