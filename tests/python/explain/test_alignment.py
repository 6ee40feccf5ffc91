"""Word alignments: files, the error rate, and alignments read from maps."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ikattn.explain import (
    alignment_scores,
    read_alignments,
    token_types,
    word_alignment,
    words_of_subwords,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "alignment"
FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "alignment"
needs_alignments = pytest.mark.skipif(not FOLDER.exists(), reason=f"no alignments in {FOLDER}")


def error_rate(gold: Path, hypotheses: Path) -> str:
    """Returns the error rate in per cent, as lilt/alignment-scripts prints it."""
    links = read_alignments(gold, first_index=1)
    assert sum(map(len, links.sure)) == 9613
    assert sum(map(len, links.possible)) == 9613 + 921
    found = read_alignments(hypotheses, first_index=0).sure
    return f"{100 * alignment_scores(found, links.sure, links.possible).error_rate:.1f}"


def test_the_error_rate_is_that_of_the_scorer_everybody_uses(tmp_path: Path) -> None:
    for packed in GOLDEN.glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    hypotheses = tmp_path / "giza.grow-diagonal-final.talp"
    assert error_rate(tmp_path / "alignment.talp", hypotheses) == "20.6"


@needs_alignments
def test_error_rates_of_all_hypotheses_are_those_of_the_scorer() -> None:
    lines = (FOLDER / "expected_aer.txt").read_text().splitlines()
    expected = dict(line.split() for line in lines if not line.startswith("#"))
    assert len(expected) == 6
    for name, rate in expected.items():
        hypotheses = FOLDER / "hypotheses" / f"{name}.talp"
        assert error_rate(FOLDER / "alignment.talp", hypotheses) == rate, name


@needs_alignments
def test_links_stay_within_the_sentences() -> None:
    """Source is German, target English, in gold and hypotheses: no index exceeds its sentence."""
    lengths = [
        [len(line.split()) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]
        for name in ("test.de", "test.en")
    ]
    read = [read_alignments(FOLDER / "alignment.talp", first_index=1).possible]
    paths = sorted((FOLDER / "hypotheses").iterdir())
    read += [read_alignments(path, first_index=0).possible for path in paths]
    for alignments in read:
        for links, source, target in zip(alignments, *lengths, strict=True):
            assert all(i < source and j < target for i, j in links)


def test_scores_of_a_small_case() -> None:
    sure = [{(0, 0), (1, 1)}, {(2, 0)}]
    possible = [{(0, 1)}, {(2, 0), (1, 0)}]
    scores = alignment_scores([[(0, 0), (0, 1), (5, 5), (5, 5)], [(1, 0)]], sure, possible)
    # A: 4 links (one is given twice), in P: 3, in S: 1, S: 3.
    assert scores.links == 4
    assert scores.precision == 3 / 4
    assert scores.recall == 1 / 3
    assert scores.error_rate == pytest.approx(1 - (3 + 1) / (4 + 3))


def test_the_error_rate_counts_links_not_sentences() -> None:
    hypotheses = [{(0, 0)}, {(n, 0) for n in range(9)}]
    sure = [{(0, 0)}, {(n, 1) for n in range(9)}]
    assert alignment_scores(hypotheses, sure).error_rate == pytest.approx(0.9)


def test_perfect_empty_and_wrong_alignments() -> None:
    sure = [{(0, 0), (1, 2)}]
    assert alignment_scores(sure, sure).error_rate == 0
    assert alignment_scores([{(7, 7)}], sure).error_rate == 1
    nothing = alignment_scores([set()], sure)
    assert nothing.error_rate == 1
    assert nothing.recall == 0
    assert math.isnan(nothing.precision)


def test_reading_knows_index_base_order_and_kind(tmp_path: Path) -> None:
    path = tmp_path / "alignment.talp"
    path.write_text("1-3 2p1 \n\n4-4\n")
    gold = read_alignments(path, first_index=1)
    assert gold.sure == [{(0, 2)}, set(), {(3, 3)}]
    assert gold.possible == [{(0, 2), (1, 0)}, set(), {(3, 3)}]
    assert read_alignments(path, first_index=1, target_first=True).possible[0] == {(2, 0), (0, 1)}
    assert read_alignments(path, first_index=0).possible[0] == {(1, 3), (2, 1)}


@pytest.mark.parametrize("text", ["1:2", "1-2-3", "-1-2", "1-", "0-1", "a-b", "1-2,"])
def test_a_foreign_link_is_an_error_that_names_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alignment.talp"
    path.write_text(f"1-1\n2-2 {text}\n")
    with pytest.raises(ValueError, match=rf"alignment.talp, line 2: links.*got '{text}'"):
        read_alignments(path, first_index=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([set()], [set(), set()]), "as many sentences, got 1, 2 and 2"),
        (([{(0, 0)}], [{(0, 0)}], []), "got 1, 1 and 0"),
        (([set()], [set()]), "must hold a link"),
    ],
)
def test_error_rate_errors(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alignment_scores(*arguments)


def one_hot_rows(columns: list[int], S: int) -> Tensor:
    """Rows that draw from one column each, with a little from all."""
    map = torch.full((1, len(columns), S), 0.01)
    map[0, torch.arange(len(columns)), torch.tensor(columns)] = 1.0
    return map


def test_the_token_of_unknown_words_is_a_word() -> None:
    assert words_of_subwords(["[CLS]", "the", "[UNK]", "cat", "##s", "[SEP]"]) == [
        None, 0, 1, 2, 2, None,
    ]  # fmt: skip
    tokens = ["▁the", "▁", "<unk>", "▁cat", "s", "</s>"]
    assert words_of_subwords(tokens) == [0, 1, 1, 2, 2, None]
    assert words_of_subwords(tokens, special=["<unk>", "</s>"]) == [0, 1, 1, 2, 2, None]
    assert words_of_subwords(["eng_Latn", "▁my", "<0x0A>", "my_Var"]) == [None, 0, 0, 0]
    assert token_types(["[CLS]", "a", "[UNK]", "</s>"]) == ["special", "word", "word", "special"]


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3, 3), (2, 1, 3)])
def test_empty_maps_have_no_links(shape: tuple[int, int, int]) -> None:
    words = [[None] * shape[1]] * shape[0]
    found = word_alignment(torch.zeros(shape), [[]] * shape[0], words, setting="AWI")
    assert found == [set()] * shape[0]


def test_source_subwords_are_summed() -> None:
    """Word 0 has two columns of 0.3, word 1 one of 0.4: a mean or a maximum would choose word 1."""
    map = torch.tensor([[[0.3, 0.3, 0.4, 0.0]]])
    assert word_alignment(map, [[0, 0, 1, None]], [[0]]) == [{(0, 0)}]


def test_target_subwords_are_averaged() -> None:
    """The first subword alone prefers word 0, both together word 1."""
    map = torch.tensor([[[0.5, 0.4], [0.1, 0.9], [0.9, 0.1]]])
    assert word_alignment(map, [[0, 1]], [[0, 0, 1]]) == [{(1, 0), (0, 1)}]
    assert word_alignment(map, [[0, 1]], [[0, 1, 2]]) == [{(0, 0), (1, 1), (0, 2)}]


def test_no_link_where_the_end_of_the_sentence_is_largest() -> None:
    map = torch.tensor([[[0.2, 0.2, 0.6], [0.5, 0.3, 0.2]]])
    assert word_alignment(map, [[0, 1, None]], [[0, 1]]) == [{(0, 1)}]
    # Each special token competes alone: two of 0.3 do not beat a word of 0.4.
    assert word_alignment(torch.tensor([[[0.3, 0.4, 0.3]]]), [[None, 0, None]], [[0]]) == [{(0, 0)}]


def test_output_and_input_settings_read_neighbouring_rows() -> None:
    """Rows of the decoder: start (predicts y0), y0 (predicts y1), y1 (predicts the end)."""
    map = one_hot_rows([0, 1, 2], S=4)
    source = [[0, 1, 2, None]]
    assert word_alignment(map, source, [[0, 1]]) == [{(0, 0), (1, 1)}]
    assert word_alignment(map, source, [[0, 1]], setting="AWI") == [{(1, 0), (2, 1)}]
    # The end of the sentence may be named; it gets no link.
    for setting in ("AWO", "AWI"):
        named = word_alignment(map, source, [[0, 1, None]], setting=setting)
        assert named == word_alignment(map, source, [[0, 1]], setting=setting)


def kobayashi_alignment(map: Tensor, source: list[int], target: list[int]) -> set[tuple[int, int]]:
    """One sentence by loops: the last column is the end of the source, the last row predicts it."""
    links = set()
    words = sorted(set(source))
    for word in sorted(set(target)):
        rows = [k for k, of in enumerate(target) if of == word]
        scores = [
            sum(float(map[k, j]) for k in rows for j, of in enumerate(source) if of == w)
            / len(rows)
            for w in words
        ]
        scores.append(sum(float(map[k, len(source)]) for k in rows) / len(rows))
        best = max(range(len(scores)), key=scores.__getitem__)
        if best < len(words):
            links.add((best, word))
    return links


def test_a_padded_batch_is_a_loop_over_sentences() -> None:
    torch.manual_seed(1)
    sources = [[0, 0, 1, 2, 2, 2], [0, 1], [0, 1, 1, 2]]
    targets = [[0, 1, 1], [0, 0, 1, 2], [0]]
    S, L = 7, 5
    maps = torch.full((3, L, S), math.nan, dtype=torch.float64)
    expected = []
    for b, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = torch.rand(len(target) + 1, len(source) + 1, dtype=torch.float64).softmax(-1)
        alone[:, -1] *= 2
        maps[b, : len(target) + 1, : len(source) + 1] = alone
        expected.append(kobayashi_alignment(alone, source, target))
    source_words = [[*source, None] for source in sources]
    assert word_alignment(maps, source_words, targets) == expected
    # A case where the end of the sentence wins belongs to this test.
    assert sum(map(len, expected)) < sum(len(set(target)) for target in targets)
    # A tokenizer pads word_ids with None; the padded columns are masked.
    padding = torch.tensor([[j > len(source) for j in range(S)] for source in sources])
    padded = [[*source, *[None] * (S - len(source))] for source in sources]
    assert word_alignment(maps, padded, targets, key_padding=padding) == expected


def test_a_row_of_zeros_has_no_link() -> None:
    assert word_alignment(torch.zeros(1, 2, 3), [[0, 1, None]], [[0, 1]]) == [set()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), [[0]], [[0]]), r"map must have shape \[B, L, S\], got \[2, 3\]"),
        ((torch.zeros(1, 4, 2, 3), [[0]], [[0]]), "take one head, or head_mean"),
        ((torch.zeros(1, 2, 3), [[0]], [[0]], "awo"), "setting must be.*got 'awo'"),
        ((torch.zeros(2, 2, 3), [[0]], [[0], [0]]), "source_words must hold.*2 sentences, got 1"),
        ((torch.zeros(1, 2, 3), [[0, 1, 2, 3]], [[0]]), r"source_words\[0\].*at most 3.*got 4"),
        ((torch.zeros(1, 2, 3), [[0]], [[0, 1, 2]]), r"target_words\[0\].*at most 2.*got 3"),
        ((torch.zeros(1, 2, 3), [[0]], [[0, 1]], "AWI"), r"target_words\[0\].*at most 1.*got 2"),
        ((torch.zeros(1, 2, 3), [[0, -1]], [[0]]), r"source_words\[0\].*numbers from 0"),
    ],
)
def test_word_alignment_errors(arguments: Any, message: str) -> None:
    map, source, target, *setting = arguments
    with pytest.raises(ValueError, match=message):
        word_alignment(map, source, target, **({"setting": setting[0]} if setting else {}))
