"""Plain transformers in bf16 with fused AdamW on a GPU: `gpt2`, `llama`, `bert` or `vit`, eager or with `--compile`, in
the fastest mode: steps on request, see gpu_common.py. `--account` prints the kernels of one step instead.

`--rows` is the number of rows of a batch of GPT-2, and `--dropout` its probability.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

from gpu_common import ImageLoss, Training, compile_modes, device, host_images, size


class Attention(nn.Module):
    """Queries, keys and values as one product; with fewer keys than queries where `kv_heads` is given."""

    def __init__(self, width, heads, causal, dropout=0.0, kv_heads=None, bias=True):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head = width // heads
        self.causal, self.dropout = causal, dropout
        self.inputs = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x, rotation=None):
        rows, tokens, width = x.shape
        parts = self.inputs(x).view(rows, tokens, -1, self.head).transpose(1, 2)
        queries, keys, values = parts.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if rotation is not None:
            queries, keys = rotated(queries, *rotation), rotated(keys, *rotation)
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(attended.transpose(1, 2).reshape(rows, tokens, width))


def rotated(x, cosines, sines):
    first, second = x.chunk(2, -1)
    return x * cosines.to(x.dtype) + torch.cat([-second, first], -1) * sines.to(x.dtype)


class Layer(nn.Module):
    """Attention and two linear layers, normalised before each as in GPT-2 and ViT, or behind as in BERT."""

    def __init__(self, width, heads, causal, dropout, tanh, eps, first=True):
        super().__init__()
        self.first = first
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.attention = Attention(width, heads, causal, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh" if tanh else "none"),
            nn.Linear(4 * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        if self.first:
            x = x + self.dropout(self.attention(self.norm_1(x)))
            return x + self.dropout(self.mlp(self.norm_2(x)))
        x = self.norm_1(x + self.dropout(self.attention(x)))
        return self.norm_2(x + self.dropout(self.mlp(x)))


def embedding(count, width):
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def next_words_loss(hidden, weight, ids):
    logits = functional.linear(hidden, weight)[:, :-1].float()
    return functional.cross_entropy(logits.reshape(-1, len(weight)), ids[:, 1:].reshape(-1))


class Gpt2(nn.Module):
    def __init__(self, words, places, width, layers, heads, dropout):
        super().__init__()
        self.words, self.places = embedding(words, width), embedding(places, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(Layer(width, heads, True, dropout, True, 1e-5) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        with torch.autocast(ids.device.type, torch.bfloat16):
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.dropout(self.words(ids) + self.places(places))
            return next_words_loss(self.norm(self.layers(x)), self.words.weight, ids)


class Bert(nn.Module):
    """With the pooler and a classifier of two classes."""

    def __init__(self, words, places, width, layers, heads, dropout):
        super().__init__()
        self.words, self.places = embedding(words, width), embedding(places, width)
        self.types, self.norm = embedding(2, width), nn.LayerNorm(width, 1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(Layer(width, heads, False, dropout, False, 1e-12, first=False) for _ in range(layers))
        )
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids, labels):
        with torch.autocast(ids.device.type, torch.bfloat16):
            places = torch.arange(ids.shape[1], device=ids.device)
            x = self.words(ids) + self.places(places) + self.types(torch.zeros_like(ids))
            x = self.layers(self.dropout(self.norm(x)))
            x = self.dropout(torch.tanh(self.pooler(x[:, 0])))
            return functional.cross_entropy(self.classifier(x).float(), labels)


class LlamaLayer(nn.Module):
    def __init__(self, width, inner, heads, kv_heads):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attention = Attention(width, heads, True, kv_heads=kv_heads, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, rotation):
        x = x + self.attention(self.norm_1(x), rotation)
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, words, width, inner, layers, heads, kv_heads):
        super().__init__()
        self.words, self.head = embedding(words, width), width // heads
        self.layers = nn.ModuleList(
            LlamaLayer(width, inner, heads, kv_heads) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, 1e-5)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        powers = torch.arange(0, self.head, 2, device=ids.device, dtype=torch.float32) / self.head
        angles = (places[:, None] / 500_000.0**powers).repeat(1, 2)
        rotation = angles.cos(), angles.sin()
        with torch.autocast(ids.device.type, torch.bfloat16):
            x = self.words(ids)
            for layer in self.layers:
                x = layer(x, rotation)
            return next_words_loss(self.norm(x), self.words.weight, ids)


class Vit(nn.Module):
    def __init__(self, side, patch, width, layers, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(
            *(Layer(width, heads, False, 0.0, False, 1e-6) for _ in range(layers))
        )
        self.norm, self.classifier = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.places
        return self.classifier(self.norm(self.layers(x))[:, 0])


parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["gpt2", "llama", "bert", "vit"])
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--account", action="store_true")
options = parser.parse_args()
place = device()
torch.manual_seed(1)


def ids_of(words, rows, tokens):
    return [torch.randint(words, (rows, tokens), device=place) for _ in range(4)]


if options.model == "gpt2":
    words, places, width, layers, heads = size((50_257, 1024, 768, 12, 12), (500, 64, 64, 2, 2))
    module = Gpt2(words, places, width, layers, heads, options.dropout)
    batches = [(ids,) for ids in ids_of(words, *size((options.rows, 1024), (2, 32)))]
elif options.model == "llama":
    words, *rest = size((128_256, 2048, 8192, 16, 32, 8), (500, 64, 128, 2, 4, 2))
    module = Llama(words, *rest)
    batches = [(ids,) for ids in ids_of(words, *size((4, 2048), (2, 32)))]
elif options.model == "bert":
    words, places, width, layers, heads = size((30_522, 512, 768, 12, 12), (500, 64, 64, 2, 2))
    module = Bert(words, places, width, layers, heads, 0.1)
    rows, tokens = size((64, 128), (2, 32))
    labels = [torch.randint(2, (rows,), device=place) for _ in range(4)]
    batches = list(zip(ids_of(words, rows, tokens), labels))
else:
    side, *rest = size((224, 16, 768, 12, 12), (32, 8, 64, 2, 2))
    module = ImageLoss(Vit(side, *rest))
    batches = host_images(place, size(256, 2), side)

module.to(place).train()
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
batch_at = batches if callable(batches) else lambda number: batches[number % len(batches)]
training = Training(module, batch_at, optimizer, compile_modes() if options.compile else [])
(training.account if options.account else training.serve)(size(12, 2))
