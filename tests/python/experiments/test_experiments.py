"""All experiments together, and the comparisons beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from experiment_programs import load, ran, run
from programs import import_program

OPTIONS = {"initial_width": ["--heads", "1", "--head-dims", "8"]}
OPTIONS |= {"evaluation_noise": [], "rounded_features": []}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_the_comparisons_run(source_tree: Path, tmp_path: Path, name: str) -> None:
    options = OPTIONS[name]
    if name == "rounded_features":
        folder = source_tree.parent / "shared/data/regression"
        if not folder.is_dir():
            pytest.skip(f"there is no {folder}")
        options = ["--regression", str(folder)]
    assert "nan" not in ran(name, "--quick", *options, cwd=tmp_path)


@pytest.fixture
def everything(tmp_path: Path) -> ModuleType:
    """The program that runs all experiments; ``tmp_path / "data"`` holds what it looks for."""
    program = load("everything")
    markers = [marker for marker in program.MARKERS.values() if marker is not None]
    for number, marker in enumerate((*markers, "alignment.talp")):
        (tmp_path / f"data/{number}").mkdir(parents=True)
        (tmp_path / f"data/{number}" / marker).touch()
    return program


def test_everything_is_called_with_options_that_there_are(tmp_path, everything, monkeypatch):
    """Options are parsed alone; each program's own --quick runs in a test of its own."""
    pytest.importorskip("torch_geometric", reason="pip install 'ikattn[pyg]'")
    (tmp_path / "out").mkdir()
    names = [planned.name for planned in everything.PLAN]
    assert len(set(names)) == len(names)
    for planned in (*everything.PLAN, *everything.QUICK):
        command = everything.command_of(planned, tmp_path / "data", tmp_path / "out")
        monkeypatch.setattr("sys.argv", command[1:])
        options = import_program(Path(command[1])).parse_options()
        marker = everything.MARKERS[planned.program]
        assert marker is None or (options.data / marker).exists()


def test_everything_keeps_what_has_been_run(tmp_path, everything, monkeypatch, capsys):
    programs = {"good": "print('a result')", "bad": "raise SystemExit(3)"}
    monkeypatch.setattr(
        everything, "command_of", lambda run, data, out: [sys.executable, "-c", programs[run.name]]
    )
    good, bad = (everything.Run(name, "regression", ()) for name in programs)
    assert everything.execute(good, tmp_path, tmp_path)
    result, took = (tmp_path / "good.log").read_text().splitlines()
    assert result == "a result"
    assert took.endswith("0.0 of a core")
    assert everything.execute(good, tmp_path, tmp_path)
    assert "kept" in capsys.readouterr().out
    assert not everything.execute(bad, tmp_path, tmp_path)
    assert "failed" in capsys.readouterr().out
    assert not (tmp_path / "bad.log").exists()


def test_everything_follows_links_and_survives_a_bad_log(tmp_path, everything, capsys):
    (tmp_path / "links").mkdir()
    (tmp_path / "links/there").symlink_to(tmp_path / "data")
    assert everything.folder_of(tmp_path / "links", "alignment.talp").is_dir()
    (tmp_path / "a.log.partial").mkdir()
    assert not everything.attempt(everything.Run("a", "regression", ()), tmp_path, tmp_path)
    assert "a.log.partial" in capsys.readouterr().out


def test_everything_names_the_data_that_are_missing(tmp_path: Path) -> None:
    result = run("everything", "--data", tmp_path, "--out", "out", cwd=tmp_path)
    assert result.returncode == 2
    assert f"{tmp_path} holds no train.lc.norm.tok.de" in result.stderr
    assert not (tmp_path / "out").exists()


def test_everything_runs_only_what_is_named(tmp_path, everything, monkeypatch, capsys):
    runs = tuple(everything.Run(name, "regression", ()) for name in ("first", "second"))
    monkeypatch.setattr(everything, "PLAN", runs)
    monkeypatch.setattr(everything, "command_of", lambda *_: [sys.executable, "-c", ""])
    arguments = ["everything.py", "--data", str(tmp_path / "data"), "--out", str(tmp_path)]
    for name, status in (("second", 0), ("third", 2)):
        monkeypatch.setattr("sys.argv", [*arguments, "--only", name])
        with pytest.raises(SystemExit) as ended:
            everything.main()
        assert ended.value.code == status
    assert [log.name for log in tmp_path.glob("*.log")] == ["second.log"]
    assert "--only: expected some of first, second; got third" in capsys.readouterr().err
