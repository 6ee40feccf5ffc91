"""One model's maps on a fixed batch, as a few numbers for each layer, while it trains."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ikattn.explain.comparison._distances import ROW_MAPS, Sums, add_to, row_sums
from ikattn.maps.page.labels import layer_labels
from ikattn.maps.sequences import cut, sequence_count
from ikattn.nn.selection import Selection
from ikattn.recorder.entry import record

Inputs: TypeAlias = "Tensor | Mapping[str, Any]"
"""A model's only argument, or its keyword arguments by name."""

_MEASURES = {"entropy": "entropy_b", "drift": "total_variation"}


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Calls a model with tensors on its device, those of floating point in its dtype."""
    device = next((p.device for p in model.parameters()), None)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype if x.is_floating_point() else None)

    if isinstance(inputs, Tensor):
        return model(moved(inputs))
    return model(**{name: moved(x) for name, x in inputs.items()})


class MapProbe:
    """Gives, for each layer and map, a few numbers of a fixed batch, and how far they drifted.

    Called with a model it returns a dictionary like::

        {"ikattn/layer.3/summed/entropy": 2.1,        # of rows, in bits
         "ikattn/layer.3/summed/mixing_ratio": 0.3,   # where the map has one
         "ikattn/layer.3/summed/drift": 0.05}         # total variation from the first call's rows

    all averaged over tokens that are no padding, and over heads. Layers are numbered in the order
    they run, as ``enc.0``, ``dec.0`` and ``cross.0`` where there are several kinds. The model runs
    once, in eval mode and without gradients, and training gives the same bits with and without it.

    Args:
        inputs: A tensor, or the model's keyword arguments: a small batch, since the maps of the
            first call are held on the CPU.
        maps: Names of maps of pairs; each layer gives those it has.
        layers: A selection of layers, as for ``ikattn.record``.
        forward: Called with the model and the inputs in place of ``model(...)``, for a model whose
            maps another method makes.

    Raises:
        ValueError: A name is no map of pairs.

    Source: S. Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy
    Collapse", ICML 2023, for the entropy of weights as a sign of training that fails.

    Example:
        >>> import torch, ikattn
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> probe = ikattn.explain.MapProbe(torch.randn(3, 5, 16))
        >>> probe(model)["ikattn/layer.1/weights/drift"]
        0.0
    """

    def __init__(
        self,
        inputs: Inputs,
        *,
        maps: Iterable[str] = ("weights", "summed"),
        layers: Selection | None = None,
        forward: Callable[[Any, Any], Any] = call,
    ) -> None:
        self._inputs = inputs
        self._maps = (maps,) if isinstance(maps, str) else tuple(maps)
        self._layers = layers
        self._forward = forward
        self._first: dict[tuple[str, str], list[Tensor]] = {}
        if unknown := [name for name in self._maps if name not in ROW_MAPS]:
            raise ValueError(
                f"MapProbe: maps must be names out of {', '.join(ROW_MAPS)}, got {unknown[0]!r}"
            )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Measures the model as it is now, which must have whole parameters.

        Errors are those of ``ikattn.record``, and a NotImplementedError where parameters are
        sharded.
        """
        _check_whole(model)
        with as_it_was(model), torch.no_grad():
            model.eval()
            with record(model, "all", layers=self._layers) as recording:
                self._forward(model, self._inputs)
        if not recording.batches:
            raise NotImplementedError(
                f"MapProbe: {type(model).__name__} ran no attention over pairs of tokens, and "
                f"{len(recording.graphs)} calls over the edges of a graph, whose maps are others"
            )
        layers = list(recording.layers.values())
        found: dict[str, float] = {}
        for layer, label in zip(layers, layer_labels(layers), strict=True):
            own = [batch[layer.name] for batch in recording.batches if layer.name in batch]
            now = [cut(maps, i) for maps in own for i in range(sequence_count([maps]))]
            name = label.replace(" ", ".") if " " in label else f"layer.{label}"
            for map in self._maps:
                rows = [getattr(one, map) for one in now]
                if any(x is None for x in rows):
                    continue
                first = self._first.setdefault((layer.name, map), rows)
                ratios = [one.mixing_ratio[map] for one in now if map in one.mixing_ratio]
                for measure, value in _measures(first, rows, ratios).items():
                    found[f"ikattn/{name}/{map}/{measure}"] = value
        return found


def _measures(first: list[Tensor], now: list[Tensor], ratios: list[Tensor]) -> dict[str, float]:
    """Measures one layer's map: a tensor of each sequence, without padding."""
    sums: Sums = {}
    for before, after in zip(first, now, strict=True):
        add_to(sums, row_sums(before, after, ranks=False))
    found = {name: float((sums[x] / sums["rows"]).nanmean()) for name, x in _MEASURES.items()}
    if ratios:
        found["mixing_ratio"] = float(torch.cat(ratios).double().mean())
    return found


def _check_whole(model: nn.Module) -> None:
    is_sharded = any(
        type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters()
    )
    if is_sharded or any("FullySharded" in type(m).__name__ for m in model.modules()):
        raise NotImplementedError(
            "MapProbe: the model's parameters are sharded over processes, so that one of them "
            "cannot run it alone; probe a copy with whole parameters"
        )


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Puts back what a call in the block changes: modules' attributes, buffers, random numbers."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    attributes += [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.is_cuda}
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(of_python)
        if numpy:
            numpy.random.set_state(of_numpy)
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        with torch.no_grad():
            for buffer, kept in buffers:
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)
