"""What an attribution costs, before it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ikattn.explain.attribution._model import Stack, stacks_of

__all__ = ["MUCH", "Estimate", "activation_bytes", "estimate"]

MUCH = 1 << 30  # bytes of activations, above which blocks run twice instead


class Estimate(NamedTuple):
    """Of one sequence, attributed by "decompx".

    Attributes:
        activations: Bytes of the linear map's graph where every block's numbers are kept.
        checkpointed: Bytes where blocks run twice: what enters each, and the graph of one. Taken
            where ``activations`` exceed 1 GiB.
        logits: Bytes of the logits that are asked for and of their gradient.
        forwards: Time in forward passes.
    """

    activations: int
    checkpointed: int
    logits: int
    forwards: float


def estimate(model: nn.Module, length: int, *, targets: int = 1, batch: int = 1) -> Estimate:
    """What ``ikattn.attribute(method="decompx")`` takes beside the model.

    A token keeps ``2 (in + out)`` numbers of every linear module in a block, which covers the norms
    and activations between them: ``activations = batch length sum(2 (in + out)) itemsize``.

    Args:
        model: As in :func:`ikattn.attribute`.
        length: Tokens.
        targets: Logits that are asked for, n.
        batch: B.

    Example:
        >>> import torch
        >>> from ikattn.explain import estimate
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32)
        >>> estimate(torch.nn.TransformerEncoder(layer, 2), 100).forwards
        3.0
    """
    if length < 1 or targets < 1 or batch < 1:
        raise ValueError(
            f"estimate: length, targets and batch must be 1 or more, got {length}, {targets}, "
            f"{batch}"
        )
    stacks = stacks_of(model, "estimate")
    tokens = batch * length
    item = _itemsize(stacks)
    blocks = [block for stack in stacks for block in stack.blocks]
    each = [_numbers_of(block) for block in blocks]
    whole = tokens * sum(each) * item
    width = max(_width_of(block) for block in blocks)
    twice = tokens * (len(blocks) * width + max(each)) * item
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0) or 0
    return Estimate(
        whole, twice, 2 * batch * targets * vocabulary * item, 5.0 if whole > MUCH else 3.0
    )


def activation_bytes(stacks: Sequence[Stack], inputs: Mapping[str, Any]) -> int:
    """``Estimate.activations`` of a call."""
    lengths = [x.numel() for x in inputs.values() if isinstance(x, Tensor) and x.dim() == 2]
    tokens = max(lengths, default=256)
    return (
        tokens
        * _itemsize(stacks)
        * sum(_numbers_of(block) for stack in stacks for block in stack.blocks)
    )


def _itemsize(stacks: Sequence[Stack]) -> int:
    parameter = next((p for stack in stacks for b in stack.blocks for p in b.parameters()), None)
    return 4 if parameter is None else max(2, parameter.element_size())


def _numbers_of(block: nn.Module) -> int:
    shapes = [p.shape for p in block.parameters() if p.dim() == 2]
    return sum(2 * (shape[0] + shape[1]) for shape in shapes)


def _width_of(block: nn.Module) -> int:
    sizes = [p.shape[-1] for p in block.parameters() if p.dim() == 1]
    return min(sizes, default=0)
