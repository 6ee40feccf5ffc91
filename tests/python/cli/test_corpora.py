"""``python -m ikattn analyze`` of tables, and with sums over all lines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ikattn import cli
from ikattn.cli import analyze as analyzing
from ikattn.explain import CorpusSums
from ikattn.maps import load_maps
from saved_models import BART, SIZES, save_model

pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")

WORDS = ("water", "the animal was tired .", "", "it", "she poured the water because it was")
LINES = [WORDS[i % 5] for i in range(40)]
LAYER = "encoder.layer.1.attention.self"
RESULTS = ("--maps", "weights,summed,mixing_ratio")


def analyze(*arguments: object) -> int:
    return cli.main(["analyze", *map(str, arguments)])


def assert_same_sums(one: Path, other: Path) -> None:
    mine, theirs = (CorpusSums.load(folder / "sums.npz") for folder in (one, other))
    assert mine.sequences == theirs.sequences == sum(map(bool, LINES))
    for layer, maps in mine.sums.items():
        for name, sums in maps.items():
            for key, x in sums.items():
                torch.testing.assert_close(x, theirs.sums[layer][name][key], rtol=0, atol=0)
    assert not list(one.glob("sums-*"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert", "Bert", **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(line + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def alone(bert: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what a run writes that nobody disturbs."""
    out = tmp_path_factory.mktemp("alone")
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums,npz", "--out", out)
    assert analyze(*arguments) == 0
    return out


# --- Tables


def test_lines_of_a_table_are_those_of_a_text(tmp_path, bert, alone):
    rows = [json.dumps({"label": 1, "said": line or None}) for line in LINES]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    options = ("--column", "said", *RESULTS, "--format", "sums", "--out", tmp_path / "out")
    assert analyze("--model", bert, "--file", tmp_path / "rows.jsonl", *options) == 0
    assert_same_sums(tmp_path / "out", alone)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {".lock", "manifest.json", "lines.jsonl", "sums.npz", "summary.html"}


def test_a_table_holds_the_decoders_text_and_line_breaks(tmp_path: Path) -> None:
    bart = save_model(tmp_path / "bart", "Bart", **BART)
    rows = [{"de": "ein\nTier", "en": "the animal"}, {"de": "Tier", "en": "animal"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--file", tmp_path / "pairs.jsonl", "--column", "en", "--target-column", "de")
    options += ("--maps", "weights,with_residual", "--format", "npz,sums")
    assert analyze("--model", bart, *options, "--out", tmp_path / "out") == 0
    found = load_maps(tmp_path / "out" / "line-000001.npz")
    assert found.batches[0].target_tokens == [["[SEP]", "[CLS]", "ein", "Tier"]]
    sums = CorpusSums.load(tmp_path / "out" / "sums.npz")
    cross = next(name for name, layer in sums.layers.items() if layer.kind == "cross")
    assert sums[cross]["weights"].shares.shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"body": "it"}', "rows.jsonl, line 2: must be a JSON object with text under 'text'"),
        ('{"text": 1}', "line 2: must be a JSON object with text under 'text', got {\"text\": 1}"),
        ("[]", "line 2: must be a JSON object"),
        ('{"text": "wa', "line 2: must be a JSON object"),
        ('{"text": "caf\\udce9"}', "line 2: must be text"),
    ],
)
def test_rows_without_text_are_told_in_one_line(tmp_path, bert, row, message, capsys):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "water"}}\n{row}\n')
    arguments = ("--file", tmp_path / "rows.jsonl", "--format", "npz", "--out", tmp_path / "out")
    assert analyze("--model", bert, *arguments) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--column", "--target-column"])
def test_columns_are_of_tables(tmp_path, option, capsys):
    with pytest.raises(SystemExit) as stopped:
        analyze("--model", "m", "--file", "text", "--out", tmp_path / "out", option, "c")
    assert stopped.value.code == 2
    assert f"{option} is of a table: --file must end in .jsonl" in capsys.readouterr().err


# --- Sums


@pytest.mark.parametrize("formats", ["sums", "sums,npz"])
def test_interrupted_sums_go_on_and_count_no_line_twice(
    tmp_path, bert, text, alone, formats, monkeypatch, capsys
):
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", formats, "--out", tmp_path)
    add = CorpusSums.add
    for stop, finished in ((20, 16), (3, 16), (17, 32)):
        count = iter(range(40))

        def stopped(sums: Any, recording: Any, count: Any = count, stop: int = stop) -> None:
            if next(count) == stop:
                raise KeyboardInterrupt
            add(sums, recording)

        with monkeypatch.context() as patched:
            patched.setattr(CorpusSums, "add", stopped)
            assert analyze(*arguments) == 130
        assert f"interrupted after {finished} of 40 lines" in capsys.readouterr().err
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("line-*")}
    shutil.copy(tmp_path / "sums-000032.npz", tmp_path / "sums-000016.npz")  # as if killed then
    assert analyze(*arguments) == 0
    assert "resuming: 32 of 40 lines are done" in capsys.readouterr().err
    assert all(path.stat().st_mtime_ns == times[path] for path in times)
    assert_same_sums(tmp_path, alone)
    (tmp_path / "summary.html").unlink()
    assert analyze(*arguments) == 0
    assert (tmp_path / "summary.html").exists()


def test_a_line_that_lost_its_file_is_in_the_sums_once(tmp_path, bert, text, alone, capsys):
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums,npz")
    assert analyze(*arguments, "--out", tmp_path) == 0
    (tmp_path / "line-000003.npz").write_bytes(b"")
    assert analyze(*arguments, "--out", tmp_path) == 0
    assert "resuming: 39 of 40 lines are done" in capsys.readouterr().err
    assert (tmp_path / "line-000003.npz").stat().st_size
    assert_same_sums(tmp_path, alone)


def test_a_full_disk_leaves_no_sums_behind(tmp_path, bert, text, alone, monkeypatch, capsys):
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums", "--out", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "cannot write: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(CorpusSums, "save", full)
        assert analyze(*arguments) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "lines.jsonl", "manifest.json"}
    assert analyze(*arguments) == 0
    assert_same_sums(tmp_path, alone)


def test_sums_of_another_job_are_refused_until_a_restart(tmp_path, bert, text, alone, capsys):
    arguments = ("--model", bert, "--file", text, "--format", "sums", "--out", tmp_path)
    assert analyze(*arguments, "--maps", "weights") == 0
    (tmp_path / "sums-000032.npz").write_bytes(b"of a process that was killed late")
    (tmp_path / "sums-mine.npz").write_bytes(b"of another program")
    assert analyze(*arguments, *RESULTS) == 1
    assert "a run with other maps" in capsys.readouterr().err
    assert analyze(*arguments, *RESULTS, "--restart") == 0
    (tmp_path / "sums-mine.npz").unlink()  # which is there, as it was
    assert_same_sums(tmp_path, alone)


def test_damaged_sums_are_named(tmp_path, bert, text, alone, capsys):
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums", "--out", tmp_path)
    assert analyze(*arguments) == 0
    path = tmp_path / "sums.npz"
    path.write_bytes(path.read_bytes()[:100])
    capsys.readouterr()
    assert analyze(*arguments) == 1
    assert f"remove {path}, and the same command" in capsys.readouterr().err
    path.unlink()
    assert analyze(*arguments) == 0
    assert_same_sums(tmp_path, alone)


def test_a_text_that_became_shorter_is_not_finished(tmp_path, bert, monkeypatch, capsys):
    path, out = tmp_path / "text", tmp_path / "out"
    path.write_text("water\n" * 20)
    real = analyzing.read_lines

    def shortened(*sources: Any) -> Any:
        path.write_text("water\n" * 17)
        return real(*sources)

    monkeypatch.setattr(analyzing, "read_lines", shortened)
    options = (*RESULTS, "--format", "sums", "--out", out)
    assert analyze("--model", bert, "--file", path, *options) == 1
    assert "had 20 lines before the run, of which 17 were found" in capsys.readouterr().err
    assert not (out / "sums.npz").exists()
