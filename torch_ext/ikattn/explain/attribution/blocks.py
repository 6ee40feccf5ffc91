"""What each token's vector adds to what a block makes, its feed-forward part included.

Sizes: B batch, N blocks, K tokens whose vectors go together, L = S tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.explain.attribution._linear import Activation
from ikattn.explain.attribution._model import Stack, alone, called_linear, the_stack_of
from ikattn.explain.attribution._replay import BlockReplay
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
from ikattn.recorder.calls.hooks import Hook
from ikattn.recorder.sums.tensors import first_tensor

__all__ = ["block_maps"]

_CALLER = "block_maps"


@takes_memory_for("the decomposed vectors")
def block_maps(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    scope: Literal["block", "feed_forward"] = "block",
    *,
    activation: Activation = "slope",
    sources: int = 32,
) -> Tensor:
    r"""Norms of what each token's vector adds to what a block makes, feed-forward part included.

    .. math::
        F_{ij} = W_2 \, \mathrm{diag}(g(p_i) / p_i) \, W_1 \, a_{ij}

    is what goes from token j through the attention, its residual and the norm after it, a_ij, and
    then through the feed-forward part, whose hidden units p_i have the activation g. The fixed
    slope ``g(p) / p`` is what integrated gradients give from a baseline of zero, as the authors
    have it. Each block is taken alone, from the vectors that enter it; biases stay out.

    Source: G. Kobayashi, T. Kuribayashi, S. Yokoi, K. Inui, "Analyzing Feed-Forward Blocks in
    Transformers through the Lens of Attention Maps", ICLR 2024.

    Args:
        model: As for :func:`decomposed_norms`.
        inputs: As there.
        scope: "feed_forward": ``|F_ij|`` (AtbFf in the paper, AtbLnFf of pre-norm blocks), of
            parallel blocks what attention and feed-forward part add together. "block": with the
            residual around it and the norm after it, where there is one (AtbFfResLn, AtbLnFfRes).
        activation, sources: As there.

    Returns:
        ``[N, B, L, S]``. Rows of padding mean nothing.

    Raises:
        ValueError, RuntimeError, NotImplementedError: As :func:`decomposed_norms`; and where a
            block does not end with the sum of a feed-forward part and its residual.

    Example:
        >>> import torch
        >>> from ikattn.explain import block_maps
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> block_maps(model, {"src": torch.randn(1, 5, 16)}, "feed_forward").shape
        torch.Size([2, 1, 5, 5])
    """
    if scope not in ("block", "feed_forward"):
        raise ValueError(f'{_CALLER}: scope must be "block" or "feed_forward", got {scope!r}')
    if sources < 1:
        raise ValueError(f"{_CALLER}: sources must be 1 or more, got {sources}")
    stack = the_stack_of(model, inputs, _CALLER)
    items = []
    for item in sequences_of(inputs):
        with alone(model, _CALLER):
            items.append(_of_blocks(model, item, stack, scope, activation, sources))
    return torch.stack(items, 1)


def _of_blocks(
    model: nn.Module,
    inputs: dict[str, Any],
    stack: Stack,
    scope: Literal["block", "feed_forward"],
    activation: Activation,
    sources: int,
) -> Tensor:
    """The maps of blocks of one sequence, ``[N, L, S]``."""
    replay = BlockReplay(activation, _CALLER)
    entered: list[Tensor] = []

    def enter(n: int, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError(f"{_CALLER}: blocks must be called with [B, S, D], got {x.dim()} axes")
        entered.append(x.detach())
        return x.detach()

    with ExitStack() as opened:
        opened.enter_context(called_linear(model, replay))
        opened.enter_context(without_graph())
        with _entered(stack, replay, enter), outputs_of(stack) as expected:
            model(**inputs)
        replay.begin_whole()
        with (
            _entered(stack, replay, lambda n, x: entered[n].clone()),
            outputs_of(stack) as whole,
        ):
            model(**inputs)
        check_vectors(model, torch.stack(whole), torch.stack(expected), _CALLER)
        S = entered[0].size(1)
        norms = partial(_norms, model, replay, scope)
        parts = []
        for keys in keys_together(S, sources, entered[0].device):
            replay.begin(whose(keys, S, len(keys)))
            with (
                _entered(stack, replay, partial(_of_keys, entered, keys)),
                outputs_of(stack, norms) as made,
            ):
                run_many(model, inputs, len(keys), _CALLER)
            parts.append(torch.stack(made))  # [N, K, L]
    return torch.cat(parts, 1).mT


def _of_keys(entered: list[Tensor], keys: Tensor, n: int, x: Tensor) -> Tensor:
    return own_vectors(entered[n], keys)


def _norms(model: nn.Module, replay: BlockReplay, scope: str, output: Tensor) -> Tensor:
    """The norms ``[K, L]`` of what the block that just ran made, or of its feed-forward part."""
    if scope == "feed_forward":
        part = replay.part()
        if part is None:
            raise NotImplementedError(
                f"{_CALLER}: a block of {type(model).__name__} does not end with the sum of a "
                "feed-forward part and its residual"
            )
        output = part.reshape(output.shape)
    norms: Tensor = torch.linalg.vector_norm(output, dim=-1)
    return norms


@contextmanager
def _entered(
    stack: Stack, replay: BlockReplay, make: Callable[[int, Tensor], Tensor]
) -> Iterator[None]:
    """Every block is called with another tensor: ``make`` gets its number, as they run, and x."""
    count = 0

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        x = first_tensor(args, kwargs)
        if x is None:
            return None
        with torch._C.DisableTorchFunction():
            y = make(count, x).requires_grad_()
        replay.enter_block(y)
        count += 1
        changed = tuple(y if each is x else each for each in args)
        return changed, {name: y if each is x else each for name, each in kwargs.items()}

    handles = [
        block.register_forward_pre_hook(Hook(hook), with_kwargs=True, prepend=True)
        for block in stack.blocks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
