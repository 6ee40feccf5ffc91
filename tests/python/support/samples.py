"""The calls every test of the operators shares: one list of shapes, layouts and options.

Symbols as in ``ikattn.ops``: B batch, H query heads, G key/value heads, L queries, S keys, d and
d_v head sizes, M frequencies. Shapes are written in these letters: ``"1H1S"`` is a mask
[1, H, 1, S].
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]

# The arguments that may have a gradient, in the order of the operator.
DIFFERENTIABLE = ("query", "key", "value", "w1", "w2", "key_bias", "attn_mask")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _strided(x: Tensor) -> Tensor:
    """Every second element of every axis, NaN between."""
    wide = x.new_full([2 * size for size in x.shape], torch.nan)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    return view.copy_(x)


def _unaligned(x: Tensor) -> Tensor:
    """One element off the start of an allocation, NaN before and after."""
    wide = x.new_full((x.numel() + 2,), torch.nan)
    return wide[1:-1].view(x.shape).copy_(x)


def _heads_inside(x: Tensor) -> Tensor:
    """[B, H, L, d] in memory as [B, L, H, d], as a projection leaves it."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x


def _expanded(axis: int) -> Callable[[Tensor], Tensor]:
    """The first entry of an axis for all of it, with stride 0."""

    def lay_out(x: Tensor) -> Tensor:
        if x.dim() < -axis or x.shape[axis] == 0:
            return x
        return x.narrow(axis, 0, 1).expand(x.shape)

    return lay_out


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads inside": _heads_inside,
    "columns": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "strided": _strided,
    "unaligned": _unaligned,
    "expanded batch": _expanded(-4),
    "expanded heads": _expanded(-3),
    "expanded tokens": _expanded(-2),
    "expanded columns": _expanded(-1),
    "negated": lambda x: torch._neg_view(-x),
}


@dataclass(frozen=True)
class Sample:
    """One call. Numbers are drawn from the name, the same for every dtype but for rounding."""

    name: str
    B: int = 2
    H: int = 2
    G: int | None = None  # None: H
    L: int = 5
    S: int = 7
    d: int = 8
    d_v: int = 6
    M: int = 5
    p: float | None = 2.0
    eps: float = 1e-5
    magnitude_scale: float | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    stationary: bool = False
    frequencies: str = "H"  # axes before [d, M]
    key_bias: str | None = None
    mask: str | None = None
    mask_kind: str = "bool"  # or "float", or "float with -inf"
    float32_sides: bool = False  # frequencies, bias and mask in float32 beside a lower precision
    layout: str = "contiguous"
    zero_keys: bool = False  # some keys, and coordinates of others, exactly 0

    def shape(self, letters: str) -> tuple[int, ...]:
        """``"B1LS"`` -> (B, 1, L, S)."""
        groups = self.H if self.G is None else self.G
        sizes = {"1": 1, "B": self.B, "H": self.H, "G": groups, "L": self.L, "S": self.S}
        return tuple(sizes[letter] for letter in letters)

    def arguments(self, dtype: torch.dtype = torch.float64) -> Arguments:
        """Keyword arguments of ``ikattn.implicit_kernel_attention``, the same at every call."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        side_dtype = torch.float32 if self.float32_sides and dtype.itemsize < 4 else dtype

        def draw(shape: tuple[int, ...], scale: float, as_dtype: torch.dtype = dtype) -> Tensor:
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
            return LAYOUTS[self.layout]((scale * numbers).to(as_dtype))

        query = draw((*self.shape("BHL"), self.d), 1.0)
        key = draw((*self.shape("BGS"), self.d), 1.0)
        value = draw((*self.shape("BGS"), self.d_v), 1.0)
        if self.zero_keys:
            key[..., ::3, :] = 0
            key[..., 1::3, ::2] = 0
        frequency_shape = (*self.shape(self.frequencies), self.d, self.M)
        w1, w2 = (draw(frequency_shape, 0.3 / self.d**0.5, side_dtype) for _ in range(2))
        key_bias = None if self.key_bias is None else draw(self.shape(self.key_bias), 1, side_dtype)
        attn_mask = None
        if self.mask is not None:
            attn_mask = draw(self.shape(self.mask), 1.0, side_dtype)
            hidden = draw(self.shape(self.mask), 1.0) > 0.6
            if self.mask_kind == "bool":
                attn_mask = ~hidden
            elif self.mask_kind == "float with -inf":
                attn_mask = attn_mask.masked_fill(hidden, -torch.inf)
        seed = torch.randint(2**62, (2,), generator=generator) if self.dropout_p > 0 else None
        return {
            "query": query,
            "key": key,
            "value": value,
            "w1": w1,
            "w2": None if self.stationary else w2,
            "p": self.p,
            "key_bias": key_bias,
            "attn_mask": attn_mask,
            "dropout_p": self.dropout_p,
            "is_causal": self.is_causal,
            "enable_gqa": self.G is not None,
            "eps": self.eps,
            "magnitude_scale": self.magnitude_scale,
            "dropout_seed": seed,
        }


# Lengths around the tiles of the kernels (16, 64, 128, 192) and around nothing.
EDGES = (
    *((1, 1), (2, 1), (1, 2), (2, 2), (1, 65), (130, 1), (15, 17)),
    *((63, 64), (64, 65), (65, 63), (127, 129), (129, 127), (191, 193), (192, 191), (193, 192)),
)

MASK_SHAPES = (
    *("".join(axes) for axes in itertools.product("B1", "H1", "L1", "S1")),
    *("HLS", "LS", "1S", "L1", "S", "1"),
)


def _edge_samples() -> list[Sample]:
    return [
        Sample(f"{L} queries, {S} keys{name}", B=1, L=L, S=S, **options)
        for L, S in EDGES
        for name, options in (
            ("", {"M": 33}),
            (", causal", {"is_causal": True}),
            (", causal, masked", {"is_causal": True, "mask": "HLS", "mask_kind": "float"}),
            (", bool mask", {"mask": "LS"}),
        )
    ]


def _mask_samples() -> list[Sample]:
    # Rows of 72 numbers begin at multiples of 16 bytes, as Hopper's own kernels want float masks.
    return [
        Sample(f"{kind} mask {shape}", B=2, H=3, L=66, S=S, mask=shape, mask_kind=kind)
        for shape in MASK_SHAPES
        for kind, S in (("bool", 70), ("float", 72), ("float with -inf", 70))
    ]


def _size_samples() -> list[Sample]:
    sizes = (
        *((1, 3, 5), (2, 2, 2), (8, 8, 1), (40, 24, 32), (63, 63, 31), (64, 64, 64), (64, 65, 33)),
        *((65, 65, 33), (70, 1, 5), (8, 130, 5)),
        *((9, 8, M) for M in (4, 7, 8, 9, 16, 17, 40)),  # around vectors and halves of them
    )
    return [
        Sample(f"d {d}, d_v {d_v}, M {M}{name}", L=17, S=19, d=d, d_v=d_v, M=M, **options)
        for d, d_v, M in sizes
        for name, options in (("", {}), (", stationary", {"stationary": True}))
    ]


def _empty_samples() -> list[Sample]:
    extras: Arguments = {"key_bias": "BHS", "mask": "BHLS", "mask_kind": "float"}
    return [
        Sample("empty batch", B=0, **extras),
        Sample("no queries", L=0, **extras),
        Sample("no keys", S=0, **extras),
        Sample("no keys, causal", S=0, is_causal=True),
        Sample("no queries, no keys", L=0, S=0, **extras),
        Sample("empty values", d_v=0, **extras),
    ]


def _magnitude_samples() -> list[Sample]:
    return [
        Sample(f"p = {p}{name}", p=p, **options)
        for p in (None, 1.0, 1.5, 1.8, 2.0, 3.0, 7.0)
        for name, options in (
            ("", {"d": 13}),
            (", zero keys", {"zero_keys": True}),
            (", own scale", {"magnitude_scale": -0.3, "eps": 1e-3}),
        )
    ]


def _group_samples() -> list[Sample]:
    frequency_forms = ("H", "G", "BH", "BG", "1H", "1G")
    bias_shapes = ("S", "1", "HS", "GS", "1S", "H1", "BHS", "BGS", "B1S", "BH1", "BG1", "111")
    heads: Arguments = {"H": 6, "G": 2, "L": 20, "S": 67}
    forms = [
        Sample(f"6 of 2 heads, w [{form}]", frequencies=form, **heads) for form in frequency_forms
    ]
    forms += [
        Sample(f"6 of 2 heads, w [{form}], bias [{bias}]", frequencies=form, key_bias=bias, **heads)
        for bias in bias_shapes
        for form in ("H", "BG")
    ]
    return [
        *forms,
        Sample("4 of 1 head, stationary", H=4, G=1, stationary=True, frequencies="G"),
        Sample("6 of 2 heads, dropout, mask", dropout_p=0.3, mask="1HLS", frequencies="G", **heads),
        Sample("6 of 2 heads, causal", is_causal=True, frequencies="G", **heads),
        Sample("6 of 2 heads, mask [1]", mask="1", mask_kind="float", frequencies="G", **heads),
        Sample("6 of 2 heads, mask [L1]", mask="L1", mask_kind="float", frequencies="G", **heads),
        Sample("w [BH], ungrouped", frequencies="BH"),
        Sample("w [1H], ungrouped, stationary", frequencies="1H", stationary=True),
        Sample("bias [HS], ungrouped, causal", key_bias="HS", is_causal=True),
    ]


def _layout_samples() -> list[Sample]:
    extras: Arguments = {"key_bias": "BHS", "mask": "BHLS", "mask_kind": "float", "H": 3}
    return [
        Sample(f"layout: {layout}", layout=layout, L=19, S=21, **extras)
        for layout in LAYOUTS
        if layout != "contiguous"
    ]


def _mixed_samples() -> list[Sample]:
    return [
        Sample(
            "float32 beside lower precision",
            float32_sides=True,
            key_bias="BHS",
            mask="LS",
            mask_kind="float",
        ),
        Sample("smallest", B=1, H=1, L=1, S=2, d=1, d_v=1, M=1),
        Sample("tiles of every size in part", B=1, L=193, S=129, d=40, d_v=70, M=64),
        Sample("values of half a vector", B=1, H=4, G=2, L=70, S=193, d=8, d_v=8, M=8),
        Sample("values of half a vector, causal", B=1, L=131, S=131, d_v=5, is_causal=True),
        # of half a vector with AVX2, and without either
        Sample("three values", B=1, H=4, G=2, L=70, S=193, d_v=3, M=8, frequencies="G"),
        Sample("one value, causal", B=1, L=131, S=131, d_v=1, is_causal=True),
        *(
            Sample(
                f"{name}, dropout, mask",
                B=1,
                L=40,
                S=99,
                d_v=d_v,
                dropout_p=0.3,
                mask="BHLS",
                mask_kind="float with -inf",
            )
            for name, d_v in (("values of half a vector", 7), ("one value", 1))
        ),
        Sample("few queries, many keys", B=1, H=1, L=5, S=700, d_v=130, M=100),
        Sample("above a tile, stationary", L=66, S=70, stationary=True),
        Sample("causal, padding mask", L=70, S=70, is_causal=True, mask="B11S"),
        Sample("one head, long", B=1, H=1, L=530, S=601, d=16),
        Sample("one head, long, causal, grouped", B=1, H=2, G=1, L=601, S=530, is_causal=True),
        Sample("more heads than one pass of the backward", B=20, H=4, L=3, S=4, d=130, M=70),
        Sample("dropout 0.1", L=70, S=66, dropout_p=0.1),
        Sample("dropout 0.5, causal", L=33, S=47, dropout_p=0.5, is_causal=True),
        Sample(
            "above a tile, dropout 0.5, causal, float mask",
            L=70,
            S=70,
            dropout_p=0.5,
            is_causal=True,
            mask="BHLS",
            mask_kind="float",
        ),
        Sample("dropout 0.9, float mask", dropout_p=0.9, mask="B1LS", mask_kind="float"),
        Sample(
            "everything at once",
            *(2, 4, 2, 37, 41, 24, 40, 33),
            p=3.0,
            is_causal=True,
            dropout_p=0.25,
            frequencies="BH",
            key_bias="BGS",
            mask="B1LS",
            mask_kind="float with -inf",
            layout="heads inside",
            float32_sides=True,
        ),
    ]


SAMPLES: tuple[Sample, ...] = (
    *_edge_samples(),
    *_mask_samples(),
    *_size_samples(),
    *_empty_samples(),
    *_magnitude_samples(),
    *_group_samples(),
    *_layout_samples(),
    *_mixed_samples(),
)
_OF_SAMPLES = {sample.name: sample for sample in SAMPLES}

# A slice of the list, for tests that cost more than a call: every option occurs, sizes are small.
FEW: tuple[Sample, ...] = tuple(
    _OF_SAMPLES[name]
    for name in (
        "2 queries, 1 keys",
        "15 queries, 17 keys, causal, masked",
        "p = 1.8, zero keys",
        "p = None",
        "p = 3.0, own scale",
        "6 of 2 heads, w [H], bias [BGS]",
        "6 of 2 heads, mask [L1]",
        "w [1H], ungrouped, stationary",
        "layout: heads inside",
        "dropout 0.9, float mask",
        "everything at once",
    )
)

# Calls small enough to be differentiated number by number, twice.
_TINY_SIZES: Arguments = {"B": 2, "H": 2, "L": 3, "S": 4, "d": 3, "d_v": 2, "M": 2}
TINY: tuple[Sample, ...] = tuple(
    Sample(f"tiny, {name}", **(_TINY_SIZES | options))
    for name, options in {
        "plain": {},
        "stationary, no magnitude": {"stationary": True, "p": None},
        "causal, p = 3": {"is_causal": True, "p": 3.0},
        "bias [BHS], mask [B1LS], p = 1.8": {
            "key_bias": "BHS",
            "mask": "B1LS",
            "mask_kind": "float",
            "p": 1.8,
        },
        "bool mask with empty rows": {"mask": "BHL1"},
        "grouped, w [G], bias [1S]": {"G": 1, "frequencies": "G", "key_bias": "1S"},
        "grouped, w [BH]": {"G": 1, "frequencies": "BH"},
        "dropout, causal, mask [L1]": {
            "dropout_p": 0.4,
            "is_causal": True,
            "mask": "L1",
            "mask_kind": "float",
        },
        "one query, one key": {"L": 1, "S": 1},
    }.items()
)

BY_NAME = _OF_SAMPLES | {sample.name: sample for sample in TINY}


def name_of(parameter: Any) -> str | None:
    """The id of a test's parameter."""
    if isinstance(parameter, Sample):
        return parameter.name
    if isinstance(parameter, torch.dtype):
        return str(parameter).removeprefix("torch.")
    return getattr(parameter, "__name__", None)


def differentiable(arguments: Arguments) -> list[str]:
    return [
        name
        for name in DIFFERENTIABLE
        if arguments.get(name) is not None and arguments[name].is_floating_point()
    ]


def with_gradients(arguments: Arguments, names: list[str] | None = None) -> Arguments:
    """Returns the call on leaves that require a gradient (all that can, unless names are given)."""
    wanted = differentiable(arguments) if names is None else names
    return arguments | {name: arguments[name].detach().requires_grad_() for name in wanted}


def converted(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return arguments | {name: arguments[name].to(dtype) for name in differentiable(arguments)}


def of_weights(arguments: Arguments) -> Arguments:
    """Returns the call for ``ikattn.implicit_kernel_weights``."""
    return {name: argument for name, argument in arguments.items() if name != "value"}


def of_features(arguments: Arguments) -> Arguments:
    """The call of ``ikattn.ops.spectral_features`` on the queries of a call."""
    return {"x": arguments["query"], "w1": arguments["w1"], "w2": arguments["w2"]}
