"""Blocks of transformers as people write them, and what every pair of tokens adds there."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recorded_models import pair_vectors

__all__ = ["Attention", "B", "Block", "D", "Functional", "H", "L", "LayerScale"]
__all__ += ["Parallel", "vectors"]

B, L, D, H = 2, 5, 16, 4


class Attention(nn.Module):
    """Attention as people write it: one projection, and F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.heads(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of a GPT, with something between the attention and the sum."""

    def __init__(self, between: nn.Module | None = None, post: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention()
        self.between = between or nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.ln_1(x + self.between(self.attn(x)))
            return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.between(self.attn(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        return x + self.attn(y) + self.mlp(y)  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Functional(Block):
    """A multiplier that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.2 * self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


def vectors(attention: Attention, x: Tensor) -> Tensor:
    """Returns what every pair adds to the output, [B, L, S, D]."""
    q, k, v = attention.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / (D / H) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return pair_vectors(weights, v, attention.proj.weight)
