"""Drives CMake and packs what it installs. The rules of compilation are in CMakeLists.txt.

    pip install --no-build-isolation .

Read from the environment: MAX_JOBS or CMAKE_BUILD_PARALLEL_LEVEL (parallel compilations),
CMAKE_ARGS (more arguments for CMake), WITH_CUDA (0 or 1), IKATTN_ISA (native: for this processor
alone), IKATTN_DEBUG=1, CXX, IKATTN_TORCHS (folders of TorchConfig.cmake, with ; between them: one
wheel for several versions of torch, as `make wheel` builds it; unset: the torch of this Python).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent


def package_version() -> str:
    header = (ROOT / "csrc/include/ikattn/version.h").read_text()
    match = re.search(r'#define IKATTN_VERSION "(.+)"', header)
    assert match is not None
    return match.group(1)


def torch_folders() -> list[Path]:
    """Returns the folder of TorchConfig.cmake for each torch to build for, the oldest first."""
    named = [Path(name) for name in os.environ.get("IKATTN_TORCHS", "").split(";") if name]
    if named:
        return sorted(named, key=series_of)
    try:
        import torch
    except ImportError:
        return []
    return [Path(torch.utils.cmake_prefix_path) / "Torch"]


def series_of(folder: Path) -> tuple[int, int]:
    """Returns the minor version of the torch whose TorchConfig.cmake is in a folder."""
    header = folder.parents[2] / "include/torch/headeronly/version.h"
    numbers = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", header.read_text())
    return int(numbers[0]), int(numbers[1])


def torch_requirement() -> str:
    """Returns the versions of torch for which the package holds libraries."""
    series = [series_of(folder) for folder in torch_folders()]
    if not series:
        return "torch>=2.11"
    return f"torch>={series[0][0]}.{series[0][1]},<{series[-1][0]}.{series[-1][1] + 1}"


def find_tool(name: str) -> str | None:
    """A program from PATH or from this Python's own scripts (pip install cmake ninja)."""
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def run(*command: str | Path) -> None:
    arguments = [str(part) for part in command]
    print("+", shlex.join(arguments), flush=True)
    if subprocess.run(arguments, cwd=ROOT).returncode != 0:
        raise SetupError(f"`{shlex.join(arguments[:2])} ...` failed; its message stands above")


class BuildNative(Command):
    """Builds the library with CMake and installs it into the package."""

    description = "build libikattn.so with CMake"
    user_options: ClassVar = [("build-lib=", "d", "directory that receives the package")]

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False  # set by setuptools for `pip install -e`

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        build_dir = self.configure()
        jobs = os.environ.get("MAX_JOBS") or os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
        jobs = jobs or str(len(os.sched_getaffinity(0)))
        run(self.cmake(), "--build", build_dir, "--target", "ikattn_package", "--parallel", jobs)
        shutil.rmtree(self.package_dir() / "lib", ignore_errors=True)  # of an older build
        run(self.cmake(), "--install", build_dir, "--prefix", self.package_dir())

    def configure(self) -> Path:
        """Runs CMake in a directory that stays: the next build compiles only what changed."""
        if sys.platform != "linux":
            raise SetupError(f"ikattn is built on Linux alone, and this is {sys.platform}")
        folders = torch_folders()
        if not folders:
            raise SetupError(
                f"ikattn is compiled against PyTorch, which {sys.executable} cannot import; run\n"
                "  pip install torch==2.13.0\n"
                "  pip install --no-build-isolation ."
            )
        debug = os.environ.get("IKATTN_DEBUG", "0") not in ("", "0")
        major, minor = series_of(folders[-1])
        name = f"torch-{major}.{minor}" if len(folders) == 1 else "torch-several"
        build_dir = ROOT / "build" / f"{name}{'-debug' if debug else ''}"
        arguments = [
            f"-DTorch_DIR={folders[-1]}",
            f"-DIKATTN_MORE_TORCHS={';'.join(map(str, folders[:-1]))}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}",
            f"-DWITH_CUDA={os.environ.get('WITH_CUDA', 'AUTO')}",
            f"-DIKATTN_ISA={os.environ.get('IKATTN_ISA') or 'all'}",
            "-DCMAKE_INSTALL_LIBDIR=lib",
            # A wheel goes to other machines: no path of this one in the library.
            "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=OFF",
        ]
        ninja = find_tool("ninja")
        if ninja and not (build_dir / "Makefile").exists():
            arguments += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        arguments += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        run(self.cmake(), "-S", ROOT, "-B", build_dir, *arguments)
        return build_dir

    def cmake(self) -> str:
        path = find_tool("cmake")
        if path is None:
            raise SetupError(
                "ikattn is built with CMake >= 3.22, which is missing; run\n  pip install cmake"
            )
        return path

    def package_dir(self) -> Path:
        if self.editable_mode:
            return ROOT / "torch_ext" / "ikattn"
        assert self.build_lib is not None
        return Path(self.build_lib).resolve() / "ikattn"

    # What setuptools asks of a sub-command of `build`.
    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them

    def get_outputs(self) -> list[str]:
        installed = [self.package_dir() / name for name in ("lib", "include", "share")]
        files = [file for folder in installed for file in folder.rglob("*") if file.is_file()]
        return [str(file) for file in files]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]

    def run(self) -> None:
        # Or a module that was deleted from the sources would live on in the wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """The library holds no Python: one wheel serves every Python 3 of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    version=package_version(),
    install_requires=[torch_requirement()],
    distclass=PlatformDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel},
)
