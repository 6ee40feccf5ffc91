"""ALTI-Logit and rollouts: a number followed back to the tokens through the maps of the layers.

Sizes: B batch, H query heads, L = S tokens, n rows that the logit reads, d_v head size of value, D
model size.
Source of ALTI-Logit: J. Ferrando, G. I. Gállego, I. Tsiamas, M. R. Costa-jussà, "Explaining How
Transformers Use Context to Build Predictions", ACL 2023.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ikattn.explain.attribution._decompx import check_sum, has_tokens_first, parts_of
from ikattn.explain.attribution._linear import LinearModel
from ikattn.explain.attribution._model import (
    Stack,
    attention_of,
    called_linear,
    last_hidden,
    stacks_of,
)
from ikattn.explain.attribution._places import readers_of
from ikattn.explain.attribution._targets import Task
from ikattn.explain.attribution.attribution import Attribution
from ikattn.explain.attribution.zeroing import value_zeroing
from ikattn.explain.through_layers import alti_plus
from ikattn.maps.recording import Recording
from ikattn.maps.sequences import AXES
from ikattn.maps.summary import row_shares
from ikattn.maps.through_layers import rollout
from ikattn.recorder.entry import recorded
from ikattn.recorder.runs.run import Run

ROLLED = (*(name for name, axes in AXES.items() if axes.endswith("LS")), "value_zeroing")
"""Maps that can be rolled out."""

# Advice at the end of what the recorder says, by options that attribute has not.
_ADVICE = re.compile(
    r"[.;:,] (?=[^.;:]*(?:maps=|layers=|queries=|reduce=|to_cpu|recording\.)).*$", re.S
)


@torch.no_grad()
def _writing_of(run: Run, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the direct part of a layer's attention in a logit, ``[B, S]``, and ALTI's map of it.

    The gradient ``[B, L, D]`` is that of the logit in the residual stream after the last block.
    """
    block = run.plan.parts.block
    if run.attention.kind != "self" or block != "pre":
        raise ValueError(
            'attribute: "alti_logit" needs self-attention whose block adds to a residual '
            f"stream (pre-norm), got {run.name}, {run.attention.kind}-attention whose block "
            f'is {block!r}: take "decompx"'
        )
    assert run.projection is not None
    assert run.maps is not None
    assert run.maps.alti is not None
    call, around = run.attention, run.around
    value = call.value
    u = gradient.to(value.dtype)
    rows = u.ne(0).any(-1).any(0).nonzero()[:, 0]
    u = u[:, rows]
    if isinstance(around.scale, Tensor):
        u = u * around.scale.to(u.dtype)
    elif around.scale is not None:
        u = u * around.scale
    if around.output_norm is not None:
        stats = around.output_norm
        u = u * stats.weight.to(u.dtype) / stats.scale.to(u.dtype)[:, rows].unsqueeze(-1)
        u = u - u.mean(-1, keepdim=True) if stats.centered else u
    heads = (u @ run.projection.weight.to(u.dtype)).unflatten(-1, (call.query.size(1), -1))
    heads = heads.transpose(1, 2)  # [B, H, n, d_v]
    heads = heads if call.gate is None else heads * call.gate[:, :, rows].to(heads)
    value = value.repeat_interleave(call.query.size(1) // value.size(1), 1)
    weights = call.weights[:, :, rows]
    pairs = weights * (heads @ value.nan_to_num(0.0).mT)  # [B, H, n, S]
    return pairs.sum((1, 2)), run.maps.alti.to(u.device)


def _of_tokens(written: Tensor, map_: Tensor) -> Tensor:
    """Returns what a layer's tokens wrote, without keys before them, such as a prefix."""
    L, S = map_.shape[-2:]
    return written[:, S - L :]


def alti_logit(task: Task) -> Attribution:
    if task.is_seq2seq:
        raise ValueError(
            'attribute: "alti_logit" is of decoders alone, and config.is_encoder_decoder of '
            f'{type(task.model).__name__} is set: take "decompx"'
        )
    stack, gradient, values = _hidden_gradients(task)
    made: list[tuple[Tensor, Tensor]] = []  # by layer

    def note(run: Run) -> None:
        made.append(_writing_of(run, gradient))

    _record(task, "alti", attention_of(task.model, stack), to_cpu=False, on_run=note)
    written, _ = made[-1]
    for below, map_ in reversed(made[:-1]):
        written = below + (_of_tokens(written, map_).unsqueeze(1) @ map_.to(written))[:, 0]
    scores = _of_tokens(written, made[0][1])
    return Attribution(scores, values, values - scores.sum(-1))


def roll_out(task: Task, map_: str) -> Attribution:
    stack, gradient, values = _hidden_gradients(task)
    share = row_shares(gradient.norm(dim=-1))  # [B, L]
    nothing = values.new_full(values.shape, float("nan"))

    def scores_of(rows: Tensor) -> Tensor:
        return (share.to(rows).unsqueeze(1) @ rows)[:, 0]

    crossing = ""
    if map_ == "value_zeroing" and not task.is_seq2seq:
        zeroed = value_zeroing(task.model, task.inputs)
        return Attribution(scores_of(rollout(zeroed)), values, nothing)
    if not task.is_seq2seq:
        recording = _record(task, map_, attention_of(task.model, stack))
        layers = recording.layers
        crossing = next((f", {name}" for name in layers if layers[name].kind == "cross"), "")
        if not crossing:
            residual = 0.5 if map_ in ("weights", "per_head", "summed") else None
            rows = rollout(recording, map=map_, layers=list(layers), residual=residual)
            return Attribution(scores_of(rows), values, nothing)
    if map_ != "alti":
        raise ValueError(
            f"attribute: {type(task.model).__name__} has cross-attention{crossing}, through which "
            f'only "rollout:alti" goes, got "rollout:{map_}"'
        )
    scores, prefix = map(scores_of, alti_plus(_record(task, map_, None)))
    return Attribution(scores, values, nothing, prefix_scores=prefix)


def _record(task: Task, map_: str, layers: list[str] | None, **options: Any) -> Recording:
    if layers is not None and not layers:
        raise ValueError(
            "attribute: rollouts and ALTI-Logit follow attention, and no attention that can be "
            f'recorded was found in {type(task.model).__name__}: take "decompx"'
        )
    try:
        with torch.no_grad(), recorded(task.model, (map_,), layers=layers, **options) as found:
            task.values()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        said = str(error)
        if not said.startswith("record: "):
            raise
        said = _ADVICE.sub("", said.removeprefix("record: "))
        raise type(error)(f'attribute: {said}; take another map, or "decompx"') from error
    return found


def _hidden_gradients(task: Task) -> tuple[Stack, Tensor, Tensor]:
    """Finds how the target depends on what the last block makes.

    Returns the stack of that block; the gradient ``[B, L, D]`` with the norm after it fixed; and
    the values ``[B]``.
    """
    model, linear = task.model, LinearModel()
    stacks = stacks_of(model, "attribute")
    with ExitStack() as opened:
        made = opened.enter_context(last_hidden(stacks))
        opened.enter_context(called_linear(model, linear))
        values = task.values(linear)
        leaves = [leaf for _, leaf in made]
        if not leaves:
            last_blocks = {type(stack.blocks[-1]).__name__ for stack in stacks}
            raise RuntimeError(
                f"attribute: the last block of {type(model).__name__}, "
                f"{' or '.join(sorted(last_blocks))}, gave no tensor, nor a tuple that begins with "
                'one: take "decompx"'
            )
        last = made[-1][0]
        ran = [stack for stack, _ in made]
        if last not in readers_of(task, ran):
            raise ValueError(
                f"attribute: rollouts and ALTI-Logit follow one stack of blocks, and {last.name} "
                f'reads what {ran[-2].name} made: take "decompx"'
            )
        gradients: Sequence[Tensor | None] = [None]
        if values.requires_grad:
            gradients = torch.autograd.grad(
                values.sum(), leaves, retain_graph=True, allow_unused=True
            )
        gradient = gradients[-1]
        if gradient is None:
            raise RuntimeError(
                "attribute: no gradient comes back from the value to what the last block of "
                f"{last.name or type(model).__name__} makes: after it the model must not detach "
                "or round numbers, nor compute in an autograd function without a backward"
            )
        value = float(values.detach().sum())
        check_sum(parts_of(gradients, leaves), value, linear, leaves[-1], model)
        if gradient.dim() == 2 and values.size(1) == 1:
            gradient = gradient.unsqueeze(0)
        elif has_tokens_first(leaves[-1], values):
            gradient = gradient.transpose(0, 1)
    return last, gradient, values.detach().sum(0)
