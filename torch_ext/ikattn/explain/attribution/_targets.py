"""The question to a model: its arguments, and the numbers of its output to attribute.

Sizes: B batch, n targets, L tokens that logits belong to, V logits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._linear import LinearModel
from ikattn.explain.attribution._model import (
    Stack,
    is_encoder_decoder,
    logits_of,
    products_of,
    takes,
)

Target: TypeAlias = (
    "int | str | slice | tuple[int, int | None] | Sequence[int] | Tensor | "
    "Callable[[Any], Tensor] | None"
)
"""Targets as :func:`ikattn.attribute` has them."""


# Places of logits, n for each sequence (none for logits [B, V]), and the logits chosen there.
Choice: TypeAlias = "tuple[list[list[int]], list[list[int]]]"


class Task(NamedTuple):
    """A model, its arguments, and numbers of its output."""

    model: nn.Module  # in eval mode
    inputs: dict[str, Any]
    positions: list[list[int]]  # of the numbers whose sum is attributed
    ids: list[list[int]]  # of these numbers
    against: int | None  # the logit that is taken off
    function: Callable[[Any], Tensor] | None  # of the output, in place of such numbers
    plain: Any  # the output, where the model had to be asked to know the target; or None

    @staticmethod
    def of(
        model: nn.Module,
        named: dict[str, Any],
        target: Any,
        against: int | None,
        prompt_length: int | None,
    ) -> Task:
        """Makes the task of a target as :func:`ikattn.attribute` has it."""
        is_seq2seq, is_next = is_encoder_decoder(model), predicts_next(model)
        name = "decoder_input_ids" if is_seq2seq else "input_ids"
        if isinstance(target, Tensor) and target.dim() == 0:
            target = target.item()
        if isinstance(target, list) and not all(isinstance(i, int) for i in target):
            raise ValueError(f"attribute: a list as target must hold token ids, got {target!r:.60}")
        if isinstance(target, (list, Tensor)) and is_next:
            ids = [int(i) for i in target]
            named, target = _with_answer(named, ids, name), slice(-len(ids), None)
        if isinstance(target, str):
            if target != "answer" or prompt_length is None:
                raise ValueError(
                    'attribute: target must be "answer", with prompt_length, a span, token ids, '
                    "a class, a text with tokenizer=, or a function, got "
                    f"{target!r} and prompt_length={prompt_length}"
                )
            target = slice(prompt_length, None)
        mask = named.get("decoder_attention_mask" if is_seq2seq else "attention_mask")
        mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if callable(target):
            return Task(model, named, [], [], None, target, None)
        if isinstance(target, slice):
            choice = _span(target, named.get(name), mask, is_next)
            return Task(model, named, *choice, against, None, None)
        with torch.no_grad():
            plain = model(**named)
        choice = _of_logits(target, logits_of(plain, "attribute"), mask, is_next)
        return Task(model, named, *choice, against, None, plain)

    @property
    def is_seq2seq(self) -> bool:
        return is_encoder_decoder(self.model)

    def values(self, linear: LinearModel | None = None) -> Tensor:
        """Returns the numbers chosen, ``[n, B]``, of a call of the model or of its linear map."""
        options: dict[str, Any] = {}
        kept = None
        positions = sorted({i for own in self.positions for i in own})
        if positions and takes(self.model, "logits_to_keep"):
            kept = positions
            options["logits_to_keep"] = torch.tensor(kept)
        if takes(self.model, "use_cache") and "use_cache" not in self.inputs:
            options["use_cache"] = False
        with nullcontext() if linear is None else linear:
            output = self.output(**options)
        return self.values_of(output, kept, linear)

    def values_of(
        self, output: Any, kept: Sequence[int] | None = None, linear: LinearModel | None = None
    ) -> Tensor:
        """Returns the numbers, ``[n, B]``, of an output: 0 where a sequence has fewer than others.

        The output has logits of the positions kept, None: of all. A linear map takes up what the
        tangent of a function leaves.
        """
        against = self.against
        if self.function is not None:
            made = _numbers(self.function, output)
            if linear is not None:
                rest = _rest_of_tangent(self.function, output)
                made = linear.with_constant(made - rest, rest)
            return made.unsqueeze(0)
        logits = logits_of(output, "attribute")
        V = logits.size(-1)
        if against is not None and not (isinstance(against, int) and 0 <= against < V):
            raise ValueError(f"attribute: against must be a logit, 0 to {V - 1}, got {against!r}")
        n = max((len(own) for own in self.ids), default=0)
        rows = []
        for b, (at, ids) in enumerate(zip(self.positions, self.ids, strict=True)):
            own = logits[b]
            if own.dim() == 1:
                own = own.unsqueeze(0)
            else:
                own = own[at if kept is None else [kept.index(i) for i in at]]  # [n, V]
            found = own.gather(1, torch.tensor(ids, device=own.device)[:, None])[:, 0]
            if against is not None:
                found = found - own[:, against]
            rows.append(nn.functional.pad(found, (0, n - len(ids))))
        return torch.stack(rows, 1)

    def output(self, **options: Any) -> Any:
        """Returns what the model gives with other arguments in place of some."""
        return self.model(**{**self.inputs, **options})

    def source_ids(self) -> list[Tensor | None]:
        """Returns the ids that the stacks of blocks read."""
        names = ["input_ids", "decoder_input_ids"] if self.is_seq2seq else ["input_ids"]
        return [self.inputs.get(name) for name in names]

    def is_unnamed(self, stack: Stack) -> bool:
        """Whether a stack read something else than a vector for each id that was given."""
        ids = self.source_ids()[0]
        return ids is None or stack.source is None or stack.source.shape[:2] != ids.shape


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Returns a model's arguments by name, without labels."""
    if isinstance(inputs, Tensor):
        first = next(iter(inspect.signature(model.forward).parameters))
        inputs = {first: inputs}
    if not isinstance(inputs, Mapping):
        raise ValueError(
            f"attribute: inputs must be a tensor, or arguments by name, got {type(inputs).__name__}"
        )
    named = {name: x for name, x in inputs.items() if name != "labels"}
    for name, x in named.items():
        if isinstance(x, Tensor) and x.numel() == 0:
            raise ValueError(f"attribute: inputs[{name!r}] must hold a token, got {list(x.shape)}")
        if isinstance(x, Tensor) and x.is_inference():
            named[name] = x.clone()
    return named


def _numbers(function: Callable[[Any], Tensor], output: Any) -> Tensor:
    made = function(output)
    if not isinstance(made, Tensor) or made.dim() > 2 or not made.is_floating_point():
        got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else repr(made)[:60]
        raise ValueError(f"attribute: target must give a tensor of numbers, [] or [B], got {got}")
    return made.reshape(-1)


def _rest_of_tangent(function: Callable[[Any], Tensor], output: Any) -> Tensor:
    """Returns a function's numbers less its gradient times the output, ``[B]``: 0 if linear."""
    leaves: dict[int, tuple[Tensor, Tensor]] = {}
    made = _numbers(function, _on_leaves(output, leaves))
    if not leaves:
        return made
    if not made.requires_grad:
        raise ValueError(
            "attribute: target must give numbers with a gradient in the model's output, got some "
            "without: let it read numbers that have one, and neither detach nor round them"
        )
    points = [leaf for _, leaf in leaves.values()]
    rest = made.detach().double().clone()
    for b, number in enumerate(made):
        gradients = torch.autograd.grad(number, points, retain_graph=True, allow_unused=True)
        rest[b] -= sum(product.sum() for product in products_of(gradients, points))
    return rest.to(made.dtype)


def _on_leaves(x: Any, leaves: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """Copies an output with leaves for its tensors; the same tensor is the same leaf."""
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


def _with_answer(inputs: dict[str, Any], ids: Sequence[int], name: str) -> dict[str, Any]:
    tokens = inputs.get(name)
    if not isinstance(tokens, Tensor) or not ids:
        raise ValueError(
            f"attribute: target as token ids needs inputs[{name!r}] and one id or more, got "
            f"{', '.join(inputs)} and {len(ids)} ids"
        )
    own = torch.tensor(list(ids), device=tokens.device).expand(tokens.size(0), -1)
    changed = {**inputs, name: torch.cat([tokens, own.to(tokens.dtype)], 1)}
    mask_name = "attention_mask" if name == "input_ids" else "decoder_attention_mask"
    mask = inputs.get(mask_name)
    if mask is not None:
        if not bool(mask[:, -1].all()):
            raise ValueError(
                f"attribute: target as token ids needs sequences padded on the left, and "
                f"inputs[{mask_name!r}] has padding on the right"
            )
        changed[mask_name] = torch.cat([mask, mask.new_ones(own.shape)], 1)
    types = inputs.get("token_type_ids")
    if types is not None and name == "input_ids":
        changed["token_type_ids"] = torch.cat([types, types[:, -1:].expand(own.shape)], 1)
    for other in ("position_ids", "cache_position"):
        if name == "input_ids" and inputs.get(other) is not None:
            raise ValueError(
                f"attribute: target as token ids adds tokens, of which inputs[{other!r}] has no "
                "positions: leave it out, or give the whole sequence and a span"
            )
    return changed


def _of_logits(target: Any, logits: Tensor, mask: Tensor | None, is_next: bool) -> Choice:
    """Chooses among logits ``[B, V]``, or ``[B, L, V]`` with a mask ``[B, L]``, True = a token."""
    B, V = logits.shape[0], logits.shape[-1]
    if logits.dim() == 2:
        return [[]] * B, [[_checked(i, V)] for i in _classes(target, logits)]
    if mask is None:
        mask = torch.ones(logits.shape[:2], dtype=torch.bool)
    there = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
    is_pair = isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], int)
    position, chosen = target if is_pair else (-1, target)
    if not is_pair and (isinstance(target, tuple) or not is_next):
        raise ValueError(
            f"attribute: logits {list(logits.shape)} for each token need target=(position, class), "
            f"or (position, None) for the class that the model predicts, got {target!r}"
        )
    outside = [own for own in there if not -len(own) <= position < len(own)]
    if outside:
        raise ValueError(
            f"attribute: target must be at one of the {len(outside[0])} tokens, got position "
            f"{position}"
        )
    at = [own[position] for own in there]
    ids = [
        _checked(int(logits[b, at[b]].argmax()) if chosen is None else chosen, V) for b in range(B)
    ]
    return [[i] for i in at], [[i] for i in ids]


def _span(span: slice, tokens: Tensor | None, mask: Tensor | None, is_next: bool) -> Choice:
    if tokens is None or not is_next:
        raise ValueError(
            "attribute: a span of tokens as target needs a model that predicts the next token and "
            f"is given token ids, got {'no ids' if tokens is None else 'logits of something else'}"
        )
    asked = (span.start, span.stop)
    if span.step not in (None, 1) or not all(x is None or isinstance(x, int) for x in asked):
        raise ValueError(f"attribute: target must be a span of integers without a step, got {span}")
    positions, ids = [], []
    for b, row in enumerate(tokens.tolist()):
        there = range(len(row)) if mask is None else mask[b].nonzero()[:, 0].tolist()
        first, last, _ = span.indices(len(there))
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
    return positions, ids


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
