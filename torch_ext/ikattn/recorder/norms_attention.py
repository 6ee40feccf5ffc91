"""The attention implementation "ikattn_norms", which returns maps where weights would be.

Sizes: B batch, H query heads, L queries, S keys.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from ikattn._optional import when_imported
from ikattn._precision import without_autocast
from ikattn.integrations.transformers.attention import register_implicit
from ikattn.integrations.transformers.interface import Given, attention_function, register_attention
from ikattn.recorder.calls.projection import describe, effective_projection
from ikattn.recorder.calls.transformers_attention import NORMS, interface_call
from ikattn.recorder.plan.parts import AttentionParts
from ikattn.recorder.plan.resolvers import find_attention, resolve
from ikattn.recorder.plan.run_maps import Surroundings, make_maps
from ikattn.recorder.runs.padding import fill_padding

_MAPS_WITHOUT_BLOCK = ("summed", "per_head", "weights", "similarity")


def register_norms(*, map: str = "summed") -> None:
    """Registers the attention implementations "ikattn_norms" and "ikattn_implicit".

    A model with the first computes its outputs as under "sdpa", and returns maps where attention
    weights would be: with ``output_attentions=True`` they are ``outputs.attentions``, or
    ``encoder_attentions``, ``decoder_attentions`` and ``cross_attentions``. ``ikattn.record`` gives
    all maps, also those that need the residual and norms around the attention.

    The second computes with the kernels that ``ikattn.convert`` gives a model; that
    function registers it as well.

    Args:
        map: Which: "summed", N of every layer, ``[B, L, S]``; "per_head", ``[B, H, L, S]``; or
            "weights" or "similarity", ``[B, H, L, S]``. A later call changes it for all models.

    Raises:
        ValueError: The map is none of these.
        ImportError: transformers is missing.

    Example:
        >>> import pytest, torch
        >>> transformers = pytest.importorskip("transformers")
        >>> from ikattn.recorder import register_norms
        >>> register_norms()
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
        >>> config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=9)
        >>> model = transformers.BertModel(config).eval()
        >>> model.set_attn_implementation("ikattn_norms")
        >>> tokens = torch.tensor([[1, 2, 3, 4, 5]])
        >>> model(tokens, output_attentions=True).attentions[0].shape
        torch.Size([1, 5, 5])
    """
    if map not in _MAPS_WITHOUT_BLOCK:
        raise ValueError(
            f"register_norms: map must be one of {', '.join(_MAPS_WITHOUT_BLOCK)}, got {map!r}"
        )
    register_attention(NORMS, _NormsAttention(map), masks_of="sdpa")
    register_implicit()


class _NormsAttention:
    """The attention function "ikattn_norms"."""

    def __init__(self, name: str) -> None:
        self._map = name
        # Modules around each module that has run, innermost first.
        self._around: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        attend = attention_function(module, "sdpa")
        options.pop("output_attentions", None)  # of which sdpa would warn that it gives none
        output, _ = attend(module, query, key, value, attention_mask, **options)
        given = Given(query, key, value, attention_mask, NORMS, options)
        parts = self._parts_of(module)
        call = interface_call(module, given, parts.kind)
        # nothing tells here of the mask of tokens: who is hidden from all queries is padding
        fill_padding(call, None if attention_mask is None else attention_mask[..., :1, :], None)
        assert parts.out_proj is not None
        with without_autocast(query.device):
            width = call.query.size(1) * call.value.size(-1)
            projection = effective_projection(parts.out_proj, width, value, describe(module))
            maps = make_maps(call, projection.weight, Surroundings(), {self._map})
        found = getattr(maps, self._map)
        assert isinstance(found, Tensor)
        return output, found

    def _parts_of(self, module: nn.Module) -> AttentionParts:
        """The parts as they are now: adapters may have taken a projection's place meanwhile.

        Raises:
            NotImplementedError: The attention cannot be recorded, or no resolver knows it.
        """
        if module not in self._around:
            for site in find_attention(_root_around(module)):
                self._around[site.module] = [ref(ancestor) for ancestor in site.ancestors]
        around = [ancestor() for ancestor in self._around.get(module, ())]
        parts = resolve(module, [ancestor for ancestor in around if ancestor is not None])
        assert parts is not None  # it called an attention function
        if parts.out_proj is None:
            raise NotImplementedError(
                f"ikattn_norms: the out-projection of {type(module).__name__} is not known: use "
                "ikattn.record, which finds it, or ikattn.recorder.register_resolver"
            )
        return parts


def _root_around(module: nn.Module) -> nn.Module:
    """The outermost module that is running and holds ``module``.

    A module does not know what it is part of, and BERT's out-projection is in the parent of what
    calls the attention function; so the stack is searched, once for each module.
    """
    root, frame = module, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module) and any(part is root for part in running.modules()):
            root = running
    return root


when_imported("transformers.modeling_utils", register_norms)
