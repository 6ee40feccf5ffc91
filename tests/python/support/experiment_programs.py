"""Runs the programs of experiments/ and reads what they wrote."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from programs import run_python

for library in ("tqdm", "matplotlib", "sacrebleu", "tokenizers"):
    pytest.importorskip(library, reason="the experiments: pip install 'ikattn[experiments]'")

ATTENTIONS = ["softmax", "rbf", "direct", "ikan", "mikan"]


def run(
    source_tree: Path, name: str, *arguments: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = source_tree / "experiments" / name
    return run_python(path, *arguments, cwd=cwd, **environment)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
