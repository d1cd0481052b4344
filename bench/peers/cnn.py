"""PyTorch's own loop on the CNN, with PyTorch's defaults: seconds of each step, as JSON."""

import json
import time

import torch
from torch import nn

BATCH, WARM_UP, STEPS = 64, 10, 60


def block(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def cnn():
    return nn.Sequential(
        block(1, 32), block(32, 64), nn.Flatten(), nn.Linear(3136, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def train(steps):
    torch.manual_seed(1)
    batches = [(torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))) for _ in range(8)]
    model = cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    seconds = []
    for number in range(WARM_UP + steps):
        images, labels = batches[number % len(batches)]
        start = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    print(json.dumps([train(STEPS)]))
