"""The operators on a GPU, beside the backends of softmax attention, FlexAttention and eager torch.

    python benchmarks/gpu.py                  # 16k tokens, H = 32, d = M = 64, bf16
    python benchmarks/gpu.py --no-flex        # FlexAttention compiles a kernel for every shape
    python benchmarks/gpu.py --contributions  # the maps, beside the 5-D formulation
    python benchmarks/gpu.py --device cpu --tokens 256 --heads 2   # a dry run of this script

Rivals take turns; times are of CUDA events, in ms, best and median; the last column is the rival's
time over ikattn's. The first lines name the machine, versions and commit: commit the output under
benchmarks/results/.
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


def facts(device: str) -> str:
    """What a reader must know of the figures."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    return f"{name}, torch {torch.__version__}, ikattn {ikattn.__version__} at {commit or '?'}"


def milliseconds(call: Call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def compare(title: str, rivals: dict[str, Call], device: str, rounds: int) -> None:
    """Times rivals in turns; one that cannot run is named with the reason."""
    times: dict[str, list[float]] = {}
    for name, call in list(rivals.items()):
        try:
            call()
            milliseconds(call, device)
        except Exception as failure:  # compilers have errors of their own
            print(f"  {name:12s} cannot: {(str(failure) or repr(failure)).splitlines()[0][:90]}")
            del rivals[name]
    for _ in range(rounds):
        for name, call in rivals.items():
            times.setdefault(name, []).append(milliseconds(call, device))
    print(title)
    ours = statistics.median(times.get("ikattn", [math.nan]))
    for name, each in times.items():
        best, median = min(each), statistics.median(each)
        ratio = median / ours
        print(f"  {name:12s} best {best:9.3f}  median {median:9.3f}  x ikattn {ratio:7.2f}")


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
        compare(f"{name}, forward", rivals, options.device, options.rounds)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    backward: dict[str, Call] = {}
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


def backward_of(call: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """The backward alone, of a graph that is kept."""
    graph: list[Tensor] = []

    def run() -> object:
        if not graph:
            graph.append(call())
        return torch.autograd.grad(
            graph[0], leaves, torch.ones_like(graph[0]), retain_graph=True, allow_unused=True
        )

    return run


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
            rivals = contribution_rivals(length, options.device)
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
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU (--device cpu makes a dry run)")
    sys.stdout.reconfigure(line_buffering=True)
    print(facts(options.device), ikattn.info(), sep="\n\n", end="\n\n")
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    if options.contributions:
        compare_contributions(options)
    else:
        compare_attention(options)


if __name__ == "__main__":
    main()
