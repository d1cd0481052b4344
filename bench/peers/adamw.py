"""A step of AdamW on ResNet-18's parameters, as PyTorch does it on a CPU by default: seconds, as JSON."""

import json
import time

import torch
from torchvision.models import resnet18

WARM_UP, STEPS = 5, 40

torch.manual_seed(1)
model = resnet18()
for parameter in model.parameters():
    parameter.grad = torch.rand_like(parameter)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
seconds = []
for number in range(WARM_UP + STEPS):
    start = time.perf_counter()
    optimizer.step()
    if number >= WARM_UP:
        seconds.append(time.perf_counter() - start)
print(json.dumps([seconds]))
