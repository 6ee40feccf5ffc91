"""A small corpus, what ``python -m ikattn analyze`` makes of it, and how results are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ikattn import cli
from ikattn.explain import CorpusSums

WORDS = ("water", "the animal was tired .", "", "it", "she poured the water because it was")
LINES = [WORDS[i % 5] for i in range(40)]
LAYER = "encoder.layer.1.attention.self"
RESULTS = ("--maps", "weights,summed,mixing_ratio", "--part-lines", 4)


def analyze(*arguments: object) -> int:
    return cli.main(["analyze", *map(str, arguments)])


def of_parts(formats: str) -> tuple[object, ...]:
    """RESULTS, without the size of parts where no format has any."""
    return RESULTS if "sums" in formats else RESULTS[:2]


def entries_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def assert_same_sums(one: Path, other: Path, sequences: int = sum(map(bool, LINES))) -> None:
    mine, theirs = (CorpusSums.load(folder / "sums.npz") for folder in (one, other))
    assert mine.sequences == theirs.sequences == sequences
    for layer, maps in mine.sums.items():
        for name, sums in maps.items():
            for key, x in sums.items():
                torch.testing.assert_close(x, theirs.sums[layer][name][key], rtol=0, atol=0)


def assert_each_line_once(folder: Path, lines: int = len(LINES)) -> None:
    assert sorted(entry["line"] for entry in entries_in(folder)) == list(range(1, lines + 1))
    assert not list(folder.glob(".ikattn-*"))


def write_alone(bert: Path, out: Path) -> tuple[Path, Path]:
    """The text as a file, and what one process writes."""
    text = out / "text.txt"
    text.write_text("".join(line + "\n" for line in LINES))
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums,npz")
    assert analyze(*arguments, "--out", out / "alone") == 0
    return text, out / "alone"
