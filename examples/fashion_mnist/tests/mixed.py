"""One rank of two: rank 0 becomes the Rust example, rank 1 trains the same model in PyTorch.

What rank 1 sends is what the example's rank 1 would send; the documentation of `brigade-train` lists it.
"""

import hashlib
import json
import os
import struct
import sys

RANK = int(os.environ["RANK"])
if RANK == 0:
    program = os.environ["BRIGADE_EXAMPLE"]
    os.execv(program, [program, *sys.argv[1:]])

import torch
import torch.distributed as dist
from torch import nn

BATCHES = os.environ["BRIGADE_BATCHES"]
MESSAGE_BYTES = 250 << 20


def block(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.module1 = block(1, 32)
        self.module2 = block(32, 64)
        self.linear1 = nn.Linear(3136, 64)
        self.linear2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.module2(self.module1(x)).flatten(1)
        return self.linear2(self.linear1(x).relu())


def read(part):
    folder = os.path.join(BATCHES, part)
    images = torch.frombuffer(bytearray(open(folder + ".images", "rb").read()), dtype=torch.float32)
    labels = torch.frombuffer(bytearray(open(folder + ".labels", "rb").read()), dtype=torch.int64)
    return images.view(-1, 1, 28, 28), labels, json.load(open(folder + ".json"))


def scope():
    """local_main_process_first: rank 0 tells how its body ended."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, 0)
    dist.broadcast(torch.zeros(int(length), dtype=torch.uint8), 0)


def pair(first, second):
    """An all-gather of two numbers of each rank."""
    mine = torch.tensor([first, second])
    all_pairs = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(all_pairs, mine)
    return all_pairs


def packed(value):
    """MessagePack of what a rank keeps of a metric."""
    if isinstance(value, float):
        return struct.pack(">Bd", 0xCB, value)
    if isinstance(value, int):
        return struct.pack(">BI", 0xCE, value)
    if isinstance(value, str):
        return struct.pack(">BB", 0xD9, len(value)) + value.encode()
    if isinstance(value, dict):
        items = b"".join(packed(key) + packed(item) for key, item in value.items())
        return struct.pack(">BI", 0xDF, len(value)) + items
    return struct.pack(">BI", 0xDD, len(value)) + b"".join(map(packed, value))


def gather_object(value):
    """An all-gather of objects: their lengths, then their bytes, as many of each rank as the longest has."""
    data = packed(value)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(data)]))
    mine = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_gather([torch.zeros_like(mine) for _ in lengths], mine)


def listing(model):
    kind = lambda tensor: str(tensor.dtype).removeprefix("torch.")
    line = lambda what, name, t: f"{what} {name} {list(t.shape)} {kind(t)}"
    lines = [line("parameter", n, p) for n, p in model.named_parameters()]
    return lines + [line("buffer", n, b) for n, b in model.named_buffers()]


def prepare_model(model):
    lines = listing(model)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    pair(len(lines), int.from_bytes(digest[:8], "big", signed=True))
    group = dist.distributed_c10d._get_default_group()
    state = [t.detach() for t in [*model.parameters(), *model.buffers()]]
    dist._broadcast_coalesced(group, state, MESSAGE_BYTES, 0)
    return nn.parallel.DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=True)


def main():
    dist.init_process_group("gloo")
    train_images, train_labels, train_epochs = read("train")
    test_images, test_labels, test_epochs = read("test")

    scope()
    model = prepare_model(Cnn())  # NCHW, as Brigade's with --nchw
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, fused=True)
    pair(len(train_labels), 0)  # the loaders: rank 0's seed counts
    pair(len(test_labels), 0)

    for train, test in zip(train_epochs, test_epochs):
        model.train()
        for batch, _ in train:
            loss = nn.functional.cross_entropy(model(train_images[batch]), train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        group = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, list(model.module.buffers()), MESSAGE_BYTES, 0)
        kept = []
        for number, (batch, valid) in enumerate(test):
            with torch.no_grad():
                predicted = model.module(test_images[batch]).argmax(-1)
            right = (predicted == test_labels[batch])[:valid]
            if valid:
                kept.append([number, [float(right.sum()), float(valid), 0.0]])
        gather_object({"Sums": kept} if kept else "Nothing")
        # As after a forward without gradients: the next one sends no buffers.
        model.require_forward_param_sync = False
    scope()  # save_model


main()
# Without the interpreter's finalization: Gloo's threads may still free tensors then, for which they take
# Python's lock, and abort the process (pytorch/pytorch#179291).
sys.stdout.flush()
os._exit(0)
