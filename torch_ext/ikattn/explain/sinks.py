"""Sinks: tokens that take much of a head's weight and give next to nothing.

Symbols: H heads, L queries, S keys; one sequence, its padding cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ikattn.maps.layers import RecordedMaps
from ikattn.maps.sequences import sequences
from ikattn.maps.tokens import Tokens

LEAST_WEIGHT, LARGEST_PART = 0.3, 0.5  # of a sink; the part is that of its weight
RARE = 0.005  # a rate below which a sink is not printed
LEARNED = "(sink)"  # the name of the column that a model with sinks of its own adds


class Sink(NamedTuple):
    """A token that is a sink of a head, or of the heads of a layer; means over where it is one.

    Attributes:
        layer, head: The layer's name, and the head's number; None: all heads of the layer.
        token: As it is written. ``(sink)`` is the logit that a model adds to each row.
        rate: The part of the sequences (and heads) in which a token so written is a sink.
        weight: The weight that it receives, the mean over queries.
        part: The part that it has in the head's contributions, ``a |f(x)|``.
        norm: The norm of its vector, over the mean of the other tokens of its sequence.
        suppressed: How much less the head moves than if the other tokens had the sink's weight, in
            proportion to their own.
    """

    layer: str
    head: int | None
    token: str
    rate: float
    weight: float
    part: float
    norm: float
    suppressed: float


@dataclass(frozen=True)
class Sinks:
    """The sinks of a corpus. See :func:`sinks`. Those of its parts add: ``one + other``.

    ``print`` shows the frequent sinks of layers; ``table()`` gives all, those of heads too.

    Attributes:
        seen: How many sequences, by layer and head; of head None, how many heads of sequences.
        found: By layer, head and token, how often it was a sink, and sums of its numbers, ``[5]``.
    """

    seen: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    found: dict[tuple[str, int | None, str], Tensor] = field(default_factory=dict)

    def __add__(self, other: Sinks) -> Sinks:
        found = dict(self.found)
        for key, sums in other.found.items():
            found[key] = found.get(key, 0) + sums
        return Sinks(self.seen + other.seen, found)

    def table(self) -> list[Sink]:
        """Returns the sinks, layer by layer and head by head, the most frequent first."""
        rows = [
            Sink(layer, head, token, count / self.seen[layer, head], *(x / count for x in sums))
            for (layer, head, token), (count, *sums) in (
                (key, numbers.tolist()) for key, numbers in self.found.items()
            )
        ]
        places = list(self.seen)
        return sorted(rows, key=lambda sink: (places.index((sink.layer, sink.head)), -sink.rate))

    def __str__(self) -> str:
        rows = [sink for sink in self.table() if sink.head is None and sink.rate >= RARE]
        width = max((len(sink.layer) for sink in rows), default=5)
        lines = [f"{'layer':{width}}  {'token':10}" + "  ".join(Sink._fields[3:])]
        for layer, _, token, *numbers in rows:
            cells = (
                f"{x:<{len(name)}.2f}" for name, x in zip(Sink._fields[3:], numbers, strict=True)
            )
            lines.append(f"{layer:{width}}  {token:10}" + "  ".join(cells).rstrip())
        return "\n".join(lines)


def sinks(
    recording: RecordedMaps,
    tokens: Tokens | None = None,
    target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
) -> Sinks:
    """Finds tokens whose weight is large and whose part in what a head moves is small.

    A sink receives at least 0.3 of a head's weight, the mean over the queries of a sequence, and
    has at most half as large a part in the contributions. Where rows of weights do not add up to 1,
    as with the sinks that gpt-oss learns, the rest is a column of its own without a vector.

    Args:
        recording: Of any number of calls, with ``maps=("weights", "value_norms")`` or the ledger.
        tokens, target_tokens: As for ``Recording.to_html``. None: as recorded, or numbers.

    Returns:
        The :class:`Sinks`, a table to print.

    Raises:
        ValueError: A layer lacks weights or value norms, or tokens do not fit.

    Source: G. Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020, for weight and part.

    Example:
        >>> import torch, ikattn
        >>> from ikattn.maps import Batch, Layer, Recording
        >>> weights = torch.tensor([[0.8, 0.1, 0.1]] * 3)[None, None]
        >>> maps = ikattn.Contributions(weights=weights, value_norms=torch.tensor([[[0.1, 2, 2]]]))
        >>> layers = {"layer.0": Layer("layer.0", "self", "encoder", 1, "post", "bert")}
        >>> recording = Recording("Model", ("ledger",), layers, [Batch({"layer.0": maps})])
        >>> print(ikattn.explain.sinks(recording, ["[CLS]", "it", "was"]))
        layer    token     rate  weight  part  norm  suppressed
        layer.0  [CLS]     1.00  0.80    0.17  0.05  0.76
    """
    if not recording.layers:
        raise ValueError("sinks: the recording must hold layers with queries and keys, got none")
    total = Sinks()
    for sequence in sequences(recording, tokens, target_tokens):
        for name, maps in sequence.layers.items():
            if maps.weights is None or maps.value_norms is None or maps.weights.dim() != 3:
                raise ValueError(
                    f"sinks: layer {name!r} must have weights [H, L, S] and value norms: record "
                    'with maps=("weights", "value_norms")'
                )
            labels = [*sequence.labels(recording.layers[name])[1], LEARNED]
            numbers = _numbers(maps.weights, maps.value_norms)
            total.seen.update([(name, None)] * len(maps.weights))
            total.seen.update((name, head) for head in range(len(maps.weights)))
            is_sink = (numbers[1] >= LEAST_WEIGHT) & (numbers[2] <= LARGEST_PART * numbers[1])
            for h, key in is_sink.nonzero().tolist():
                for head in (None, h):
                    at = name, head, labels[key]
                    total.found[at] = total.found.get(at, 0) + numbers[:, h, key]
    return total


def _numbers(weights: Tensor, norms: Tensor) -> Tensor:
    """1, weight, part, relative norm and what is suppressed, by head and key, [5, H, S + 1]."""
    rows, norms = weights.double().cpu(), norms.double().cpu()
    rest = (1 - rows.sum(-1, keepdim=True)).where(rows.sum(-1, keepdim=True) > 0, 0)
    rows = torch.cat([rows, rest.where(rest > 1e-3, 0)], -1)  # below it by rounding
    norms = torch.nn.functional.pad(norms.nan_to_num(0, 0, 0), (0, 1))
    moved = (rows * norms[:, None]).sum(1)  # [H, S + 1], by each key
    seen = rows.mean(1)
    whole = moved.sum(-1, keepdim=True)
    others = (norms.sum(-1, keepdim=True) - norms) / max(1, norms.size(-1) - 2)
    parts = moved / whole.where(whole > 0, 1)
    without = (whole - moved) / (1 - seen).clamp_min(1e-12)
    suppressed = torch.where(without > 0, 1 - whole / without, 0)
    relative = norms / others.where(others > 0, 1)
    return torch.stack([torch.ones_like(seen), seen, parts, relative, suppressed])
