"""experiments/faithfulness.py, run as its readers run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiment_programs import run

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.full
def test_every_method_is_measured_for_both_kinds_of_attention(source_tree, tmp_path):
    words = ["a", "good", "bad", "film", "very"]
    for part in ("train", "dev", "test"):
        lines = [f"{i % 2} {' '.join(words[: 1 + i % 5])} ." for i in range(50)]
        (tmp_path / f"stsa.binary.{part}").write_text("\n".join(lines) + "\n")
    result = run(source_tree, "faithfulness.py", "--data", tmp_path, "--quick", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("decompx") == result.stdout.count("gradient x input") == 2


@pytest.mark.full
def test_words_of_translations_are_measured(source_tree: Path, tmp_path: Path) -> None:
    for part, count in (("train", 40), ("val", 8), ("test_2016_flickr", 12)):
        for language in ("de", "en"):
            lines = [f"{language} wort {i % 7} {i % 5} ." for i in range(count)]
            (tmp_path / f"{part}.lc.norm.tok.{language}").write_text("\n".join(lines) + "\n")
    result = run(
        source_tree, "faithfulness.py", "--translations", tmp_path, "--quick", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("rollout:alti") == result.stdout.count("cross-attention") == 1


def test_the_file_that_is_missing_is_named(source_tree: Path, tmp_path: Path) -> None:
    result = run(source_tree, "faithfulness.py", "--data", "nowhere", cwd=tmp_path)
    assert result.returncode == 1
    assert f"{Path('nowhere/stsa.binary.train')} is missing" in result.stderr
