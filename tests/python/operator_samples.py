"""Sample inputs of the attention operators that all tests share, and the rule for their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Options = dict[str, Any]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """Sizes and options of one call; ``options(sample)`` makes them, tensors in float64."""

    name: str
    B: int = 2
    H: int = 4
    G: int = 4
    L: int = 9
    S: int = 11
    d: int = 16
    d_v: int = 16
    M: int = 32
    frequency_heads: int | None = None
    batched_frequencies: bool = False
    stationary: bool = False
    layout: str = "contiguous"
    options: Callable[[Sample], Options] = field(default=lambda sample: {})

    def tokens(self, heads: int, length: int, size: int) -> Tensor:
        """[B, heads, length, size], laid out in memory as `layout` says."""
        if self.layout == "transposed":
            return torch.randn(self.B, length, heads, size, dtype=torch.float64).transpose(1, 2)
        if self.layout == "strided":
            wide = torch.randn(self.B, heads, 2 * length, 3 * size, dtype=torch.float64)
            return wide[:, :, ::2, ::3]
        if self.layout == "expanded":
            one = torch.randn(1, heads, length, size, dtype=torch.float64)
            return one.expand(self.B, -1, -1, -1)
        return torch.randn(self.B, heads, length, size, dtype=torch.float64)

    def make(self, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Options]:
        """query, key, value, w1 (and w2), all leaves with gradients, and the options."""
        torch.manual_seed(sum(map(ord, self.name)))
        heads = self.frequency_heads or self.H
        shape = (self.B,) * self.batched_frequencies + (heads, self.d, self.M)
        tensors = [
            self.tokens(self.H, self.L, self.d),
            self.tokens(self.G, self.S, self.d),
            self.tokens(self.G, self.S, self.d_v),
            0.1 * torch.randn(shape, dtype=torch.float64),
        ]
        if not self.stationary:
            tensors.append(0.1 * torch.randn(shape, dtype=torch.float64))
        options = {"enable_gqa": self.G != self.H, **self.options(self)}
        cast = {
            name: _leaf(value, dtype) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        return [_leaf(tensor, dtype) for tensor in tensors], cast


def _leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype).detach().requires_grad_()


def options(**given: Any) -> Callable[[Sample], Options]:
    return lambda sample: given


def mask(*axes: str, kind: str = "bool") -> Callable[[Sample], Options]:
    """A mask whose axes are those named; the others are broadcast."""

    def make(sample: Sample) -> Options:
        shape = [getattr(sample, axis) if axis in axes else 1 for axis in "BHLS"]
        if kind == "float":
            return {"attn_mask": torch.randn(shape, dtype=torch.float64)}
        return {"attn_mask": torch.rand(shape) > 0.3}

    return make


def bias(shape: Callable[[Sample], Sequence[int]]) -> Callable[[Sample], Options]:
    return lambda sample: {"key_bias": torch.randn(tuple(shape(sample)), dtype=torch.float64)}


def both(*makers: Callable[[Sample], Options]) -> Callable[[Sample], Options]:
    return lambda sample: {k: v for make in makers for k, v in make(sample).items()}


SEED = torch.tensor([2**40 + 17, 3])
SAMPLES = [
    Sample("smallest", B=1, H=1, G=1, L=1, S=2, d=1, d_v=1, M=1),
    Sample("two of all", B=2, H=2, G=2, L=2, S=2, d=2, d_v=2, M=2),
    Sample("odd sizes", L=13, S=7, d=7, d_v=5, M=5),
    Sample("below a tile", L=63, S=63, d=63, d_v=63, M=31),
    Sample("one tile", B=1, H=2, G=2, L=64, S=64, d=64, d_v=64, M=64),
    Sample("above a tile", B=1, L=65, S=65, d=65, d_v=65, M=33),
    Sample("several tiles", B=1, H=2, G=2, L=193, S=129, d=40, d_v=70, M=64),
    Sample("many keys", B=1, H=1, G=1, L=5, S=700, d=8, d_v=130, M=100),
    Sample("stationary", stationary=True, L=66, S=70, d=8, d_v=8),
    Sample("transposed", layout="transposed", L=20, S=30),
    Sample("strided", layout="strided", L=20, S=30),
    Sample("expanded", layout="expanded", L=20, S=30),
    Sample("causal", L=130, S=130, options=options(is_causal=True)),
    Sample("causal, more keys", L=33, S=90, options=options(is_causal=True)),
    Sample("causal, more queries", L=90, S=33, options=options(is_causal=True)),
    Sample("bool mask", L=70, S=90, options=mask("B", "H", "L", "S")),
    Sample("padding mask", L=70, S=90, options=mask("B", "S")),
    Sample("mask of rows", L=20, S=30, options=mask("H", "L")),
    Sample("causal and mask", L=70, S=70, options=both(options(is_causal=True), mask("B", "S"))),
    Sample("float mask", L=70, S=90, options=mask("B", "H", "L", "S", kind="float")),
    Sample("float mask of heads", L=20, S=70, options=mask("H", "L", "S", kind="float")),
    Sample("float mask of all", L=70, S=20, options=mask("L", "S", kind="float")),
    Sample("float mask of keys", L=20, S=70, options=mask("S", kind="float")),
    Sample(
        "float mask of batches, causal",
        L=70,
        S=70,
        options=both(options(is_causal=True), mask("B", "L", "S", kind="float")),
    ),
    Sample("bias of keys", L=20, S=70, options=bias(lambda s: (s.S,))),
    Sample("bias of batch and keys", L=20, S=70, options=bias(lambda s: (s.B, 1, s.S))),
    Sample("bias of heads", L=20, S=70, options=bias(lambda s: (s.H, s.S))),
    Sample("groups", G=2, L=20, S=70),
    Sample("groups with their frequencies", G=2, frequency_heads=2, L=20, S=70),
    Sample("one group, causal", G=1, L=70, S=70, options=options(is_causal=True)),
    Sample(
        "groups, bias of query heads",
        G=2,
        frequency_heads=2,
        L=20,
        S=70,
        options=bias(lambda s: (s.B, s.H, s.S)),
    ),
    Sample("groups, bias of groups", G=2, L=20, S=70, options=bias(lambda s: (s.G, s.S))),
    Sample(
        "groups, float mask",
        G=2,
        frequency_heads=2,
        L=70,
        S=70,
        options=mask("L", "S", kind="float"),
    ),
    Sample("frequencies of samples", batched_frequencies=True, L=20, S=70),
    Sample("no magnitude", L=20, S=30, options=options(p=None)),
    Sample("p 1", L=20, S=30, options=options(p=1.0)),
    Sample("p 1.5", L=20, S=30, options=options(p=1.5)),
    Sample("p 1.8", L=20, S=30, options=options(p=1.8)),
    Sample("p 3", L=20, S=30, options=options(p=3.0)),
    Sample("p 7, causal", L=70, S=70, options=options(p=7.0, is_causal=True)),
    Sample("other constants", L=20, S=30, options=options(eps=0.3, magnitude_scale=-0.2)),
    Sample("dropout", L=70, S=90, options=options(dropout_p=0.3, dropout_seed=SEED)),
    Sample(
        "dropout, causal, mask",
        L=70,
        S=70,
        options=both(
            options(dropout_p=0.5, dropout_seed=SEED, is_causal=True),
            mask("B", "H", "L", "S", kind="float"),
        ),
    ),
]


def widened(tensors: list[Tensor], opts: Options) -> tuple[list[Tensor], Options]:
    """The same numbers in float64."""

    def widen(value: Any) -> Any:
        wants = isinstance(value, Tensor) and value.requires_grad
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(wants)
        return value

    wide = {name: widen(value) for name, value in opts.items()}
    return [_leaf(tensor, torch.float64) for tensor in tensors], wide


def differentiable(tensors: list[Tensor], opts: Options) -> list[Tensor]:
    return tensors + [v for v in opts.values() if isinstance(v, Tensor) and v.requires_grad]


def error(result: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    if truth.numel() == 0:
        return 0.0
    scale = max(truth.abs().max().item(), 1e-2)
    return (result.double() - truth).abs().max().item() / scale


def assert_error_within(factor: float, result: Tensor, plain: Tensor, truth: Tensor) -> None:
    """The rule: at most `factor` times the error of the plain composition at the same precision.

    A composition that happens to be exact is granted a few roundings, of the arithmetic and, beside
    it, of the storage type.
    """
    assert result.shape == truth.shape
    assert result.dtype == plain.dtype
    arithmetic = torch.float64 if result.dtype == torch.float64 else torch.float32
    floor = 16 * torch.finfo(arithmetic).eps + 0.5 * torch.finfo(result.dtype).eps
    if result.dtype == torch.float64:
        floor = 2e-13  # truth is no better than this itself
    assert error(result, truth) <= factor * max(error(plain, truth), floor)
