"""Norm-aware contributions: how much of each token a layer of attention really moves.

Symbols, in every docstring: B batch, H query heads, G key/value heads (G divides H), L queries, S
keys, d_v head size of value, D model size; f_h(x_j) = W_O^h v_j^h is what head h takes from token
j, with W_O the weight of the out-projection and v the value, its bias included.
Sources: G. Kobayashi, T. Kuribayashi, S. Yokoi, K. Inui, "Attention is Not Only a Weight: Analyzing
Transformers with Vector Norms", EMNLP 2020, and "Incorporating Residual and Normalization Layers
into Analysis of Masked Language Models", EMNLP 2021; A. Modarressi, M. Fayyaz, Y. Yaghoobzadeh,
M. T. Pilehvar, "GlobEnc", NAACL 2022, for the encoder map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ikattn._memory import takes_memory_for
from ikattn._precision import widened
from ikattn.maps.reduction import Reduced
from ikattn.ops import fakes  # noqa: F401  (shapes for torch.compile and torch.export)
from ikattn.ops.exporting import operator

# The maps that sum over heads, each with one more step of the block than the one before.
SUMMED_MAPS = ("summed", "with_residual", "with_norm", "encoder")
MAPS = ("value_norms", "per_head", *SUMMED_MAPS, "mixing_ratio")
# Maps in the order of the operators' results.
_OPERATOR_MAPS = ("value_norms", *SUMMED_MAPS, "mixing_ratio")


@dataclass(frozen=True)
class NormStats:
    """A normalisation layer as it acted on one batch: a linear map, once its scale is known.

    Attributes:
        weight: ``[D]``, gamma.
        scale: ``[B, L]``, the standard deviation (LayerNorm) or root mean square (RMSNorm) of the
            norm's true input, eps inside: what its rows were divided by.
        centered: Whether the mean is taken off first (LayerNorm).
    """

    weight: Tensor
    scale: Tensor
    centered: bool = True

    @staticmethod
    def of(module: nn.Module, norm_input: Tensor) -> NormStats:
        """The statistics of ``module`` on ``norm_input``, ``[B, L, D]``.

        Knows ``nn.LayerNorm``, ``nn.RMSNorm`` and modules that act like either: with an ``eps`` or
        ``variance_epsilon``, with a mean taken off or not, and times a ``weight``, one more than
        that, or none. How another class acts is seen by calling its ``forward`` on three rows.

        Raises:
            TypeError: The module is no normalisation this function knows.

        Example:
            >>> import torch, ikattn
            >>> norm = torch.nn.LayerNorm(8)
            >>> ikattn.maps.NormStats.of(norm, torch.randn(2, 5, 8)).scale.shape
            torch.Size([2, 5])
        """
        size = norm_input.shape[-1]

        def refused() -> TypeError:
            return TypeError(
                f"NormStats.of: module must be a LayerNorm or RMSNorm over the last axis, {size}, "
                f"got {module}"
            )

        eps: Any = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        weight = getattr(module, "weight", None)
        x = widened(norm_input)
        if eps is None and isinstance(module, nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps
        shapes = [getattr(module, "normalized_shape", None), getattr(weight, "shape", None)]
        if eps is None or any(shape is not None and tuple(shape) != (size,) for shape in shapes):
            raise refused()
        if weight is None:
            weight = norm_input.new_ones(size)
        if weight.is_meta and not norm_input.is_meta:
            raise TypeError(
                f"NormStats.of: the weight of a {type(module).__name__} is offloaded (a meta "
                "tensor): keep norms on a device, or leave out maps that go through them"
            )
        centered, offset = type(module) is nn.LayerNorm, 0
        if type(module) not in (nn.LayerNorm, nn.RMSNorm):
            try:
                form = _known_form_of(module, weight, eps, norm_input)
            except Exception as error:
                raise refused() from error
            if form is None:
                raise refused()
            centered, offset = form
        if centered:
            x = x - x.mean(-1, keepdim=True)  # Tensor.var takes ten times as long
        variance = x.square().mean(-1)
        return NormStats(weight + offset if offset else weight, (variance + eps).sqrt(), centered)


_forms: WeakKeyDictionary[nn.Module, tuple[Any, tuple[bool, int] | None]] = WeakKeyDictionary()


def _known_form_of(
    module: nn.Module, weight: Tensor, eps: float, like: Tensor
) -> tuple[bool, int] | None:
    """``_form_of``, asked once for a module as it is: a GPU has to be waited for."""
    is_plain = type(weight) in (Tensor, nn.Parameter) and not weight.is_inference()
    if not is_plain or "forward" in vars(module):
        return _form_of(module, weight, eps, like)
    now = (weight.data_ptr(), weight._version, eps, like.dtype, type(module).forward)
    before, form = _forms.get(module, (None, None))
    if before != now:
        form = _form_of(module, weight, eps, like)
        _forms[module] = now, form
    return form


@torch.no_grad()
def _form_of(
    module: nn.Module, weight: Tensor, eps: float, like: Tensor
) -> tuple[bool, int] | None:
    """Whether a norm takes the mean off, and what it adds to its weight; None: it acts otherwise.

    The form that comes nearest to what the module makes of three rows far from centered, in the
    precision in which it computes.
    """
    rows = torch.linspace(-1, 2, 3 * weight.shape[0], device=like.device).sin() + 0.5
    x = rows.view(1, 3, -1).to(like.dtype)
    made = module.forward(x)
    if made.shape != x.shape:
        return None
    bias = getattr(module, "bias", None)
    beta = 0.0 if bias is None else bias.double()
    forms, errors = [(centered, offset) for centered in (True, False) for offset in (0, 1)], []
    for centered, offset in forms:
        y = x.double() - x.double().mean(-1, keepdim=True) if centered else x.double()
        y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
        expected = y * (weight.double() + offset) + beta
        error = (made.double() - expected).abs().max()
        errors.append(error / expected.abs().max().clamp_min(1e-3))
    off, nearest = torch.stack(errors).min(0)
    return forms[int(nearest)] if off < 0.05 else None


@dataclass(repr=False)
class Contributions:
    """The maps of one layer of attention; None where not asked for or not defined.

    float64 where the weights (or the query), value, out_proj_weight or residual are, otherwise
    float32, also of half-precision inputs. Masked and padded pairs are 0.

    Attributes:
        value_norms: ``[B, H, S]``, ``|f_h(x_j)|``.
        per_head: ``[B, H, L, S]``, ``|a_ij^h f_h(x_j)|``.
        summed: ``[B, L, S]``, ``|sum_h a_ij^h f_h(x_j)|`` (N).
        with_residual: ``[B, L, S]``, the same with x_i added on the diagonal (N_Res).
        with_norm: ``[B, L, S]``, with_residual through the normalisation after it (N_ResLN).
        encoder: ``[B, L, S]``, with_norm through the second normalisation of the block (N_Enc). In
            a recording of a block that normalises before its parts, with_residual through the norm
            that reads the sum.
        alti: ``[B, L, S]``, how much nearer each token brings the output, over its row; filled by a
            recording (``ikattn.maps.alti``).
        projection: ``[B, H, L, S]``, the part in the attention's output with its sign, rows over
            heads and keys add up to 1; filled by a recording (``ikattn.maps.projection``).
        mixing_ratio: For each of the maps from summed on: ``[B, L]``, the norm of what comes from
            other tokens over that plus the norm of what comes from the token itself.
        weights: ``[B, H, L, S]``, the attention weights a; filled by a recording.
        similarity: ``[B, H, L, S]``, filled by a recording that keeps the ledger.
        magnitude: ``[B, H, S]``, likewise: weight is similarity x magnitude over its row's sum.
        query_padding: bool ``[B, L]``, True = padding; None: nothing is padded.
        key_padding: bool ``[B, S]``, likewise.
        reduced: What a recording with ``reduce=`` keeps of each map of queries and keys, by its
            name; the map itself is then None.
        rows: int64 ``[R]``, the queries whose rows the maps hold, of a recording with ``queries=``;
            L is then R everywhere. They are counted without padding. Where sequences have other
            numbers of tokens, those that were asked for from the last are negative, and a row that
            a sequence lacks is padding. None: all.
    """

    value_norms: Tensor | None = None
    per_head: Tensor | None = None
    summed: Tensor | None = None
    with_residual: Tensor | None = None
    with_norm: Tensor | None = None
    encoder: Tensor | None = None
    alti: Tensor | None = None
    projection: Tensor | None = None
    mixing_ratio: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    similarity: Tensor | None = None
    magnitude: Tensor | None = None
    query_padding: Tensor | None = None
    key_padding: Tensor | None = None
    reduced: dict[str, Reduced] = field(default_factory=dict)
    rows: Tensor | None = None

    def __repr__(self) -> str:
        """Tells the shapes of what there is, and no numbers."""
        told = []
        for name, x in vars(self).items():
            if isinstance(x, Tensor):
                told.append(f"{name}: {list(x.shape)}")
            elif x:
                told.append(f"{name} of {', '.join(x)}")
        return f"Contributions({', '.join(told)})"


@takes_memory_for("the maps")
def contributions(
    attn_weights: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    *,
    residual: Tensor | None = None,
    norm: NormStats | None = None,
    second_norm: NormStats | None = None,
    per_head: bool = False,
    maps: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    diagonal: int = 0,
) -> Contributions:
    r"""Norm-aware maps of one layer of attention, from its weights.

    .. math::
        y_{ij} = \sum_h a^h_{ij} f_h(x_j), \qquad f_h(x_j) = W_O^h v^h_j

    N is ``|y_ij|``. A residual adds x_i to y_ii; a normalisation, once its scale is known, is one
    more linear map. No tensor ever has both ``[L, S]`` and ``D``: time O(B L S H^2 + B S H d_v D),
    memory the maps and O(B S H^2). The heads' sum is formed through a triangular factor of
    ``[f_1(x_j) .. f_H(x_j)]``, which keeps the accuracy of the direct sum where heads cancel.

    The bias of the out-projection and the beta of a normalisation belong to no token and stay out.

    Args:
        attn_weights: ``[B, H, L, S]``; any floating types here and below, any strides.
        value: ``[B, G, S, d_v]``, the value projection's bias included.
        out_proj_weight: ``[D, H d_v]``, as ``nn.Linear`` keeps it.
        residual: ``[B, L, D]``, what is added to the attention's output.
        norm: The normalisation after the residual sum.
        second_norm: The block's normalisation after that one.
        per_head: Also give ``per_head``, which is as large as attn_weights.
        maps: Names of the maps to compute, from "value_norms", "per_head", "summed",
            "with_residual", "with_norm", "encoder" and "mixing_ratio". None: all that are defined,
            without per_head.
        query_padding: bool ``[B, L]``, True = padding, whose rows are 0.
        key_padding: bool ``[B, S]``, likewise for columns.
        diagonal: The token of query i is that of key ``i + diagonal``, for queries after cached
            keys.

    Returns:
        The maps; mixing ratios of every map the block defines.

    Raises:
        ValueError: An unknown name in maps, or a map that needs an argument that is not there.
        RuntimeError, TypeError: Shapes, devices or types that do not fit; the message names the
            argument.

    Example:
        >>> import torch, ikattn
        >>> x, weights = torch.randn(2, 5, 16), torch.rand(2, 4, 5, 5).softmax(-1)
        >>> out_proj = torch.nn.Linear(16, 16)
        >>> value = torch.randn(2, 4, 5, 4)
        >>> maps = ikattn.contributions(weights, value, out_proj.weight, residual=x)
        >>> maps.summed.shape, maps.mixing_ratio["with_residual"].shape
        (torch.Size([2, 5, 5]), torch.Size([2, 5]))
    """
    block = _Block(residual, norm, second_norm, query_padding, key_padding, diagonal)
    wanted = _wanted("contributions", maps, per_head, block)
    results = operator("contribution_maps")(
        attn_weights, value, out_proj_weight, **block.arguments(wanted)
    )
    found = _collect(results, wanted, block)
    if "per_head" in wanted:
        norms = results[0].unsqueeze(-2)
        weights = attn_weights.to(norms.dtype)
        if query_padding is not None:
            weights = weights.masked_fill(query_padding[:, None, :, None], 0)
        if key_padding is not None:
            weights = weights.masked_fill(key_padding[:, None, None, :], 0)
        # NaN behind a weight of 0 must not show.
        does_not_count = (weights == 0) & ~norms.isfinite()
        found.per_head = weights * norms.masked_fill(does_not_count, 0)
    return found


@takes_memory_for("the maps")
def streamed_contributions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out_proj_weight: Tensor,
    *,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    p: float | None = 2.0,
    key_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
    eps: float = 1e-5,
    magnitude_scale: float | None = None,
    residual: Tensor | None = None,
    norm: NormStats | None = None,
    second_norm: NormStats | None = None,
    maps: Iterable[str] | None = None,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    diagonal: int = 0,
) -> Contributions:
    """The maps of :func:`contributions` from query and key: ``[B, H, L, S]`` never exists.

    The weights are made for some queries at a time and forgotten, in the backward too. On CUDA
    kernels make them where they can; of dot attention queries and keys of 16 bits are then
    multiplied as they are, and weights and transformed vectors have 11 bits.

    Args:
        query: ``[B, H, L, d]``.
        key: ``[B, G, S, d]``.
        value: ``[B, G, S, d_v]``.
        out_proj_weight: ``[D, H d_v]``.
        w1, w2: Frequencies of the implicit kernel, as in :func:`implicit_kernel_attention`. Without
            w1: dot attention, ``softmax(scale q.k + key_bias + mask)``.
        p, eps, magnitude_scale: Of the implicit kernel, as there.
        key_bias, attn_mask, is_causal, enable_gqa: As there, for both kernels.
        scale: Of dot attention. None: ``1 / sqrt(d)``.
        residual, norm, second_norm, maps, query_padding, key_padding, diagonal: As in
            :func:`contributions`; "per_head" is not possible.

    Returns:
        The maps.

    Raises:
        ValueError, RuntimeError, TypeError: As :func:`contributions`.

    Example:
        >>> import torch, ikattn
        >>> q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
        >>> weights = (q @ k.mT / 8**0.5).softmax(-1)
        >>> maps = ikattn.streamed_contributions(q, k, v, torch.eye(32), maps=["summed"])
        >>> same = ikattn.contributions(weights, v, torch.eye(32), maps=["summed"])
        >>> torch.allclose(maps.summed, same.summed, atol=1e-5)
        True
    """
    block = _Block(residual, norm, second_norm, query_padding, key_padding, diagonal)
    wanted = _wanted("streamed_contributions", maps, False, block)
    if "per_head" in wanted:
        raise ValueError(
            "streamed_contributions: maps must not hold 'per_head', which has the size of the "
            "weights this function never holds; take contributions"
        )
    results = operator("streamed_contribution_maps")(
        query,
        key,
        value,
        out_proj_weight,
        w1,
        w2,
        p=p,
        key_bias=key_bias,
        attn_mask=attn_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        eps=eps,
        magnitude_scale=magnitude_scale,
        scale=scale,
        **block.arguments(wanted),
    )
    return _collect(results, wanted, block)


@dataclass(frozen=True)
class _Block:
    """The block around the attention, as the operators take it."""

    residual: Tensor | None
    norm: NormStats | None
    second_norm: NormStats | None
    query_padding: Tensor | None
    key_padding: Tensor | None
    diagonal: int

    def defined_maps(self) -> tuple[str, ...]:
        steps = (self.residual, self.norm, self.second_norm)
        count = next((i for i, step in enumerate(steps) if step is None), len(steps))
        return SUMMED_MAPS[: 1 + count]

    def arguments(self, wanted: set[str]) -> dict[str, Any]:
        norm, second = self.norm, self.second_norm
        return {
            "residual": self.residual,
            "norm_weight": norm and norm.weight,
            "norm_scale": norm and norm.scale,
            "norm_centered": norm is None or norm.centered,
            "second_norm_weight": second and second.weight,
            "second_norm_scale": second and second.scale,
            "second_norm_centered": second is None or second.centered,
            "query_padding": self.query_padding,
            "key_padding": self.key_padding,
            "diagonal": self.diagonal,
            "maps": [
                name in wanted or (name == "value_norms" and "per_head" in wanted)
                for name in _OPERATOR_MAPS
            ],
        }


def _wanted(function: str, maps: Iterable[str] | None, per_head: bool, block: _Block) -> set[str]:
    """The names of the maps to compute, checked against what the block defines."""
    for name, norm in (("norm", block.norm), ("second_norm", block.second_norm)):
        if norm is not None and not isinstance(norm, NormStats):
            raise TypeError(
                f"{function}: {name} must be NormStats, as NormStats.of(module, its input) makes "
                f"them, got {type(norm).__name__}"
            )
    defined = block.defined_maps()
    if maps is None:
        wanted = {"value_norms", *defined}
        if block.residual is not None:
            wanted.add("mixing_ratio")
    else:
        wanted = {maps} if isinstance(maps, str) else set(maps)
    if per_head:
        wanted.add("per_head")
    if unknown := sorted(wanted - set(MAPS)):
        raise ValueError(f"{function}: maps must be among {', '.join(MAPS)}, got {unknown[0]!r}")
    needs = dict(zip(SUMMED_MAPS[1:], ("residual", "norm", "second_norm"), strict=True))
    for name in SUMMED_MAPS:
        if name in wanted and name not in defined:
            raise ValueError(f"{function}: {needs[name]} must be given for the map {name!r}")
    return wanted


def _collect(results: tuple[Tensor, ...], wanted: set[str], block: _Block) -> Contributions:
    found = Contributions(query_padding=block.query_padding, key_padding=block.key_padding)
    for name, result in zip(_OPERATOR_MAPS, results, strict=True):
        if name not in wanted:
            continue
        if name == "mixing_ratio":
            found.mixing_ratio = dict(zip(block.defined_maps(), result, strict=False))
        else:
            setattr(found, name, result)
    return found
