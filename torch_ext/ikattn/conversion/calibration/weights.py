"""The first step of a calibration: frequencies fitted to softmax weights by least squares.

Sizes: B batch, H query heads, L queries, S keys, d head size, M frequencies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ikattn.conversion.calibration.layers import Layer
from ikattn.recorder.calls.attention_call import AttentionCall
from ikattn.spectral.direct import Direct

# Weights that are kept of a call, and those of a step.
_OF_CALL = 1 << 19
_FEWEST = 16  # queries of a sequence that are kept, where it has so many
_LOOKS = 20  # at what is held out, at even distances, where a step sees a part of the calls
_HELD_OUT = 5  # one sequence, or query, in so many

_logger = logging.getLogger("ikattn")


def some_queries(call: AttentionCall) -> AttentionCall:
    """Returns the call with as many of its queries as are kept, at even distances.

    Of a call of many sequences some are left out, rather than all but a few queries of each.
    """
    B, H, L, S = call.sizes
    wanted = max(1, (B * H * L * S) // _OF_CALL)
    of_queries = min(wanted, max(1, L // _FEWEST))
    of_sequences = min(B, -(-wanted // of_queries))
    if wanted > 1:
        queries = slice(of_queries // 2, None, of_queries)
        call = call.part(B=slice(None, None, of_sequences), L=queries)
        call.value = call.value[:0]  # weights are made without it
    for name, x in vars(call).items():  # autograd refuses to save tensors of inference mode
        if isinstance(x, Tensor) and (wanted > 1 or x.is_inference()):
            setattr(call, name, x.clone())
    return call


def fit_to_weights(
    layer: Layer, calls: list[AttentionCall], steps: int, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Fits a layer's frequencies, in float32 at least, to the softmax weights of its calls.

    Of frequencies that are parameters each head keeps the best that it visits, by what is held out;
    of a generator all heads do together. Each step of Adam is on calls of about half a million
    weights. Returns the errors of what is held out, [H], before and after.
    """
    _check_calls(layer, calls)
    parameters = layer.frequencies
    state = [w.detach().clone() for w in parameters]
    by_head = isinstance(layer.kernel, Direct)
    with torch.no_grad():
        before = best = _errors(layer, calls)[1]
    groups = _groups(calls)
    every = max(1, steps // _LOOKS) if len(groups) > 1 else 1

    def loss(step: int) -> Tensor:
        return _errors(layer, groups[step % len(groups)])[0].sum()

    for step in descending([{"params": parameters, "lr": learning_rate}], loss, steps):
        if (step + 1) % every and step + 1 < steps:
            continue
        with torch.no_grad():
            found = _errors(layer, calls)[1]
        better = found < best if by_head else (found.mean() < best.mean()).expand_as(found)
        best = torch.where(better, found, best)
        for kept, w in zip(state, parameters, strict=True):
            if by_head:  # flat, [H d M]
                heads = better.numel()
                kept.view(heads, -1)[better] = w.detach().view(heads, -1)[better]
            elif bool(better.all()):
                kept.copy_(w.detach())
    with torch.no_grad():
        for parameter, kept in zip(parameters, state, strict=True):
            parameter.copy_(kept)
    before, best = before.sqrt(), best.sqrt()
    stuck = [head for head, better in enumerate((best < before).tolist()) if not better]
    if stuck and steps:
        errors = ", ".join(f"{head} ({best[head]:.2f})" for head in stuck)
        _logger.warning(
            "calibrate: heads of %s came no nearer to softmax and keep the frequencies they had, "
            "with these errors of the weights: %s",
            layer,
            errors,
        )
    return before, best


def descending(
    groups: list[dict[str, Any]], loss: Callable[[int], Tensor], steps: int
) -> Iterator[int]:
    """Takes steps of Adam down a loss of each step, at rates that fall to 0 as a cosine.

    Yields the number of a step when it has been taken; ``groups`` are the optimiser's.
    """
    if not steps:
        return
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    parameters = [w for group in groups for w in group["params"]]
    for step in range(steps):
        gradients = torch.autograd.grad(loss(step), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimiser.step()
        schedule.step()
        yield step


def _groups(calls: list[AttentionCall]) -> list[list[AttentionCall]]:
    """Yields the calls in parts of about as many weights as a step takes."""
    groups: list[list[AttentionCall]] = []
    left = 0
    for call in calls:
        if left <= 0:
            groups.append([])
            left = _OF_CALL
        groups[-1].append(call)
        left -= call.weights.numel()
    return groups


def _check_calls(layer: Layer, calls: list[AttentionCall]) -> None:
    if all(call.key.size(2) < 2 for call in calls):
        raise ValueError(
            f"calibrate: expected batches of several tokens, got one key in every call of {layer}"
        )
    for call in calls:
        is_seen = call.weights.detach().amax(-1) > 0  # [B, H, L]
        if call.query_padding is not None:
            is_seen &= ~call.query_padding[:, None]
        if bool(is_seen.any()):
            return
    raise ValueError(f"calibrate: expected batches with tokens, got nothing but padding in {layer}")


def _errors(layer: Layer, calls: list[AttentionCall]) -> tuple[Tensor, Tensor]:
    """Returns squared relative errors of the heads, [H]: of what is fitted to, and of the rest."""
    sums: list[Tensor] = []
    for call in calls:
        weights = layer.weights(call)
        error, size = ((weights - call.weights).square(), call.weights.square())
        of_rows = torch.stack([error.sum(-1), size.sum(-1)])  # [2, B, H, L]
        if call.query_padding is not None:
            of_rows = of_rows.masked_fill(call.query_padding[:, None], 0.0)
        sums.append(by_what_is_held_out(of_rows.transpose(2, 3)))  # [2, 2, H]
    errors, sizes = torch.stack(sums).sum(0).unbind(1)
    fitted, rest = errors / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    # where all that is held out is padding
    return fitted, torch.where(sizes[1] > 0, rest, fitted.detach())


def by_what_is_held_out(of_rows: Tensor) -> Tensor:
    """Sums [.., B, L, ..], the batch second, over sequences and queries: [2, ...].

    First those that are fitted to, then the rest. Of fewer than five sequences queries are held
    out.
    """
    if of_rows.size(1) < _HELD_OUT:
        of_rows = of_rows.transpose(1, 2)
    count = of_rows.size(1)
    # the first query of a causal layer has but one key
    held_out = torch.arange(count, device=of_rows.device) % _HELD_OUT == min(2, count - 1)
    return torch.stack([of_rows[:, rows].sum((1, 2)) for rows in (~held_out, held_out)])
