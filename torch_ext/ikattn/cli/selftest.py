"""``python -m ikattn selftest``: every family of kernels of a device, proven on this machine.

Each family runs in a process of its own with a time limit, so that a kernel that hangs, or leaves
the GPU in an error, has a name. ``selftest_calls.py`` has the calls and the rule for errors.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ikattn
from ikattn._info import families, gpu
from ikattn._whole_files import whole_file
from ikattn.cli.selftest_calls import cpu_environments, gpu_checks

SECONDS = 120  # limit of the checks of a family
TIMED_SECONDS = 60


class Result(NamedTuple):
    """The result of a family; error: the largest over the allowed one."""

    family: str
    proven: str | None
    passed: bool
    error: float | None
    seconds: float
    says: str = ""
    ratio: float | None = None  # time over that of what it replaces


# --- One process for each family


def child_program(family: str, device: str, is_timed: bool) -> str:
    """Returns the program of the process of a family."""
    call = f"child({family!r}, {device!r}, {is_timed})"
    return f"from ikattn.cli.selftest_calls import child; {call}"


def _in_a_process(family: str, device: str, environment: dict[str, str], is_timed: bool) -> Result:
    program = child_program(family, device, is_timed)
    limit = TIMED_SECONDS if is_timed else SECONDS
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return Result(family, None, False, None, limit, f"was ended after {limit} s")
    seconds = time.perf_counter() - began
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        return Result(family, None, False, None, seconds, last)
    found: dict[str, Any] = json.loads(lines[-1])
    if "skipped" in found:
        return Result(family, None, True, None, seconds, f"not taken: {found['skipped']}")
    passed = found["error"] <= 1
    return Result(family, None, passed, found["error"], seconds, ratio=found.get("ratio"))


def run(device: str, *, unproven: bool = False, enable: bool = False) -> list[Result]:
    """Checks every family of a device: "cuda", "cpu", or the tests' "interpreter".

    With ``unproven`` also those that no GPU has proven, with ``enable`` of these also the time over
    that of what they replace. Results are in the order of the ledger. Without such a device, or
    kernels for it, there is a RuntimeError.
    """
    if device == "cpu":
        chosen = cpu_environments()
        proven = dict.fromkeys(chosen, "the CPU")
    else:
        if device == "cuda":
            reason = torch.ops.ikattn.why_no_kernels(torch.device("cuda"))
            if not torch.cuda.is_available() or reason:
                raise RuntimeError(reason or "torch finds no GPU here")
        checks, chosen, proven = gpu_checks(device), {}, {}
        for family in families():
            name = family["name"]
            here = family["here"] and f"this machine, on {family['here']}"
            on_gpu = family["gpu"] and f"{family['gpu']} at {family['commit']}"
            if unproven or enable or on_gpu or here:
                chosen[name] = checks[name].environment
                proven[name] = on_gpu or here

    def one(name: str, environment: dict[str, str]) -> Result:
        is_timed = enable and proven[name] is None
        result = _in_a_process(name, device, environment, is_timed)
        return result._replace(proven=proven[name])

    with ThreadPoolExecutor(1 if enable else 2) as pool:
        return list(pool.map(one, chosen.keys(), chosen.values()))


# --- The proof of this machine


def proofs_file() -> Path:
    """Where the library looks for what this machine has proven (csrc/support/cuda/families.cu)."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "ikattn" / "proven"


def _replace_lines(key: str, new: list[str]) -> None:
    """Replaces the lines of this machine, build and driver; those of others stay."""
    file = proofs_file()
    old = file.read_text().splitlines() if file.exists() else []
    lines = [line for line in old if not line.startswith(f"{key}\t")] + new
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as target:
        target.write("".join(f"{line}\n" for line in lines).encode())


def enable(results: list[Result], key: str, day: str | None = None) -> list[str]:
    """Writes down the families that passed and are faster than what they replace; their names."""
    names = [
        result.family
        for result in results
        if result.proven is None and result.passed and (result.ratio or math.inf) < 1
    ]
    day = day or date.today().isoformat()
    _replace_lines(key, [f"{key}\t{name}\t{day}" for name in names])
    return names


def forget(key: str) -> None:
    """Takes the proof of this machine back."""
    _replace_lines(key, [])


# --- The command


def table(results: list[Result]) -> str:
    """The results as lines of text."""
    rows = [("family", "proven", "passed", "error / allowed", "seconds", "time / replaced", "")]
    for family, proven, passed, error, seconds, says, ratio in results:
        known = "-" if error is None and passed else str(passed).lower()
        of_error, of_time = ("-" if x is None else f"{x:.2f}" for x in (error, ratio))
        rows.append((family, proven or "no", known, of_error, f"{seconds:.1f}", of_time, says))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[6]]).rstrip()
        for row in rows
    )


def main(options: Namespace) -> int:
    """Runs the command; the exit status is 1 where a family has failed, 2 where none can run."""
    key = torch.ops.ikattn.machine_key()
    if (options.enable or options.forget) and not key:
        print("ikattn selftest: there is no GPU here that could prove a family", file=sys.stderr)
        return 2
    if options.forget:
        forget(key)
        print(f"{proofs_file()} holds no proof of this machine")
        return 0
    try:
        results = run(options.device, unproven=options.unproven, enable=options.enable)
    except RuntimeError as error:
        print(f"ikattn selftest: {error}", file=sys.stderr)
        return 2
    print(f"{gpu()}\n" if options.device == "cuda" else "", table(results), sep="")
    if options.json is not None:
        about = {"info": ikattn.info(), "results": [result._asdict() for result in results]}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    if options.enable:
        names = enable(results, key)
        print(f"on by default here from now on: {', '.join(names) or 'nothing more'}")
    return 0 if all(result.passed for result in results) else 1
