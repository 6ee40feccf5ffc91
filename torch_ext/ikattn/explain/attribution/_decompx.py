"""DecompX: the parts of tokens in a number, as one gradient of the model as a linear map.

Sizes: B batch, S source tokens, n targets, D model size.
Source: A. Modarressi et al., "DecompX", ACL 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from ikattn.explain.attribution._linear import Activation, LinearModel, tolerance_of
from ikattn.explain.attribution._model import (
    Stack,
    activation_bytes,
    called_linear,
    checkpointed,
    entered,
    products_of,
    stacks_of,
)
from ikattn.explain.attribution._places import readers_of
from ikattn.explain.attribution._targets import Task
from ikattn.explain.attribution.attribution import Attribution

_MUCH = 1 << 30  # bytes of activations, above which blocks run twice instead


def decompose(task: Task, each: bool, activation: Activation) -> Attribution:
    """Attributes by DecompX, targets apart with ``each``."""
    model = task.model
    with torch.no_grad():
        expected = task.values() if task.plain is None else task.values_of(task.plain)
    expected = expected.double()  # [n, B]
    if not bool(expected.isfinite().all()):
        raise ValueError(f"attribute: the value must be finite, got {expected.sum(0).tolist()}")
    B, stacks, linear = expected.size(1), stacks_of(model, "attribute"), LinearModel(activation)
    with ExitStack() as opened:
        called: list[tuple[Stack, torch.Size]] = []  # in the order in which they run
        if activation_bytes(stacks, task.inputs) > _MUCH:
            opened.enter_context(checkpointed(stacks, linear))
        # in the backward pass too, where blocks may run once more
        opened.enter_context(called_linear(model, linear))
        readers = readers_of(task, stacks)

        def entering(stack: Stack, n: int, x: Tensor) -> Tensor:
            """Returns a leaf in the place of what a stack is called with, if it is of B sequences.

            Other stacks read what an earlier one made, or the patches of all pictures in a row,
            which enter the vectors of tokens, and keep it.
            """
            called.append((stack, x.shape))
            is_of_tokens = x.dim() > 2 and B in x.shape[:2]
            is_one_row = len(stacks) == 1 and B == 1 and x.dim() == 2
            is_made = stack not in readers and x.requires_grad
            keeps = is_made or not (is_of_tokens or is_one_row)
            stack.source = x if keeps else x.detach().requires_grad_()
            return stack.source

        for stack in stacks:
            opened.enter_context(entered(stack, partial(entering, stack)))
        values = task.values(linear)
        ran = [stack for stack, _ in called]
        if not task.is_seq2seq:  # first the stack of which tokens are known
            ran = sorted((stack for stack in stacks if stack in ran), key=task.is_unnamed)
        read = [stack.source for stack in ran]
        sources = [x for x in read if x is not None and x.is_leaf and x.requires_grad]
        if not sources:
            shapes = ", ".join(f"{stack.name or 'it'} with {list(x)}" for stack, x in called)
            raise ValueError(
                f"attribute: target must give one number for each sequence, got {B} numbers; "
                f"called were, of {type(model).__name__}, {shapes or 'no blocks'}"
            )
        if not values.requires_grad:
            raise RuntimeError(
                "attribute: no gradient comes back from the value to what enters "
                f"{ran[-1].name or type(model).__name__}: between them the model must not detach "
                "or round numbers, nor compute in an autograd function without a backward"
            )
        are_first = [has_tokens_first(x, values) for x in sources]
        asked = list(values.sum(1)) if each else [values.sum()]
        rows: list[list[Tensor]] = []
        for row, value in enumerate(asked):
            linear.clear()
            try:
                gradients = torch.autograd.grad(
                    value, sources, retain_graph=row + 1 < len(asked), allow_unused=True
                )
            except CheckpointError as error:
                raise RuntimeError(
                    f"attribute: {type(model).__name__} runs blocks in torch.utils.checkpoint, "
                    "which runs them once more in the backward pass, where they are no linear map: "
                    "call the model without it, by model.gradient_checkpointing_disable()"
                ) from error
            parts = parts_of(gradients, sources)
            check_sum(parts, float(value.detach()), linear, sources[0], model)
            pairs = zip(parts, are_first, strict=True)
            rows.append([part.mT if is_first else part for part, is_first in pairs])
    values = values.detach().double()
    if not each:
        values, expected = values.sum(0, keepdim=True), expected.sum(0, keepdim=True)
    return _found(rows, values.T, expected.T, sources[0], task, each)


def has_tokens_first(x: Tensor, values: Tensor) -> bool:
    """Whether blocks read ``[S, B, D]``, by what the first sequence's number depends on."""
    B = values.size(1)
    if x.dim() != 3 or B == 1 or x.size(0) != x.size(1):
        return x.dim() == 3 and x.size(0) != B
    number = values[:, 0].sum()
    (gradient,) = torch.autograd.grad(number, x, retain_graph=True, allow_unused=True)
    return gradient is not None and bool((gradient[1:] != 0).any())


def _found(
    rows: Sequence[Sequence[Tensor]],
    values: Tensor,
    expected: Tensor,
    source: Tensor,
    task: Task,
    each: bool,
) -> Attribution:
    """Makes the attribution of n targets, which stay apart with ``each``; otherwise there is one.

    Rows are parts ``[B, S]`` by target and stack of blocks, values ``[B, n]`` those of the linear
    map, and those expected the model's. ``source`` is what enters a stack.
    """
    parts = [torch.stack(own, 1) for own in zip(*rows, strict=True)]  # [B, n, S] each
    used = parts  # an encoder may add nothing
    if len(parts) > 2 or not task.is_seq2seq:
        used = [part for part in parts if bool((part != 0).any())] or parts[:1]
    name = type(task.model).__name__
    if len(used) > 2:
        raise RuntimeError(
            f"attribute: the value depends on what enters {len(used)} stacks of blocks of {name}; "
            "of two at most there are scores"
        )
    size = torch.stack([part.abs().sum(-1) for part in parts]).sum(0) + values.abs()
    off = float(((values - expected).abs() / size.clamp_min(1e-30)).max())
    if not off <= tolerance_of(source):
        with torch.no_grad():
            again = task.values()
        raise RuntimeError(
            f"attribute: the linear map of {name} gives {float(values.sum()):.6g} where the model "
            f"gave {float(expected.sum()):.6g}, {off:.2g} of its parts off, and gives "
            f"{float(again.sum()):.6g} in another call with the same inputs"
        )
    bias = values - torch.stack([part.sum(-1) for part in used]).sum(0)

    def asked(x: Tensor) -> Tensor:
        x = x if each else x[:, 0]
        return x if source.dtype == torch.float64 else x.float()

    prefix = asked(used[1]) if len(used) > 1 else None
    return Attribution(asked(used[0]), asked(values), asked(bias), prefix_scores=prefix)


def parts_of(gradients: Sequence[Tensor | None], sources: Sequence[Tensor]) -> list[Tensor]:
    """Returns the part of each source token, ``[B, S]`` for each stack, in float64."""
    products = [x if x.dim() > 2 else x.unsqueeze(0) for x in products_of(gradients, sources)]
    return [x.sum(-1).flatten(1) for x in products]


def check_sum(
    parts: Sequence[Tensor], value: float, linear: LinearModel, source: Tensor, model: nn.Module
) -> None:
    """Raises RuntimeError where tokens and constants do not add up to the value."""
    total = sum(float(part.sum()) for part in parts)
    constants, lost = linear.constants, linear.lost
    size = sum(float(part.abs().sum()) for part in parts) + abs(constants) + abs(value)
    allowed = tolerance_of(source) * max(size, 1e-30)
    name = type(model).__name__
    if not abs(lost) <= allowed:
        raise RuntimeError(
            f"attribute: {lost:.4g} of the value {value:.4g} comes from numbers that depend on the "
            f"tokens but are added as biases are: {name} adds what {linear.adds_results_of} gave, "
            'of which there is no linear map; "rollout:MAP" needs none'
        )
    if not abs(total + constants - value) <= allowed:
        raise RuntimeError(
            f"attribute: parts do not add up: tokens {total:.6g} and biases {constants:.6g} are "
            f"not the value {value:.6g}: {name} calls a function that is not linear in the vectors "
            'of tokens and has no rule here; "rollout:MAP" needs no linear map'
        )
