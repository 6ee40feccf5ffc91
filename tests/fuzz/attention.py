"""One call of the attention operators, forward and backward, and what must hold of it."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ikattn
from devices import DEVICE, IN_THE_INTERPRETER
from fuzz.draws import VALUES, Draws, numbers, uniform
from fuzz.holding import guarded, laid_out
from fuzz.laws import LAWS, WEIGHTS
from fuzz.tried import Tried
from samples import LAYOUTS, MASK_SHAPES

DTYPES = {"float32": 8, "float64": 4, "bfloat16": 5, "float16": 3}
GRADIENTS = ("query", "key", "value", "w1", "w2", "key_bias", "attn_mask")
PLAIN = next(iter(LAYOUTS))


@dataclass(frozen=True)
class AttentionCall:
    """Sizes are letters as in ``ikattn.ops.attention``; the rest are its options."""

    seed: int
    B: int = 1
    H: int = 1
    G: int = 1
    L: int = 1
    S: int = 1
    d: int = 1
    d_v: int = 1
    M: int = 1
    dtype: str = "float64"
    values: str = "exact"
    layouts: tuple[str, ...] = (PLAIN,) * 4  # of queries, keys, values, and what comes in
    causal: bool = False
    p: float | None = 2.0
    scale: float | None = None
    eps: float = 1e-5
    stationary: bool = False
    frequencies: str = "H"  # axes before [d, M]
    wide_sides: bool = False  # frequencies, bias and mask in float32 beside 16 bits
    bias: str | None = None
    mask: str | None = None
    mask_kind: str = "bool"
    dropout: float = 0.0
    gradients: tuple[str, ...] = ()
    batch_mode: bool = False
    medium: bool = False
    laws: tuple[str, ...] = ()

    @staticmethod
    def draw(seed: int) -> AttentionCall:
        r = Draws(seed)
        B, H = r.weighted({1: 6, 2: 4, 3: 1}), r.weighted({1: 4, 2: 4, 3: 1, 4: 2, 6: 1})
        if IN_THE_INTERPRETER:
            B, H = 1 + B // 3, min(H, 2)
        G = r.choice([x for x in range(1, H + 1) if H % x == 0])
        room = (40_000 if r.chance(8) else 6_000) // (B * H)
        longest = 40 if IN_THE_INTERPRETER else 1100
        L = r.size(1, min(room, longest))
        S = r.size(1, max(1, min(room // L, longest)))
        L, S = (S, L) if r.chance(2) else (L, S)
        if r.chance(50) and not IN_THE_INTERPRETER:  # sums of several parts of 1024 keys
            L, S = 1 + r.below(4), 1025 + r.below(1100)
        if r.chance(40):
            B, L, S = r.choice([(0, L, S), (B, 0, S), (B, L, 0)])
        d, M = r.size(1, 70), r.size(1, 33)
        d_v = 0 if r.chance(80) else r.size(1, 70)
        if r.chance(20):
            d, d_v, M = r.choice([(130, 5, 9), (8, 130, 8), (16, 16, 64), (3, 200, 70)])
        shares = (75, 9, 4, 2, 5, 5) if DEVICE == "cpu" else (75, 20, 0, 0, 5, 0)
        values = r.weighted(dict(zip(VALUES, shares, strict=True)))
        dtype = r.weighted(DTYPES)
        layouts = tuple(
            r.choice(list(LAYOUTS)) if r.chance(4) and min(B, L, S) else PLAIN for _ in range(4)
        )
        of_frequencies = ["H", "H", "BH", "1H"] + (["G", "BG", "1G"] if G < H else [])
        of_bias = ["S", "1", "HS", "1S", "H1", "BHS", "B1S", "111"]
        of_bias += ["GS", "BGS", "BG1"] if G < H else []
        call = AttentionCall(
            seed, B, H, G, L, S, d, d_v, M, dtype, values, layouts,
            causal=r.chance(3),
            p=r.weighted({2.0: 5, None: 2, 1.0: 2, 1.5: 1, 3.0: 1, 7.0: 1}),
            scale=r.choice([-0.3, 0.0, 0.5, 2.0]) if r.chance(6) else None,
            eps=r.weighted({1e-5: 6, 1e-3: 2, 0.5: 1, 1e-8: 1}),
            stationary=r.chance(4),
            frequencies=r.choice(of_frequencies),
            wide_sides=r.chance(2),
            bias=r.choice(of_bias) if r.chance(3) else None,
            mask=r.choice(MASK_SHAPES) if r.chance(3) else None,
            mask_kind=r.choice(["bool", "float", "float with -inf", "rows"]),
            dropout=r.choice([0.1, 0.5, 0.9]) if r.chance(8) and values != "special" else 0.0,
            gradients=tuple(x for x in GRADIENTS if r.chance(1.5)) if r.chance(1.5) else (),
            batch_mode=r.chance(8),
            medium=r.chance(16),
            laws=tuple(sorted({r.weighted(WEIGHTS) for _ in range(2 - IN_THE_INTERPRETER)})),
        )  # fmt: skip
        if (
            r.chance(100) and not IN_THE_INTERPRETER
        ):  # pairs enough for linear time, with one mask for all queries
            L, keys = 130 + r.below(400), r.choice([None, "1", "S", "111S"])
            sizes: dict[str, Any] = {"B": 1, "H": 1, "G": 1, "L": L, "d_v": 1 + r.below(16)}
            sizes |= {"S": L if call.causal else 500 + r.below(500), "M": 1 + r.below(6)}
            call = replace(call, **sizes, mask=keys, bias=None, frequencies="H", dropout=0.0)
        present = {
            "w2": not call.stationary,
            "key_bias": call.bias,
            "attn_mask": call.mask and call.mask_kind.startswith("float"),
        }
        return replace(call, gradients=tuple(x for x in call.gradients if present.get(x, True)))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def shape(self, letters: str) -> tuple[int, ...]:
        sizes = {"1": 1, "B": self.B, "H": self.H, "G": self.G, "L": self.L, "S": self.S}
        return tuple(sizes[letter] for letter in letters)

    def arguments(self) -> dict[str, Any]:
        """Makes the named arguments of ``ikattn.implicit_kernel_attention``."""
        is_wide = self.wide_sides and self.torch_dtype.itemsize < 4
        of_sides = torch.float32 if is_wide else self.torch_dtype
        count = iter(range(1, 100))

        def make(role: str, *shape: int, dtype: torch.dtype = self.torch_dtype) -> Tensor:
            number = next(count)
            x = numbers(self.values, role, self.seed + 16 * number, *shape)
            is_spoilt = self.values == "special" and number % 3 == self.seed % 3
            if is_spoilt and role != "frequency" and x.numel():
                place = int(uniform(self.seed + 7 * number, 1) * (x.numel() // max(1, shape[-1])))
                number_of_it = place * shape[-1] + (self.seed + number) % shape[-1]
                x.view(-1)[number_of_it] = (math.nan, math.inf, -math.inf)[self.seed % 3]
            limit = torch.finfo(dtype).max
            return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)

        tokens = [
            make("token", *self.shape("BHL"), self.d),
            make("token", *self.shape("BGS"), self.d),
            make("value", *self.shape("BGS"), self.d_v),
        ]
        query, key, value = (
            laid_out(x, layout) for x, layout in zip(tokens, self.layouts, strict=False)
        )
        of_w = (*self.shape(self.frequencies), self.d, self.M)
        w = [make("frequency", *of_w, dtype=of_sides) for _ in range(2)]
        bias = None if self.bias is None else make("bias", *self.shape(self.bias), dtype=of_sides)
        mask = None
        if self.mask is not None:
            shape = self.shape(self.mask)
            hidden = uniform(self.seed + 5, *shape) < 0.4
            if self.mask_kind == "rows":  # some see nothing, and some everything
                hidden = (uniform(self.seed + 5, *shape[:-1], 1) < 0.5).expand(shape).clone()
            mask = ~hidden
            if self.mask_kind.startswith("float"):
                mask = make("bias", *shape, dtype=of_sides)
                if self.mask_kind == "float with -inf":
                    lowest = -math.inf if self.seed % 4 else torch.finfo(of_sides).min
                    mask = mask.masked_fill(hidden, lowest)
        if bias is not None and self.seed % 3 == 0:
            bias = bias.masked_fill(uniform(self.seed + 6, *bias.shape) < 0.2, -math.inf)
        seed = torch.tensor([self.seed % 2**62, self.seed % 977])
        sides = (w[0], None if self.stationary else w[1], bias, mask)
        w1, w2, bias, mask = (None if x is None else guarded(x) for x in sides)
        return {
            "query": query, "key": key, "value": value, "w1": w1, "w2": w2, "p": self.p,
            "key_bias": bias, "attn_mask": mask, "is_causal": self.causal, "eps": self.eps,
            "enable_gqa": self.G != self.H, "magnitude_scale": self.scale,
            "dropout_p": self.dropout, "dropout_seed": seed if self.dropout else None,
        }  # fmt: skip

    def incoming(self) -> Tensor:
        kind = "exact" if self.values == "exact" else "normal"
        x = numbers(kind, "value", self.seed + 3, *self.shape("BHL"), self.d_v)
        return laid_out(x.to(self.torch_dtype), self.layouts[3])

    def cell(self) -> dict[str, Any]:
        """Names what is counted: routes with their instructions, type, mask and gradients."""
        own = {"dtype": self.dtype, "gradients": self.gradients or "none"}
        own["mask"] = ("none" if self.mask is None else self.mask_kind) + ", causal" * self.causal
        if DEVICE != "cpu":
            return {"device": f"{DEVICE} {os.environ.get('IKATTN_KERNELS', '')}"} | own
        with self.modes():
            forward, backward = ikattn.which_kernels(**self.arguments())
        used = [forward, backward] if self.gradients else [forward]
        return {
            "forward": forward.algorithm,
            "backward": backward.algorithm if self.gradients else "none",
            "instructions": sorted({x.unit for x in used}),
            **own,
        }

    def modes(self) -> contextlib.AbstractContextManager[Any]:
        torch.set_float32_matmul_precision("medium" if self.medium else "highest")
        return ikattn.deterministic("batch" if self.batch_mode else "run")

    def check(self) -> None:
        with self.modes():
            tried = Tried(self)
            tried.check()
            for law in self.laws:
                LAWS[law](tried)
