"""ALTI and projections: what each token's vector has to do with what the layer makes.

Symbols: B batch, H query heads, G key/value heads, L queries, S keys, d_v head size of value, D
model size; y_i the layer's output for token i, y_ij what comes of it from token j: through heads
and out-projection, with the residual on the diagonal, and through the norm after it.
Source: J. Ferrando, G. I. Gállego, M. R. Costa-jussà, "Measuring the Mixing of Contextual
Information in the Transformer", EMNLP 2022, equations 8 and 9; "Contribution Weights", ICML 2026,
arXiv 2606.07604, for projections.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn.maps.contribution_maps import NormStats
from ikattn.maps.summary import without_padding
from ikattn.ops.forgetting import is_traced

MOST_ELEMENTS = 1 << 24  # of [keys, L, D], held at a time


@takes_memory_for("the ALTI map")
def alti(
    attn_weights: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    output: Tensor,
    *,
    residual: Tensor,
    norm: NormStats | None = None,
    output_norm: NormStats | None = None,
    distance: Literal["l1", "l2"] = "l1",
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    diagonal: int | None = 0,
) -> Tensor:
    r"""Returns how much nearer each token's part brings a layer's output (ALTI).

    .. math::
        c_{ij} = \frac{\max(0, |y_i| - |y_i - y_{ij}|)}
                      {\sum_k \max(0, |y_i| - |y_i - y_{ik}|)}

    A vector that points away from the output counts nothing, however long it is: that is the
    difference to norms of vectors (``ikattn.contributions``). Biases belong to no token, but they
    are part of the output. Time O(B L S H D), memory O(B S H D) for the vectors of heads; those of
    pairs, ``[L, S, D]``, are made for some keys at a time.

    Args:
        attn_weights: ``[B, H, L, S]``.
        value: ``[B, G, S, d_v]``, the value projection's bias included.
        out_proj_weight: ``[D, H d_v]``, as ``nn.Linear`` keeps it.
        output: ``[B, L, D]``, y: what the layer made, after ``norm`` where there is one, biases
            included.
        residual: ``[B, L, D]``, what is added to the attention's output.
        norm: The normalisation after the residual sum.
        output_norm: A normalisation between out-projection and residual sum.
        distance: "l1", which the paper takes, or "l2".
        query_padding: bool ``[B, L]``, True = padding, whose rows are 0.
        key_padding: bool ``[B, S]``, likewise for columns.
        diagonal: The token of query i is that of key ``i + diagonal``. None: queries are no keys,
            as in cross-attention, and the residual is a token of its own.

    Returns:
        ``[B, L, S]``, rows add up to 1; 0 where a pair is hidden, and a row of zeros where no token
        brings the output nearer. Without a diagonal rows lack what the residual brings (ALTI+,
        Ferrando et al., EMNLP 2022). float64 where value is, otherwise float32.

    Raises:
        ValueError: Another distance, or shapes that do not fit.

    Example:
        >>> import torch
        >>> from ikattn.maps import alti
        >>> x, weights = torch.randn(1, 5, 16), torch.rand(1, 4, 5, 5).softmax(-1)
        >>> value = torch.randn(1, 4, 5, 4)
        >>> made = x + (weights @ value).transpose(1, 2).flatten(2)
        >>> map_ = alti(weights, value, torch.eye(16), made, residual=x)
        >>> torch.allclose(map_.sum(-1), torch.ones(1, 5))
        True
    """
    if distance not in ("l1", "l2"):
        raise ValueError(f'alti: distance must be "l1" or "l2", got {distance!r}')
    _check_shapes("alti", attn_weights, value, out_proj_weight, output=output, residual=residual)
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    weights = attn_weights.to(dtype)
    is_hidden = (weights == 0).all(1)  # [B, L, S]
    output, residual = output.to(dtype), residual.to(dtype)
    d_v = value.size(-1)
    by_head = out_proj_weight.to(dtype).unflatten(1, (-1, d_v)).permute(1, 2, 0)  # [H, d_v, D]
    # A norm is a linear map of the vectors, and a divisor of each query's, [B, L].
    divisor: Tensor | float = 1.0
    for stats in (output_norm, norm):
        if stats is not None:
            by_head = _through(by_head, stats)
            divisor = divisor * stats.scale.to(dtype)
    # Vectors [B, S, H, D] that heads take from tokens; what no query looks at may be NaN, and is 0.
    value = value.to(dtype).repeat_interleave(weights.size(1) // value.size(1), 1)
    value = value.masked_fill((weights == 0).all(-2).unsqueeze(-1), 0)
    heads = (value @ by_head).transpose(1, 2)
    if norm is not None:
        residual = _through(residual, norm) / norm.scale.to(dtype).unsqueeze(-1)
    if isinstance(divisor, Tensor):
        weights = weights / divisor[:, None, :, None]
    order = 1 if distance == "l1" else 2
    size = torch.linalg.vector_norm(output, order, -1).unsqueeze(-1)
    rest: Tensor | float = 0.0  # what the residual brings, where it belongs to no key
    if diagonal is None:
        off = torch.linalg.vector_norm(output - residual, order, -1).unsqueeze(-1)
        rest = (size - off).clamp_min(0)
        off = _distances(weights, heads, output, torch.zeros_like(residual), 0, order)
    else:
        off = _distances(weights, heads, output, residual, diagonal, order)
        is_hidden &= ~torch.ones_like(is_hidden).tril(diagonal).triu(diagonal)
    nearer = (size - off).clamp_min(0).masked_fill(is_hidden, 0)
    nearer = without_padding(nearer, query_padding, key_padding, "alti")
    total = nearer.sum(-1, keepdim=True) + rest
    shares: Tensor = nearer / torch.where(total == 0, 1, total)
    return shares


@takes_memory_for("the projections")
def projection(
    attn_weights: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm: NormStats | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    r"""Returns the part that each token and head has in a layer's output, with its sign.

    .. math::
        c^h_{ij} = \frac{\langle y^h_{ij}, y_i \rangle}{|y_i|^2}, \qquad
        y^h_{ij} = a^h_{ij} W_O^h v^h_j, \qquad y_i = \sum_{h, j} y^h_{ij}

    It is the length of the token's vector along the output, over the length of the output. A part
    below 0 points away from the output: it is taken off what the others make. Parts add, over
    heads, over keys, and to 1 over both, which norms of vectors (``ikattn.contributions``) do not.

    Biases belong to no token, and are no part of y. Time O(B H L S d_v + B L D H d_v): the vectors
    of pairs are never made.

    Args:
        attn_weights: ``[B, H, L, S]``.
        value: ``[B, G, S, d_v]``, the value projection's bias included.
        out_proj_weight: ``[D, H d_v]``, as ``nn.Linear`` keeps it.
        residual: ``[B, L, D]``, what is added to the attention's output. It is a part of y then,
            and what rows lack to 1 is the residual's.
        norm: The normalisation after the sum; its scale does not matter.
        query_padding: bool ``[B, L]``, True = padding, whose rows are 0.
        key_padding: bool ``[B, S]``, likewise for columns.
        gate: ``[B, H, L, d_v]`` or ``[B, H, L, 1]``, what heads are multiplied with before the
            out-projection; None: nothing.

    Returns:
        ``[B, H, L, S]``; sum over H for the part of a token. A row whose y is 0 is 0. float64 where
        an input is, otherwise float32. Differentiable.

    Raises:
        ValueError: Shapes that do not fit.

    Example:
        >>> import torch
        >>> from ikattn.maps import projection
        >>> weights, value = torch.rand(1, 4, 5, 5).softmax(-1), torch.randn(1, 4, 5, 4)
        >>> parts = projection(weights, value, torch.eye(16))
        >>> torch.allclose(parts.sum((1, 3)), torch.ones(1, 5), atol=1e-5)
        True
    """
    _check_shapes("projection", attn_weights, value, out_proj_weight, residual=residual)
    sizes = (*attn_weights.shape[:3], value.size(3))
    if gate is not None and gate.shape not in (sizes, (*sizes[:3], 1)):
        raise ValueError(
            f"projection: gate must be {list(sizes)}, or 1 in the place of d_v, got "
            f"{list(gate.shape)}"
        )
    given = (attn_weights, value, out_proj_weight, residual)
    is_wide = any(x is not None and x.dtype == torch.float64 for x in given)
    dtype = torch.float64 if is_wide else torch.float32
    weights = without_padding(attn_weights.to(dtype), query_padding, key_padding, "projection")
    value = value.to(dtype).repeat_interleave(weights.size(1) // value.size(1), 1)
    # A value that is not finite shows in the rows that see it, and in no others.
    unknown = ~value.isfinite().all(-1)
    value = value.masked_fill(unknown.unsqueeze(-1), 0)
    if not value.is_cpu or is_traced(value) or bool(unknown.any()):
        weights = weights.masked_fill((weights != 0) & unknown.unsqueeze(-2), torch.nan)
    to_output = out_proj_weight.to(dtype).mT  # [H d_v, D]
    if norm is not None:
        to_output = _through(to_output, norm)
    heads = weights @ value
    if gate is not None:
        gate = gate.to(dtype)
        heads = heads * gate
    output = heads.transpose(1, 2).flatten(2) @ to_output
    if residual is not None:
        residual = residual.to(dtype)
        if query_padding is not None:
            residual = residual.masked_fill(query_padding.unsqueeze(-1), 0)
        output = output + (residual if norm is None else _through(residual, norm))
    # The largest number is made 1, and squares stay in the range.
    largest = output.abs().amax(-1, keepdim=True)
    unit = output / torch.where(largest == 0, 1, largest)
    square = unit.square().sum(-1, keepdim=True)
    along = unit / torch.where(square == 0, 1, square) / torch.where(largest == 0, 1, largest)
    along = (along @ to_output.mT).unflatten(2, (heads.size(1), -1)).transpose(1, 2)
    if gate is not None:
        along = along * gate
    parts: Tensor = along @ value.mT
    return parts.mul_(weights)  # which is as large


def _check_shapes(
    caller: str,
    attn_weights: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    **tokens: Tensor | None,
) -> None:
    """Raises ValueError unless shapes fit; ``tokens`` must be [B, L, D]."""
    if attn_weights.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"{caller}: attn_weights must be [B, H, L, S] and value [B, G, S, d_v], got "
            f"{list(attn_weights.shape)} and {list(value.shape)}"
        )
    B, H, L, S = attn_weights.shape
    if value.shape[0] != B or value.shape[2] != S or H % max(value.shape[1], 1) != 0:
        raise ValueError(
            f"{caller}: value must be [{B}, G, {S}, d_v] where G divides {H}, got "
            f"{list(value.shape)}"
        )
    if out_proj_weight.dim() != 2 or out_proj_weight.shape[1] != H * value.shape[3]:
        raise ValueError(
            f"{caller}: out_proj_weight must be [D, {H * value.shape[3]}], got "
            f"{list(out_proj_weight.shape)}"
        )
    D = out_proj_weight.shape[0]
    for name, x in tokens.items():
        if x is not None and x.shape != (B, L, D):
            raise ValueError(f"{caller}: {name} must be [{B}, {L}, {D}], got {list(x.shape)}")


def _through(x: Tensor, stats: NormStats) -> Tensor:
    """A norm as the linear map it is, but for its divisor."""
    if stats.centered:
        x = x - x.mean(-1, keepdim=True)
    return x * stats.weight.to(x.dtype)


def _has_kernel(tensors: tuple[Tensor, ...]) -> bool:
    """Whether plain tensors on the CPU, without gradients, are all there is."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    is_differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    is_plain = all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return is_plain and not is_differentiable


def _distances(
    weights: Tensor, heads: Tensor, output: Tensor, residual: Tensor, diagonal: int, order: int
) -> Tensor:
    """``|y_i - y_ij|``, [B, L, S], of the heads' vectors [B, S, H, D]."""
    tensors = (weights, heads, output, residual)
    if _has_kernel(tensors):
        found: Tensor = torch.ops.ikattn.alti_distances(*tensors, diagonal, order == 2)
        return found.sqrt() if order == 2 else found
    B, _, L, S = weights.shape
    each = max(1, MOST_ELEMENTS // max(1, B * L * output.size(-1)))
    by_key = weights.permute(0, 3, 2, 1)  # [B, S, L, H]
    columns = []
    for first in range(0, S, each):
        end = min(first + each, S)
        rest = output.unsqueeze(1) - by_key[:, first:end] @ heads[:, first:end]
        keys = torch.arange(max(first, diagonal), min(end, L + diagonal), device=output.device)
        rest[:, keys - first, keys - diagonal] -= residual[:, keys - diagonal]
        columns.append(torch.linalg.vector_norm(rest, order, -1))
    return torch.cat(columns, 1).mT if columns else output.new_zeros(B, L, 0)
