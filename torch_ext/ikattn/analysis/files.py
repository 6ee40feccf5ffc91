"""Maps as files: written as they come, read back as the same recording.

Every format holds one array for each batch, layer and map, under the name

    0/encoder.layer.3.attention.self/summed      batch / layer / map

and one JSON document, the metadata: the format and its version, the version of ikattn, the model,
what is known of each layer, the tokens of each sequence, and what each map means in words.

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

import ctypes
import json
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Protocol

import torch
from torch import Tensor

import ikattn
from ikattn.analysis._optional import optional
from ikattn.analysis._whole_files import whole_file
from ikattn.analysis.recording import Batch, Layer, Recording
from ikattn.contributions import Contributions

__all__ = ["DEFINITIONS", "MapFileError", "MapWriter", "load_maps"]

FORMAT = "ikattn maps"
VERSION = 1  # raised when an older ikattn could no longer read what this one writes

# What every file says of its maps. f_h(x_j) = W_O^h v_j^h, a: the attention weights.
DEFINITIONS = {
    "weights": "[B, H, T, S] the attention weights a_ij^h",
    "value_norms": "[B, H, S] |f_h(x_j)|, f_h(x_j) = W_O^h v_j^h, value bias included",
    "per_head": "[B, H, T, S] a_ij^h |f_h(x_j)|",
    "summed": "[B, T, S] |sum_h a_ij^h f_h(x_j)| (N, Kobayashi et al. 2020)",
    "with_residual": "[B, T, S] summed, x_i added on the diagonal (N_Res, Kobayashi et al. 2021)",
    "with_norm": "[B, T, S] with_residual through the block's normalisation (N_ResLN, same)",
    "encoder": "[B, T, S] with_norm through the second normalisation (N_Enc, GlobEnc 2022)",
    "mixing_ratio": "[B, T] of each map: the norm of what comes from other tokens, over that plus "
    "the norm of what comes from the token itself",
    "similarity": "[B, H, T, S] the weight without its magnitude and before its row is normalised",
    "magnitude": "[B, H, S] the key's own factor: weight = similarity x magnitude / its row's sum",
    "query_padding": "[B, T] true = padding, whose rows are 0",
    "key_padding": "[B, S] true = padding, whose columns are 0",
}


class MapFileError(ValueError):
    """A file that holds no maps, or not all of them, or maps of a later format."""

    def __init__(self, path: str | os.PathLike[str], cause: str) -> None:
        super().__init__(f"{os.fspath(path)}: {cause}")


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
        >>> from ikattn.analysis.files import MapWriter, load_maps
        >>> from ikattn.analysis.recording import Layer
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
        self._open_sink = _choose(self.path, _SINKS)
        self._sink: _Sink | None = None
        self._stack = ExitStack()
        self._recording = Recording(model="", maps=())

    def __enter__(self) -> MapWriter:
        file = self._stack.enter_context(whole_file(self.path))
        try:
            self._sink = self._open_sink(file, self.path, self._stack)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sink, self._sink = self._sink, None
        if error is not None:
            self._stack.__exit__(kind, error, traceback)  # takes the file away
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
        batches = self._recording.batches
        while len(batches) <= batch:
            batches.append(Batch())
        if layer.name in batches[batch].layers:
            raise ValueError(
                f"MapWriter.write: layer {layer.name!r} of batch {batch} was written before"
            )
        for name, tensor in _arrays(maps):
            self._sink.add(f"{batch}/{layer.name}/{name}", tensor.detach().cpu())
        self._recording.layers.setdefault(layer.name, layer)
        batches[batch].layers[layer.name] = Contributions()  # that it was there is all we keep

    def name_tokens(
        self,
        batch: int,
        tokens: Sequence[Sequence[str]] | None,
        target_tokens: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Notes the tokens of a batch: a list without padding for each of its sequences."""
        batches = self._recording.batches
        while len(batches) <= batch:
            batches.append(Batch())
        batches[batch].tokens, batches[batch].target_tokens = tokens, target_tokens

    def describe(self, recording: Recording) -> None:
        """Notes a recording's model, maps asked for, layers, and the tokens of its batches."""
        known = self._recording
        known.model, known.maps = recording.model, tuple(recording.maps)
        for name, layer in recording.layers.items():
            known.layers.setdefault(name, layer)
        for index, batch in enumerate(recording.batches):
            self.name_tokens(index, batch.tokens, batch.target_tokens)


def save(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Writes a recording to a file. See :meth:`Recording.save`."""
    with MapWriter(path) as writer:
        writer.describe(recording)
        for index, batch in enumerate(recording.batches):
            for name, maps in batch.items():
                writer.write(index, recording.layers[name], maps)


def load_maps(path: str | os.PathLike[str]) -> Recording:
    """Reads what :meth:`Recording.save` or a :class:`MapWriter` wrote.

    Nothing in the file is ever executed or unpickled.

    Args:
        path: Ends in .safetensors, .npz or .json.

    Returns:
        The recording: on the CPU, without gradients, every map of its own type.

    Raises:
        MapFileError: The file is cut short, holds something else, or was written by a later
            ikattn; the message names the file and the cause.
        FileNotFoundError: There is no such file.
        ModuleNotFoundError: The library that reads this format is missing.

    Example:
        >>> import tempfile, torch, ikattn
        >>> from ikattn.analysis import Batch, Layer, Recording
        >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
        >>> maps = ikattn.Contributions(summed=torch.rand(2, 5, 5))
        >>> batch = Batch({"layer.0": maps})
        >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
        >>> path = tempfile.mkdtemp() + "/maps.npz"
        >>> recording.save(path)
        >>> load_maps(path).model
        'Model'
    """
    read = _choose(Path(path), _READERS)
    if not Path(path).is_file():
        raise FileNotFoundError(2, "there is no such file", os.fspath(path))
    text, arrays = read(Path(path))
    metadata = _checked_metadata(path, text)
    try:
        return _assembled(metadata, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise MapFileError(
            path, f"its metadata and arrays do not fit together ({error})"
        ) from error


# --- What the formats share


def _choose(path: Path, by_suffix: dict[str, Any]) -> Any:
    if path.suffix.lower() not in by_suffix:
        raise ValueError(f"a file of maps must end in {', '.join(by_suffix)}, got {path.name!r}")
    return by_suffix[path.suffix.lower()]


def _arrays(maps: Contributions) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of one layer, by its name in the file."""
    for each in fields(maps):
        found = getattr(maps, each.name)
        if isinstance(found, Tensor):
            yield each.name, found
        elif isinstance(found, dict):
            yield from ((f"{each.name}.{key}", tensor) for key, tensor in found.items())


def _metadata(recording: Recording) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "ikattn_version": ikattn.__version__,
        "model": recording.model,
        "maps": list(recording.maps),
        "definitions": DEFINITIONS,
        "layers": [asdict(layer) for layer in recording.layers.values()],
        "batches": [
            {
                "layers": list(batch),
                "tokens": _lists(batch.tokens),
                "target_tokens": _lists(batch.target_tokens),
            }
            for batch in recording.batches
        ],
    }


def _lists(tokens: Sequence[Sequence[str]] | None) -> list[list[str]] | None:
    return None if tokens is None else [list(sequence) for sequence in tokens]


def _checked_metadata(path: str | os.PathLike[str], text: str | bytes | None) -> dict[str, Any]:
    foreign = MapFileError(path, "this is no file of maps that ikattn wrote")
    if text is None:
        raise foreign
    try:
        metadata = json.loads(text)
    except ValueError:
        raise foreign from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise foreign
    version = metadata.get("format_version")
    if not isinstance(version, int) or version > VERSION:
        raise MapFileError(
            path,
            f"it has version {version} of the format, written by ikattn "
            f"{metadata.get('ikattn_version')}; this ikattn, {ikattn.__version__}, reads up to "
            f"version {VERSION}: upgrade it",
        )
    return metadata


def _assembled(metadata: dict[str, Any], arrays: dict[str, Tensor]) -> Recording:
    """The recording of a file; ValueError and the like where its parts do not fit."""
    layers = {entry["name"]: Layer(**entry) for entry in metadata["layers"]}
    batches = [
        Batch(
            {name: Contributions() for name in entry["layers"]},
            _lists(entry["tokens"]),
            _lists(entry["target_tokens"]),
        )
        for entry in metadata["batches"]
    ]
    recording = Recording(str(metadata["model"]), tuple(metadata["maps"]), layers, batches)
    for name, tensor in arrays.items():
        batch, _, rest = name.partition("/")
        layer, _, map_name = rest.rpartition("/")
        maps = recording.batches[int(batch)].layers[layer]
        map_name, _, key = map_name.partition(".")
        if key:
            getattr(maps, map_name)[key] = tensor
        elif map_name in DEFINITIONS:
            setattr(maps, map_name, tensor)
        else:
            raise ValueError(f"{map_name!r} is the name of no map")
    return recording


class _Sink(Protocol):
    """One format while it is being written."""

    def add(self, name: str, tensor: Tensor) -> None: ...

    def finish(self, metadata: dict[str, Any]) -> None: ...


def raw_bytes(tensor: Tensor) -> memoryview | bytes:
    """The memory of a contiguous CPU tensor; alive as long as the tensor is."""
    if tensor.numel() == 0:
        return b""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# --- .safetensors

_SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
_MAX_HEADER = 100_000_000  # the safetensors library reads no longer one


class _SafetensorsSink:
    """Arrays wait in files without a name, one for each item size; the header has to come first.

    Larger items first is what keeps every array aligned: the format allows no gaps.
    """

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._file, self._path, self._stack = file, path, stack
        self._waiting: dict[int, IO[bytes]] = {}
        self._arrays: dict[int, list[tuple[str, str, list[int], int]]] = {
            8: [],
            4: [],
            2: [],
            1: [],
        }

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.element_size()
        if size not in self._waiting:
            waiting = tempfile.TemporaryFile(dir=self._path.resolve().parent)  # noqa: SIM115
            self._waiting[size] = self._stack.enter_context(waiting)
        tensor = tensor.contiguous()
        entry = (name, _SAFETENSORS_TYPES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        self._arrays[size].append(entry)
        self._waiting[size].write(raw_bytes(tensor))

    def finish(self, metadata: dict[str, Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"ikattn": json.dumps(metadata)}}
        offset = 0
        for entries in self._arrays.values():
            for name, kind, shape, size in entries:
                offsets = [offset, offset + size]
                header[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
                offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER:
            raise ValueError(
                f"{self._path} would need a header of {len(text)} bytes, and safetensors allows "
                f"{_MAX_HEADER}: write .npz, or several files"
            )
        self._file.write(len(text).to_bytes(8, "little") + text)
        for size in self._arrays:
            if waiting := self._waiting.get(size):
                waiting.seek(0)
                shutil.copyfileobj(waiting, self._file, 1 << 20)


def _read_safetensors(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    safetensors = optional("safetensors", "reading .safetensors", "safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("ikattn")
            if text is None:  # it may be a model of any size
                return None, {}
            return text, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise MapFileError(path, f"it is cut short or no safetensors file ({error})") from error


# --- .npz

_METADATA = "metadata.json"


def _import_numpy() -> Any:
    return optional("numpy", "a .npz file", "numpy")


class _NumpySink:
    """A ZIP archive of .npy files, stored as they are; its directory comes last, so it streams."""

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._numpy = _import_numpy()
        self._archive = stack.enter_context(zipfile.ZipFile(file, "w"))
        self._widened: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype == torch.bfloat16:  # which NumPy does not know; float32 holds it exactly
            self._widened[name] = "bfloat16"
            tensor = tensor.float()
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
            array = tensor.contiguous().numpy()
            self._numpy.lib.format.write_array(entry, array, allow_pickle=False)

    def finish(self, metadata: dict[str, Any]) -> None:
        self._archive.writestr(_METADATA, json.dumps(metadata | {"widened": self._widened}))


def _read_npz(path: Path) -> tuple[bytes | None, dict[str, Tensor]]:
    numpy = _import_numpy()
    try:
        with zipfile.ZipFile(path) as archive:
            if _METADATA not in archive.namelist():
                return None, {}
            text = archive.read(_METADATA)
            arrays = {
                name.removesuffix(".npy"): torch.from_numpy(_read_array(numpy, archive, name))
                for name in archive.namelist()
                if name != _METADATA
            }
    except (zipfile.BadZipFile, ValueError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise MapFileError(path, f"it is cut short, damaged or no .npz file ({error})") from error
    try:
        widened = json.loads(text)["widened"]
        for name in widened:
            arrays[name] = arrays[name].to(torch.bfloat16)
    except (KeyError, TypeError, ValueError):
        return None, {}
    return text, arrays


def _read_array(numpy: Any, archive: zipfile.ZipFile, name: str) -> Any:
    with archive.open(name) as entry:
        array = numpy.lib.format.read_array(entry, allow_pickle=False)
        entry.read()  # to the end, where its checksum is compared
        return array


# --- .json


class _JsonSink:
    """One document; numbers with as many digits as it takes to read the same ones back."""

    def __init__(self, file: BinaryIO, path: Path, stack: ExitStack) -> None:
        self._file = file
        self._file.write(b'{"arrays": {')
        self._first = True

    def add(self, name: str, tensor: Tensor) -> None:
        kind = str(tensor.dtype).removeprefix("torch.")
        start = "" if self._first else ","
        head = {"dtype": kind, "shape": list(tensor.shape)}
        self._file.write(f"{start}\n{json.dumps(name)}: {json.dumps(head)[:-1]}, ".encode())
        self._file.write(b'"values": ')
        self._first = False
        text = _number_writer(tensor.dtype)
        self._nest(tensor.tolist(), text)
        self._file.write(b"}")

    def _nest(self, values: Any, text: Callable[[Any], str]) -> None:
        """Rows become text at once, what holds them piece by piece."""
        if not isinstance(values, list):
            self._file.write(text(values).encode())
        elif not values or not isinstance(values[0], list):
            self._file.write(f"[{', '.join(map(text, values))}]".encode())
        else:
            for index, part in enumerate(values):
                self._file.write(b"[" if index == 0 else b", ")
                self._nest(part, text)
            self._file.write(b"]")

    def finish(self, metadata: dict[str, Any]) -> None:
        self._file.write(f'}},\n"metadata": {json.dumps(metadata)}}}\n'.encode())


def _number_writer(dtype: torch.dtype) -> Callable[[Any], str]:
    if dtype == torch.bool or not dtype.is_floating_point:
        return json.dumps
    digits = 17 if dtype == torch.float64 else 9

    def text(number: float) -> str:
        if number == 0:
            return str(number)  # -0.0 keeps its sign, -0 would not
        # JSON has no word for NaN and infinity; as text they are read back all the same.
        return f"{number:.{digits}g}" if math.isfinite(number) else f'"{number}"'

    return text


def _read_json(path: Path) -> tuple[str | None, dict[str, Tensor]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MapFileError(path, f"it is cut short or no JSON ({error})") from error
    if not isinstance(document, dict) or "metadata" not in document or "arrays" not in document:
        return None, {}
    try:
        arrays = {
            name: torch.tensor(_numbers(entry["values"]), dtype=_DTYPES[entry["dtype"]]).reshape(
                entry["shape"]
            )
            for name, entry in document["arrays"].items()
        }
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise MapFileError(path, f"its arrays are damaged ({error})") from error
    return json.dumps(document["metadata"]), arrays


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _SAFETENSORS_TYPES}


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(part) for part in values]
    return float(values) if isinstance(values, str) else values


_SINKS: dict[str, Callable[[BinaryIO, Path, ExitStack], _Sink]] = {
    ".safetensors": _SafetensorsSink,
    ".npz": _NumpySink,
    ".json": _JsonSink,
}
_READERS: dict[str, Callable[[Path], tuple[str | bytes | None, dict[str, Tensor]]]] = {
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".json": _read_json,
}
SUFFIXES: Iterable[str] = tuple(_SINKS)
