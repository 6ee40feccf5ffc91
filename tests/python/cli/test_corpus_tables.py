"""``python -m ikattn analyze`` of tables, and with files of many lines: tables and sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corpora import LAYER, LINES, RESULTS, analyze, assert_same_sums, entries_in, write_alone
from ikattn.cli import analyze as analyzing
from ikattn.cli import parts
from ikattn.explain import CorpusSums
from ikattn.maps import load_maps
from saved_models import SIZES, save_model

pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert", "Bert", **SIZES)


@pytest.fixture(scope="module")
def written(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_alone(bert, tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def text(written: tuple[Path, Path]) -> Path:
    return written[0]


@pytest.fixture
def alone(written: tuple[Path, Path]) -> Path:
    """Returns what one process writes."""
    return written[1]


# --- Tables


def write_table(path: Path, columns: dict[str, Any], form: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pip install 'ikattn[corpora]'")
    table = arrow.table(columns)
    if form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return
    opened = arrow.ipc.new_file if form == "file" else arrow.ipc.new_stream
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


Write = Callable[[Path, dict[str, Any]], Path]


def in_one_file(form: str) -> Write:
    def write(folder: Path, columns: dict[str, Any]) -> Path:
        path = folder / f"table.{'parquet' if form == 'parquet' else 'arrow'}"
        write_table(path, columns, form)
        return path

    return write


def in_a_folder(folder: Path, columns: dict[str, Any]) -> Path:
    place = folder / "shards"
    place.mkdir()
    for number, rows in enumerate((slice(0, 11), slice(11, None))):
        part = {name: values[rows] for name, values in columns.items()}
        write_table(place / f"{number}.parquet", part, "parquet")
    return place


def saved_to_disk(folder: Path, columns: dict[str, Any]) -> Path:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    made = datasets.Dataset.from_dict({name: values[::-1] for name, values in columns.items()})
    made.select(range(len(LINES))[::-1]).save_to_disk(folder / "saved", num_shards=3)
    return folder / "saved"


TABLES: dict[str, Write] = {
    "parquet": in_one_file("parquet"),
    "arrow": in_one_file("file"),
    "stream": in_one_file("stream"),
    "folder": in_a_folder,
    "saved": saved_to_disk,
}


@pytest.mark.parametrize("kind", TABLES)
def test_lines_of_a_table_are_those_of_a_text(tmp_path, bert, alone, kind):
    columns = {"label": list(range(40)), "said": [line or None for line in LINES]}
    place = TABLES[kind](tmp_path, columns)
    options = ("--column", "said", *RESULTS, "--format", "sums", "--out", tmp_path / "out")
    assert analyze("--model", bert, "--file", place, *options) == 0
    assert_same_sums(tmp_path / "out", alone)


def test_lines_of_a_dataset_of_the_hub(tmp_path: Path, bert: Path, alone: Path) -> None:
    pytest.importorskip("datasets", reason="pip install datasets")
    (tmp_path / "set").mkdir()
    write_table(tmp_path / "set" / "train.parquet", {"text": LINES}, "parquet")
    options = (*RESULTS, "--format", "sums", "--out", tmp_path / "out")
    assert analyze("--model", bert, "--dataset", tmp_path / "set", *options) == 0
    assert_same_sums(tmp_path / "out", alone)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_tables_hold_the_maps_of_every_line(tmp_path, bert, text, alone, form):
    arrow = pytest.importorskip("pyarrow", reason="pip install 'ikattn[corpora]'")
    dataset = pytest.importorskip("pyarrow.dataset", reason="pip install 'ikattn[corpora]'")
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", form)
    for k in (2, 1):
        assert analyze(*arguments, "--out", tmp_path, "--shards", f"{k}/2") == 0
    files = sorted(tmp_path.glob(f"part-*.{form}"))
    assert len(files) == 10
    rows = dataset.dataset(files, format="ipc" if form == "arrow" else form).to_table().to_pylist()
    assert [row["line"] for row in rows] == list(range(1, 41))
    for row, line in zip(rows, LINES, strict=True):
        assert row["text"] == line
        assert row["tokens"] == (["[CLS]", *line.split(), "[SEP]"] if line else [])
        theirs = load_maps(alone / f"line-{row['line']:06d}.npz")
        assert row["layers"] == theirs.names
        for name in ("weights", "summed"):
            assert len(row[name]) == len(theirs.names)
            for mine, layer in zip(row[name], theirs.names, strict=True):
                expected = getattr(theirs[layer], name)[0]
                torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-5, atol=1e-7)
        for mine, layer in zip(row["mixing_ratio.encoder"], theirs.names, strict=True):
            expected = theirs[layer].mixing_ratio["encoder"][0]
            torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-5, atol=1e-7)
    assert arrow.types.is_float32(
        dataset.dataset(files[0], format="ipc" if form == "arrow" else form)
        .schema.field("summed")
        .type.value_type.value_type.value_type
    )


def test_a_layer_without_a_map_is_null_in_its_column(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'ikattn[corpora]'")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 2}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 32}
    sizes |= {"decoder_ffn_dim": 32, "max_position_embeddings": 32}
    bart = save_model(tmp_path / "bart", "Bart", **sizes)
    columns = {"de": ["ein Tier", "Tier"], "en": ["the animal", "animal"]}
    write_table(tmp_path / "pairs.parquet", columns, "parquet")
    options = ("--file", tmp_path / "pairs.parquet", "--column", "en", "--target-column", "de")
    options += ("--maps", "weights,with_residual", "--format", "parquet,sums")
    assert analyze("--model", bart, *options, "--out", tmp_path / "out") == 0
    rows = parquet.read_table(tmp_path / "out" / "part-000001.parquet").to_pylist()
    assert [row["target"] for row in rows] == columns["de"]
    assert rows[0]["target_tokens"] == ["[SEP]", "[CLS]", "ein", "Tier"]
    kinds = ["self", "self", "cross"]
    assert [x is None for x in rows[0]["with_residual"]] == [kind == "cross" for kind in kinds]
    assert [len(x[0][0]) for x in rows[0]["weights"]] == [4, 4, 4]
    sums = CorpusSums.load(tmp_path / "out" / "sums.npz")
    cross = next(name for name, layer in sums.layers.items() if layer.kind == "cross")
    assert sums[cross]["weights"].shares.shape == (2, 4, 4)


def test_tables_that_cannot_be_read_are_told_in_one_line(tmp_path, bert, capsys):
    pytest.importorskip("pyarrow", reason="pip install 'ikattn[corpora]'")
    write_table(tmp_path / "t.parquet", {"text": ["water"], "n": [1]}, "parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-9])
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "both").mkdir()
    for form in ("parquet", "arrow"):
        in_one_file(form)(tmp_path / "both", {"text": ["water"]})
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    cases = {
        ("t.parquet", "body"): "must have one column 'body', got text, n",
        ("t.parquet", "n"): "column 'n' must be text, got int64",
        ("cut.parquet", "text"): "cut.parquet is no whole table",
        ("cut.arrow", "text"): "cut.arrow is no whole table",
        ("none.parquet", "text"): "cannot read",
        ("empty", "text"): "must hold .parquet files or .arrow files, got none",
        ("both", "text"): "must hold .parquet files or .arrow files, got .arrow and .parquet",
        ("splits", "text"): "holds several splits: name one",
    }
    for (name, column), message in cases.items():
        options = ("--file", tmp_path / name, "--column", column, "--format", "npz")
        assert analyze("--model", bert, *options, "--out", tmp_path / "out") == 1
        said = capsys.readouterr().err
        assert message in said, said
        assert len(said.strip().splitlines()) == 1, said


def test_a_part_that_lost_its_file_is_done_again(tmp_path, bert, text, alone, capsys):
    pytest.importorskip("pyarrow", reason="pip install 'ikattn[corpora]'")
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums,parquet")
    assert analyze(*arguments, "--out", tmp_path) == 0
    (tmp_path / "part-000003.parquet").unlink()
    assert analyze(*arguments, "--out", tmp_path) == 0
    assert "resuming: 36 of 40 lines are done" in capsys.readouterr().err
    assert (tmp_path / "part-000003.parquet").exists()
    assert_same_sums(tmp_path, alone)
    assert not list(tmp_path.glob("sums-*"))


@pytest.mark.parametrize("form", ["parquet", "arrow", "sums"])
def test_a_full_disk_leaves_no_part_behind(tmp_path, bert, text, form, monkeypatch, capsys):
    if form != "sums":
        pytest.importorskip("pyarrow", reason="pip install 'ikattn[corpora]'")
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", form, "--out", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "cannot write: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parts._TableWriter, "flush", full)
        patched.setattr(CorpusSums, "save", full)
        assert analyze(*arguments) == 1
    assert "No space left on device" in capsys.readouterr().err
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "lines.jsonl", "manifest.json"}
    assert entries_in(tmp_path) == []
    assert analyze(*arguments) == 0
    assert sum(entry["through"] - entry["line"] + 1 for entry in entries_in(tmp_path)) == 40


def test_a_restart_forgets_parts_and_sums(tmp_path, bert, text, alone):
    arguments = ("--model", bert, "--file", text, "--format", "sums", "--out", tmp_path)
    assert analyze(*arguments, "--maps", "weights", "--shards", "1/2") == 0
    assert analyze(*arguments, "--maps", "weights", "--shards", "2/2") == 0
    (tmp_path / "sums-000099.npz").write_bytes(b"of a process that was killed late")
    assert analyze(*arguments, *RESULTS, "--restart") == 0
    assert_same_sums(tmp_path, alone)
    (tmp_path / "lines.jsonl").unlink()  # the sums are now of no line that is known
    assert analyze(*arguments, "--maps", "weights") == 0
    assert list(CorpusSums.load(tmp_path / "sums.npz")[LAYER]) == ["weights"]


def test_damaged_sums_of_a_part_are_named(tmp_path, bert, text, alone, monkeypatch, capsys):
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums", "--out", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(analyzing, "merge_sums", lambda *_: None)
        assert analyze(*arguments) == 0
    part = tmp_path / "sums-000002.npz"
    part.write_bytes(part.read_bytes()[:100])
    capsys.readouterr()
    assert analyze(*arguments) == 1
    assert f"remove {part}, and the same command" in capsys.readouterr().err
    part.unlink()
    assert analyze(*arguments) == 0
    assert_same_sums(tmp_path, alone)


def test_a_text_that_became_shorter_is_no_whole_part(tmp_path, bert, monkeypatch, capsys):
    path, out = tmp_path / "text", tmp_path / "out"
    path.write_text("water\n" * 6)
    real = analyzing.read_lines

    def shortened(*sources: Any) -> Any:
        path.write_text("water\n" * 5)
        return real(*sources)

    monkeypatch.setattr(analyzing, "read_lines", shortened)
    options = (*RESULTS, "--format", "sums", "--out", out)
    assert analyze("--model", bert, "--file", path, *options) == 1
    assert "had 6 lines before the run, of which 5 were found" in capsys.readouterr().err
    assert [entry["through"] for entry in entries_in(out)] == [4]
    assert not (out / "sums-000002.npz").exists()
