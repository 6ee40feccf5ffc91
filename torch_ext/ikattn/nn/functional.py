"""Multi-head attention of any kernel as a function, and the one path that all calls take.

A call's way: project as upstream -> append learned and zero keys -> attention of the chosen kernel
on [N, H, L, d] -> the out-projection. ``multi_head_attention_forward`` and ``MultiheadAttention``
are two doors to it. Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size,
M frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from numbers import Real
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.overrides import handle_torch_function, has_torch_function

from ikattn._memory import takes_memory_for
from ikattn.nn.kernels import HeadCall, Kernel, KernelOptions, Wanted, attend_heads
from ikattn.nn.masks import Masks, check_hint, check_types, padding_of_queries
from ikattn.nn.projection import InProjection, Projection, check_axes, merge_heads, project
from ikattn.nn.softmax import refuse_context_parallel

_F = TypeVar("_F", bound=Callable[..., Any])


class ExtraKeys(NamedTuple):
    """Keys and values that follow the projected ones, or take their place."""

    bias_k: Tensor | None  # [1, 1, E]
    bias_v: Tensor | None
    add_zero: bool
    static_k: Tensor | None = None  # [N * H, S, d]
    static_v: Tensor | None = None


def _overridable(function: _F) -> _F:
    """Asks subclasses of Tensor, and torch.fx, before the function is called."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = (*args, *kwargs.values())
        if has_torch_function(tensors):
            return handle_torch_function(called, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]


@_overridable
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    kernel: Kernel = "dot",
    p: float | None = 2.0,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes F.multi_head_attention_forward with a choice of kernel.

    Args:
        query: [L, N, E], unbatched [L, E].
        key, value: [S, N, E], unbatched [S, E]; with separate weights of other last sizes.
        in_proj_weight, in_proj_bias: [3 E, E] and [3 E]; the bias may be None.
        q_proj_weight, k_proj_weight, v_proj_weight: [E, E], [E, kdim], [E, vdim].
        out_proj_weight, out_proj_bias: [E, E] and [E] or None.
        bias_k, bias_v: A learned key and value, [1, 1, E], appended to every sequence; or None.
        static_k, static_v: Keys and values [N * H, S, d] that take the place of the projected.
        key_padding_mask: [N, S], unbatched [S]. Bool: True = ignore the key. Floating point: added
            to the logits.
        attn_mask: [L, S] or [N * H, L, S], bool or floating point like ``key_padding_mask``.
        is_causal: A promise that ``attn_mask``, which must be given, is the causal mask.
        kernel: "dot": equal to F.multi_head_attention_forward. "rbf", "implicit": as for
            ``MultiheadAttention``.
        p: Order of the norm in a key's magnitude, a real number >= 1; None: no magnitude.
        w1, w2: Frequencies [H, d, M] or [N, H, d, M], for "implicit" only; w2 = None: w2 = w1.

    Returns:
        The output, shaped like query, and the weights or None: [N, L, S], per head [N, H, L, S],
        without N for unbatched input. docs/guide/drop_in.md lists what differs from upstream.

    Raises:
        AssertionError, RuntimeError: As F.multi_head_attention_forward, in its words.
        ValueError: Unknown kernel, p < 1, frequencies missing or given where none belong.

    Source: K. Song et al., "Implicit Kernel Attention", AAAI 2021 (arXiv 2006.06147).

    Example:
        >>> import torch
        >>> from ikattn.nn.functional import multi_head_attention_forward
        >>> x, w_in, w_out = torch.randn(5, 2, 16), torch.randn(48, 16), torch.randn(16, 16)
        >>> layer = (16, 4, w_in, None, None, None, False, 0.0, w_out, None)
        >>> w1, w2 = (0.1 * torch.randn(4, 4, 8) for _ in range(2))
        >>> output, weights = multi_head_attention_forward(
        ...     x, x, x, *layer, kernel="implicit", w1=w1, w2=w2
        ... )
        >>> output.shape, weights.shape
        (torch.Size([5, 2, 16]), torch.Size([2, 5, 5]))
    """
    check_kernel(kernel, p)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    source = InProjection(embed_dim_to_check, num_heads, in_proj_weight, weights, in_proj_bias)
    check_axes(query, key, value, key_padding_mask, attn_mask, num_heads)
    # upstream does not look at a mask for which the hint stands
    is_hint_alone = is_causal and key_padding_mask is None and not need_weights
    check_types(key_padding_mask, None if is_hint_alone else attn_mask)
    if (kernel == "implicit") != (w1 is not None) or (w1 is None and w2 is not None):
        raise ValueError(
            "multi_head_attention_forward: expected w1, and w2 if not stationary, for "
            f"kernel='implicit' and only there; got kernel={kernel!r} with "
            f"w1 {'missing' if w1 is None else 'given'}, w2 {'missing' if w2 is None else 'given'}"
        )
    return attend(
        query,
        key,
        value,
        partial(project, source),
        ExtraKeys(bias_k, bias_v, add_zero_attn, static_k, static_v),
        KernelOptions(kernel, p, None if w1 is None else lambda *_: (w1, w2)),
        Masks(key_padding_mask, attn_mask, is_causal),
        Wanted(need_weights, average_attn_weights),
        dropout_p=dropout_p if training else 0.0,
        out_proj=lambda x: linear(x, out_proj_weight, out_proj_bias),
        batch_first=False,
    )


@takes_memory_for("projections, logits or weights", function="MultiheadAttention")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Projection,
    extra: ExtraKeys,
    kernel: KernelOptions,
    masks: Masks,
    wanted: Wanted,
    *,
    dropout_p: float,
    out_proj: Callable[[Tensor], Tensor],
    batch_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes every call, once the number of axes and the types of masks are checked.

    Query is [N, L, E] if ``batch_first``, else [L, N, E], unbatched [L, E]; key and value have S
    for L, and sizes of their own with separate weights. Masks are as the caller gave them;
    ``is_causal`` is the caller's hint. Weights are [N, L, S] or [N, H, L, S]. Errors are in the
    words of F.multi_head_attention_forward.
    """
    check_hint(masks.is_causal, masks.attention)
    is_batched, batch_axis = query.dim() == 3, 0 if batch_first else 1
    if not is_batched:
        # one tensor stays one, and is projected at once
        q = query.unsqueeze(batch_axis)
        k = q if key is query else key.unsqueeze(batch_axis)
        v = k if value is key else value.unsqueeze(batch_axis)
        query, key, value = q, k, v
        if masks.padding is not None:
            masks = masks._replace(padding=masks.padding.unsqueeze(0))

    if kernel.pools and kernel.query_padding is None:
        of_queries = padding_of_queries(query, key, masks.padding, batch_first)
        kernel = kernel._replace(query_padding=of_queries)
    hint = masks.is_causal and _can_use_causal_hint(kernel, extra, masks, wanted)
    q, k, v = projection(query, key, value, batch_first)
    if not hint or masks.padding is not None or wanted.weights:  # else upstream does not look
        masks = masks.four_axes(q, k)
        if hint:
            masks.check_unread(q)
    masks = Masks(masks.padding, None if hint else masks.attention, hint).for_logits_of(q)
    k, v, masks = with_extra_keys(k, v, masks, extra)
    _check_values_fit(k, v, wanted.weights)
    if kernel.name != "dot" and not torch.compiler.is_compiling():
        refuse_context_parallel(kernel.name)
    call = HeadCall(q, k, v, kernel, masks, wanted, dropout_p, query.dtype)
    output, weights = attend_heads(call)
    output = out_proj(merge_heads(output, batch_first))

    if not is_batched:
        output = output.squeeze(batch_axis)
        weights = None if weights is None else weights.squeeze(0)
    return output, weights


def check_kernel(kernel: str, p: float | None) -> None:
    """Raises ValueError for a kernel, or an order of the norm, that does not exist."""
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel must be one of {get_args(Kernel)}, got {kernel!r}")
    if p is not None and not (isinstance(p, Real) and 1 <= p < float("inf")):
        raise ValueError(f"p must be a real number >= 1, or None for no magnitude; got {p!r}")


def _can_use_causal_hint(
    kernel: KernelOptions, extra: ExtraKeys, masks: Masks, wanted: Wanted
) -> bool:
    """Whether ``is_causal`` may stand for attn_mask, so that the mask need not be read."""
    if kernel.name == "implicit":
        # appended keys come last, where causality would hide them
        has_extra = extra.bias_k is not None or extra.add_zero
        is_alone = masks.padding is None and not wanted.weights
        return not has_extra and (kernel.split is None or is_alone)
    if kernel.name == "rbf" and (kernel.p != 2 or kernel.magnitude is not None):
        # F.scaled_dot_product_attention takes no bias together with is_causal
        return False
    return masks.padding is None and not wanted.weights  # exactly when upstream does


def with_extra_keys(
    key: Tensor, value: Tensor, masks: Masks, extra: ExtraKeys
) -> tuple[Tensor, Tensor, Masks]:
    """Appends bias_k and bias_v, then zeros: [N, H, S, d] -> [N, H, S + (0 to 2), d]."""
    if extra.bias_k is not None and extra.bias_v is not None:
        for name, static in (("key", extra.static_k), ("value", extra.static_v)):
            if static is not None:
                raise AssertionError(f"bias cannot be added to static {name}.")
        key = torch.cat([key, _like_heads(extra.bias_k, key)], dim=2)
        value = torch.cat([value, _like_heads(extra.bias_v, value)], dim=2)
        masks = masks.with_visible_key()
    elif extra.bias_k is not None:
        raise AssertionError("bias_k is set but bias_v is None")
    elif extra.bias_v is not None:
        raise AssertionError("bias_v is set but bias_k is None")
    if extra.static_k is not None:
        key = _static_heads("static_k", extra.static_k, key)
    if extra.static_v is not None:
        value = _static_heads("static_v", extra.static_v, value)
    if extra.add_zero:
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
        masks = masks.with_visible_key()
    masks.check_padding(key)
    return key, value, masks


def _check_values_fit(key: Tensor, value: Tensor, need_weights: bool) -> None:
    """Raises what upstream does where static ones differ in length; kernels would not look."""
    if value.shape == key.shape:
        return
    if need_weights:
        of_keys, of_values = ([x.size(0) * x.size(1), x.size(2)] for x in (key, value))
        raise RuntimeError(
            "Expected size for first two dimensions of batch2 tensor to be: "
            f"{of_keys} but got: {of_values}."
        )
    raise RuntimeError(f"shape '{list(key.shape)}' is invalid for input of size {value.numel()}")


def _like_heads(bias: Tensor, heads: Tensor) -> Tensor:
    """Turns bias_k or bias_v, [1, 1, E] or [N, 1, E], into a position more of [N, H, S, d]."""
    count, size = heads.size(1), heads.size(3)
    return bias.view(-1, count, 1, size).expand(heads.size(0), -1, -1, -1)


def _static_heads(name: str, static: Tensor, heads: Tensor) -> Tensor:
    """Returns [N * H, S, d] as [N, H, S, d], to take the place of heads [N, H, ., d]."""
    batch, count, _, size = heads.shape
    for axis, expected in ((0, batch * count), (2, size)):
        if static.size(axis) != expected:
            raise AssertionError(
                f"expecting {name}.size({axis}) of {expected}, but got {static.size(axis)}"
            )
    return static.view(batch, count, static.size(1), size)
