"""Softmax attention, for the dot and rbf kernels of ``MultiheadAttention``.

Sizes: N batch, H heads, L queries, S keys, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ikattn._masks import Masks, as_bias, hidden
from ikattn.magnitude import LearnedOrder


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    *,
    key_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
    average: bool = False,
    mask_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Computes softmax(q.k / sqrt(d) + bias) v; a query that sees no key gets zeros.

    With ``need_weights`` it forms the weights and draws dropout as nn.MultiheadAttention does;
    without, it leaves both to F.scaled_dot_product_attention, as that does. Mean weights of long
    sequences are made part by part, so that [N, H, L, S] is never held; their dropout is drawn part
    by part, too, and is then not the one that nn.MultiheadAttention draws from the same state.

    Args:
        query: [N, H, L, d].
        key: [N, H, S, d].
        value: [N, H, S, d].
        masks: ``is_causal`` must be False with any other mask, ``key_bias`` or ``need_weights``.
        key_bias: [N, H, 1, S], added to the logits.
        dropout_p: Probability on the normalised weights.
        need_weights: Return the weights too.
        average: Return their mean over heads.
        mask_dtype: The type in which bool masks are added to the logits.

    Returns:
        Output [N, H, L, d], and the weights after dropout, [N, H, L, S] or [N, L, S], or None.
    """
    biases = _biases(masks, key_bias, mask_dtype)
    if need_weights and average and _is_large(query, key):
        drop = _Dropout(dropout_p)
        return _MeanWeights.apply(query, key, value, drop, *biases)  # type: ignore[no-untyped-call,no-any-return]
    bias = _total(biases)
    if need_weights:
        weights = _weights(query, key, bias)
        if dropout_p > 0.0:
            weights = dropout(weights, dropout_p)
        return weights @ value, weights.mean(dim=1) if average else weights
    empty = None
    if bias is not None:
        empty = _empty_rows(bias)
        bias = bias.masked_fill(empty, 0.0)
    output = scaled_dot_product_attention(query, key, value, bias, dropout_p, masks.is_causal)
    return output if empty is None else output.masked_fill(empty, 0.0), None


def select_away(key: Tensor, value: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Zeroes padded keys and values: their weight is 0, but 0 * NaN would reach the output.

    Args:
        key: [N, H, S, d].
        value: [N, H, S, d].
        padding: [N, S], bool or float, or None.
    """
    if padding is None:
        return key, value
    away = hidden(padding)[:, None, :, None]
    return key.masked_fill(away, 0.0), value.masked_fill(away, 0.0)


def rbf_key_bias(key: Tensor, p: float | LearnedOrder | None) -> Tensor | None:
    """Returns g_j - |k_j|_2^2 / (2 sqrt d), by which RBF logits differ from dot-product ones.

    Args:
        key: [N, H, S, d].
        p: Order of the norm in g_j = |k_j|_p^2 / (2 sqrt d), or what computes g; None: g_j = 0.

    Returns:
        [N, H, 1, S] of key's type, computed in float32 at least; None where it is zero, at p = 2.
    """
    if p == 2:
        return None
    wide = key if key.dtype == torch.float64 else key.float()
    bias: Tensor = -wide.square().sum(dim=-1)
    if isinstance(p, LearnedOrder):
        bias = bias / (2 * math.sqrt(key.size(-1))) + p(wide)
        return bias.to(key.dtype).unsqueeze(-2)
    if p is not None:
        zero = (wide == 0).all(dim=-1)  # whose second derivative by the norm itself would be NaN
        norm = torch.linalg.vector_norm(wide.masked_fill(zero.unsqueeze(-1), 1.0), p, dim=-1)
        bias = bias + norm.square().masked_fill(zero, 0.0)
    return (bias / (2 * math.sqrt(key.size(-1)))).to(key.dtype).unsqueeze(-2)


def _biases(masks: Masks, key_bias: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Returns all that is added to the logits, each broadcastable to [N, H, L, S]."""
    padding = None if masks.padding is None else as_bias(masks.padding, dtype)[:, None, None, :]
    attention = None if masks.attention is None else as_bias(masks.attention, dtype)
    return [part for part in (key_bias, padding, attention) if part is not None]


def _total(biases: Sequence[Tensor]) -> Tensor | None:
    return sum(biases[1:], biases[0]) if biases else None


def _empty_rows(bias: Tensor) -> Tensor:
    """Returns where a query sees no key, [.., L, 1]."""
    return hidden(bias).all(dim=-1, keepdim=True)


def _weights(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Returns softmax(q.k / sqrt(d) + bias), [.., L, S], with zeros for a query that sees no key.

    Args:
        query: [.., L, d].
        key: [.., S, d].
        bias: Broadcastable to [.., L, S].
    """
    logits = (query * math.sqrt(1.0 / query.size(-1))) @ key.transpose(-2, -1)
    if bias is None:
        return softmax(logits, dim=-1)
    empty = _empty_rows(bias)
    weights = softmax(logits + bias.masked_fill(empty, 0.0), dim=-1)
    return weights.masked_fill(empty, 0.0)


# Above so many weights of all heads, mean weights are made in parts of one head, of so many each.
_LARGE = 1 << 22
_PART = 1 << 19


def _is_large(query: Tensor, key: Tensor) -> bool:
    """Whether to go part by part: many weights, and nothing that differentiates in other ways.

    A compiler is shown the plain composition, and so are torch.func and forward-mode duals, for
    which ``_MeanWeights`` has no rules. Meta and fake tensors hold nothing anyway.
    """
    if (
        torch.compiler.is_compiling()  # first: compilers cannot trace the others
        or query.is_meta
        or _get_current_dispatch_mode() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    ):
        return False
    return query.shape[:-1].numel() * key.size(-2) > _LARGE


class _Dropout:
    """The factors that dropout puts on weights, part after part; the same in every pass."""

    def __init__(self, p: float) -> None:
        self.p = p
        self.seed = 0 if p == 0.0 else int(torch.randint(1 << 62, (), device="cpu"))

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


class _MeanWeights(torch.autograd.Function):
    """Output and mean weights of softmax attention, from the weights of some queries of one head.

    The backward pass makes them again; it is differentiable itself.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, drop: _Dropout, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, *biases)
        ctx.drop = drop
        device = query.device.type
        enabled = torch.is_autocast_enabled(device)
        ctx.autocast = (device, torch.get_autocast_dtype(device) if enabled else None, enabled)
        next_factors = drop.begin(query.device)
        wide = query.dtype if query.dtype == torch.float64 else torch.float32
        mean = query.new_zeros(query.size(0), query.size(2), key.size(2), dtype=wide)
        output = query.new_empty(*query.shape[:-1], value.size(-1))
        for head, rows in _parts(query, key):
            bias = _total([_slice(x, head, rows) for x in biases])
            weights = _weights(query[:, head, rows], key[:, head], bias)
            factors = next_factors(weights)
            if factors is not None:
                weights = weights * factors
            output[:, head, rows] = weights @ value[:, head]
            mean[:, rows] += weights
        return output, mean.div_(query.size(1)).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(*ctx.autocast):  # weights come as they did in the forward
            if _is_batched(grad_output) or _is_batched(grad_mean):
                return _MeanWeights._batched_gradients(ctx, grad_output, grad_mean)
            return _MeanWeights._gradients(ctx, grad_output, grad_mean)

    @staticmethod
    def _batched_gradients(
        ctx: Any, grad_output: Tensor, grad_mean: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Several gradients at once (is_grads_batched): holds the weights of all heads."""
        with torch.enable_grad():
            # views: a bias may depend on the key, which is not to be differentiated here
            query, key, value, *biases = (x.view_as(x) for x in ctx.saved_tensors)
            next_factors = ctx.drop.begin(query.device)
            used = weights = _weights(query, key, _total(biases))
            if ctx.drop.p > 0.0:
                factors = torch.empty_like(weights)
                with _random_numbers_under_vmap():
                    for head, rows in _parts(query, key):
                        factors[:, head, rows] = next_factors(weights[:, head, rows])
                used = weights * factors
            outputs = (used @ value, used.mean(dim=1).to(query.dtype))
        incoming = {
            output: grad
            for output, grad in zip(outputs, (grad_output, grad_mean), strict=True)
            if output.requires_grad  # the weights may depend on nothing wanted
        }
        inputs = (query, key, value, None, *biases)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        found = torch.autograd.grad(
            list(incoming),
            [inputs[i] for i in wanted],
            list(incoming.values()),
            create_graph=torch.is_grad_enabled(),
        )
        gradients = dict(zip(wanted, found, strict=True))
        return tuple(gradients.get(i) for i in range(len(inputs)))

    @staticmethod
    def _gradients(ctx: Any, grad_output: Tensor, grad_mean: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *biases = ctx.saved_tensors
        inputs = (query, key, value, None, *biases)
        grads = [
            torch.zeros_like(x) if wanted and x is not None else None
            for x, wanted in zip(inputs, ctx.needs_input_grad, strict=True)
        ]
        next_factors = ctx.drop.begin(query.device)
        every, scale = slice(None), math.sqrt(1.0 / query.size(-1))
        for head, rows in _parts(query, key):
            q, k, v = query[:, head, rows], key[:, head], value[:, head]
            weights = _weights(q, k, _total([_slice(x, head, rows) for x in biases]))
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
            for of_bias in grads[4:]:
                if of_bias is not None:
                    _add(of_bias, head, rows, grad_logits)
        return tuple(grads)


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
