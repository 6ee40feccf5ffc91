"""Calls of gated delta rules and of Mamba-2, by the names that transformers' layers call them by.

Sizes: B batch, L tokens of a call, S tokens with those of the calls that it goes on from, H heads,
G heads of queries and keys, d head size of query and key, d_v head size of value.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikattn._precision import widened
from ikattn.ops.delta_rule import DeltaRule
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.recorder.calls.hearing import Heard, Place, Told, hearing, methods_of

# The ends of names: of gated delta rules, of Kimi's, whose keys decay number by number, of Mamba-2.
_SCANS = ("mamba2_chunk_scan", "mamba2_selective_state_update")
_RULES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule", "kimi_delta_attention", *_SCANS)


def calls_delta_rule(module: nn.Module) -> bool:
    """Whether the module's own code names a gated delta rule or Mamba-2's scan."""
    kind: Any = type(module)
    return bool(_rules_of(kind))


@functools.cache
def _rules_of(kind: Any) -> tuple[Place, ...]:
    """Returns the functions that a class's methods call, as namespaces and names."""
    return tuple(
        (function.__globals__, name)
        for function in methods_of(kind)
        for name in function.__code__.co_names
        if name.endswith(_RULES) and callable(function.__globals__.get(name))
    )


def hearing_delta_rules(model: nn.Module, heard: Heard) -> AbstractContextManager[None]:
    """For the time of the block, tells ``heard`` of each call."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return hearing("delta rule", [place for kind in kinds for place in _rules_of(kind)], heard)


class GivenRule(NamedTuple):
    """The arguments of a gated delta rule, in float32 at least.

    Attributes:
        query, key: ``[B, H, S, d]``, normalised and scaled as the rule does it.
        value: ``[B, H, S, d_v]``.
        decay: ``[B, H, S]`` or ``[B, H, S, d]``, logarithms.
        beta, erased, own: ``[B, H, S]``, as ``DeltaRule.of`` has them.
        padding: bool ``[B, S]``, True = padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    erased: Tensor
    own: Tensor
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
            delta=DeltaRule.of(self.query, self.key, self.decay, self.beta, self.erased, self.own),
        )


class GivenRules:
    """The arguments of a recording's delta rules in calls that later ones may go on from."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Tensor, GivenRule]] = {}

    def take(
        self, key: Any, layer: str, given: GivenRule, before: Tensor | None, after: Tensor | None
    ) -> GivenRule:
        """Returns what was given with that of the calls before of ``key``, a layer and its caller.

        ``before`` is the state ``[B, H, d, d_v]`` that the call goes on from, None: it begins;
        ``after`` the one that it returned, None: no call goes on from it.

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
            states = last[0]
            items = [
                next((b for b, each in enumerate(states) if torch.equal(own, each)), None)
                for own in state.to(states)
            ]
            if None not in items:
                earlier = (x[items] for x in last[1])
                pairs = zip(earlier, given, strict=True)
                axes = (2,) * 7 + (1,)
                return GivenRule(*(torch.cat(x, axis) for x, axis in zip(pairs, axes, strict=True)))
        raise NotImplementedError(
            f"record: {layer} goes on from a state that its last recorded call has not returned, "
            "so that the tokens in it are not known: record the calls before it in the same block, "
            "one after the other; layers=... leaves it out"
        )


def given_rule(layer: str, mask: Any, told: Told) -> tuple[GivenRule, Tensor | None]:
    """Returns the arguments of a rule, ``[B, L, H, d]``, and the state that it goes on from.

    ``mask`` is what the layer was given as its attention_mask: ``[B, L]``, 0 = padding, or None.

    Raises:
        NotImplementedError: Sequences are packed, or an argument is missing.
    """
    name, needed = told.name, ["query", "key", "value", "g", "beta"]
    if name.endswith(_SCANS):
        needed = ["hidden_states", "dt", "A", "B", "C"]
    is_step = name.endswith("_state_update")
    names = ["state", *needed, "D"] if is_step else needed
    named = dict(zip(names, told.args, strict=False)) | told.kwargs
    if missing := [each for each in needed if not isinstance(named.get(each), Tensor)]:
        raise NotImplementedError(
            f"record: {layer} must call {name} with tensors {', '.join(needed)}, and there is no "
            f"{missing[0]}; layers=... leaves it out"
        )
    for packed in ("cu_seqlens", "seq_idx"):
        if named.get(packed) is not None:
            raise NotImplementedError(
                f"record: {layer} calls {name} with {packed}, sequences packed into one; call the "
                "model with a batch of sequences"
            )
    if name.endswith(_SCANS):
        given = _scan(_unfolded(named) if is_step else named)
        state = named["state"] if is_step else named.get("initial_states")
    else:
        given, state = _delta_rule(named), named.get("initial_state")
    padding = given.padding
    if isinstance(mask, Tensor) and mask.shape == padding.shape:
        given = given._replace(padding=mask.to(padding.device) == 0)
    return given, state


def _delta_rule(named: dict[str, Any]) -> GivenRule:
    query, key, value, decay, beta = (
        widened(named[name].transpose(1, 2)) for name in ("query", "key", "value", "g", "beta")
    )
    if named.get("use_qk_l2norm_in_kernel"):
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    scale = named.get("scale")
    query = query * (query.size(-1) ** -0.5 if scale is None else scale)
    own = torch.zeros_like(beta)
    return _with_all_heads(query, key, value, decay, beta, beta, own)


def _scan(named: dict[str, Any]) -> GivenRule:
    """Returns Mamba-2's arguments by the terms of a delta rule that erases nothing."""
    dt, D = named["dt"], named.get("D")
    if named.get("dt_bias") is not None:
        dt = dt + named["dt_bias"].to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if named.get("dt_softplus") else dt
    dt = widened(dt).clamp(*named.get("dt_limit", (0.0, torch.inf))).transpose(1, 2)
    value, key, query = (
        widened(named[name].transpose(1, 2)) for name in ("hidden_states", "B", "C")
    )
    own = torch.zeros_like(dt) if D is None else widened(D)[:, None].expand_as(dt)
    decay = dt * widened(named["A"])[:, None]
    return _with_all_heads(query, key, value, decay, dt, torch.zeros_like(dt), own)


def _unfolded(named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of one step, without tokens, as those of a scan of one token."""
    found = named | {name: named[name].unsqueeze(1) for name in ("hidden_states", "B", "C")}
    found |= {"dt": named["dt"][..., 0].unsqueeze(1), "A": named["A"][:, 0, 0]}
    of_heads = {name: named[name][:, 0] for name in ("D", "dt_bias") if named.get(name) is not None}
    return found | of_heads


def _with_all_heads(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> GivenRule:
    """Repeats queries and keys for the heads of values; nothing is padding."""
    B, H, L, _ = value.shape
    query, key = (x.repeat_interleave(H // x.size(1), 1) for x in (query, key))
    padding = torch.zeros(B, L, dtype=torch.bool, device=value.device)
    return GivenRule(query, key, value, *others, padding)  # type: ignore[call-arg]
