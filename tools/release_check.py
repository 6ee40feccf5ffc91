"""Tries the wheel in dist/ as a user would, beside each version of torch. A part of a release.

    python tools/release_check.py --torchs 2.11 2.12 2.13 2.14 2.15

For each torch: a fresh environment, into which pip installs torch and the wheel; nothing compiles.
Then the package is imported, the first block of README.md runs, the self-test and the tests of
`make check` pass, and a C++ program is built against the package and trains. A table of seconds
goes to stdout, for docs/guide/installing.md; the exit status is 1 where a step failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT = (
    "import time, torch; began = time.perf_counter(); import ikattn; "
    "print(round(1000 * (time.perf_counter() - began)))"
)
COLUMNS = (
    "torch",
    "from no environment to the output of README's first block, s",
    "of these `pip install` of the wheel, s",
    "self-test, s",
    "tests of `make check`, s",
    "passed",
    "`import ikattn` beyond torch, ms",
)


class Failed(Exception):
    """A step that went wrong."""


def run(*command: object, cwd: Path, **more: str) -> tuple[str, float]:
    """Runs a command; returns its output and the seconds that it took."""
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CMAKE"))}
    environment |= more
    began = time.perf_counter()
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"{' '.join(words[:5])} ...: {(done.stdout + done.stderr).strip()[-5000:]}")
    return done.stdout, time.perf_counter() - began


def check(series: str, wheel: Path, folder: Path) -> list[str]:
    """Returns a row of the table for one version of torch."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.perf_counter()
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    pip = (python, "-m", "pip", "install", "--quiet")
    run(*pip, f"torch=={series}.*", "numpy", cwd=folder)
    _, installing = run(*pip, "--only-binary=:all:", wheel, cwd=folder)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (folder / "readme.py").write_text(blocks[0])
    run(python, "readme.py", cwd=folder)
    from_nothing = time.perf_counter() - began
    torch, _ = run(python, "-c", "import torch; print(torch.__version__)", cwd=folder)
    milliseconds = min(int(run(python, "-c", IMPORT, cwd=folder)[0]) for _ in range(5))
    _, proving = run(python, "-m", "ikattn", "selftest", "--device", "cpu", cwd=folder)
    run(*pip, "cmake", "ninja", "setuptools>=77", f"{wheel}[test]", cwd=folder)
    tests = (python, "-m", "pytest", "-n", 2, "-q", "tests/python")
    told, testing = run(*tests, cwd=ROOT, IKATTN_TESTS="check")
    passed = re.findall(r"\d+ passed", told)[-1]
    prefixes, _ = run(python, "-m", "ikattn", "cmake-prefix-path", cwd=folder)
    cmake = folder / "venv/bin/cmake"
    where = ("-S", ROOT / "examples/cpp", "-B", "cpp", f"-DCMAKE_PREFIX_PATH={prefixes.strip()}")
    run(cmake, *where, cwd=folder)
    run(cmake, "--build", "cpp", "--target", "train_regression", cwd=folder)
    run(folder / "cpp/train_regression", cwd=folder)
    shutil.rmtree(folder)
    seconds = (f"{x:.0f}" for x in (from_nothing, installing, proving, testing))
    return [torch.strip(), *seconds, passed.split()[0], str(milliseconds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torchs", nargs="+", required=True, help="minor versions, such as 2.13")
    asked = parser.parse_args()
    (wheel,) = (ROOT / "dist").glob("*.whl")
    print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, Python {sys.version.split()[0]}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    failed = 0
    for series in asked.torchs:
        try:
            row = check(series, wheel, ROOT / "build/release" / series)
            print(f"| {' | '.join(row)} |", flush=True)
        except Failed as error:
            failed += 1
            print(f"| {series} | failed |\n\n{error}\n", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
