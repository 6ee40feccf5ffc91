"""How the benchmarks measure: rivals in turns in one process, best and median, ratios."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

Samples = dict[str, list[float]]


def processor() -> str:
    """The processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.processor()


def interleaved(rivals: dict[str, Callable[[], object]], seconds: float) -> Samples:
    """Seconds per call of each rival, sampled in turns for about `seconds`, at least 3 rounds."""
    for call in rivals.values():
        call()
    samples: Samples = {name: [] for name in rivals}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 3:
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    return samples


def show(title: str, samples: Samples, ours: str = "ikattn") -> None:
    """One line per rival: best and median, and how many times ours it takes, by both."""
    print(title)
    best, median = min(samples[ours]), statistics.median(samples[ours])
    for name, times in samples.items():
        b, m = min(times), statistics.median(times)
        print(
            f"  {name:10s} best {1e3 * b:9.3f} ms  median {1e3 * m:9.3f} ms"
            f"   x ikattn: {b / best:5.2f} {m / median:5.2f}   ({len(times)} samples)"
        )


def peak_memory(setup: str, call: str, warm_up: str = "") -> float:
    """MiB by which the resident set of a fresh process peaks, in a call, above what it was before.

    The peak counts from the call on: importing torch reaches higher than many calls do.
    """
    lines = [
        "import pathlib, torch, ikattn",
        "torch.set_num_threads(1)",
        "def peak():",
        "    status = pathlib.Path('/proc/self/status').read_text().splitlines()",
        "    return next(int(line.split()[1]) for line in status if line.startswith('VmHWM'))",
        textwrap.dedent(setup),
        textwrap.dedent(warm_up),
        "pathlib.Path('/proc/self/clear_refs').write_text('5')",
        "before = peak()",
        textwrap.dedent(call),
        "print(peak() - before)",
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    return int(result.stdout.splitlines()[-1]) / 1024
