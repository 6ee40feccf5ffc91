"""Runs and imports programs, and builds the C++ ones in examples/cpp against the package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import util
from pathlib import Path
from types import ModuleType

import torch


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def run_checked(*command: object, cwd: Path, **environment: str) -> str:
    finished = run(*command, cwd=cwd, **environment)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output[-8000:]
    return output


def run_python(
    path: Path, *arguments: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """One thread, and no window for pictures."""
    settings = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **environment}
    return run(sys.executable, path, *arguments, cwd=cwd, **settings)


def megabytes_grown(before: str, then: str) -> float:
    """Runs both in one process, and returns by how much the second raised its peak of memory."""
    peak = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
    parts = ("import resource, torch, ikattn\ntorch.set_num_threads(1)", before, f"first = {peak}")
    parts += (then, f"print({peak} - first)")
    program = "\n".join(map(textwrap.dedent, parts))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


def import_program(path: Path) -> ModuleType:
    """The module of a file that no package holds."""
    spec = util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configure_examples(source_tree: Path, build: Path, prefix: str) -> tuple[object, ...]:
    return (
        *("cmake", "-S", source_tree / "examples/cpp", "-B", build),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_PREFIX_PATH={prefix}"),
    )


def build_examples(source_tree: Path, build: Path, prefix: Path | str, *programs: str) -> None:
    """Builds some of the programs, for each takes half a minute."""
    prefixes = f"{prefix};{torch.utils.cmake_prefix_path}"
    run_checked(*configure_examples(source_tree, build, prefixes), cwd=source_tree)
    run_checked("cmake", "--build", build, "--target", *programs, cwd=source_tree)
