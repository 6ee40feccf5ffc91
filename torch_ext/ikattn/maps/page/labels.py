"""Names of models, layers and texts on a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from ikattn.maps.layers import Layer


def short_name(model: str) -> str:
    """Returns the model without the directories above its own: a page travels."""
    kind, _, source = model.partition(" ")
    return f"{kind} {'/'.join(PurePath(source).parts[-2:])}".strip() if source else kind


def layer_labels(layers: Sequence[Layer]) -> list[str]:
    """Numbers layers in the order they ran, each kind on its own."""
    kinds = [
        "cross" if layer.kind == "cross" else {"encoder": "enc", "decoder": "dec"}[layer.side]
        for layer in layers
    ]
    if len(set(kinds)) <= 1:
        return [str(number) for number in range(len(layers))]
    return [f"{kind} {kinds[:position].count(kind)}" for position, kind in enumerate(kinds)]
