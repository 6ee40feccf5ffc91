"""Builds one wheel for several versions of torch. A part of `make wheel`.

    python tools/wheel.py --torchs 2.11 2.12 2.13 2.14 2.15 [--cuda] [--out dist]

The torch of this environment serves for its own minor version. Others come from the index of pip
without their dependencies; headers and linked libraries are unpacked, no more. A torch with CUDA
serves for a wheel without. The wheel gets the tag --plat. It is refused where a library needs a
newer system, or a library that is neither torch's nor the system's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi

ROOT = Path(__file__).resolve().parent.parent
TORCHS = ROOT / "build" / "torchs"
NEEDED = re.compile(
    r"torch/(include/|share/cmake/Torch/|lib/lib(torch|torch_cpu|c10|c10_cuda|torch_cuda)\.so)"
)
# Libraries that torch brings, or the driver: they are in the process, and not in the wheel.
EXCLUDED = ("libtorch*", "libc10*", "libgomp*", "libcuda*", "libcudart*")


def run(*command: object, **environment: str) -> str:
    """Runs a command, shows what it says on stderr, and returns its output."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n`{' '.join(words[:4])} ...` failed with {done.returncode}")
    return done.stdout


def torch_of(series: str, with_cuda: bool) -> Path:
    """Returns the folder of TorchConfig.cmake of a torch, fetched where it is not there."""
    if torch.__version__.startswith(f"{series}.") and (torch.version.cuda or not with_cuda):
        return Path(torch.utils.cmake_prefix_path) / "Torch"
    folder = TORCHS / series
    if not (folder / "whole").exists():
        downloads = TORCHS / "downloads"
        run(
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"),
            *("--dest", downloads, f"torch=={series}.*"),
        )
        (wheel,) = downloads.glob(f"torch-{series}.*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if NEEDED.match(name)]
            packed.extractall(folder, names)
        wheel.unlink()
        (folder / "whole").touch()
    prefix = folder / "torch"
    if with_cuda and not (prefix / "lib/libc10_cuda.so").exists():
        sys.exit(f"torch {series} from pip has no CUDA: name another index, or leave out --cuda")
    return prefix / "share/cmake/Torch"


def platform_of(wheel: Path, newest: str) -> str:
    """Returns the tag of a wheel: `newest`, which its libraries must fulfil."""
    found = analyze_wheel_abi(
        Libc.GLIBC,
        Architecture.x86_64,
        wheel,
        frozenset(EXCLUDED),
        disable_isa_ext_check=True,
        allow_graft=False,
    ).overall_policy.name

    def age(platform: str) -> list[int]:
        return [int(number) for number in re.findall(r"_(\d+)", platform)[:2]]

    if not found.startswith("manylinux") or age(found) > age(newest):
        sys.exit(f"{wheel} is of {found}, and must be of {newest} or older: see auditwheel show")
    return newest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torchs", nargs="+", required=True, help="minor versions, such as 2.13")
    parser.add_argument("--cuda", action="store_true", help="with kernels for GPUs")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--plat", default="manylinux_2_28_x86_64", help="the tag of the wheel")
    asked = parser.parse_args()
    order = sorted(asked.torchs, key=lambda series: [int(part) for part in series.split(".")])
    folders = [str(torch_of(series, asked.cuda)) for series in order]
    raw = ROOT / "build" / "wheel"
    raw.mkdir(parents=True, exist_ok=True)
    for old in raw.glob("*.whl"):
        old.unlink()
    date = run("git", "log", "-1", "--format=%ct").strip()
    dated = {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", date)}
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", raw, ROOT),
        IKATTN_TORCHS=";".join(folders),
        WITH_CUDA=str(int(asked.cuda)),
        **dated,
    )
    (wheel,) = raw.glob("*.whl")
    platform = platform_of(wheel, asked.plat)
    (name,) = run(
        *(sys.executable, "-m", "wheel", "tags", "--platform-tag", platform, "--remove", wheel),
        **dated,
    ).splitlines()
    asked.out.mkdir(parents=True, exist_ok=True)
    final = (raw / name).rename(asked.out / name)
    run(sys.executable, "-m", "twine", "check", "--strict", final)
    print(f"{final}: {final.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
