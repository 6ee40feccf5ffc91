"""The second step of a calibration: each layer's output drawn to that of the softmax layer.

Layers are taken in the order in which the model calls them. Inputs of a layer are those that it
gets where the layers before it have been calibrated, so that it makes up for what they lack.

Sizes: B batch, L queries, E size of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ikattn.conversion.calibration.layers import Layer
from ikattn.conversion.calibration.weights import by_what_is_held_out, descending
from ikattn.nn.parameter_groups import frozen

_NOTHING = 1e-30  # a square of outputs
_HALF = (torch.float16, torch.bfloat16)


class Rates(NamedTuple):
    """Learning rates of Adam, falling to 0 as a cosine; None: these stay as they are."""

    frequencies: float
    projections: float | None


class Target(NamedTuple):
    """The output of a layer in one call, while the model computed softmax."""

    output: Tensor  # [B, L, E], or what ``rows_of`` makes of it
    query_padding: Tensor | None  # bool [B, L], queries whose output does not matter


class _Enough(Exception):
    """Ends a run of the model whose rest is of no use."""


def run(model: nn.Module, batch: Any) -> None:
    """Calls the model with a batch; what it draws at random is the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*(batch if isinstance(batch, tuple | list) else (batch,)))


def rows_of(output: Any, module: nn.Module) -> Tensor:
    """Returns the output of a layer as [B, L, E]; of nested sequences as one, [1, tokens, E]."""
    y: Tensor = output[0] if isinstance(output, tuple | list) else output
    if y.is_nested:
        return torch.cat(y.unbind()).unsqueeze(0)
    if y.dim() == 2:
        return y.unsqueeze(0)
    # torch's modules alone have it
    return y if getattr(module, "batch_first", True) else y.transpose(0, 1)


def fit_to_outputs(
    model: nn.Module,
    layer: Layer,
    batches: Sequence[Any],
    targets: list[list[Target]],
    steps: int,
    rates: Rates,
) -> tuple[float, float]:
    """Trains a layer to give what the softmax layer gave, by steps on the calls of one batch each.

    The layers before this one compute what they will. Returns the relative errors of the output, on
    what is held out, before and after. Where it came no nearer everything is as it was.
    """
    pairs = [(batch, own) for batch, own in zip(batches, targets, strict=True) if own]
    calls = [_calls_of(model, layer, batch, len(own)) for batch, own in pairs]
    targets = [own for _, own in pairs]
    groups = _groups(layer, rates)
    parameters = [w for group in groups for w in group["params"]]
    chosen = {id(w) for w in parameters}
    others = (w for w in layer.module.parameters() if id(w) not in chosen)
    with frozen(others), in_float32([layer.module]):
        first = [w.detach().clone() for w in parameters]

        def error(number: int) -> Tensor:
            pairs = zip(calls[number], targets[number], strict=True)
            return torch.stack([_errors(layer.module, c, t) for c, t in pairs]).sum(0)

        with torch.no_grad():
            before = _held_out(error, len(calls))
        if not parameters:
            return before, before
        order, numbers = torch.Generator().manual_seed(0), list[int]()

        def loss(_: int) -> Tensor:  # each batch as often as the others
            if not numbers:
                numbers.extend(torch.randperm(len(calls), generator=order).tolist())
            squared, size = error(numbers.pop())[0].unbind()
            return squared / size

        for _ in descending(groups, loss, steps):
            pass
        with torch.no_grad():
            after = _held_out(error, len(calls))
            if not after < before:  # NaN, too
                for parameter, value in zip(parameters, first, strict=True):
                    parameter.copy_(value)
                after = before
    return before, after


def _groups(layer: Layer, rates: Rates) -> list[dict[str, Any]]:
    """Returns what is trained of a layer: frequencies, unless no head uses any, and the rest."""
    frequencies, split = layer.frequencies, layer.owner.split_heads()
    groups = [{"params": frequencies, "lr": rates.frequencies}]
    if split is not None and not split.implicit:
        groups = []
    if rates.projections is not None:
        own = {id(w) for w in frequencies}
        others = [w for w in layer.module.parameters() if w.requires_grad and id(w) not in own]
        groups += [{"params": others, "lr": rates.projections}] if others else []
    return groups


def _calls_of(
    model: nn.Module, layer: Layer, batch: Any, count: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments with which the model calls the layer, ``count`` times."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))
        if len(found) == count:
            raise _Enough

    hook = layer.module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    with hook, torch.no_grad(), suppress(_Enough):
        run(model, batch)
    if len(found) != count:
        raise ValueError(
            f"calibrate: {layer} was called {count} times while the model computed softmax and "
            f"{len(found)} times with implicit kernels; expected as many, whatever the values"
        )
    wide: list[Any] = tree_map_only(Tensor, _for_autograd, found)
    return wide


def _for_autograd(x: Tensor) -> Tensor:
    """Returns a tensor in float32 at least, and none of inference mode."""
    x = x.detach()
    if x.dtype in _HALF:
        return x.float()
    return x.clone() if x.is_inference() else x


def _errors(
    module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], target: Target
) -> Tensor:
    """Returns squared errors and squares, [fitted or held out, error or size], of one call."""
    args, kwargs = call
    found = rows_of(module(*args, **kwargs), module)
    expected = target.output.to(found.dtype)
    error, size = (found - expected).square().sum(-1), expected.square().sum(-1)  # [B, L]
    if target.query_padding is not None and target.query_padding.shape == error.shape:
        error, size = (x.masked_fill(target.query_padding, 0.0) for x in (error, size))
    tiny = torch.finfo(error.dtype).tiny
    sums = by_what_is_held_out(torch.stack([error, size]))
    return sums + torch.tensor([0.0, tiny], device=error.device)


def _held_out(error: Callable[[int], Tensor], count: int) -> float:
    sums = torch.stack([error(number) for number in range(count)]).double().sum(0)
    # where all that is held out is padding, of what is fitted to
    squared, size = sums[1] if sums[1, 1] > _NOTHING else sums[0]
    return math.sqrt(float(squared / size))


@contextmanager
def in_float32(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Opens a context in float32: in 16 bits a step of the optimiser would be lost, or infinite."""
    tensors = [x for part in modules for x in (*part.parameters(), *part.buffers())]
    narrow = [(x, x.dtype) for x in tensors if x.dtype in _HALF]
    for x, _ in narrow:
        x.data = x.data.float()
    try:
        yield
    finally:
        for x, dtype in narrow:
            x.data = x.data.to(dtype)
