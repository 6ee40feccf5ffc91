"""tests/gpu.sh where there is no GPU: its parts, their limits, and how it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def gpu_script(
    source_tree: Path, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script, its logs in ``folder`` and its Python the program in ``folder / "bin"``."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    told = os.environ | {"GPU_LOGS": str(folder), "PATH": path} | environment
    command = ["bash", str(source_tree / "tests/gpu.sh"), *arguments]
    return subprocess.run(command, env=told, capture_output=True, text=True)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program that the script takes for Python; it prints what it is called with."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python"
    program.write_text('#!/bin/sh\necho "called with $*"\n')
    program.chmod(0o755)
    return program


def test_all_parts_take_at_most_sixteen_minutes(source_tree: Path, tmp_path: Path) -> None:
    listed = gpu_script(source_tree, tmp_path, "--list").stdout.splitlines()
    limits = {name: int(seconds) for name, seconds in (line.split() for line in listed)}
    assert list(limits) == [
        *("build", "selftest", "programs", "suite", "suite_linear", "suite_mma", "float32"),
        *("calls", "replay", "memcheck", "racecheck", "initcheck", "synccheck", "table"),
        *("compare", "maps"),
    ]
    assert sum(limits.values()) <= 16 * 60


def test_a_wheel_that_was_built_elsewhere_is_installed(source_tree, tmp_path, python):
    wheel = tmp_path / "ikattn-1-py3-none-any.whl"
    wheel.touch()
    done = gpu_script(source_tree, tmp_path, "--wheel", str(wheel), "build")
    assert done.returncode == 0, done.stderr
    assert f"pip install --no-deps --no-index --force-reinstall {wheel}" in done.stdout
    assert (tmp_path / "build.log").read_text() in done.stdout
    assert "build          passed" in done.stdout
    missing = gpu_script(source_tree, tmp_path, "--wheel", "nowhere.whl", "build")
    assert (missing.returncode, missing.stderr) == (
        2,
        "tests/gpu.sh: there is no wheel nowhere.whl\n",
    )


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(source_tree, tmp_path, python):
    python.write_text('#!/bin/sh\ncase "$*" in *compilers*) sleep 60 ;; esac\n')
    done = gpu_script(source_tree, tmp_path, "replay", "maps", GPU_LIMIT="1")
    assert done.returncode == 1
    assert "replay         ended after its 1 s" in done.stdout
    assert "maps           passed" in done.stdout


def test_a_part_that_fails_is_told(source_tree: Path, tmp_path: Path, python: Path) -> None:
    python.write_text("#!/bin/sh\nexit 3\n")
    done = gpu_script(source_tree, tmp_path, "suite")
    assert done.returncode == 1
    assert "suite          FAILED with 3" in done.stdout


def test_other_parts_are_refused(source_tree: Path, tmp_path: Path) -> None:
    for arguments, message in ((["suit"], "there is no part suit"), (["--all"], "unknown option")):
        done = gpu_script(source_tree, tmp_path, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
