"""Small models of token sequences, alike but for their attention.

Blocks normalise first: attention, then a feed-forward part of twice the width. Sizes: B batch, N
tokens, D width, H heads, d head size of queries, keys and values, M frequencies of a head.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ikattn
from comparison import parse_order
from ikattn.ops.magnitude import LearnedOrder, log_magnitude
from ikattn.spectral import Direct

Kind = Literal["softmax", "implicit", "rbf", "elu", "taylor", "delta"]
Positions = Literal["none", "learned", "rotary"]
CONVOLUTION = 3  # tokens that a short convolution reads
ROTARY_BASE = 10_000.0


class Kernel(NamedTuple):
    """An attention and its options.

    kind: "softmax"; "implicit", with M learned frequencies; "rbf", exp(-|q - k|^2 / (2 sqrt d));
        "elu", linear attention of features elu + 1 (Katharopoulos et al. 2020); "taylor", linear
        attention with 1 + x + x^2 / 2 for exp(x) (Arora et al. 2024); "delta", a gated delta net
        (Yang et al. 2025), by the code of transformers, causal and without padding.
    frequencies: M, of "implicit".
    p: Order of the norm in a key's magnitude, of "implicit": a number, "learned" or "none".
    width: Standard deviation of the first frequencies, in units of ``Direct``'s "unit angle"; 0: as
        the paper draws them.
    features: Size of queries and keys, of "elu", "taylor" and "delta"; None: d, 16 and d.
    forget: Whether a causal "implicit" has forget gates (docs/guide/forgetting.md).
    """

    kind: Kind
    frequencies: int = 32
    p: str = "learned"
    width: float = 1.0
    features: int | None = None
    forget: bool = False

    def __str__(self) -> str:
        if self.kind == "implicit":
            order = "" if self.p == "learned" else f", p = {self.p}"
            return f"implicit, M = {self.frequencies}{order}{', gates' * self.forget}"
        return self.kind if self.features is None else f"{self.kind}, {self.features} features"


def query_size(kernel: Kernel, head_dim: int) -> int:
    """The size of a head's queries and keys."""
    if kernel.kind == "taylor":
        return kernel.features or 16
    if kernel.kind in ("elu", "delta"):
        return kernel.features or head_dim
    return head_dim


def state_size(kernel: Kernel, head_dim: int, length: int) -> int:
    """How many numbers a head keeps of ``length`` tokens, to attend to them from the next one.

    Softmax and rbf keep keys and values. The others keep sums over tokens of entries times a value
    and 1, and so many entries: d of "elu"; of "taylor" the products of two of 1 and the features;
    of "implicit" F (F + 1) / 2 products of two of F = 2M features, and the constant 1 of epsilon.
    "delta" keeps an entry for each number of a key, times a value.
    """
    size = query_size(kernel, head_dim)
    if kernel.kind in ("softmax", "rbf"):
        return length * (size + head_dim)
    if kernel.kind == "delta":
        return size * head_dim
    features = 2 * kernel.frequencies
    entries = {
        "elu": size,
        "taylor": (size + 1) * (size + 2) // 2,
        "implicit": features * (features + 1) // 2 + 1,
    }[kernel.kind]
    return entries * (head_dim + 1)


def rotate(x: Tensor) -> Tensor:
    """Turns pairs of x [B, H, N, d] by angles that grow with the position (Su et al. 2021)."""
    half = x.size(-1) // 2
    speeds = ROTARY_BASE ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.size(-2), dtype=x.dtype, device=x.device)[:, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def as_key_bias(hidden: Tensor | None, like: Tensor) -> Tensor:
    """Returns the bias of keys' logits, [B or 1, 1, N]: -inf where ``hidden`` [B, N] is True."""
    bias = like.new_zeros(1 if hidden is None else hidden.size(0), 1, like.size(-2))
    return bias if hidden is None else bias.masked_fill(hidden[:, None, :], -math.inf)


def softmax_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    """Softmax attention [B, H, N, d] with a bias [B or 1, H or 1, N] of the keys' logits."""
    mask = bias.unsqueeze(-2)
    if causal:
        future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        mask = mask.masked_fill(future, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def linear_attention(
    kind: Kind, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool
) -> Tensor:
    """Attention [B, H, N, d] whose weights are products of features, through all pairs."""
    if kind == "elu":
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    else:
        x = q @ k.mT / math.sqrt(q.size(-1))
        weights = 1 + x + x.square() / 2
    if hidden is not None:
        weights = weights.masked_fill(hidden[:, None, None, :], 0.0)
    if causal:
        weights = weights.tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    """Tokens [B, N, D] to tokens; queries, keys and values may pass a short convolution first."""

    def __init__(
        self,
        size: int,
        heads: int,
        kernel: Kernel,
        *,
        causal: bool,
        rotary: bool = False,
        convolution: bool = False,
    ) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"size must be a multiple of heads, {heads}, got {size}")
        self.kernel, self.heads, self.causal, self.rotary = kernel, heads, causal, rotary
        head_dim = size // heads
        self.sizes = [heads * query_size(kernel, head_dim)] * 2 + [size]
        if rotary and self.sizes[0] // heads % 2:
            raise ValueError(f"rotary positions need an even size, got {self.sizes[0] // heads}")
        self.projection = nn.Linear(size, sum(self.sizes))
        self.convolution = None
        if convolution:
            inner = sum(self.sizes)
            self.convolution = nn.Conv1d(inner, inner, CONVOLUTION, groups=inner)
        self.spectral, self.magnitude = None, None
        if kernel.kind == "implicit":
            initial = "unit angle" if kernel.width else "paper"
            self.spectral = Direct(heads, head_dim, kernel.frequencies, initial=initial)
            with torch.no_grad():
                for w in self.spectral.parameters():
                    w.mul_(kernel.width or 1.0)
            self.magnitude = LearnedOrder(heads) if kernel.p == "learned" else None
        self.gates = None
        if kernel.forget or kernel.kind == "delta":
            if not causal:
                raise ValueError(f"{kernel} must be causal")
            self.gates = nn.Linear(size, heads)  # the share that a token leaves of those before it
            with torch.no_grad():
                self.gates.weight.zero_()
                self.gates.bias.copy_(torch.linspace(2.0, 8.0, heads + 2)[1:-1])
        self.writes, self.head_norm = None, None
        if kernel.kind == "delta":
            self.writes = nn.Linear(size, heads)  # the share that a token's value replaces
            self.head_norm = nn.RMSNorm(head_dim)
        self.output = nn.Linear(size, size)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Attends; ``hidden`` [B, N] is True for tokens that are none."""
        projected = self.projection(x)
        if self.convolution is not None:
            if hidden is not None:
                projected = projected.masked_fill(hidden.unsqueeze(-1), 0.0)
            before = CONVOLUTION - 1 if self.causal else CONVOLUTION // 2
            padded = F.pad(projected.mT, (before, CONVOLUTION - 1 - before))
            projected = self.convolution(padded).mT.contiguous()  # else softmax takes a slow path
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in projected.split(self.sizes, -1)
        )
        if self.rotary:
            q, k = rotate(q), rotate(k)
        log_decay = None if self.gates is None else F.logsigmoid(self.gates(x)).mT
        if self.writes is not None:
            attended = self._delta(q, k, v, log_decay, self.writes(x).sigmoid())
        else:
            attended = self._attend(q, k, v, hidden, log_decay)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _delta(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, writes: Tensor
    ) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        assert log_decay is not None
        assert self.head_norm is not None
        by_token = [part.transpose(1, 2) for part in (q, k, v)]
        found, _ = torch_chunk_gated_delta_rule(
            *by_token, g=log_decay.mT, beta=writes, use_qk_l2norm_in_kernel=True
        )
        normed: Tensor = self.head_norm(found)
        return normed.transpose(1, 2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        kind, causal = self.kernel.kind, self.causal
        if kind == "implicit":
            return self._implicit(q, k, v, hidden, log_decay)
        if kind == "rbf":
            bias = as_key_bias(hidden, k) - log_magnitude(k, 2.0)
            return softmax_with_bias(q, k, v, bias, causal)
        if kind == "softmax" and hidden is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if kind == "softmax":
            return softmax_with_bias(q, k, v, as_key_bias(hidden, k), causal)
        return linear_attention(kind, q, k, v, hidden, causal)

    def _implicit(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        assert self.spectral is not None
        bias = None if hidden is None else as_key_bias(hidden, k)
        p = None if self.magnitude is not None else parse_order(self.kernel.p)
        if self.magnitude is not None:
            g = self.magnitude(k, hidden)
            bias = g if bias is None else g + bias
        w1, w2 = self.spectral.frequencies()
        return ikattn.implicit_kernel_attention(
            q, k, v, w1, w2, p=p, key_bias=bias, is_causal=self.causal, log_decay=log_decay
        )


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), of tokens [B, N, D]."""

    def __init__(self, size: int, attention: Attention, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size)
        self.attention = attention
        self.feed_forward_norm = nn.LayerNorm(size)
        self.feed_forward = nn.Sequential(
            nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), hidden))
        update: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + update


class SequenceModel(nn.Module):
    """Tokens to logits of each place, or of the whole sequence.

    Args:
        vocabulary: How many tokens there are.
        outputs: How many logits.
        kernel: The attention of every block.
        size: D.
        heads: H, a divisor of D.
        layers: Blocks.
        causal: Whether a token sees those before it and itself alone.
        positions: "learned", added to the embeddings; "rotary", in queries and keys; or "none".
        longest: The longest sequence, of "learned" positions.
        convolution: Whether queries, keys and values pass a convolution over three tokens, each
            column by itself; causal where the model is.
        pooled: Whether logits are of the mean over tokens, [B, outputs], not [B, N, outputs].
        dropout: Probability, on what a block adds.

    Raises:
        ValueError: A kind or positions are unknown, or sizes do not fit.
    """

    def __init__(
        self,
        vocabulary: int,
        outputs: int,
        kernel: Kernel,
        *,
        size: int,
        heads: int,
        layers: int = 2,
        causal: bool = False,
        positions: Positions = "none",
        longest: int = 0,
        convolution: bool = False,
        pooled: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if kernel.kind not in get_args(Kind):
            raise ValueError(f"kernel.kind must be one of {get_args(Kind)}, got {kernel.kind!r}")
        if positions not in get_args(Positions):
            raise ValueError(f"positions must be one of {get_args(Positions)}, got {positions!r}")
        self.pooled = pooled
        self.embedding = nn.Embedding(vocabulary, size)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.positions = None
        if positions == "learned":
            self.positions = nn.Parameter(0.1 * torch.randn(longest, size))
        self.blocks = nn.ModuleList(
            Block(
                size,
                Attention(
                    size,
                    heads,
                    kernel,
                    causal=causal,
                    rotary=positions == "rotary",
                    convolution=convolution,
                ),
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(size)
        self.output = nn.Linear(size, outputs)

    def forward(
        self, tokens: Tensor, hidden: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Computes logits.

        Args:
            tokens: Numbers [B, N].
            hidden: [B, N] bool, True for tokens that are none; or None.
            places: [B, P], the places whose logits are wanted, of a model that does not pool; or
                None, all.

        Returns:
            [B, N or P, outputs], pooled [B, outputs].

        Raises:
            ValueError: The sequence is longer than there are positions.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            if tokens.size(1) > len(self.positions):
                raise ValueError(
                    f"tokens must be at most {len(self.positions)} long, got {tokens.size(1)}"
                )
            x = x + self.positions[: tokens.size(1)]
        for block in self.blocks:
            x = block(x, hidden)
        if places is not None:
            x = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        x = self.norm(x)
        if self.pooled and hidden is not None:
            seen = hidden.logical_not().unsqueeze(-1)
            x = x.masked_fill(~seen, 0.0).sum(1) / seen.sum(1).clamp(min=1)
        elif self.pooled:
            x = x.mean(1)
        logits: Tensor = self.output(x)
        return logits
