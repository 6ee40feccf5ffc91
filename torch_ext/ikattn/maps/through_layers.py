"""Rollout: maps of single layers multiplied, down to the input of a model.

Symbols: B batch, L queries, S keys (L = S in self-attention), N layers; A_l is the map of layer l,
``[L, S]``, row i saying what token i takes from each token.
Sources: S. Abnar, W. Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, for rollout;
A. Modarressi, M. Fayyaz, Y. Yaghoobzadeh, M. T. Pilehvar, "GlobEnc", NAACL 2022, for rollout of
norms.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ikattn._memory import memory_for
from ikattn._precision import widened
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, RecordedMaps, check_whole
from ikattn.maps.summary import Maps, layer_contributions, layer_maps, row_shares, without_padding
from ikattn.nn.selection import describe_unseen

Residual: TypeAlias = float | str | Sequence[Tensor] | Tensor | None
"""How a residual connection enters maps that do not hold it. See :func:`rollout`."""

WITH_NORM_WARNING = (
    'rollout of "with_norm" (N_ResLN) misleads: it ends between the two normalisations of the '
    "block, and scales that the second one takes back grow from layer to layer. Take "
    '"encoder" (N_Enc), or "with_residual" where a block has no second normalisation.'
)


def rollout(
    maps: Maps,
    normalize: bool = True,
    *,
    map: str = "encoder",
    layers: Iterable[str] | None = None,
    residual: Residual = None,
    padding: Tensor | None = None,
    all_layers: bool = False,
) -> Tensor:
    """The product of the layers' maps: what each output token draws from each input token.

    R_1 = A_1, R_l = A_l R_(l-1). A row of R_l says where token i, after layer l, comes from, if
    what a token takes from another is passed on in proportion.

    Which map to take: ``"encoder"`` (N_Enc), which holds the whole block but its feed-forward
    part's nonlinearity; of pre-norm blocks ``"with_residual"``, whose vectors the next block adds
    to. **Not** ``"with_norm"`` (N_ResLN) alone, which gives a ``UserWarning`` that says why.
    ``"weights"``, ``"per_head"`` and ``"summed"`` hold no residual connection: give ``residual``.

    Args:
        maps: A Recording of one forward call, one of its batches, or a sequence of ``[B, L, L]``
            (or ``[B, H, L, L]``, averaged over heads), first layer first, or a tensor with layers
            as its first axis.
        normalize: Divide every row of every map by its sum before it enters the product, so that
            the rows of R add up to 1. False: the raw product, as GlobEnc's code has it, whose scale
            grows or shrinks with depth.
        map: The map to take from a recording.
        layers: Names of the layers to take from a recording, by default those of self-attention (of
            a Batch: all). Needed where an encoder and a decoder were recorded.
        residual: None: maps hold the residual connection already. A number r in [0, 1]: every A_l
            becomes (1 - r) A_l + r I after normalisation; 0.5 is Abnar and Zuidema's, GlobEnc's
            W-FixedRes and N-FixedRes. Tensors ``[B, L]``, one per layer (or ``[N, B, L]``), of
            mixing ratios: the off-diagonal entries of row i are scaled to add up to ratio_i and the
            diagonal becomes 1 - ratio_i, GlobEnc's W-Res. A name: the recorded mixing ratio of that
            map, for example "encoder".
        padding: bool ``[B, L]``, True = padding; by default what the recording knows. Its rows and
            columns are 0, with a residual too.
        all_layers: Return every R_l, not the last alone.

    Returns:
        ``[B, L, L]``, or ``[N, B, L, L]`` with all_layers. A row without any entry (padding, or a
        query that sees nothing) stays 0 when it is normalised; so do the off-diagonal entries of
        the only token of a sequence under mixing ratios. float32 for half-precision maps.

    Raises:
        ValueError: Maps are not square or differ in shape, a map was not recorded or has numbers
            below 0, residual or padding does not fit.
        KeyError: A layer that is not there.
        LookupError: The recording has no or several batches.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps.through_layers import rollout
        >>> weights = [torch.rand(1, 4, 4).softmax(-1) for _ in range(3)]
        >>> flow = rollout(weights, residual=0.5)
        >>> torch.allclose(flow.sum(-1), torch.ones(1, 4))
        True
    """
    steps = Steps(maps, normalize, map, layers, residual, "rollout").factors(padding)
    with memory_for("rollout", "the products of maps, [B, L, L]"):
        products = [steps[0]]
        for step in steps[1:]:
            products.append(step @ products[-1])
        return torch.stack(products) if all_layers else products[-1]


@dataclass
class Steps:
    """The maps of layers that a product takes, with the arguments of :func:`rollout`.

    Errors begin with the name of the ``caller``.
    """

    maps: Maps
    normalize: bool
    map: str
    layers: Iterable[str] | None
    residual: Residual
    caller: str

    def __post_init__(self) -> None:
        self.layers = None if self.layers is None else list(self.layers)

    def factors(self, padding: Tensor | None) -> list[Tensor]:
        """The factors of the product, first layer first: [B, L, L] each."""
        maps = self.maps
        if self.map == "with_norm" and isinstance(maps, (RecordedMaps, Batch)):
            warnings.warn(WITH_NORM_WARNING, UserWarning, stacklevel=3)
        if isinstance(maps, RecordedMaps) and maps.left_out:
            left_out = describe_unseen(maps.left_out)
            warnings.warn(
                f"attention that was not recorded moves tokens, too: {left_out}",
                UserWarning,
                stacklevel=3,
            )
        self.check_rows()
        found = layer_maps(self.maps, map=self.map, layers=self.layers, caller=self.caller)
        B, L, S = found[0].shape
        if L != S:
            raise ValueError(
                f"{self.caller}: maps must be square, of self-attention over whole sequences, got "
                f"{[B, L, S]}"
                + (
                    ": keys from a cache or a prefix, and those of cross-attention, are no queries "
                    "of the same call; choose with layers=, or take recording.joined()"
                    if isinstance(self.maps, (RecordedMaps, Batch))
                    else ""
                )
            )
        padding = self.padding(padding)
        found = [without_padding(x, padding, padding, self.caller) for x in found]
        return self.with_residuals(found, padding)

    def recorded(self) -> dict[str, Contributions]:
        """The chosen layers of a recording; none where maps are tensors."""
        if not isinstance(self.maps, (RecordedMaps, Batch)):
            return {}
        return layer_contributions(self.maps, self.layers, self.caller)

    def check_rows(self) -> None:
        """Raises ValueError where a layer's maps are of some queries alone, or have signs."""
        for name, own in self.recorded().items():
            check_whole(own, name, self.caller)
            rows = getattr(own, self.map, None)
            if isinstance(rows, Tensor) and bool((rows < 0).any()):
                raise ValueError(
                    f"{self.caller}: the map {self.map!r} of layer {name!r} has numbers below 0, "
                    "as weights of a delta rule, those of Mamba-2 and projections have: rows are "
                    "no shares, whose products say where a token comes from; take a map of norms, "
                    "such as 'encoder' or 'with_residual', or choose with layers="
                )

    def padding(self, given: Tensor | None) -> Tensor | None:
        """The padding of the tokens that go through the layers: the given, or the recorded one."""
        first = next(iter(self.recorded().values()), None) if given is None else None
        if first is None:
            return given
        return first.key_padding if first.query_padding is None else first.query_padding

    def with_residuals(self, found: list[Tensor], padding: Tensor | None) -> list[Tensor]:
        """The maps of layers, [B, L, S], with their residual connections."""
        B, L, _ = found[0].shape
        ratios = self._mixing_ratios(len(found), (B, L))
        return [
            _with_residual(row_shares(x) if self.normalize else x, ratio, padding)
            for x, ratio in zip(found, ratios, strict=True)
        ]

    def _mixing_ratios(self, N: int, shape: tuple[int, int]) -> list[float | Tensor | None]:
        """For each of N layers None, the residual's fixed part, or mixing ratios [B, L]."""
        residual = self.residual
        if residual is None:
            return [None] * N
        if isinstance(residual, (int, float)):
            if not 0 <= residual <= 1:
                raise ValueError(f"{self.caller}: residual must be in [0, 1], got {residual}")
            return [float(residual)] * N
        if isinstance(residual, str):
            if not isinstance(self.maps, (RecordedMaps, Batch)):
                raise ValueError(
                    f"{self.caller}: residual must be a number or tensors where maps are tensors, "
                    f"got {residual!r}"
                )
            ratios = [own.mixing_ratio.get(residual) for own in self.recorded().values()]
        else:
            ratios = list(residual)
        if len(ratios) != N or any(x is None or tuple(x.shape) != shape for x in ratios):
            got = ["none recorded" if x is None else list(x.shape) for x in ratios]
            raise ValueError(
                f"{self.caller}: residual must give mixing ratios of shape {list(shape)} for each "
                f"of {N} layers, got {got}"
            )
        return [widened(x) for x in ratios if x is not None]


def _with_residual(x: Tensor, ratio: float | Tensor | None, padding: Tensor | None) -> Tensor:
    """A map with its residual connection, [B, L, L]."""
    if ratio is None:
        return x
    own = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
    if padding is not None:
        own = own.masked_fill(padding.unsqueeze(-1), 0)
    if isinstance(ratio, float):
        return (1 - ratio) * x + ratio * own
    if padding is not None:
        ratio = ratio.masked_fill(padding, 0)
    ratio = ratio.unsqueeze(-1)
    return ratio * row_shares(x * (1 - own)) + (1 - ratio) * own
