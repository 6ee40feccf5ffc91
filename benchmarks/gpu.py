"""The operators on a GPU, beside the backends of softmax attention, FlexAttention and eager torch.

    python benchmarks/gpu.py                  # 16k tokens, H = 32, d = M = 64, bf16
    python benchmarks/gpu.py --no-flex        # FlexAttention compiles a kernel for every shape
    python benchmarks/gpu.py --contributions  # the maps, beside the 5-D formulation
    python benchmarks/gpu.py --device cpu --tokens 256 --heads 2   # a dry run of this script

Rivals take turns; times are of the GPU alone, in ms, best and median: work is queued behind a pause
that is longer than queueing it takes. The last column is the rival's time over ikattn's. The first
lines name the machine, versions, commit, and the rate of a large product of matrices, with which
the pair kernel of each forward is compared. Commit the output under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from contributions import five_dimensional
from timing import processor
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ikattn

Call = Callable[[], object]
# What is done before a call is timed, which it returns.
Prepare = Callable[[], Call]

PAUSE = 0.002  # seconds, in which a call can be queued
LEAST = 2.0  # milliseconds between two events


def facts(options: argparse.Namespace) -> str:
    """What a reader must know of the figures."""
    commit = options.commit
    if commit is None:
        git = ["git", "rev-parse", "--short", "HEAD"]
        try:
            found = subprocess.run(
                git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
            )
            commit = found.stdout.strip() or "an unknown commit (--commit names it)"
        except OSError:
            commit = "an unknown commit (--commit names it)"
    name = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, ikattn {ikattn.__version__}"
    return f"{name}, {versions} at {commit}"


def milliseconds(call: Call, device: str, times: int = 1) -> float:
    """Of one call, if it is made so many times."""
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
    print(title)
    ours = statistics.median(times.get("ikattn", [math.nan]))
    for name, each in times.items():
        best, median = min(each), statistics.median(each)
        ratio = median / ours
        print(f"  {name:12s} best {best:9.3f}  median {median:9.3f}  x ikattn {ratio:7.2f}")


def product_rate(options: argparse.Namespace) -> float:
    """Flops per second of a large product of two matrices of the type that is measured."""
    size = 8192 if options.device == "cuda" else 512
    dtype = getattr(torch, options.dtype)
    a, b = torch.randn(2, size, size, device=options.device).to(dtype).unbind()
    a @ b
    best = min(milliseconds(lambda: a @ b, options.device, 5) for _ in range(10))
    return 2 * size**3 / (1e-3 * best)


def show_kernels(call: Call, pairs: float, flops_per_pair: int, rate: float) -> None:
    """The GPU's kernels of one call, and the rate of that of the pairs."""
    call()
    torch.cuda.synchronize()
    times = 3
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    kernels = [x for x in profile.key_averages() if x.self_device_time_total > 0]
    for kernel in sorted(kernels, key=lambda x: -x.self_device_time_total)[:6]:
        each = kernel.self_device_time_total / times
        name = kernel.key.replace("(anonymous namespace)::", "").replace("ikattn::cuda::", "")
        line = f"    {each:10.1f} us  {name.split('(')[0][:60]}"
        if "forward_kernel" in name:
            reached = pairs * flops_per_pair / (1e-6 * each)
            line += f"  {reached / 1e12:.0f} TFLOP/s, {reached / rate:.2f} of the product's"
        print(line)


def with_backend(backend: SDPBackend, call: Call) -> Call:
    def run() -> object:
        with sdpa_kernel(backend):
            return call()

    return run


def attention_rivals(
    tensors: list[Tensor],
    causal: bool = False,
    mask: Tensor | None = None,
    with_flex: bool = False,
) -> dict[str, Callable[[], Tensor]]:
    q, k, v, w1, w2 = tensors

    def ours() -> Tensor:
        return ikattn.implicit_kernel_attention(q, k, v, w1, w2, is_causal=causal, attn_mask=mask)

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, attn_mask=mask)

    def eager() -> Tensor:
        return ikattn.reference.implicit_kernel_attention(
            q, k, v, w1, w2, is_causal=causal, attn_mask=mask
        )

    rivals: dict[str, Callable[[], Any]] = {"ikattn": ours}
    if q.is_cuda:
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("efficient", SDPBackend.EFFICIENT_ATTENTION),
        ):
            rivals[name] = with_backend(backend, softmax)
        if with_flex and mask is None:
            rivals["flex"] = flex(tensors, causal)
    else:
        rivals["sdpa"] = softmax
    rivals["eager"] = eager
    return rivals


def flex(tensors: list[Tensor], causal: bool) -> Callable[[], Tensor]:
    """FlexAttention over the features with log(s^2 + eps) + g as its score: the same output."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, w1, w2 = tensors
    torch._dynamo.reset()  # after 8 compilations of a function it would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)
    scale = 1 / (4 * w1.shape[-1])
    magnitude = k.float().square().sum(-1) / (2 * k.shape[-1] ** 0.5)
    mask = None
    if causal:
        length = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.log(s * s + 1e-5) + magnitude[b, h, j]

    def call() -> Tensor:
        phi_q = ikattn.spectral_features(q, w1, w2)
        phi_k = ikattn.spectral_features(k, w1, w2)
        output = compiled(phi_q, phi_k, v, score_mod=score, scale=scale, block_mask=mask)
        assert isinstance(output, Tensor)
        return output

    return call


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
) -> None:
    """Forward without grad, and the backward alone."""
    reason = ikattn.why_not_fast(*tensors, is_causal=causal, attn_mask=mask)
    name = f"{name}, {options.dtype}{'' if reason is None else f' ({reason})'}"
    with torch.no_grad():
        rivals = attention_rivals(tensors, causal, mask, with_flex=options.flex)
        prepared: dict[str, Prepare] = {
            rival: lambda call=call: call for rival, call in rivals.items()
        }
        compare(f"{name}, forward", prepared, options.device, options.rounds)
        if options.device == "cuda":
            q, k, v, w1, _ = tensors
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / (2 if causal else 1)
            flops = 2 * (2 * w1.shape[-1] + v.shape[-1])
            show_kernels(rivals["ikattn"], pairs, flops, options.rate)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    backward: dict[str, Prepare] = {}
    # Without flex: its score reads k outside the graph.
    for rival, call in attention_rivals(leaves, causal, mask).items():
        backward[rival] = backward_of(call, leaves)
    compare(f"{name}, backward", backward, options.device, options.rounds)


def compare_attention(options: argparse.Namespace) -> None:
    length = min(512, options.tokens)
    while length <= options.tokens:
        batch = options.tokens // length
        tensors = inputs(options, batch, length, length)
        for causal in (False, True):
            name = f"B = {batch}, N = {length}{', causal' if causal else ''}"
            compare_both(options, name, tensors, causal)
        length *= 2
    length = min(2048, options.tokens)
    tensors = inputs(options, options.tokens // length, length, length)
    tokens = torch.arange(length, device=options.device)
    distance = (tokens[:, None] - tokens).abs()
    name = f"B = {options.tokens // length}, N = {length}"
    near = distance < length // 2
    compare_both(options, f"{name}, bool mask", tensors, mask=near)
    slopes = 2.0 ** -torch.arange(1, options.heads + 1, device=options.device)
    linear = (-slopes[:, None, None] * distance).to(tensors[0].dtype)
    compare_both(options, f"{name}, float mask (ALiBi)", tensors, mask=linear)
    for queries in (1, 16):
        few = inputs(options, 1, queries, options.tokens)
        compare_both(options, f"L = {queries}, S = {options.tokens}", few)


def backward_of(call: Callable[[], Tensor], leaves: list[Tensor]) -> Prepare:
    """The backward alone, of a graph that lives as long as it is timed."""

    def prepare() -> Call:
        output = call()
        incoming = torch.ones_like(output)
        return lambda: torch.autograd.grad(
            output, leaves, incoming, retain_graph=True, allow_unused=True
        )

    return prepare


def contribution_rivals(length: int, device: str) -> dict[str, Call]:
    """N summed at H = 12, D = 768."""
    heads, size = 12, 768
    torch.manual_seed(0)
    weights = torch.randn(1, heads, length, length, device=device).softmax(-1)
    value = torch.randn(1, heads, length, size // heads, device=device)
    projection = torch.randn(size, size, device=device) / size**0.5
    query, key = torch.randn(2, 1, heads, length, size // heads, device=device).unbind()
    return {
        "ikattn": lambda: ikattn.contributions(weights, value, projection, maps=["summed"]),
        "streamed": lambda: ikattn.streamed_contributions(
            query, key, value, projection, maps=["summed"]
        ),
        "read weights": weights.sum,
        "5-D": lambda: five_dimensional(weights, value, projection),
    }


def compare_contributions(options: argparse.Namespace) -> None:
    for length in (length for length in (512, 2048) if length <= max(options.tokens, 512)):
        with torch.no_grad():
            rivals: dict[str, Prepare] = {
                name: lambda call=call: call
                for name, call in contribution_rivals(length, options.device).items()
            }
            title = f"N summed, H = 12, D = 768, T = S = {length}"
            compare(title, rivals, options.device, options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contributions", action="store_true", help="the maps")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tf32", action="store_true", help="allow it for float32")
    parser.add_argument("--no-flex", dest="flex", action="store_false", help="no FlexAttention")
    parser.add_argument("--tokens", type=int, default=16384, help="B x N")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--frequencies", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--commit", help="of ikattn; default: what git says")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU (--device cpu makes a dry run)")
    sys.stdout.reconfigure(line_buffering=True)
    print(facts(options), ikattn.info(), sep="\n\n", end="\n\n")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    options.rate = product_rate(options)
    print(f"a product of {options.dtype} matrices: {options.rate / 1e12:.3g} TFLOP/s", end="\n\n")
    if options.contributions:
        compare_contributions(options)
    else:
        compare_attention(options)


if __name__ == "__main__":
    main()
