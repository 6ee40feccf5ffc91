"""Runs the tests of the operators once for every set of instructions this processor has.

    python tests/instructions.py                       # a handful of samples in each
    IKATTN_TESTS=full python tests/instructions.py     # all that is marked `operators`
    python tests/instructions.py baseline amx          # some of the sets

A process chooses its instructions once, when the library is loaded, so that each set is a run of
pytest of its own, two at a time. The set that a process takes by itself is left out: the other
tests use it. Sets that the processor lacks are named and passed over. Ends with 1 if a run failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent / "python"
sys.path.insert(0, str(TESTS / "support"))

from processors import AVX512, INSTRUCTION_SETS, SIXTEEN_BITS, processor_flags  # noqa: E402

IS_FULL = os.environ.get("IKATTN_TESTS") == "full"


@dataclass(frozen=True)
class Run:
    """The tests in processes of one environment."""

    name: str
    environment: Mapping[str, str]
    needs: frozenset[str] = frozenset()  # flags of the processor
    lacks: str = ""  # a flag with which there is nothing to run
    selected: str = ""  # an expression of pytest's -k

    def why_not(self) -> str:
        """Empty: it can run here."""
        flags = processor_flags()
        if self.lacks in flags:
            return f"the processor has {self.lacks}: the run of that set is this one's"
        missing = sorted(self.needs - flags)
        return f"the processor lacks {', '.join(missing)}" if missing else ""


def own_instructions() -> tuple[str, str]:
    """Returns the instructions that a process takes, and those for products of 16 bits."""
    program = (
        "import torch, ikattn\n"
        "print(torch.ops.ikattn.instruction_set(), torch.ops.ikattn.sixteen_bit_instructions())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    own, of_sixteen_bits = printed.stdout.split()
    return own, of_sixteen_bits


def plan() -> list[Run]:
    """All runs; those of linear time on every set only in ``full``."""
    own, own_sixteen_bits = own_instructions()
    runs = []
    for capability, (name, flags) in INSTRUCTION_SETS.items():
        needs, told = frozenset(flags), {"ATEN_CPU_CAPABILITY": capability}
        if name != own:
            runs.append(Run(name, told, needs))
        if name == own or IS_FULL:
            # Linear time there are no products of 16 bits.
            told |= {"IKATTN_LINEAR_TIME": "always"}
            runs.append(Run(f"{name}-linear", told, needs, selected="not sixteen_bits"))
    for name, flags in SIXTEEN_BITS.items():
        told = {"IKATTN_SIXTEEN_BITS": name}
        if name != own_sixteen_bits:
            of_bfloat16 = "bfloat16 or sixteen_bits or fuzzed"
            runs.append(Run(f"sixteen-{name}", told, frozenset(flags), selected=of_bfloat16))
    if IS_FULL:
        beside = frozenset({*AVX512, "avx512_vnni", "avx512_bf16"})
        told = {"IKATTN_SIXTEEN_BITS": "amx"}
        runs.append(Run("imitated-amx", told, beside, lacks="amx_tile"))
    return runs


def files_with_such_tests() -> list[str]:
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.operators" in path.read_text()]
    return sorted(str(path) for path in marked)


def pytest(run: Run, *arguments: str, **environment: str) -> bool:
    """Whether the tests pass; what they print is printed at their end."""
    told = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **run.environment, **environment}
    told["IKATTN_TESTS"] = "full" if IS_FULL else "check"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    print(f"=== {run.name}", done.stdout + done.stderr, sep="\n", end="", flush=True)
    return done.returncode == 0


def imitate_amx(run: Run) -> bool:
    """On a processor without AMX its instructions trap, and a library does what they would."""
    with tempfile.TemporaryDirectory() as folder:
        library, count = Path(folder) / "libimitated_amx.so", Path(folder) / "products"
        source = TESTS.parent / "cpp/amx/imitated_amx.cpp"
        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        options = ["-std=c++20", "-O3", "-mavx2", "-mfma", "-fPIC", "-shared"]
        subprocess.run([compiler, *options, "-o", library, source], check=True)
        # pytest's faulthandler would take the trap for itself.
        passed = pytest(
            run,
            *("-p", "no:faulthandler", str(TESTS / "operators/test_sixteen_bits.py")),
            LD_PRELOAD=str(library),
            IKATTN_IMITATED_AMX=str(count),
        )
        products, palette = map(int, count.read_text().split())
        if products == 0 or palette != 0:
            print(f"imitated AMX: {products} products, tiles left behind: {palette}")
        return passed and products > 0 and palette == 0


def told_of(run: Run) -> tuple[bool, str]:
    """Whether a run passes or cannot be here, and a line that says so."""
    if reason := run.why_not():
        return True, f"{run.name:20} not here: {reason}"
    began = time.monotonic()
    if run.name == "imitated-amx":
        passed = imitate_amx(run)
    else:
        passed = pytest(run, "-m", "operators", "-k", run.selected, *files_with_such_tests())
    took = time.monotonic() - began
    return passed, f"{run.name:20} {'passed' if passed else 'FAILED'}, {took:.0f} s"


def main() -> int:
    runs, wanted = plan(), sys.argv[1:]
    if unknown := set(wanted) - {run.name for run in runs}:
        print(f"there is no set {', '.join(sorted(unknown))}; there are: ", end="")
        print(*(run.name for run in runs), sep=", ")
        return 2
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(told_of, [x for x in runs if not wanted or x.name in wanted]))
    print("=== sets of instructions", *(line for _, line in results), sep="\n")
    return int(not all(passed for passed, _ in results))


if __name__ == "__main__":
    sys.exit(main())
