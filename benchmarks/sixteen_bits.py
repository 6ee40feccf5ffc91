"""Products of 16 bits on the CPU: how fast and how exact, with what IKATTN_SIXTEEN_BITS asks for.

Times are best (median) of samples taken in turns, B = 1, H = 8, d = M = 64, one thread.

    export OMP_WAIT_POLICY=passive
    for bits in amx avx512_bf16 avx512_vnni none; do
        IKATTN_SIXTEEN_BITS=$bits python benchmarks/sixteen_bits.py    # half a minute each
    done
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from cpu_table import Row, both, forward, inputs, line
from timing import interleaved, processor
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ikattn

LENGTHS = (128, 512, 2048)
SECONDS = 3.0


def rivals() -> list[str]:
    rows = [
        Row(
            "bfloat16 forward / flash bfloat16",
            forward,
            scaled_dot_product_attention,
            dtype=torch.bfloat16,
        ),
        Row(
            "bfloat16 forward + backward / flash",
            both,
            scaled_dot_product_attention,
            dtype=torch.bfloat16,
        ),
    ]
    text = [line("", *(f"N={n}" for n in LENGTHS)), "|---|---|---|---|"]
    for row in rows:
        cells = (row.cell(n, SECONDS) for n in LENGTHS)
        text.append(line(row.name, *cells))
    return text


def milliseconds(calls: dict[str, Callable[[], object]]) -> list[str]:
    samples = interleaved(calls, SECONDS).values()
    return [f"{1e3 * min(x):.0f} ({1e3 * statistics.median(x):.0f})" for x in samples]


def times() -> list[str]:
    """Prints the parts of the ratios at the longest length."""
    given = inputs(LENGTHS[-1], 64, torch.bfloat16)
    text = [line(f"bfloat16, N={LENGTHS[-1]}, ms", "ikattn", "flash"), "|---|---|---|"]
    for name, compose in (("forward", forward), ("forward + backward", both)):
        calls = {
            "ikattn": compose(ikattn.implicit_kernel_attention, given, False),
            "flash": compose(scaled_dot_product_attention, given[:3], False),
        }
        text.append(line(name, *milliseconds(calls)))
    return text


def medium(dtype: torch.dtype) -> list[str]:
    """Under torch.set_float32_matmul_precision."""
    given = inputs(LENGTHS[-1], 64, dtype)
    name = str(dtype).removeprefix("torch.")
    text = [line(f"{name}, N={LENGTHS[-1]}, ms", "highest", "medium"), "|---|---|---|"]
    for name, compose in (("forward", forward), ("forward + backward", both)):
        call = compose(ikattn.implicit_kernel_attention, given, False)

        def at(precision: str, call: Callable[[], object] = call) -> Callable[[], object]:
            def run() -> object:
                torch.set_float32_matmul_precision(precision)
                return call()

            return run

        text.append(line(name, *milliseconds({name: at(name) for name in ("highest", "medium")})))
        torch.set_float32_matmul_precision("highest")
    return text


def errors() -> list[str]:
    """Root mean square against float64; in brackets float32 whose result is rounded once."""
    torch.manual_seed(0)
    tokens = [torch.randn(1, 2, 1024, 64).bfloat16() for _ in range(4)]
    frequencies = [(0.1 * torch.randn(2, 64, 64)).bfloat16() for _ in range(2)]
    incoming = tokens.pop()

    def results(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tokens + frequencies]
        output = ikattn.implicit_kernel_attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, incoming.to(dtype))]

    def error(got: Tensor, truth: Tensor) -> float:
        return float((got.double() - truth).norm() / truth.norm())

    ours, truth = results(torch.bfloat16), results(torch.float64)
    once = [x.bfloat16() for x in results(torch.float32)]
    cells = (
        f"{error(x, y):.1e} ({error(z, y):.1e})" for x, y, z in zip(ours, truth, once, strict=True)
    )
    names = ("output", "dq", "dk", "dv", "dw1", "dw2")
    return [line("", *names), "|" + "---|" * 7, line("bfloat16, N=1024", *cells)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{processor()}: {torch.ops.ikattn.sixteen_bit_instructions()}")
    parts = (rivals, times, *(partial(medium, t) for t in (torch.float32, torch.bfloat16)), errors)
    for part in parts:
        print("\n".join(part()), end="\n\n", flush=True)
