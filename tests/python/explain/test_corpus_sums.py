"""Sums of maps over a corpus: what the means are, how sums add, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ikattn.explain import CorpusSums, token_types
from ikattn.maps import MapFileError, Recording, shares
from recordings import LENGTHS, encoder_recording, translation_recording

TOKENS = [["[CLS]", "wa", "##ter", ".", "[SEP]"], ["[CLS]", "it", "[SEP]"]]
TYPES = [["special", "word", "piece", "punctuation", "special"], ["special", "word", "special"]]
LAYER = "encoder.layer.1.attention.self"


def recording_with_tokens(seed: int = 0) -> Recording:
    found = encoder_recording(batches=seed + 1)
    found.batches = found.batches[seed:]
    found.batches[0].tokens = TOKENS
    return found


def statistics(sums: CorpusSums) -> dict[str, torch.Tensor]:
    return {
        f"{layer}/{name}/{key}": x
        for layer, maps in sums.sums.items()
        for name, of_map in maps.items()
        for key, x in of_map.items()
    }


def assert_same(one: CorpusSums, other: CorpusSums, **tolerance: float) -> None:
    assert (one.types, one.layers, one.model) == (other.types, other.layers, other.model)
    assert one.sequences == other.sequences
    mine, theirs = statistics(one), statistics(other)
    assert mine.keys() == theirs.keys()
    for key, x in mine.items():
        torch.testing.assert_close(x, theirs[key], **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize(
    ("tokens", "types"),
    [
        *zip(TOKENS, TYPES, strict=True),
        (["▁Fünf", "▁Eu", "ro", "!", "</s>"], ["word", "word", "piece", "punctuation", "special"]),
        (["it", "Ġis", "Ġ...", "Ċ", "<|end|>"], ["word", "word", "punctuation", "word", "special"]),
        ([], []),
    ],
)
def test_types_of_tokens(tokens: list[str], types: list[str]) -> None:
    assert token_types(tokens) == types


def test_means_are_those_of_all_rows_by_type() -> None:
    """Every mean, computed pair by pair."""
    sums = CorpusSums()
    parts = [recording_with_tokens(seed) for seed in (0, 1)]
    for part in parts:
        sums.add(part)
    assert sums.sequences == 4
    found = sums[LAYER]["weights"]
    H, A = 2, len(sums.types)
    shares, values = torch.zeros(2, H, A, A, dtype=torch.float64)
    rows, bits = torch.zeros(2, H, A, dtype=torch.float64)
    pairs = torch.zeros(A, A, dtype=torch.float64)
    for part in parts:
        for b, length in enumerate(LENGTHS):
            x = part.batches[0][LAYER].weights[b, :, :length, :length].double()
            p = x / x.sum(-1, keepdim=True)
            places = [sums.types.index(kind) for kind in TYPES[b]]
            for i, a in enumerate(places):
                rows[:, a] += 1
                bits[:, a] -= (p[:, i] * p[:, i].log2()).sum(-1)
                for j, c in enumerate(places):
                    shares[:, a, c] += p[:, i, j]
                    values[:, a, c] += x[:, i, j]
                    pairs[a, c] += 1
    torch.testing.assert_close(found.shares, shares / rows[..., None])
    torch.testing.assert_close(found.values, values / pairs, equal_nan=True)
    torch.testing.assert_close(found.entropy, bits / rows)
    assert (found.rows == rows).all()
    assert (found.count == pairs).all()


def test_maps_of_keys_and_mixing_ratios_are_by_one_type() -> None:
    sums, part = CorpusSums(), recording_with_tokens()
    sums.add(part)
    maps = part.batches[0][LAYER]
    norms, ratio = maps.value_norms, maps.mixing_ratio["encoder"]
    special = [norms[0, :, [0, 4]], norms[1, :, [0, 2]]]
    expected = torch.cat(special, -1).double().mean(-1)
    torch.testing.assert_close(sums[LAYER]["value_norms"].values[:, 0], expected)
    expected = torch.stack([ratio[0, 1], ratio[1, 1]]).double().mean()
    torch.testing.assert_close(sums[LAYER]["mixing_ratio.encoder"].values[1], expected)
    assert sums[LAYER]["summed"].shares.shape == (4, 4)
    assert sums[LAYER]["value_norms"].shares is None


@pytest.mark.parametrize("length", [1, 5, 16, 48])
def test_a_mean_map_keeps_what_a_row_gives_away(length: int) -> None:
    recording = encoder_recording(layers=1)
    x = torch.rand(1, length, length)
    recording.batches[0].layers = {
        name: type(maps)(summed=x) for name, maps in recording.batches[0].items()
    }
    recording.batches[0].tokens = [["w"] * length]
    sums = CorpusSums()
    sums.add(recording)
    found = sums["encoder.layer.0.attention.self"]["summed"].map
    torch.testing.assert_close(found.sum(-1), torch.ones(16, dtype=torch.float64))
    if length % 16 == 0:  # whole tokens in every cell
        size = length // 16
        p = (x[0] / x[0].sum(-1, keepdim=True)).double().view(16, size, 16, size)
        torch.testing.assert_close(found, p.mean(1).sum(-1), rtol=1e-6, atol=1e-9)


def test_sums_add_in_any_order_and_keep_their_parts() -> None:
    parts = []
    for seed in range(4):
        parts.append(CorpusSums())
        parts[-1].add(recording_with_tokens(seed))
    before = pickle.loads(pickle.dumps(parts[0]))
    whole = CorpusSums()
    for seed in range(4):
        whole.add(recording_with_tokens(seed))
    assert_same(sum(parts, CorpusSums()), whole, rtol=1e-12, atol=1e-12)
    assert_same((parts[3] + parts[1]) + (parts[2] + parts[0]), whole, rtol=1e-12, atol=1e-12)
    assert_same(parts[0], before)
    assert_same(CorpusSums() + parts[0], before)


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "json"])
def test_sums_come_back_from_files(tmp_path: Path, suffix: str) -> None:
    if suffix == "safetensors":
        pytest.importorskip("safetensors", reason="pip install safetensors")
    sums, path = CorpusSums(), tmp_path / f"sums.{suffix}"
    sums.save(path)
    assert_same(CorpusSums.load(path), sums)
    sums.add(recording_with_tokens())
    sums.save(path)
    loaded = CorpusSums.load(path)
    assert_same(loaded, sums)
    loaded.add(recording_with_tokens(1))
    assert loaded.sequences == 4


def test_memory_does_not_depend_on_how_many_were_added(tmp_path: Path) -> None:
    sums, sizes = CorpusSums(), []
    for seed in range(3):
        sums.add(recording_with_tokens(seed))
        sums.save(tmp_path / "sums.npz")
        sizes.append((tmp_path / "sums.npz").stat().st_size)
    assert len(set(sizes)) == 1


def test_table_has_a_row_for_each_layer_map_and_head() -> None:
    sums = CorpusSums()
    sums.add(recording_with_tokens())
    rows = [row for row in sums.table() if row["layer"] == LAYER]
    assert [row["head"] for row in rows if row["map"] == "weights"] == [0, 1]
    assert [row["head"] for row in rows if row["map"] == "summed"] == [None]
    for row in rows:
        assert row["rows"] == 8
        assert sum(row[kind] for kind in sums.types) == pytest.approx(1)


def test_shares_of_a_corpus_are_those_of_its_recordings(tmp_path: Path) -> None:
    recordings, sums, expected = [recording_with_tokens(seed) for seed in (0, 1)], CorpusSums(), []
    for recording in recordings:
        sums.add(recording)
        expected.append(shares(recording))
    sums.save(tmp_path / "sums.npz")
    found = CorpusSums.load(tmp_path / "sums.npz").shares
    for one, other in zip(found.table(), (expected[0] + expected[1]).table(), strict=True):
        assert one == pytest.approx(other, nan_ok=True)
    assert "ledger" not in sums[LAYER]
    assert not CorpusSums().shares.layers


def test_a_map_that_is_not_finite_is_left_out_and_counted() -> None:
    sums, broken = CorpusSums(), recording_with_tokens()
    sums.add(recording_with_tokens())
    before = sums[LAYER]["weights"]
    broken.batches[0][LAYER].weights[1, 0, 2, 1] = torch.nan
    broken.batches[0][LAYER].weights[1, 0, 4, 4] = torch.inf  # in padding, which does not count
    sums.add(broken)
    found = sums[LAYER]["weights"]
    assert (found.sequences, found.left_out) == (3, 1)
    assert found.shares.isfinite().all()
    assert before.sequences == 2
    assert sums[LAYER]["summed"].left_out == 0


def test_types_of_one_s_own() -> None:
    sums = CorpusSums(("first", "later"))
    sums.add(
        recording_with_tokens(), types_of=lambda tokens: ["first"] + ["later"] * (len(tokens) - 1)
    )
    assert sums[LAYER]["weights"].rows.tolist() == [[2, 6], [2, 6]]


def test_a_decoder_s_layers_have_types_of_both_texts() -> None:
    recording = translation_recording()
    sums = CorpusSums()
    sums.add(recording)
    assert sums.sequences == 2
    assert {layer.kind for layer in sums.layers.values()} == {"self", "cross"}
    recording.batches[0].target_tokens = None
    with pytest.raises(ValueError, match=r"tokens .*must be"):
        CorpusSums().add(recording)


def test_what_does_not_fit_is_refused_and_nothing_added() -> None:
    sums = CorpusSums()
    sums.add(recording_with_tokens())
    before = pickle.loads(pickle.dumps(sums))
    unknown = encoder_recording()
    unknown.batches[0].tokens = None
    other = recording_with_tokens()
    other.model = "Other"
    wrong: list[tuple[Recording, dict[str, Any], str]] = [
        (unknown, {}, "tokens of sequence 0 of batch 0 must be known"),
        (recording_with_tokens(), {"tokens": [["a"], ["b"]]}, "must be 5, one for each"),
        (recording_with_tokens(), {"types_of": lambda x: ["noun"] * len(x)}, "got .*noun"),
        (recording_with_tokens(), {"types_of": lambda x: ["word"]}, "each of 5 tokens one of"),
        (other, {}, "the model must be .* as before, got Other"),
    ]
    for recording, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            sums.add(recording, **options)
    with pytest.raises(ValueError, match=r"types of tokens must be special, .* got a, b"):
        sums += CorpusSums(("a", "b"))
    with pytest.raises(ValueError, match="must be different names"):
        CorpusSums(("a", "a"))
    with pytest.raises(KeyError, match="no layer 'x' was added"):
        sums["x"]
    assert_same(sums, before)


def test_files_that_hold_no_sums_are_refused(tmp_path: Path) -> None:
    recording_with_tokens().save(tmp_path / "maps.npz")
    with pytest.raises(MapFileError, match="no file of corpus sums that ikattn wrote"):
        CorpusSums.load(tmp_path / "maps.npz")
    sums = CorpusSums()
    sums.add(recording_with_tokens())
    sums.save(tmp_path / "sums.json")
    whole = (tmp_path / "sums.json").read_text()
    for broken in (
        whole[:-50],
        whole.replace('"piece"', '"piece", "other"'),
        whole.replace("/entropy", "/other"),
    ):
        (tmp_path / "sums.json").write_text(broken)
        with pytest.raises(MapFileError):
            CorpusSums.load(tmp_path / "sums.json")
    with pytest.raises(FileNotFoundError):
        CorpusSums.load(tmp_path / "none.npz")
