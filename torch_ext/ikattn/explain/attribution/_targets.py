"""Which numbers of a model's output are attributed.

Sizes: B batch, L tokens that logits belong to, V logits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._linear import LinearModel
from ikattn.explain.attribution._model import logits_of

__all__ = ["Choice", "Target", "choose", "predicts_next", "with_answer"]

# See ikattn.attribute.
Target: TypeAlias = (
    "int | str | slice | tuple[int, int | None] | Sequence[int] | Tensor | "
    "Callable[[Any], Tensor] | None"
)


@dataclass
class Choice:
    """The numbers whose sum is attributed, and the token each of them belongs to.

    Attributes:
        positions: For each sequence those of the logits, ``[n]``; empty for logits ``[B, V]``.
        ids: For each sequence the logits chosen, ``[n]``.
        against: Those taken off, or None.
        function: A function of the output in their place.
    """

    positions: list[list[int]]
    ids: list[list[int]]
    against: int | None = None
    function: Callable[[Any], Tensor] | None = None

    def values(
        self, output: Any, kept: Sequence[int] | None, caller: str, linear: LinearModel | None
    ) -> Tensor:
        """The numbers, ``[n, B]``: those of a sequence that has fewer are 0.

        Args:
            output: What the model gave.
            kept: Positions that it gave logits of; None: all.
            caller: For errors.
            linear: Takes up what the tangent of a function leaves; None: the output is no linear
                map's.
        """
        if self.function is not None:
            made = _numbers(self.function, output, caller)
            if linear is not None:
                rest = _rest_of_tangent(self.function, output, caller)
                made = linear.plus_constant(made - rest, rest)
            return made.unsqueeze(0)
        logits = logits_of(output, caller)
        V = logits.size(-1)
        if self.against is not None and not 0 <= self.against < V:
            raise ValueError(f"{caller}: against must be a logit, 0 to {V - 1}, got {self.against}")
        n = max((len(own) for own in self.ids), default=0)
        rows = []
        for b, (positions, ids) in enumerate(zip(self.positions, self.ids, strict=True)):
            own = logits[b]
            if own.dim() == 2:
                at = positions if kept is None else [kept.index(i) for i in positions]
                own = own[at]  # [n, V]
            else:
                own = own.unsqueeze(0)
            index = torch.tensor(ids, device=own.device)
            found = own.gather(1, index[:, None])[:, 0]
            if self.against is not None:
                found = found - own[:, self.against]
            rows.append(nn.functional.pad(found, (0, n - len(ids))))
        return torch.stack(rows, 1)


def _numbers(function: Callable[[Any], Tensor], output: Any, caller: str) -> Tensor:
    """What a function made of an output, ``[B]``."""
    made = function(output)
    if not isinstance(made, Tensor) or made.dim() > 2 or not made.is_floating_point():
        got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else repr(made)[:60]
        raise ValueError(f"{caller}: target must give a tensor of numbers, [] or [B], got {got}")
    return made.reshape(-1)


def _rest_of_tangent(function: Callable[[Any], Tensor], output: Any, caller: str) -> Tensor:
    """What a function gives less its gradient times the output, ``[B]``: 0 of a linear one."""
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    made = _numbers(function, _on_leaves(output, leaves), caller)
    if not leaves:
        return made
    if not made.requires_grad:
        raise ValueError(
            f"{caller}: target gives numbers without a gradient in the model's output: it detaches "
            "or rounds them, or reads numbers of the output that have none"
        )
    points = [leaf for _, leaf in leaves.values()]
    rest = made.detach().double().clone()
    for b, number in enumerate(made):
        gradients = torch.autograd.grad(number, points, retain_graph=True, allow_unused=True)
        for gradient, x in zip(gradients, points, strict=True):
            if gradient is not None:
                products = gradient.double() * x.detach().double()
                rest[b] -= products.masked_fill(gradient == 0, 0).sum()
    return rest.to(made.dtype)


def _on_leaves(x: Any, leaves: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """A copy of an output whose tensors are leaves; the same tensor is the same leaf."""
    if isinstance(x, Tensor):
        if not x.requires_grad:
            return x
        return leaves.setdefault(id(x), (x, x.detach().requires_grad_()))[1]
    if isinstance(x, (tuple, list)):
        each = [_on_leaves(one, leaves) for one in x]
        return type(x)(*each) if hasattr(x, "_fields") else type(x)(each)
    if isinstance(x, Mapping) or hasattr(x, "__dict__"):
        copied = copy.copy(x)
        if isinstance(copied, MutableMapping):
            for name, one in x.items():
                copied[name] = _on_leaves(one, leaves)
        else:
            for name, one in vars(x).items():
                vars(copied)[name] = _on_leaves(one, leaves)
        return copied
    return x


def predicts_next(model: Any) -> bool:
    """Whether the logits at a token are those of the next one."""
    can = getattr(model, "can_generate", None)
    if callable(can) and bool(can()):
        return True
    name = type(model).__name__
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def with_answer(inputs: dict[str, Any], ids: Sequence[int], name: str) -> dict[str, Any]:
    """Inputs whose tokens go on with ``ids``."""
    tokens: Tensor = inputs[name]
    own = torch.tensor(list(ids), device=tokens.device).expand(tokens.size(0), -1)
    changed = {**inputs, name: torch.cat([tokens, own.to(tokens.dtype)], 1)}
    mask_name = "attention_mask" if name == "input_ids" else "decoder_attention_mask"
    mask = inputs.get(mask_name)
    if mask is not None:
        changed[mask_name] = torch.cat([mask, mask.new_ones(own.shape)], 1)
    types = inputs.get("token_type_ids")
    if types is not None and name == "input_ids":
        changed["token_type_ids"] = torch.cat([types, types[:, -1:].expand(own.shape)], 1)
    for other in ("position_ids", "cache_position"):
        if name == "input_ids" and inputs.get(other) is not None:
            raise ValueError(f"attribute: with token ids as target, inputs must not hold {other!r}")
    return changed


def choose(
    target: Any,
    against: int | None,
    logits: Callable[[], Tensor],
    tokens: Tensor | None,
    mask: Tensor | None,
    is_next: bool,
) -> Choice:
    """What ``target`` stands for.

    Args:
        target: As :func:`ikattn.attribute` has it, token ids and "answer" turned into slices.
        against: Likewise.
        logits: Makes the model's logits, ``[B, V]`` or ``[B, L, V]``, where they are needed.
        tokens: ``[B, L]``, ids of the tokens that logits belong to.
        mask: bool ``[B, L]``, True = a token.
        is_next: Logits at a token are those of the next one.

    Raises:
        ValueError: It stands for nothing.
    """
    if callable(target):
        return Choice([], [], None, target)
    if isinstance(target, slice):
        return _span(target, against, tokens, mask, is_next)
    found = logits()
    B, V = found.shape[0], found.shape[-1]
    if found.dim() == 2:
        ids = _classes(target, found)
        return Choice([[]] * B, [[_checked(i, V)] for i in ids], against)
    if mask is None:
        mask = torch.ones(found.shape[:2], dtype=torch.bool)
    there = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
    position, chosen = target if isinstance(target, tuple) else (-1, target)
    if not is_next and not isinstance(target, tuple):
        raise ValueError(
            "attribute: a model with logits for each token needs target=(position, class), or "
            f"(position, None) for the class it predicts, got {target!r}"
        )
    at = [_position(position, own) for own in there]
    ids = [
        _checked(int(found[b, at[b]].argmax()) if chosen is None else chosen, V) for b in range(B)
    ]
    return Choice([[i] for i in at], [[i] for i in ids], against)


def _span(
    span: slice, against: int | None, tokens: Tensor | None, mask: Tensor | None, is_next: bool
) -> Choice:
    if tokens is None or not is_next:
        raise ValueError(
            "attribute: a span of tokens as target needs a model that predicts the next token and "
            f"is given token ids, got {'no ids' if tokens is None else 'another model'}"
        )
    if span.step not in (None, 1):
        raise ValueError(f"attribute: target must be a span without a step, got {span}")
    positions, ids = [], []
    for b, row in enumerate(tokens.tolist()):
        there = range(len(row)) if mask is None else mask[b].nonzero()[:, 0].tolist()
        first, last, _ = span.indices(len(there))
        asked = (span.start, span.stop)
        outside = any(x is not None and not -len(there) <= x <= len(there) for x in asked)
        if outside or first >= last:
            raise ValueError(
                f"attribute: target must be a span within the {len(there)} tokens of sequence {b}, "
                f"got {span.start}:{span.stop}"
            )
        if first == 0:
            raise ValueError(
                "attribute: target must not hold the first token, which nothing predicts, got "
                f"{span.start}:{span.stop}"
            )
        positions.append([there[i - 1] for i in range(first, last)])
        ids.append([row[there[i]] for i in range(first, last)])
    return Choice(positions, ids, against)


def _classes(target: Any, logits: Tensor) -> list[int]:
    B = logits.size(0)
    if target is None:
        return [int(i) for i in logits.argmax(-1)]
    if isinstance(target, bool) or not isinstance(target, (int, Tensor, Sequence)):
        raise ValueError(f"attribute: target must be a class, or one a sequence, got {target!r}")
    if isinstance(target, int):
        return [target] * B
    own = [int(i) for i in target]
    if len(own) != B:
        raise ValueError(f"attribute: target must hold {B} classes, one a sequence, got {len(own)}")
    return own


def _checked(i: int, V: int) -> int:
    if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < V:
        raise ValueError(f"attribute: target must be a logit, 0 to {V - 1}, got {i!r}")
    return i


def _position(position: int, there: Sequence[int]) -> int:
    if not -len(there) <= position < len(there):
        raise ValueError(
            f"attribute: target must be at one of the {len(there)} tokens, got position {position}"
        )
    return there[position]
