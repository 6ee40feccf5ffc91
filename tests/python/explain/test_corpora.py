"""``python -m ikattn analyze`` by several processes: shards, ranks of torchrun, what is done."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from corpora import (
    RESULTS,
    analyze,
    assert_each_line_once,
    assert_same_sums,
    entries_in,
    of_parts,
    write_alone,
)
from ikattn.cli.progress import Ledger
from ikattn.cli.shards import Shard
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
    """Runs one process and returns its files."""
    return written[1]


# --- Shards


@pytest.mark.parametrize(
    ("option", "environment", "owned"),
    [
        (None, {}, range(12)),
        ("2/3", {}, (1, 4, 7, 10)),
        (None, {"RANK": "1", "WORLD_SIZE": "2"}, range(12)),  # without torchrun's own mark
        (None, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, range(1, 12, 2)),
        ("2/3", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (3, 9)),
    ],
)
def test_which_parts_are_a_process_s(
    option: str | None, environment: dict[str, str], owned: Any
) -> None:
    if "LOCAL_RANK" in environment:
        environment = environment | {"TORCHELASTIC_RUN_ID": "none"}
    shard = Shard.of(option, environment)
    assert [part for part in range(12) if shard.has(part)] == list(owned)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = [Shard(rank + 1, 6, rank, 6, rank % 3) for rank in range(3)]
    assert [shard.device("cuda") for shard in ranks[:2]] == ["cuda:0", "cuda:1"]
    assert [shard.device("cuda:0") for shard in ranks] == ["cuda:0"] * 3
    assert [shard.device("cpu") for shard in ranks] == ["cpu"] * 3
    assert Shard(2, 6).device("cuda") == "cuda"  # of a job array, which has its own machine
    with pytest.raises(ValueError, match=r"must have a GPU for each .* got 2 for local rank 2"):
        ranks[2].device("cuda")


@pytest.mark.parametrize("formats", ["npz", "sums,npz", "sums"])
def test_shards_make_together_what_one_process_makes(
    tmp_path: Path,
    bert: Path,
    text: Path,
    alone: Path,
    formats: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--model", bert, "--file", text, *of_parts(formats), "--format", formats)
    for k in (3, 1, 2):
        assert not (tmp_path / "sums.npz").exists()
        assert analyze(*arguments, "--out", tmp_path, "--shards", f"{k}/3") == 0
    said = capsys.readouterr()
    assert "shard 3/3 is done; others have" in said.err
    assert said.out.splitlines()[-1] == f"40 lines in {tmp_path}"
    if "npz" in formats:
        assert_each_line_once(tmp_path)
        for number in (1, 40):
            name = f"line-{number:06d}.npz"
            mine, theirs = load_maps(tmp_path / name), load_maps(alone / name)
            assert mine.batches[0].tokens == theirs.batches[0].tokens
    else:
        assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {
            *("manifest.json", "lines.jsonl", "sums.npz", "summary.html")
        }
    if "sums" in formats:
        assert_same_sums(tmp_path, alone)
        assert not list(tmp_path.glob("sums-*"))


def test_the_index_has_the_lines_of_all_shards(tmp_path: Path, bert: Path, text: Path) -> None:
    arguments = ("--model", bert, "--file", text, "--maps", "summed", "--out", tmp_path)
    for k in (1, 2):
        assert not (tmp_path / "index.html").exists()
        assert analyze(*arguments, "--shards", f"{k}/2") == 0
    index = (tmp_path / "index.html").read_text()
    assert index.count("<li value=") == 40
    (tmp_path / "index.html").unlink()  # as if the last one had been killed
    assert analyze(*arguments, "--shards", "2/2") == 0
    assert (tmp_path / "index.html").read_text() == index


def test_another_number_of_shards_goes_on(
    tmp_path: Path, bert: Path, text: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", bert, "--file", text, *RESULTS, "--format", "sums,npz")
    arguments += ("--out", tmp_path)
    added = Ledger.add
    count = iter(range(3))

    def stop(ledger: Ledger, entries: Any) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt
        added(ledger, entries)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "add", stop)
        assert analyze(*arguments, "--shards", "1/2") == 130
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("line-*")}
    done = {name for entry in entries_in(tmp_path) for name in entry["files"]}
    for k in (1, 2, 3):
        assert analyze(*arguments, "--shards", f"{k}/3") == 0
    assert_each_line_once(tmp_path)
    assert_same_sums(tmp_path, alone)
    kept = [path for path in before if path.name in done]
    assert len(kept) == 8
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)


@pytest.mark.parametrize("formats", ["npz", "sums"])
def test_processes_with_the_same_lines_count_them_once(
    tmp_path: Path,
    bert: Path,
    text: Path,
    alone: Path,
    formats: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 1/3 runs as a whole when 1/2 has written the files of its first lines."""
    arguments = ("--model", bert, "--file", text, *of_parts(formats), "--format", formats)
    arguments += ("--out", tmp_path)
    added = Ledger.add
    others = iter([("--shards", "1/3")])

    def add(ledger: Ledger, entries: Any) -> None:
        for shards in others:
            assert analyze(*arguments, *shards) == 0
        added(ledger, entries)

    monkeypatch.setattr(Ledger, "add", add)
    assert analyze(*arguments, "--shards", "1/2") == 0
    assert analyze(*arguments, "--shards", "2/2") == 0
    if formats == "npz":
        assert_each_line_once(tmp_path)
    else:
        assert sorted(entry["line"] for entry in entries_in(tmp_path)) == list(range(1, 41, 4))
        assert_same_sums(tmp_path, alone)


@pytest.mark.parametrize(
    ("held", "mode", "shards", "message"),
    [
        (".lock", fcntl.LOCK_EX, "1/2", "another run, of all lines, is writing to"),
        (".lock", fcntl.LOCK_SH, "1/1", "another run is writing to"),
        (".lock-shard-1-of-2", fcntl.LOCK_EX, "1/2", "another run is doing shard 1/2 in"),
    ],
)
def test_who_is_at_work_is_left_alone(
    tmp_path: Path,
    bert: Path,
    text: Path,
    held: str,
    mode: int,
    shards: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (tmp_path / held).open("w") as lock:
        fcntl.flock(lock, mode)
        arguments = ("--model", bert, "--file", text, "--format", "npz", "--out", tmp_path)
        assert analyze(*arguments, "--shards", shards) == 1
    assert message in capsys.readouterr().err


def test_a_shard_of_another_job_is_refused(
    tmp_path: Path, bert: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", bert, "--file", text, "--format", "sums", "--out", tmp_path)
    assert analyze(*arguments, "--shards", "1/2") == 0
    assert analyze(*arguments, "--shards", "2/2", "--part-lines", 5) == 1
    assert "a run with other lines in a part" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shards", "0/2"), "--shards must be k/n with k from 1 to n, got '0/2'"),
        (("--shards", "2"), "--shards must be k/n, for example 1/8, got '2'"),
        (("--shards", "3/2"), "k from 1 to n, got '3/2'"),
        (("--shards", "1/2", "--restart"), "--restart would remove what other shards have done"),
        (("--part-lines", "0"), "must be a whole number of at least 1"),
        (("--part-lines", "4"), "--part-lines is of the formats parquet, arrow and sums"),
        (("--target-column", "c"), "--target-column is of a table"),
        (("--column", "c"), "--column is of a table"),
        (("--split", "test"), "--split is of a --dataset"),
    ],
)
def test_wrong_shards_are_told(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        analyze("--model", "nowhere", "--file", "text", "--out", tmp_path / "out", *options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- What is done, told by all


def test_entries_of_many_processes_are_there_once_each(tmp_path: Path) -> None:
    path, total, children = tmp_path / "lines.jsonl", 300, []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with path.open("a+b") as file:
                    ledger = Ledger(path, file, total)
                    for number in range(1, total + 1):
                        ledger.add([{"line": number, "text": "é" * child, "files": []}])
                    status = int(ledger.count != total)
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert [entry["line"] for entry in entries_in(tmp_path)] == list(range(1, total + 1))


def test_an_entry_that_a_killed_process_left_unfinished_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    whole = json.dumps({"line": 2, "text": "", "files": []}) + "\n"
    path.write_text("7\n[]\n{}\n" + whole + '{"line": 3, "te')
    with path.open("a+b") as file, path.open("a+b") as other_file:
        ledger, other = Ledger(path, file, 8), Ledger(path, other_file, 8)
        assert ledger.count == 1
        ledger.add([{"line": 4, "through": 6, "files": []}])
        ledger.add([{"line": 4, "through": 6, "files": []}])
        other.follow()
        for known in (ledger, other):
            assert known.count == 4
            done = [known.has(range(line, line + 1)) for line in range(1, 9)]
            assert done == [False, True, False, True, True, True, False, False]
        other.add([{"line": line, "text": "", "files": []} for line in (1, 3, 7, 8)])
        ledger.follow()
        assert (other.is_last, ledger.is_last, ledger.count) == (True, False, 8)
    texts = path.read_text().splitlines()
    assert texts[4] == '{"line": 3, "te'
    assert len(texts) == 10


# --- torchrun


def torchrun(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "ikattn", "analyze", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


def test_ranks_of_torchrun_go_on_after_one_was_killed(tmp_path: Path, bert: Path) -> None:
    """kill -9 of one rank; then what all ranks make is what one process makes."""
    (tmp_path / "text").write_text("".join(f"water {'the ' * (i % 9)}\n" for i in range(160)))
    out = tmp_path / "out"
    options = ("--model", bert, "--file", tmp_path / "text", "--maps", "weights")
    options += ("--format", "sums,npz", "--part-lines", 5)
    process = torchrun(*options, "--out", out, "--restart")
    while process.poll() is None and len(list(out.glob("line-*"))) < 30:
        time.sleep(0.005)
    ranks = children_of(process.pid)
    os.kill(ranks[-1], signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    done = {name for entry in entries_in(out) for name in entry["files"] if "line" in name}
    times = {out / name: (out / name).stat().st_mtime_ns for name in done}
    assert 0 < len(done) < 160
    process = torchrun(*options, "--out", out)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert f"160 lines in {out}" in said
    assert said.count("160 lines in") == 1
    assert "160/160" in said or "160 of 160" in said  # the progress of both
    assert_each_line_once(out, 160)
    assert all(path.stat().st_mtime_ns == times[path] for path in times)
    assert analyze(*options, "--out", tmp_path / "alone") == 0
    assert_same_sums(out, tmp_path / "alone", sequences=160)


def test_ranks_begin_anew_together_and_only_once(
    tmp_path: Path, bert: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", bert, "--file", text, "--format", "npz", "--out", tmp_path)
    assert analyze(*arguments, "--max-length", 8) == 0
    waited: list[Shard] = []
    monkeypatch.setattr(Shard, "wait_for_others", lambda shard: waited.append(shard))
    monkeypatch.setattr(Shard, "waits", False)
    shards = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in shards.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert analyze(*arguments, "--restart") == 0
    assert [shard.rank for shard in waited] == [0, 1]
    assert_each_line_once(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("line-*")}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # after a rank has died
    assert analyze(*arguments, "--restart") == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("line-*")} == before
