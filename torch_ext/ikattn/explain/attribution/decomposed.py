"""The vectors of single tokens followed through a model, or through each of its blocks.

Sizes: B batch, N blocks, K vectors that go through together, L = S tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.explain.attribution._linear import Activation, tolerance_of
from ikattn.explain.attribution._model import (
    Stack,
    alone,
    called_linear,
    entered,
    is_of_batch,
    sequences_of,
    the_stack_of,
)
from ikattn.explain.attribution._replay import BlockReplay, Replay
from ikattn.explain.attribution._torch import first_output, hooked

_DECOMPOSED, _BLOCKS = "decomposed_norms", "block_maps"


@takes_memory_for("the decomposed vectors")
def decomposed_norms(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    biases: Literal["none", "absdot"] = "none",
    activation: Activation = "slope",
    sources: int = 32,
) -> Tensor:
    """Measures ``|x_i<-j|``, the part of token i's vector after each block that came from token j.

    The vectors x_j that enter the first block go through the model one by one, with attention
    weights, divisors of norms and slopes of activations fixed at what they are for the whole
    sequence. Time S / ``sources`` calls of the model with as many sequences each; of ``[L, S, D]``
    one block's ``[sources, L, D]`` is held at a time.

    Source: A. Modarressi et al., "DecompX", ACL 2023, equations 3 to 10.

    Args:
        model: An encoder or decoder in eval mode; its attention must go through
            ``F.scaled_dot_product_attention`` or a softmax.
        inputs: Its arguments by name, ``input_ids`` among them or another tensor whose first axis
            is the batch.
        biases: "none": they stay out, but for those before the first attention mixes tokens, such
            as that of its values, which belong to their token. "absdot", the authors' default: each
            is shared among the tokens, by the size of its product with what came from each; all
            sources go at once.
        activation: "slope" or "tangent", as in :func:`ikattn.attribute`.
        sources: The number of vectors that go through together.

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
        raise ValueError(f'{_DECOMPOSED}: biases must be "none" or "absdot", got {biases!r}')
    replay = partial(Replay, activation, biases, _DECOMPOSED)
    return _of_sequences(model, inputs, sources, _DECOMPOSED, replay)


@takes_memory_for("the decomposed vectors")
def block_maps(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    scope: Literal["block", "feed_forward"] = "block",
    *,
    activation: Activation = "slope",
    sources: int = 32,
) -> Tensor:
    r"""Measures what each token's vector adds to a block's output, feed-forward part included.

    .. math::
        F_{ij} = W_2 \, \mathrm{diag}(g(p_i) / p_i) \, W_1 \, a_{ij}

    is what goes from token j through the attention, its residual and the norm after it, a_ij, and
    then through the feed-forward part, whose hidden units p_i have the activation g. The fixed
    slope ``g(p) / p`` is what integrated gradients give from a baseline of zero, as the authors
    have it. Each block is taken alone, from the vectors that enter it; biases stay out.

    Source: G. Kobayashi, T. Kuribayashi, S. Yokoi, K. Inui, "Analyzing Feed-Forward Blocks in
    Transformers through the Lens of Attention Maps", ICLR 2024.

    Args:
        model, inputs: A model and its arguments, as in :func:`decomposed_norms`.
        scope: "feed_forward": ``|F_ij|`` (AtbFf in the paper, AtbLnFf of pre-norm blocks), of
            parallel blocks what attention and feed-forward part add together. "block": with the
            residual around it and the norm after it, where there is one (AtbFfResLn, AtbLnFfRes).
        activation, sources: Options of :func:`decomposed_norms`.

    Returns:
        ``[N, B, L, S]``. Rows of padding mean nothing.

    Raises:
        ValueError, RuntimeError, NotImplementedError: Errors of :func:`decomposed_norms`; and a
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
        raise ValueError(f'{_BLOCKS}: scope must be "block" or "feed_forward", got {scope!r}')
    replay = partial(BlockReplay, activation, _BLOCKS, scope)
    return _of_sequences(model, inputs, sources, _BLOCKS, replay)


def _of_sequences(
    model: nn.Module,
    inputs: Mapping[str, Any],
    sources: int,
    caller: str,
    replay: Callable[[], Replay],
) -> Tensor:
    """Stacks the maps of each sequence, ``[N, L, S]``, as ``[N, B, L, S]``."""
    if not isinstance(sources, int) or sources < 1:
        raise ValueError(f"{caller}: sources must be an integer, 1 or more, got {sources!r}")
    stack = the_stack_of(model, inputs, caller)
    with alone(model, caller):
        maps = [_followed(model, x, stack, replay(), sources) for x in sequences_of(inputs)]
        return torch.stack(maps, 1)


def _followed(
    model: nn.Module, inputs: dict[str, Any], stack: Stack, replay: Replay, sources: int
) -> Tensor:
    """Follows the vectors of one sequence's tokens: the maps ``[N, L, S]``.

    A first call fixes numbers in ``replay`` for those that follow. Where biases are shared all
    vectors go through together, and one more that takes them.
    """
    caller, shares_biases = replay.caller, replay.shares_biases
    given: list[Tensor] = []  # vectors that enter

    def calling_with(make: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
        def entering(n: int, x: Tensor) -> Tensor:
            y = make(n, x)
            replay.enter_block(y)
            return y

        return entered(stack, entering, every_block=replay.enters_every_block)

    def first(n: int, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError(
                f"{caller}: blocks must be called with [B, S, D], and {stack.name or 'the model'} "
                f"was called with {list(x.shape)}"
            )
        given.append(x.detach())
        return x.detach().requires_grad_()

    def whole(n: int, x: Tensor) -> Tensor:
        return given[n].clone().requires_grad_()

    def alone_of(keys: Tensor, n: int, x: Tensor) -> Tensor:
        vectors = x.new_zeros(len(keys) + shares_biases, *given[n].shape[1:])
        vectors[torch.arange(len(keys), device=x.device), keys] = given[n][0, keys]
        return vectors.requires_grad_()

    def norms(output: Tensor) -> Tensor:
        part = replay.part(output)
        if part is None:
            raise NotImplementedError(
                f"{caller}: a block of {stack.name or 'the model'}, "
                f"{type(stack.blocks[0]).__name__}, does not end with the sum of a feed-forward "
                'part and its residual, and a norm at most: take scope="block"'
            )
        found: Tensor = torch.linalg.vector_norm(part.reshape(output.shape), dim=-1)
        return found

    def norms_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
        return norms(x[:-1]), x.sum(0, keepdim=True)  # the last vector takes biases

    with ExitStack() as opened:
        opened.enter_context(called_linear(model, replay))
        opened.enter_context(replay)
        # there is no backward pass, for which anything would be kept
        nothing: Any = lambda x: None  # noqa: E731
        opened.enter_context(torch.autograd.graph.saved_tensors_hooks(nothing, nothing))
        with calling_with(first), _outputs_of(stack) as expected:
            model(**inputs)
        if not given:
            raise ValueError(f"{caller}: {stack.name or 'the model'} was called with no tensor")
        replay.begin(None)
        with calling_with(whole), _outputs_of(stack) as made:
            model(**inputs)
        _check_vectors(stack, made, expected, caller)
        S, device = given[0].size(1), given[0].device
        parts = []
        for keys in torch.arange(S, device=device).split(S if shares_biases else sources):
            own = torch.zeros(len(keys) + shares_biases, S, dtype=torch.bool, device=device)
            own[torch.arange(len(keys), device=device), keys] = True
            replay.begin(own)
            with (
                calling_with(partial(alone_of, keys)),
                _outputs_of(stack, norms_and_sum if shares_biases else norms) as found,
            ):
                _run_many(model, inputs, len(own), caller)
            if shares_biases:
                _check_vectors(stack, [total for _, total in found], expected, caller)
                found = [each for each, _ in found]
            parts.append(torch.stack(found))  # [N, K, L]
    return torch.cat(parts, 1).mT


@contextmanager
def _outputs_of(
    stack: Stack, reduced: Callable[[Tensor], Any] = Tensor.detach
) -> Iterator[list[Any]]:
    """Gathers what each block makes, ``[K, L, D]``, as they run, or ``reduced`` makes of it."""
    found: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            found.append(reduced(first_output(output).detach()))

    with hooked(stack.blocks, after=hook):
        yield found


def _run_many(model: nn.Module, inputs: dict[str, Any], count: int, caller: str) -> None:
    """Calls the model with vectors that go through together, in place of one sequence."""
    many = {
        name: x.expand(count, *x.shape[1:]) if is_of_batch(name, x) else x
        for name, x in inputs.items()
    }
    try:
        model(**many)
    except (RuntimeError, IndexError) as error:
        own = (NotImplementedError, torch.OutOfMemoryError)
        if isinstance(error, own) or "memory" in str(error):
            raise
        raise NotImplementedError(
            f"{caller}: {type(model).__name__}, called with {count} copies of one sequence, raised "
            f"{type(error).__name__}: {error}: sources=1 takes one at a time"
        ) from error


def _check_vectors(
    stack: Stack, found: Sequence[Tensor], expected: Sequence[Tensor], caller: str
) -> None:
    size = torch.stack([x.abs().max() for x in expected]).max().clamp_min(1e-30)
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        off = float((x.double() - y.double()).abs().max() / size)
        if not off <= tolerance_of(y):
            raise RuntimeError(
                f"{caller}: vectors of tokens do not add up to what block {n} of "
                f"{stack.name or 'the model'}, {type(stack.blocks[0]).__name__}, made, {off:.2g} "
                "of the largest number off: it calls a function that is not linear in them and has "
                "no rule here"
            )
