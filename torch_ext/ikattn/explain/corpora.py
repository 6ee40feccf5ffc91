"""Maps of any number of texts, added up: means by layer, head and type of token.

Symbols: H heads, L queries, S keys, A types of tokens. Padding is cut off before anything is added.
"""

from __future__ import annotations

import functools
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ikattn._library import version
from ikattn.explain.comparison._distances import Sums, add_to, entropy, shares
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.files import MapFileError, read_arrays, write_arrays
from ikattn.maps.layers import Layer, RecordedMaps
from ikattn.maps.ledger import FACTORS, LEDGER, Shares, Split
from ikattn.maps.ledger import shares as shares_of_factors
from ikattn.maps.sequences import AXES, SequenceMaps, batch_of_one, sequences
from ikattn.maps.tokens import Tokens, is_special
from ikattn.maps.words import texts_of, words_of_text

TOKEN_TYPES = ("special", "word", "piece", "punctuation")

_FORMAT = "ikattn corpus sums"
_VERSION = 1  # raised when an older ikattn could no longer read what this one writes
_CELLS = 16  # rows and columns of a mean map
_PAIRS_AT_ONCE = 1 << 22  # heads are gone through in pieces of 32 MiB


def token_types(tokens: Sequence[str]) -> list[str]:
    """Returns the type of each token, by its letters alone.

    Args:
        tokens: The tokens of one sequence, as a recording has them.

    Returns:
        For each of them "special" (``[CLS]``, ``</s>``), "punctuation" (neither letter nor digit in
        it), "word" (a word, or the beginning of one) or "piece" (what goes on with a word).

    Example:
        >>> from ikattn.explain import token_types
        >>> token_types(["[CLS]", "im", "##plicit", "kernel", ".", "[SEP]"])
        ['special', 'word', 'piece', 'word', 'punctuation', 'special']
    """
    found: list[str] = []
    before = None
    texts, words = texts_of(tokens), words_of_text(tokens)
    for token, text, word in zip(tokens, texts, words, strict=True):
        if is_special(token):
            found.append("special")
        elif text.strip() and not any(unicodedata.category(x)[0] in "LMN" for x in text.strip()):
            found.append("punctuation")
        else:
            found.append("piece" if word == before else "word")
        before = word
    return found


@dataclass(frozen=True)
class CorpusMeans:
    """Means of one map of one layer over a corpus.

    Numbers are float64 on the CPU, NaN where there was nothing to average. H stands only in maps
    that every head has, and only maps of queries and keys have rows: other fields are None. A row
    is what one token takes from each other one, divided by its sum.

    Attributes:
        values: The mean of the map's numbers: ``[H, A, A]`` by types of query and key, over all
            pairs, hidden ones too; ``[H, A]`` of what keys have alone; ``[A]`` of mixing ratios.
        shares: ``[H, A, A]``, what a row of a type of query takes from each type of key; over the
            keys it adds up to 1.
        entropy: ``[H, A]``, of rows in bits, by the type of the query.
        map: ``[H, 16, 16]``, the mean over sequences of all rows, both axes scaled to 16 cells. A
            row adds up to 1, but for rows with nothing in them.
        rows: ``[H, A]``, how many rows with something in them there were.
        count: Over how many pairs ``[A, A]`` or tokens ``[A]`` the values are.
        sequences: How many were added.
        left_out: How many more had a number that is not finite in this map.
    """

    values: Tensor | None
    shares: Tensor | None
    entropy: Tensor | None
    map: Tensor | None
    rows: Tensor | None
    count: Tensor | None
    sequences: int
    left_out: int

    @staticmethod
    def of(sums: Sums) -> CorpusMeans:
        """Divides what was added up."""

        def over(name: str, count: Tensor | None) -> Tensor | None:
            return sums[name] / count if name in sums and count is not None else None

        rows, count, number = sums.get("rows"), sums.get("count"), sums.get("sequences")
        return CorpusMeans(
            values=over("sum_of_values", count),
            shares=over("sum_of_shares", None if rows is None else rows[..., None]),
            entropy=over("sum_of_entropies", rows),
            map=over("sum_of_maps", number),
            rows=None if rows is None else rows.long(),
            count=None if count is None else count.long(),
            sequences=0 if number is None else int(number),
            left_out=int(sums["left_out"]) if "left_out" in sums else 0,
        )


class CorpusSums:
    """Sums of maps over texts. They take the same memory for one text and for ten million.

    Sums of parts of a corpus add, in any order. They can be pickled, saved and loaded. A map with a
    number that is not finite is left out, and counted.

    Args:
        types: The types of tokens, A of them.

    Attributes:
        types: The types of tokens.
        model: The recordings' model; "" before the first.
        layers: Layers by name.
        sequences: The number of sequences added.
        sums: Sums by layer and map; mixing ratios are ``mixing_ratio.`` and the map's name.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> found = ikattn.explain.CorpusSums()
        >>> for tokens in (["[CLS]", "water", "[SEP]"], ["[CLS]", "it", "was", ".", "[SEP]"]):
        ...     with torch.no_grad(), ikattn.record(model, maps=("weights",)) as recording:
        ...         _ = model(torch.randn(1, len(tokens), 16))
        ...     found.add(recording, tokens)
        >>> found["layers.1.self_attn"]["weights"].shares.shape
        torch.Size([4, 4, 4])
    """

    def __init__(self, types: Sequence[str] = TOKEN_TYPES) -> None:
        self.types = tuple(types)
        if not self.types or len(set(self.types)) < len(self.types):
            raise ValueError(f"CorpusSums: types must be different names, got {self.types}")
        self.model = ""
        self.layers: dict[str, Layer] = {}
        self.sequences = 0
        self.sums: dict[str, dict[str, Sums]] = {}

    def add(
        self,
        recording: RecordedMaps,
        tokens: Tokens | None = None,
        target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
        *,
        types_of: Callable[[Sequence[str]], Sequence[str]] = token_types,
    ) -> None:
        """Adds every sequence of a recording.

        Args:
            recording: Maps of any number of calls.
            tokens: Lists of names, or a tokenizer, as for ``Recording.to_html``. None: as recorded.
            target_tokens: Names of the tokens that a decoder reads.
            types_of: Gives the type of each token of a sequence.

        Raises:
            ValueError: Tokens that are unknown or do not match, a type that is none of ours, or
                another model or other layers than before. Nothing is added then.
        """
        more = CorpusSums(self.types)
        more.model, more.layers = recording.model, dict(recording.layers)
        self._check(more, "add")
        for sequence in sequences(recording, tokens, target_tokens):
            more._add_sequence(sequence, types_of)
        self._take(more)

    def __iadd__(self, other: CorpusSums) -> CorpusSums:
        self._check(other, "+")
        self._take(other)
        return self

    def __add__(self, other: CorpusSums) -> CorpusSums:
        """Returns the sums of both, which must have the same types of tokens, model and layers."""
        if not isinstance(other, CorpusSums):
            return NotImplemented
        total = CorpusSums(self.types)
        total += self
        total += other
        return total

    def __getitem__(self, layer: str) -> dict[str, CorpusMeans]:
        """Returns the means of a layer's maps; KeyError names the layers that there are."""
        if layer not in self.sums:
            raise KeyError(f"no layer {layer!r} was added; there are {', '.join(self.sums)}")
        maps = self.sums[layer].items()
        return {name: CorpusMeans.of(sums) for name, sums in maps if name != "ledger"}

    @property
    def shares(self) -> Shares:
        """Who makes contributions large, of layers with the ledger; see ``ikattn.maps.shares``."""
        found = {}
        for layer, maps in self.sums.items():
            if sums := maps.get("ledger"):
                rows, left_out = sums["split_rows"].long(), sums["split_left_out"].long()
                found[layer] = Split(sums["sum_of_covariances"], rows, left_out)
        return Shares(found)

    def table(self) -> list[dict[str, Any]]:
        """Returns plain rows, one for each layer, map of queries and keys, and head.

        Returns:
            Dictionaries of "layer", "map", "head" (None: the map is of all heads), "rows",
            "entropy" in bits, and for each type the share that goes to it: means over rows.
        """
        return [
            {"layer": layer, "map": name, "head": head, **row}
            for layer, maps in self.sums.items()
            for name, sums in maps.items()
            if "rows" in sums
            for head, row in self._rows_of_table(sums)
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the sums to a file, which appears whole or not at all.

        Args:
            path: Ends in .safetensors, .npz (needs NumPy) or .json.

        Raises:
            ValueError: Another ending.
            OSError: The path cannot be written, or the disk is full.
        """
        arrays = (
            (f"{layer}/{name}/{statistic}", x)
            for layer, maps in self.sums.items()
            for name, sums in maps.items()
            for statistic, x in sums.items()
        )
        metadata = {"format": _FORMAT, "format_version": _VERSION, "ikattn_version": version()}
        metadata |= {"model": self.model, "types": self.types, "sequences": self.sequences}
        layers = [asdict(layer) for layer in self.layers.values()]
        write_arrays(path, arrays, metadata | {"layers": layers})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> CorpusSums:
        """Reads what :meth:`save` wrote.

        Raises:
            MapFileError: The file is cut short, or holds something else.
            FileNotFoundError: The file is missing.
        """
        metadata, arrays = read_arrays(path, _FORMAT, _VERSION)
        try:
            found = CorpusSums(metadata["types"])
            found.model, found.sequences = str(metadata["model"]), int(metadata["sequences"])
            found.layers = {entry["name"]: Layer(**entry) for entry in metadata["layers"]}
            for key, x in arrays.items():
                layer, name, statistic = key.rsplit("/", 2)
                lengths = {"A": len(found.types), "C": _CELLS, "F": len(FACTORS)}
                sizes = [lengths[axis] for axis in _AXES[statistic]]
                if x.dtype != torch.float64 or list(x.shape)[x.dim() - len(sizes) :] != sizes:
                    got = f"{list(x.shape)} {x.dtype}"
                    raise ValueError(f"{key} must end in {sizes} float64, got {got}")
                found._of_map(layer, name)[statistic] = x
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"its metadata and arrays do not fit together ({error})"
            raise MapFileError(path, cause) from error
        return found

    def _check(self, other: CorpusSums, caller: str) -> None:
        """Raises unless what the other has added up can be added to this."""
        pairs = [("types of tokens", self.types, other.types)]
        if self.model and other.model:
            pairs.append(("the model", (self.model,), (other.model,)))
        for name in self.layers.keys() & other.layers.keys():
            mine, theirs = self.layers[name], other.layers[name]
            pairs.append((f"layer {name!r}", (str(mine),), (str(theirs),)))
        for what, mine_, theirs_ in pairs:
            if mine_ != theirs_:
                raise ValueError(
                    f"CorpusSums.{caller}: {what} must be {', '.join(mine_)} as before, "
                    f"got {', '.join(theirs_)}"
                )

    def _take(self, other: CorpusSums) -> None:
        self.model = self.model or other.model
        self.sequences += other.sequences
        for name, layer in other.layers.items():
            self.layers.setdefault(name, layer)
        for layer_name, maps in other.sums.items():
            for name, sums in maps.items():
                add_to(self._of_map(layer_name, name), sums)

    def _of_map(self, layer: str, name: str) -> Sums:
        return self.sums.setdefault(layer, {}).setdefault(name, {})

    def _add_sequence(
        self, sequence: SequenceMaps, types_of: Callable[[Sequence[str]], Sequence[str]]
    ) -> None:
        @functools.cache  # most layers read the same tokens
        def one_hot(*tokens: str) -> Tensor:
            """Returns ``[L, A]``, float64, one where a token is of a type."""
            types = list(types_of(list(tokens)))
            if len(types) != len(tokens) or not set(types) <= set(self.types):
                raise ValueError(
                    f"CorpusSums.add: types_of must give each of {len(tokens)} tokens one of "
                    f"{', '.join(self.types)}, got {types}"
                )
            rows = torch.eye(len(self.types), dtype=torch.float64, device="cpu")
            return rows[[self.types.index(kind) for kind in types]]

        for name, maps in sequence.layers.items():
            labels = sequence.labels(self.layers[name])
            _check_tokens(sequence, self.layers[name], len(labels[1]))
            queries, keys = (one_hot(*tokens) for tokens in labels)
            for map_name, sums in _sums_of_layer(maps, queries, keys):
                add_to(self._of_map(name, map_name), sums)
        self.sequences += 1

    def _rows_of_table(self, sums: Sums) -> Iterator[tuple[int | None, dict[str, Any]]]:
        rows, taken, bits = sums["rows"], sums["sum_of_shares"], sums["sum_of_entropies"]
        for head in range(len(rows)) if rows.dim() == 2 else [None]:
            where = () if head is None else (head,)
            count = rows[where].sum()
            row = {"rows": int(count), "entropy": float(bits[where].sum() / count)}
            to = (taken[where].sum(0) / count).tolist()
            yield head, row | dict(zip(self.types, to, strict=True))


# The last axes of what is added up: A types of tokens, 16 cells, or F factors of the ledger.
_AXES = {"sum_of_values": "A", "sum_of_shares": "AA", "sum_of_entropies": "A", "sum_of_maps": "CC"}
_AXES |= {"rows": "A", "count": "A", "sequences": "", "left_out": "", "sum_of_covariances": "FF"}
_AXES |= {"split_rows": "", "split_left_out": ""}


def _check_tokens(sequence: SequenceMaps, layer: Layer, keys: int) -> None:
    """Raises unless queries and keys have tokens, not numbers in their place."""
    where = f"sequence {sequence.index} of batch {sequence.batch}"
    wanted = {"tokens": sequence.tokens}
    if layer.kind == "cross":
        wanted["target_tokens"] = sequence.target_tokens
    for name, tokens in wanted.items():
        if tokens is None:
            raise ValueError(
                f"CorpusSums.add: {name} of {where} must be known, since sums are by their types: "
                f"pass {name}"
            )
    if keys > max(len(tokens or ()) for tokens in (sequence.tokens, sequence.target_tokens)):
        raise ValueError(
            f"CorpusSums.add: {where} must have a token for each of the {keys} keys of layer "
            f"{layer.name!r}; of calls that go on from a cache add recording.joined()"
        )


# --- One sequence's part of the sums


def _sums_of_layer(
    maps: Contributions, queries: Tensor, keys: Tensor
) -> Iterator[tuple[str, Sums]]:
    """Adds up each map of one sequence, and of the ledger the covariances of its factors.

    Queries and keys are ``[L, A]`` and ``[S, A]``, one where a token is of a type.
    """
    found = {name: getattr(maps, name) for name in AXES}
    found |= {f"mixing_ratio.{name}": ratio for name, ratio in maps.mixing_ratio.items()}
    one = torch.ones((), dtype=torch.float64, device="cpu")
    for name, x in found.items():
        if x is None:
            continue
        if not x.isfinite().all():
            yield name, {"left_out": one}
            continue
        axes = AXES.get(name, "L")
        if axes.endswith("LS"):
            size = max(1, _PAIRS_AT_ONCE // max(1, x.shape[-2] * x.shape[-1]))
            parts = x.split(size) if x.dim() == 3 else [x]  # a few heads at a time
            of_pairs = queries.to(x.device), keys.to(x.device)
            pieces = [_sums_of_heads(part, *of_pairs) for part in parts]
            sums = pieces[0]
            if len(pieces) > 1:
                sums = {key: torch.cat([piece[key] for piece in pieces]) for key in sums}
            sums |= {"count": queries.sum(0)[:, None] * keys.sum(0)}
        else:
            types = keys if axes.endswith("S") else queries
            sums = {"sum_of_values": x.double() @ types.to(x.device), "count": types.sum(0)}
        yield name, {key: value.cpu() for key, value in sums.items()} | {"sequences": one}
    if all(found[name] is not None for name in LEDGER):
        split = shares_of_factors({"": batch_of_one(maps)})[""]
        counts = {"split_rows": split.rows.double(), "split_left_out": split.left_out.double()}
        yield "ledger", {"sum_of_covariances": split.sums, **counts}


def _sums_of_heads(x: Tensor, queries: Tensor, keys: Tensor) -> Sums:
    """Adds up one map ``[L, S]``, or some heads of one, ``[H, L, S]``."""
    x = x.double()
    p, L = shares(x), x.shape[-2]
    means = _cells_of(L, x).mT * (_CELLS / max(1, L))  # over the tokens of a cell
    counted = (p != 0).any(-1).double()
    return {
        "sum_of_values": queries.mT @ x @ keys,
        "sum_of_shares": queries.mT @ p @ keys,
        "rows": counted @ queries,
        "sum_of_entropies": entropy(p) @ queries,
        "sum_of_maps": means @ p @ _cells_of(x.shape[-1], x),
    }


def _cells_of(size: int, like: Tensor) -> Tensor:
    """Returns ``[size, 16]``, how much of each token lies in each of the 16 cells of an axis."""
    edges = torch.arange(_CELLS + 1, dtype=torch.float64, device=like.device) * size / _CELLS
    token = torch.arange(size, dtype=torch.float64, device=like.device)[:, None]
    upper = torch.minimum(edges[1:], token + 1)
    return (upper - torch.maximum(edges[:-1], token)).clamp_min(0)
