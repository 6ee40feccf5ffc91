"""The calls that the tests of the contribution operators share, and the definition they check.

The definition is mathematics.md's, word for word, through the [B, L, S, D] tensor of contributions
that the operators exist to avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ikattn
from drawing import normals


@dataclass(frozen=True)
class Sample:
    """Sizes and circumstances of one call; letters as in ikattn.contributions."""

    name: str
    B: int = 2
    H: int = 4
    G: int = 4
    L: int = 7
    S: int = 7
    d_v: int = 5
    D: int = 20
    steps: int = 3  # of the block: residual, norm, second norm
    centered: tuple[bool, bool] = (True, True)
    padding: bool = False
    diagonal: int = 0
    causal: bool = False

    def arguments(self, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        random = normals(sum(map(ord, self.name)))
        B, H, L, S, D = self.B, self.H, self.L, self.S, self.D
        logits = 2 * random(B, H, L, S)
        if self.causal:
            seen = torch.ones(L, S, dtype=torch.bool).tril(self.diagonal)
            logits = logits.masked_fill(~seen, -torch.inf)
        arguments: dict[str, Any] = {
            "attn_weights": logits.softmax(-1).to(dtype),
            "value": random(B, self.G, S, self.d_v).to(dtype),
            "out_proj_weight": (random(D, H * self.d_v) / max(1, D) ** 0.5).to(dtype),
            "diagonal": self.diagonal,
        }
        if self.steps > 0:
            arguments["residual"] = random(B, L, D).to(dtype)
        for step, name in ((2, "norm"), (3, "second_norm")):
            if self.steps >= step:
                arguments[name] = ikattn.maps.NormStats(
                    random(D).to(dtype),
                    (random(B, L).abs() + 0.5).to(dtype),
                    self.centered[step - 2],
                )
        if self.padding:
            lengths = torch.arange(S, S - B, -1).clamp_min(1)
            key_padding = torch.arange(S) >= lengths[:, None]
            arguments["key_padding"] = key_padding
            arguments["query_padding"] = key_padding[:, self.diagonal : self.diagonal + L]
        return arguments


SAMPLES = [
    Sample("bert block"),
    Sample("rms norms", centered=(False, False)),
    Sample("mixed norms", centered=(False, True)),
    Sample("padded batch", B=3, padding=True),
    Sample("no block", steps=0),
    Sample("cross attention", L=5, S=9, steps=0),
    Sample("residual only", steps=1),
    Sample("one norm", steps=2, padding=True),
    Sample("grouped heads", H=6, G=2),
    Sample("one key head", H=5, G=1, steps=2),
    Sample("cached keys", L=3, S=9, diagonal=6, causal=True),
    Sample("causal", causal=True, L=9, S=9),
    Sample("one token", L=1, S=1),
    Sample("one head", H=1, G=1),
    Sample("one of everything", B=1, H=1, G=1, L=1, S=1, d_v=1, D=1),
    Sample("fewer dimensions than heads", H=7, G=7, d_v=2, D=3),
    Sample("twelve heads", B=1, H=12, G=12, L=66, S=66, d_v=8, D=96),
    Sample("tile edge", B=1, L=64, S=64, D=64),
    Sample("tile edge - 1", B=1, L=33, S=63, D=63, steps=0),
    Sample("tile edge + 1", B=1, L=65, S=65, D=65, padding=True),
    Sample("two panels", B=2, H=4, G=2, L=5, S=70, d_v=70, D=130),
    Sample("many short ones", B=9, H=3, G=3, L=5, S=5, D=70),
    Sample("no batch", B=0),
    Sample("no queries", L=0, S=4),
    Sample("no keys", L=0, S=0),
    Sample("no keys for queries", L=3, S=0, steps=0),
]


def differentiable(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call that have gradients, norms' under names of their own."""
    found = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    for name in ("norm", "second_norm"):
        if name in arguments:
            found[f"{name}.weight"] = arguments[name].weight
            found[f"{name}.scale"] = arguments[name].scale
    return found


def replaced(arguments: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The call with some of its tensors, named as in differentiable, exchanged."""
    result = dict(arguments)
    for name, tensor in tensors.items():
        if "." not in name:
            result[name] = tensor
            continue
        norm, field = name.split(".")
        stats = result[norm]
        parts = {"weight": stats.weight, "scale": stats.scale, field: tensor}
        result[norm] = ikattn.maps.NormStats(**parts, centered=stats.centered)
    return result


def vectors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the vectors that each query takes from each token, [B, L, S, D], by summed map."""
    weights = arguments["attn_weights"].double()
    value, projection = arguments["value"].double(), arguments["out_proj_weight"].double()
    B, H, L, S = weights.shape
    query_padding, key_padding = _paddings(arguments, B, L, S)
    value = value.masked_fill(key_padding[:, None, :, None], 0)
    weights = weights.masked_fill(query_padding[:, None, :, None], 0)
    weights = weights.masked_fill(key_padding[:, None, None, :], 0)
    transformed = torch.einsum(
        "bhsv,dhv->bhsd",
        value.repeat_interleave(H // value.shape[1], 1),
        projection.unflatten(1, (H, -1)),
    )
    y = torch.einsum("bhts,bhsd->btsd", weights, transformed)
    visible = ~(query_padding[:, :, None] | key_padding[:, None, :])[..., None]
    found = {"summed": y}
    if "residual" in arguments:
        own = torch.ones(L, S).tril(arguments["diagonal"]).triu(arguments["diagonal"])
        y = y + own[None, :, :, None] * arguments["residual"].double()[:, :, None] * visible
        found["with_residual"] = y
        for map_name, name in (("with_norm", "norm"), ("encoder", "second_norm")):
            if name not in arguments:
                break
            norm = arguments[name]
            if norm.centered:
                y = y - y.mean(-1, keepdim=True)
            y = y * norm.weight.double() / norm.scale.double()[:, :, None, None]
            found[map_name] = y
    return found


def definition(arguments: dict[str, Any]) -> ikattn.Contributions:
    """All maps of a call, by their definitions, in float64."""
    weights = arguments["attn_weights"].double()
    B, H, L, S = weights.shape
    query_padding, key_padding = _paddings(arguments, B, L, S)
    value = arguments["value"].double().repeat_interleave(H // arguments["value"].shape[1], 1)
    projection = arguments["out_proj_weight"].double().unflatten(1, (H, -1))
    norms = norm_of(torch.einsum("bhsv,dhv->bhsd", value, projection))
    norms = norms.masked_fill(key_padding[:, None, :], 0)
    weights = weights.masked_fill(query_padding[:, None, :, None], 0)
    maps = ikattn.Contributions(value_norms=norms, per_head=weights * norms[:, :, None, :])
    for name, y in vectors(arguments).items():
        setattr(maps, name, norm_of(y))
        if "residual" in arguments:
            own = torch.ones(L, S).tril(arguments["diagonal"]).triu(arguments["diagonal"])
            own = own.bool()[None, :, :, None]
            others = norm_of((y * ~own).sum(2))
            itself = norm_of((y * own).sum(2))
            total = others + itself
            maps.mixing_ratio[name] = torch.where(
                total > 0, others / torch.where(total > 0, total, 1), 0
            )
    return maps


def norm_of(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def maps_of(arguments: dict[str, Any]) -> ikattn.Contributions:
    return ikattn.contributions(**arguments, per_head=True)


def named(maps: ikattn.Contributions) -> dict[str, Tensor]:
    """Every tensor of a result, mixing ratios as "mixing_ratio.<map>"."""
    names = ("value_norms", "per_head", "summed", "with_residual", "with_norm", "encoder")
    found = {name: getattr(maps, name) for name in names if getattr(maps, name) is not None}
    return found | {f"mixing_ratio.{name}": each for name, each in maps.mixing_ratio.items()}


def _paddings(arguments: dict[str, Any], B: int, L: int, S: int) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros(B, 0, dtype=torch.bool)
    query_padding = arguments.get("query_padding")
    key_padding = arguments.get("key_padding")
    return (
        nothing.new_zeros(B, L) if query_padding is None else query_padding,
        nothing.new_zeros(B, S) if key_padding is None else key_padding,
    )


# Everything for one block; the sizes still differ in every axis.
BLOCK = Sample("bert block")
PADDED = Sample("padded batch", B=3, padding=True)


def operator_call(sample: Sample, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Any]]:
    """Positional and named arguments of torch.ops.ikattn.contribution_maps."""
    arguments = sample.arguments(dtype)
    norm, second = arguments["norm"], arguments["second_norm"]
    positional = (arguments["attn_weights"], arguments["value"], arguments["out_proj_weight"])
    return positional, {
        "residual": arguments["residual"],
        "norm_weight": norm.weight,
        "norm_scale": norm.scale,
        "second_norm_weight": second.weight,
        "second_norm_scale": second.scale,
        "second_norm_centered": second.centered,
        "query_padding": arguments.get("query_padding"),
        "key_padding": arguments.get("key_padding"),
        "maps": [True] * 6,
    }
