"""Sequences of what one does with kept keys, held to attention over the list of all tokens."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ikattn
from fuzz.condition import Arithmetic, Attention, arithmetic_of, of_heads
from fuzz.draws import Draws, integers, numbers, uniform
from fuzz.holding import Wrong, assert_bounded

STEPS = {
    "features": {"add": 8, "attend": 8, "crop": 3, "reorder": 1, "copy": 2, "save": 1},
    "recurrent": {"add": 6, "attend": 6, "extend": 4, "reorder": 1}
    | {"copy": 2, "save": 2, "merge": 2},
    "moments": {"add": 3},
}


@dataclass(frozen=True)
class StateCall:
    """A state, and steps with a number each: of tokens, or what it is drawn from."""

    seed: int
    form: str = "features"
    B: int = 1
    H: int = 1
    G: int = 1
    d: int = 1
    d_v: int = 1
    M: int = 1
    dtype: str = "float64"
    sums: str = "float64"
    values: str = "exact"
    p: float | None = 2.0
    scale: float | None = None
    eps: float = 1e-5
    stationary: bool = False
    by_group: bool = False  # frequencies of G heads
    causal: bool = False  # of "moments"
    steps: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def draw(seed: int) -> StateCall:
        r = Draws(seed)
        form = r.weighted({"features": 4, "recurrent": 4, "moments": 3})
        H = r.choice([1, 2, 2, 3, 4])
        G = r.choice([x for x in range(1, H + 1) if H % x == 0])
        drawn = [r.weighted(STEPS[form]) for _ in range(2 + r.below(6))]
        steps = []
        for name in ["add", *drawn, "attend"]:
            most = 20 if name not in ("add", "extend") or r.chance(1.1) else r.choice([300, 1100])
            steps.append((name, r.size(1, most) if name != "reorder" else r.below(99)))
        return StateCall(
            seed, form, r.choice([1, 1, 2, 3]), H, G, r.size(1, 20),
            *((r.size(0, 5), 33) if r.chance(20) else (r.size(0, 130), r.size(1, 9))),
            r.weighted({"float32": 5, "float64": 4, "bfloat16": 2, "float16": 1}),
            r.weighted({"float64": 3, "float32": 1}),
            r.weighted({"exact": 6, "normal": 2, "adversarial": 2}),
            r.weighted({2.0: 4, None: 2, 1.0: 1, 3.0: 1}), r.choice([None, None, 2.0]),
            r.choice([1e-5, 1e-3]), r.chance(4), G < H and r.chance(2), r.chance(2), tuple(steps),
        )  # fmt: skip

    def cell(self) -> dict[str, Any]:
        sums = {"sums": self.sums} if self.form == "recurrent" else {}
        return {"form": self.form, "dtype": self.dtype, **sums}

    def check(self) -> None:
        machine = Machine(self)
        if self.form == "moments":
            return machine.check_moments()
        for number, (name, size) in enumerate(self.steps):
            getattr(machine, name)(number, size)
        return None


class Machine:
    """A state beside the tokens that it should hold."""

    def __init__(self, call: StateCall) -> None:
        self.call, self.dtype, self.B = call, getattr(torch, call.dtype), call.B
        heads = call.G if call.by_group else call.H
        wide = torch.float64 if call.dtype == "float64" else torch.float32
        w = [self.draw("frequency", i, heads, call.d, call.M).to(wide) for i in (1, 2)]
        self.kernel: dict[str, Any] = {"p": call.p, "magnitude_scale": call.scale}
        self.w1, self.w2 = w[0], None if call.stationary else w[1]
        self.spoils = call.seed % 3 == 0 and call.form != "moments"  # hidden keys are NaN
        self.state = self.fresh()
        # A token's bias is given when it is added to a recurrent state.
        self.k, self.v = (
            torch.zeros(self.B, call.G, 0, n, dtype=self.dtype) for n in (call.d, call.d_v)
        )
        self.bias = torch.zeros(self.B, call.G, 0, dtype=self.dtype)

    def fresh(self) -> Any:
        if self.call.form == "features":
            return ikattn.KeyFeatures(self.w1, self.w2, **self.kernel)
        return ikattn.RecurrentState(
            self.w1, self.w2, **self.kernel, dtype=getattr(torch, self.call.sums)
        )

    def draw(self, role: str, number: int, *shape: int) -> Tensor:
        return numbers(
            self.call.values, role, self.call.seed + 1000 * number + len(role), *shape
        ).to(self.dtype)

    def tokens(self, number: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        call = self.call
        k, v = (
            self.draw("token", number, self.B, call.G, count, call.d),
            self.draw("value", number, self.B, call.G, count, call.d_v),
        )
        bias = self.draw("bias", number, self.B, call.G, count)
        hidden = uniform(call.seed + 31 * number, self.B, call.G, count) < 0.2
        if self.spoils:
            k, v = (x.masked_fill(hidden.unsqueeze(-1), math.nan) for x in (k, v))
        return k, v, bias.masked_fill(hidden, -math.inf)

    def arithmetic(self) -> Arithmetic:
        call = self.call
        if call.form == "features":
            return arithmetic_of(self.dtype)
        made = arithmetic_of(self.dtype, linear=True)
        unit = 2.0**-53 if call.sums == "float64" else made.unit * (4 + len(call.steps))
        return replace(
            made, unit=max(unit, 2.0**-53), stored=max(made.stored, torch.finfo(self.dtype).eps / 2)
        )

    def truth(self, query: Tensor, **others: Any) -> Attention:
        call = {"query": query, "key": self.k, "value": self.v, "eps": self.call.eps}
        call |= {"w1": self.w1, "w2": self.w2} | self.kernel
        return Attention(call | others, self.arithmetic())

    def grow(self, k: Tensor, v: Tensor, bias: Tensor) -> None:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.bias = torch.cat([self.bias, bias], 2)

    # --- Steps

    def add(self, number: int, count: int) -> None:
        k, v, bias = self.tokens(number, count)
        if isinstance(self.state, ikattn.KeyFeatures):
            self.state.append(k)
        else:
            self.state.update(k, v, bias)
        self.grow(k, v, bias)

    def attend(self, number: int, rows: int) -> None:
        if self.k.shape[2] == 0 and not len(self.state):
            return None
        call, S = self.call, self.k.shape[2]
        rows = min(rows, 20)
        query = self.draw("token", 100 + number, self.B, call.H, rows, call.d)
        if isinstance(self.state, ikattn.RecurrentState):
            found = self.state.attend(query, eps=call.eps)
            return assert_bounded("attend", found, self.truth(query, key_bias=self.bias).output)
        bias = self.bias if number % 2 or self.spoils else None
        mask, kind = None, (call.seed + number) % 4
        if kind == 1:
            mask = uniform(call.seed + number, rows, S) < 0.7
        elif kind == 2:
            mask = self.draw("bias", 200 + number, self.B, 1, rows, S)
            if self.spoils:
                hidden = (self.bias == -math.inf).all(1)[:, None, None]
                mask = mask.masked_fill(hidden, math.nan)
        lower_right = kind == 3 and rows <= S
        options = {"key_bias": bias, "attn_mask": mask, "eps": call.eps}
        found = self.state.attend(query, self.v, causal_lower_right=lower_right, **options)
        seen = torch.ones(rows, S, dtype=torch.bool).tril(S - rows) if lower_right else mask
        assert_bounded("attend", found, self.truth(query, key_bias=bias, attn_mask=seen).output)
        return None

    def extend(self, number: int, count: int) -> None:
        before = self.k.shape[2]
        k, v, bias = self.tokens(number, count)
        query = self.draw("token", 100 + number, self.B, self.call.H, count, self.call.d)
        found = self.state.extend(query, k, v, bias, eps=self.call.eps)
        self.grow(k, v, bias)
        seen = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        assert_bounded(
            "extend", found, self.truth(query, key_bias=self.bias, attn_mask=seen).output
        )

    def crop(self, number: int, size: int) -> None:
        length = self.k.shape[2] * (size % 4) // 4
        if not len(self.state):
            return
        self.state.crop(length)
        self.k, self.v, self.bias = (x[:, :, :length] for x in (self.k, self.v, self.bias))

    def reorder(self, number: int, size: int) -> None:
        order = integers(self.call.seed + number, 0, self.B - 1, 1 + size % 3).long()
        is_features = isinstance(self.state, ikattn.KeyFeatures)
        (self.state.select if is_features else self.state.reorder)(order)
        self.k, self.v, self.bias = (x[order] for x in (self.k, self.v, self.bias))
        self.B = len(order)

    def copy(self, number: int, size: int) -> None:
        """Goes on with a copy, after the other one has taken another way."""
        other = self.state
        self.state = copy.deepcopy(other) if size % 2 else copy.copy(other)
        self.spoil(other, number)

    def spoil(self, other: Any, number: int) -> None:
        if isinstance(other, ikattn.KeyFeatures):
            other.crop(len(other) // 2)
        k, v, bias = self.tokens(number + 500, 3)
        if isinstance(other, ikattn.KeyFeatures):
            other.append(3 * k)
        else:
            other.update(3 * k, v, bias)

    def save(self, number: int, size: int) -> None:
        if isinstance(self.state, ikattn.RecurrentState) and size % 2:
            stored, other = self.state.state_dict(), self.state
            self.state = self.fresh()
            self.state.load_state_dict(stored)
            third = self.fresh()
            third.load_state_dict(stored)
            self.spoil(other, number)
            self.spoil(third, number)
            return
        file = io.BytesIO()
        torch.save(self.state, file)
        file.seek(0)
        self.state = torch.load(file, weights_only=False)

    def merge(self, number: int, count: int) -> None:
        other = self.fresh()
        k, v, bias = self.tokens(number, count)
        other.update(k, v, bias)
        self.state.merge(other)
        self.grow(k, v, bias)
        if len(self.state) != self.k.shape[2]:
            raise Wrong(f"{len(self.state)} keys, of {self.k.shape[2]} that came")

    # --- The operators below, with their gradients

    def check_moments(self) -> None:
        """Checks attention by moments of features, in parts, and gradients through all of it."""
        call = self.call
        wide = torch.promote_types(self.dtype, torch.float32)
        for number, (_, count) in enumerate(call.steps):
            self.grow(*self.tokens(number, count))
        S = self.k.shape[2]
        rows = S if call.causal else min(S, 33)
        query = self.draw("token", 100, self.B, call.H, rows, call.d)
        # A key's gradient is a sum of two, whose parts may leave float16.
        given = {"query": query, "key": self.k.to(wide), "value": self.v, "key_bias": self.bias}
        given = {
            x: y.detach().clone().requires_grad_() for x, y in (given | {"w1": self.w1}).items()
        }
        heads = call.G if call.by_group else call.H  # those of the moments
        w_k = (given["w1"], self.w2)
        w_q = tuple(None if x is None else of_heads(x, 0, call.H) for x in (given["w1"], self.w2))
        phi_q = ikattn.ops.spectral_features(given["query"].to(wide), *w_q)
        phi_k = ikattn.ops.spectral_features(of_heads(given["key"].to(wide), 1, heads), *w_k)
        scale = 1 / (2 * math.sqrt(call.d)) if call.scale is None else call.scale
        key = given["key"].double()
        norm = torch.zeros(key.shape[:-1]) if call.p is None else key.norm(call.p, -1)
        logits = of_heads(scale * norm.square() + given["key_bias"].double(), 1, heads)
        value = given["value"]
        if call.causal:
            E = 2 * call.M * (2 * call.M + 1) // 2 + 1
            nothing = torch.zeros(self.B, heads, E, call.d_v + 1, dtype=wide)
            state = [nothing, torch.full((self.B, heads), -math.inf).double()]
            outputs, at = [], 0
            for _, count in call.steps:
                part = slice(at, at + count)
                tokens = (x[:, :, part] for x in (phi_q, phi_k, logits, value))
                attend = ikattn.ops.causal_attention_from_moments
                output, _, *state = attend(*tokens, *state, eps=call.eps)
                outputs.append(output)
                at += count
            output = torch.cat(outputs, 2)
        else:
            half = S // 2
            parts = zip(
                *(x.split([half, S - half], 2) for x in (phi_k, logits, value)), strict=True
            )
            first, second = (ikattn.ops.key_moments(*part) for part in parts)
            merged = ikattn.ops.merge_moments(*first, *second)
            output, _ = ikattn.ops.attention_from_moments(phi_q, *merged, eps=call.eps)
        made = arithmetic_of(self.dtype, linear=True)
        truth = Attention(
            {"query": query, "key": self.k, "value": self.v, "w1": self.w1, "w2": self.w2,
             "key_bias": self.bias, "is_causal": call.causal, "eps": call.eps, **self.kernel},
            replace(made, unit=made.unit * 4, stored=0.0),
        )  # fmt: skip
        expected, bound = truth.output
        assert_bounded("output by moments", output, (expected, bound))
        truth.arithmetic = replace(truth.arithmetic, stored=3 * made.stored)
        incoming = numbers("exact", "value", call.seed + 77, *output.shape)
        wanted = [x for i, x in enumerate(given) if call.seed >> i & 1]
        if wanted:
            found = torch.autograd.grad(output, [given[x] for x in wanted], incoming.to(output))
            bounds = truth.gradients(incoming, wanted)
            for name, gradient in zip(wanted, found, strict=True):
                if call.stationary or name != "w1" or self.w2 is not None:
                    assert_bounded(f"gradient of {name} by moments", gradient, bounds[name])
