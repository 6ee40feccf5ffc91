"""Vectors of single tokens that go through a model together.

Sizes: K vectors that go together, L tokens, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._linear import tolerance_of
from ikattn.explain.attribution._model import Stack, is_of_batch
from ikattn.recorder.calls.hooks import Hook

__all__ = [
    "check_vectors",
    "keys_together",
    "outputs_of",
    "own_vectors",
    "run_many",
    "sequences_of",
    "whose",
    "without_graph",
]


def sequences_of(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each sequence of the batch."""
    count = next(x for name, x in inputs.items() if is_of_batch(name, x)).size(0)
    with torch.inference_mode(False):
        own = {
            n: x.clone() if is_of_batch(n, x) and x.is_inference() else x for n, x in inputs.items()
        }
    return [
        {name: x[b : b + 1] if is_of_batch(name, x) else x for name, x in own.items()}
        for b in range(count)
    ]


def run_many(model: nn.Module, inputs: dict[str, Any], count: int, caller: str) -> None:
    """Calls the model with vectors that go through together, in place of one sequence.

    Raises:
        NotImplementedError: It mixes sequences of a batch, as experts do.
    """
    many = {
        name: x.expand(count, *x.shape[1:]) if is_of_batch(name, x) else x
        for name, x in inputs.items()
    }
    try:
        model(**many)
    except (RuntimeError, IndexError) as error:
        if isinstance(error, (NotImplementedError, torch.OutOfMemoryError)) or "memory" in str(
            error
        ):
            raise
        raise NotImplementedError(
            f"{caller}: {type(model).__name__} does not take several sequences as it takes one: "
            f"{error}"
        ) from error


@contextmanager
def outputs_of(
    stack: Stack, reduced: Callable[[Tensor], Any] = Tensor.detach
) -> Iterator[list[Any]]:
    """What each block makes, ``[K, L, D]``, as they run, or what ``reduced`` makes of it."""
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


def check_vectors(model: nn.Module, found: Tensor, expected: Tensor, caller: str) -> None:
    """Raises RuntimeError where vectors of tokens are not, together, what the model made."""
    size = expected.abs().max().clamp_min(1e-30)
    off = float((found.double() - expected.double()).abs().max() / size)
    if not off <= tolerance_of(expected):
        raise RuntimeError(
            f"{caller}: vectors of tokens do not add up to what the blocks of "
            f"{type(model).__name__} made, {off:.2g} of the largest number off: a block calls a "
            "function that is not linear in them and has no rule here"
        )


def own_vectors(x: Tensor, keys: Tensor) -> Tensor:
    """Vectors ``[K, S, D]`` of one token each, zeros elsewhere, of ``x``, ``[1, S, D]``."""
    vectors = x.new_zeros(len(keys), *x.shape[1:])
    places = torch.arange(len(keys), device=x.device)
    vectors[places, keys] = x[0, keys]
    return vectors


def whose(keys: Tensor, S: int, count: int) -> Tensor:
    """bool ``[count, S]``: which token each vector belongs to; those after the keys to none."""
    own = torch.zeros(count, S, dtype=torch.bool, device=keys.device)
    own[torch.arange(len(keys), device=keys.device), keys] = True
    return own


def keys_together(S: int, each: int, device: torch.device) -> Iterator[Tensor]:
    """The tokens whose vectors go together, in turn."""
    for first in range(0, S, each):
        yield torch.arange(first, min(first + each, S), device=device)


def without_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """A context whose graph nobody goes back through: nothing is saved for that."""
    return torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing)


def _nothing(x: Any) -> Any:
    return None
