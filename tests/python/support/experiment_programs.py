"""Runs the programs of experiments/ and reads what they wrote."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from programs import import_program, run_python

for library in ("tqdm", "matplotlib", "sacrebleu", "tokenizers"):
    pytest.importorskip(library, reason="the experiments: pip install 'ikattn[experiments]'")

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"
ATTENTIONS = ["softmax", "rbf", "direct", "ikan", "mikan"]


def load(name: str) -> ModuleType:
    return import_program(EXPERIMENTS / f"{name}.py")


def run(
    name: str, *arguments: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return run_python(EXPERIMENTS / f"{name}.py", *arguments, cwd=cwd, **environment)


def ran(name: str, *arguments: object, cwd: Path) -> str:
    """Runs a program that must end well, with the picture that it was asked for; what it says."""
    done = run(name, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    if "--plot" in arguments:
        assert (cwd / str(arguments[arguments.index("--plot") + 1])).stat().st_size > 10_000
    return done.stdout


def refusal(name: str, *arguments: object, cwd: Path) -> str:
    """Runs a program that must refuse, in words and without a traceback."""
    done = run(name, *arguments, cwd=cwd)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_labelled(folder: Path, names: tuple[str, ...], lines: list[str]) -> None:
    """Writes texts of two classes, line by line."""
    text = "".join(f"{i % 2} {line}\n" for i, line in enumerate(lines))
    for name in names:
        (folder / name).write_text(text, encoding="latin-1")


def write_translations(folder: Path) -> None:
    """Writes captions in two languages, for training and for tests."""
    for part, count in (("train", 40), ("val", 8), ("test_2016_flickr", 12)):
        for language in ("de", "en"):
            text = "".join(f"{language} wort {i % 7} {i % 5} .\n" for i in range(count))
            (folder / f"{part}.lc.norm.tok.{language}").write_text(text)
