"""BertViz: recorded maps as its head view and model view take attention.

Sizes: H heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ikattn.maps.layers import Layer, RecordedMaps
from ikattn.maps.sequences import AXES, SequenceMaps, sequences
from ikattn.maps.summary import row_shares
from ikattn.maps.tokens import Tokens

__all__ = ["to_bertviz"]

_MAPS = tuple(name for name, axes in AXES.items() if axes.endswith("LS"))
_SHARES = ("weights", "alti")  # rows that say already how much each key has of the whole


def to_bertviz(
    recording: RecordedMaps,
    map: str = "weights",
    *,
    batch: int = 0,
    sequence: int = 0,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    shares: bool = True,
) -> dict[str, Any]:
    """Returns one sequence's maps as arguments of ``bertviz.head_view`` and ``model_view``.

    Args:
        recording: Has the map, in all layers of an encoder, of a decoder, or between them.
        map: A map of queries and keys. Those without heads, such as "summed", are one head.
        batch: The forward call.
        sequence: Its place in that batch.
        tokens, target_tokens: Names, as for ``recording.to_html``. None: as recorded, or numbers.
        shares: Whether rows of norms are divided by their sums, in each head by itself. "weights"
            and "alti" stay as they are.

    Returns:
        ``attention`` and ``tokens``; where there is cross-attention, or a decoder beside an
        encoder, ``encoder_attention``, ``decoder_attention`` and ``cross_attention``, those that
        have the map, with ``encoder_tokens`` and ``decoder_tokens``. Attention is a list with
        ``[1, H, L, S]`` for each layer, tokens are strings, both without padding.

    Raises:
        ValueError: No such map or sequence, layers that do not fit into one view, queries after a
            cache (take ``recording.joined()``), or numbers that are not finite.
        LookupError: Nothing was recorded.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.explain.bertviz import to_bertviz
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> with ikattn.record(model, maps=("weights", "per_head")) as recording:
        ...     output = model(torch.randn(1, 5, 16))
        >>> arguments = to_bertviz(recording, "per_head")  # bertviz.head_view(**arguments)
        >>> [attention.shape for attention in arguments["attention"]]
        [torch.Size([1, 4, 5, 5]), torch.Size([1, 4, 5, 5])]
    """
    if map not in _MAPS:
        raise ValueError(f"to_bertviz: map must be one of {', '.join(_MAPS)}, got {map!r}")
    recording.check_recorded()
    found = {(x.batch, x.index): x for x in sequences(recording, tokens, target_tokens)}
    if (batch, sequence) not in found:
        raise ValueError(
            "to_bertviz: batch and sequence must be one of the recording's "
            f"{len(recording.batches)} calls and one of its sequences, got {batch} and {sequence}"
        )
    shown = found[batch, sequence]
    groups: dict[str, list[Layer]] = {}
    for name in shown.layers:
        layer = recording.layers[name]
        groups.setdefault("cross" if layer.kind == "cross" else layer.side, []).append(layer)
    attention = {
        group: _attention(shown, layers, map, shares and map not in _SHARES)
        for group, layers in groups.items()
        if any(getattr(shown.layers[layer.name], map) is not None for layer in layers)
    }
    if not attention:
        maps = [shown.layers[name] for name in shown.layers]
        there = [name for name in _MAPS if any(getattr(x, name) is not None for x in maps)]
        raise ValueError(
            f"to_bertviz: the map {map!r} was not recorded; there are {', '.join(there) or 'none'}"
        )
    names = {group: shown.labels(groups[group][0]) for group in attention}
    if len(groups) == 1 and "cross" not in groups:
        (group,) = groups
        return {"attention": attention[group], "tokens": names[group][1]}
    arguments: dict[str, Any] = {f"{group}_attention": own for group, own in attention.items()}
    for group, (queries, keys) in names.items():
        arguments["decoder_tokens" if group == "cross" else f"{group}_tokens"] = queries
        if group == "cross":
            arguments["encoder_tokens"] = keys
    return arguments


def _attention(
    shown: SequenceMaps, layers: Sequence[Layer], map: str, shares: bool
) -> list[Tensor]:
    """Returns ``[1, H, L, S]`` for each layer, all of one shape."""
    found: list[Tensor] = []
    for layer in layers:
        values: Tensor | None = getattr(shown.layers[layer.name], map)
        if values is None:
            raise ValueError(
                f"to_bertviz: layer {layer.name!r} has no map {map!r}, which others have: take one "
                "that all have, or record with layers="
            )
        values = values if values.dim() == 3 else values.unsqueeze(0)
        L, S = values.shape[-2:]
        if found and values.shape != found[0].shape[1:]:
            raise ValueError(
                f"to_bertviz: layers must have maps [H, L, S] of one shape, got "
                f"{list(found[0].shape[1:])} and {list(values.shape)} in {layer.name!r}"
            )
        if layer.kind == "self" and L != S:
            raise ValueError(
                f"to_bertviz: queries must be the keys in {layer.name!r}, got {L} and {S}: of "
                "calls that go on from a cache take recording.joined()"
            )
        if not values.numel() or not bool(values.isfinite().all()):
            raise ValueError(
                f"to_bertviz: the map {map!r} of {layer.name!r} must hold finite numbers, "
                f"got {'others' if values.numel() else 'none'}"
            )
        if bool((values < 0).any()):
            raise ValueError(
                f"to_bertviz: the map {map!r} of {layer.name!r} has numbers below 0, as weights of "
                "a delta rule and projections have, and BertViz draws numbers between 0 and 1: "
                "take another map, such as 'per_head', or record with layers="
            )
        found.append(row_shares(values)[None] if shares else values[None])
    return found
