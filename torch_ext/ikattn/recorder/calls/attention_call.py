"""One run of attention: what it was given, and its weights.

Sizes: B batch, H query heads, G key/value heads, L queries, S keys, d head size of query and key,
d_v head size of value, D model size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ikattn.maps.contribution_maps import Contributions, contributions, streamed_contributions
from ikattn.ops.attention import implicit_kernel_weights
from ikattn.ops.delta_rule import DeltaRule

# Up to 256 MiB in float32, weights that a map needs are held.
MOST_WEIGHTS = 1 << 26
# Up to so many, holding weights takes no more time than streaming them, where no map needs them and
# no kernel streams them on the CPU.
_FEW_WEIGHTS = 1 << 20

# The axes of a run's tensors, the last ones of those that have fewer.
_AXES = {
    **{"query": "BHL.", "key": "BGS.", "value": "BGS.", "gate": "BHL.", "sinks": "BHL."},
    **{
        "given_weights": "BHLS",
        "attn_mask": "BHLS",
        "key_bias": "BHS",
        "query_padding": "BL",
        "key_padding": "BS",
    },
}


@dataclass
class AttentionCall:
    """Inputs of a layer of attention in one run, in float32 at least.

    Attributes:
        query: ``[B, H, L, d]``.
        key: ``[B, G, S, d]``.
        value: ``[B, G, S, d_v]``.
        kind: Whether queries and keys are the same tokens.
        kernel: As for ``ikattn.ops.similarity_and_magnitude``, and so is p.
        frequencies: w1 and w2 of the implicit kernel, else None.
        scaling: Of query . key in the logits; None: 1 / sqrt(d).
        attn_mask: Broadcastable to ``[B, H, L, S]``. Bool: True = may attend; floating point: added
            to the logits, -inf where a pair is hidden.
        causal: Query i sees keys up to i + causal, besides the mask; None: all.
        key_bias: ``[B, H or 1, S]``, added to the logits, -inf where a key is hidden.
        query_padding: bool ``[B, L]``, True = padding, or None.
        key_padding: bool ``[B, S]``, likewise.
        diagonal: The token of query i is that of key i + diagonal.
        softcap: Logits are softcap tanh(logits / softcap) before masks.
        softmax_heads: Bool ``[H]``, heads that compute softmax whatever the kernel; None: none.
        sinks: ``[H]``, or ``[B, H, L, 1]``, a logit more in each row's sum, of no key.
        streams: Whether weights are never held where no map needs them, however few they are.
        delta: The gated delta rule, or Mamba-2, that makes the weights, which have signs, in place
            of a kernel and its masks; row ``causal`` is the first query's. None: a kernel does.
        given_weights: ``[B, H, L, S]``, which the module has computed, in place of a kernel and
            its masks; query and key are then not known. None: a kernel makes them.
        gate: ``[B, H, L, d_v]`` or ``[B, H, L, 1]``, what the model multiplies heads with before
            the out-projection; None: nothing. Maps of contributions count it, weights do not.
        given_dtype: The type that query and key were given in, where they are still the same
            numbers. Weights that are never held are made of them in it: kernels for 16 bits err as
            such a model does, and take less time.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kind: Literal["self", "cross"]
    kernel: str = "dot"
    p: float | None = 2.0
    frequencies: tuple[Tensor, Tensor | None] | None = None
    scaling: float | None = None
    attn_mask: Tensor | None = None
    causal: int | None = None
    key_bias: Tensor | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None
    diagonal: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    softmax_heads: Tensor | None = None
    streams: bool = False
    delta: DeltaRule | None = None
    given_weights: Tensor | None = None
    gate: Tensor | None = None
    given_dtype: torch.dtype | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, L and S."""
        B, H, L, _ = self.query.shape
        return B, H, L, self.key.size(2)

    @property
    def has_own_softmax(self) -> bool:
        """Whether its weights are no plain softmax or kernel, which ``streamed_contributions`` has.

        Maps are then made of weights that are held.
        """
        names = ("softcap", "sinks", "softmax_heads", "gate", "delta", "given_weights")
        return any(getattr(self, name) is not None for name in names)

    @property
    def why_no_product(self) -> str:
        """Why its weights are no product of similarity and magnitude; "": they are."""
        product = "no product of similarity and magnitude"
        if self.delta is not None:
            return f"its weights are those of a recurrent state, which are {product}"
        if self.given_weights is not None:
            return "its module computes the weights itself, and query and key are not known"
        extra = (("a soft cap", self.softcap), ("sinks", self.sinks))
        found = " and ".join(words for words, x in extra if x is not None)
        return found and f"its logits have {found}, so that weights are {product}"

    @property
    def paddings(self) -> dict[str, Any]:
        """Padding of queries and keys, as arguments of the functions of maps."""
        return {"query_padding": self.query_padding, "key_padding": self.key_padding}

    @property
    def has_weights(self) -> bool:
        """Whether all weights have been made, and are held."""
        return "weights" in vars(self)

    @cached_property
    def weights(self) -> Tensor:
        """The normalised weights, before dropout, ``[B, H, L, S]``; 0 for who sees no key.

        Those of a delta rule are as they are: a row does not add up to 1.
        """
        if self.given_weights is not None:
            return self.given_weights
        if self.delta is not None:
            first, L = self.causal or 0, self.query.size(2)
            return self.delta.rows(first, first + L, self.key.size(2))
        if self.frequencies is None:
            return self._softmax_weights()
        weights = implicit_kernel_weights(
            self.query,
            self.key,
            *self.frequencies,
            p=self.p,
            **self._options(),
        )
        if self.softmax_heads is None:
            return weights
        return torch.where(self.softmax_heads[:, None, None], self._softmax_weights(), weights)

    @property
    def applied_weights(self) -> Tensor:
        """The weights, multiplied with a gate that has one number a head."""
        return self.weights if self.gate is None else self.weights * self.gate.to(self.weights)

    def _softmax_weights(self) -> Tensor:
        scaling = self.query.size(-1) ** -0.5 if self.scaling is None else self.scaling
        query = self.query * scaling  # takes less time than scaling logits
        logits = _times_groups(query, self.key.mT)
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.key_bias is not None:
            logits = logits + self.key_bias.unsqueeze(-2)
        mask = self.mask()
        if mask is None and self.key_bias is None and self.sinks is None and logits.size(-1) > 0:
            return logits.softmax(-1)  # every query sees a key
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -math.inf) if is_bool else logits + mask
        blind = (logits.detach() == -math.inf).all(-1, keepdim=True)  # true without keys
        logits = logits.masked_fill(blind, 0.0)
        if self.sinks is not None:
            sinks = self.sinks if self.sinks.dim() == 4 else self.sinks.view(1, -1, 1, 1)
            sinks = sinks.expand(*logits.shape[:-1], 1)
            return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].masked_fill(blind, 0.0)
        return logits.softmax(-1).masked_fill(blind, 0.0)

    def context(self) -> Tensor:
        """The weighted values with their heads merged, ``[B, L, H d_v]``."""
        B, H, L, S = self.sizes
        rows = max(1, MOST_WEIGHTS // max(1, B * H * S))
        if rows < L and not self.has_weights:
            blocks = [self.narrow(i, min(i + rows, L)) for i in range(0, L, rows)]
            return torch.cat([block.context() for block in blocks], 1)
        return _times_groups(self.weights, self.value).transpose(1, 2).flatten(2)

    def context_of_row(self, b: int, place: slice | Tensor) -> Tensor:
        """``context`` of one query of item b alone: a slice of one, or its number, [1]."""
        if not self.has_weights:
            return self.row(b, place).context()
        own, value = self.weights[b], self.value[b]
        own = own.index_select(1, place) if isinstance(place, Tensor) else own[:, place]
        groups = value.size(0)  # whose heads are rows of one product
        own = own.reshape(groups, own.size(0) // groups, own.size(-1))
        return torch.bmm(own, value).view(1, 1, -1)

    def part(self, **parts: slice | Tensor) -> AttentionCall:
        """The run of some items, B=, queries, L=, or keys, S=: a slice, or numbers ``[n]``."""
        sizes = dict(zip("BHLS", self.sizes, strict=True))
        changes = {}
        for name, axes in _AXES.items():
            x = getattr(self, name)
            if x is None:
                continue
            own = zip(axes[-x.dim() :], x.shape, strict=True)
            # an axis of another size stands for all
            index = [parts[a] if a in parts and sizes[a] == n else slice(None) for a, n in own]
            changes[name] = x[tuple(index)]
        return dataclasses.replace(self, **changes)

    def item(self, b: int) -> AttentionCall:
        """The run of item b alone."""
        frequencies = self.frequencies
        if frequencies is not None and frequencies[0].dim() == 4 and frequencies[0].size(0) > 1:
            w1, w2 = frequencies
            frequencies = w1[b : b + 1], None if w2 is None else w2[b : b + 1]
        delta = None if self.delta is None else self.delta.item(b)
        own = self.part(B=slice(b, b + 1))
        return dataclasses.replace(own, frequencies=frequencies, delta=delta)

    def row(self, b: int, place: slice | Tensor) -> AttentionCall:
        """The run of one query of item b alone: a slice of one, or its number, [1]."""
        item = dataclasses.replace(self.item(b), query_padding=None, key_padding=None, gate=None)
        if isinstance(place, Tensor) and self.causal is None:
            return item.part(L=place)
        start = int(place) if isinstance(place, Tensor) else place.start
        return item.narrow(start, start + 1)  # what it sees may depend on its number

    def narrow(self, start: int, end: int) -> AttentionCall:
        """The run of queries from ``start`` to before ``end``."""
        causal = None if self.causal is None else self.causal + start
        own = self.part(L=slice(start, end))
        return dataclasses.replace(own, causal=causal, diagonal=self.diagonal + start)

    def without_later_keys(self) -> AttentionCall:
        """The run without the keys that causality hides from all of its queries."""
        L, S = self.sizes[2:]
        end = S if self.causal is None else min(S, L + self.causal)
        return self if end == S else self.part(S=slice(end))

    def maps(self, out_proj_weight: Tensor, names: Collection[str], **block: Any) -> Contributions:
        """``ikattn.contributions`` of this run.

        Where there are many weights they are never held, unless a map for every head needs them.
        """
        if not names:
            return Contributions(**self.paddings)
        block |= {"maps": names, "diagonal": self.diagonal, **self.paddings}
        holds_weights = "per_head" in names or self.has_weights or self.has_own_softmax
        streams = self.streams or (self.frequencies is None and self.query.is_cpu)
        are_few = math.prod(self.sizes) <= _FEW_WEIGHTS and not streams
        if holds_weights or are_few:
            found = contributions(self.applied_weights, self.value, out_proj_weight, **block)
            has_signs = self.gate is not None or self.delta is not None
            if has_signs and found.per_head is not None:
                found.per_head = found.per_head.abs()
            return found
        w1, w2 = self.frequencies or (None, None)
        dtype = self.given_dtype or self.query.dtype
        return streamed_contributions(
            self.query.to(dtype),
            self.key.to(dtype),
            self.value,
            out_proj_weight,
            w1=w1,
            w2=w2,
            p=self.p,
            scale=self.scaling,
            **self._options(),
            **block,
        )

    def hidden(self) -> Tensor | None:
        """The pairs that a mask hides, bool, broadcastable to ``[B, H, L, S]``; None: none."""
        hidden, mask = None, self.mask()
        if mask is not None:
            hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        if self.key_bias is None:
            return hidden
        keys = (self.key_bias == -math.inf).unsqueeze(-2)
        return keys if hidden is None else hidden | keys

    def mask(self) -> Tensor | None:
        """``attn_mask`` and ``causal`` as one mask."""
        if self.causal is None:
            return self.attn_mask
        sizes = self.sizes[2:]
        seen = torch.ones(sizes, dtype=torch.bool, device=self.query.device).tril(self.causal)
        if self.attn_mask is None:
            return seen[None, None]
        if self.attn_mask.dtype == torch.bool:
            return self.attn_mask & seen
        return self.attn_mask.masked_fill(~seen, -math.inf)

    def _options(self) -> dict[str, Any]:
        """Masks and groups of heads, as arguments of the operators."""
        is_causal = self.causal == 0  # as the operators have it: the first query sees one key
        mask = self.attn_mask if is_causal else self.mask()
        masks = {"attn_mask": mask, "is_causal": is_causal, "key_bias": self.key_bias}
        return masks | {"enable_gqa": self.key.size(1) != self.query.size(1)}


def joined(layer: str, calls: Sequence[AttentionCall]) -> AttentionCall:
    """Calls of a layer one after the other, as one: queries see the keys of their own call.

    Raises:
        NotImplementedError: Calls of different items, or with masks of their own.
    """
    first = calls[0]
    simple = all(
        call.query.size(0) == first.query.size(0)
        and call.attn_mask is None
        and call.causal is None
        and call.key_bias is None
        and call.frequencies is None
        and call.sizes[2] == call.sizes[3]
        for call in calls
    )
    if not simple:
        raise NotImplementedError(
            f"record: {layer} calls its attention function {len(calls)} times in one forward, with "
            f"queries {[list(call.query.shape) for call in calls]}; such calls must be of "
            "consecutive tokens of the same items, without masks; layers=... leaves it out"
        )
    sizes = [call.sizes[2] for call in calls]
    part = torch.repeat_interleave(
        torch.arange(len(sizes), device=first.query.device),
        torch.tensor(sizes, device=first.query.device),
    )
    return dataclasses.replace(
        first,
        query=torch.cat([call.query for call in calls], 2),
        key=torch.cat([call.key for call in calls], 2),
        value=torch.cat([call.value for call in calls], 2),
        attn_mask=(part[:, None] == part)[None, None],
        query_padding=None,
        key_padding=None,
    )


def with_values_of(layer: str, calls: Sequence[AttentionCall]) -> AttentionCall:
    """Calls of a layer with the same queries and keys as one, whose heads have all values.

    Raises:
        NotImplementedError: Queries or keys differ.
    """
    first = calls[0]
    for call in calls[1:]:
        if not (torch.equal(call.query, first.query) and torch.equal(call.key, first.key)):
            raise NotImplementedError(
                f"record: {layer} calls its attention function {len(calls)} times and adds up what "
                "they return; such calls must have the same queries and keys, and theirs differ; "
                "layers=... leaves it out"
            )
    return dataclasses.replace(first, value=torch.cat([call.value for call in calls], -1))


def _times_groups(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies heads ``[B, H, L, n]`` with the matrices ``[B, G, n, m]`` of their groups."""
    if x.size(1) == y.size(1):
        return x @ y
    grouped: Tensor = x.unflatten(1, (y.size(1), -1))  # [B, G, H / G, L, n]
    return (grouped @ y.unsqueeze(2)).flatten(1, 2)
