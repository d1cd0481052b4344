"""GPT-2 of 124 M parameters in bf16 on a GPU, eager: steps on request, see gpu_common.py.

transformers' model where it is installed, else one of the same structure with `scaled_dot_product_attention`.
"""

import torch
from torch import nn

from gpu_common import device, serve_training, size

VOCABULARY, POSITIONS, WIDTH, LAYERS, HEADS = size((50_257, 1024, 768, 12, 12), (500, 64, 64, 2, 2))
ROWS, TOKENS = size((8, 1024), (2, 32))
DROPOUT = 0.1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        rows, tokens, _ = x.shape
        parts = self.attention(self.ln_1(x)).view(rows, tokens, 3, HEADS, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        attended = attended.transpose(1, 2).reshape(rows, tokens, WIDTH)
        x = x + self.dropout(self.projection(attended))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dropout = nn.Dropout(DROPOUT)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.words(ids) + self.places(places))
        logits = nn.functional.linear(self.norm(self.layers(x)), self.words.weight)
        logits = logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def gpt2():
    """The model, and its loss on tokens."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        own = Gpt2()
        return own, own
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=POSITIONS,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


place = device()
torch.manual_seed(1)
model, loss_of = gpt2()
model.to(place)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
batches = [torch.randint(VOCABULARY, (ROWS, TOKENS), device=place) for _ in range(4)]


def loss_at(number):
    with torch.autocast(place.type, torch.bfloat16):
        return loss_of(batches[number % len(batches)])


serve_training(loss_at, optimizer, size(12, 2))
