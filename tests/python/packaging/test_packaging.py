"""The package as its users meet it: sdist, wheel, C++ consumers, and builds that cannot work."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import ikattn
from ikattn import _library, cli
from ikattn._library import cmake_prefix_path
from programs import build_examples, configure_examples, run, run_checked

PACKAGED_FOLDERS = ("csrc", "cmake", "torch_ext", "tests", "examples")
LIB = Path(ikattn.__file__).parent / "lib"
BUILD = _library.library_for(torch.__version__, torch.version.cuda, LIB).parent.name
BUILT = re.compile(r"__pycache__|\.egg-info|torch_ext/ikattn/(lib|include|share)")
ATTENTION = """
import torch, ikattn
query = torch.randn(1, 2, 5, 8)
output = ikattn.implicit_kernel_attention(query, query, query, torch.randn(2, 8, 4))
assert output.shape == query.shape, output.shape
print(ikattn.__file__)
"""


def files_in_tree(source_tree: Path) -> set[str]:
    """Files that belong to the project, below the folders that an sdist must hold completely."""
    if (source_tree / ".git").exists():
        command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
        listed = run_checked(*command, *PACKAGED_FOLDERS, cwd=source_tree).split()
        return {name for name in listed if (source_tree / name).exists()}
    return {
        str(path.relative_to(source_tree))
        for folder in PACKAGED_FOLDERS
        for path in (source_tree / folder).rglob("*")
        if path.is_file() and not BUILT.search(str(path))
    }


@pytest.fixture(scope="module")
def sdist(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run_checked(sys.executable, "-c", build, cwd=source_tree)
    return next(folder.glob("ikattn-*.tar.gz"))


def test_sdist_holds_every_file_of_the_tree(source_tree: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert not [
        name for name in packed if name.startswith("torch_ext/ikattn/") and BUILT.search(name)
    ]
    assert files_in_tree(source_tree) <= packed
    assert {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"} <= packed


@pytest.mark.full
@pytest.mark.compiles
def test_package_installs_from_its_sdist(sdist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run_checked(
        *(sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"),
        *("--target", site, sdist),
        cwd=tmp_path,
    )
    imported = run_checked(sys.executable, "-c", ATTENTION, cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(imported.strip()).is_relative_to(site)
    for name in (
        "py.typed",
        f"lib/{BUILD}/libikattn.so",
        "lib/libikattn_kernels.so",
        "include/ikattn/attention.h",
        "share/cmake/ikattn/ikattnConfig.cmake",
    ):
        assert (site / "ikattn" / name).exists(), name


def train_example(source_tree: Path, build: Path, prefix: Path | str) -> None:
    build_examples(source_tree, build, prefix, "train_regression")
    printed = run_checked(build / "train_regression", cwd=build)
    assert "loss" in printed


@pytest.mark.full
@pytest.mark.compiles
def test_cpp_program_trains_with_the_pip_installed_package(source_tree, tmp_path):
    train_example(source_tree, tmp_path, cmake_prefix_path())


@pytest.mark.full
@pytest.mark.compiles
def test_cpp_program_trains_after_cmake_install(source_tree: Path, tmp_path: Path) -> None:
    build = source_tree / "build" / BUILD.partition("+")[0]
    if not (build / BUILD / "libikattn.so").exists():
        pytest.skip(f"no CMake build in {build}: the package was installed from elsewhere")
    prefix = tmp_path / "prefix"
    run_checked("cmake", "--install", build, "--prefix", prefix, cwd=source_tree)
    train_example(source_tree, tmp_path / "build", prefix)


def test_find_package_names_both_versions_when_torch_differs(source_tree, tmp_path):
    other = tmp_path / "torch"
    version = other / "include/torch/headeronly/version.h"
    config = other / "share/cmake/Torch/TorchConfig.cmake"
    for file in (version, config):
        file.parent.mkdir(parents=True)
        file.touch()
    numbers = {"MAJOR": 9, "MINOR": 8, "PATCH": 7}
    version.write_text("".join(f"#define TORCH_VERSION_{k} {v}\n" for k, v in numbers.items()))
    prefixes = f"{cmake_prefix_path()};{other}"
    finished = run(*configure_examples(source_tree, tmp_path, prefixes), cwd=source_tree)
    assert finished.returncode != 0
    assert "got torch 9.8.7" in " ".join(finished.stderr.split())
    assert "was built for torch " in " ".join(finished.stderr.split())


def test_build_without_torch_says_how_to_get_it(source_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    finished = run(
        *(sys.executable, "setup.py", "-q", "build", "--build-base", tmp_path),
        cwd=source_tree,
        PYTHONPATH=str(tmp_path),
    )
    assert finished.returncode != 0
    assert "ikattn is compiled against PyTorch" in finished.stderr
    assert "pip install torch==" in finished.stderr
    assert "pip install --no-build-isolation ." in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("compiler", [("GNU", "11.4.0"), ("Clang", "15.0.7"), ("Intel", "2021.1")])
def test_build_with_an_unsupported_compiler_names_it(source_tree, compiler):
    name, version = compiler
    finished = run(
        *("cmake", f"-DCMAKE_CXX_COMPILER_ID={name}", f"-DCMAKE_CXX_COMPILER_VERSION={version}"),
        *("-P", "cmake/ikattnCompiler.cmake"),
        cwd=source_tree,
    )
    assert finished.returncode != 0
    message = " ".join(finished.stderr.split())
    assert f"needs GCC >= 12 or Clang >= 16, got {name} {version}" in message


def test_other_instruction_sets_to_build_are_refused(source_tree: Path) -> None:
    command = ("cmake", "-DIKATTN_ISA=avx2", "-P", "cmake/ikattnKernel.cmake")
    finished = run(*command, cwd=source_tree)
    assert finished.returncode != 0
    assert "IKATTN_ISA must be all or native, got avx2" in finished.stderr


@pytest.mark.full
@pytest.mark.compiles
def test_a_library_for_this_processor_alone_says_what_it_lacks(source_tree, tmp_path):
    torch_dir = f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch"
    options = ("-DIKATTN_ISA=native", "-DWITH_CUDA=OFF", torch_dir)
    run_checked("cmake", "-S", source_tree, "-B", tmp_path, *options, cwd=source_tree)
    run_checked("cmake", "--build", tmp_path, "--target", "ikattn", "-j", 2, cwd=source_tree)
    library = tmp_path / BUILD.partition("+")[0] / "libikattn.so"
    program = (
        f"import torch; torch.ops.load_library({str(library)!r})\n"
        "q = torch.randn(1, 2, 40, 16, dtype=torch.bfloat16)\n"
        "print(torch.ops.ikattn.implicit_kernel_attention(q, q, q, torch.randn(2, 16, 8))[0].shape)"
    )
    assert "[1, 2, 40, 16]" in run_checked(sys.executable, "-c", program, cwd=tmp_path)
    if torch.ops.ikattn.instruction_set() != "baseline":
        told = {"ATEN_CPU_CAPABILITY": "default"}
        finished = run(sys.executable, "-c", program, cwd=tmp_path, **told)
        assert "holds no kernels for baseline, which this process would take" in finished.stderr


def refused_import(folder: Path) -> str:
    """Returns the last line of an import that must fail."""
    finished = run(sys.executable, "-c", "import ikattn", cwd=folder, PYTHONPATH=str(folder))
    assert finished.returncode != 0
    return finished.stderr.strip().splitlines()[-1]


def test_import_into_another_torch_says_built_for_and_got(tmp_path: Path) -> None:
    shutil.copytree(Path(ikattn.__file__).parent, tmp_path / "ikattn")
    libraries = tmp_path / "ikattn/lib"
    for built in libraries.glob("torch-*"):
        shutil.rmtree(built)
    for series in ("1.13", "1.9"):
        (libraries / f"torch-{series}").mkdir()
        (libraries / f"torch-{series}/libikattn.so").touch()
    error = refused_import(tmp_path)
    there = "ImportError: ikattn was built for torch 1.9, 1.13, but this is torch "
    assert error.startswith(there)
    assert "run: pip install --no-build-isolation" in error


def test_the_library_is_that_of_the_build_of_torch(tmp_path: Path) -> None:
    for name in ("torch-2.13", "torch-2.13+cu13", "torch-2.9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libikattn.so").touch()
    for running, cuda, name in (
        ("2.13.0", None, "torch-2.13"),
        ("2.13.1+cu130", "13.0", "torch-2.13+cu13"),
        ("2.13.1+cu126", "12.6", "torch-2.13"),
        ("2.13.0a0+git1", None, "torch-2.13"),
        ("2.9.1+cu130", "13.0", "torch-2.9"),
    ):
        found = _library.library_for(running, cuda, tmp_path)
        assert found == tmp_path / name / "libikattn.so"
    there = r"built for torch 2\.9, 2\.13, 2\.13\+cu13, but this is torch 2\.1\.3"
    with pytest.raises(ImportError, match=there):
        _library.library_for("2.1.3", None, tmp_path)


def test_import_without_a_library_says_how_to_build_it(tmp_path: Path) -> None:
    package = tmp_path / "ikattn"
    package.mkdir()
    for source in Path(ikattn.__file__).parent.glob("*.py"):
        shutil.copy(source, package)
    error = refused_import(tmp_path)
    assert error.startswith("ImportError: ikattn's library has not been built")
    assert "pip install --no-build-isolation ." in error


@pytest.mark.parametrize("name", ["libikattn_kernels.so", f"{BUILD}/libikattn.so"])
@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_library_that_was_cut_short_is_named(tmp_path: Path, name: str, share: float) -> None:
    shutil.copytree(Path(ikattn.__file__).parent, tmp_path / "ikattn")
    library = tmp_path / "ikattn/lib" / name
    os.truncate(library, int(share * library.stat().st_size))
    error = refused_import(tmp_path)
    assert error.startswith(f"ImportError: {library} was cut short: it has ")
    assert "pip install --force-reinstall" in error


def test_a_library_that_does_not_load_says_for_which_torch_it_is(tmp_path: Path) -> None:
    shutil.copytree(Path(ikattn.__file__).parent, tmp_path / "ikattn")
    (tmp_path / f"ikattn/lib/{BUILD}/libikattn.so").write_bytes(bytes(100))
    error = refused_import(tmp_path)
    assert f"does not load into torch {torch.__version__}: " in error
    assert "pip install --no-build-isolation" in error


def test_import_loads_torch_and_no_optional_library(tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import ikattn; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(*sorted(new - {'ikattn'} - set(sys.stdlib_module_names)))"
    )
    loaded = run_checked(sys.executable, "-c", code, cwd=tmp_path).split()
    assert not {"numpy", "matplotlib", "sklearn", "tqdm", "jinja2", "transformers"} & set(loaded)


def test_info_names_versions_and_instruction_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert ikattn.__version__ in printed
    assert f"{torch.__version__} (built for" in printed
    assert torch.ops.ikattn.instruction_set() in printed


def test_info_names_other_copies_and_openmp_runtimes(tmp_path: Path) -> None:
    other, runtime = tmp_path / "other", tmp_path / "libgomp-1.so"
    (other / "ikattn").mkdir(parents=True)
    (other / "ikattn/__init__.py").touch()
    runtime.write_bytes(b"no library: its pages alone are looked for")
    program = (
        "import mmap, sys, ikattn\n"
        f"sys.path.append({str(other)!r})\n"
        f"file = open({str(runtime)!r}, 'rb')\n"
        "pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print(ikattn.info())"
    )
    printed = run_checked(sys.executable, "-c", program, cwd=tmp_path)
    assert f"{other}/ikattn" in printed
    assert "the first is imported" in printed
    assert str(runtime) in printed
    assert "two runtimes compete" in printed


def test_versions_of_library_headers_and_package_agree(source_tree: Path) -> None:
    header = (source_tree / "csrc/include/ikattn/version.h").read_text()
    assert f'#define IKATTN_VERSION "{ikattn.__version__}"' in header
    numbers = [line.split()[-1] for line in header.splitlines() if "IKATTN_VERSION_" in line]
    assert ".".join(numbers) == ikattn.__version__
