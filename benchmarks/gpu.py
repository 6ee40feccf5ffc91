"""The operators on a GPU, beside the backends of softmax attention, FlexAttention and eager torch.

    python benchmarks/gpu.py --output table.md        # 16k tokens, H = 32, d = M = 64, bf16
    python benchmarks/gpu.py --lengths 4096 16384     # some lengths only, no masks, no few queries
    python benchmarks/gpu.py --no-flex        # FlexAttention compiles a kernel for every shape
    python benchmarks/gpu.py --contributions  # the maps, beside the 5-D formulation
    python benchmarks/gpu.py --decoding       # steps against kept features; B is 1
    python benchmarks/gpu.py --device cpu --tokens 256 --heads 2   # a dry run of this script

Rivals take turns; times are of the GPU alone, in ms, best and median: work is queued behind a pause
that is longer than queueing it takes. The last column is the rival's time over ikattn's, by
medians; where SDPA's backends are among the rivals, a line compares with the fastest of them. The
first lines name the machine, versions, commit, and the rate of a large product of matrices, with
which the pair kernel of each forward is compared. Commit the output under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import gpu_rivals
import torch
import torch._functorch.config
import torch.nn.functional as F
from gpu_rivals import Call, Prepare
from timing import processor
from torch import Tensor

import ikattn

WITHOUT_PAIRS = ("moment_kernel", "entry_kernel", "feature_gradient_kernel")
PAUSE = 0.002  # seconds, in which a call can be queued
LEAST = 2.0  # milliseconds between two events


def said_by(*command: str) -> str | None:
    """The first line that a command prints here; None where it fails."""
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.partition("\n")[0].strip() or None


def facts(options: argparse.Namespace) -> str:
    """The conditions under which the figures were measured."""
    commit = options.commit or said_by("git", "rev-parse", "--short", "HEAD")
    commit = commit or "an unknown commit (--commit names it)"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, ikattn {ikattn.__version__}"
    name = processor()
    if options.device == "cuda":
        driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        name = f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}"
    return f"{name}, {versions} at {commit}, {time.strftime('%Y-%m-%d')}"


class Tee:
    """Prints to the terminal and to a file as it comes, so that what was measured is kept."""

    def __init__(self, terminal: TextIO, file: TextIO) -> None:
        self.targets = (terminal, file)

    def write(self, text: str) -> int:
        for target in self.targets:
            target.write(text)
        return len(text)

    def flush(self) -> None:
        for target in self.targets:
            target.flush()


def milliseconds(call: Call, device: str, times: int = 1) -> float:
    """Returns the time of one call, if it is made so many times."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(times):
            call()
        return 1e3 * (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(times * PAUSE * 2e9))  # cycles, of at most 2 GHz
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(title: str, rivals: dict[str, Prepare], device: str, rounds: int) -> None:
    """Times rivals in turns; one that cannot run is named with the reason.

    The eager composition, which needs most memory, has its turns when the others are done.
    """
    print(title)
    times: dict[str, list[float]] = {}
    repeats: dict[str, int] = {}

    def attempt(name: str) -> bool:
        try:
            call = rivals[name]()
            if name not in repeats:
                call()
                first = milliseconds(call, device)
                repeats[name] = max(1, min(20, round(LEAST / max(first, 1e-3))))
                return True
            times.setdefault(name, []).append(milliseconds(call, device, repeats[name]))
            return True
        except Exception as failure:  # compilers have errors of their own
            print(f"  {name:12s} cannot: {(str(failure) or repr(failure)).splitlines()[0][:90]}")
            times.pop(name, None)
            return False

    heavy = [name for name in rivals if name == "eager"]
    for names in ([name for name in rivals if name not in heavy], heavy):
        free_memory()
        able = [name for name in names if attempt(name)]
        for _ in range(rounds):
            able = [name for name in able if attempt(name)]
    if not times:
        print()
        return
    medians = {name: statistics.median(each) for name, each in times.items()}
    ours = medians.get("ikattn", math.nan)
    for name, each in times.items():
        print(
            f"  {name:12s} best {min(each):9.3f}  median {medians[name]:9.3f}"
            f"  x ikattn {medians[name] / ours:7.2f}"
        )
    backends = {name: medians[name] for name in gpu_rivals.SDPA if name in medians}
    if backends:
        fastest = min(backends, key=lambda name: backends[name])
        print(f"  ikattn takes {ours / backends[fastest]:.2f} of the fastest backend's, {fastest}")
    print()


def product_rate(options: argparse.Namespace) -> float:
    """Flops per second of a large product of two matrices of the type that is measured."""
    size = 8192 if options.device == "cuda" else 512
    dtype = getattr(torch, options.dtype)
    a, b = torch.randn(2, size, size, device=options.device).to(dtype).unbind()
    a @ b
    best = min(milliseconds(lambda: a @ b, options.device, 5) for _ in range(10))
    return 2 * size**3 / (1e-3 * best)


def show_kernels(call: Call, flops: dict[str, float], rate: float) -> None:
    """The GPU's kernels of one call; ``flops``: of those whose names contain the words.

    Where a call takes linear time, the kernels of pairs are launched for what is left to them,
    which may be nothing, and have no rate.
    """
    call()
    torch.cuda.synchronize()
    times = 3
    activities = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(times):
                call()
            torch.cuda.synchronize()
    except Exception as failure:  # the next comparison may do better
        print(f"    no kernels: {(str(failure) or repr(failure)).splitlines()[0][:90]}\n")
        return
    kernels = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    kernels.sort(key=lambda x: -x.self_device_time_total)
    total = sum(x.self_device_time_total for x in kernels) / times
    if any("moment_kernel" in kernel.key for kernel in kernels):
        flops = {words: count for words, count in flops.items() if words in WITHOUT_PAIRS}
    for kernel in kernels[:12]:
        each = kernel.self_device_time_total / times
        name = kernel.key.replace("(anonymous namespace)::", "").replace("ikattn::cuda::", "")
        line = f"    {each:10.1f} us  {name.split('(')[0][:60]}"
        # Both forms are launched, and the blocks of one return at once: the longer one comes first,
        # and had the pairs.
        words = next((words for words in flops if words in kernel.key), None)
        if words is not None:
            reached = flops.pop(words) / (1e-6 * each)
            line += f"  {reached / 1e12:.0f} TFLOP/s, {reached / rate:.2f} of the product's"
        print(line)
    print(f"    {total:10.1f} us  all kernels\n")


def flops_without_pairs(tensors: list[Tensor], backward: bool) -> dict[str, float]:
    """Counts the work of the kernels of ``linear/linear.h``, padded to whole chunks."""
    q, k, v, w1, _ = tensors
    chunks, columns = 2 * math.ceil(w1.shape[-1] / 16), 64 * math.ceil(v.shape[-1] / 64)
    entries, squares = 128 * chunks * (chunks + 1) * columns, 256 * chunks**2 * columns
    queries, keys = q.shape[:3].numel(), k.shape[:3].numel()
    if not backward:
        return {"moment_kernel": 2 * keys * entries, "entry_kernel": 2 * queries * entries}
    # In bfloat16 those of queries are a kernel of their own, and the first of the two is told.
    sides = max(queries, keys) if q.dtype == torch.bfloat16 else queries + keys
    return {
        "moment_kernel": 2 * (queries + keys) * entries,
        "entry_kernel": 2 * keys * entries,
        "feature_gradient_kernel": 2 * sides * squares,
    }


def inputs(options: argparse.Namespace, batch: int, queries: int, keys: int) -> list[Tensor]:
    device, dtype = options.device, getattr(torch, options.dtype)
    heads, d, frequencies = options.heads, options.head_size, options.frequencies
    torch.manual_seed(0)
    tensors = [
        torch.randn(batch, heads, length, d, device=device, dtype=dtype)
        for length in (queries, keys, keys)
    ]
    bound = (heads * frequencies) ** -0.5
    return tensors + [
        torch.empty(heads, d, frequencies, device=device).uniform_(-bound, bound) for _ in "12"
    ]


def compare_both(
    options: argparse.Namespace,
    name: str,
    tensors: list[Tensor],
    causal: bool = False,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> None:
    """Forward without grad, and the backward alone."""
    reason = ikattn.which_kernels(*tensors, is_causal=causal, attn_mask=mask).forward.reason
    said = {"causal": causal, "mask": mask, "with_flex": options.flex, "dropout": dropout}
    name = f"{name}, {options.dtype}{'' if reason is None else f' ({reason})'}"
    with torch.no_grad():
        rivals = gpu_rivals.attention(tensors, **said)
        prepared: dict[str, Prepare] = {
            rival: lambda call=call: call for rival, call in rivals.items()
        }
        compare(f"{name}, forward", prepared, options.device, options.rounds)
        q, k, v, w1, _ = tensors
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (2 if causal else 1)
        features, columns = 2 * w1.shape[-1], v.shape[-1]
        if options.device == "cuda":
            flops = {"forward_kernel": pairs * 2 * (features + columns)}
            flops |= flops_without_pairs(tensors, backward=False)
            show_kernels(rivals["ikattn"], flops, options.rate)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    backward: dict[str, Prepare] = {}
    for rival, call in gpu_rivals.attention(leaves, **said).items():
        backward[rival] = gpu_rivals.backward_of(call, leaves)
    compare(f"{name}, backward", backward, options.device, options.rounds)
    if options.device == "cuda":
        of_backward = {
            "query_kernel": pairs * 2 * (2 * features + columns),
            "key_kernel": pairs * 2 * (2 * features + 2 * columns),
        } | flops_without_pairs(tensors, backward=True)
        show_kernels(backward["ikattn"](), of_backward, options.rate)


def show_errors(options: argparse.Namespace) -> None:
    """Prints errors of output and gradients, beside those of the composition in that type."""
    length = min(512, options.tokens)
    tensors = inputs(options, 1, length, length)
    names = ["output", "grad_query", "grad_key", "grad_value", "grad_w1", "grad_w2"]
    torch.manual_seed(1)
    incoming = torch.randn_like(tensors[0])

    def results(
        attend: Callable[..., Tensor], causal: bool, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in tensors]
        output = attend(*leaves, is_causal=causal)
        found = torch.autograd.grad(output, leaves, incoming.to(output.dtype))
        return [output.detach(), *found]

    print(
        f"errors at N = {length}, {options.dtype}, of the largest element; the composition stores "
        "in that type (in parentheses: ikattn.reference, which computes in float32)"
    )
    for causal in (False, True):
        truth = results(ikattn.reference.implicit_kernel_attention, causal, torch.float64)
        ours = results(ikattn.implicit_kernel_attention, causal)
        theirs = results(ikattn.reference.implicit_kernel_attention, causal)
        narrow = results(gpu_rivals.stored_in_half, causal)
        for name, right, *found in zip(names, truth, ours, theirs, narrow, strict=True):
            largest = right.abs().max()
            errors = [((x.double() - right).abs().max() / largest).item() for x in found]
            print(
                f"  {name:12s} ikattn {errors[0]:.1e}"
                f"  composition {errors[2]:.1e} ({errors[1]:.1e})"
                f"  ratio {errors[0] / max(errors[2], 1e-30):.2f}{'  causal' if causal else ''}"
            )
    print()


def compare_attention(options: argparse.Namespace) -> None:
    lengths = options.lengths or [
        length for length in (512, 1024, 2048, 4096, 8192, 16384) if length < options.tokens
    ] + [options.tokens]
    for length in lengths:
        batch = max(1, options.tokens // length)
        tensors = inputs(options, batch, length, length)
        for causal in (False, True):
            name = f"B = {batch}, N = {length}{', causal' if causal else ''}"
            compare_both(options, name, tensors, causal)
    if options.lengths:
        return
    length = min(2048, options.tokens)
    tensors = inputs(options, options.tokens // length, length, length)
    tokens = torch.arange(length, device=options.device)
    distance = (tokens[:, None] - tokens).abs()
    name = f"B = {options.tokens // length}, N = {length}"
    near = distance < length // 2
    compare_both(options, f"{name}, bool mask", tensors, mask=near)
    compare_both(options, f"{name}, dropout", tensors, dropout=0.1)
    shown = (tokens < length * 3 // 4)[None, None, None]
    compare_both(options, f"{name}, a quarter padding", tensors, mask=shown)
    slopes = 2.0 ** -torch.arange(1, options.heads + 1, device=options.device)
    linear = (-slopes[:, None, None] * distance).to(tensors[0].dtype)
    compare_both(options, f"{name}, float mask (ALiBi)", tensors, mask=linear)
    for queries in (1, 16):
        few = inputs(options, 1, queries, options.tokens)
        compare_both(options, f"L = {queries}, S = {options.tokens}", few)


def compare_contributions(options: argparse.Namespace) -> None:
    for length in [n for n in (512, 2048) if n <= options.tokens] or [options.tokens]:
        with torch.no_grad():
            rivals: dict[str, Prepare] = {
                name: lambda call=call: call
                for name, call in gpu_rivals.contributions(length, options.device).items()
            }
            title = f"N summed, H = 12, D = 768, L = S = {length}"
            compare(title, rivals, options.device, options.rounds)
            for name in [n for n in rivals if n.startswith(("ikattn", "streamed"))]:
                if options.device == "cuda":
                    print(f"  kernels of {name}")
                    show_kernels(rivals[name](), {}, options.rate)


def compare_decoding(options: argparse.Namespace) -> None:
    """Queries after many keys, H heads and H / 8 of keys, against features that are kept."""
    groups = max(1, options.heads // 8)
    for length in options.lengths or (4096, 32768, 131072):
        query, key, value, w1, w2 = inputs(options, 1, 16, length)
        key, value, w1, w2 = key[:, :groups], value[:, :groups], w1[:groups], w2[:groups]
        features = ikattn.KeyFeatures(w1, w2)
        features.append(key)
        for count in (1, 4, 16):
            few = query[:, :, :count]
            with torch.no_grad():
                rivals: dict[str, Prepare] = {
                    "ikattn": lambda q=few, f=features, v=value: lambda: f.attend(q, v),
                    "softmax": lambda q=few, k=key, v=value: (
                        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                    ),
                }
                title = f"decoding, L = {count}, S = {length}, H = {options.heads}, G = {groups}"
                compare(title, rivals, options.device, options.rounds)
                if options.device == "cuda" and count == 1:
                    show_kernels(rivals["ikattn"](), {}, options.rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contributions", action="store_true", help="the maps")
    parser.add_argument("--decoding", action="store_true", help="against kept features")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tf32", action="store_true", help="allow it for float32")
    parser.add_argument("--lengths", type=int, nargs="+", help="these alone; default: from 512 on")
    parser.add_argument("--no-flex", dest="flex", action="store_false", help="no FlexAttention")
    parser.add_argument("--tokens", type=int, default=16384, help="B x N")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--frequencies", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--commit", help="of ikattn; default: what git says")
    parser.add_argument("--output", type=Path, help="a file for what is printed, as well")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU (--device cpu makes a dry run)")
    sys.stdout.reconfigure(line_buffering=True)
    # Backward passes are repeated, which compiled ones would refuse.
    torch._functorch.config.donated_buffer = False
    with contextlib.ExitStack() as stack:
        if options.output is not None:
            file = stack.enter_context(options.output.open("w", buffering=1))
            stack.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, file)))
        measure(options)


def measure(options: argparse.Namespace) -> None:
    # Where this machine holds the package is of no use to who reads the results.
    library = [line for line in ikattn.info().splitlines() if not line.startswith("C++ package")]
    print(facts(options), "\n".join(library), sep="\n\n", end="\n\n")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    options.rate = product_rate(options)
    print(f"a product of {options.dtype} matrices: {options.rate / 1e12:.3g} TFLOP/s", end="\n\n")
    if options.contributions:
        compare_contributions(options)
    elif options.decoding:
        compare_decoding(options)
    else:
        show_errors(options)
        compare_attention(options)


if __name__ == "__main__":
    main()
