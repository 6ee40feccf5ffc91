"""Implicit-kernel attention in float64 with its gradients, and how far each element may be off.

The formulas are those of the paper's attention, written out forward and backward, pair by pair.
Beside every number stands a bound of what rounding may do to it: the errors of its inputs are
carried through the same formulas with absolute values, element by element. So a number that is well
conditioned has a bound of a few units in the last place, also beside others that are not.

Rows that see a number that is not finite are left out of the sums; what they reach is told apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FARTHEST = 2.0**33  # what larger offsets of logits count as
OF_16_BITS = ("avx512_vnni", "avx512_bf16", "amx")
ON_TENSOR_CORES = "tensor_cores"  # of a GPU
TF32 = 2.0**-10
Bounded = tuple[Tensor, Tensor]  # a number and how far a result may be from it; NaN: any number


@dataclass(frozen=True)
class Arithmetic:
    """How a route rounds."""

    unit: float  # half a unit in the last place of the arithmetic
    stored: float  # of the type of the results, 0 where that is the type of the arithmetic
    smallest: float  # a number below which a result may be lost
    largest: float  # a number from which on it may be infinite
    overflow: float  # what products may become, of the arithmetic
    lost: float  # the smallest weight, relative to the largest, that keeps its digits
    score: float = 0.0  # what fixed point adds to a score
    narrow: float = 0.0  # what operands of the backward are rounded to, relative
    weights: float = 0.0  # the same of weights that meet values
    linear: bool = False  # sums over products of two features


def arithmetic_of(
    dtype: torch.dtype, unit: str = "", linear: bool = False, medium: bool = False
) -> Arithmetic:
    """Returns what a route of that name may lose, for inputs of a type."""
    info = torch.finfo(dtype)
    own = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    narrow = unit in OF_16_BITS
    rounded = narrow and unit != "avx512_vnni"
    of_products = 0.0
    if unit == ON_TENSOR_CORES:
        of_products = info.eps if dtype.itemsize < 4 else TF32
    return Arithmetic(
        unit=own.eps / 2,
        stored=0.0 if dtype.itemsize >= 4 else info.eps / 2,
        smallest=max(
            info.smallest_normal if dtype.itemsize >= 4 else info.smallest_normal * info.eps,
            own.smallest_normal,
        )
        * (1e15 if rounded else 4),
        largest=info.max / 2,
        overflow=own.max,
        lost=own.smallest_normal,
        score=2.0**-15 if narrow else of_products,
        narrow=2.0**-7 if rounded else of_products,
        weights=3 * 2.0**-8 if rounded and medium else 2 * of_products,
        linear=linear,
    )


def of_heads(x: Tensor, axis: int, heads: int) -> Tensor:
    """Repeats heads so that there are so many; query head h reads group h // (heads // groups)."""
    own = x.shape[axis]
    return x if own == heads else x.repeat_interleave(heads // own, axis)


def _summed_to(x: Tensor, shape: torch.Size | tuple[int, ...], axis: int) -> Tensor:
    """Undoes of_heads and a broadcast: sums over what was repeated of that shape."""
    axis -= x.dim() if axis >= 0 else 0
    while x.dim() > len(shape):
        x = x.sum(0)
    if len(shape) >= -axis and shape[axis] not in (1, x.shape[axis]):
        x = x.unflatten(axis, (shape[axis], -1)).sum(axis)
    return x.sum_to_size(shape) if x.shape != torch.Size(shape) else x


class Attention:
    """One call: ``output``, ``weights`` and ``gradients``, each with its bounds."""

    def __init__(
        self, call: dict[str, Any], arithmetic: Arithmetic, keep: Tensor | None = None
    ) -> None:
        self.call, self.arithmetic = call, arithmetic
        query, key = call["query"].double(), call["key"].double()
        B, H, L, d = query.shape
        S = key.shape[2]
        w1 = call["w1"].double()
        w2 = w1 if call.get("w2") is None else call["w2"].double()
        self.w1, self.w2 = (of_heads(w, -3, H) for w in (w1, w2))
        self.M = w1.shape[-1]
        self.eps: float = call.get("eps", 1e-5)
        self.p: float | None = call.get("p", 2.0)
        scale = call.get("magnitude_scale")
        self.scale = 1 / (2 * math.sqrt(d)) if scale is None else scale
        self.q, self.k = query, of_heads(key, 1, H)
        value = call.get("value")
        self.v = None if value is None else of_heads(value.double(), 1, H)

        # Pairs are visible or not, and have terms of their logits.
        added = torch.zeros(1, 1, 1, S, dtype=torch.float64)
        visible = torch.ones(1, 1, L, S, dtype=torch.bool)
        bias, mask = call.get("key_bias"), call.get("attn_mask")
        offsets = []
        if bias is not None:
            wide = bias.double().reshape((1,) * (3 - bias.dim()) + tuple(bias.shape))
            offsets.append(of_heads(wide, 1, H).unsqueeze(-2))
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask
        elif mask is not None:
            offsets.append(mask.double())
        for offset in offsets:
            visible = visible & (offset != -math.inf)
            near = offset.clamp(-FARTHEST, FARTHEST)
            added = added + torch.where(offset.isfinite(), near, offset)
        if call.get("is_causal"):
            visible = visible & torch.ones(L, S, dtype=torch.bool).tril()
        added = added.masked_fill(~visible, 0.0)
        visible = visible.expand(B, H, L, S)

        # Numbers that are not finite are taken out, with the rows that see them.
        bad_q, bad_k = ~self.q.isfinite().all(-1), ~self.k.isfinite().all(-1)
        bad_pair = ~added.isfinite() | bad_k.unsqueeze(-2) | bad_q.unsqueeze(-1)
        self.bad_rows = (visible & bad_pair).any(-1)  # [B, H, L]
        added = added.nan_to_num(0.0, 0.0, 0.0)
        self.q = self.q.masked_fill(bad_q.unsqueeze(-1), 0.0)
        self.k = self.k.masked_fill(bad_k.unsqueeze(-1), 0.0)
        self.bad_outputs = self.bad_rows.unsqueeze(-1)
        if self.v is not None:
            bad_v = ~self.v.isfinite()
            self.v = self.v.masked_fill(bad_v, 0.0)
            if bool(bad_v.any()):
                reached = (visible.double() @ bad_v.any(-1, keepdim=True).double()) > 0
                self.bad_outputs = self.bad_outputs | reached
        self.visible = visible
        self._forward(added, keep)

    def _forward(self, added: Tensor, keep: Tensor | None) -> None:
        u, how = self.arithmetic.unit, self.arithmetic
        d, F, S = self.q.shape[-1], 2 * self.M, self.k.shape[2]
        # Features: angles in turns, off by the rounding of a product of rows.
        rounding = u * (2 * math.sqrt(d) + 4)

        def features(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            t1, t2 = x @ self.w1, x @ self.w2
            off = rounding * (x.abs() @ (self.w1.abs() + self.w2.abs()))
            a, b = 2 * math.pi * (t1 - t1.round()), 2 * math.pi * (t2 - t2.round())
            phi = torch.cat([a.cos() + b.cos(), a.sin() + b.sin()], -1)
            error = torch.cat([off, off], -1) * (2 * math.pi) + 8 * u
            return a, b, phi, error

        self.a_q, self.b_q, self.phi_q, self.off_q = features(self.q)
        self.a_k, self.b_k, self.phi_k, self.off_k = features(self.k)
        s = self.phi_q @ self.phi_k.mT / (2 * F)
        size_q, size_k = self.phi_q.abs(), self.phi_k.abs()
        off_s = size_q @ (self.off_k + u * (math.sqrt(F) + 8) * size_k).mT + self.off_q @ size_k.mT
        off_s = off_s / (2 * F)
        norms = self.phi_q.norm(dim=-1).unsqueeze(-1) * self.phi_k.norm(dim=-1).unsqueeze(-2)
        norms = norms / (2 * F)  # |s| is at most this
        off_s = off_s + how.score * norms
        self.s, self.off_s = s, off_s
        # Logits.
        g = self._magnitudes()
        logits = g.unsqueeze(-2) + added
        logits = logits.expand(s.shape).masked_fill(~self.visible, -math.inf)
        top = logits.amax(-1, keepdim=True) if S else logits.new_zeros((*s.shape[:-1], 1))
        top = top.masked_fill(top == -math.inf, 0.0)
        highest = g.abs().amax(-1)[..., None, None] if S else 0.0
        highest = highest * (1 + math.sqrt(d) / 8)  # a norm of d numbers
        below = (logits.masked_fill(~self.visible, 0.0) - top).abs()
        off_logit = 4 * u * (1 + below + top.abs() + added.abs() + highest)
        # Rows whose logits are so large that they have no digits left.
        self.unsure = (off_logit * self.visible).amax(-1) > 0.2 if S else top.squeeze(-1) > 0
        self.logits = logits
        squared = s.square() + self.eps
        e = (logits - top).exp()
        w = squared * e
        z = w.sum(-1, keepdim=True)
        z = z.masked_fill(z == 0, 1.0)
        self.e_z, self.P = e / z, w / z
        self.log_z = z.squeeze(-1).log() + top.squeeze(-1)
        off_square = 2 * s.abs() * off_s + off_s.square()
        if how.linear:
            off_square = off_square + 8 * u * math.sqrt(F) * norms.square()
        rho = off_square / squared + off_logit + 16 * u  # relative error of a weight before 1 / Z
        rounding_s = u * (1.5 * S + 8)  # equal terms round alike
        self.rho = rho + (self.P * rho).sum(-1, keepdim=True) + rounding_s + how.weights
        self.keep = keep
        self.kept = torch.ones(()) if keep is None else keep
        self.Pd = self.P if keep is None else self.P * keep  # keep has the factor of what is kept
        self.seen = self.visible.any(-1)
        # Weights so small beside the largest of their head that their type has no digits for them.
        head = logits.amax((-2, -1), keepdim=True) if logits.numel() else top
        above = (head - top).clamp(0, 50).nan_to_num(0.0)
        self.floor = 4 * how.lost * above.exp() / z  # products of such a weight and a value
        self.lost = self.floor * self.visible
        self.off_P = self.P * self.rho + self.lost

    def _magnitudes(self) -> Tensor:
        """Returns g, [B, H, S]."""
        if self.p is None:
            return self.k.new_zeros(self.k.shape[:-1])
        return self.scale * torch.linalg.vector_norm(self.k, self.p, dim=-1).square()

    def _stored(self, truth: Tensor, off: Tensor, bad: Tensor | None = None) -> Bounded:
        how = self.arithmetic
        off = off + how.stored * truth.abs() + how.smallest
        is_infinite = truth.abs() + off > how.largest
        off = off.nan_to_num(math.inf, math.inf).masked_fill(is_infinite, math.inf)
        if bad is not None:
            truth = truth.masked_fill(bad, math.nan)
        return truth, off

    def _center(self) -> Tensor | float:
        """Returns what linear time may subtract from values: means over the keys up to one."""
        assert self.v is not None
        if not self.arithmetic.linear or not self.logits.numel():
            return 0.0
        of_key = self.logits.amax(-2)
        e = (of_key - of_key.amax(-1, keepdim=True)).exp().nan_to_num().unsqueeze(-1)
        means = (e * self.v.abs()).cumsum(-2) / e.cumsum(-2)
        return means.nan_to_num(0.0).amax(-2, keepdim=True)

    @property
    def weights(self) -> Bounded:
        """The weights after dropout, [B, H, L, S]; NaN in rows that see what is not finite."""
        off = (self.off_P * self.kept).masked_fill(self.unsure.unsqueeze(-1), math.inf)
        return self._stored(self.Pd, off, self.bad_rows.unsqueeze(-1) & self.visible)

    @property
    def output(self) -> Bounded:
        """The output; NaN where the result must not be finite."""
        assert self.v is not None
        size = (self.off_P * self.kept) @ (self.v.abs() + self._center())
        self.o = self.Pd @ self.v
        size = (size + self.floor).masked_fill(self.unsure.unsqueeze(-1), math.inf)
        return self._stored(self.o, size, self.bad_outputs & self.seen.unsqueeze(-1))

    def gradients(self, incoming: Tensor, wanted: list[str]) -> dict[str, Bounded]:
        """Returns the gradients of the output's product with ``incoming``, [B, H, L, d_v].

        A gradient that a row of NaN reaches has a bound of infinity.
        """
        how, u = self.arithmetic, self.arithmetic.unit
        assert self.v is not None
        L, S = self.P.shape[2:]
        o, off_o = self.output
        poisoned = self.bad_rows | self.bad_outputs.any(-1) | (off_o == math.inf).any(-1)
        products = incoming.double().abs() @ self.v.abs().mT * self.kept * (self.e_z + 1)
        if S:
            poisoned = poisoned | (products.nan_to_num().amax(-1) > 1e-3 * how.overflow)
        good = ~poisoned.unsqueeze(-1)
        g = incoming.double() * good
        o, off_o = self.o, off_o.masked_fill(off_o == math.inf, 0.0)
        rounding = u * (math.sqrt(max(L, S)) + 8) + how.narrow
        # dlog = P (dP - delta), with what is off in each.
        size_dp, dp = g.abs() @ self.v.abs().mT, g @ self.v.mT
        if self.keep is not None:
            size_dp, dp = size_dp * self.keep, dp * self.keep
        delta = (g * o).sum(-1, keepdim=True)
        off_delta = (g.abs() * (off_o + u * 4 * o.abs())).sum(-1, keepdim=True)
        difference = dp - delta
        of_sums = u * (math.sqrt(self.v.shape[-1]) + 4) + how.narrow
        off_difference = of_sums * (size_dp + delta.abs()) + off_delta
        dlog = self.P * difference
        off_dlog = (self.off_P + self.P * how.narrow) * difference.abs()
        off_dlog = off_dlog + (self.P + self.lost) * off_difference
        twice = 2 * self.e_z
        ds = twice * self.s * difference
        size = difference.abs()
        spread = rounding + 16 * u * (1 + self._log_size())
        if S:
            rho = (self.P * self.rho).sum(-1, keepdim=True) + self.rho.amin(-1, keepdim=True)
            spread = spread + rho
        off_ds = (self.s.abs() + self.off_s) * (off_difference + spread * size) + self.off_s * size
        off_ds = (twice + 2 * self.lost) * off_ds + 2 * self.lost * self.s.abs() * size
        if how.linear:
            of_output = (g.abs() * self.o.abs()).sum(-1, keepdim=True)
            off_ds = off_ds + 16 * u * twice * (size_dp + of_output)
        found: dict[str, Bounded] = {}
        reached = (poisoned.unsqueeze(-1) & self.visible).any(-2)  # keys, [B, H, S]
        any_bad = bool(poisoned.any())

        def add(name: str, x: Tensor, off: Tensor, axis: int, bad: Tensor | None = None) -> None:
            shape = self.call[name].shape
            summed, bound = _summed_to(x, shape, axis), _summed_to(off, shape, axis)
            terms = max(1, x.numel() // max(1, summed.numel()))
            if terms > 1:
                bound = bound + u * (math.sqrt(terms) + 2) * _summed_to(x.abs(), shape, axis)
            summed, bound = self._stored(summed, bound)
            if bad is not None:
                bound = bound.masked_fill(_summed_to(bad.double(), shape, axis) > 0, math.inf)
            found[name] = summed, bound

        if "value" in wanted:
            off = ((self.off_P + self.P * rounding) * self.kept).mT @ g.abs()
            add("value", self.Pd.mT @ g, off, 1, reached.unsqueeze(-1).expand(self.v.shape))
        F = 2 * self.M
        dphi_q, dphi_k = ds @ self.phi_k / (2 * F), ds.mT @ self.phi_q / (2 * F)
        sizes = ds.abs() + off_ds
        # Operands of 16 bits are rounded less their mean.
        of_k, of_q = (
            off + rounding * phi.abs() + 2 * how.narrow
            for off, phi in ((self.off_k, self.phi_k), (self.off_q, self.phi_q))
        )
        off_q = (off_ds @ self.phi_k.abs() + sizes @ of_k) / (2 * F)
        off_k = (off_ds.mT @ self.phi_q.abs() + sizes.mT @ of_q) / (2 * F)
        sides = (
            ("query", self.q, self.a_q, self.b_q, dphi_q, off_q, self.off_q),
            ("key", self.k, self.a_k, self.b_k, dphi_k, off_k, self.off_k),
        )
        dw = [torch.zeros((), dtype=torch.float64)] * 3
        for name, x, a, b, dphi, off_phi, off_angle in sides:
            c, sn = dphi[..., : self.M], dphi[..., self.M :]
            both = (dphi.abs() * (off_angle + 8 * u) + off_phi).unflatten(-1, (2, -1)).sum(-2)
            off_t = 2 * math.pi * (both + 1e19 * how.lost)  # a cosine of 0 counts as 1e-18
            size_t = 2 * math.pi * (c.abs() + sn.abs())
            da, db = (2 * math.pi * (y.cos() * sn - y.sin() * c) for y in (a, b))
            dx = da @ self.w1.mT + db @ self.w2.mT
            reach = (self.w1.abs() + self.w2.abs()).mT
            off_x = (off_t + u * (math.sqrt(self.M) + 8) * size_t) @ reach
            if name == "key":
                dg = dlog.sum(-2)
                off_g = off_dlog.sum(-2) + u * (math.sqrt(L) + 4) * dlog.abs().sum(-2)
                slope = self._slope()
                dx = dx + dg.unsqueeze(-1) * slope
                off_x = off_x + (off_g + 32 * u * dg.abs()).unsqueeze(-1) * slope.abs()
            if name in wanted:
                bad = poisoned if name == "query" else reached
                add(name, dx, off_x, 1, bad.unsqueeze(-1).expand(x.shape))
            dw[0] = dw[0] + x.mT @ da
            dw[1] = dw[1] + x.mT @ db
            dw[2] = dw[2] + x.abs().mT @ (off_t + u * (math.sqrt(x.shape[-2]) + 8) * size_t)
        for i, name in enumerate(("w1", "w2")):
            if name in wanted:
                x = dw[i] if self.call.get("w2") is not None else dw[0] + dw[1]
                add(name, x, 2 * dw[2], -3, torch.full_like(x, any_bad))
        if "key_bias" in wanted:
            off = off_dlog.sum(-2) + u * (math.sqrt(L) + 4) * dlog.abs().sum(-2)
            add("key_bias", dlog.sum(-2), off, -2, reached)
        if "attn_mask" in wanted:
            bad = (poisoned.unsqueeze(-1) & self.visible).expand(dlog.shape)
            add("attn_mask", dlog, off_dlog, -3, bad)
        return found

    def _log_size(self) -> Tensor:
        """Bounds what exponentials lose: the logits."""
        e = self.P / (self.s.square() + self.eps)
        return e.clamp_min(1e-30).log().abs() + self._magnitudes().abs().unsqueeze(-2)

    def _slope(self) -> Tensor:
        """Returns the derivative of g by the key, [B, H, S, d]."""
        if self.p is None:
            return torch.zeros_like(self.k)
        norm = torch.linalg.vector_norm(self.k, self.p, dim=-1, keepdim=True)
        unit = (self.k.abs() / norm.masked_fill(norm == 0, 1.0)).pow(self.p - 1) * self.k.sign()
        return 2 * self.scale * norm * unit
