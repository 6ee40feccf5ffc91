"""One sequence of a recording at a time, its padding cut off: what pages and pictures show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Layer, RecordedMaps, check_whole
from ikattn.maps.tokens import Tokens, tokens_of_batch

# The axes of each map after the batch: H heads, L queries, S keys.
AXES = {
    "value_norms": "HS",
    "per_head": "HLS",
    "summed": "LS",
    "with_residual": "LS",
    "with_norm": "LS",
    "encoder": "LS",
    "alti": "LS",
    "projection": "HLS",
    "weights": "HLS",
    "similarity": "HLS",
    "magnitude": "HS",
}


@dataclass(frozen=True)
class SequenceMaps:
    """The maps of one sequence.

    Attributes:
        batch: The forward call it was part of.
        index: Its place in that batch.
        tokens: Its tokens; None: unknown.
        target_tokens: Those that a decoder reads beside them.
        layers: Its maps by layer name; the shapes of :class:`Contributions` without B.
        begins: How many tokens of a cache the call went on from; None: unknown.
    """

    batch: int
    index: int
    tokens: Sequence[str] | None
    target_tokens: Sequence[str] | None
    layers: dict[str, Contributions]
    begins: int | None = None

    def labels(self, layer: Layer) -> tuple[list[str], list[str]]:
        """The tokens of a layer's queries ``[L]`` and keys ``[S]``; their numbers where unknown.

        Raises:
            ValueError: As many tokens as the maps have rows or columns are needed.
        """
        own = self.tokens
        if layer.side == "decoder" and self.target_tokens is not None:
            own = self.target_tokens
        of_keys = self.tokens if layer.kind == "cross" else own
        if layer.kind == "cross" and self.target_tokens is None:
            own = None
        maps = self.layers[layer.name]
        sizes = {axis: _size(maps, axis) for axis in "LS"}
        L, S = sizes["L"] or 0, sizes["S"] or 0
        if layer.kind == "self" and own is not None and L < S:  # earlier tokens are in a cache
            is_window = self.begins is not None and len(own) > S  # of a layer with a short cache
            if len(own) == S or is_window:
                return list(own[-L:]) if L else [], list(own[-S:])
            if len(own) == L:
                return list(own), [f"prefix {n}" for n in range(1, S - L + 1)] + list(own)
        return self._named("queries", own, L, layer), self._named("keys", of_keys, S, layer)

    def _named(self, what: str, tokens: Sequence[str] | None, size: int, layer: Layer) -> list[str]:
        if tokens is None:
            return [str(position) for position in range(1, size + 1)]
        if size and len(tokens) != size:
            raise ValueError(
                f"tokens of sequence {self.index} of batch {self.batch} must be {size}, one for "
                f"each of the {what} of layer {layer.name!r} without padding, got {len(tokens)}"
            )
        return list(tokens)


def sequences(
    recording: RecordedMaps,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
) -> Iterator[SequenceMaps]:
    """Every sequence of every batch, in order.

    Args:
        recording: Of any number of forward calls.
        tokens: In place of the recorded ones: for each sequence, over all batches, its tokens
            without padding; of a single sequence the tokens themselves, of several calls that make
            one sequence (``generate``) the tokens of all. A tokenizer: it decodes the ids that the
            calls were made with.
        target_tokens: Likewise, for a decoder.

    Raises:
        ValueError: Not as many lists of tokens as sequences, or others than the calls were made
            with; or maps that were reduced, or are of some queries alone.
    """
    for batch in recording.batches:
        for name, maps in batch.items():
            check_whole(maps, name, "pages, pictures and sums over sequences need whole maps")
    named = tokens_by_call(recording, tokens, target_tokens)
    for b, (batch, (own, of_target)) in enumerate(zip(recording.batches, named, strict=True)):
        for i in range(sequence_count(list(batch.values()))):
            yield SequenceMaps(
                b,
                i,
                _listed(own, i, b),
                _listed(of_target, i, b),
                {name: cut(maps, i) for name, maps in batch.items()},
                batch.begins,
            )


def tokens_by_call(
    recording: RecordedMaps,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
) -> list[tuple[Sequence[Sequence[str]] | None, Sequence[Sequence[str]] | None]]:
    """The tokens of every call's sequences and of their targets, as :func:`sequences` has them.

    Raises:
        ValueError: Likewise.
    """
    counts = [sequence_count(list(batch.values())) for batch in recording.batches]
    if hasattr(tokens, "convert_ids_to_tokens"):
        decoded = [tokens_of_batch(tokens, batch) for batch in recording.batches]
        if any(ids is None for ids, _ in decoded):
            raise ValueError(
                "tokens: a tokenizer can name the tokens of calls that were made with input_ids; "
                "pass lists of tokens"
            )
        decoded_target = [of_target for _, of_target in decoded]
        tokens = _in_turn(recording, [ids or [] for ids, _ in decoded])
        if target_tokens is None and all(one is not None for one in decoded_target):
            target_tokens = _in_turn(recording, [one or [] for one in decoded_target])
    given = _per_sequence("tokens", tokens, recording, sum(counts))
    given_target = _per_sequence("target_tokens", target_tokens, recording, sum(counts))
    found = []
    for batch, count, end in zip(recording.batches, counts, accumulate(counts), strict=True):
        own = slice(end - count, end)
        found.append(
            (
                batch.tokens if given is None else given[own],
                batch.target_tokens if given_target is None else given_target[own],
            )
        )
    return found


def sequence_count(layers: Sequence[Contributions]) -> int:
    """B of a batch's maps; 0 where there are none."""
    for maps in layers:
        for found in (*_tensors(maps).values(), *maps.reduced.values()):
            tensor = found if isinstance(found, Tensor) else found[0]
            return tensor.shape[0]
    return 0


def cut(maps: Contributions, index: int) -> Contributions:
    """One sequence's maps, without the batch axis and without padding."""
    kept = {
        "L": None if maps.query_padding is None else (~maps.query_padding[index]).nonzero()[:, 0],
        "S": None if maps.key_padding is None else (~maps.key_padding[index]).nonzero()[:, 0],
    }

    def of_sequence(tensor: Tensor | None, axes: str) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.detach()[index]
        for dim, axis in enumerate(axes):
            chosen = kept.get(axis)
            if chosen is not None:
                tensor = tensor.index_select(dim, chosen.to(tensor.device))
        return tensor

    found: dict[str, Any] = {
        name: of_sequence(getattr(maps, name), axes) for name, axes in AXES.items()
    }
    ratios = {name: of_sequence(ratio, "L") for name, ratio in maps.mixing_ratio.items()}
    return replace(
        maps,
        **found,
        mixing_ratio={name: ratio for name, ratio in ratios.items() if ratio is not None},
        query_padding=None,
        key_padding=None,
    )


def batch_of_one(maps: Contributions) -> Contributions:
    """One sequence's maps, as :func:`cut` gives them, with the batch axis again."""
    there = {name: getattr(maps, name) for name in AXES}
    found: dict[str, Any] = {name: None if x is None else x[None] for name, x in there.items()}
    return replace(
        maps,
        **found,
        mixing_ratio={name: ratio[None] for name, ratio in maps.mixing_ratio.items()},
    )


def _tensors(maps: Contributions) -> dict[str, Tensor]:
    """The maps that are there, by name; mixing ratios last."""
    found = {name: getattr(maps, name) for name in AXES if getattr(maps, name) is not None}
    found |= {f"mixing_ratio.{name}": ratio for name, ratio in maps.mixing_ratio.items()}
    return found


def size_of(maps: Contributions, axis: str) -> int | None:
    """L or S of a batch's maps, with padding; None where none of them has that axis."""
    for name, axes in AXES.items():
        tensor = getattr(maps, name)
        if tensor is not None and axis in axes:
            return int(tensor.shape[1 + axes.index(axis)])
    return None


def _size(maps: Contributions, axis: str) -> int | None:
    """L or S of one sequence's maps, None where none of them has that axis."""
    for name, axes in AXES.items():
        tensor = getattr(maps, name)
        if tensor is not None and axis in axes:
            return int(tensor.shape[axes.index(axis)])
    if axis == "L":
        return next((ratio.shape[0] for ratio in maps.mixing_ratio.values()), None)
    return None


def _in_turn(recording: RecordedMaps, lists: list[list[list[str]]]) -> list[list[str]]:
    """Tokens of calls, each with those of the calls before it that it goes on from.

    A call whose cache is not known, of L tokens with maps of S > L keys, goes on from S - L.
    """
    found: list[list[str]] = []
    before: list[list[str]] = []
    for batch, own in zip(recording.batches, lists, strict=True):
        cached = batch.begins
        if cached is None:
            own_layers = [m for n, m in batch.items() if recording.layers[n].kind == "self"]
            cached = max((keys_before(maps) or 0 for maps in own_layers), default=0)
        left = [max(0, len(tokens) - cached) for tokens in before]  # that were taken back
        goes_on = cached and len(before) == len(own)
        whole = [
            (before[i][: len(before[i]) - left[i]][-cached:] if goes_on else []) + tokens
            for i, tokens in enumerate(own)
        ]
        found += whole
        before = whole
    return found


def keys_before(maps: Contributions) -> int | None:
    """How many keys stand before that of a call's first query, of self-attention by its sizes."""
    L, S = size_of(maps, "L"), size_of(maps, "S")
    return None if L is None or S is None else S - room_of(maps) - L


def room_of(maps: Contributions) -> int:
    """How many keys at the end are padding of all sequences, as the room of a static cache is."""
    if maps.key_padding is None or not maps.key_padding.numel():
        return 0
    there = (~maps.key_padding).any(0).nonzero()
    return int(maps.key_padding.size(1) - (there.max() + 1 if there.numel() else 0))


def _per_sequence(
    name: str,
    tokens: Sequence[Sequence[str]] | Sequence[str] | None,
    recording: RecordedMaps,
    total: int,
) -> list[list[str]] | None:
    if tokens is None:
        return None
    flat = [token for token in tokens if isinstance(token, str)]
    is_flat = bool(flat) and len(flat) == len(tokens)
    lists = [flat] if is_flat else [list(item) for item in tokens if not isinstance(item, str)]
    if is_flat and total > 1 and total == len(recording.batches):
        sizes = [
            max((size_of(maps, "S") or 0 for maps in batch.values()), default=0)
            for batch in recording.batches
        ]
        is_one_sequence = sizes == sorted(sizes) and len(flat) >= sizes[-1]
        lists = [flat[:size] for size in sizes] if is_one_sequence else lists
    if len(lists) != total:
        raise ValueError(
            f"{name} must hold one list of tokens for each of the {total} sequences of the "
            f"recording, got {len(lists)}"
        )
    return lists


def _listed(tokens: Sequence[Sequence[str]] | None, index: int, batch: int) -> Sequence[str] | None:
    if tokens is None:
        return None
    if index >= len(tokens):
        raise ValueError(
            f"tokens of batch {batch} must hold a list for each of its sequences, "
            f"got {len(tokens)} lists"
        )
    return tokens[index]
