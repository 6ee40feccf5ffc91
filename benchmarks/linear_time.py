"""Attention in linear time beside attention in quadratic time, on the CPU.

Which of the two a process takes is settled when it starts: each is timed in processes of its own,
in turns, beside softmax's flash kernel, and what is compared is the ratio to that.

    export OMP_WAIT_POLICY=passive
    python benchmarks/linear_time.py            # one thread, lengths and frequencies
    python benchmarks/linear_time.py --causal   # likewise
    python benchmarks/linear_time.py --memory   # peak memory in fresh processes
    python benchmarks/linear_time.py --digits   # errors, by how weights and values are
    python benchmarks/linear_time.py --forget   # causal calls with gates over calls without
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, peak_memory, processor
from torch import Tensor

import ikattn

# M, d = d_v, N
SIZES = (
    *((8, 8, n) for n in (512, 2048, 8192)),
    *((16, 64, n) for n in (1024, 4096, 16384)),
    *((32, 64, n) for n in (4096, 8192, 16384)),
    *((64, 64, n) for n in (4096, 8192, 16384)),
)


def inputs(length: int, size: int, frequencies: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    tokens = list(torch.randn(3, 1, 2, length, size, dtype=dtype))
    return tokens + list(0.02 * torch.randn(2, 2, size, frequencies, dtype=dtype))


def time_one(
    frequencies: int, size: int, length: int, dtype: torch.dtype, seconds: float, is_causal: bool
) -> None:
    """Best times in milliseconds of this process, as JSON."""
    torch.set_num_threads(1)
    call = inputs(length, size, frequencies, dtype)
    leaves = [x.requires_grad_() for x in call]
    gradient = torch.randn_like(call[2])

    def ours() -> Tensor:
        return ikattn.implicit_kernel_attention(*call, is_causal=is_causal)

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(*call[:3], is_causal=is_causal)

    with torch.no_grad():
        forward = interleaved({"ikattn": ours, "softmax": softmax}, seconds)
    both = interleaved(
        {
            "ikattn": lambda: torch.autograd.grad(ours(), leaves, gradient),
            "softmax": lambda: torch.autograd.grad(softmax(), leaves[:3], gradient),
        },
        seconds,
    )
    best = [[1e3 * min(x[name]) for name in ("ikattn", "softmax")] for x in (forward, both)]
    print(json.dumps(best))


def compare(dtype: str, of_frequencies: list[int], seconds: float, is_causal: bool) -> None:
    kind = "causal, " if is_causal else ""
    print(f"{processor()}, one thread, {kind}{dtype}, B = 1, H = 2; ms are those of what is taken")
    print(
        "| M | d | N | forward, ms | quadratic / linear | flash / ikattn "
        "| forward + backward, ms | quadratic / linear | flash / ikattn |"
    )
    print("|" + "---|" * 9)
    for frequencies, size, length in SIZES:
        if frequencies not in of_frequencies:
            continue
        found: dict[str, list[Any]] = {"never": [], "always": [], "auto": []}
        for setting in list(found) * 2:
            sizes = [str(x) for x in (frequencies, size, length)]
            program = [sys.executable, __file__, "--one", *sizes, "--dtype", dtype]
            run = subprocess.run(
                [*program, "--seconds", str(seconds), *(["--causal"] if is_causal else [])],
                check=True,
                capture_output=True,
                text=True,
                env=os.environ | {"IKATTN_LINEAR_TIME": setting},
            )
            found[setting].append(json.loads(run.stdout))
        row = [str(frequencies), str(size), str(length)]
        for part in (0, 1):
            relative = {
                setting: min(x[part][0] for x in runs) / min(x[part][1] for x in runs)
                for setting, runs in found.items()
            }
            milliseconds = min(x[part][0] for x in found["auto"])
            row += [
                f"{milliseconds:.4g}",
                f"{relative['never'] / relative['always']:.2f}",
                f"{1 / relative['auto']:.2f}",
            ]
        print("| " + " | ".join(row) + " |", flush=True)


def compare_forgetting(of_frequencies: list[int], seconds: float) -> None:
    """Prints the time of a call with gates over one without."""
    torch.set_num_threads(1)
    print(f"{processor()}, one thread, B = 1, H = 2, d = 64, gates near 0.95 and 0.99")
    print("| M | N | forward | forward + backward |\n|---|---|---|---|")
    for M in of_frequencies:
        for length in (512, 1024, 2048, 4096, 8192):
            call = inputs(length, 64, M, torch.float32)
            logits = torch.randn(1, 2, length) + torch.tensor([[3.0], [5.0]])
            leaves = [x.requires_grad_() for x in (*call, F.logsigmoid(logits))]
            gradient = torch.randn_like(call[2])

            def without(tokens: list[Tensor] = leaves) -> Tensor:
                return ikattn.implicit_kernel_attention(*tokens[:5], is_causal=True)

            def with_gates(tokens: list[Tensor] = leaves) -> Tensor:
                options = {"is_causal": True, "log_decay": tokens[5]}
                return ikattn.implicit_kernel_attention(*tokens[:5], **options)

            def both(call: Any, wanted: list[Tensor], gradient: Tensor = gradient) -> None:
                torch.autograd.grad(call(), wanted, gradient)

            with torch.no_grad():
                found = [interleaved({"0": without, "1": with_gates}, seconds)]
            rivals = {
                "0": partial(both, without, leaves[:5]),
                "1": partial(both, with_gates, leaves),
            }
            found.append(interleaved(rivals, seconds))
            ratios = [f"{min(x['1']) / min(x['0']):.2f}" for x in found]
            print(f"| {M} | {length} | {' | '.join(ratios)} |", flush=True)


MEMORY = """
    torch.manual_seed(0)
    call = list(torch.randn(3, 1, 8, {length}, 64))
    call += list(0.02 * torch.randn(2, 8, 64, 64))
    few = [x[:, :, :64] if x.dim() == 4 else x for x in call]
"""
FORWARD = "ikattn.implicit_kernel_attention(*call, is_causal={is_causal})"
BACKWARD = (
    "leaves = [x.requires_grad_() for x in call]; "
    "torch.autograd.grad("
    "ikattn.implicit_kernel_attention(*leaves, is_causal={is_causal}).sum(), leaves)"
)


def compare_memory(is_causal: bool) -> None:
    kind = "causal, " if is_causal else ""
    print(f"MiB above the inputs, results included, {kind}H = 8, d = M = 64, one thread")
    for length in (8192, 16384):
        for setting in ("never", "auto"):
            os.environ["IKATTN_LINEAR_TIME"] = setting
            setup, warm = MEMORY.format(length=length), "ikattn.implicit_kernel_attention(*few)"
            forward = peak_memory(setup, FORWARD.format(is_causal=is_causal), warm)
            both = peak_memory(setup, BACKWARD.format(is_causal=is_causal), warm)
            print(f"  N = {length}, {setting:6s} forward {forward:6.1f}, with backward {both:6.1f}")


# --- What products of features err ----------------------------------------------------------------


def feature_rows(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    phi: Tensor = ikattn.ops.spectral_features(x[None, None], w1[None], w2[None])[0, 0]
    return phi / (4 * w1.shape[1]) ** 0.5


def shifts(x: Tensor) -> Tensor:
    """psi [tokens, F/2 + 1, F]."""
    size = x.shape[1]
    return torch.stack([x * x.roll(-shift, 1) for shift in range(size // 2 + 1)], 1)


def by_pairs(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    weights = (q @ k.mT).square() + eps
    return (weights @ v) / weights.sum(1, keepdim=True)


def without_pairs(q: Tensor, k: Tensor, v: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The output, and each query's sum of weights over its mean over directions."""
    size, center = q.shape[1], v.mean(0)
    values = torch.cat([v - center, torch.ones_like(v[:, :1])], 1)
    moments = q.new_zeros(size // 2 + 1, size, values.shape[1])
    for first in range(0, len(k), 256):
        part = slice(first, first + 256)
        moments += torch.einsum("tre,tv->rev", shifts(k[part]), values[part])
    moments[1:-1] *= 2
    products, flat = shifts(q).flatten(1), moments.flatten(0, 1)
    sums = torch.zeros_like(products[:, :1]) @ flat[:1]
    for first in range(0, products.shape[1], 512):
        sums += products[:, first : first + 512] @ flat[first : first + 512]
    total = sums[:, -1:] + eps * len(k)
    share = total[:, 0] * size / (q.square().sum(1) * k.square().sum())
    return sums[:, :-1] / total + center, share


def digits() -> None:
    """Errors of float32 against float64 of both ways in torch, over many ways to lie apart."""
    torch.manual_seed(1)
    rows = []
    for M, d in ((64, 64), (16, 16), (8, 8), (32, 64)):
        for scale in (0.003, 0.01, 0.03, 0.1):
            for distance in (0, 1, 2, 4):
                for spread in (0.1, 0.5, 1.0):
                    q = spread * torch.randn(256, d) + distance
                    k, v = spread * torch.randn(4096, d) - distance, torch.randn(4096, d)
                    w1, w2 = scale * torch.randn(2, d, M)
                    exact = [feature_rows(x.double(), w1.double(), w2.double()) for x in (q, k)]
                    truth = by_pairs(*exact, v.double(), 1e-5)
                    single = [feature_rows(x, w1, w2) for x in (q, k)]
                    output, share = without_pairs(*single, v, 1e-5)
                    errors = [
                        (x.double() - truth).norm(dim=1) / truth.norm(dim=1)
                        for x in (by_pairs(*single, v, 1e-5), output)
                    ]
                    rows.append(torch.stack([share.double(), *errors], 1))
    table = torch.cat(rows)
    print("| sum of weights over its mean | queries | quadratic | 99 % | without | 99 % |")
    print("|" + "---|" * 6)
    edges = (0, 0.01, 0.03, 0.1, 0.25, 0.5, 1, 3, 10, float("inf"))
    for low, high in pairwise(edges):
        part = table[(table[:, 0] >= low) & (table[:, 0] < high)]
        if len(part) == 0:
            continue
        cells = [
            f"{x:.1e}"
            for column in (1, 2)
            for x in (part[:, column].median(), part[:, column].quantile(0.99))
        ]
        print(f"| {low:g} to {high:g} | {len(part)} | " + " | ".join(cells) + " |")


def loud_value() -> None:
    """Prints the errors where the value of one key, which queries hardly see, is large."""
    torch.manual_seed(2)
    M, d, keys = 16, 64, 4096
    w1, w2 = 0.03 * torch.randn(2, d, M)
    q, k, v = torch.randn(256, d), torch.randn(keys, d), torch.randn(keys, d)
    exact = [feature_rows(x.double(), w1.double(), w2.double()) for x in (q, k)]
    single = [feature_rows(x, w1, w2) for x in (q, k)]
    scores = (exact[0] @ exact[1].mT).square()
    quiet = scores[:, 0] < 1e-2 * scores.mean(1)
    print(f"value of one key times x, {int(quiet.sum())} queries that see under 1e-2 of it")
    print("| x | quadratic | 99 % | without | 99 % |")
    print("|" + "---|" * 5)
    for factor in (1.0, 1e2, 1e4):
        v[0] *= factor / v[0].abs().max()
        truth = by_pairs(*exact, v.double(), 1e-5)
        cells = []
        for output in (by_pairs(*single, v, 1e-5), without_pairs(*single, v, 1e-5)[0]):
            error = ((output.double() - truth).norm(dim=1) / truth.norm(dim=1))[quiet]
            cells += [f"{x:.1e}" for x in (error.median(), error.quantile(0.99))]
        print(f"| {factor:g} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the four timings")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--frequencies", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--one", type=int, nargs=3, metavar=("M", "D", "N"), help="one size, JSON")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--digits", action="store_true")
    parser.add_argument("--forget", action="store_true")
    options = parser.parse_args()
    if options.one:
        dtype = getattr(torch, options.dtype)
        time_one(*options.one, dtype, options.seconds, options.causal)
    elif options.memory:
        compare_memory(options.causal)
    elif options.digits:
        digits()
        loud_value()
    elif options.forget:
        compare_forgetting(options.frequencies, options.seconds)
    else:
        compare(options.dtype, options.frequencies, options.seconds, options.causal)


if __name__ == "__main__":
    main()
