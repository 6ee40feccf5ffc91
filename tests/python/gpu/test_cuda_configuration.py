"""The decisions of cmake/ikattnCuda.cmake on a torch, an nvcc and a GPU that are made up here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

USUAL = "80-real, 86-real, 89-real, 90-real, 100, 120"


def program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)


class Machine:
    """A folder with a torch, of CUDA 13, nvcc 13.0 that knows 75 to 120, and no GPU."""

    def __init__(self, folder: Path, source_tree: Path) -> None:
        self.folder, self.source_tree = folder, source_tree
        self.nvcc, self.torch = folder / "nvcc", folder / "lib/libc10_cuda.so"
        self.torch.parent.mkdir()
        self.torch.write_text("needs libcudart.so.13 to run\n")
        self.has_nvcc("13.0")
        self.has_gpu("")

    def has_nvcc(self, version: str) -> None:
        known = "75 80 86 87 88 89 90 100 103 110 120 121"
        program(
            self.nvcc,
            f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V1"\n'
            f'else for each in {known}; do echo "compute_$each"; done; fi',
        )

    def has_gpu(self, capability: str) -> None:
        program(self.folder / "nvidia-smi", f"echo {capability}" if capability else "exit 9")

    def decide(self, with_cuda: str = "AUTO", **environment: str) -> str:
        """Returns the configuration's words, or its error, on one line."""
        script = self.folder / "decide.cmake"
        script.write_text(
            "cmake_minimum_required(VERSION 3.22)\n"
            f'include("{self.source_tree}/cmake/ikattnCuda.cmake")\n'
            "ikattn_decide_cuda(decision)\n"
            'message(NOTICE "${decision}")\n'
        )
        given = {
            "WITH_CUDA": with_cuda,
            "CMAKE_CUDA_COMPILER": self.nvcc,
            "IKATTN_TORCH_PREFIX": self.folder,
        }
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("CUDAARCHS", "TORCH_CUDA_ARCH_LIST")
        }
        done = subprocess.run(
            ["cmake", *(f"-D{name}={value}" for name, value in given.items()), "-P", script],
            capture_output=True,
            text=True,
            env=kept | {"PATH": f"{self.folder}:{kept['PATH']}"} | environment,
        )
        said = " ".join(done.stderr.split())
        assert (done.returncode != 0) == ("CMake Error" in said), said
        return said


@pytest.fixture
def machine(tmp_path: Path, source_tree: Path) -> Machine:
    return Machine(tmp_path, source_tree)


def test_without_a_gpu_the_usual_ones_are_compiled_for(machine: Machine) -> None:
    assert machine.decide() == f"CUDA for {USUAL} (no GPU here of 8.0 or later: the usual ones)"


@pytest.mark.parametrize(
    ("capability", "architectures"),
    [("8.0", "80-real"), ("9.0", "90-real"), ("12.0", "120-real"), ("13.5", "121")],
)
def test_the_gpu_that_is_here_is_compiled_for(machine, capability, architectures):
    """A GPU that nvcc does not know gets the newest PTX."""
    machine.has_gpu(capability)
    assert machine.decide() == f"CUDA for {architectures} (the GPU that is here)"


def test_an_old_gpu_is_left_alone(machine: Machine) -> None:
    machine.has_gpu("7.5")
    assert machine.decide().startswith(f"CUDA for {USUAL} (no GPU here of 8.0 or later")


@pytest.mark.parametrize(
    ("variable", "given", "architectures"),
    [
        ("CUDAARCHS", "90", "90"),
        ("CUDAARCHS", "80-real;100", "80-real, 100"),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX", "80-real, 90a"),
        ("TORCH_CUDA_ARCH_LIST", "8.6 12.0", "86-real, 120-real"),
    ],
)
def test_the_environment_is_heard(machine, variable, given, architectures):
    machine.has_gpu("8.9")
    assert machine.decide(**{variable: given}) == f"CUDA for {architectures} ({variable})"


@pytest.mark.parametrize(
    ("variable", "given", "said"),
    [
        ("CUDAARCHS", "75", "kernels for 75 were asked for, but they need compute capability 8.0"),
        ("CUDAARCHS", "all-major", "architectures must be numbers such as 90 or 90-real, got all"),
        ("CUDAARCHS", "native", "architectures must be numbers such as 90 or 90-real, got native"),
        ("TORCH_CUDA_ARCH_LIST", "Hopper", "must list compute capabilities such as 9.0"),
        ("TORCH_CUDA_ARCH_LIST", "7.0;9.0", "kernels for 70-real were asked for"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(machine, variable, given, said):
    assert said in machine.decide(**{variable: given})


def test_a_library_without_cuda_says_why(machine: Machine) -> None:
    assert machine.decide("0") == "CPU only (WITH_CUDA=0)"
    machine.torch.write_text("needs libcudart.so.12 to run\n")
    assert "CPU only (this torch is of CUDA 12, but" in machine.decide()
    machine.has_nvcc("12.4")
    assert "nvcc is of CUDA 12.4, and 12.5 is needed)" in machine.decide()
    machine.torch.unlink()
    assert machine.decide() == "CPU only (this torch has no CUDA)"
    assert "WITH_CUDA=1, but this torch has no CUDA. Unset WITH_CUDA" in machine.decide("1")
