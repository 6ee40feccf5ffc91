"""experiments/faithfulness.py, run as its readers run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiment_programs import ran, refusal, write_labelled, write_translations

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.full
def test_every_method_is_measured_for_both_kinds_of_attention(tmp_path: Path) -> None:
    words = ["a", "good", "bad", "film", "very"]
    parts = tuple(f"stsa.binary.{part}" for part in ("train", "dev", "test"))
    write_labelled(tmp_path, parts, [f"{' '.join(words[: 1 + i % 5])} ." for i in range(50)])
    told = ran("faithfulness", "--data", tmp_path, "--quick", cwd=tmp_path)
    assert told.count("decompx") == told.count("gradient x input") == 2


@pytest.mark.full
def test_words_of_translations_are_measured(tmp_path: Path) -> None:
    write_translations(tmp_path)
    told = ran("faithfulness", "--translations", tmp_path, "--quick", cwd=tmp_path)
    assert told.count("rollout:alti") == told.count("cross-attention") == 1


def test_the_file_that_is_missing_is_named(tmp_path: Path) -> None:
    told = refusal("faithfulness", "--data", "nowhere", cwd=tmp_path)
    assert f"{Path('nowhere/stsa.binary.train')} is missing" in told
