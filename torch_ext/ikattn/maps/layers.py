"""The data of a recording: for every forward call, the maps of every layer of attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from ikattn.maps.contribution_maps import Contributions


@dataclass(frozen=True)
class Layer:
    """One layer of attention, as a recording knows it.

    Attributes:
        name: Its module's name in the model; ``name#2`` for the second run of a shared module.
        kind: Whether queries and keys are the same tokens.
        side: Which part of the model it belongs to.
        heads: H.
        block: Where the block normalises: after the residual sum ("post"), before the attention
            ("pre"), or nobody told ("none": the attention stands alone).
        family: The resolver that found its parts, for example "bert".
    """

    name: str
    kind: Literal["self", "cross"]
    side: Literal["encoder", "decoder"]
    heads: int
    block: Literal["post", "pre", "none"]
    family: str


@dataclass
class Batch(Mapping[str, Contributions]):
    """The maps of one forward call, by layer name in the order the layers ran, or by number.

    Attributes:
        layers: The maps.
        tokens: For each sequence of the batch its tokens, without padding; None: unknown. Those
            that a decoder reads are in target_tokens.
        target_tokens: Likewise for the decoder of a sequence-to-sequence model.
        input_ids, input_mask: What the call was made with, ``[B, S]``, and where it is no padding;
            None where it was made without.
        target_ids, target_mask: Likewise, of the decoder.
        begins: How many tokens of a cache the call went on from; None: it was given no cache.
    """

    layers: dict[str, Contributions] = field(default_factory=dict)
    tokens: Sequence[Sequence[str]] | None = None
    target_tokens: Sequence[Sequence[str]] | None = None
    input_ids: Tensor | None = field(default=None, compare=False, repr=False)
    input_mask: Tensor | None = field(default=None, compare=False, repr=False)
    target_ids: Tensor | None = field(default=None, compare=False, repr=False)
    target_mask: Tensor | None = field(default=None, compare=False, repr=False)
    begins: int | None = field(default=None, compare=False, repr=False)

    def __getitem__(self, name: str | int) -> Contributions:
        """The maps of a layer, by its name, or its number in the order in which layers ran."""
        return self.layers[name_of_layer(self.layers, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def name_of_layer(names: Collection[str], layer: str | int) -> str:
    """The name of a layer that is given by name or number; KeyError says which there are."""
    if isinstance(layer, int) and -len(names) <= layer < len(names):
        return list(names)[layer]
    if layer not in names:
        numbers = f", numbers 0 to {len(names) - 1}" if names else ""
        known = ", ".join(names) or "none"
        raise KeyError(f"no layer {layer!r} was recorded; there are {known}{numbers}")
    return str(layer)


def check_whole(maps: Contributions, layer: str, caller: str, *, rows_too: bool = True) -> None:
    """Raises ValueError where a layer's maps were reduced, or (``rows_too``) are of some queries.

    caller: What needs them whole, for the message.
    """
    if maps.reduced:
        raise ValueError(
            f"{caller}: maps of layer {layer!r} were reduced as they were made, and their rows are "
            "not there; record without reduce="
        )
    if rows_too and maps.rows is not None:
        raise ValueError(
            f"{caller}: maps of layer {layer!r} hold the rows of {len(maps.rows)} chosen queries "
            "alone; record without queries="
        )


_AWAIT = "_await_batches"


@dataclass
class RecordedMaps:
    """The data of a :class:`Recording`, which tells what its fields are."""

    model: str
    maps: tuple[str, ...]
    layers: dict[str, Layer] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.layers, self.batches = dict(self.layers), list(self.batches)

    def __getattribute__(self, name: str) -> Any:
        """Awaits layers and batches that are on their way where somebody looks at them."""
        if name in ("layers", "batches"):
            awaited = self.__dict__.get(_AWAIT)
            if awaited is not None:
                awaited()
        return super().__getattribute__(name)

    def keep(self, batch: Batch) -> None:
        """Adds the maps of a forward call, which are there."""
        self.__dict__["batches"].append(batch)

    def keep_layers(self, layers: Mapping[str, Layer]) -> None:
        """Adds what is known of layers, but for those that are there."""
        known = self.__dict__["layers"]
        for name, layer in layers.items():
            known.setdefault(name, layer)

    def await_batches_by(self, call: Callable[[], None] | None) -> None:
        """Sets what is called before somebody looks at layers or batches; None: nothing."""
        self.__dict__[_AWAIT] = call

    def __getstate__(self) -> dict[str, Any]:
        self.batches  # noqa: B018  (awaits them)
        return {name: value for name, value in self.__dict__.items() if name != _AWAIT}

    @property
    def names(self) -> list[str]:
        """The layers of attention, in the order they ran."""
        return list(self.layers)

    def __iter__(self) -> Iterator[str]:
        """Goes over the names of layers, in the order they ran."""
        return iter(self.layers)

    def __getitem__(self, name: str | int) -> Contributions:
        """The maps of one layer, by name or number, where one forward call was recorded.

        KeyError names the layers that there are; LookupError tells of none or several calls, of
        which ``recording.batches[i][name]`` takes one.
        """
        if self.layers:
            name = name_of_layer(self.layers, name)
        self.check_recorded()
        if len(self.batches) != 1:
            raise LookupError(
                f"{len(self.batches)} forward calls were recorded: "
                "take recording.batches[i][name] of one of them"
            )
        return self.batches[0][name]

    def check_recorded(self) -> None:
        """Raises LookupError if there are no maps."""
        if not self.batches and self.layers:
            raise LookupError("this recording keeps no maps: they were handed to on_layer")
        if not self.batches:
            raise LookupError("nothing was recorded: call the model inside the block of record")
