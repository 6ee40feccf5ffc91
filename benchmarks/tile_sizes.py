"""Whether the sizes in csrc/support/cpu/sizes.h are well chosen: the kernels with others, in turns.

Builds the library anew with one size changed at a time, for AVX-512 and AVX2, and prints the time
with the other size over that with the one there is: above 1 the one there is is better. Each is the
best of processes that take turns. Some forty minutes; it needs ninja and a processor with AVX-512.

    export OMP_WAIT_POLICY=passive
    python benchmarks/tile_sizes.py                      # all
    python benchmarks/tile_sizes.py kForwardRows         # some
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from timing import interleaved, processor
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SIZES = "csrc/support/cpu/sizes.h"
ISAS: dict[str, dict[str, str]] = {"avx512": {}, "avx2": {"ATEN_CPU_CAPABILITY": "avx2"}}
# A chunk of causal sums is one sweep.
WITH_IT = {"kBackwardKeyBlocks": ("csrc/attention/calls/linear_time.h", "kCausalChunk", 64)}
# Each size with others, and the calls that go by it.
ALTERNATIVES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "kTileRows": ((4,), ("forward", "backward")),
    "kStripVectors": ((2, 3), ("forward", "backward")),
    "kForwardRows": ((96,), ("forward", "short")),
    "kCausalRows": ((32, 128), ("causal", "short causal")),
    "kWeightRows": ((16, 96), ("weights",)),
    "kBackwardRows": ((32,), ("backward",)),
    "kBackwardKeyBlocks": ((1,), ("backward", "causal backward")),
    "kBandRows": ((32,), ("causal", "short causal", "causal backward")),
    "kPartBlocks": ((4, 64), ("forward", "few queries")),
    "kFrequencyTokens": ((1024,), ("backward",)),
    "kMomentTokens": ((128, 512), ("linear", "linear backward")),
    "kProductRows": ((384,), ("linear", "linear backward")),
    "kProductPanels": ((8, 32), ("linear", "linear backward")),
    "kRowsTogether": ((4,), ("kept features",)),
    "kKeysTogether": ((256, 4096), ("kept features",)),
    "kPairRows": ((16, 64), ("contributions",)),
    "kRowGroup": ((2,), ("contributions",)),
    "kVectorCache": ((640 << 10, 2560 << 10), ("vectors",)),
    "kProductTileRows": ((128, 256), ("mixing ratios", "mixing ratios backward")),
    "kProductTileColumns": ((128, 512), ("mixing ratios", "mixing ratios backward")),
}


# --- In a process of its own: seconds per call


def attention(length: int, frequencies: int, *, rows: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randn(3, 1, 2, length, 64)
    w1, w2 = 0.05 * torch.randn(2, 2, 64, frequencies)
    names = ("query", "key", "value", "w1", "w2")
    given = dict(zip(names, (*tokens, w1, w2), strict=True))
    return given | {"query": given["query"][:, :, :rows].contiguous()}


def forward(given: dict[str, Tensor], **options: bool) -> Callable[[], object]:
    return lambda: torch.ops.ikattn.implicit_kernel_attention(**given, **options)


def backward(given: dict[str, Tensor], **options: bool) -> Callable[[], object]:
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    output = torch.ops.ikattn.implicit_kernel_attention(**leaves, **options)[0]
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, list(leaves.values()), gradient, retain_graph=True)


def weights(given: dict[str, Tensor]) -> Callable[[], object]:
    given = {name: x for name, x in given.items() if name != "value"}
    return lambda: torch.ops.ikattn.implicit_kernel_weights(**given)


def contributions(
    tokens: int, number: int, *, rows: int | None = None, backward: bool = False
) -> Callable[[], object]:
    weights = torch.rand(1, 12, tokens if rows is None else rows, tokens).softmax(-1)
    value, projection = torch.randn(1, 12, tokens, 64), 0.05 * torch.randn(768, 768)
    maps = [number == place for place in range(6)]
    maps_of = torch.ops.ikattn.contribution_maps
    if not backward:
        return lambda: maps_of(weights, value, projection, maps=maps)
    leaves = [x.requires_grad_() for x in (weights, value, projection)]
    output = maps_of(*leaves, maps=maps)[number]
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


def kept_features() -> Callable[[], object]:
    torch.manual_seed(0)
    query, key = torch.randn(1, 8, 8, 128), torch.randn(1, 8, 4096, 128)
    logits, value = torch.zeros(1, 8, 1, 4096).expand(-1, -1, 8, -1), torch.randn(1, 8, 4096, 64)
    return lambda: torch.ops.ikattn.attention_from_features(query, key, logits, value, 1e-5)


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    "forward": lambda: forward(attention(2048, 64)),
    "short": lambda: forward(attention(192, 64)),
    "causal": lambda: forward(attention(2048, 64), is_causal=True),
    "short causal": lambda: forward(attention(192, 64), is_causal=True),
    "few queries": lambda: forward(attention(16384, 64, rows=48)),
    "backward": lambda: backward(attention(1024, 64)),
    "causal backward": lambda: backward(attention(1024, 64), is_causal=True),
    "linear": lambda: forward(attention(4096, 16)),
    "linear backward": lambda: backward(attention(4096, 16)),
    "kept features": kept_features,
    "weights": lambda: weights(attention(1024, 64)),
    "contributions": lambda: contributions(512, 1),
    "vectors": lambda: contributions(512, 1, rows=1),
    "mixing ratios": lambda: contributions(256, 5),
    "mixing ratios backward": lambda: contributions(256, 5, backward=True),
}


def measure(library: str, cases: list[str]) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.ops.load_library(library)
    samples = interleaved({case: CASES[case]() for case in cases}, 0.3 * len(cases))
    return {case: min(times) for case, times in samples.items()}


# --- Libraries


class Builds:
    """Libraries of a copy of the sources in which sizes are changed."""

    def __init__(self, folder: Path) -> None:
        self.source, self.build, self.folder = folder / "source", folder / "build", folder
        ignored = shutil.ignore_patterns("__pycache__", "cuda")
        shutil.copytree(ROOT / "csrc", self.source / "csrc", ignore=ignored)
        shutil.copytree(ROOT / "cmake", self.source / "cmake")
        shutil.copy(ROOT / "CMakeLists.txt", self.source)
        torch_dir = Path(torch.utils.cmake_prefix_path) / "Torch"
        configure = ["cmake", "-S", self.source, "-B", self.build, "-G", "Ninja"]
        self.run([*configure, f"-DTorch_DIR={torch_dir}", "-DWITH_CUDA=OFF"])
        self.run(["ninja", "-C", self.build, "ikattn"])

    def run(self, command: list[str | Path]) -> str:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
        return result.stdout

    def library(self) -> Path:
        (found,) = self.build.rglob("libikattn.so")
        return found

    def base(self) -> Path:
        return Path(shutil.copy(self.library(), self.folder / "base.so"))

    def changed(self, name: str, value: int) -> Path:
        """Only kernels of the instruction sets above are compiled, and then linked."""
        self.set(SIZES, name, value)
        if name in WITH_IT:
            header, other, factor = WITH_IT[name]
            self.set(header, other, factor * value)
        kinds = ("attention", "contributions")
        self.run(["ninja", "-C", self.build, *(f"ikattn_{k}_{isa}" for k in kinds for isa in ISAS)])
        link = self.run(["ninja", "-C", self.build, "-t", "commands", "libikattn.so"])
        subprocess.run(link.splitlines()[-1], shell=True, cwd=self.build, check=True)
        for header in {SIZES, *(header for header, _, _ in WITH_IT.values())}:
            shutil.copy(ROOT / header, self.source / header)
        return Path(shutil.copy(self.library(), self.folder / "changed.so"))

    def set(self, header: str, name: str, value: int) -> None:
        file = self.source / header
        text, count = re.subn(
            rf"(constexpr \w+ {name} = )[^;]+;", rf"\g<1>{value};", file.read_text()
        )
        assert count, name
        file.write_text(text)


def compare(base: Path, changed: Path, cases: tuple[str, ...], isa: str) -> dict[str, float]:
    """Time with `changed` over time with `base`."""
    environment = os.environ | ISAS[isa]
    best: dict[Path, dict[str, float]] = {base: {}, changed: {}}
    for _ in range(3):
        for library, known in best.items():
            call = [sys.executable, __file__, "--library", str(library), *cases]
            output = subprocess.run(
                call, check=True, capture_output=True, text=True, env=environment
            )
            for case, seconds in json.loads(output.stdout).items():
                known[case] = min(seconds, known.get(case, seconds))
    return {case: best[changed][case] / best[base][case] for case in cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of sizes; all by default")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        print(json.dumps(measure(options.library, options.names)))
        return
    print(
        f"{processor()}, one thread, float32: time with another size / time with the one there is"
    )
    print("| size | is | other | " + " | ".join(ISAS) + " |")
    print("|" + "---|" * (3 + len(ISAS)))
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(Path(folder))
        base = builds.base()
        for name in options.names or ALTERNATIVES:
            values, cases = ALTERNATIVES[name]
            are_now = re.findall(rf"constexpr \w+ {name} = ([^;]+);", (ROOT / SIZES).read_text())
            assert are_now, name
            is_now = ", ".join(dict.fromkeys(are_now))
            for value in values:
                changed = builds.changed(name, value)
                cells = []
                for isa in ISAS:
                    ratios = compare(base, changed, cases, isa)
                    cells.append(", ".join(f"{case} {x:.2f}" for case, x in ratios.items()))
                print(f"| {name} | {is_now} | {value} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
