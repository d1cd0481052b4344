"""One DDP step on the CNN, under torchrun: the program whose start is measured."""

import torch
import torch.distributed as dist
from torch import nn

from cnn import BATCH, cnn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(cnn())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
images, labels = torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
loss = nn.functional.cross_entropy(model(images), labels)
loss.backward()
optimizer.step()
# A reducer that outlives its process group aborts now and then at the end of the process.
del loss, optimizer, model
dist.destroy_process_group()
