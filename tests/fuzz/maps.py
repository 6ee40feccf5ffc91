"""Contribution maps, held to norms of the vectors themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ikattn
from devices import IN_THE_INTERPRETER
from fuzz.draws import Draws, numbers, uniform
from fuzz.holding import Wrong, assert_bits, assert_bounded, guarded, placed, unchanged
from ikattn.maps import NormStats

SUMMED = ("summed", "with_residual", "with_norm", "encoder")


@dataclass(frozen=True)
class MapCall:
    """A layer of attention with the parts of its block."""

    seed: int
    B: int = 1
    H: int = 1
    G: int = 1
    L: int = 1
    S: int = 1
    d: int = 1
    d_v: int = 1
    D: int = 1
    M: int = 0  # 0: dot attention
    dtype: str = "float64"
    parts: int = 0  # of the block: residual, norm, second norm
    centered: tuple[bool, bool] = (True, True)
    padding: bool = False
    causal: bool = False
    square: bool = False  # L = S
    bias: bool = False
    hidden: str = ""  # NaN in what padding hides
    gradient: bool = False
    mask: str = ""  # "bool" or "float"

    @staticmethod
    def draw(seed: int) -> MapCall:
        r = Draws(seed)
        H = 1 + r.below(18)  # up to 16 heads each number has a kernel of its own
        longest = 14 if IN_THE_INTERPRETER else 70
        G, L = r.choice([x for x in range(1, H + 1) if H % x == 0]), r.size(1, longest)
        S = L if r.chance(1.5) else r.size(1, 2 * longest - 10)
        call = MapCall(
            seed, r.choice([1, 1, 2, 3]) if not IN_THE_INTERPRETER else 1, H, G, L, S,
            r.size(1, 20), r.size(1, 20), r.size(1, 70), r.choice([0, 0, 3, 8]),
            r.weighted({"float32": 5, "float64": 4, "bfloat16": 2, "float16": 1}),
            r.below(4) if L <= S else 0, (r.chance(2), r.chance(2)), r.chance(3), r.chance(3),
            L == S, r.chance(3),
            r.choice(["", "", "value", "residual"]), r.chance(2),
            r.choice(["", "", "bool", "float"]),
        )  # fmt: skip
        is_wide = r.chance(12) and call.B * L * S < 2000
        return replace(call, D=r.choice([130, 257, 770])) if is_wide else call

    def cell(self) -> dict[str, Any]:
        kernel = "implicit" if self.M else "dot"
        padding = "padded" if self.padding else "none"
        return {"kernel": kernel, "dtype": self.dtype, "parts": str(self.parts), "padding": padding}

    def arguments(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        """Makes tokens with the projection, options of the attention, and parts of the block."""
        dtype, seed = getattr(torch, self.dtype), self.seed
        B, H, G, L, S, D = self.B, self.H, self.G, self.L, self.S, self.D
        diagonal = 0 if self.square else min(S - 1, max(0, S - L))

        def make(role: str, number: int, *shape: int) -> Tensor:
            kind = "exact" if seed % 3 else "normal"
            return guarded(numbers(kind, role, seed + 16 * number, *shape).to(dtype))

        given = {
            "query": make("token", 1, B, H, L, self.d),
            "key": make("token", 2, B, G, S, self.d),
            "value": make("value", 3, B, G, S, self.d_v),
            "out_proj_weight": make("value", 4, D, H * self.d_v),
        }
        block: dict[str, Any] = {"diagonal": diagonal}
        if self.parts > 0:
            block["residual"] = make("value", 5, B, L, D)
        for i, name in enumerate(("norm", "second_norm")):
            if self.parts > 1 + i:
                scale = guarded((uniform(seed + 6 + i, B, L) + 0.5).to(dtype))
                block[name] = NormStats(make("value", 7 + i, D), scale, self.centered[i])
        pad_q = guarded(uniform(seed + 11, B, L) < 0.3)
        pad_k = guarded(uniform(seed + 12, B, S) < 0.3)
        if self.padding:
            block |= {"query_padding": pad_q, "key_padding": pad_k}
            if self.hidden == "value":
                given["value"].masked_fill_(pad_k[:, None, :, None], math.nan)
            elif self.hidden == "residual" and self.parts:
                block["residual"].masked_fill_(pad_q[..., None], math.nan)
        kernel: dict[str, Any] = {"is_causal": self.causal, "enable_gqa": G < H}
        if self.bias:
            kernel["key_bias"] = make("bias", 9, H, S)
        if self.mask == "bool":  # some rows see nothing
            kernel["attn_mask"] = guarded(
                uniform(seed + 13, B, 1, L, S) < 2 * uniform(seed + 14, 1, 1, L, 1) - 0.3
            )
        elif self.mask:
            kernel["attn_mask"] = make("bias", 12, H, L, S)
        if self.M:
            kernel["w1"] = make("frequency", 10, H, self.d, self.M)
            kernel["w2"] = make("frequency", 11, H, self.d, self.M)
        return given, kernel, block

    def check(self) -> None:
        given, kernel, block = self.arguments()
        q, k, v, project = given.values()
        weights = self.weights(q, k, kernel)
        stored = guarded(weights.to(q.dtype))
        norms = [x for y in block.values() if isinstance(y, NormStats) for x in (y.weight, y.scale)]
        with unchanged(*given.values(), stored, *kernel.values(), *block.values(), *norms):
            of_block = {x: placed(y) for x, y in block.items()}
            there = [placed(x) for x in (stored, v, project)]
            found, again = (
                ikattn.contributions(*there, per_head=True, **of_block) for _ in range(2)
            )
            options = {x: placed(y) for x, y in (given | kernel).items()} | of_block
            streamed = ikattn.streamed_contributions(**options)
        self.compare(found, stored.double(), v, project, block, 0.0)
        names = [x for x in ("value_norms", *SUMMED) if getattr(found, x) is not None]
        assert_bits(
            "the same maps twice", *([getattr(x, n) for n in names] for x in (found, again))
        )
        self.compare(streamed, weights, v, project, block, 1.0)
        if self.gradient and q.dtype.itemsize >= 4 and not self.hidden and self.seed % 3 == 0:
            self.check_gradient(stored, v, project, block)

    def weights(self, q: Tensor, k: Tensor, kernel: dict[str, Any]) -> Tensor:
        """Computes the weights in float64, [B, H, L, S]."""
        q, k = q.double(), k.double().repeat_interleave(self.H // self.G, 1)
        logits = q @ k.mT / math.sqrt(self.d)
        if self.M:

            def features(x: Tensor) -> Tensor:
                a, b = (2 * math.pi * x @ kernel[w].double() for w in ("w1", "w2"))
                return torch.cat([a.cos() + b.cos(), a.sin() + b.sin()], -1)

            s = features(q) @ features(k).mT / (4 * self.M)
            g = k.square().sum(-1) / (2 * math.sqrt(self.d))
            logits = (s.square() + 1e-5).log() + g.unsqueeze(-2)
        if self.bias:
            logits = logits + kernel["key_bias"].double().unsqueeze(-2)
        if self.causal:
            later = ~torch.ones(self.L, self.S, dtype=torch.bool).tril()
            logits = logits.masked_fill(later, -math.inf)
        mask = kernel.get("attn_mask")
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask.double()
        return logits.softmax(-1).nan_to_num(0.0)

    def vectors(
        self, a: Tensor, v: Tensor, project: Tensor, block: dict[str, Any]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns what each query takes from each token, [B, L, S, D], and the sum of its parts."""
        v = v.double().repeat_interleave(self.H // self.G, 1)
        shown = torch.ones(self.B, self.L, self.S, dtype=torch.bool)
        if self.padding:
            shown = ~(block["query_padding"][:, :, None] | block["key_padding"][:, None, :])
            v = v.masked_fill(block["key_padding"][:, None, :, None], 0.0)
        a = a.double() * shown[:, None]
        of_heads = project.double().unflatten(1, (self.H, -1))
        parts = torch.einsum("bhsv,dhv->bhsd", v, of_heads)
        sizes = torch.einsum("bhsv,dhv->bhsd", v.abs(), of_heads.abs())
        y = torch.einsum("bhts,bhsd->btsd", a, parts)
        size = torch.einsum("bhts,bhsd->btsd", a, sizes)
        found = {"summed": (y, size)}
        if "residual" in block:
            own = self.own_pairs(block) & shown[..., None]
            x = block["residual"].double().unsqueeze(2)
            y, size = torch.where(own, y + x, y), torch.where(own, size + x.abs(), size)
            found["with_residual"] = (y, size)
            for name, norm in (("with_norm", "norm"), ("encoder", "second_norm")):
                if norm not in block:
                    break
                stats = block[norm]
                if stats.centered:
                    y, size = y - y.mean(-1, keepdim=True), size + size.mean(-1, keepdim=True)
                factor = stats.weight.double() / stats.scale.double()[:, :, None, None]
                y, size = y * factor, size * factor.abs()
                found[name] = (y, size)
        return found

    def own_pairs(self, block: dict[str, Any]) -> Tensor:
        """Tells the pairs of a query and the same token, [1, L, S, 1]."""
        d = block["diagonal"]
        return torch.ones(self.L, self.S).tril(d).triu(d).bool()[None, :, :, None]

    def compare(
        self,
        maps: ikattn.Contributions,
        a: Tensor,
        v: Tensor,
        project: Tensor,
        block: dict[str, Any],
        streams: float,
    ) -> None:
        kind = "streamed " if streams else ""
        eps = torch.finfo(torch.float64 if self.dtype == "float64" else torch.float32).eps
        # Weights are off by sums of d products in exponents, or by small scores.
        off = eps * (64 + 16 * self.d + 3e5 * (self.M > 0)) if streams else 0.0
        if maps.value_norms is not None:
            values = v.double().repeat_interleave(self.H // self.G, 1)
            of_heads = project.double().unflatten(1, (self.H, -1))
            norms = torch.einsum("bhsv,dhv->bhsd", values, of_heads).norm(dim=-1)
            if self.padding:
                norms = norms.masked_fill(block["key_padding"][:, None], 0.0)
            rounding = eps * (self.d_v**0.5 + self.D**0.5 + 8)
            bound = (rounding * values.norm(dim=-1) * project.double().norm()).nan_to_num(0.0)
            assert_bounded(kind + "value norms", maps.value_norms, (norms, bound + 1e-37))
            if maps.per_head is not None:
                shown = a
                if self.padding:
                    shown = shown.masked_fill(block["query_padding"][:, None, :, None], 0.0)
                    shown = shown.masked_fill(block["key_padding"][:, None, None, :], 0.0)
                truth, bound = (shown * x.unsqueeze(-2) for x in (norms, bound + eps))
                assert_bounded("per_head", maps.per_head, (truth, bound + 1e-37))
        for name, (y, size) in self.vectors(a, v, project, block).items():
            found = getattr(maps, name)
            if found is None:
                raise Wrong(f"{kind}{name} is missing")
            terms = self.H + self.D**0.5 + self.d_v**0.5 + 8
            bound = size.norm(dim=-1) * (eps * terms + off) + 1e-30
            assert_bounded(kind + name, found, (y.norm(dim=-1), bound))
            if name not in maps.mixing_ratio:
                continue
            own = self.own_pairs(block)
            others, itself = (y * ~own).sum(2).norm(dim=-1), (y * own).sum(2).norm(dim=-1)
            total = others + itself
            ratio = torch.where(total > 0, others / total.masked_fill(total == 0, 1.0), 0.0)
            loss = 4 * (size.sum(2).norm(dim=-1) * (eps * (terms + self.S) + off) + 1e-30)
            bound = loss / total.clamp_min(1e-300) + 4 * eps
            assert_bounded(f"{kind}mixing ratio of {name}", maps.mixing_ratio[name], (ratio, bound))

    def check_gradient(self, a: Tensor, v: Tensor, project: Tensor, block: dict[str, Any]) -> None:
        """Compares the gradient of a random sum of the last map with that of its definition."""
        name = SUMMED[self.parts]
        y, size = self.vectors(a, v, project, block)[name]
        counts = y.norm(dim=-1) > 0.1 * size.norm(dim=-1)  # others point where rounding has it
        results = []
        for of_definition in (False, True):
            leaves = [x.detach().clone() for x in (a, v, project)]
            leaves = leaves if of_definition else [placed(x) for x in leaves]
            leaves = [x.requires_grad_() for x in leaves]
            if of_definition:
                y = self.vectors(*leaves, block)[name][0]
                made = torch.where(y.abs().sum(-1) > 0, (y.square().sum(-1) + 1e-300).sqrt(), 0.0)
            else:
                there = {x: placed(y) for x, y in block.items()}
                made = getattr(ikattn.contributions(*leaves, **there), name).cpu()
            steps = torch.where(counts, uniform(self.seed + 50, *made.shape), 0.0)
            results.append(torch.autograd.grad((made.double() * steps).sum(), leaves))
        for x, found, truth in zip(("weights", "value", "projection"), *results, strict=True):
            size = (1e-8 if self.dtype == "float64" else 1e-5) * (1 + float(truth.abs().max()))
            bound = torch.full(truth.shape, size, dtype=torch.float64)
            assert_bounded(f"gradient of {name} by {x}", found, (truth.double(), bound))
