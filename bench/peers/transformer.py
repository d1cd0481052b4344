"""Linear layers, and one layer of a transformer, of the widths of GPT-2's smallest: the peers of `Mlp` and
`Block` in `bench/src/measurements/nets.rs`."""

from torch import nn

WIDTH, HEADS = 768, 12


def mlp():
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
    )


class Block(nn.Module):
    """Causal attention and an MLP, each behind its normalisation; the mean over the tokens."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm2(x))).mean(1)


def block():
    return Block()
