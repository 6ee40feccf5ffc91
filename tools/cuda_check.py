"""Compile every CUDA kernel for several architectures, on any machine that has nvcc; no GPU needed.

Fails on an error of the compiler, on register spills, on stack frames (but those of
cuda_local_memory_allowed.txt, which has the reasons), on wgmma that ptxas serialises,
and where a kernel whose warpgroups exchange registers does not begin with all of them. Then checks
the syntax of the glue files against this environment's torch. `make cuda-check`, or, for one file
and architecture while writing it:

    python tools/cuda_check.py --arch sm_90a csrc/attention/cuda/hopper/forward.cu

or what changed since a commit: files that did, or include a header that did, for all architectures;
files that include it by other headers for one:

    python tools/cuda_check.py --arch sm_90a --changed-since origin/main
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "cuda-check"
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100", "sm_120"]
# The host's code differs by IKATTN_HAVE_WARPGROUPS alone: it is compiled with these architectures,
# and with each where none of them is asked for.
WITH_HOST = ["sm_80", "sm_90a"]
INCLUDES = ["-Icsrc", "-Icsrc/include"]
# Registers of a thread in a block of 384. With fewer the block would wait for ever for what its
# products take (setmaxnreg, kProductRegisters in hopper/pipeline.h).
WARPGROUP_REGISTERS = 168


@dataclass
class Kernel:
    name: str
    source: str
    arch: str
    registers: int = 0
    spill_bytes: int = 0  # stores and loads
    stack_bytes: int = 0
    shared_bytes: int = 0  # static


@dataclass
class Compilation:
    command: list[str]
    failed: bool
    output: str
    kernels: list[Kernel]


def demangle(names: list[str]) -> list[str]:
    filter_ = shutil.which("c++filt")
    if filter_ is None or not names:
        return names
    done = subprocess.run([filter_, *names], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def short(name: str) -> str:
    """Name and template arguments without namespaces and parameters."""
    name = re.sub(r"\(anonymous namespace\)::|\b_GLOBAL__N__\w+::", "", name)
    name = re.sub(r"^void ", "", name).replace("ikattn::", "")
    end = name.rfind(")")
    depth = 0
    while end >= 0:  # the parameters' parenthesis; template arguments have some, too
        depth += (name[end] == ")") - (name[end] == "(")
        if depth == 0:
            break
        end -= 1
    return name[:end] if end > 0 else name


def kernels_in(output: str, source: str, arch: str) -> list[Kernel]:
    """Read `ptxas -v`."""
    kernels: list[Kernel] = []
    current: Kernel | None = None
    for line in output.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            current = Kernel(match[1], source, arch)
            kernels.append(current)
        elif current is None:
            continue
        elif match := re.search(
            r"(\d+) bytes stack.*, (\d+) bytes.*, (\d+) bytes spill loads", line
        ):
            # Functions that are called, not inlined, have such a line, too: theirs count.
            current.stack_bytes += int(match[1])
            current.spill_bytes += int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            current.registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current.shared_bytes = int(shared[1]) if shared else 0
    for kernel, name in zip(kernels, demangle([k.name for k in kernels]), strict=True):
        kernel.name = name
    return kernels


def compile_kernels(nvcc: str, source: Path, arch: str, *, with_host: bool) -> Compilation:
    name = str(source.relative_to(ROOT))
    what = "-c" if with_host else "-cubin"
    target = OUTPUT / f"{name.replace('/', '-')}.{arch}.{'o' if with_host else 'cubin'}"
    command = [nvcc, "-std=c++20", "-O3", "-Xptxas", "-v", f"-arch={arch}", *INCLUDES]
    command.append(f"-DIKATTN_HAVE_WARPGROUPS={int(arch == 'sm_90a')}")
    command += ["-Itests/cpp", what, name, "-o", str(target.relative_to(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    output = done.stdout + done.stderr
    return Compilation(command, done.returncode != 0, output, kernels_in(output, name, arch))


def check_glue(source: Path, torch: Path, cuda_headers: Path) -> Compilation:
    # The CPU wheel lacks this one file of torch's CUDA headers; they need nothing that it says.
    missing = OUTPUT / "include/c10/cuda/impl/cuda_cmake_macros.h"
    missing.parent.mkdir(parents=True, exist_ok=True)
    missing.touch()
    include = torch / "include"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra"]
    command += ["-DIKATTN_HAVE_CUDA=1", "-DIKATTN_HAVE_WARPGROUPS=1"]
    command += ['-DIKATTN_CUDA_ARCHITECTURES="80 90"']
    command += [*INCLUDES, "-isystem", str(include)]
    command += ["-isystem", str(include / "torch/csrc/api/include")]
    command += ["-isystem", str(cuda_headers), "-isystem", str(OUTPUT / "include")]
    command += [str(source.relative_to(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return Compilation(command, done.returncode != 0, done.stdout + done.stderr, [])


def cuda_headers_of(nvcc: str) -> Path | None:
    """Where nvcc finds its headers; it may be a link or a script elsewhere."""
    done = subprocess.run(
        [nvcc, "--dryrun", "-c", "-x", "cu", "/dev/null", "-o", "/dev/null"],
        capture_output=True,
        text=True,
    )
    match = re.search(r'INCLUDES="-I([^"]+?)"', done.stderr)
    candidates = [Path(match[1])] if match else []
    candidates += [Path(nvcc).resolve().parent.parent / "include", Path("/usr/local/cuda/include")]
    return next((c.resolve() for c in candidates if (c / "cuda_runtime_api.h").exists()), None)


def allowed_local_memory() -> list[str]:
    lines = (ROOT / "tools" / "cuda_local_memory_allowed.txt").read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def exchanges_registers(kernel: Kernel) -> bool:
    """Whether its warpgroups take registers from each other: its source does, or a header's
    copies give some.
    """
    if kernel.arch != "sm_90a" or not kernel.source.startswith("csrc/"):
        return False
    return "take_registers<" in (ROOT / kernel.source).read_text()


@functools.cache
def includes(source: Path) -> set[Path]:
    """Returns the headers of this repository that a file includes itself."""
    found = set()
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE):
        places = (source.parent, ROOT / "csrc", ROOT / "csrc/include", ROOT / "tests/cpp")
        header = next((place / name for place in places if (place / name).exists()), None)
        if header is not None and not name.startswith("interpreter/"):  # nvcc does not see these
            found.add(header.resolve())
    return found


def with_all_includes(source: Path) -> set[Path]:
    """Returns a file and the headers of this repository that it includes, by others too."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += includes(file)
    return found


def changed_since(commit: str) -> set[Path]:
    """Returns the files that differ from a commit."""
    command = ["git", "diff", "--name-only", commit]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return {(ROOT / name).resolve() for name in done.stdout.splitlines()}


def report(compilations: list[Compilation], expects_kernels: bool) -> bool:
    """Print the table and what is wrong; whether all is well."""
    allowed = allowed_local_memory()
    kernels = sorted(
        (k for c in compilations for k in c.kernels), key=lambda k: (k.source, k.name, k.arch)
    )
    wrong: list[str] = []
    if not kernels and expects_kernels:
        wrong.append("ptxas named no kernel: its output is not what this script reads")
    if kernels:
        width = max(len(short(k.name)) for k in kernels)
        print(f"{'kernel':{width}}  {'arch':7} registers  spills B  stack B  static shared B")
    for k in kernels:
        print(
            f"{short(k.name):{width}}  {k.arch:7} {k.registers:9}  {k.spill_bytes:8}"
            f"  {k.stack_bytes:7}  {k.shared_bytes:15}"
        )
        has_place = any(part in k.name for part in allowed)
        if k.spill_bytes:
            wrong.append(
                f"{short(k.name)} ({k.source}) spills {k.spill_bytes} bytes on {k.arch}: shorten it"
            )
        if k.stack_bytes > k.spill_bytes and not has_place:
            wrong.append(
                f"{short(k.name)} ({k.source}) has {k.stack_bytes} bytes of stack on {k.arch}: "
                "shorten it, or list it with a reason in tools/cuda_local_memory_allowed.txt"
            )
        if exchanges_registers(k) and k.registers != WARPGROUP_REGISTERS:
            wrong.append(
                f"{short(k.name)} ({k.source}) begins with {k.registers} registers, not "
                f"{WARPGROUP_REGISTERS}: its products would wait for ever"
            )
    for c in compilations:
        if c.failed:
            wrong.append(f"{' '.join(c.command)}\n{c.output}")
        wrong += [line for line in c.output.splitlines() if re.search(r"\bC75\d\d\b", line)]
        if not c.failed:
            warnings = [line for line in c.output.splitlines() if "warning" in line]
            print(*warnings, sep="\n", end="\n" if warnings else "")
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", help="default: " + ", ".join(ARCHITECTURES))
    parser.add_argument("--changed-since", metavar="COMMIT", help="see above")
    parser.add_argument("sources", nargs="*", type=Path, help="default: every .cu under csrc")
    arguments = parser.parse_args()

    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if nvcc is None:
        print("error: there is no nvcc here (CUDA toolkit 13; or set NVCC)", file=sys.stderr)
        return 1
    sources = [path.resolve() for path in arguments.sources] or [
        *sorted((ROOT / "csrc").rglob("*.cu")),
        *sorted((ROOT / "tests/cpp").rglob("*.cu")),
    ]
    kernels = [path for path in sources if path.suffix == ".cu"]
    glue = [path for path in sources if path.suffix == ".cpp"]
    if not arguments.sources:
        glue = sorted((ROOT / "csrc").glob("*/cuda/*.cpp"))
        # Other files also speak of CUDA where the library has it.
        glue += [
            path
            for path in sorted((ROOT / "csrc").glob("*/*.cpp"))
            if "IKATTN_HAVE_CUDA" in path.read_text()
        ]

    OUTPUT.mkdir(parents=True, exist_ok=True)
    torch = importlib.util.find_spec("torch")
    headers = cuda_headers_of(nvcc)
    architectures = arguments.arch or ARCHITECTURES
    hosts = set(architectures) & set(WITH_HOST) or set(architectures)
    everywhere: set[Path] = set()
    if arguments.changed_since:
        changed = changed_since(arguments.changed_since)
        everywhere = {source for source in kernels if {source, *includes(source)} & changed}
        kernels = [source for source in kernels if with_all_includes(source) & changed]
        glue = [source for source in glue if with_all_includes(source) & changed]
        print(f"{len(kernels)} files of kernels and {len(glue)} of glue changed", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(compile_kernels, nvcc, source, arch, with_host=arch in hosts)
            for source in kernels
            for arch in (ARCHITECTURES if source in everywhere else architectures)
        ]
        if glue and torch and torch.origin and headers:
            jobs += [
                pool.submit(check_glue, path, Path(torch.origin).parent, headers) for path in glue
            ]
        compilations = [job.result() for job in jobs]
    has_kernels = any(
        re.search(r"^(?!\s*//).*__global__", file.read_text(), re.M)
        for source in kernels
        for file in with_all_includes(source)
    )
    all_is_well = report(compilations, expects_kernels=has_kernels)
    if glue and not (torch and torch.origin and headers):
        print("error: no torch, or no headers of CUDA, to check the glue with", file=sys.stderr)
        return 1
    return 0 if all_is_well else 1


if __name__ == "__main__":
    sys.exit(main())
