"""A recording: maps that can be saved, and looked at as a page or as pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ikattn._whole_files import whole_file
from ikattn.maps import files, page, pictures
from ikattn.maps.beams import followed_beams
from ikattn.maps.edges import EdgeMaps
from ikattn.maps.joined import groups_of_calls, joined_calls, with_encoders
from ikattn.maps.layers import RecordedMaps, check_whole
from ikattn.maps.page.notebook import notebook_view
from ikattn.maps.sequences import sequence_count, tokens_by_call
from ikattn.maps.tokens import Tokens


@dataclass
class Recording(RecordedMaps):
    """The maps of a model's attention over one or more forward calls.

    Attributes:
        model: The model's class, and its name or path where it has one.
        maps: The names of the maps that were asked for.
        layers: What is known of each layer, in the order they first ran.
        batches: One entry for each forward call; on a GPU, maps on their way are awaited.
        left_out: Names of attention that the model has and that is not recorded.
        graphs: The maps of layers that attend over the edges of a graph, by their names: one entry
            for each forward call. Files and pages do not hold them; ``EdgeMaps.save`` does.
    """

    graphs: list[dict[str, EdgeMaps]] = field(default_factory=list)

    @property
    def edges(self) -> dict[str, EdgeMaps]:
        """The maps of layers that attend over a graph, where one forward call was recorded.

        Of several calls ``recording.graphs[i]`` has them; here they are a LookupError.
        """
        if len(self.graphs) != 1:
            raise LookupError(
                f"{len(self.graphs)} forward calls over a graph were recorded: "
                "take recording.graphs[i] of one of them"
            )
        return self.graphs[0]

    def joined(self, beam_indices: Tensor | None = None) -> Recording:
        """The calls of one sequence, such as those of ``generate``, as one call.

        Rows of a call that goes on from a cache come below those of the call before it, whose
        missing columns are 0; what every key has alone, such as value norms, is that of the last
        call. An encoder's call and those of the decoder that reads it are one. Calls that begin
        anew stay apart.

        Args:
            beam_indices: ``[N, steps]`` of a beam search, as ``generate`` gives them with
                ``return_dict_in_generate=True, output_scores=True``: the joined call then has the N
                sequences that came out. Steps after a sequence's end (-1) are padding.

        Raises:
            ValueError: Maps were reduced, or are of some queries alone. Sequences changed their
                places between calls, as those of a beam search do, and no beam_indices were given;
                or these do not fit the calls. Places are told by ``value_norms``; of several
                sequences without it there is a warning.

        Example:
            >>> import torch, ikattn
            >>> from ikattn.maps import Batch, Layer, Recording
            >>> layer = Layer("layer", "self", "decoder", 1, "none", "torch")
            >>> steps = [Batch({"layer": ikattn.Contributions(summed=torch.ones(1, L, S))})
            ...          for L, S in ((3, 3), (1, 4), (1, 5))]
            >>> Recording("Model", ("summed",), {"layer": layer}, steps).joined().batches[0][
            ...     "layer"].summed.shape
            torch.Size([1, 5, 5])
        """
        for batch in self.batches:
            for name, maps in batch.items():
                check_whole(maps, name, "joined")
        groups = groups_of_calls(self)
        if beam_indices is not None:
            counts = [sequence_count(group[0].values()) for group in groups]
            groups = [  # an encoder runs before its texts are repeated for the beams
                followed_beams(self.layers, group, beam_indices // max(1, max(counts) // count))
                for group, count in zip(groups, counts, strict=True)
            ]
        batches = [joined_calls(self.layers, group) for group in groups]
        batches = with_encoders(self.layers, batches)
        return Recording(self.model, self.maps, self.layers, batches, self.left_out)

    def save(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | None = None,
        target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
    ) -> None:
        """Writes the maps to a file, which appears whole or not at all.

        The file keeps tokens, and the ids that calls were made with: a recording that is loaded
        names its tokens, or lets a tokenizer name them.

        Args:
            path: Ends in .safetensors, .npz (needs NumPy) or .json. Read it back with
                :func:`ikattn.load_maps`. To write while a model runs, take
                :class:`ikattn.maps.MapWriter`.
            tokens, target_tokens: As in :meth:`to_html`: lists, or a tokenizer.

        Raises:
            ValueError: Another ending, or tokens that do not match the maps.
            LookupError: Nothing was recorded.
            OSError: The path cannot be written, or the disk is full.
        """
        self.check_recorded()
        named = tokens_by_call(self, tokens, target_tokens)
        batches = [
            replace(batch, tokens=own, target_tokens=of_target)
            for batch, (own, of_target) in zip(self.batches, named, strict=True)
        ]
        files.save(replace(self, batches=batches), path)

    def to_html(
        self,
        path: str | os.PathLike[str],
        tokens: Tokens | None = None,
        target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
        *,
        title: str | None = None,
    ) -> int:
        """Writes a page to look at: one file that asks for nothing from outside.

        Args:
            path: Of the page.
            tokens: For each sequence, over all batches, its tokens without padding; of a single
                sequence the tokens themselves. None: as recorded, or numbers.
            target_tokens: Likewise, those a decoder reads.
            title: None: the model's name.

        Returns:
            The size of the page in bytes: 2.7 for each number that it shows.

        Raises:
            ValueError: Tokens that do not match the maps, or nothing was recorded.
            OSError: The path cannot be written, or the disk is full.

        Example:
            >>> import tempfile, torch, ikattn
            >>> from ikattn.maps import Batch, Layer, Recording
            >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
            >>> batch = Batch({"layer.0": ikattn.Contributions(summed=torch.rand(1, 3, 3))})
            >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
            >>> path = tempfile.mkdtemp() + "/maps.html"
            >>> recording.to_html(path, tokens=["a", "b", "c"]) == len(open(path, "rb").read())
            True
        """
        with whole_file(path) as file:
            page.write_page(file, self, tokens, target_tokens, title=title)
            return file.tell()

    def _repr_html_(self) -> str:
        """Returns the page for a notebook, or a table where the page would take more than 2 MB."""
        return notebook_view(self, len(self.graphs))

    def plot(
        self,
        path: str | os.PathLike[str],
        layer: str | int | None = None,
        map: str | None = None,
        batch: int = 0,
        sequence: int = 0,
        tokens: Tokens | None = None,
        target_tokens: Sequence[Sequence[str]] | Sequence[str] | None = None,
        *,
        dpi: int = 160,
    ) -> None:
        """Draws heat maps with matplotlib, the attention weights beside the map.

        Args:
            path: Ends in .png, .svg or .pdf.
            layer: A layer's name or number for one large pair of heat maps; None: every layer.
            map: A map of queries and keys, for example "alti"; "weights" alone stands alone.
                Those of each head are averaged over the heads. None: "summed", or the only one
                that was recorded beside the weights.
            batch, sequence: Which sequence.
            tokens: Its tokens without padding, or a list of one such list. None: as recorded, or
                numbers.
            target_tokens: Likewise, those a decoder reads.
            dpi: Pixels per inch of a .png.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            ValueError: A map, layer, sequence or number of tokens that does not fit.
            OSError: The path cannot be written, or the disk is full.

        Example:
            >>> import tempfile, torch, ikattn
            >>> from ikattn.maps import Batch, Layer, Recording
            >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
            >>> batch = Batch({"layer.0": ikattn.Contributions(summed=torch.rand(1, 3, 3))})
            >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
            >>> recording.plot(tempfile.mkdtemp() + "/layer.png", layer=0, tokens=["a", "b", "c"])
        """
        pictures.draw(self, path, layer, map, batch, sequence, tokens, target_tokens, dpi=dpi)


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
        >>> from ikattn.maps import Batch, Layer, Recording
        >>> layer = Layer("layer.0", "self", "encoder", 4, "post", "bert")
        >>> maps = ikattn.Contributions(summed=torch.rand(2, 5, 5))
        >>> batch = Batch({"layer.0": maps})
        >>> recording = Recording("Model", ("summed",), {"layer.0": layer}, [batch])
        >>> path = tempfile.mkdtemp() + "/maps.npz"
        >>> recording.save(path)
        >>> load_maps(path).model
        'Model'
    """
    read = files.load(path)
    return Recording(read.model, read.maps, read.layers, read.batches, read.left_out)
