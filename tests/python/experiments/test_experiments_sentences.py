"""experiments/sentences.py, run as its readers run it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiment_programs import load, ran, rows_of, write_labelled

sentences = load("sentences")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of data as sentences.py wants it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["a", "good", "bad", "film", "caf\xe9"]
    lines = [f"{' '.join(words[: 1 + i % 5])} ." for i in range(50)]
    for files in sentences.DATA_SETS.values():
        write_labelled(folder, files, lines)
    return folder


@pytest.mark.full
def test_sentences_run_every_attention(tmp_path: Path, texts: Path) -> None:
    options = ["--data", texts, "--quick", "--p", "2", "learned", "--csv", "a.csv"]
    ran("sentences", *options, "--plot", "a.png", cwd=tmp_path)
    runs = rows_of(tmp_path / "a.csv")
    assert len(runs) == 4 * (1 + 4 * 2)
    assert all(0 <= float(run["test_accuracy"]) <= 1 for run in runs)


@pytest.mark.parametrize("label", ["\xb2", "5000000"])
def test_what_cannot_be_a_class_is_named(texts: Path, label: str) -> None:
    path = texts / "subj.all"
    path.write_text(f"1 a film\n{label} a film\n", encoding="latin-1")
    with pytest.raises(ValueError, match=f"subj.all, line 2: .* below 1000, got '{label}'"):
        sentences.read(texts, "subj.all")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_training_validation_and_test_sets_are_disjoint(parts: int) -> None:
    files = [[sentences.Sentence(0, [f"{part}.{i}"]) for i in range(100)] for part in range(parts)]
    for seed in range(2):
        splits = sentences.split(files, seed)
        words = [{sentence.words[0] for sentence in split} for split in splits]
        assert sum(map(len, words)) == len(set.union(*words)) == 100 * parts
        assert all(words)
    if parts > 1:
        assert splits.test == files[-1]


def test_padding_does_not_change_what_a_sentence_is() -> None:
    torch.manual_seed(0)
    model = sentences.Classifier(20, 3, "mikan", "2").eval()
    words = torch.tensor([[3, 5, 7]])
    longer = torch.cat([words, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(words), model(longer))
