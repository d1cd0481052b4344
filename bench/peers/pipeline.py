"""1F1B of PyTorch (torch.distributed.pipelining) among two processes of torchrun: seconds of a step as JSON, from the
last rank, which has the loss.

A GPT of plain PyTorch's layers with scaled_dot_product_attention: 6 blocks of width 256 with 8 heads, 4,096 tokens,
texts of 128 tokens, three blocks for each stage. A step trains on 8 texts in 8 micro-batches with the fused AdamW.
"""

import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WARM_UP, STEPS = 3, 15
WIDTH, HEADS, LAYERS, VOCABULARY, TOKENS = 256, 8, 6, 4096, 128
MICRO_BATCHES = 8


class Block(nn.Module):
    """Causal attention and an MLP, each behind its normalisation."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS // 2)])

    def forward(self, ids):
        return self.blocks(self.tokens(ids) + self.positions.weight)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS // 2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden):
        return self.head(self.norm(self.blocks(hidden)))


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main():
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = First() if rank == 0 else Last()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    batches = [torch.randint(VOCABULARY, (MICRO_BATCHES, TOKENS)) for _ in range(4)]
    seconds = []
    for number in range(WARM_UP + STEPS):
        ids = batches[number % 4]
        start = time.perf_counter()
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=[])
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    if rank == 1:
        print(json.dumps([seconds]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
