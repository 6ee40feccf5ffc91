"""Calls of gated delta rules, by the names that transformers' layers call them by.

Sizes: B batch, L tokens of a call, S tokens with those of the calls that it goes on from, H heads,
G heads of queries and keys, d head size of query and key, d_v head size of value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.ops.delta_rule import DeltaRule
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hearing import Heard, Place, hearing, methods_of

# The ends of names: of gated delta rules, and of Kimi's, whose keys decay number by number.
_RULES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "kimi_delta_attention")


def calls_delta_rule(module: nn.Module) -> bool:
    """Whether the module's own code names a gated delta rule."""
    kind: Any = type(module)
    return bool(_rules_of(kind))


@functools.cache
def _rules_of(kind: Any) -> tuple[Place, ...]:
    """Returns the functions that a class's methods call, as namespaces and names."""
    return tuple(_rules(kind))


def _rules(kind: type) -> Iterator[Place]:
    for function in methods_of(kind):
        for name in function.__code__.co_names:
            if name.endswith(_RULES) and callable(function.__globals__.get(name)):
                yield function.__globals__, name


def hearing_delta_rules(model: nn.Module, heard: Heard) -> AbstractContextManager[None]:
    """For the time of the block, tells ``heard`` of each call: arguments and output."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return hearing("delta rule", [place for kind in kinds for place in _rules_of(kind)], heard)


class GivenRule(NamedTuple):
    """The arguments of a gated delta rule, in float32 at least.

    Attributes:
        query, key: ``[B, H, S, d]``, normalised and scaled as the rule does it.
        value: ``[B, H, S, d_v]``.
        decay: ``[B, H, S]`` or ``[B, H, S, d]``, logarithms.
        beta: ``[B, H, S]``.
        padding: bool ``[B, S]``, True = padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    padding: Tensor

    def call(self, L: int) -> AttentionCall:
        """Returns the run of the last L tokens."""
        S = self.key.size(2)
        is_there = ~self.padding
        # Padding between tokens is a column of its own: the convolution has brought it values.
        is_before = is_there.flip(1).cumsum(1).flip(1) == 0
        is_after = is_there.cumsum(1) == 0
        is_padded = bool(self.padding.any())
        return AttentionCall(
            query=self.query[:, :, S - L :],
            key=self.key,
            value=self.value,
            kind="self",
            causal=S - L,
            diagonal=S - L,
            query_padding=self.padding[:, S - L :] if is_padded else None,
            key_padding=is_before | is_after if is_padded else None,
            delta=DeltaRule.of(self.query, self.key, self.decay, self.beta),
        )


class GivenRules:
    """The arguments of a recording's delta rules in calls that later ones may go on from."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Tensor, GivenRule]] = {}

    def forget(self) -> None:
        """Lets go of all calls."""
        self._last.clear()

    def take(
        self, key: Any, layer: str, given: GivenRule, before: Tensor | None, after: Tensor | None
    ) -> GivenRule:
        """Returns what was given with that of the calls before.

        Args:
            key: The layer, and who calls it.
            layer: Its name, for errors.
            given: In this call.
            before: The state ``[B, H, d, d_v]`` that the call goes on from; None: it begins.
            after: The state that it returned; None: no call goes on from it.

        Raises:
            NotImplementedError: The call goes on from a state that no recorded call has returned.
        """
        if before is not None:
            given = self._joined(key, layer, given, before)
        if after is not None:
            self._last[key] = after.detach(), GivenRule(*(x.detach() for x in given))
        return given

    def _joined(self, key: Any, layer: str, given: GivenRule, state: Tensor) -> GivenRule:
        last = self._last.get(key)
        if last is not None and last[0].shape[1:] == state.shape[1:]:
            # beam search repeats sequences and changes their order
            items = [_equal_item(each, last[0]) for each in state]
            if None not in items:
                earlier = (x[items] for x in last[1])
                pairs = zip(earlier, given, strict=True)
                axes = (2, 2, 2, 2, 2, 1)
                return GivenRule(*(torch.cat(x, axis) for x, axis in zip(pairs, axes, strict=True)))
        raise NotImplementedError(
            f"record: {layer} goes on from a state that its last recorded call has not returned, "
            "so that the tokens in it are not known: record the calls before it in the same block, "
            "one after the other; layers=... leaves it out"
        )


def _equal_item(state: Tensor, states: Tensor) -> int | None:
    """Returns the number of the first state that is equal to one, or None."""
    own = state.to(states)
    return next((b for b, each in enumerate(states) if torch.equal(own, each)), None)


def given_rule(
    layer: str, mask: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[GivenRule, Tensor | None]:
    """Returns what a rule was called with, and the state that it goes on from.

    Args:
        layer: The layer's name, for errors.
        mask: What the layer was given as its attention_mask: ``[B, L]``, 0 = padding, or None.
        args, kwargs: Of the rule, whose tensors are ``[B, L, H, d]``.

    Raises:
        NotImplementedError: Sequences are packed, or an argument is missing.
    """
    names = ("query", "key", "value", "g", "beta")
    named = dict(zip(names, args, strict=False)) | kwargs
    if missing := [name for name in names if not isinstance(named.get(name), Tensor)]:
        raise NotImplementedError(
            f"record: {layer} must call its delta rule with tensors {', '.join(names)}, and there "
            f"is no {missing[0]}; layers=... leaves it out"
        )
    if named.get("cu_seqlens") is not None:
        raise NotImplementedError(
            f"record: {layer} calls its delta rule with cu_seqlens, sequences packed into one; "
            "call the model with a batch of sequences"
        )
    query, key, value, decay, beta = (widened(named[name].transpose(1, 2)) for name in names)
    if named.get("use_qk_l2norm_in_kernel"):
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    scale = named.get("scale")
    query = query * (query.size(-1) ** -0.5 if scale is None else scale)
    times = value.size(1) // key.size(1)
    query, key = (x.repeat_interleave(times, 1) for x in (query, key))
    sizes = (value.size(0), value.size(2))
    padding = torch.zeros(sizes, dtype=torch.bool, device=value.device)
    if isinstance(mask, Tensor) and mask.shape == sizes:
        padding = mask.to(value.device) == 0
    return GivenRule(query, key, value, decay, beta, padding), named.get("initial_state")
