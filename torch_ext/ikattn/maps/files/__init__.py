"""Maps as files: written as they come, read back as the same recording.

Every format holds one array for each batch, layer and map, under the name

    0/encoder.layer.3.attention.self/summed      batch / layer / map

and one JSON document, the metadata: the format and its version, the version of ikattn, the model,
what is known of each layer, the tokens of each sequence and their ids, and what each map means in
words.

==============  ==================================  ==============================================
file            opened by anything that reads       and
==============  ==================================  ==============================================
.safetensors    safetensors (``safe_open``)         every type as it is; read without a copy;
                                                    while it is written the disk holds it twice
.npz            NumPy (``numpy.load``)              bfloat16 becomes float32, and bfloat16 again
                                                    when it is loaded
.json           anything                            text, about ten times as large; nothing lost
==============  ==================================  ==============================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ikattn._library import version
from ikattn._whole_files import whole_file
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.files._common import MapFileError
from ikattn.maps.files._json import JsonSink, read_json
from ikattn.maps.files._npz import NumpySink, read_npz
from ikattn.maps.files._safetensors import SafetensorsSink, read_safetensors
from ikattn.maps.layers import Batch, Layer, RecordedMaps
from ikattn.maps.reduction import TopSources

__all__ = [
    "DEFINITIONS",
    "MapFileError",
    "MapWriter",
    "load",
    "read_arrays",
    "save",
    "write_arrays",
]

Sink: TypeAlias = SafetensorsSink | NumpySink | JsonSink
FORMAT = "ikattn maps"
VERSION = 1  # raised when an older ikattn could no longer read what this one writes

_IDS = ("input_ids", "input_mask", "target_ids", "target_mask")  # fields of Batch

# Definitions that stand in every file of maps. f_h(x_j) = W_O^h v_j^h, a: the attention weights.
DEFINITIONS = {
    "weights": "[B, H, L, S] the attention weights a_ij^h, or those of a delta rule, with signs",
    "value_norms": "[B, H, S] |f_h(x_j)|, f_h(x_j) = W_O^h v_j^h, value bias included",
    "per_head": "[B, H, L, S] |a_ij^h f_h(x_j)|",
    "summed": "[B, L, S] |sum_h a_ij^h f_h(x_j)| (N, Kobayashi et al. 2020)",
    "with_residual": "[B, L, S] summed, x_i added on the diagonal (N_Res, Kobayashi et al. 2021)",
    "with_norm": "[B, L, S] with_residual through the block's normalisation (N_ResLN, same)",
    "encoder": "[B, L, S] with_norm through the second normalisation (N_Enc, GlobEnc 2022)",
    "alti": "[B, L, S] how much nearer each token brings the output, over its row (Ferrando et al. "
    "2022)",
    "projection": "[B, H, L, S] <a_ij^h f_h(x_j), y_i> / |y_i|^2, y_i = sum_h,j a_ij^h f_h(x_j); "
    "rows over heads and keys add up to 1",
    "mixing_ratio": "[B, L] of each map: the norm of what comes from other tokens, over that plus "
    "the norm of what comes from the token itself",
    "similarity": "[B, H, L, S] the weight without its magnitude and before its row is normalised",
    "magnitude": "[B, H, S] the key's own factor: weight = similarity x magnitude / its row's sum",
    "reduced": "of each map, what was kept of its rows as they were made: a tensor, or the values "
    "and sources of each query's largest entries",
    "rows": "[R] the queries whose rows the maps hold, where these are not all, without padding; "
    "less than 0: from the last of each sequence",
    "query_padding": "[B, L] true = padding, whose rows are 0",
    "key_padding": "[B, S] true = padding, whose columns are 0",
}


class MapWriter:
    """Writes maps to a file as they are made: memory for one layer of one batch at a time.

    The file appears under its name when the block ends without an exception, never before and
    never in part. What stands in no map is told at any time within the block: the model by
    :meth:`describe`, the tokens by :meth:`name_tokens`.

    Args:
        path: Ends in .safetensors, .npz or .json.

    Raises:
        ValueError: Another ending.
        ModuleNotFoundError: .npz without NumPy.
        OSError: On entering: the path cannot be written.

    Example:
        >>> import tempfile, torch, ikattn
        >>> from ikattn.maps import Layer, MapWriter, load_maps
        >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
        >>> maps = ikattn.Contributions(summed=torch.rand(2, 5, 5))
        >>> path = tempfile.mkdtemp() + "/maps.safetensors"
        >>> with MapWriter(path) as writer:
        ...     writer.write(0, layer, maps)
        >>> torch.equal(load_maps(path)["layer.0"].summed, maps.summed)
        True

        While a model runs: ``ikattn.record(model, on_layer=writer.write)`` within the block.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _format_of(self.path)
        self._sink: Sink | None = None
        self._stack = ExitStack()
        self._recording = RecordedMaps(model="", maps=())

    def __enter__(self) -> MapWriter:
        self._sink = self._stack.enter_context(_open_sink(self.path))
        return self

    def __exit__(self, *raised: Any) -> None:
        sink, self._sink = self._sink, None
        if raised[0] is not None:
            self._stack.__exit__(*raised)  # takes the file away
            return
        with self._stack:
            assert sink is not None
            sink.finish(_metadata(self._recording))

    def write(self, batch: int, layer: Layer, maps: Contributions) -> None:
        """Appends the maps of one layer; fits ``ikattn.record``'s ``on_layer``.

        Raises:
            RuntimeError: Outside of the writer's block.
            ValueError: This layer of this batch was written before.
        """
        if self._sink is None:
            raise RuntimeError(
                "MapWriter.write: use the writer as `with MapWriter(path) as writer`"
            )
        known = self._batch(batch)
        if layer.name in known.layers:
            raise ValueError(
                f"MapWriter.write: layer {layer.name!r} of batch {batch} was written before"
            )
        for name, tensor in _arrays(maps):
            self._sink.add(f"{batch}/{layer.name}/{name}", tensor.detach().cpu())
        self._recording.layers.setdefault(layer.name, layer)
        known.layers[layer.name] = Contributions()  # that it was there is all we keep

    def name_tokens(
        self,
        batch: int,
        tokens: Sequence[Sequence[str]] | None,
        target_tokens: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Notes the tokens of a batch: a list without padding for each of its sequences."""
        known = self._batch(batch)
        known.tokens, known.target_tokens = tokens, target_tokens

    def describe(self, recording: RecordedMaps) -> None:
        """Notes a recording's model, maps asked for, layers, and its batches' tokens and ids."""
        known = self._recording
        known.model, known.maps = recording.model, tuple(recording.maps)
        known.left_out = tuple(recording.left_out)
        known.keep_layers(recording.layers)
        for index, batch in enumerate(recording.batches):
            own = self._batch(index)
            for name in ("tokens", "target_tokens", *_IDS, "begins"):
                setattr(own, name, getattr(batch, name))

    def _batch(self, number: int) -> Batch:
        batches = self._recording.batches
        batches += [Batch() for _ in range(len(batches), number + 1)]
        return batches[number]


def save(recording: RecordedMaps, path: str | os.PathLike[str]) -> None:
    """Writes a recording to a file. See :meth:`Recording.save`."""
    with MapWriter(path) as writer:
        writer.describe(recording)
        for index, batch in enumerate(recording.batches):
            for name, maps in batch.items():
                writer.write(index, recording.layers[name], maps)


def load(path: str | os.PathLike[str]) -> RecordedMaps:
    """Reads what :func:`save` or a :class:`MapWriter` wrote; see :func:`ikattn.load_maps`."""
    metadata, arrays = read_arrays(path, FORMAT, VERSION)
    try:
        return _assembled(metadata, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise MapFileError(
            path, f"its metadata and arrays do not fit together ({error})"
        ) from error


def write_arrays(
    path: str | os.PathLike[str], arrays: Iterable[tuple[str, Tensor]], metadata: dict[str, Any]
) -> None:
    """Writes arrays by their names, and a JSON document, whole or not at all.

    The metadata have "format" and "format_version", which :func:`read_arrays` asks for.
    """
    with _open_sink(Path(path)) as sink:
        for name, tensor in arrays:
            sink.add(name, tensor.detach().cpu())
        sink.finish(metadata)


def read_arrays(
    path: str | os.PathLike[str], form: str, last: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and arrays of a file of format ``form``, its version ``last`` at most."""
    _, read = _format_of(Path(path))
    if not Path(path).is_file():
        raise FileNotFoundError(2, "there is no such file", os.fspath(path))
    text, arrays = read(Path(path))
    kind = form.removeprefix("ikattn ")
    foreign = MapFileError(path, f"this is no file of {kind} that ikattn wrote")
    try:
        metadata = json.loads(text or "")
    except ValueError:
        raise foreign from None
    if not isinstance(metadata, dict) or metadata.get("format") != form:
        raise foreign
    found = metadata.get("format_version")
    if not isinstance(found, int) or found > last:
        raise MapFileError(
            path,
            f"it has version {found} of the format, written by ikattn "
            f"{metadata.get('ikattn_version')}; this ikattn, {version()}, reads up to "
            f"version {last}: upgrade it",
        )
    return metadata, arrays


# --- What the formats share


@contextmanager
def _open_sink(path: Path) -> Iterator[Sink]:
    opened, _ = _format_of(path)
    with whole_file(path) as file, ExitStack() as stack:
        yield opened(file, path, stack)


def _format_of(path: Path) -> tuple[type[Sink], _Reader]:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a file of maps must end in {', '.join(SUFFIXES)}, got {path.name!r}")
    return _FORMATS[path.suffix.lower()]


def _arrays(maps: Contributions) -> Iterator[tuple[str, Tensor]]:
    for each in fields(maps):
        found = getattr(maps, each.name)
        if isinstance(found, Tensor):
            yield each.name, found
        for key, value in found.items() if isinstance(found, dict) else ():
            if isinstance(value, TopSources):
                for part, x in value._asdict().items():
                    yield f"{each.name}.{key}.{part}", x
            else:
                yield f"{each.name}.{key}", value


def _metadata(recording: RecordedMaps) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "ikattn_version": version(),
        "model": recording.model,
        "maps": list(recording.maps),
        "left_out": list(recording.left_out),
        "definitions": DEFINITIONS,
        "layers": [asdict(layer) for layer in recording.layers.values()],
        "batches": [
            {
                "layers": list(batch),
                "tokens": _lists(batch.tokens),
                "target_tokens": _lists(batch.target_tokens),
                **{n: x if (x := getattr(batch, n)) is None else x.long().tolist() for n in _IDS},
                "begins": batch.begins,
            }
            for batch in recording.batches
        ],
    }


def _lists(tokens: Sequence[Sequence[str]] | None) -> list[list[str]] | None:
    return None if tokens is None else [list(sequence) for sequence in tokens]


def _assembled(metadata: dict[str, Any], arrays: dict[str, Tensor]) -> RecordedMaps:
    """The recording of a file; ValueError and the like where its parts do not fit."""
    layers = {entry["name"]: Layer(**entry) for entry in metadata["layers"]}
    batches = []
    for entry in metadata["batches"]:
        layers_ = {name: Contributions() for name in entry["layers"]}
        tokens, of_target = _lists(entry["tokens"]), _lists(entry["target_tokens"])
        batches.append(Batch(layers_, tokens, of_target, begins=entry.get("begins")))
        for name in _IDS:
            if entry.get(name) is not None:
                setattr(batches[-1], name, torch.tensor(entry[name], device="cpu"))
    left_out = tuple(metadata.get("left_out", ()))
    model, names = str(metadata["model"]), tuple(metadata["maps"])
    recording = RecordedMaps(model, names, layers, batches, left_out)
    largest: dict[tuple[int, str, str], dict[str, Tensor]] = {}  # values and sources
    for name, tensor in arrays.items():
        batch, _, rest = name.partition("/")
        layer, _, map_name = rest.rpartition("/")
        maps = recording.batches[int(batch)].layers[layer]
        map_name, _, key = map_name.partition(".")
        key, _, part = key.partition(".")
        if part:
            largest.setdefault((int(batch), layer, key), {})[part] = tensor
        elif key:
            getattr(maps, map_name)[key] = tensor
        elif map_name in DEFINITIONS:
            setattr(maps, map_name, tensor)
        else:
            raise ValueError(f"{map_name!r} is none of the maps {', '.join(DEFINITIONS)}")
    for (number, layer, key), parts in largest.items():
        recording.batches[number].layers[layer].reduced[key] = TopSources(**parts)
    return recording


_Reader: TypeAlias = "Callable[[Path], tuple[str | bytes | None, dict[str, Tensor]]]"
_FORMATS: dict[str, tuple[type[Sink], _Reader]] = {
    ".safetensors": (SafetensorsSink, read_safetensors),
    ".npz": (NumpySink, read_npz),
    ".json": (JsonSink, read_json),
}
SUFFIXES = tuple(_FORMATS)
