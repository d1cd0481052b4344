"""Image folders with torchvision and PyTorch's DataLoader of two workers, as JSON.

`images.py loader FOLDER EPOCHS`: images per second of each epoch, and memory of all processes in bytes.
`images.py example FOLDER EPOCHS`: images per second of each epoch of ResNet-18's training with Accelerate.
"""

import json
import os
import sys
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

BATCH = 64


def loader(folder):
    transforms = v2.Compose(
        [
            v2.RandomResizedCrop(160),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(os.path.join(folder, "train"), transforms)
    # Workers that live on between epochs: without them each epoch begins with starting two interpreters.
    return DataLoader(
        dataset, BATCH, shuffle=True, num_workers=2, drop_last=True, persistent_workers=True
    )


def proportional_memory():
    """Resident memory of this process and its children, shared pages by their share."""
    own = os.getpid()
    with open(f"/proc/{own}/task/{own}/children") as children:
        pids = [own, *map(int, children.read().split())]
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def load(folder, epochs):
    batches = loader(folder)
    rates = []
    for _ in range(epochs):
        start, images = time.perf_counter(), 0
        for inputs, _ in batches:
            images += len(inputs)
            # Once the queue of batches is full.
            if images == BATCH * 8:
                measured = time.perf_counter()
                memory = proportional_memory()
                start += time.perf_counter() - measured
        rates.append(images / (time.perf_counter() - start))
    print(json.dumps([rates, [memory]]))


def example(folder, epochs):
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    batches = loader(folder)
    model = resnet18(num_classes=len(batches.dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    model.train()
    rates = []
    for _ in range(epochs):
        start, images = time.perf_counter(), 0
        for inputs, labels in batches:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            images += len(inputs)
        rates.append(images / (time.perf_counter() - start))
    print(json.dumps([rates]))
    accelerator.end_training()


if __name__ == "__main__":
    what, folder, epochs = sys.argv[1:]
    {"loader": load, "example": example}[what](folder, int(epochs))
