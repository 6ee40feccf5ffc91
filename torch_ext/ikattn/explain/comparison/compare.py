"""``compare``: the same inputs through two models, their maps held against each other.

Texts go through both models batch by batch; what stays of a batch is added to sums by layer and
map. Sizes: B batch, H heads, L queries, S keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ikattn.explain.comparison._distances import ROW_MAPS, Sums, add_to, mixing_sums, row_sums
from ikattn.explain.comparison.comparison import Comparison, MapDistance
from ikattn.explain.comparison.probe import Inputs, call
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch
from ikattn.maps.page.labels import short_name
from ikattn.maps.recording import Recording
from ikattn.maps.sequences import cut, sequence_count
from ikattn.maps.tokens import tokens_of_batch
from ikattn.nn.selection import Selection
from ikattn.recorder.entry import record


@torch.no_grad()
def compare(
    model_a: nn.Module,
    model_b: nn.Module,
    texts_or_inputs: str | Inputs | Iterable[str | Inputs],
    *,
    tokenizer: Any = None,
    maps: Iterable[str] | None = None,
    layers: Selection | None = None,
    batch_size: int = 8,
    keep: int = 4,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Gives the same inputs to two models and measures how far apart their maps are, by layer.

    The models may be one with softmax and one with the implicit kernel, or one before and after
    training. All averages are over tokens, however these were batched; padding is no part of
    them. Of any number of texts only sums are held, and the maps of the first few.

    Layers are paired by name where both models have the same names, else by the order they ran.

    Args:
        model_a, model_b: Models in eval mode; they may be on two devices.
        texts_or_inputs: Texts, or what the models are called with: tensors, or mappings of keyword
            arguments, each of them one call. They go to the model's device, and to its dtype where
            they are floating point.
        tokenizer: One of transformers, for texts; it also names the tokens of ``input_ids``. Texts
            beyond its ``model_max_length`` are cut, with a warning.
        maps: Names for ``ikattn.record``. None: the weights, and what ``record(maps=None)`` takes
            of each layer. Maps of pairs are compared; "mixing_ratio" goes with them.
        layers: A selection of layers, as for ``ikattn.record``, of both models.
        batch_size: Texts in a call.
        keep: The maps of so many sequences stay in the comparison's recordings.
        names: Names of the models in tables and pages; None: their classes.

    Returns:
        A :class:`Comparison`.

    Raises:
        TypeError: Texts without a tokenizer, or inputs of another type.
        ValueError: The inputs hold no sequence, a model is in training mode, or layers or maps of
            the two models do not go together; the message says which.
        NotImplementedError: Attention over the edges of a graph.
        Exception: What ``ikattn.record`` raises.

    Source: S. Jain, B. C. Wallace, "Attention is not Explanation", NAACL 2019, who hold attention
    to attention by the Jensen-Shannon divergence, and by ranks.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> found = ikattn.explain.compare(model, model, torch.randn(3, 5, 16))
        >>> float(found["layers.0.self_attn"]["summed"].total_variation)
        0.0
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module) or model.training:
            got = "one in training mode" if isinstance(model, nn.Module) else type(model).__name__
            raise ValueError(f"compare: {name} must be a torch.nn.Module in eval mode, got {got}")
    if keep < 0 or not (names is None or len(names) == 2):
        raise ValueError(
            f"compare: keep must be 0 or more, and names two, got {keep} and {names!r}"
        )
    # by default the weights are a recording of their own
    asked: list[Any] = [None, "weights"]
    if maps is not None:
        asked = [maps if isinstance(maps, str) else tuple(maps)]
    running = _Running(keep, tokenizer)
    with ExitStack() as stack:
        recordings_a, recordings_b = (
            [stack.enter_context(record(model, x, layers=layers, to_cpu=False)) for x in asked]
            for model in (model_a, model_b)
        )

        def run(model: nn.Module, inputs: Inputs, own: list[Recording]) -> tuple[Batch, Any]:
            output = call(model, inputs)
            batch = _last_batch(own)
            for recording in (*recordings_a, *recordings_b):  # models may share modules
                recording.batches.clear()
            return batch, _main_output(output)

        for inputs in _batches(texts_or_inputs, tokenizer, batch_size):
            batch_a, output_a = run(model_a, inputs, recordings_a)
            batch_b, output_b = run(model_b, inputs, recordings_b)
            pairs = _pairs(recordings_a[0], batch_a, recordings_b[0], batch_b)
            running.add(pairs, batch_a, batch_b)
            running.add_outputs(output_a, output_b, _token_padding(model_a, batch_a, output_a))
    return running.comparison(recordings_a, recordings_b, names)


class _Running:
    """The comparison so far."""

    def __init__(self, keep: int, tokenizer: Any) -> None:
        self._keep = keep
        self._tokenizer = tokenizer
        self._pairs: dict[str, str] = {}
        self._sums: dict[str, dict[str, Sums]] = {}
        self._kept: tuple[list[Batch], list[Batch]] = ([], [])
        self._left_out: dict[str, None] = {}
        self._outputs: Sums | None = {}  # None: they cannot be compared
        self._sequences = 0

    def add(self, pairs: dict[str, str], a: Batch, b: Batch) -> None:
        """Adds a batch of both models."""
        count = sequence_count(list(a.values()))
        self._pairs |= pairs
        for layer, other in pairs.items():
            sums = self._sums.setdefault(layer, {})
            names = _common_maps(layer, a[layer], b[other], self._left_out)
            for i in range(count):
                one, two = cut(a[layer], i), cut(b[other], i)
                for name in names:
                    add_to(sums.setdefault(name, {}), _sums_of(one, two, name, layer))
        for batch, kept in zip((a, b), self._kept, strict=True):
            first = min(count, self._keep - self._sequences)
            if first > 0:
                own = _first(batch, first)
                if self._tokenizer is not None:
                    own.tokens, own.target_tokens = tokens_of_batch(self._tokenizer, own)
                kept.append(own)
        self._sequences += count

    def add_outputs(self, a: Tensor | None, b: Tensor | None, padding: Tensor | None) -> None:
        """Adds the outputs of both models, ``padding`` being over the first axes."""
        if self._outputs is None or a is None or b is None or a.shape != b.shape:
            self._outputs = None
            return
        a, b = a.double(), b.to(a.device).double()
        if padding is not None:
            a, b = a[~padding], b[~padding]
        add_to(self._outputs, {"apart": (a - b).square().sum(), "size": a.square().sum()})

    def comparison(
        self, a: list[Recording], b: list[Recording], names: tuple[str, str] | None
    ) -> Comparison:
        """Returns the comparison, when the last batch is in."""
        if not self._sequences:
            raise ValueError("compare: texts_or_inputs must hold at least one sequence, got none")
        recorded = []
        for own, batches in zip((a, b), self._kept, strict=True):
            maps = tuple(dict.fromkeys(name for part in own for name in part.maps))
            recorded.append(replace(own[0], maps=maps, batches=batches))
        distance = None
        if self._outputs is not None:
            apart, size = self._outputs["apart"].cpu(), self._outputs["size"].cpu()
            distance = float((apart / size).sqrt()) if apart else 0.0
        distances = {
            layer: {name: MapDistance.of(sums) for name, sums in maps.items()}
            for layer, maps in self._sums.items()
        }
        return Comparison(
            names=names or (short_name(a[0].model), short_name(b[0].model)),
            recording_a=recorded[0],
            recording_b=recorded[1],
            pairs=self._pairs,
            distances=distances,
            output_distance=distance,
            sequences=self._sequences,
            left_out=tuple(self._left_out),
        )


def _main_output(output: Any) -> Tensor | None:
    """Returns the logits, or the last hidden state, or the first tensor of floating point."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(output.get(name), Tensor):
                return _main_output(output[name])
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return next((x for x in map(_main_output, output) if x is not None), None)
    return None


def _last_batch(recordings: list[Recording]) -> Batch:
    """Returns the maps of the call that has just ended, out of all recordings of the model."""
    if graphs := sorted({x for one in recordings for graph in one.graphs for x in graph}):
        raise NotImplementedError(
            f"compare: {', '.join(graphs)} attend over the edges of a graph, whose maps are not of "
            "pairs: leave them out by layers="
        )
    first = recordings[0].batches[-1]
    for more in recordings[1:]:
        own = more.batches[-1]
        layers = {name: replace(maps, weights=own[name].weights) for name, maps in first.items()}
        first = replace(first, layers=layers)
    return first


def _batches(
    given: str | Inputs | Iterable[str | Inputs], tokenizer: Any, batch_size: int
) -> Iterator[Inputs]:
    """Gives what the models are called with, texts ``batch_size`` at a time."""
    if batch_size < 1:
        raise ValueError(f"compare: batch_size must be 1 or more, got {batch_size}")
    waiting: list[str] = []
    is_one = isinstance(given, (str, Tensor, Mapping)) or not isinstance(given, Iterable)
    items: Iterable[Any] = [given] if is_one else given
    for item in items:
        if isinstance(item, str):
            waiting.append(item)
        elif isinstance(item, (Tensor, Mapping)):
            yield item
        else:
            raise TypeError(
                "compare: texts_or_inputs must be texts, tensors or mappings of arguments, got "
                f"{type(item).__name__}"
            )
        # without a token for padding, texts go one by one
        if waiting and len(waiting) >= (batch_size if _can_pad(tokenizer) else 1):
            yield _encoded(waiting, tokenizer)
            waiting = []
    if waiting:
        yield _encoded(waiting, tokenizer)


def _can_pad(tokenizer: Any) -> bool:
    return getattr(tokenizer, "pad_token", None) is not None


def _encoded(texts: list[str], tokenizer: Any) -> Mapping[str, Any]:
    if tokenizer is None:
        raise TypeError(f"compare: texts need tokenizer=, got None and {texts[0]!r:.60}")
    whole = tokenizer(texts, verbose=False)["input_ids"]
    if empty := [text for text, ids in zip(texts, whole, strict=True) if not len(ids)]:
        raise ValueError(f"compare: texts must have tokens, got {empty[0]!r}")
    cut_texts = sum(len(ids) > tokenizer.model_max_length for ids in whole)
    if cut_texts:
        warnings.warn(
            f"compare: {cut_texts} of {len(texts)} texts are cut to the tokenizer's "
            f"model_max_length, {tokenizer.model_max_length} tokens",
            stacklevel=4,
        )
    padded = _can_pad(tokenizer)
    encoded: Mapping[str, Any] = tokenizer(
        texts, padding=padded, truncation=bool(cut_texts), return_tensors="pt"
    )
    return encoded


def _pairs(a: Recording, batch_a: Batch, b: Recording, batch_b: Batch) -> dict[str, str]:
    names_a, names_b = list(batch_a), list(batch_b)
    by_name = set(names_a) == set(names_b)
    pairs = dict(zip(names_a, names_a if by_name else names_b, strict=False))
    crossed = [name for name, other in pairs.items() if name != other and name in names_b]
    if len(names_a) != len(names_b) or crossed:
        raise ValueError(
            f"compare: layers of model_a, {_listed(names_a)}, and of model_b, {_listed(names_b)}, "
            "go together neither by name nor by order; layers=... chooses those to compare"
        )
    for name, other in pairs.items():
        if a.layers[name].kind != b.layers[other].kind:
            raise ValueError(
                f"compare: layer {name!r} of model_a is {a.layers[name].kind}-attention, and "
                f"{other!r} of model_b, which is paired with it, {b.layers[other].kind}-attention"
            )
    return pairs


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} ({shown})"


def _common_maps(
    layer: str, a: Contributions, b: Contributions, left_out: dict[str, None]
) -> list[str]:
    """Returns names of maps, and of mixing ratios, that both have; notes the others."""

    def names(maps: Contributions) -> dict[str, None]:
        there = [name for name in ROW_MAPS if getattr(maps, name) is not None]
        return dict.fromkeys([*there, *maps.mixing_ratio])

    of_a, of_b = names(a), names(b)
    single = of_a.keys() ^ of_b.keys()
    left_out |= {f"{layer} {name}": None for name in (*of_a, *of_b) if name in single}
    common = [name for name in of_a if name in of_b]
    if not common:
        raise ValueError(
            f"compare: layer {layer!r} has no map of pairs in both models: model_a has "
            f"{', '.join(of_a) or 'none'}, model_b {', '.join(of_b) or 'none'}"
        )
    return common


def _sums_of(a: Contributions, b: Contributions, name: str, layer: str) -> Sums:
    sums = mixing_sums(a, b, name)
    map_a, map_b = getattr(a, name), getattr(b, name)
    if map_a is None or map_b is None:
        return sums
    if map_a.shape != map_b.shape:
        raise ValueError(
            f"compare: map {name!r} of layer {layer!r} is {list(map_a.shape)} in model_a and "
            f"{list(map_b.shape)} in model_b: tokens, and heads where the map has them, must be "
            'the same; maps="summed" compares all heads together'
        )
    return sums | row_sums(map_a, map_b.to(map_a.device))


def _token_padding(model: nn.Module, batch: Batch, output: Tensor | None) -> Tensor | None:
    """Returns which tokens of an output are padding, by its first two axes; None: not known.

    Outputs of tokens have three axes at least, and are those of the layers that ran last.
    """
    paddings = [maps.query_padding for maps in batch.values() if maps.query_padding is not None]
    if output is None or output.dim() < 3 or not paddings:
        return None
    padding = paddings[-1].to(output.device)
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    ways = (padding, padding.T)
    ways = ways if all(module.batch_first for module in attention) else ways[::-1]
    return next((way for way in ways if way.shape == output.shape[:2]), None)


def _first(x: Any, count: int) -> Any:
    """Cuts the tensors that dataclasses and dictionaries hold to ``count`` rows, on the CPU."""
    if isinstance(x, Tensor):
        return x[:count].cpu()
    if isinstance(x, dict):
        return {name: _first(each, count) for name, each in x.items()}
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{one.name: _first(getattr(x, one.name), count) for one in fields(x)})
    return x
