"""Plans: the layers and maps to record of a model, found before it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn
from torch.nn.modules.activation import MultiheadAttention as StockMultiheadAttention

from ikattn.integrations.transformers.interface import calls_interface
from ikattn.nn.selection import Selection, describe_unseen, is_selected, unseen_attention
from ikattn.recorder.calls.delta_rules import calls_delta_rule
from ikattn.recorder.calls.products import writes_out_attention
from ikattn.recorder.calls.sdpa import calls_sdpa
from ikattn.recorder.calls.torch_attention import out_projection_of
from ikattn.recorder.plan.parts import AttentionParts
from ikattn.recorder.plan.resolvers import described_by, find_attention
from ikattn.recorder.plan.run_maps import ALL_MAPS, LEDGER, USUAL_MAPS, defined_maps, why_undefined

# The attention that a recording sees, for errors and warnings.
KNOWN_ATTENTION = (
    "nn.MultiheadAttention, a module that calls transformers' AttentionInterface, "
    "F.scaled_dot_product_attention, a gated delta rule or Mamba-2's scan, or one named for "
    "attention that multiplies a softmax with values"
)
_GROUPS = {"ledger": (*LEDGER, "value_norms", "per_head")}


@dataclass(frozen=True, eq=False)
class Asked:
    """Names of maps: those that a layer must have, and those to take where it has them."""

    required: tuple[str, ...]
    where_defined: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """A layer of attention to record, and the maps to make of it."""

    name: str
    module: nn.Module
    ancestors: tuple[nn.Module, ...]
    parts: AttentionParts
    asked: Asked

    @property
    def title(self) -> str:
        """Its name and class, for errors."""
        return f"{self.name} ({type(self.module).__name__})"

    @property
    def class_hint(self) -> str:
        """Its class, at the end of errors that name it."""
        return f"; the layer is of the class {type(self.module).__name__}"

    @property
    def source(self) -> str:
        """Who says what its parts are, for errors."""
        return described_by(self.module, self.ancestors)

    @property
    def dropout_hint(self) -> str:
        """Advice where a sum was not seen, for errors: "" in evaluation."""
        if not self.module.training:
            return ""
        return "; it is in training mode, where dropout may change the summands: try model.eval()"

    @property
    def seen_by(self) -> Literal["torch", "interface", "sdpa", "delta rule", "product"]:
        """The source that tells of its runs."""
        if isinstance(self.module, StockMultiheadAttention):
            return "torch"
        if calls_interface(self.module):
            return "interface"
        if calls_delta_rule(self.module):
            return "delta rule"
        return "sdpa" if calls_sdpa(self.module) or not self.writes_out else "product"

    @property
    def writes_out(self) -> bool:
        return writes_out_attention(self.module)

    @cached_property
    def limit(self) -> nn.Module | None:
        """The module around the layer at whose end its sum must have been formed."""
        known = self.parts.pre_norm or self.parts.norm
        if known is not None:
            for module in self.ancestors:
                if any(part is known for part in module.modules()):
                    return module
        return self.ancestors[min(2, len(self.ancestors) - 1)] if self.ancestors else None

    def wants(self, name: str) -> bool:
        """Whether a map is asked for, of layers that have it at least."""
        return name in (*self.asked.required, *self.asked.where_defined)

    def needs_block(self, kind: str | None) -> bool:
        """Whether any map to make of a run of this kind needs what is around the attention."""
        plain = {"value_norms", "per_head", "summed", "projection", *LEDGER}
        return not set(self.maps(kind)) <= plain

    def maps(
        self, kind: str | None, why_no_block: str = "", *, has_run: bool = False
    ) -> tuple[str, ...]:
        """The names of the maps to make of a run of this kind, None where it is not known yet.

        Raises:
            ValueError: A map was asked for that the layer does not have.
        """
        for name in self.asked.required:
            reason = why_undefined(name, self.parts, kind, has_run=has_run)
            if reason is not None:
                if self.parts.block == "none" and why_no_block:
                    reason = why_no_block
                if has_run and kind != "cross":
                    reason += self.dropout_hint
                raise ValueError(
                    f"record: {self.name} has no map {name!r}: {reason}. The layer, a "
                    f"{type(self.module).__name__}, has "
                    f"{', '.join(defined_maps(ALL_MAPS, self.parts, kind, has_run=has_run))}. "
                    "maps='all' takes of each layer what it has where no other name is asked for "
                    "(--maps all), layers=... (--layers) leaves layers out"
                )
        others = defined_maps(self.asked.where_defined, self.parts, kind, has_run=has_run)
        return tuple(dict.fromkeys((*self.asked.required, *others)))


def plan_layers(
    model: nn.Module, asked: Asked, layers: Selection | None, *, may_be_none: bool = False
) -> tuple[list[Plan], list[str]]:
    """Plans each selected layer; with may_be_none there need not be any.

    Where all layers are recorded, it also names attention that no recording sees.

    Raises:
        ValueError: There is none, none is selected, or one has not the maps that were asked for.
        NotImplementedError: One of them cannot be recorded.
        TypeError: The out-projection of an nn.MultiheadAttention holds no plain tensors.
    """
    sites = find_attention(model)
    unseen = unseen_attention(model, (x.module for x in sites)) if layers is None else []
    if not sites and may_be_none:
        return [], unseen
    if not sites:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"record: model must hold attention that can be recorded, {KNOWN_ATTENTION}, or layers "
            "over graphs (GATConv, GATv2Conv, TransformerConv); there is none in "
            f"{', '.join(kinds)}"
        )
    if unseen:
        warnings.warn(
            f"record: {describe_unseen(unseen)} look like attention, and are not recorded: they "
            f"are none of {KNOWN_ATTENTION}",
            stacklevel=4,
        )
    plans = []
    for site in sites:
        if not is_selected([site.name], site.module, (*site.ancestors, site.module), layers):
            continue
        if isinstance(site.parts, str):
            raise NotImplementedError(
                f"record: {site.name} ({type(site.module).__name__}) cannot be recorded: "
                f"{site.parts}; layers=... leaves it out"
            )
        plan = Plan(site.name, site.module, site.ancestors, site.parts, asked)
        plan.maps(site.parts.kind)
        if isinstance(site.module, StockMultiheadAttention):
            out_projection_of(site.module, site.name)
        plans.append(plan)
    if not plans and not may_be_none:
        names = ", ".join(site.name for site in sites)
        raise ValueError(f"record: layers={layers!r} selects none of {names}")
    return plans, unseen


def asked_maps(maps: Iterable[str] | Asked | None) -> Asked:
    """Returns the names that ``maps`` stands for.

    Raises:
        ValueError: It names no map, or one that does not exist.
    """
    if maps is None:
        return Asked((), USUAL_MAPS)
    if isinstance(maps, Asked):
        return maps
    names = [maps] if isinstance(maps, str) else list(maps)
    for name in names:
        if name not in (*ALL_MAPS, *_GROUPS, "all"):
            raise ValueError(
                f"record: maps must be names out of {', '.join((*ALL_MAPS, *_GROUPS, 'all'))}, "
                f"got {name!r}"
            )
    if not names:
        raise ValueError("record: maps must name at least one map, got none")
    named = (single for name in names if name != "all" for single in _GROUPS.get(name, (name,)))
    return Asked(tuple(named), ALL_MAPS if "all" in names else ())


def describe(model: nn.Module) -> str:
    source = getattr(getattr(model, "config", None), "name_or_path", "")
    return f"{type(model).__name__} {source}".strip()
