"""How much of every token's vector, after every block, comes from each token of the input.

Sizes: B batch, N blocks, L = S tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.explain.attribution._linear import Activation
from ikattn.explain.attribution._model import Stack, alone, called_linear, replaced, the_stack_of
from ikattn.explain.attribution._replay import Replay
from ikattn.explain.attribution._vectors import (
    check_vectors,
    keys_together,
    outputs_of,
    own_vectors,
    run_many,
    sequences_of,
    whose,
    without_graph,
)

__all__ = ["decomposed_norms"]

_CALLER = "decomposed_norms"


@takes_memory_for("the decomposed vectors")
def decomposed_norms(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    biases: Literal["none", "absdot"] = "none",
    activation: Activation = "slope",
    sources: int = 32,
) -> Tensor:
    """DecompX's maps: ``|x_i<-j|``, what of token i's vector after each block came from token j.

    The vectors x_j that enter the first block go through the model one by one, with attention
    weights, divisors of norms and slopes of activations fixed at what they are for the whole
    sequence. Time S / ``sources`` calls of the model with as many sequences each; of ``[L, S, D]``
    one block's ``[sources, L, D]`` is held at a time.

    Source: A. Modarressi et al., "DecompX", ACL 2023, equations 3 to 10.

    Args:
        model: An encoder or decoder in eval mode; its attention must go through
            ``F.scaled_dot_product_attention`` or a softmax.
        inputs: What it is called with, by name, ``input_ids`` among them or another tensor whose
            first axis is the batch.
        biases: "none": they stay out, but for those before the first attention mixes tokens, such
            as that of its values, which belong to their token. "absdot", the authors' default: each
            is shared among the tokens, by the size of its product with what came from each; all
            sources go at once.
        activation: As in :func:`ikattn.attribute`.
        sources: How many go through together.

    Returns:
        ``[N, B, L, S]``. Rows of padding mean nothing.

    Raises:
        ValueError: Unknown names, several stacks of blocks, a model in training.
        RuntimeError: The vectors do not add up to what the model computed.
        NotImplementedError: The model calls attention that has no weights to fix.

    Example:
        >>> import torch
        >>> from ikattn.explain import decomposed_norms
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> decomposed_norms(model, {"src": torch.randn(1, 5, 16)}).shape
        torch.Size([2, 1, 5, 5])
    """
    if biases not in ("none", "absdot"):
        raise ValueError(f'{_CALLER}: biases must be "none" or "absdot", got {biases!r}')
    if sources < 1:
        raise ValueError(f"{_CALLER}: sources must be 1 or more, got {sources}")
    stack = the_stack_of(model, inputs, _CALLER)
    items = []
    for item in sequences_of(inputs):
        with alone(model, _CALLER):
            items.append(_of_sequence(model, item, stack, biases, activation, sources))
    return torch.stack(items, 1)


def _of_sequence(
    model: nn.Module,
    inputs: dict[str, Any],
    stack: Stack,
    biases: Literal["none", "absdot"],
    activation: Activation,
    sources: int,
) -> Tensor:
    """The maps of one sequence, ``[N, L, S]``."""
    replay = Replay(activation, biases, _CALLER)
    with ExitStack() as opened:
        opened.enter_context(called_linear(model, replay))
        opened.enter_context(without_graph())
        with replaced(stack, lambda x: x.detach().requires_grad_()), outputs_of(stack) as expected:
            model(**inputs)
        source = stack.source
        if source is None or source.dim() != 3:
            raise ValueError(f"{_CALLER}: the first block must be called with [B, S, D]")
        source = source.detach()
        replay.begin_whole()
        with replaced(stack, lambda x: source.clone().requires_grad_()), outputs_of(stack) as whole:
            model(**inputs)
        check_vectors(model, torch.stack(whole), torch.stack(expected), _CALLER)
        S = source.size(1)
        each = S if biases == "absdot" else min(sources, S)
        parts = []
        for keys in keys_together(S, each, source.device):
            vectors = own_vectors(source, keys)
            if biases == "absdot":  # one that belongs to no token
                vectors = torch.cat([vectors, torch.zeros_like(source)])
            replay.begin(whose(keys, S, len(vectors)))
            with (
                replaced(stack, partial(_instead, vectors)),
                outputs_of(stack, partial(_norms_and_sum, len(keys))) as made,
            ):
                run_many(model, inputs, len(vectors), _CALLER)
            if biases == "absdot":
                totals = torch.stack([total for _, total in made])
                check_vectors(model, totals, torch.stack(expected), _CALLER)
            parts.append(torch.stack([norms for norms, _ in made]))  # [N, K, L]
    return torch.cat(parts, 1).mT


def _instead(vectors: Tensor, x: Tensor) -> Tensor:
    return vectors.requires_grad_()


def _norms_and_sum(count: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norms ``[count, L]`` of the first vectors, and the sum ``[1, L, D]`` of all."""
    return torch.linalg.vector_norm(x[:count], dim=-1), x.sum(0, keepdim=True)
