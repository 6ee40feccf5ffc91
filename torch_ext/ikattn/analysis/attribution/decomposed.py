"""How much of every token's vector, after every block, comes from each token of the input.

Sizes: B batch, L blocks, T = S tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.analysis._recorder.hooks import Hook
from ikattn.analysis._recorder.record import as_written
from ikattn.analysis.attribution._linear import TOLERANCES, Activation
from ikattn.analysis.attribution._model import (
    Stack,
    alone,
    called_linear,
    replaced,
    the_stack_of,
)
from ikattn.analysis.attribution._replay import Replay

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
    sequence. Time S / ``sources`` calls of the model with as many sequences each; of ``[T, S, D]``
    one block's ``[sources, T, D]`` is held at a time.

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
        ``[L, B, T, S]``. Rows of padding mean nothing.

    Raises:
        ValueError: Unknown names, several stacks of blocks, a model in training.
        RuntimeError: The vectors do not add up to what the model computed.
        NotImplementedError: The model mixes tokens in a way that cannot be fixed.

    Example:
        >>> import torch
        >>> from ikattn.analysis import decomposed_norms
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
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    items = []
    for b in range(tensors[0].size(0)):
        item = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in inputs.items()}
        with alone, as_written(model):
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
    """The maps of one sequence, ``[L, T, S]``."""
    replay = Replay(activation, biases)
    # the graph is never gone back through: nothing is saved for that
    with ExitStack() as opened:
        opened.enter_context(called_linear(model, replay))
        opened.enter_context(torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing))
        with replaced(stack, lambda x: x.detach().requires_grad_()), _outputs(stack) as expected:
            model(**inputs)
        source = stack.source
        if source is None or source.dim() != 3:
            raise ValueError(f"{_CALLER}: the first block must be called with [B, S, D]")
        source = source.detach()
        replay.begin_whole()
        with replaced(stack, partial(_instead, source.clone())), _outputs(stack) as whole:
            model(**inputs)
        _check(model, torch.stack(whole), torch.stack(expected))
        S = source.size(1)
        each = S if biases == "absdot" else min(sources, S)
        parts = []
        for first in range(0, S, each):
            keys = torch.arange(first, min(first + each, S), device=source.device)
            count = len(keys) + (biases == "absdot")
            vectors = source.new_zeros(count, S, source.size(2))
            vectors[keys - first, keys] = source[0, keys]
            own = torch.zeros(count, S, dtype=torch.bool, device=source.device)
            own[keys - first, keys] = True
            many = {
                name: x.expand(count, *x.shape[1:]) if isinstance(x, Tensor) else x
                for name, x in inputs.items()
            }
            replay.begin(own)
            with (
                replaced(stack, partial(_instead, vectors)),
                _outputs(stack, partial(_norms_and_sum, len(keys))) as made,
            ):
                _run_many(model, many)
            if biases == "absdot":
                _check(model, torch.stack([total for _, total in made]), torch.stack(expected))
            parts.append(torch.stack([norms for norms, _ in made]))  # [L, K, T]
    return torch.cat(parts, 1).mT


def _run_many(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Calls the model with vectors that go through together.

    Raises:
        NotImplementedError: It mixes sequences of a batch, as experts do.
    """
    try:
        model(**inputs)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, (NotImplementedError, torch.OutOfMemoryError)) or "memory" in str(
            error
        ):
            raise
        raise NotImplementedError(
            f"{_CALLER}: {type(model).__name__} does not take several sequences as it takes one: "
            f"{error}"
        ) from error


@contextmanager
def _outputs(stack: Stack, reduced: Callable[[Tensor], Any] = Tensor.detach) -> Iterator[list[Any]]:
    """What each block makes, ``[K, T, D]``, as they run, or what ``reduced`` makes of it."""
    found: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, (tuple, list)) else output
        with torch._C.DisableTorchFunction():
            found.append(reduced(x.detach()))

    handles = [block.register_forward_hook(Hook(hook)) for block in stack.blocks]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _norms_and_sum(count: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norms ``[count, T]`` of the first vectors, and the sum ``[1, T, D]`` of all."""
    return torch.linalg.vector_norm(x[:count], dim=-1), x.sum(0, keepdim=True)


def _check(model: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Raises RuntimeError where vectors of tokens are not, together, what the model made."""
    size = expected.abs().max().clamp_min(1e-30)
    off = float((found.double() - expected.double()).abs().max() / size)
    if not off <= TOLERANCES.get(expected.dtype, 5e-2):
        raise RuntimeError(
            f"{_CALLER}: vectors do not add up to what the blocks made, {off:.2g} of the largest "
            f"number off: {type(model).__name__} computes something that is not understood"
        )


def _nothing(x: Any) -> Any:
    return None


def _instead(vectors: Tensor, x: Tensor) -> Tensor:
    return vectors.requires_grad_()
