"""Attention over edges, held to attention over keys that are edges.

Every edge is a key of its own in a dense call, which its target alone sees. So one reference serves
both, and an edge that occurs twice counts twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ikattn
from fuzz.condition import Attention, Bounded, arithmetic_of
from fuzz.draws import Draws, integers, numbers, uniform
from fuzz.holding import Wrong, assert_bits, assert_bounded, guarded, placed, unchanged
from ikattn.ops import Edges

FORMS = {"implicit": 6, "softmax": 3, "gat": 2}


class Result(NamedTuple):
    given: dict[str, Tensor]
    leaves: dict[str, Tensor]
    source: Tensor
    target: Tensor
    output: Tensor
    weights: Tensor


@dataclass(frozen=True)
class EdgeCall:
    """A graph of E edges from S sources to L targets, and options."""

    seed: int
    form: str = "implicit"
    L: int = 1
    S: int = 1
    E: int = 1
    H: int = 1
    d: int = 1
    d_v: int = 1
    M: int = 1
    dtype: str = "float64"
    values: str = "exact"
    p: float | None = 2.0
    scale: float | None = None
    eps: float = 1e-5
    slope: float = 1.0
    stationary: bool = False
    hub: bool = False  # most edges lead to one target
    is_sorted: bool = False
    key_bias: str | None = None  # "S" or "SH"
    edge_bias: str | None = None  # "E", "EH" or "E1"
    gradients: tuple[str, ...] = ()

    @staticmethod
    def draw(seed: int) -> EdgeCall:
        r = Draws(seed)
        form = r.weighted(FORMS)
        names = ("query", "key", "value", "w1", "w2", "key_bias", "edge_bias")
        S = r.size(1, 130)
        call = EdgeCall(
            seed, form, r.size(1, 130), S, 0 if r.chance(30) else r.size(1, 600),
            r.choice([1, 1, 2, 3, 4]), r.size(1, 40), r.size(1, 70), r.size(1, 17),
            r.weighted({"float32": 5, "float64": 4, "bfloat16": 2, "float16": 1}),
            r.weighted({"exact": 6, "normal": 2, "special": 1 if form == "implicit" else 0}),
            r.weighted({2.0: 4, None: 2, 1.0: 1, 3.0: 1}), r.choice([None, None, 0.5]),
            r.choice([1e-5, 1e-3]), 1.0, r.chance(4), r.chance(4), r.chance(3),
            r.choice([None, None, "S", "SH"]), r.choice([None, None, "E", "EH", "E1"]),
            tuple(x for x in names if r.chance(2)),
        )  # fmt: skip
        present = {
            "w1": form != "softmax",
            "w2": form != "softmax" and not call.stationary,
            "key_bias": call.key_bias,
            "edge_bias": call.edge_bias,
        }
        kept = tuple(x for x in call.gradients if present.get(x, True))
        changes: dict[str, Any] = {"gradients": kept}
        if form == "softmax" and r.chance(3):
            changes |= {"slope": 0.2, "p": 2.0, "scale": None, "values": "normal"}  # off the kink
        return EdgeCall(**(vars(call) | changes))

    def cell(self) -> dict[str, Any]:
        gradients = self.gradients or "none"
        return {"form": self.form, "dtype": self.dtype, "gradients": gradients}

    def check(self) -> None:
        source, target, edges = self.graph()
        given = self.arguments()
        there = {x: placed(y) for x, y in given.items()}
        leaves = {x: y.detach().requires_grad_(x in self.gradients) for x, y in there.items()}
        with unchanged(*given.values()):
            output, weights = self.run(leaves, edges)
            again = self.run(there, edges)
            assert_bits("the same call twice", [output, weights], again)
            if output.dtype != getattr(torch, self.dtype):
                raise Wrong(f"the output is of type {output.dtype}")
            check = self.check_by_formula if self.form == "softmax" else self.check_against_dense
            return check(Result(given, leaves, source, target, output, weights))

    def graph(self) -> tuple[Tensor, Tensor, Edges]:
        """Makes the sources and targets of edges, and the graph of them."""
        source = integers(self.seed + 1, 0, self.S - 1, self.E).long()
        target = integers(self.seed + 2, 0, self.L - 1, self.E).long()
        if self.hub:
            target = torch.where(uniform(self.seed + 4, self.E) < 0.8, self.L // 2, target)
        if self.is_sorted:
            target = target.sort().values
        ends = placed(source), placed(target)
        return source, target, Edges.from_coo(*ends, self.L, is_sorted=self.is_sorted)

    def arguments(self) -> dict[str, Tensor]:
        dtype, seed = getattr(torch, self.dtype), self.seed
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        width = 2 * self.d if self.form == "gat" else self.d

        def make(role: str, number: int, *shape: int) -> Tensor:
            x = numbers(self.values, role, seed + 16 * number, *shape)
            return guarded(x.to(wide if role == "frequency" else dtype))

        given = {
            "query": make("token", 1, self.L, self.H, self.d),
            "key": make("token", 2, self.S, self.H, self.d),
            "value": make("value", 3, self.S, self.H, self.d_v),
        }
        if self.form != "softmax":
            given["w1"] = make("frequency", 4, self.H, width, self.M)
            if not self.stationary:
                given["w2"] = make("frequency", 5, self.H, width, self.M)
        letters = {"S": self.S, "E": self.E, "H": self.H, "1": 1}
        for i, name in enumerate(("key_bias", "edge_bias")):
            shape = getattr(self, name)
            if shape is not None:
                x = numbers("exact", "bias", seed + 96 + 16 * i, *(letters[x] for x in shape))
                x = x.masked_fill(uniform(seed + 7 + i, *x.shape) < 0.2, -math.inf)
                given[name] = guarded(x.to(wide))
        if self.values == "special":
            names = [x for x in given if not x.startswith("w")]
            x = given[names[seed % len(names)]]
            if x.numel():
                rows = x.view(-1, x.shape[-1]) if x.dim() == 3 else x.view(-1)
                rows[int(uniform(seed + 5, 1) * len(rows))] = math.nan
        if self.form == "gat":
            given["vector"] = make("token", 8, self.H, width)
        return given

    def run(self, given: dict[str, Tensor], edges: Edges) -> tuple[Tensor, Tensor]:
        options = {x: given[x] for x in ("key_bias", "edge_bias") if x in given}
        options |= {"p": self.p, "magnitude_scale": self.scale, "return_weights": True}
        q, k, v = given["query"], given["key"], given["value"]
        if self.form == "softmax":
            return ikattn.ops.softmax_edge_attention(
                q, k, v, edges, negative_slope=self.slope, **options
            )  # type: ignore[call-overload, no-any-return]
        w = given["w1"], given.get("w2")
        if self.form == "implicit":
            return ikattn.implicit_kernel_edge_attention(
                q, k, v, edges, *w, eps=self.eps, **options
            )  # type: ignore[call-overload, no-any-return]
        return ikattn.ops.gat_edge_attention(
            given["vector"], q, k, v, edges, *w, eps=self.eps, **options
        )  # type: ignore[call-overload, no-any-return]

    def dense(self, given: dict[str, Tensor], source: Tensor, target: Tensor) -> dict[str, Any]:
        """Makes the dense call of which every edge is a key."""

        def of_heads(name: str) -> Tensor | None:
            x = given.get(name)
            if x is None:
                return None
            x = (x if x.dim() == 2 else x.unsqueeze(-1)).expand(-1, self.H)
            x = x[source] if name == "key_bias" else x
            return x.double().T.unsqueeze(0)

        biases = [x for x in (of_heads("key_bias"), of_heads("edge_bias")) if x is not None]
        bias = None
        if biases:
            hidden = torch.stack([x == -math.inf for x in biases]).any(0)
            bias = torch.stack(biases).sum(0).masked_fill(hidden, -math.inf)
        query, key = given["query"], given["key"][source]
        if self.form == "gat":
            key = torch.cat([query[target], key], -1)
            query = given["vector"].expand(self.L, -1, -1)
        return {
            "query": query.transpose(0, 1).unsqueeze(0),
            "key": key.transpose(0, 1).unsqueeze(0),
            "value": given["value"][source].transpose(0, 1).unsqueeze(0),
            "w1": given["w1"], "w2": given.get("w2"), "p": self.p, "eps": self.eps,
            "magnitude_scale": self.scale, "key_bias": bias,
            "attn_mask": target == torch.arange(self.L).unsqueeze(-1),
        }  # fmt: skip

    def check_against_dense(self, result: Result) -> None:
        given, leaves, source, target, output, weights = result
        dtype = getattr(torch, self.dtype)
        truth = Attention(self.dense(given, source, target), arithmetic_of(dtype))
        expected, bound = (x.squeeze(0).transpose(0, 1) for x in truth.output)
        assert_bounded("output of edges", output, (expected, bound))
        edge = torch.arange(self.E)

        def of_edges(x: Tensor) -> Tensor:
            return x[0][:, target, edge].T

        if self.E:
            assert_bounded("weights of edges", weights, tuple(map(of_edges, truth.weights)))  # type: ignore[arg-type]
        if not self.gradients:
            return
        incoming = numbers("exact", "value", self.seed + 9, *output.shape).to(dtype)
        wanted, coming = [leaves[x] for x in self.gradients], incoming.transpose(0, 1).unsqueeze(0)
        incoming = placed(incoming)
        if self.seed % 3 == 0 and self.gradients != ("value",):
            # A gradient of the weights is that of one more value of each edge.
            of_weights = numbers("exact", "bias", self.seed + 10, *weights.shape)
            of_weights = placed(of_weights.to(weights.dtype))
            found = torch.autograd.grad((output, weights), wanted, (incoming, of_weights))
            more = of_weights.cpu().double().T.unsqueeze(-1).unsqueeze(0)
            call = truth.call | {"value": torch.cat([truth.call["value"].double(), more], -1)}
            truth = Attention(call, truth.arithmetic)
            coming = torch.cat([coming, torch.ones_like(coming[..., :1])], -1)
        else:
            found = torch.autograd.grad(output, wanted, incoming)
        names = ("query", "key", "value", "w1", "w2", "key_bias")
        bounds = truth.gradients(coming, [x for x in names if truth.call[x] is not None])
        for name, gradient in zip(self.gradients, found, strict=True):
            wanted = self.gathered(name, gradient, bounds, source, target)
            assert_bounded(f"gradient of {name} of edges", gradient, wanted)

    def gathered(
        self, name: str, like: Tensor, bounds: dict[str, Bounded], source: Tensor, target: Tensor
    ) -> Bounded:
        """Sums what edges give over the edges of each source."""
        if name in ("w1", "w2"):
            return bounds[name]
        of_call = {"key_bias": "key_bias", "edge_bias": "key_bias", "query": "key"}
        used = of_call.get(name, name) if self.form == "gat" or name.endswith("bias") else name
        truth, bound = (x.squeeze(0).transpose(0, 1) for x in bounds[used])
        nodes, index = self.S, source
        if self.form == "gat" and name in ("query", "key"):
            half = slice(self.d) if name == "query" else slice(self.d, None)
            truth, bound = truth[..., half], bound[..., half]
            nodes, index = (self.L, target) if name == "query" else (nodes, index)
        elif name == "query":
            return truth, bound
        if name == "value":
            truth, bound = truth[..., : self.d_v], bound[..., : self.d_v]
        if name.endswith("bias") and (like.dim() == 1 or like.shape[1] == 1):
            of_heads = {"dim": 1, "keepdim": like.dim() == 2}
            more = 2.0**-22 * truth.abs().sum(**of_heads)
            truth, bound = truth.sum(**of_heads), bound.sum(**of_heads) + more
        if name == "edge_bias":
            return truth, bound

        def scattered(x: Tensor) -> Tensor:
            return x.new_zeros((nodes, *x.shape[1:])).index_add(0, index, x)

        unit = torch.finfo(torch.float64 if self.dtype == "float64" else torch.float32).eps
        return scattered(truth), scattered(bound) + 16 * unit * scattered(truth.abs())

    def check_by_formula(self, result: Result) -> None:
        given, leaves, source, target, output, weights = result
        wide = {x: y.double().requires_grad_() for x, y in given.items()}
        truth = self.formula(wide, source, target)
        self.compare_roughly("output and weights", (output, weights), truth)
        if self.gradients:
            incoming = numbers("exact", "value", self.seed + 9, *output.shape)
            options = {"materialize_grads": True, "allow_unused": True}
            found, expected = (
                torch.autograd.grad(
                    y, [x[name] for name in self.gradients], incoming.to(y), **options
                )
                for y, x in ((output, leaves), (truth[0], wide))
            )
            # A gradient is a difference of products with values, which may cancel.
            products = incoming.abs()[target] * given["value"].detach().double().abs()[source]
            self.compare_roughly("gradient", found, expected, products.sum(-1))

    def compare_roughly(
        self,
        what: str,
        found: tuple[Tensor, ...],
        truth: tuple[Tensor, ...],
        terms: Tensor | None = None,
    ) -> None:
        """Holds the largest error to the type, where conditions are not counted."""
        eps = torch.finfo(getattr(torch, self.dtype)).eps
        for i, (one, other) in enumerate(zip(found, truth, strict=True)):
            if other.numel() and bool(other.isfinite().all()):
                size = float(other.detach().abs().max())
                if terms is not None:
                    size += 1.0 + (float(terms.max()) if terms.numel() else 0.0)
                bound = torch.full_like(other, 2000 * eps * size)
                assert_bounded(f"{what} {i} of {self.form} edges", one, (other.detach(), bound))

    def formula(
        self, given: dict[str, Tensor], source: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes output and weights edge by edge, in float64."""
        q, k, width = given["query"][target], given["key"][source], self.d  # [E, H, d]
        scale = 1 / (2 * math.sqrt(width)) if self.scale is None else self.scale
        zero = (k == 0).all(-1)
        size = k.masked_fill(zero.unsqueeze(-1), 1.0)  # |0| has gradient 0, also for p = 1
        norm = torch.zeros_like(k[..., 0])
        if self.p is not None:
            norm = torch.linalg.vector_norm(size, self.p, -1).masked_fill(zero, 0.0)
        logits = scale * norm.square()
        products = (q * k).sum(-1) / math.sqrt(width)
        if self.form == "softmax":
            if self.p != 2.0 or self.scale is not None:
                products = products - k.square().sum(-1) / (2 * math.sqrt(width))
                products = products + logits
            logits = products
        for name, index in (("key_bias", source), ("edge_bias", None)):
            if name in given:
                bias = given[name] if index is None else given[name][index]
                logits = logits + (bias if bias.dim() == 2 else bias.unsqueeze(-1))
        logits = torch.where(
            logits == -math.inf, logits, torch.nn.functional.leaky_relu(logits, self.slope)
        )
        top = torch.full((self.L, self.H), -math.inf, dtype=torch.float64)
        top = top.scatter_reduce(
            0, target.unsqueeze(-1).expand(-1, self.H), logits.detach(), "amax"
        )
        e = (logits - top.masked_fill(top == -math.inf, 0.0)[target]).exp()
        z = torch.zeros(self.L, self.H, dtype=torch.float64).index_add(0, target, e)
        weights = e / z.masked_fill(z == 0, 1.0)[target]
        terms = weights.unsqueeze(-1) * given["value"][source]
        return torch.zeros(self.L, self.H, self.d_v, dtype=torch.float64).index_add(
            0, target, terms
        ), weights
