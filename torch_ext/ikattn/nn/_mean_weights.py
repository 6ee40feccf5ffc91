"""Output and mean weights of softmax attention, part by part: [N, H, L, S] is never held.

Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ikattn.nn._softmax_weights import softmax_weights, total

# Above so many weights of all heads, mean weights are made in parts of one head, of so many each.
_LARGE = 1 << 22
_PART = 1 << 19


def goes_by_parts(query: Tensor, key: Tensor) -> bool:
    """Whether there are many weights, and nothing differentiates them in other ways.

    torch.func and forward-mode duals are shown the plain composition, for ``_MeanWeights`` has no
    rules for them, and so are exported programs, which are to run where no Python is. Meta and fake
    tensors hold nothing anyway.
    """
    if torch.compiler.is_compiling():  # first: compilers cannot trace the others
        # not is_exporting(): torch 2.11 takes that for true under torch.compile, too
        special = torch.compiler._is_exporting_flag
    else:
        special = (
            query.is_meta
            or _get_current_dispatch_mode() is not None
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        )
    return not special and query.shape[:-1].numel() * key.size(-2) > _LARGE


def attend_by_parts(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, biases: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Output [N, H, L, d] and mean weights [N, L, S], after dropout, of softmax attention.

    Args:
        query, key, value: As for ``softmax_attention``.
        dropout_p: Probability on the normalised weights.
        biases: What is added to the logits, each broadcastable to [N, H, L, S].
    """
    if not torch.compiler.is_compiling():
        drop = _Dropout.drawn(dropout_p)
        return _MeanWeights.apply(query, key, value, drop, *biases)  # type: ignore[no-untyped-call,no-any-return]
    # Drawn where the compiler sees it; an operator's result must follow from its arguments.
    seed = None if dropout_p == 0.0 else torch.randint(1 << 62, (), device="cpu")
    autocast = _autocast_of(query.device.type)
    return _mean_weights(query, key, value, list(biases), dropout_p, seed, autocast)  # type: ignore[no-any-return]


class _Dropout:
    """The factors that dropout puts on weights, part after part; the same in every pass."""

    def __init__(self, p: float, seed: int) -> None:
        self.p = p
        self.seed = seed

    @staticmethod
    def drawn(p: float) -> _Dropout:
        """With a fresh seed from torch's default generator."""
        return _Dropout(p, 0 if p == 0.0 else int(torch.randint(1 << 62, (), device="cpu")))

    def begin(self, device: torch.device) -> Callable[[Tensor], Tensor | None]:
        """Begins a pass: what is returned gives the factors of the next weights; None: all 1."""
        if self.p == 0.0:
            return lambda _: None
        generator = torch.Generator(device).manual_seed(self.seed)
        keep = 1.0 - self.p

        def factors(weights: Tensor) -> Tensor:
            kept = torch.empty_like(weights).bernoulli_(keep, generator=generator)
            return kept.div_(keep) if keep > 0.0 else kept

        return factors


def _autocast_of(device_type: str) -> torch.dtype | None:
    """The type of autocast where it is on."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _under_autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


# --- The parts


def _sum_parts(
    query: Tensor, key: Tensor, value: Tensor, biases: Sequence[Tensor], drop: _Dropout
) -> tuple[Tensor, Tensor]:
    """What ``attend_by_parts`` returns."""
    next_factors = drop.begin(query.device)
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    mean = query.new_zeros(query.size(0), query.size(2), key.size(2), dtype=wide)
    output = query.new_empty(*query.shape[:-1], value.size(-1))
    for head, rows in _parts(query, key):
        bias = total([_slice(x, head, rows) for x in biases])
        weights = softmax_weights(query[:, head, rows], key[:, head], bias)
        factors = next_factors(weights)
        if factors is not None:
            weights = weights * factors
        output[:, head, rows] = weights @ value[:, head]
        mean[:, rows] += weights
    return output, mean.div_(query.size(1)).to(query.dtype)


def _gradients_of_parts(
    grad_output: Tensor,
    grad_mean: Tensor,
    inputs: Sequence[Tensor],
    drop: _Dropout,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of query, key, value and biases; the weights are made again."""
    query, key, value, *biases = inputs
    grads = [torch.zeros_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
    next_factors = drop.begin(query.device)
    every, scale = slice(None), math.sqrt(1.0 / query.size(-1))
    for head, rows in _parts(query, key):
        q, k, v = query[:, head, rows], key[:, head], value[:, head]
        weights = softmax_weights(q, k, total([_slice(x, head, rows) for x in biases]))
        grad = grad_output[:, head, rows]
        grad_weights = grad @ v.transpose(-2, -1) + grad_mean[:, rows] / query.size(1)
        factors = next_factors(weights)
        used = weights if factors is None else weights * factors
        grad_weights = grad_weights if factors is None else grad_weights * factors
        along = (weights * grad_weights).sum(dim=-1, keepdim=True)
        grad_logits = weights * (grad_weights - along)
        if grads[0] is not None:
            _add(grads[0], head, rows, grad_logits @ k * scale)
        if grads[1] is not None:
            _add(grads[1], head, every, grad_logits.transpose(-2, -1) @ q * scale)
        if grads[2] is not None:
            _add(grads[2], head, every, used.transpose(-2, -1) @ grad)
        for of_bias in grads[3:]:
            if of_bias is not None:
                _add(of_bias, head, rows, grad_logits)
    return grads


# --- In eager torch


class _MeanWeights(torch.autograd.Function):
    """``_sum_parts``; its backward is differentiable itself."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, drop: _Dropout, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, *biases)
        ctx.drop = drop
        ctx.autocast = _autocast_of(query.device.type)
        return _sum_parts(query, key, value, biases, drop)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad
        wanted = (*needed[:3], *needed[4:])
        with _under_autocast(grad_output.device, ctx.autocast):  # weights come as in the forward
            if _is_batched(grad_output) or _is_batched(grad_mean):
                gradients = _batched_gradients(grad_output, grad_mean, inputs, ctx.drop, wanted)
            else:
                gradients = _gradients_of_parts(grad_output, grad_mean, inputs, ctx.drop, wanted)
        return (*gradients[:3], None, *gradients[3:])


def _batched_gradients(
    grad_output: Tensor,
    grad_mean: Tensor,
    inputs: Sequence[Tensor],
    drop: _Dropout,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Several gradients at once (is_grads_batched): holds the weights of all heads."""
    with torch.enable_grad():
        # views: a bias may depend on the key, which is not to be differentiated here
        inputs = [x.view_as(x) for x in inputs]
        query, key, value, *biases = inputs
        next_factors = drop.begin(query.device)
        used = weights = softmax_weights(query, key, total(biases))
        if drop.p > 0.0:
            factors = torch.empty_like(weights)
            with _random_numbers_under_vmap():
                for head, rows in _parts(query, key):
                    part = next_factors(weights[:, head, rows])
                    assert part is not None
                    factors[:, head, rows] = part
            used = weights * factors
        outputs = (used @ value, used.mean(dim=1).to(query.dtype))
    incoming = {
        output: grad
        for output, grad in zip(outputs, (grad_output, grad_mean), strict=True)
        if output.requires_grad  # the weights may depend on nothing wanted
    }
    numbers = [i for i, want in enumerate(wanted) if want]
    found = torch.autograd.grad(
        list(incoming),
        [inputs[i] for i in numbers],
        list(incoming.values()),
        create_graph=torch.is_grad_enabled(),
    )
    gradients = dict(zip(numbers, found, strict=True))
    return [gradients.get(i) for i in range(len(inputs))]


# --- In a compiled program, as one operator: what a compiler made of the parts would hold them all


@torch.library.custom_op("ikattn::softmax_mean_weights", mutates_args=())
def _mean_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: Sequence[Tensor],
    dropout_p: float,
    seed: Tensor | None,
    autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    drop = _Dropout(dropout_p, 0 if seed is None else int(seed))
    with _under_autocast(query.device, autocast):
        return _sum_parts(query, key, value, biases, drop)


@_mean_weights.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    output = query.new_empty(*query.shape[:-1], value.size(-1))
    return output, query.new_empty(query.size(0), query.size(2), key.size(2))


@torch.library.custom_op("ikattn::softmax_mean_weights_backward", mutates_args=())
def _mean_weights_backward(
    grad_output: Tensor,
    grad_mean: Tensor,
    inputs: Sequence[Tensor],
    dropout_p: float,
    seed: Tensor | None,
    autocast: torch.dtype | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Gradients of query, key, value and biases, empty where not wanted."""
    drop = _Dropout(dropout_p, 0 if seed is None else int(seed))
    with _under_autocast(grad_output.device, autocast):
        found = _gradients_of_parts(grad_output, grad_mean, inputs, drop, wanted)
    return [grad_output.new_empty(0) if x is None else x for x in found]


@_mean_weights_backward.register_fake
def _(grad_output: Tensor, grad_mean: Tensor, inputs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    wanted = rest[-1]
    return [
        torch.empty_like(x) if want else grad_output.new_empty(0)
        for x, want in zip(inputs, wanted, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, biases, ctx.dropout_p, seed, ctx.autocast = inputs
    ctx.biases = len(biases)
    ctx.has_seed = seed is not None
    ctx.save_for_backward(query, key, value, *biases, *([seed] if ctx.has_seed else []))


def _compiled_gradients(
    ctx: Any, grad_output: Tensor, grad_mean: Tensor
) -> tuple[Tensor | list[Tensor | None] | None, ...]:
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad
    inputs, seed = saved[: 3 + ctx.biases], saved[-1] if ctx.has_seed else None
    wanted = [*needed[:3], *(needed[3] if ctx.biases else [])]
    found = _mean_weights_backward(
        grad_output, grad_mean, list(inputs), ctx.dropout_p, seed, ctx.autocast, wanted
    )
    gradients = [x if want else None for x, want in zip(found, wanted, strict=True)]
    return (*gradients[:3], gradients[3:], None, None, None)


_mean_weights.register_autograd(_compiled_gradients, setup_context=_save)


# --- Pieces


def _is_batched(x: Tensor) -> bool:
    """Whether vmap stacks several tensors in this one, as gradients with is_grads_batched."""
    return bool(
        torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)
    )


def _random_numbers_under_vmap() -> Any:
    """Lets random numbers be drawn that are the same for all that vmap stacks."""
    mode: Any = torch._C._parse_dispatch_key("VmapMode")
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(mode))


def _parts(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields heads and slices of queries that have about ``_PART`` weights."""
    batch, heads, length, _ = query.shape
    step = max(1, _PART // max(1, batch * key.size(2)))
    for head in range(heads):
        for start in range(0, length, step):
            yield head, slice(start, min(start + step, length))


def _slice(x: Tensor, head: int, rows: slice) -> Tensor:
    """Returns x[:, head, rows] of a tensor [N|1, H|1, L|1, .]; an axis of size 1 stands for all."""
    of_head = x[:, head if x.size(1) > 1 else 0]
    return of_head[:, rows] if of_head.size(1) > 1 else of_head


def _add(total: Tensor, head: int, rows: slice, part: Tensor) -> None:
    """Adds a part to total[:, head, rows], summed over the axes on which that has size 1."""
    place = _slice(total, head, rows)
    place += part.sum_to_size(place.shape)
