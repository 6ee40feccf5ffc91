"""Maps written to a folder, one file a layer, while the model goes on with the next layer."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ikattn.maps import files
from ikattn.maps.contribution_maps import Contributions
from ikattn.maps.layers import Batch, Layer, RecordedMaps

LONGEST_NAME = 180  # of a layer, in a file's name


class LayerWriter:
    """Writes each layer's maps to a file of its own, in a thread beside the model's.

    A writer is for one recording. A file appears under its name when it is whole, and stays,
    whatever happens later. A layer waits where ``waiting`` others wait for the disk.

    Files are ``call-number-layer``, such as ``000000-003-encoder.layer.3.attention.self.npz``:
    sorted by name they stand as they ran. Characters of a layer's name that file systems do not
    have are written as in an address (%2F). :func:`ikattn.load_maps` reads each.

    Args:
        folder: Where files go; it is made. Files of the same names are replaced, others stay.
        suffix: .safetensors, .npz or .json, as :meth:`Recording.save` has them.
        waiting: How many layers may wait, at least 1.

    Attributes:
        written: The files that are complete, in order.

    Raises:
        ValueError: Another suffix, or waiting is less than 1.
        OSError: The folder cannot be made. From the next ``write``, or at the end of the block: a
            file cannot be written or the disk is full. The message names the file, and says what
            is complete; layers after it are not written.
        RuntimeError: ``write`` outside of the writer's block.

    Example:
        >>> import tempfile, torch, ikattn
        >>> from ikattn.maps import LayerWriter
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> with LayerWriter(tempfile.mkdtemp()) as writer:
        ...     with torch.no_grad(), ikattn.record(model, on_layer=writer.write):
        ...         output = model(torch.randn(2, 7, 16))
        >>> [path.name for path in writer.written]
        ['000000-000-layers.0.self_attn.safetensors', '000000-001-layers.1.self_attn.safetensors']
        >>> ikattn.load_maps(writer.written[1])["layers.1.self_attn"].summed.shape
        torch.Size([2, 7, 7])
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, suffix: str = ".safetensors", waiting: int = 2
    ) -> None:
        if suffix not in files.SUFFIXES:
            raise ValueError(
                f"LayerWriter: suffix must be one of {', '.join(files.SUFFIXES)}, got {suffix!r}"
            )
        if waiting < 1:
            raise ValueError(f"LayerWriter: waiting must be 1 or more, got {waiting}")
        self.folder, self.written = Path(folder), list[Path]()
        self._suffix = suffix
        self._jobs: queue.Queue[tuple[Path, RecordedMaps] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._failure: tuple[Path, BaseException] | None = None
        self._is_told = False
        self._model, self._maps = "", tuple[str, ...]()
        self._counts: dict[int, int] = {}  # layers of each call
        self._lock = threading.Lock()

    def __enter__(self) -> LayerWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._failure, self._is_told = None, False
        self._thread = threading.Thread(target=self._run, name="ikattn-layers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Waits for the layers that were handed over; those are complete after an error, too."""
        thread, self._thread = self._thread, None
        assert thread is not None
        self._jobs.put(None)
        thread.join()
        if raised[0] is None and not self._is_told:
            self._check()

    def describe(self, recording: RecordedMaps) -> None:
        """Notes a recording's model and maps, which files after this then hold.

        ``ikattn.record(on_layer=writer.write)`` calls it.
        """
        self._model, self._maps = recording.model, tuple(recording.maps)

    def write(self, batch: int, layer: Layer, maps: Contributions) -> None:
        """Hands over the maps of one layer; fits ``ikattn.record``'s ``on_layer``.

        They must not change until the block has ended.
        """
        if self._thread is None:
            raise RuntimeError(
                "LayerWriter.write: use the writer as `with LayerWriter(folder) as writer`"
            )
        self._check()
        with self._lock:
            number = self._counts[batch] = self._counts.get(batch, -1) + 1
        safe = quote(layer.name, safe=" #")[:LONGEST_NAME]
        name = f"{batch:06d}-{number:03d}-{safe}{self._suffix}"
        call = Batch({layer.name: maps})
        only = RecordedMaps(self._model, self._maps, {layer.name: layer}, [call])
        self._jobs.put((self.folder / name, only))

    def _check(self) -> None:
        if self._failure is None:
            return
        self._is_told, (path, error) = True, self._failure
        where = f"{len(self.written)} files are complete in {self.folder}"
        if self.written:
            where += f", the last {self.written[-1].name}"
        what = f"LayerWriter: {path}: {getattr(error, 'strerror', None) or error}; {where}"
        if isinstance(error, OSError):
            raise OSError(error.errno, what) from error
        raise RuntimeError(what) from error

    def _run(self) -> None:
        """The thread that writes; after an error it lets go of what comes."""
        while (job := self._jobs.get()) is not None:
            path, recording = job
            try:
                if self._failure is None:
                    files.save(recording, path)
                    self.written.append(path)
            except BaseException as error:  # told by the thread that runs the model
                self._failure = path, error
            del job, recording  # maps, which would wait with this thread for the next
