"""One sequence of a recording at a time, its padding cut off: what pages and pictures show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """The maps of one sequence."""

    batch: int  # the forward call it was part of
    index: int  # its place in that batch
    tokens: Sequence[str] | None  # None: unknown
    target_tokens: Sequence[str] | None  # those that a decoder reads beside them
    layers: dict[str, Contributions]  # by layer name; shapes without B
    begins: int | None = None  # how many tokens of a cache the call went on from; None: unknown

    def labels(self, layer: Layer) -> tuple[list[str], list[str]]:
        """The tokens of a layer's queries ``[L]`` and keys ``[S]``; their numbers where unknown."""
        own = self.tokens
        if layer.side == "decoder" and self.target_tokens is not None:
            own = self.target_tokens
        of_keys = self.tokens if layer.kind == "cross" else own
        if layer.kind == "cross" and self.target_tokens is None:
            own = None
        maps = self.layers[layer.name]
        L, S = (size_of(maps, axis, first=0) or 0 for axis in "LS")
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

    Tokens stand in place of the recorded ones: for each sequence, over all batches, its tokens
    without padding; of a single sequence the tokens themselves, of several calls that make one
    sequence (``generate``) the tokens of all. A tokenizer decodes the ids that the calls were made
    with. ValueError tells of other numbers of tokens, and of maps that are not whole.
    """
    for batch in recording.batches:
        for name, maps in batch.items():
            check_whole(maps, name, "pages, pictures and sums over sequences need whole maps")
    named = tokens_by_call(recording, tokens, target_tokens)
    for b, (batch, (own, of_target)) in enumerate(zip(recording.batches, named, strict=True)):
        for i in range(sequence_count(batch.values())):
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
    """The tokens of every call's sequences and of their targets, as :func:`sequences` has them."""
    counts = [sequence_count(batch.values()) for batch in recording.batches]
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
    ends = list(accumulate(counts))
    own = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return [
        (
            batch.tokens if given is None else given[place],
            batch.target_tokens if given_target is None else given_target[place],
        )
        for batch, place in zip(recording.batches, own, strict=True)
    ]


def tensors_of(maps: Contributions) -> Iterator[tuple[str, str, Tensor]]:
    """The maps that are there, mixing ratios last: each with its name and its axes but B."""
    for name, axes in AXES.items():
        found = getattr(maps, name)
        if found is not None:
            yield name, axes, found
    for name, ratio in maps.mixing_ratio.items():
        yield f"mixing_ratio.{name}", "L", ratio


def changed(maps: Contributions, change: Callable[[Tensor, str], Tensor]) -> Contributions:
    """The maps, and their paddings, as a function makes them of a tensor and its axes but B."""
    ratios = {name: change(x, "L") for name, x in maps.mixing_ratio.items()}
    named = {**AXES, "query_padding": "L", "key_padding": "S"}
    there = {name: (getattr(maps, name), axes) for name, axes in named.items()}
    found: dict[str, Any] = {
        name: None if x is None else change(x, axes) for name, (x, axes) in there.items()
    }
    return replace(maps, mixing_ratio=ratios, **found)


def sequence_count(layers: Iterable[Contributions]) -> int:
    """B of a batch's maps; 0 where there are none."""
    for maps in layers:
        for found in (*(x for _, _, x in tensors_of(maps)), *maps.reduced.values()):
            tensor = found if isinstance(found, Tensor) else found[0]
            return tensor.shape[0]
    return 0


def cut(maps: Contributions, index: int) -> Contributions:
    """One sequence's maps, without the batch axis and without padding."""
    padding = {"L": maps.query_padding, "S": maps.key_padding}
    kept = {axis: (~x[index]).nonzero()[:, 0] for axis, x in padding.items() if x is not None}

    def of_sequence(tensor: Tensor, axes: str) -> Tensor:
        tensor = tensor.detach()[index]
        for dim, axis in enumerate(axes):
            if axis in kept:
                tensor = tensor.index_select(dim, kept[axis].to(tensor.device))
        return tensor

    return replace(changed(maps, of_sequence), query_padding=None, key_padding=None)


def batch_of_one(maps: Contributions) -> Contributions:
    """One sequence's maps, as :func:`cut` gives them, with the batch axis again."""
    return changed(maps, lambda tensor, _: tensor[None])


def size_of(maps: Contributions, axis: str, *, first: int = 1) -> int | None:
    """L or S of a batch's maps, with padding; None where none of them has that axis.

    first: The dimension that axes are counted from: 0 of one sequence's maps.
    """
    for _, axes, tensor in tensors_of(maps):
        if axis in axes:
            return int(tensor.shape[first + axes.index(axis)])
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
    """The tokens of each sequence, over all batches, of what a caller gave."""
    if tokens is None:
        return None
    if tokens and all(isinstance(token, str) for token in tokens):
        flat = [str(token) for token in tokens]
        lists = [flat]
        if total > 1 and total == len(recording.batches):  # the calls of one sequence
            sizes = [
                max((size_of(maps, "S") or 0 for maps in batch.values()), default=0)
                for batch in recording.batches
            ]
            if sizes == sorted(sizes) and len(flat) >= sizes[-1]:
                lists = [flat[:size] for size in sizes]
    else:
        lists = [list(item) for item in tokens if not isinstance(item, str)]
    if len(lists) != total:
        raise ValueError(
            f"{name} must hold one list of tokens for each of the {total} sequences of the "
            f"recording, got {len(lists)}"
        )
    return lists


def _listed(tokens: Sequence[Sequence[str]] | None, index: int, batch: int) -> Sequence[str] | None:
    if tokens is not None and index >= len(tokens):
        raise ValueError(
            f"tokens of batch {batch} must hold a list for each of its sequences, "
            f"got {len(tokens)} lists"
        )
    return None if tokens is None else tokens[index]
