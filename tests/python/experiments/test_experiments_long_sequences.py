"""experiments/long_sequences.py, its tasks held to plain evaluators."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiment_programs import load, rows_of

MEASURES = {
    "lists": ["inner lists", "outermost list"],
    "texts": ["texts"],
    "copy-sort": ["copied", "sorted"],
}
tasks, program, training = (load(f"long_{name}") for name in ("tasks", "sequences", "training"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with sentences of two classes."""
    lines = [f"{number % 2} sentence {number} of class {number % 2}" for number in range(80)]
    (tmp_path / "subj.all").write_text("\n".join(lines) + "\n")
    return tmp_path


def value_of(words: list[str]) -> int:
    """Evaluates a list as it is written, from the front: an operator, arguments, a bracket."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    values = []
    while words[0] != "]":
        values.append(value_of(words))
    words.pop(0)
    ordered = sorted(values)
    half = len(ordered) // 2
    middle = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
    return {"MIN": ordered[0], "MAX": ordered[-1], "MED": middle, "SM": sum(values) % 10}[word]


@pytest.mark.parametrize("length", [4, 5, 13, 25, 124, 500, 2000])
def test_every_list_has_the_value_that_a_plain_evaluator_gives_it(length: int) -> None:
    batch = tasks.Lists().draw(3, length, np.random.default_rng(length))
    names = [*map(str, range(10)), *tasks.OPERATORS, "]"]
    assert batch.tokens.shape == (3, length)
    for tokens, targets, asked in zip(*batch, strict=True):
        words = [names[token % tasks.SYMBOLS] for token in tokens.tolist()]
        opened, level, deepest = [], -1, 0
        for place, word in enumerate(words):
            level += word in tasks.OPERATORS
            here = level if word in (*tasks.OPERATORS, "]") else level + 1
            assert tokens[place] // tasks.SYMBOLS == here
            deepest = max(deepest, level + 1)
            if word in tasks.OPERATORS:
                opened.append(place)
            if word != "]":
                assert targets[place] == tasks.NOT_ASKED
                assert asked[place] == -1
                continue
            level -= 1
            written = words[opened.pop() : place + 1]
            assert targets[place] == value_of(written)
            assert asked[place] == (1 if place == length - 1 else 0)
        assert opened == []
        assert deepest <= tasks.DEEPEST


def test_lists_have_two_to_ten_arguments_at_any_length() -> None:
    random = np.random.default_rng(0)
    for depth in range(1, 5):
        largest = tasks.capacity(depth) - 2
        for tokens in {*range(2, min(largest, 60)), largest}:
            sizes = tasks.split_tokens(tokens, depth, random)
            assert sum(sizes) == tokens
            assert 2 <= len(sizes) <= tasks.MOST_ARGUMENTS
            assert all(size == 1 or 4 <= size <= tasks.capacity(depth - 1) for size in sizes)


def test_half_of_a_sequence_is_asked_for_as_it_came_or_sorted() -> None:
    tokens, targets, asked = tasks.CopyAndSort().draw(4, 64, np.random.default_rng(0))
    assert (targets[:, :32] == tasks.NOT_ASKED).all()
    assert (asked[:, :32] == -1).all()
    for row in range(4):
        numbers, expected = tokens[row, :32], targets[row, 32:]
        instruction = tasks.COPY if row % 2 == 0 else tasks.SORT
        assert (tokens[row, 32:] == instruction).all()
        assert torch.equal(expected, numbers if row % 2 == 0 else numbers.sort().values)
        assert (asked[row, 32:] == row % 2).all()


def test_texts_are_sentences_of_one_class_and_of_one_part(data: Path) -> None:
    parts = tasks.split_texts(tasks.read_sentences(data, "subj.all"), 0)
    owned = [{s for own in part.sentences for s in own} for part in parts]
    assert sum(map(len, owned)) == len(set.union(*owned)) == 80
    assert [len(own) for own in owned] == [64, 8, 8]
    for part, own in zip(parts, owned, strict=True):
        batch = part.draw(4, 200, np.random.default_rng(0))
        for tokens, label in zip(batch.tokens, batch.targets, strict=True):
            *whole, _ = bytes(tokens.tolist()).split(b"\n")
            assert whole
            assert set(whole) <= own
            assert all(sentence.endswith(b"class %d" % label) for sentence in whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 a sentence\n", "line 1: expected 0 or 1 and a sentence, got b'2 a sentence'"),
        ("0 one\n1\n", "line 2: expected 0 or 1 and a sentence"),
        ("0 one\n1 two\n", "expected 30 sentences of each label, got 1 and 1"),
    ],
)
def test_sentences_that_are_none_are_named(tmp_path, text, message):
    (tmp_path / "subj.all").write_text(text)
    with pytest.raises(ValueError, match=message):
        tasks.read_sentences(tmp_path, "subj.all")


@pytest.mark.parametrize("p", ["none", "2", "learned"])
def test_the_kernel_with_places_depends_on_their_distance(p: str) -> None:
    torch.manual_seed(0)
    kernel = training.Kernel("implicit", 8, p=p)
    attention = training.PlacedAttention(16, 2, kernel, reach=2.0).double()
    q, k, v = (torch.randn(1, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    later = torch.arange(12)[:, None] >= 4
    hidden_first = k.new_zeros(1, 1, 12).masked_fill(~later.T, -torch.inf)
    moved = attention._implicit(*(x[:, :, 4:] for x in (q, k, v)), None)
    attend = training.ikattn.implicit_kernel_attention
    with pytest.MonkeyPatch.context() as patch:

        def without_first(*args: Any, key_bias: Any, **options: Any) -> Any:
            given = 0 if key_bias is None else key_bias
            return attend(*args, key_bias=given + hidden_first, **options)

        patch.setattr(training.ikattn, "implicit_kernel_attention", without_first)
        there = attention._implicit(q, k, v, None)[:, :, 4:]
    torch.testing.assert_close(there, moved)


def test_every_task_and_attention_is_trained_quickly(data, tmp_path, monkeypatch, capsys):
    files = ["--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]
    monkeypatch.setattr(sys, "argv", ["long.py", "--quick", "--data", str(data), *files])
    program.main()
    runs = rows_of(tmp_path / "a.csv")
    ended = {(r["task"], r["attention"], r["measure"]) for r in runs if r["part"] == "test"}
    expected = {
        (task, attention, measure)
        for task, measures in MEASURES.items()
        for attention in program.COMPARED
        for measure in measures
    }
    assert ended == expected
    assert all(0 <= float(run["accuracy"]) <= 1 for run in runs)
    assert (tmp_path / "a.png").stat().st_size > 10_000
    assert len(capsys.readouterr().out.splitlines()) == 12
