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
    """MiB by which a call raises the peak resident set of a fresh process."""
    lines = [
        "import resource, torch, ikattn",
        "torch.set_num_threads(1)",
        textwrap.dedent(setup),
        textwrap.dedent(warm_up),
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss",
        textwrap.dedent(call),
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)",
    ]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    return int(result.stdout.splitlines()[-1]) / 1024
