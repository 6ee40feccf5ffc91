"""Where what a model was given enters its blocks: which stacks, and at which places.

A model may pad what it is given, or set vectors of its own before it, and a stack of blocks may
read nothing but what another one made. Sizes: B batch, S tokens given, W vectors that enter the
first block, D model size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.explain.attribution._model import Stack
from ikattn.explain.attribution._torch import detached, hooked
from ikattn.recorder.sums.tensors import first_tensor


def readers_of(
    model: nn.Module, stacks: Sequence[Stack], inputs: Mapping[str, Any], call: Callable[..., Any]
) -> list[Stack]:
    """Returns the stacks that the model's inputs enter otherwise than through another stack.

    Args:
        model: A model, which has hooks meanwhile.
        stacks: Its blocks.
        inputs: Its arguments.
        call: Calls the model with arguments in place of these.
    """
    found: list[Stack] = []
    whole = {n: x for n, x in inputs.items() if isinstance(x, Tensor) and x.dtype == torch.int64}
    named = [x for name, x in whole.items() if name.endswith("input_ids")]
    ids = named or list(whole.values())

    def looked_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        asked = args[0] if args else None
        if not isinstance(asked, Tensor):
            return None
        # models put another id in the place of a picture's
        if not any(asked.shape == x.shape and bool((asked == x).any()) for x in ids):
            return None
        return output.detach().requires_grad_().clone()

    def entering(
        stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = first_tensor(args, kwargs)
        if x is not None and x.requires_grad and stack not in found:
            found.append(stack)

    def made(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return detached(output)

    with ExitStack() as opened:
        opened.enter_context(hooked(_embeddings(model), after=looked_up))
        for stack in stacks:
            enters = partial(entering, stack)
            opened.enter_context(hooked(stack.blocks, before=enters, after=made))
        opened.enter_context(torch.enable_grad())
        leaves = {
            name: x.detach().requires_grad_().clone()
            for name, x in inputs.items()
            if isinstance(x, Tensor) and x.is_floating_point()
        }
        call(**leaves)
    return found


def places_of_tokens(
    model: nn.Module, stacks: Sequence[Stack], ids: Tensor, W: int, call: Callable[[], Any]
) -> Tensor | None:
    """Returns the places ``[S]`` of tokens among W vectors; None: some have no place of their own.

    Args:
        model: A model, which has hooks meanwhile.
        stacks: Its blocks.
        ids: ``[B, S]``, the ids that the model is called with.
        W: The number of vectors that enter a block.
        call: Calls the model, whose embedding of the ids is followed to its first block.
    """
    vectors: list[Tensor] = []  # [B, S or more, D], as they are looked up
    found: list[Tensor] = []

    def looked_up(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        asked = args[0] if args else None
        if not isinstance(asked, Tensor) or not torch.equal(asked[..., : ids.size(1)], ids):
            return None
        vectors.append(output.detach().requires_grad_())
        return vectors[-1].clone()

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor(args, kwargs)
        if x is None or x.shape[:-1] != (ids.size(0), W) or not x.requires_grad:
            return
        for leaf in vectors:
            places = None if found else _places(x, leaf)
            if places is not None:
                found.append(places[: ids.size(1)])

    with ExitStack() as opened:
        opened.enter_context(hooked(_embeddings(model), after=looked_up))
        opened.enter_context(hooked([stack.blocks[0] for stack in stacks], before=entering))
        opened.enter_context(torch.enable_grad())
        call()
    return found[0] if found else None


def _embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


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
