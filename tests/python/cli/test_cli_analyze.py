"""``python -m ikattn analyze``: what it writes, how it goes on after a stop, what it refuses."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ikattn
from ikattn import Contributions, cli
from ikattn.cli import analyze as analyzing
from ikattn.cli import results
from ikattn.cli.index import overview
from ikattn.maps import load_maps
from recorded_models import recorded
from recordings import recording_of
from saved_models import BART, SIZES, save_model

transformers = pytest.importorskip("transformers", reason="pip install 'ikattn[analyze]'")
LINES = (
    "the animal did not cross the street",
    "",
    "she poured water .",
    "it was too tired",
    "water",
)
LAYER = "encoder.layer.1.attention.self"


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bert", "Bert", **SIZES)


@pytest.fixture(scope="session")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "bart", "Bart", **BART)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path / "text.txt"


def analyze(*arguments: object) -> int:
    return cli.main(["analyze", *map(str, arguments)])


def entries_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]


def recorded_alone(folder: Path, text: str, maps: tuple[str, ...]) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return recorded(model, {**tokenizer(text, return_tensors="pt")}, maps)


def test_a_model_with_implicit_attention_is_analyzed_with_its_frequencies(tmp_path, bert, text):
    folder, out = shutil.copytree(bert, tmp_path / "implicit"), tmp_path / "out"
    model = transformers.AutoModel.from_pretrained(bert).eval()
    ikattn.convert(model, num_frequencies=4, seed=0).save_pretrained(folder)
    assert analyze("--model", folder, "--file", text, "--format", "npz", "--out", out) == 0
    first = load_maps(out / "line-000001.npz")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    recording = recorded(model, {**tokenizer(LINES[0], return_tensors="pt")}, "summed")
    mine, theirs = first[LAYER].summed, recording[LAYER].summed
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_every_line_gets_its_maps_without_padding(tmp_path: Path, bert: Path, text: Path) -> None:
    out = tmp_path / "out"
    options = ("--maps", "weights,summed,mixing_ratio", "--format", "npz", "--batch-size", 3)
    assert analyze("--model", bert, "--file", text, "--out", out, *options) == 0
    entries = entries_in(out)
    assert [entry["line"] for entry in entries] == [1, 2, 3, 4, 5]
    for entry, line in zip(entries, LINES, strict=True):
        assert entry["text"] == line
        assert entry["files"] == [f"line-{entry['line']:06d}.npz"]
        found = load_maps(out / entry["files"][0])
        if not line:
            assert entry["empty"]
            assert found.batches[0].tokens == [[]]
            assert found.names == []
            continue
        assert found.batches[0].tokens == [["[CLS]", *line.split(), "[SEP]"]] == [entry["tokens"]]
        alone = recorded_alone(bert, line, ("weights", "summed", "mixing_ratio"))
        assert found.layers == alone.layers
        for name in ("weights", "summed"):
            mine, theirs = getattr(found[LAYER], name), getattr(alone[LAYER], name)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        mine, theirs = (x[LAYER].mixing_ratio["encoder"] for x in (found, alone))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_all_formats_and_an_index_of_pages(tmp_path: Path, bert: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'ikattn[viz]'")
    pytest.importorskip("safetensors", reason="pip install safetensors")
    out = tmp_path / "new" / "out"
    options = ("--format", "html,npz,safetensors,json,png", "--maps", "ledger,weights,summed")
    texts = ("--text", "water <b>", "--text", " ", "--text", "water <b>")
    assert analyze("--model", bert, *texts, "--out", out, *options) == 0
    first, second, third = entries_in(out)
    kinds = [Path(name).suffix for name in first["files"]]
    assert kinds == [".html", ".npz", ".safetensors", ".json", ".png"]
    assert [Path(name).suffix for name in second["files"]] == [".npz", ".safetensors", ".json"]
    assert all((out / name).stat().st_size for name in first["files"] + third["files"])
    index = (out / "index.html").read_text()
    assert '<a href="line-000001.html" dir="auto">water &lt;b&gt;</a>' in index
    assert '<li value="2"><div class="text"><span dir="auto"><i>empty</i></span></div>' in index


def test_what_the_index_shows_of_a_line_is_of_its_maps(tmp_path, bert, text):
    out = tmp_path / "out"
    options = ("--maps", "weights,mixing_ratio", "--format", "npz", "--batch-size", 3)
    assert analyze("--model", bert, "--file", text, "--out", out, *options) == 0
    nothing, *entries = sorted(entries_in(out), key=lambda entry: not entry["empty"])
    empty = dict.fromkeys(("map", "entropy", "mixing_ratio", "thumbnail"))
    assert nothing["overview"] == empty
    for entry in entries:
        found = recorded_alone(bert, entry["text"], ("weights", "mixing_ratio"))
        weights = torch.stack([found[name].weights[0] for name in found.names])
        bits = -(weights * weights.log2()).sum(-1).mean()
        ratios = torch.stack([found[name].mixing_ratio["encoder"][0] for name in found.names])
        view = entry["overview"]
        assert view["map"] == "weights"
        assert view["entropy"] == pytest.approx(float(bits), rel=1e-4)
        assert view["mixing_ratio"] == pytest.approx(float(ratios.mean()), rel=1e-4)
        L, S, codes = view["thumbnail"].split()
        mean = weights.mean((0, 1))
        assert (int(L), int(S)) == mean.shape
        levels = torch.tensor(list(base64.b64decode(codes))).view(mean.shape)
        expected = 255 * (mean / mean.max()).sqrt()
        torch.testing.assert_close(levels.float(), expected, rtol=0, atol=0.51)


def test_a_small_map_of_a_long_line_is_its_average() -> None:
    x = torch.rand(1, 64, 32)
    view = overview(recording_of(summed=x), ["summed"])
    L, S, codes = view["thumbnail"].split()
    assert (L, S) == ("16", "16")
    blocks = (x[0] / x[0].sum(-1, keepdim=True)).view(16, 4, 16, 2).mean((1, 3))
    expected = 255 * (blocks / blocks.max()).sqrt()
    levels = torch.tensor(list(base64.b64decode(codes))).view(16, 16).float()
    torch.testing.assert_close(levels, expected, rtol=0, atol=0.51)
    assert len(json.dumps(view)) < 450


def test_rows_that_see_nothing_are_left_out_of_the_entropy() -> None:
    x = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]])
    assert overview(recording_of(summed=x), ["summed"])["entropy"] == 1
    nothing = overview(recording_of(summed=0 * x), ["summed"])
    assert (nothing["entropy"], nothing["thumbnail"]) == (None, None)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_number_in_the_index(wrong: float) -> None:
    x = torch.ones(1, 3, 3)
    x[0, 1, 1] = wrong
    maps = Contributions(summed=x, mixing_ratio={"summed": x[:, 1]})
    view = overview(recording_of({"layer": maps}), ["weights", "summed"])
    assert view == {"map": "summed", "entropy": None, "mixing_ratio": None, "thumbnail": None}


def test_long_line_is_cut_with_a_notice(tmp_path, bert, capsys):
    (tmp_path / "text").write_bytes("\ufeffwater\r\n".encode() + b"the " * 30 + b"\nwater")
    out = tmp_path / "out"
    call = ("--model", bert, "--file", tmp_path / "text", "--out", out, "--format", "npz")
    assert analyze(*call) == 0
    assert "line 2: 32 tokens, cut to 16" in capsys.readouterr().err
    entries = entries_in(out)
    assert [entry["truncated"] for entry in entries] == [False, True, False]
    assert [len(entry["tokens"]) for entry in entries] == [3, 16, 3]
    assert entries[0]["text"] == "water"


def test_decoder_without_a_padding_token(tmp_path: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    gpt2 = save_model(tmp_path / "gpt2", "GPT2", **sizes)
    out = tmp_path / "out"
    texts = ("--text", "the animal did not", "--text", "water")
    assert analyze("--model", gpt2, *texts, "--out", out, "--format", "npz,html") == 0
    found = load_maps(out / "line-000002.npz")
    assert found.batches[0].tokens == [["[CLS]", "water", "[SEP]"]]
    weights = found[found.names[0]].weights
    assert weights.shape == (1, 2, 3, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))
    assert weights.triu(1).max() == 0


def test_target_text_is_read_by_the_decoder(tmp_path: Path, bart: Path) -> None:
    (tmp_path / "source").write_text("the animal was tired\nwater\nit was\n")
    (tmp_path / "target").write_text("ein Tier\nein Tier ein Tier\n\n")
    out = tmp_path / "out"
    files = ("--file", tmp_path / "source", "--target-file", tmp_path / "target")
    assert analyze("--model", bart, *files, "--out", out, "--format", "npz,html") == 0
    found = load_maps(out / "line-000001.npz")
    assert found.batches[0].tokens == [["[CLS]", "the", "animal", "was", "tired", "[SEP]"]]
    assert found.batches[0].target_tokens == [["[SEP]", "[CLS]", "ein", "Tier"]]
    shapes = {(x.kind, x.side): found[name].summed.shape for name, x in found.layers.items()}
    decoder = {("self", "decoder"): (1, 4, 4), ("cross", "decoder"): (1, 4, 6)}
    assert shapes == decoder | {("self", "encoder"): (1, 6, 6)}
    cross = next(name for name, layer in found.layers.items() if layer.kind == "cross")
    assert found[cross].with_residual is None  # which no cross-attention has
    assert found[cross].with_norm is not None
    assert all(found[name].with_residual is not None for name in found.names if name != cross)
    assert entries_in(out)[2]["empty"]


# --- Going on after a stop


def stop_after(
    monkeypatch: pytest.MonkeyPatch, lines: int, error: type[BaseException] = KeyboardInterrupt
) -> None:
    """Raises before the entry after so many lines is written, when its files are."""
    added = results.Results.add_entry
    count = iter(range(lines + 1))

    def add(of: Any, entry: dict[str, Any]) -> None:
        if next(count) == lines:
            raise error
        added(of, entry)

    monkeypatch.setattr(results.Results, "add_entry", add)


@pytest.mark.parametrize("lines", [0, 1, 4])
def test_an_interrupted_run_goes_on(tmp_path, bert, text, lines, monkeypatch, capsys):
    out = tmp_path / "out"
    options = ("--format", "npz", "--batch-size", 2)
    arguments = ("--model", bert, "--file", text, "--out", out, *options)
    with monkeypatch.context() as patched:
        stop_after(patched, lines)
        assert analyze(*arguments) == 130
    said = capsys.readouterr().err
    assert f"interrupted after {lines} of 5 lines; the same command goes on from there" in said
    written = [path for path in out.glob("line-*") if path.stat().st_mtime_ns]
    times = {path: path.stat().st_mtime_ns for path in written[:lines]}
    assert analyze(*arguments, "--batch-size", 3) == 0
    assert sorted(entry["line"] for entry in entries_in(out)) == [1, 2, 3, 4, 5]
    done_before = {out / f"line-{n:06d}.npz" for n in range(1, lines + 1)}
    assert all(path.stat().st_mtime_ns == times[path] for path in done_before & times.keys())
    before = sorted(out.rglob("*"))
    assert analyze(*arguments) == 0
    assert "all 5 lines are done already" in capsys.readouterr().err
    assert sorted(out.rglob("*")) == before


def test_killed_process_goes_on(tmp_path: Path, bert: Path) -> None:
    """kill -9 at any moment, twice; then the results are those of a run that nobody disturbed."""
    (tmp_path / "text").write_text("".join(f"water {'the ' * (i % 9)}\n" for i in range(400)))
    out = tmp_path / "out"
    arguments = ["--model", bert, "--file", tmp_path / "text", "--out", out, "--format", "npz,json"]
    command = [sys.executable, "-m", "ikattn", "analyze", *map(str, arguments)]
    for kill_at in (30, 200):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob("line-*"))) < kill_at:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = len(entries_in(out)) if (out / "lines.jsonl").read_bytes().endswith(b"\n") else 0
        assert done < 400
    assert analyze(*arguments) == 0
    assert [entry["line"] for entry in entries_in(out)] == list(range(1, 401))
    assert not list(out.glob(".ikattn-*"))
    assert analyze(*arguments[:5], tmp_path / "again", *arguments[6:]) == 0
    for number in range(1, 401):
        name = f"line-{number:06d}.npz"
        mine, theirs = load_maps(out / name), load_maps(tmp_path / "again" / name)
        assert mine.batches[0].tokens == theirs.batches[0].tokens
        torch.testing.assert_close(mine[LAYER].summed, theirs[LAYER].summed)


def test_torn_entry_and_lost_file_are_done_again(tmp_path: Path, bert: Path, text: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--model", bert, "--file", text, "--out", out, "--format", "npz")
    assert analyze(*arguments) == 0
    ledger = out / "lines.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-20])
    (out / "line-000003.npz").unlink()
    (out / ".ikattn-abc.part").write_text("of a run that was killed")
    assert analyze(*arguments) == 0
    assert sorted(entry["line"] for entry in entries_in(out)) == [1, 2, 3, 4, 5]
    assert (out / "line-000003.npz").exists()
    assert not list(out.glob(".ikattn-*"))


Change = Callable[[Path, Path], list[object]]
CHANGES: dict[str, Change] = {
    "text": lambda text, bert: text.write_text("other\n" * 5) and [],
    "model, model files": lambda text, bert: ["--model", f"{bert}/../bert"],
    "maps": lambda text, bert: ["--maps", "weights"],
    "formats": lambda text, bert: ["--format", "json"],
    "max-length": lambda text, bert: ["--max-length", 8],
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_wishes_are_refused(tmp_path, bert, text, what, capsys):
    out = tmp_path / "out"
    arguments = ["--model", bert, "--file", text, "--out", out, "--format", "npz"]
    assert analyze(*arguments) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    arguments += CHANGES[what](text, bert)
    assert analyze(*arguments) == 1
    said = capsys.readouterr().err
    assert f"other {what.partition(',')[0]}" in said
    assert "--restart" in said
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (out / "notes.txt").write_text("not ours")
    assert analyze(*arguments, "--restart") == 0
    assert (out / "notes.txt").exists()
    assert len(entries_in(out)) == 5


def test_changed_weights_are_refused(tmp_path, text, capsys):
    model = save_model(tmp_path / "model", "Bert", **SIZES)
    arguments = ("--model", model, "--file", text, "--out", tmp_path / "out", "--format", "npz")
    assert analyze(*arguments) == 0
    os.utime(model / "model.safetensors", (1, 1))
    assert analyze(*arguments) == 1
    assert "a run with other model files" in capsys.readouterr().err


def test_second_run_at_the_same_time_is_refused(tmp_path, bert, text, capsys):
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert analyze("--model", bert, "--file", text, "--out", out) == 1
    assert "another run is writing to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["index.html", "lines.jsonl", "manifest.json"])
@pytest.mark.parametrize("restart", [(), ("--restart",)])
def test_what_others_wrote_is_left_alone(tmp_path, bert, text, name, restart, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('{"name": "another program\'s"}\n')
    said = refused(capsys, "--model", bert, "--file", text, "--out", out, *restart)
    assert f"{name} was not written by this program" in said
    assert (out / name).read_text() == '{"name": "another program\'s"}\n'
    assert {path.name for path in out.iterdir()} == {name, ".lock"}


def test_results_stay_where_a_restart_cannot_begin(tmp_path, bert, text, capsys):
    out = tmp_path / "out"
    assert analyze("--model", bert, "--file", text, "--out", out, "--format", "npz") == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    refused(capsys, "--model", tmp_path / "empty", "--file", text, "--out", out, "--restart")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_run_that_came_to_nothing_leaves_the_directory_free(tmp_path, bert, text, capsys):
    out = tmp_path / "out"
    call = ("--model", bert, "--file", text, "--out", out, "--format", "npz")
    assert "at most 16" in refused(capsys, *call, "--max-length", 1000)
    assert analyze(*call, "--max-length", 8) == 0
    assert len(entries_in(out)) == 5


@pytest.mark.parametrize("place", ["model/maps", "model", "."])
def test_results_may_lie_in_the_model_s_directory_or_around_it(tmp_path, text, place, capsys):
    model, out = save_model(tmp_path / "model", "Bert", **SIZES), tmp_path / place
    call = ("--model", model, "--file", text, "--out", out, "--format", "npz")
    assert analyze(*call) == 0
    (out / "line-000003.npz").write_bytes(b"")
    assert analyze(*call) == 0
    assert (out / "line-000003.npz").stat().st_size > 0
    os.utime(model / "model.safetensors", (1, 1))
    capsys.readouterr()
    assert "a run with other model files" in refused(capsys, *call)


# --- What is refused


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--maps", "summed,sumed", "--maps must be any of weights, .* got 'sumed'"),
        ("--maps", ",", "--maps must name at least one"),
        ("--maps", "value_norms", "need a map of queries and keys"),
        ("--format", "pdf", "--format must be any of html, npz, .* got 'pdf'"),
        ("--batch-size", "0", "must be a whole number of at least 1, got '0'"),
        ("--max-length", "many", "got 'many'"),
        ("--device", "gpu", "torch cannot compute on 'gpu' here"),
        ("--text", "also", "not allowed with argument"),
        ("--out", "", "must name a directory, got ''"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, text, option, value, message, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        analyze("--model", "nowhere", "--file", text, "--out", out, option, value)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not out.exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert analyze(*arguments) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1, said
    return said


def test_what_cannot_be_done_is_said_in_one_line(tmp_path, bert, bart, text, capsys):
    (tmp_path / "latin").write_bytes(b"water\nTier\xe4\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nothing").touch()
    target = ("--target-text", "Tier")
    cases: list[tuple[Path | str, tuple[object, ...], str]] = [
        ("./nowhere", ("--file", text), "there is no model directory ./nowhere"),
        (tmp_path, ("--file", text), f"cannot load the model {tmp_path}"),
        (bert, ("--file", tmp_path / "none"), "none: No such file"),
        (bert, ("--file", tmp_path / "latin"), "latin, line 2: must be UTF-8"),
        (bert, ("--file", tmp_path / "pipe"), "pipe must be a regular file"),
        (bert, ("--text", "caf\udce9"), "--text, line 1: must be text"),
        (bert, ("--file", tmp_path / "nothing"), "nothing holds no line"),
        (bert, ("--file", text, "--out", text), f"cannot write to {text}"),
        (bart, ("--text", "water"), "(bart) needs a target text: give --target-text"),
        (bert, ("--text", "water", *target), "no decoder that reads a target text: leave out"),
        (bart, ("--file", text, *target), "as many lines as the text, 5, got 1"),
        (bert, ("--text", "water", "--max-length", 17), "--max-length must be at most 16"),
    ]
    for number, (model, arguments, message) in enumerate(cases):
        write = ("--format", "npz", "--out", tmp_path / f"out{number}")
        assert message in refused(capsys, "--model", model, *write, *arguments)


def test_map_that_the_model_has_not_is_said(tmp_path, capsys):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    gpt2 = save_model(tmp_path / "gpt2", "GPT2", **sizes)
    arguments = ("--text", "water", "--maps", "with_norm", "--format", "npz")
    capsys.readouterr()
    said = refused(capsys, "--model", gpt2, *arguments, "--out", tmp_path / "o")
    assert "has the map 'with_norm': its block normalises before the attention" in said


def test_maps_that_some_layers_lack_are_named_once(tmp_path, bart, capsys):
    texts = ("--text", "water", "--target-text", "Tier") * 2
    options = ("--maps", "with_residual,all", "--format", "npz", "--batch-size", 1)
    assert analyze("--model", bart, *texts, *options, "--out", tmp_path / "out") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "gave no map" in line]
    assert len(said) == 1
    assert "decoder.layers.0.encoder_attn gave no map 'with_residual': its queries are" in said[0]
    found = load_maps(tmp_path / "out" / "line-000001.npz")
    assert [found[n].with_residual is None for n in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ("encoder.layer.1.*", [1]),
        ("0", [0]),
        ("-1", [1]),
        ("*,1", [0, 1]),
        ("-2,encoder.layer.1.attention.self", [0, 1]),
    ],
)
def test_layers_are_chosen_by_patterns_and_numbers(tmp_path, bert, layers, kept):
    options = ("--text", "water", f"--layers={layers}", "--format", "npz", "--maps", "summed")
    assert analyze("--model", bert, *options, "--out", tmp_path / "out") == 0
    found = load_maps(tmp_path / "out" / "line-000001.npz")
    alone = recorded_alone(bert, "water", ("summed",))
    assert found.names == [alone.names[number] for number in kept]
    for name in found:
        torch.testing.assert_close(found[name].summed, alone[name].summed)


def test_runs_of_a_shared_layer_are_chosen_by_number(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 4, "embedding_size": 8}
    model = save_model(tmp_path / "albert", "Albert", **sizes)
    options = ("--text", "water", "--layers", "1,-1", "--format", "npz")
    assert analyze("--model", model, *options, "--out", tmp_path / "out") == 0
    names = load_maps(tmp_path / "out" / "line-000001.npz").names
    assert [name.partition("#")[2] for name in names] == ["2", "4"]


@pytest.mark.parametrize("layers", ["decoder.*", "2", "-3", "encoder.*,layer"])
def test_layers_that_are_not_there_are_told_with_those_that_are(tmp_path, bert, layers, capsys):
    arguments = ("--text", "water", "--layers", layers, "--out", tmp_path / "out")
    said = refused(capsys, "--model", bert, *arguments)
    assert f"of encoder.layer.0.attention.self, {LAYER}, got '{layers.split(',')[-1]}'" in said


@pytest.mark.parametrize(
    ("family", "options", "length"),
    [
        ("Roberta", {}, 15),
        ("XLMRobertaXL", {}, 15),
        ("Data2VecText", {}, 15),
        ("Esm", {"position_embedding_type": "absolute", "mask_token_id": 3}, 15),
        ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16}, 16),
        ("BioGpt", {}, 16),
        ("Bert", {}, 16),
    ],
)
def test_a_long_line_is_cut_by_the_model_s_table_of_positions(tmp_path, family, options, length):
    model = save_model(tmp_path / "model", family, **SIZES | options)
    arguments = ("--text", "water " * 50, "--maps", "summed", "--format", "npz")
    assert analyze("--model", model, *arguments, "--out", tmp_path / "out") == 0
    assert len(entries_in(tmp_path / "out")[0]["tokens"]) == length


@pytest.mark.parametrize(
    ("library", "command"), [("transformers", "'ikattn[analyze]'"), ("matplotlib", "'ikattn[viz]'")]
)
def test_a_missing_library_is_named(tmp_path, text, library, command, monkeypatch, capsys):
    monkeypatch.setattr(analyzing, "find_spec", lambda name: None if name == library else object())
    arguments = ("--file", text, "--format", "png", "--out", tmp_path / "out")
    said = refused(capsys, "--model", "model", *arguments)
    assert f"this needs {library}: pip install {command}" in said


def test_full_disk_keeps_what_is_finished(tmp_path, bert, text, monkeypatch, capsys):
    arguments = ("--model", bert, "--file", text, "--out", tmp_path / "out", "--format", "npz")
    with monkeypatch.context() as patched:
        save = analyzing.Recording.save

        def full(recording: Any, path: Path) -> None:
            if "000003" in path.name:
                raise OSError(28, f"cannot write {path}: No space left on device")
            save(recording, path)

        patched.setattr(analyzing.Recording, "save", full)
        assert analyze(*arguments) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [entry["line"] for entry in entries_in(tmp_path / "out")] == [1, 2]
    assert analyze(*arguments) == 0
    assert len(entries_in(tmp_path / "out")) == 5
