"""Hand-written layers around nn.MultiheadAttention, and their maps step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agreement import assert_close
from hand_written_blocks import D, H, LayerScale
from ikattn.maps import Recording
from recorded_models import pair_vectors, randomize, through_norm


class Layer(nn.Module):
    """The parts of the layers of this file. A layer that turns has items where its module has not.

    Its tensors are items first, ``[B, L, D]``, if ``batch_first`` and no turning, or both not.
    """

    def __init__(self, batch_first: bool = True, turns: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, H, batch_first=batch_first)
        self.mlp = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))
        self.turns = turns
        randomize(self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.turns:
            return self.attn(q, k, v, need_weights=False)[0]  # type: ignore[no-any-return]
        by_identity = {id(x): x.transpose(0, 1) for x in (q, k, v)}
        q, k, v = (by_identity[id(x)] for x in (q, k, v))
        return self.attn(q, k, v, need_weights=False)[0].transpose(0, 1)  # type: ignore[no-any-return]


class Sums(NamedTuple):
    """A block step by step, items first: what its attention read, and what it was added to."""

    block: str
    query: Tensor
    value: Tensor
    residual: Tensor
    factor: Any = 1.0
    output_norm: nn.Module | None = None
    norms: tuple[tuple[nn.Module, Tensor], ...] = ()  # after the sum, with their inputs


class ViT(Layer):
    """A block like torchvision's EncoderBlock."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = F.dropout(self.attend(y, y, y), 0.1, self.training) + x
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        h = self.ln_1(x)
        return Sums("pre", h, h, x, norms=((self.ln_2, x + y(h, h)),))


class Clip(Layer):
    """A block like open_clip's ResidualAttentionBlock."""

    def __init__(self, *how: bool) -> None:
        super().__init__(*how)
        self.ls = LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.ls(self.attend(y, y, y))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        h, gamma = self.ln_1(x), self.ls.gamma
        return Sums("pre", h, h, x, gamma, norms=((self.ln_2, x + gamma * y(h, h)),))


class Functional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + 0.3 * self.attend(y, y, y)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        h = self.ln_1(x)
        return Sums("pre", h, h, x, 0.3, norms=((self.ln_2, x + 0.3 * y(h, h)),))


class Parallel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        return x + self.attend(y, y, y) + self.mlp(y)  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        h = self.ln_1(x)
        return Sums("pre", h, h, x)


class Sandwich(Layer):
    def __init__(self, *how: bool) -> None:
        super().__init__(*how)
        self.after = randomize(nn.LayerNorm(D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.after(self.attend(y, y, y))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        h = self.ln_1(x)
        norms = ((self.ln_2, x + self.after(y(h, h))),)
        return Sums("pre", h, h, x, output_norm=self.after, norms=norms)


class Detr(Layer):
    """A block like DETR's: positions are added to queries and keys, norms are after sums."""

    def forward(self, x: Tensor) -> Tensor:
        q = x + places_like(x)
        x = self.ln_1(x + self.attend(q, q, x))
        return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        q = x + places_like(x)
        total = x + y(q, x)
        half = self.ln_1(total)
        return Sums("post", q, x, x, norms=((self.ln_1, total), (self.ln_2, half + self.mlp(half))))


class Residual(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return x + attend(x, x, x)


class Wrapped(Layer):
    """The sum is formed in one module and normalised in the one around it."""

    def __init__(self, *how: bool) -> None:
        super().__init__(*how)
        self.add = Residual(self._modules.pop("attn"))  # type: ignore[arg-type]

    @property
    def attn(self) -> Any:
        return self.add.attn

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(self.add(x, self.attend))
        return self.ln_2(x + self.mlp(x))  # type: ignore[no-any-return]

    def sums(self, x: Tensor, y: Callable[..., Tensor]) -> Sums:
        total = x + y(x, x)
        half = self.ln_1(total)
        return Sums("post", x, x, x, norms=((self.ln_1, total), (self.ln_2, half + self.mlp(half))))


def places_like(x: Tensor) -> Tensor:
    return 0.3 * torch.linspace(-1, 1, D).sin().expand_as(x)


def pairs(attention: Any, query: Tensor, value: Tensor) -> Tensor:
    """Returns what every pair adds to the output, [B, L, S, D]; keys are of the queries' tokens."""
    rows = zip(
        (query, query, value),
        attention.in_proj_weight.chunk(3),
        attention.in_proj_bias.chunk(3),
        strict=True,
    )
    q, k, v = (F.linear(*each).unflatten(-1, (H, -1)).transpose(1, 2) for each in rows)
    weights = (q @ k.mT / (D / H) ** 0.5).softmax(-1)
    return pair_vectors(weights, v, attention.out_proj.weight)


def assert_maps(recording: Recording, layer: Any, x: Tensor) -> None:
    """That the maps are those of the block step by step; x is items first."""
    (name,) = recording.names
    maps = recording[name]

    def attended(query: Tensor, value: Tensor) -> Tensor:
        return pairs(layer.attn, query, value).sum(2) + layer.attn.out_proj.bias

    own = layer.sums(x, attended)
    y = pairs(layer.attn, own.query, own.value)
    assert_close(maps.summed, y.norm(dim=-1), 1e-12, "summed")
    if own.output_norm is not None:
        y = through_norm(y, own.output_norm, attended(own.query, own.value))
    y = y * own.factor
    tokens = range(x.size(1))
    y[:, tokens, tokens] += own.residual
    assert recording.layers[name].block == own.block
    assert_close(maps.with_residual, y.norm(dim=-1), 1e-9, "with_residual")
    names = ["encoder"] if own.block == "pre" else ["with_norm", "encoder"]
    for map_, (norm, given) in zip(names, own.norms, strict=False):
        y = through_norm(y, norm, given)
        assert_close(getattr(maps, map_), y.norm(dim=-1), 1e-9, map_)
        mixed = y.diagonal(dim1=1, dim2=2).mT
        others = (y.sum(2) - mixed).norm(dim=-1)
        ratio = others / (others + mixed.norm(dim=-1))
        assert_close(maps.mixing_ratio[map_], ratio, 1e-9, f"mixing ratio of {map_}")
    assert (maps.encoder is None) == (len(own.norms) == 0)
    assert (maps.with_norm is None) == (own.block == "pre")


class Written(Layer):
    """A layer with a forward that the test writes."""

    def __init__(self, forward: Callable[..., Any], *how: bool, **parts: nn.Module) -> None:
        super().__init__(*how)
        self.written = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.written(self, *args)
