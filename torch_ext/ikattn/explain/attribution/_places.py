"""Where what a model was given enters its blocks: which stacks, and at which places.

A model may pad what it is given, or set vectors of its own before it, and a stack of blocks may
read nothing but what another one made. Sizes: B batch, S tokens given, W vectors that enter the
first block, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._model import Stack
from ikattn.explain.attribution._targets import Task
from ikattn.explain.attribution._torch import detached, hooked
from ikattn.recorder.sums.tensors import first_tensor


def readers_of(task: Task, stacks: list[Stack]) -> list[Stack]:
    """Returns the stacks that the model's inputs enter otherwise than through another stack."""
    if len(stacks) < 2 or task.is_seq2seq:
        return stacks
    found: list[Stack] = []
    whole = {
        n: x for n, x in task.inputs.items() if isinstance(x, Tensor) and x.dtype == torch.int64
    }
    named = [x for name, x in whole.items() if name.endswith("input_ids")]
    ids = named or list(whole.values())

    def is_asked(asked: Tensor) -> bool:  # models put another id in the place of a picture's
        return any(asked.shape == x.shape and bool((asked == x).any()) for x in ids)

    def entering(
        stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = first_tensor(args, kwargs)
        if x is not None and x.requires_grad and stack not in found:
            found.append(stack)

    with ExitStack() as opened:
        opened.enter_context(_leaves_of(task.model, is_asked))
        for stack in stacks:
            enters, made = partial(entering, stack), lambda module, args, output: detached(output)
            opened.enter_context(hooked(stack.blocks, before=enters, after=made))
        leaves = {
            name: x.detach().requires_grad_().clone()
            for name, x in task.inputs.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        task.output(**leaves)
    return found


def places_of_tokens(
    model: nn.Module, stacks: Sequence[Stack], ids: Tensor, W: int, call: Callable[[], Any]
) -> Tensor | None:
    """Returns the places ``[S]`` of tokens among W vectors; None: some have no place of their own.

    The embedding of ids ``[B, S]``, with which ``call`` calls the model, is followed to its blocks.
    """
    found: list[Tensor] = []

    def is_asked(asked: Tensor) -> bool:
        return torch.equal(asked[..., : ids.size(1)], ids)

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor(args, kwargs)
        if x is None or x.shape[:-1] != (ids.size(0), W) or not x.requires_grad:
            return
        for leaf in vectors:
            places = None if found else _places(x, leaf)
            if places is not None:
                found.append(places[: ids.size(1)])

    first_blocks = [stack.blocks[0] for stack in stacks]
    with _leaves_of(model, is_asked) as vectors, hooked(first_blocks, before=entering):
        call()
    return found[0] if found else None


@contextmanager
def _leaves_of(model: nn.Module, is_asked: Callable[[Tensor], bool]) -> Iterator[list[Tensor]]:
    """Has embeddings of what is asked look up leaves, ``[B, S or more, D]``, and gathers them."""
    leaves: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not args or not isinstance(args[0], Tensor) or not is_asked(args[0]):
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    with hooked(embeddings, after=hook), torch.enable_grad():
        yield leaves


def _places(x: Tensor, vectors: Tensor) -> Tensor | None:
    """Finds the place in ``x``, ``[B, W, D]``, that each of ``[B, S, D]`` vectors enters alone.

    The gradient of a part of x, in random directions, is whole at what enters there and zero at
    what does not; the digits of a place are those of the parts it is in. None: some vector enters
    nowhere, or at several places.
    """
    W = x.size(1)
    directions = torch.randn_like(x[:1, :1])
    numbers = torch.arange(W, device=x.device)

    def gradient(part: Tensor) -> Tensor:
        chosen = (x * directions)[:, part].sum()
        (found,) = torch.autograd.grad(chosen, vectors, retain_graph=True, allow_unused=True)
        found = vectors.new_zeros(vectors.shape) if found is None else found
        sizes: Tensor = found.double().norm(dim=-1).amax(0)  # [S]
        return sizes

    whole = gradient(torch.ones_like(numbers, dtype=torch.bool))
    places = torch.zeros_like(whole, dtype=torch.int64)
    is_clear = whole > 0
    for digit in range(W.bit_length()):
        part = gradient((numbers >> digit) % 2 == 1)
        is_in = part > 0.5 * whole
        is_clear &= (part - whole * is_in).abs() <= 1e-2 * whole
        places += is_in.long() << digit
    return places if bool(is_clear.all()) else None
