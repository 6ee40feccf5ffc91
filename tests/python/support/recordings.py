"""Recordings with random maps, for what stores and shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from ikattn import Contributions
from ikattn.maps import Batch, Layer, Recording

LENGTHS = (5, 3)  # tokens of the two sequences of a batch
HEADS = 2


def random_maps(
    L: int = 5,
    S: int = 5,
    *,
    dtype: torch.dtype = torch.float32,
    padded: bool = True,
    seed: int = 0,
) -> Contributions:
    """Every map a layer can have, of a batch of two whose second sequence is padded."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(2, *shape, generator=generator).to(dtype)

    def padding(size: int) -> torch.Tensor | None:
        kept = torch.tensor([size, LENGTHS[1]])
        return torch.arange(size) >= kept[:, None] if padded else None

    maps = Contributions(
        value_norms=draw(HEADS, S),
        summed=draw(L, S),
        with_residual=draw(L, S),
        with_norm=draw(L, S),
        encoder=draw(L, S),
        mixing_ratio={"summed": draw(L), "encoder": draw(L)},
        weights=draw(HEADS, L, S),
        similarity=draw(HEADS, L, S),
        magnitude=draw(HEADS, S),
        query_padding=padding(L),
        key_padding=padding(S),
    )
    assert maps.weights is not None
    assert maps.value_norms is not None
    return replace(maps, per_head=maps.weights * maps.value_norms.unsqueeze(-2))


def tokens_of(prefix: str) -> list[list[str]]:
    return [[f"{prefix}{position}" for position in range(length)] for length in LENGTHS]


def recording_of(
    layers: Mapping[str, Contributions] | None = None,
    *,
    heads: int = 1,
    kind: Literal["self", "cross"] = "self",
    **maps: torch.Tensor,
) -> Recording:
    """Returns one call of these layers, or of a layer "layer" with these maps."""
    layers = {"layer": Contributions(**maps)} if layers is None else layers  # type: ignore[arg-type]
    known = {name: Layer(name, kind, "encoder", heads, "post", "bert") for name in layers}
    return Recording("Model", tuple(maps), known, [Batch(dict(layers))])


def encoder_recording(layers: int = 2, batches: int = 1, **options: object) -> Recording:
    """Returns a recording of an encoder, each batch of two sequences."""
    known = {
        f"encoder.layer.{i}.attention.self": Layer(
            f"encoder.layer.{i}.attention.self", "self", "encoder", HEADS, "post", "bert"
        )
        for i in range(layers)
    }
    return Recording(
        "BertModel some/where/tiny",
        ("summed", "weights"),
        known,
        [
            Batch(
                {
                    name: random_maps(seed=10 * b + i, **options)  # type: ignore[arg-type]
                    for i, name in enumerate(known)
                },
                tokens_of(f"b{b}t"),
            )
            for b in range(batches)
        ],
    )


def translation_recording() -> Recording:
    """Returns a recording of a translation: four target tokens read five of the source."""
    known = {
        "encoder": Layer("encoder", "self", "encoder", HEADS, "post", "marian"),
        "decoder": Layer("decoder", "self", "decoder", HEADS, "post", "marian"),
        "cross": Layer("cross", "cross", "decoder", HEADS, "post", "marian"),
    }
    maps = {
        "encoder": random_maps(5, 5),
        "decoder": random_maps(4, 4, seed=1),
        "cross": random_maps(4, 5, seed=2),
    }
    target = [["</s>", "ein", "kleines", "Tier"], ["</s>", "ein", "Haus"]]
    return Recording("Marian", ("summed",), known, [Batch(maps, tokens_of("s"), target)])
